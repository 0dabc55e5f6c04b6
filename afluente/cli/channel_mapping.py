"""`afluente channel mapping`: how a generic sender's fields become facts, shown and tried before anything is sent."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from afluente.cli import files
from afluente.cli.exits import Exit
from afluente.cli.output import Format, FormatOption, say, show
from afluente.errors import Refused

if TYPE_CHECKING:
    from producers.ingest.normalize.facts import Fact, Normalized, Person

app = typer.Typer(help="See, check and change the mappings of generic senders.", no_args_is_help=True)


@app.command("list")
def list_(format: FormatOption = Format.text) -> None:
    """Show the mappings that are shipped.

    \b
    Example:
      afluente channel mapping list
    """
    from producers.ingest import mapping

    rows = []
    for name in mapping.examples():
        given = mapping.read(mapping.example(name))
        rows.append(
            {
                "name": name,
                "rules": len(given.rules),
                "proves_itself_by": f"{given.verify.by} in {given.verify.header}",
                "description": given.description,
            }
        )
    show(rows, format)


@app.command("show")
def show_(
    name: Annotated[str, typer.Argument(help="a shipped mapping, a file, or the id of a generic connection")],
) -> None:
    """Print a mapping as JSON, to be copied and changed.

    \b
    Example:
      afluente channel mapping show courier > our-courier.json
    """
    print(json.dumps(_mapping(name), indent=2, ensure_ascii=False))


@app.command("fields")
def fields(format: FormatOption = Format.text) -> None:
    """List what a mapping may hold.

    \b
    A value is {"path": "a.b[0].c"} (or that text alone), {"header": ...}, {"const": ...}, {"first": [...]} or
    {"join": [...]}, each with "map" and "default". [*] is every item of a list, @ the item of `each` or a line.
    A condition is {"path": "status", "equals": "paid"}, or with "value" for what is not a path alone.
    A time adds "form" (iso, epoch_s, epoch_ms, local with "zone"), an amount "unit" (units, minor) and
    "decimal_comma", a property "as" (text, number, amount, boolean, time, list).
    Example:
      afluente channel mapping fields
    """
    from producers.ingest.mapping import reference

    show(list(reference.fields()), format, ["field", "what", "required", "meaning"])


@app.command("check")
def check(
    name: Annotated[str, typer.Argument(help="a file with a mapping, or a shipped one; - reads stdin")],
    payloads: Annotated[
        list[str] | None, typer.Argument(help="files with sample payloads; left out: the shipped mapping's own")
    ] = None,
    header: Annotated[
        list[str] | None, typer.Option("--header", help="a header of the payloads, as name=value; may be repeated")
    ] = None,
    test: Annotated[bool, typer.Option("--test", help="as on a connection that takes test deliveries")] = False,
    country: Annotated[str, typer.Option(help="where a phone without a country's code is dialled")] = "BR",
    format: FormatOption = Format.text,
) -> None:
    """Check a mapping, and show the facts it makes of payloads. Nothing is stored or sent.

    Exits with 1 if the mapping is wrong (the field is named), 3 if it does not recognise a payload.

    \b
    Examples:
      afluente channel mapping check our-courier.json delivered.json --format json
      afluente channel mapping check yampi
    """
    from producers.ingest import mapping
    from producers.ingest.normalize import facts, normalize
    from producers.ingest.sources import generic

    given = _mapping(name)
    mapping.read(given)
    settings = {mapping.SETTING: given}
    headers = dict(_header(text) for text in header or [])
    outcomes = []
    for payload, body in _payloads(name, payloads or []):
        part = generic.SOURCE.of(settings).route(body, headers, None)[0]
        context = facts.Context(
            topic=part.topic, received_at=datetime.now(UTC), test_channel=test, country=country, settings=settings
        )
        result = normalize("generic", body, headers, context)
        outcomes.append(_outcome(payload, part.topic, part.dedupe_key, result))
    if format in (Format.json, Format.jsonl):
        show(outcomes, format)
    else:
        show([row for outcome in outcomes for row in _rows(outcome)], format)
    if not outcomes:
        say("The mapping is right. Give it a payload to see what it makes of it.")
    if any(outcome["status"] == "unrecognised" for outcome in outcomes):
        raise typer.Exit(Exit.FOUND)


@app.command("set")
def set_(
    channel: Annotated[UUID, typer.Argument(help="id of the connection")],
    name: Annotated[str, typer.Argument(help="a file with a mapping, or a shipped one; - reads stdin")],
    format: FormatOption = Format.text,
) -> None:
    """Put another mapping in the place of a connection's. What it did not recognise before can be replayed then.

    \b
    Example:
      afluente channel mapping set 4f0c7d5e-... our-courier.json && afluente webhook list --status unrecognised
    """
    from afluente import postgres
    from afluente.settings import MigrateSettings
    from producers.ingest import channels

    settings = MigrateSettings.read(os.environ)
    with postgres.connect(settings.postgres.dsn, application_name="afluente channel mapping set") as conn:
        source = channels.set_mapping(conn, channel, _mapping(name))
    show({"id": str(channel), "sender": source}, format)


def read(name: str, called: str | None = None) -> dict[str, Any]:
    """A mapping for a new connection, shipped or from a file; `called` is the name its facts get instead of its own."""
    given = _mapping(name)
    return {**given, "source": called} if called else given


def _mapping(name: str) -> dict[str, Any]:
    """A mapping by its name: a connection's, a shipped one, a file's."""
    from producers.ingest import mapping

    if name in mapping.examples():
        return mapping.example(name)
    try:
        channel_id = UUID(name)
    except ValueError:
        given = files.read_json(name, f"a file, or one of the shipped mappings: {', '.join(mapping.examples())}")
    else:
        return _of_connection(channel_id)
    if not isinstance(given, dict):
        raise Refused(f"{name} is no mapping: it must be a JSON object")
    return given


def _of_connection(channel_id: UUID) -> dict[str, Any]:
    from afluente import postgres
    from afluente.settings import MigrateSettings
    from producers.ingest import channels

    settings = MigrateSettings.read(os.environ)
    with postgres.connect(settings.postgres.dsn, application_name="afluente channel mapping") as conn:
        return channels.mapping_of(conn, channel_id)


def _payloads(name: str, given: list[str]) -> Iterator[tuple[str, bytes]]:
    """Payloads by their names: the files', or the shipped mapping's own."""
    from producers.ingest import mapping

    for file in given:
        yield file, files.read(file)
    if not given and name in mapping.examples():
        for sample, payload in mapping.samples(name).items():
            yield sample, json.dumps(payload, ensure_ascii=False).encode()


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise typer.BadParameter("give --header as name=value")
    return name.strip().lower(), value


def _outcome(payload: str, topic: str, dedupe_key: str, result: Normalized) -> dict[str, Any]:
    return {
        "payload": payload,
        "topic": topic,
        "dedupe_key": dedupe_key,
        "status": result.status,
        "reason": result.reason,
        "sender": result.source,
        "contact": _contact(result.person),
        "facts": [_fact(fact) for fact in result.facts],
    }


def _contact(person: Person | None) -> dict[str, Any] | None:
    if person is None:
        return None
    names = {f"{i.source}_id" if i.kind == "external" else i.kind: i.value for i in person.identities}
    return {**names, "name": person.name}


def _fact(fact: Fact) -> dict[str, Any]:
    """A fact with what is set of it."""
    from dataclasses import asdict

    from producers.ingest.normalize.facts import ContactEvent

    kind = {"kind": type(fact).__name__}
    if isinstance(fact, ContactEvent):
        kind["external_id"] = fact.external_id
    return kind | {name: value for name, value in asdict(fact).items() if value not in (None, (), {})}


def _rows(outcome: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One line for each fact, or one that says there is none."""
    contact = outcome["contact"] or {}
    who = next((value for name, value in contact.items() if name != "name"), None)
    for fact in outcome["facts"] or [{}]:
        event = fact.get("kind") == "ContactEvent"
        yield {
            "payload": outcome["payload"],
            "status": outcome["status"],
            "reason": outcome["reason"],
            "fact": fact.get("external_id") if event else fact.get("kind"),
            "event_type": fact.get("event_type"),
            "metric": fact.get("metric"),
            "value": fact.get("value", fact.get("total")),
            "currency": fact.get("currency"),
            "occurred_at": fact.get("occurred_at", fact.get("updated_at")),
            "contact": who,
        }
