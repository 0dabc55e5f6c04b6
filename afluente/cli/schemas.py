"""`afluente schemas`: the catalogue of events, its committed schemas, and a registry that may hold them too.

Keys of the JSON: list gives `event_type, variant, version, schema_id, name, topic, accepted_until, consumers, file`;
check gives `finding`; generate gives `file, version, schema_id`; register gives `subject, version, name, schema_id,
new`.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Annotated, Any

import typer

from afluente.cli.exits import Exit
from afluente.cli.output import Format, FormatOption, say, show
from schemas import published
from schemas.published import CONTACT_EVENT, CUSTOM, Published

app = typer.Typer(help="The events of the catalogue and their schemas.", no_args_is_help=True)

_COLUMNS = ["event_type", "variant", "version", "schema_id", "topic", "accepted_until"]


@app.command()
def check(format: FormatOption = Format.text) -> None:
    """Compare the models with the committed schemas, and every published version with its successors. Exit 3 on
    findings.

    \b
    Examples:
      afluente schemas check
      afluente schemas check --format json
    """
    from schemas import asyncapi
    from schemas.generate import AVRO_DIRECTORY, drift, incompatibilities

    findings = [*drift(AVRO_DIRECTORY), *incompatibilities(AVRO_DIRECTORY)]
    committed = AVRO_DIRECTORY.parent / asyncapi.DOCUMENT_FILE
    if not committed.exists() or committed.read_text("utf-8") != asyncapi.render():
        findings.append(f"{asyncapi.DOCUMENT_FILE} is not what the schemas say; run `afluente schemas generate`")
    show([{"finding": finding} for finding in findings], format, ["finding"])
    if findings:
        say(f"{len(findings)} findings")
        raise typer.Exit(Exit.FOUND)
    say(f"{len(published.all_published())} schemas are as the models say and compatible with each other")


@app.command()
def generate(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show what would be written, write nothing")] = False,
    format: FormatOption = Format.text,
) -> None:
    """Write the schemas that the models ask for and that are not committed yet, and the AsyncAPI document.

    Published files are never changed: a compatible change of a model becomes a new version, any other is refused
    (exit 3, nothing written).

    \b
    Examples:
      afluente schemas generate
      afluente schemas generate --dry-run
    """
    import shutil
    import tempfile
    from pathlib import Path

    from afluente.clock import SystemClock
    from schemas import asyncapi
    from schemas.errors import IncompatibleSchema
    from schemas.generate import AVRO_DIRECTORY
    from schemas.generate import generate as generate_into

    now = SystemClock().now().replace(microsecond=0)
    try:
        if dry_run:
            with tempfile.TemporaryDirectory() as scratch:
                added = generate_into(shutil.copytree(AVRO_DIRECTORY, Path(scratch) / "avro"), now)
        else:
            added = generate_into(AVRO_DIRECTORY, now)
    except IncompatibleSchema as error:
        say(f"nothing was written: {error}")
        raise typer.Exit(Exit.FOUND) from None
    if not dry_run:
        published.reload()
        document = asyncapi.render()
        committed = AVRO_DIRECTORY.parent / asyncapi.DOCUMENT_FILE
        if not committed.exists() or committed.read_text("utf-8") != document:
            committed.write_text(document, "utf-8")
    show([{"file": e.file, "version": e.version, "schema_id": e.schema_id} for e in added], format, ["file", "version"])
    say(f"{len(added)} schemas {'would be ' if dry_run else ''}written; next: afluente schemas check, then commit")


@app.command()
def register(
    url: Annotated[str | None, typer.Option("--url", help="default: SCHEMA_REGISTRY_URL")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show what is missing there, register nothing")] = False,
    format: FormatOption = Format.text,
) -> None:
    """Register every published schema with a registry (Confluent's API; subject: topic and record name).

    \b
    Examples:
      afluente schemas register --url http://localhost:8080/apis/ccompat/v7
      afluente schemas register --dry-run --format json
    """
    from afluente.kafka.schema_registry import ConfluentRegistry
    from afluente.settings import SchemasSettings
    from schemas.topics import Topics

    settings = SchemasSettings.read(os.environ)
    target = url or settings.registry.url
    if target is None:
        raise typer.BadParameter("no registry: give --url or set SCHEMA_REGISTRY_URL")
    registry = ConfluentRegistry(target, Topics(settings.topics.prefix))
    try:
        outcome = registry.register(published.all_published(), dry_run=dry_run)
    finally:
        registry.close()
    show([asdict(one) for one in outcome], format, ["subject", "version", "schema_id", "new"])
    new = sum(one.new for one in outcome)
    say(f"{new} {'would be ' if dry_run else ''}registered, {len(outcome) - new} were there already")


@app.command(name="list")
def list_(
    family: Annotated[str | None, typer.Option("--family", help="only events of this family, such as lead")] = None,
    all_versions: Annotated[bool, typer.Option("--all", help="older versions too")] = False,
    format: FormatOption = Format.text,
) -> None:
    """List the event types with the schemas that new records are written with.

    \b
    Examples:
      afluente schemas list --family contact-event
      afluente schemas list --all --format json
    """
    entries = [
        entry
        for entry in published.all_published()
        if all_versions or entry in published.current(entry.event_type, entry.variant)
    ]
    rows = [_row(entry) for entry in entries]
    if family is not None:
        rows = [row for row in rows if row["topic"] == f"events.{family}"]
    show(rows, format, None if format in (Format.json, Format.jsonl) else _COLUMNS)
    if not rows:
        say("nothing matches; families are the topics without `events.`")
        raise typer.Exit(Exit.FOUND)


@app.command(name="show")
def show_(
    event_type: Annotated[str, typer.Argument(help="such as lead.won, or a contact event type")],
    version: Annotated[str | None, typer.Option("--version", help="default: the newest")] = None,
    format: FormatOption = Format.text,
) -> None:
    """Show the fields of an event's payload; with --format json, the committed Avro schema.

    \b
    Examples:
      afluente schemas show lead.won
      afluente schemas show purchase_completed --format json
    """
    entries = [
        entry
        for entry in published.all_published()
        if event_type in (entry.event_type, entry.variant)
        and (entry.variant == "" or event_type == entry.variant)
        and version in (None, entry.version)
    ]
    if not entries:
        say(f"no published schema of {event_type} {version or ''}; next: afluente schemas list".replace(" ;", ";"))
        raise typer.Exit(Exit.FOUND)
    entry = max(entries, key=lambda e: e.order)
    if format in (Format.json, Format.jsonl):
        show(entry.schema(), format)
        return
    show(_fields(entry), format, ["field", "type", "required", "may_be_null"])
    row = _row(entry)
    say(f"{entry.event_type} {entry.variant} {entry.version}: {entry.schema()['doc']}".replace("  ", " "))
    say(f"topic {row['topic']}, schema id {entry.schema_id:#x}, consumers: {', '.join(row['consumers']) or 'none'}")


def _row(entry: Published) -> dict[str, Any]:
    from schemas.consumption import CONSUMED_BY
    from schemas.topics import Topics, family_of

    family = "custom" if entry.event_type == CUSTOM else family_of(entry.event_type)
    return {
        "event_type": entry.event_type,
        "variant": entry.variant,
        "version": entry.version,
        "schema_id": entry.schema_id,
        "name": entry.name,
        "topic": Topics().family(family),
        "accepted_until": published.accepted_until(entry.event_type, entry.variant, entry.major),
        "consumers": list(CONSUMED_BY.get(entry.event_type, ())),
        "file": entry.file,
    }


def _fields(entry: Published) -> list[dict[str, Any]]:
    payload = next(field["type"] for field in entry.schema()["fields"] if field["name"] == "payload")
    if "fields" not in payload:
        return [{"field": "*", "type": "json", "required": False, "may_be_null": True}]
    fields = [field for field in payload["fields"] if field["name"] != "extra"]
    rows = [_field(field, "") for field in fields if field["name"] != "properties" or entry.event_type != CONTACT_EVENT]
    for field in fields:
        if field["name"] == "properties" and entry.event_type == CONTACT_EVENT:
            rows += [_field(inner, "properties.") for inner in field["type"]["fields"] if inner["name"] != "extra"]
    return rows


def _field(field: dict[str, Any], path: str) -> dict[str, Any]:
    kind = field["type"]
    nullable = isinstance(kind, list)
    return {
        "field": path + field["name"],
        "type": _type_name(kind[1] if nullable else kind),
        "required": "default" not in field,
        "may_be_null": nullable,
    }


def _type_name(kind: Any) -> str:
    match kind:
        case {"type": "array", "items": items}:
            return f"list of {_type_name(items)}"
        case {"type": "map", "values": values}:
            return f"map of {_type_name(values)}"
        case {"type": "enum", "symbols": symbols}:
            return " | ".join(symbol for symbol in symbols if symbol != kind.get("default"))
        case {"type": "record", "name": name}:
            return str(name)
        case {"logicalType": logical}:
            return {"timestamp-micros": "moment", "decimal-text": "amount"}.get(logical, str(logical))
    return str(kind)
