"""`afluente emit`: commit an event through the same function as every service.

Keys of the JSON: `event_id, event_type, organization_id, entity_kind, entity_id` for each event.
"""

from __future__ import annotations

import difflib
import os
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

import typer

from afluente.cli import files
from afluente.cli.output import Format, FormatOption, say, show
from afluente.errors import Refused

app = typer.Typer(rich_markup_mode=None)

_ROWS_PER_COMMIT = 1000


@app.command()
def emit(
    event_type: Annotated[str, typer.Argument(metavar="TYPE", help="{entity}.{action}, such as lead.created")],
    org: Annotated[str, typer.Option("--org", help="the organization: its id, slug or name")],
    entity: Annotated[
        str | None, typer.Option("--entity", metavar="KIND[:UUID]", help="what it is about; default: from the type")
    ] = None,
    payload: Annotated[
        str, typer.Option("--payload", help="a JSON object; @FILE reads it from a file, - from standard input")
    ] = "{}",
    count: Annotated[int, typer.Option("--count", min=1, help="how many events, all alike but for their ids")] = 1,
    create_org: Annotated[
        bool, typer.Option("--create-org", help="make an organization of that name if there is none")
    ] = False,
    deliver_at: Annotated[
        str | None, typer.Option("--deliver-at", metavar="TIME", help="keep it until then: ISO 8601 with an offset")
    ] = None,
    idempotency_key: Annotated[
        str | None, typer.Option("--idempotency-key", help="emit once, however often this is repeated")
    ] = None,
    request_id: Annotated[str | None, typer.Option("--request-id", help="correlates with audit and webhooks")] = None,
    source: Annotated[str, typer.Option("--source", help="who says so")] = "cli",
    schema_version: Annotated[
        str | None, typer.Option("--schema-version", help="such as 1.0.0; default: the newest that fits")
    ] = None,
    format: FormatOption = Format.text,
) -> None:
    """Commit an event, as a service would. It is on its topic as soon as the relay runs.

    Types of the catalogue are checked against their schema; any other type goes to events.custom.

    \b
    Examples:
      afluente emit loyalty.earned --org Shop --create-org --payload '{"n": 5}'
      afluente emit lead.created --org Shop --payload @lead.json --count 1000
    """
    import sql
    from afluente import postgres
    from afluente.settings import MigrateSettings
    from producers import emit as emit_event
    from producers import organizations

    kind, entity_id = _entity(entity, event_type)
    content = _payload(payload)
    at = _moment(deliver_at)
    if idempotency_key is not None and count > 1:
        raise typer.BadParameter("one key is one event; leave --count out", param_hint="--idempotency-key")
    settings = MigrateSettings.read(os.environ)
    rows: list[dict[str, Any]] = []
    if meant := _catalogued(event_type):
        say(f"{event_type} is not in the catalogue: it goes to events.custom ({meant})")
    with postgres.connect(settings.postgres.dsn, application_name="afluente emit") as conn:
        organization_id = organizations.find(conn, org, create=create_org)
        for number in range(1, count + 1):
            event_id = emit_event(
                conn,
                event_type,
                entity_kind=kind,
                entity_id=entity_id,
                payload=content,
                organization_id=organization_id,
                request_id=request_id,
                source=source,
                idempotency_key=idempotency_key,
                schema_version=schema_version,
                deliver_at=at,
            )
            rows.append(
                {
                    "event_id": event_id,
                    "event_type": event_type,
                    "organization_id": organization_id,
                    "entity_kind": kind,
                    "entity_id": entity_id,
                }
            )
            if number % _ROWS_PER_COMMIT == 0:
                conn.commit()
        conn.commit()
        row = conn.execute(sql.queries("relay")["owned"]).fetchone()
        relayed = row is not None and row[0]
    if format == Format.text and count > 1:
        typer.echo(f"{rows[0]['event_id']} ... {rows[-1]['event_id']}")
    else:
        show(rows if count > 1 else rows[0], format)
    if at:
        say(f"{count} committed; kept until {at.isoformat()}")
    else:
        say(f"{count} committed; " + ("a relay runs, and publishes it" if relayed else "next: afluente relay run"))


def _catalogued(event_type: str) -> str | None:
    """For a type outside the catalogue that looks as if it was meant to be in it: what there is instead."""
    from schemas import published

    known = sorted(published.event_types())
    if event_type in known:
        return None
    if close := difflib.get_close_matches(event_type, known, n=1, cutoff=0.8):
        return f"did you mean {close[0]}?"
    entity = event_type.partition(".")[0]
    if family := [each for each in known if each.partition(".")[0] == entity]:
        return f"in it are {', '.join(family)}"
    return None


def _entity(entity: str | None, event_type: str) -> tuple[str, UUID | None]:
    kind, _, given = (entity or event_type.partition(".")[0]).partition(":")
    try:
        return kind, UUID(given) if given else None
    except ValueError:
        raise typer.BadParameter(f"{given!r} is not a UUID", param_hint="--entity") from None


def _payload(text: str) -> dict[str, Any]:
    try:
        is_file = text == "-" or text.startswith("@")
        value = files.as_json(files.read(text.removeprefix("@")) if is_file else text, "it")
    except Refused as error:
        raise typer.BadParameter(str(error), param_hint="--payload") from None
    if not isinstance(value, dict):
        raise typer.BadParameter(f"must be a JSON object, not {type(value).__name__}", param_hint="--payload")
    return value


def _moment(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not ISO 8601", param_hint="--deliver-at") from None
    if moment.utcoffset() is None:
        raise typer.BadParameter("has no offset: add Z or -03:00", param_hint="--deliver-at")
    return moment
