"""`afluente tail`: events as they pass on the topics, decoded.

Keys of the JSON lines: `topic, partition, offset, event_id, event_type, organization_id, entity_kind, entity_id,
created_at, payload, metadata`; for bytes that are no event `topic, partition, offset, error`.
"""

from __future__ import annotations

import json
import os
import secrets
from typing import Annotated, Any
from uuid import UUID

import typer

from afluente.cli.exits import Exit
from afluente.cli.output import Format, FormatOption, say, show
from afluente.cli.registry import use_registry

app = typer.Typer()

POLL_S = 0.2


@app.command()
def tail(
    topic: Annotated[
        list[str] | None, typer.Option("--topic", help="a topic's full name; may be repeated. Default: every events.*")
    ] = None,
    event_type: Annotated[
        list[str] | None, typer.Option("--type", help="only of this event type; may be repeated")
    ] = None,
    org: Annotated[str | None, typer.Option("--org", help="only of this organization: its id, slug or name")] = None,
    from_start: Annotated[bool, typer.Option("--from-start", help="begin with what is on the topics already")] = False,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="end after so many events")] = None,
    format: FormatOption = Format.text,
) -> None:
    """Show events as they pass, until Ctrl-C. It reads what is committed, joins no worker's group and commits nothing.

    \b
    Examples:
      afluente tail --type lead.won
      afluente tail --topic events.custom --from-start --limit 1 --format json
    """
    from confluent_kafka import KafkaError, KafkaException

    from afluente import kafka
    from afluente.errors import Refused
    from afluente.settings import KafkaSettings
    from schemas.topics import Topics

    settings = KafkaSettings.read(os.environ)
    use_registry(settings.topic_prefix)
    organization_id = _organization(org) if org else None
    topics = topic or list(Topics(settings.topic_prefix).families())
    if missing := set(topics) - set(kafka.admin(settings).list_topics(timeout=10).topics):
        raise Refused(f"there is no topic {', '.join(sorted(missing))}", hint="afluente topics list")
    consumer = kafka.consumer(
        settings,
        f"tail-{secrets.token_hex(4)}",  # a group of its own each time: it takes no partition from anybody
        auto_offset_reset="earliest" if from_start else "latest",
    )
    consumer.subscribe(topics)
    seen = 0
    if format != Format.json:
        say("waiting for events; Ctrl-C ends")
    try:
        while limit is None or seen < limit:
            record = consumer.poll(POLL_S)
            if record is None:
                continue
            if (error := record.error()) is not None:
                if error.code() in (KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT):
                    continue  # it reconnects
                raise KafkaException(error)
            row = _row(record)
            if event_type and row.get("event_type") not in event_type:
                continue
            if organization_id is not None and row.get("organization_id") != organization_id:
                continue
            seen += 1
            _print(row, format)
    except KeyboardInterrupt:
        raise typer.Exit(Exit.INTERRUPTED) from None
    finally:
        consumer.close()


def _organization(word: str) -> UUID:
    """An id is known as it is, and needs no database."""
    from afluente import postgres
    from afluente.settings import PostgresSettings
    from producers import organizations

    if (known := organizations.as_id(word)) is not None:
        return known
    with postgres.connect(PostgresSettings.read(os.environ).dsn, application_name="afluente tail") as conn:
        return organizations.find(conn, word)


def _row(record: Any) -> dict[str, Any]:
    import schemas

    place = {"topic": record.topic(), "partition": record.partition(), "offset": record.offset()}
    try:
        event = schemas.decode(record.value() or b"")
    except schemas.DecodeError as error:
        return place | {"error": str(error)}
    return place | {
        "event_id": event.id,
        "event_type": event.event_type,
        "organization_id": event.organization_id,
        "entity_kind": event.entity_kind,
        "entity_id": event.entity_id,
        "created_at": event.created_at,
        "payload": event.payload,
        "metadata": event.metadata,
    }


def _print(row: dict[str, Any], format: Format) -> None:
    if format != Format.text:
        show(row, Format.jsonl if format == Format.json else format)
        return
    place = f"{row['topic']}[{row['partition']}]@{row['offset']}"
    if "error" in row:
        print(f"{place:<30} not an event: {row['error']}")
    else:
        payload = json.dumps(row["payload"], ensure_ascii=False)
        at = row["created_at"].astimezone().strftime("%H:%M:%S")
        print(f"{place:<30} {at} {row['event_type']:<28} {row['organization_id']} {payload}", flush=True)
