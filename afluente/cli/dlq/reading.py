"""`afluente dlq list`, `causes` and `show`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from afluente.cli.dlq.choosing import Asked, Limit, connect, filtered, named
from afluente.cli.exits import Exit
from afluente.cli.output import Format, FormatOption, say, show
from afluente.cli.registry import use_registry
from afluente.errors import Unavailable

if TYPE_CHECKING:
    from afluente.cli.dlq.choosing import AnyLetter
    from consumers.dead_letters import RelayLetter

_RELAY_TIMEOUT_S = 3.0  # the list of the workers' letters is there without Kafka
_COLUMNS = ("id", "event_type", "generation", "attempts", "error", "first_failure_at", "dead_at", "record")
_CAUSES = ("cause", "letters", "organizations", "worker", "event_type", "error", "first_seen_at", "last_seen_at")


@filtered
def list_(asked: Asked, limit: Limit = 100, format: FormatOption = Format.text) -> None:
    """List dead letters, the newest first. Exit status 3 when there is none.

    JSON keys: id, kind (delivery, undecodable, relay), worker, event_id, target, organization_id, event_type, state,
    attempts, generation, edited, error_class, error, first_failure_at, dead_at, origin {topic, partition, offset},
    dead_letter {topic, partition, offset}; of the relay also decision {id, state, by, at, reason, answered_at,
    outcome}.
    `generation` counts how often it was given back. The relay's that are not settled: dead, requested (it is to publish
    them again), gone (it could not: no row).

    \b
    Examples:
      afluente dlq list --worker webhook-dispatch-worker --since 2h
      afluente dlq list --relay --format json
    """
    from afluente.settings import KafkaSettings
    from consumers import dead_letters

    with connect() as conn:
        if asked.of_relay:
            wanted = asked.filter(conn, limit, dead_letters.relay.OPEN)
            found = dead_letters.relay.find(conn, KafkaSettings.read(os.environ), wanted, states=wanted.states)
            rows = [described(letter) for letter in found]
        else:
            wanted = asked.filter(conn, limit)
            rows = [described(letter) for letter in dead_letters.find(conn, wanted)]
            rows += [described(letter) for letter in dead_letters.find_undecodable(conn, wanted)]
            rows = sorted(rows, key=lambda row: row["dead_at"], reverse=True)[:limit]
    columns = (*_COLUMNS, "state") if asked.of_relay or asked.state else _COLUMNS
    show(_short(rows) if format == Format.text else rows, format, columns if format == Format.text else None)
    more = ""
    if not (asked.of_relay or asked.is_narrow) and (of_the_relay := _of_the_relay()):
        more = f", and {of_the_relay} of the relay: afluente dlq list --relay"
    if not rows:
        say("no dead letters" + (" of workers" if more else "") + more)
        raise typer.Exit(Exit.FOUND)
    limited = " (the limit)" if len(rows) == limit else ""
    say(f"{len(rows)} dead letter{'s' if len(rows) > 1 else ''}{limited}{more}")
    say(f"next: afluente dlq show {rows[0]['id']}" + ("; afluente dlq causes" if len(rows) > 1 else ""))


@filtered
def causes(asked: Asked, limit: Limit = 100, format: FormatOption = Format.text) -> None:
    """Group dead letters by cause, the most frequent first: thousands of them are a few errors.

    A cause is a worker, an event type, an error's class and its text without what varies: numbers, ids, times, quoted
    values, the queries of URLs. Exit status 3 when there is none. JSON keys: cause (for --cause of the other commands),
    worker, event_type, error_class, message, letters, organizations, first_seen_at, last_seen_at, example.

    \b
    Examples:
      afluente dlq causes --since 2h
      afluente dlq retry --cause c1-0f3a9c2b7d10 --probe --reason "receiver is back"
    """
    from dataclasses import asdict, replace

    from afluente.settings import KafkaSettings
    from consumers import dead_letters

    with connect() as conn:
        if asked.of_relay:
            wanted = asked.filter(conn, limit, dead_letters.relay.OPEN)
            settings = KafkaSettings.read(os.environ)
            every = replace(wanted, limit=2**31)
            found = dead_letters.relay.find(conn, settings, every, states=wanted.states)
            grouped = dead_letters.relay.causes(conn, found)[:limit]
        else:
            grouped = dead_letters.causes(conn, asked.filter(conn, limit))
    rows = [asdict(cause) for cause in grouped]
    if format == Format.text:
        rows = [row | {"error": f"{row['error_class']}: {row['message']}"[:120]} for row in rows]
    show(rows, format, _CAUSES if format == Format.text else None)
    if not rows:
        say("no dead letters")
        raise typer.Exit(Exit.FOUND)
    letters = sum(cause.letters for cause in grouped)
    limited = " (the limit)" if len(rows) == limit else ""
    say(f"{len(rows)} cause{'s' * (len(rows) > 1)}{limited} of {letters:,} dead letter{'s' * (letters > 1)}")
    say(f"next: afluente dlq show {rows[0]['example']}; afluente dlq retry --cause {rows[0]['cause']} --probe")


def show_(
    id: Annotated[str, typer.Argument(help="an id as listed, or an event id", metavar="ID")],
    format: FormatOption = Format.text,
) -> None:
    """Show one dead letter with its event, or with its bytes when they are no event.

    JSON keys: those of `list`, and record {topic, partition, offset} where it was found (topic event_log: made again
    from there; null: nowhere any more), history [{at, by, action, details}], headers, event {…} or value_hex; of the
    relay's the row {…} or null, and decisions.

    \b
    Examples:
      afluente dlq show webhook-normalize-worker:0199c0de-0000-7000-8000-000000000000
      afluente dlq show relay@relay.dead-letter/0/12 --format json
    """
    import schemas
    from afluente.settings import KafkaSettings
    from consumers import dead_letters

    settings = KafkaSettings.read(os.environ)
    use_registry(settings.topic_prefix)
    with connect() as conn:
        rows = []
        for letter in named(conn, [id], states=dead_letters.STATES):
            if isinstance(letter, dead_letters.RelayLetter):
                rows.append(_shown_of_relay(conn, letter))
                continue
            row = described(letter)
            record = dead_letters.record_of(settings, conn, letter)
            row["record"] = record and {"topic": record.topic, "partition": record.partition, "offset": record.offset}
            row["history"] = dead_letters.history_of(conn, letter)
            row["headers"] = {
                name: (value or b"").decode("utf-8", "replace") for name, value in (record.headers if record else ())
            }
            row["event"] = row["value_hex"] = None
            if record is not None:
                try:
                    row["event"] = dead_letters.described_event(schemas.decode(record.value or b""))
                except schemas.SchemaError:
                    row["value_hex"] = (record.value or b"").hex()
            rows.append(row)
    if format == Format.text:
        for number, row in enumerate(rows):
            print("\n" * (number > 0), end="")
            _print(row)
    else:
        show(rows[0] if len(rows) == 1 else rows, format)
    say(f"next: afluente dlq retry {rows[0]['id']} --dry-run")


def described(letter: AnyLetter) -> dict[str, Any]:
    """A row of any letter, with the name of its dead-letter topic."""
    from afluente.settings import TopicPrefixSettings
    from consumers import dead_letters
    from schemas.topics import Topics

    if isinstance(letter, dead_letters.RelayLetter):
        row, topic = dead_letters.relay.described(letter), letter.topic
    else:
        row = dead_letters.described(letter)
        topic = Topics(TopicPrefixSettings.read(os.environ).prefix).dead_letter(letter.worker)
    row["dead_letter"] = {"topic": topic} | row["dead_letter"]
    return row


def _shown_of_relay(conn: Any, letter: RelayLetter) -> dict[str, Any]:
    from afluente.settings import KafkaSettings
    from consumers import dead_letters

    settings = KafkaSettings.read(os.environ)
    return described(letter) | {
        "row": dead_letters.relay.value_of(settings, letter).get("row"),
        "decisions": dead_letters.relay.history_of(conn, settings, letter),
    }


def _print(row: dict[str, Any]) -> None:
    """One letter for a person to read: what happened, each header on a line, the event as JSON."""
    if row["kind"] == "relay":
        show({name: value for name, value in row.items() if name not in ("row", "decisions", "decision")})
        print("\ndecisions")
        show(row["decisions"], columns=["state", "by", "at", "reason", "outcome"])
        print("\nrow" if row["row"] is not None else "\nthe letter holds no row, only where it is: in event_log")
        if row["row"] is not None:
            show(row["row"], Format.json)
        return
    event, headers = row["event"], row["headers"]
    show({name: value for name, value in row.items() if name not in ("event", "headers", "value_hex", "history")})
    if row["history"]:
        print("\nhistory")
        show([entry | {"reason": entry["details"].get("reason")} for entry in row["history"]],
             columns=["at", "by", "action", "reason"])  # fmt: skip
    print("\nheaders")
    width = max(map(len, headers), default=0)
    for name, value in headers.items():
        print(f"  {name:<{width}}  {' '.join(value.split())}".rstrip())
    if event is not None:
        print("\nevent")
        show(event, Format.json)
    elif row["value_hex"] is not None:
        print(f"\nvalue (hex)\n{row['value_hex']}")
    else:
        print("\nits record is neither in Kafka nor in event_log")


def _of_the_relay(limit: int = 1000) -> str:
    """How many letters of the relay are not settled; '' for none, or when Kafka does not say it soon."""
    from confluent_kafka import KafkaException

    from afluente import kafka
    from afluente.errors import SettingsError
    from afluente.settings import KafkaSettings
    from consumers.dead_letters import Filter, relay
    from schemas.topics import Topics

    try:
        settings = KafkaSettings.read(os.environ)
        topic = Topics(settings.topic_prefix).relay_dead_letter
        if topic not in kafka.admin(settings).list_topics(timeout=_RELAY_TIMEOUT_S).topics:
            return ""
        with connect() as conn:
            count = len(relay.find(conn, settings, Filter(limit=limit), stall_s=_RELAY_TIMEOUT_S))
    except (SettingsError, Unavailable, KafkaException):
        return ""
    return "" if not count else f"{count:,}" if count < limit else f"{limit:,} or more"


def _short(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For a terminal: the error on one line, within reason, and where its record is."""
    short = []
    for row in rows:
        place = row["dead_letter"]
        where = "event_log" if place["offset"] is None else "/".join(str(part) for part in place.values())
        error = " ".join(f"{row['error_class']}: {row['error']}".split())[:100]
        short.append(row | {"error": error, "record": where})
    return short
