"""What people do with dead letters.

Reprocessing copies first and closes after: under the lock of the delivery's row the copy goes to the worker's
`retry.now`, and the row is opened under the next generation only when the broker has it. A crash in between leaves
the letter dead and a copy whose generation no row has, which the worker finishes as a duplicate. The event's own
topic is never written to: other workers do not see a thing.

Each action is written down in the transaction that does it: who, what, why.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import orjson
from psycopg import Connection

import schemas
import sql
from afluente import faults
from afluente.settings import KafkaSettings
from consumers.dead_letters.letters import Letter, Undecodable, described, described_event, records_of
from consumers.dead_letters.sending import Copies, Copy, Outcome, Pace
from consumers.runtime import records
from consumers.runtime.records import Record
from schemas.topics import Topics

_QUERIES = sql.queries("dead_letters")

Details = Mapping[str, Any]


def reprocess(
    conn: Connection[Any],
    settings: KafkaSettings,
    letters: Sequence[Letter | Undecodable],
    *,
    actor: str,
    reason: str,
    now: datetime,
    pace: Pace | None = None,
) -> Outcome:
    """Give letters to their own worker and target again, attempts counted from 1. `conn` is `afluente_worker`,
    autocommit.

    A letter that changed since it was listed, or whose record is nowhere any more or too large, is in `failed`.
    KafkaException or psycopg.Error end it in the middle: what is done is committed, the rest is as before.
    """
    outcome, pace = Outcome(), pace or Pace()
    if not letters:
        return outcome
    copies = Copies(settings, (letter.worker for letter in letters), pace.stop)
    for batch in pace.batches([letter for letter in letters if isinstance(letter, Letter)], outcome):
        give(conn, settings, copies, batch, records_of(settings, conn, batch), outcome, actor, reason, now)
    for unread in pace.batches([letter for letter in letters if isinstance(letter, Undecodable)], outcome):
        give_undecodable(conn, settings, copies, unread, records_of(settings, conn, unread), outcome, actor, reason)
    return outcome


def give(
    conn: Connection[Any],
    settings: KafkaSettings,
    copies: Copies,
    letters: Sequence[Letter],
    found: Sequence[Record | None],
    outcome: Outcome,
    actor: str,
    reason: str,
    now: datetime,
    *,
    generations: int = 1,
    edited: bytes | None = None,
    action: str = "dead_letter.reprocessed",
    details: Details | None = None,
) -> None:
    """One transaction. `generations`: how far the copy's is beyond the letter's; `edited`: the sha256 of a value that
    is not the event's."""
    topics = Topics(settings.topic_prefix)
    with conn.transaction():
        sent: list[Letter] = []
        on_the_way: list[Copy] = []
        for i in _lock(conn, "lock", letters, outcome):
            letter, record = letters[i], found[i]
            if record is None:
                outcome.fail(letter.id, _gone(letter))
                continue
            origin = records.origin_of(record)
            if letter.origin_topic is not None:
                origin = records.Origin(
                    letter.origin_topic, letter.origin_partition or 0, letter.origin_offset or 0, origin.timestamp_ms
                )
            headers = records.marked_headers(
                record.headers,
                worker=letter.worker,
                origin=origin,
                event_id=letter.event_id,
                target=letter.target,
                generation=letter.generation + generations,
                attempt=1,
            )
            on_the_way.append(Copy(topics.retry(letter.worker, "now"), record.key, record.value, headers))
            sent.append(letter)
        opened = _arrived(copies, sent, on_the_way, outcome)
        faults.point("dlq.after_copy")
        items = [
            _place(letter)
            | {"generation": letter.generation + generations, "edited": None if edited is None else edited.hex()}
            for letter in opened
        ]
        conn.execute(_QUERIES["reopen"], {"items": _json(items), "now": records.whole_ms(now)})
        audit(conn, opened, action, actor, reason, details)
    outcome.done += [letter.id for letter in opened]


def give_undecodable(
    conn: Connection[Any],
    settings: KafkaSettings,
    copies: Copies,
    letters: Sequence[Undecodable],
    found: Sequence[Record | None],
    outcome: Outcome,
    actor: str,
    reason: str,
    *,
    action: str = "dead_letter.reprocessed",
    details: Details | None = None,
) -> None:
    """As source records again: a schema that was unknown then may be known now. One transaction."""
    topics = Topics(settings.topic_prefix)
    with conn.transaction():
        sent: list[Undecodable] = []
        on_the_way: list[Copy] = []
        for i in _lock(conn, "lock_undecodable", letters, outcome):
            letter, record = letters[i], found[i]
            if record is None:
                outcome.fail(letter.id, "its record is no longer in Kafka")
                continue
            headers = [(name, value) for name, value in record.headers if name not in records.OURS]
            on_the_way.append(Copy(topics.retry(letter.worker, "now"), record.key, record.value, headers))
            sent.append(letter)
        closed = _arrived(copies, sent, on_the_way, outcome)
        faults.point("dlq.after_copy")
        items = [_place_undecodable(letter) for letter in closed]
        conn.execute(_QUERIES["close_undecodable"], {"items": _json(items), "state": "reprocessed"})
        audit(conn, closed, action, actor, reason, details)
    outcome.done += [letter.id for letter in closed]


def discard(
    conn: Connection[Any],
    letters: Sequence[Letter | Undecodable],
    *,
    actor: str,
    reason: str,
    pace: Pace | None = None,
) -> Outcome:
    """Close letters for good; their records stay in the dead-letter topic until they expire. `conn` is autocommit."""
    outcome, pace = Outcome(), pace or Pace()
    for batch in pace.batches([letter for letter in letters if isinstance(letter, Letter)], outcome):
        with conn.transaction():
            closed = [batch[i] for i in _lock(conn, "lock", batch, outcome)]
            conn.execute(_QUERIES["discard"], {"items": _json([_place(letter) for letter in closed])})
            audit(conn, closed, "dead_letter.discarded", actor, reason)
        outcome.done += [letter.id for letter in closed]
    for unread in pace.batches([letter for letter in letters if isinstance(letter, Undecodable)], outcome):
        with conn.transaction():
            shut = [unread[i] for i in _lock(conn, "lock_undecodable", unread, outcome)]
            items = _json([_place_undecodable(letter) for letter in shut])
            conn.execute(_QUERIES["close_undecodable"], {"items": items, "state": "discarded"})
            audit(conn, shut, "dead_letter.discarded", actor, reason)
        outcome.done += [letter.id for letter in shut]
    return outcome


def export(
    conn: Connection[Any],
    settings: KafkaSettings,
    batches: Iterable[Sequence[Letter | Undecodable]],
    write: Callable[[dict[str, Any]], None],
    *,
    actor: str,
    reason: str,
    pace: Pace | None = None,
) -> Outcome:
    """Give out letters whole: what `described` says, key_base64, value_base64, headers [[name, base64]], and event when
    the bytes are one. That a letter was given out is written down before it is. `conn` is autocommit.

    `failed`: those whose record is nowhere any more; they are given out without it.
    """
    outcome, pace = Outcome(), pace or Pace()
    for letters in batches:
        for batch in pace.batches(letters, outcome):
            found = records_of(settings, conn, batch)
            with conn.transaction():
                audit(conn, batch, "dead_letter.exported", actor, reason)
            for letter, record in zip(batch, found, strict=True):
                write(described(letter) | _whole(record))
                outcome.done.append(letter.id)
                if record is None:
                    outcome.fail(letter.id, _gone(letter))
        if outcome.left:
            break
    return outcome


def audit(
    conn: Connection[Any],
    letters: Sequence[Letter | Undecodable],
    action: str,
    actor: str,
    reason: str,
    details: Details | None = None,
) -> None:
    """In the caller's transaction: what was done to these letters."""
    events, unread = [], []
    for letter in letters:
        about = {"worker": letter.worker, "error_class": letter.error_class, "reason": reason} | dict(details or {})
        if isinstance(letter, Letter):
            about |= {"target": letter.target, "generation": letter.generation}
            ids = {"organization_id": letter.organization_id, "event_id": letter.event_id}
            events.append(ids | {"details": about})
        else:
            unread.append(_place_undecodable(letter) | {"details": about})
            if "organization_id" in about:  # it became an event, and somebody's
                ids = {"organization_id": about["organization_id"], "event_id": about["event_id"]}
                events.append(ids | {"details": about})
    for name, items in (("audit", events), ("audit_undecodable", unread)):
        if items:
            conn.execute(_QUERIES[name], {"items": _json(items), "action": action, "actor": actor[:255]})


def _lock(conn: Connection[Any], name: str, letters: Sequence[Letter | Undecodable], outcome: Outcome) -> list[int]:
    """The numbers of those that are still as they were listed."""
    items: list[dict[str, Any]] = []
    for i, letter in enumerate(letters):
        if isinstance(letter, Letter):
            items.append(_place(letter) | {"generation": letter.generation, "i": i})
        else:
            items.append(_place_undecodable(letter) | {"i": i})
    locked = sorted(i for (i,) in conn.execute(_QUERIES[name], {"items": _json(items)}))
    for i in sorted(set(range(len(letters))) - set(locked)):
        outcome.fail(letters[i].id, "is no longer a dead letter: someone else was faster")
    return locked


def _arrived(copies: Copies, letters: list[Any], on_the_way: list[Copy], outcome: Outcome) -> list[Any]:
    """Send the copies; the letters whose copy the broker has."""
    there = []
    for letter, answer in zip(letters, copies.send(on_the_way), strict=True):
        if isinstance(answer, str):
            outcome.fail(letter.id, answer)
        else:
            outcome.places[letter.id] = answer
            there.append(letter)
    return there


def _gone(letter: Letter | Undecodable) -> str:
    if isinstance(letter, Undecodable):
        return "its record is no longer in Kafka"
    if letter.edited_sha256 is not None:
        return "its edited record is no longer in Kafka (the event as it was: afluente relay replay --again)"
    return "its record is neither in Kafka nor in event_log"


def _whole(record: Record | None) -> dict[str, Any]:
    if record is None:
        return {"key_base64": None, "value_base64": None, "headers": [], "event": None}
    try:
        event = described_event(schemas.decode(record.value or b""))
    except schemas.SchemaError:
        event = None
    return {
        "key_base64": _base64(record.key),
        "value_base64": _base64(record.value),
        "headers": [[name, _base64(value)] for name, value in record.headers],
        "event": event,
    }


def _base64(data: bytes | None) -> str | None:
    return None if data is None else b64encode(data).decode()


def _place(letter: Letter) -> dict[str, Any]:
    return {
        "event_created_at": letter.event_created_at,
        "worker": letter.worker,
        "event_id": letter.event_id,
        "target": letter.target,
    }


def _place_undecodable(letter: Undecodable) -> dict[str, Any]:
    return {
        "worker": letter.worker,
        "topic": letter.topic,
        "partition": letter.partition,
        "record_offset": letter.record_offset,
        "record_timestamp": letter.record_timestamp,
    }


def _json(items: Sequence[Mapping[str, Any]]) -> str:
    return orjson.dumps(items).decode()
