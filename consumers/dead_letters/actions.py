"""What people do with dead letters.

Reprocessing copies first and closes after: under the lock of the delivery's row the copy goes to the worker's
`retry.now`, and the row is opened under the next generation only when the broker has it. A crash in between leaves
the letter dead and a copy whose generation no row has, which the worker finishes as a duplicate. The event's own
topic is never written to: other workers do not see a thing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import orjson
from confluent_kafka import KafkaError, KafkaException, Message, Producer
from psycopg import Connection

import sql
from afluente import faults, kafka
from afluente.settings import KafkaSettings
from consumers.dead_letters.letters import Letter, Undecodable, records_of
from consumers.runtime import records
from schemas.topics import Topics

_AT_ONCE = 200  # letters in one transaction: their rows are locked while their copies are on the way
_FLUSH_S = 60.0


@dataclass(slots=True)
class Outcome:
    """What was done. `failed` says for each letter that was not, why."""

    done: list[str] = field(default_factory=list)
    failed: list[dict[str, str]] = field(default_factory=list)


def reprocess(
    conn: Connection[Any],
    settings: KafkaSettings,
    letters: Sequence[Letter | Undecodable],
    *,
    actor: str,
    reason: str,
    now: datetime,
) -> Outcome:
    """Give letters to their own worker and target again, attempts counted from 1. `conn` is `afluente_worker`,
    autocommit.

    A letter that changed since it was listed, or whose record is nowhere any more, is in `failed`. KafkaException or
    psycopg.Error end it in the middle: what is done is committed, the rest is as before.
    """
    outcome = Outcome()
    producer = kafka.producer(settings, message_max_bytes=4_000_000)
    for batch in _batches([letter for letter in letters if isinstance(letter, Letter)]):
        _reprocess_batch(conn, settings, producer, batch, outcome, actor, reason, now)
    for unread in _batches([letter for letter in letters if isinstance(letter, Undecodable)]):
        _reprocess_undecodable(conn, settings, producer, unread, outcome)
    return outcome


def _reprocess_batch(
    conn: Connection[Any],
    settings: KafkaSettings,
    producer: Producer,
    letters: Sequence[Letter],
    outcome: Outcome,
    actor: str,
    reason: str,
    now: datetime,
) -> None:
    topics = Topics(settings.topic_prefix)
    copies = records_of(settings, conn, letters)
    with conn.transaction():
        locked = _lock(conn, letters, outcome)
        errors: list[KafkaError] = []
        opened: list[Letter] = []
        for i in locked:
            letter, record = letters[i], copies[i]
            if record is None:
                outcome.failed.append({"id": letter.id, "error": "its record is neither in Kafka nor in event_log"})
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
                generation=letter.generation + 1,
                attempt=1,
            )
            _produce(producer, topics.retry(letter.worker, "now"), record, headers, errors)
            opened.append(letter)
        _flush(producer, errors)
        faults.point("dlq.after_copy")
        conn.execute(sql.queries("deliveries")["reopen"], {"items": _places(opened), "now": records.whole_ms(now)})
        _audit(conn, opened, "dead_letter.reprocessed", actor, reason)
    outcome.done += [letter.id for letter in opened]


def _reprocess_undecodable(
    conn: Connection[Any],
    settings: KafkaSettings,
    producer: Producer,
    letters: Sequence[Undecodable],
    outcome: Outcome,
) -> None:
    """As a source record again: a schema that was unknown then may be known now."""
    topics = Topics(settings.topic_prefix)
    copies = records_of(settings, conn, letters)
    with conn.transaction():
        errors: list[KafkaError] = []
        closed = []
        for letter, record in zip(letters, copies, strict=True):
            if record is None:
                outcome.failed.append({"id": letter.id, "error": "its record is no longer in Kafka"})
                continue
            headers = [(name, value) for name, value in record.headers if name not in records.OURS]
            _produce(producer, topics.retry(letter.worker, "now"), record, headers, errors)
            closed.append(letter)
        _flush(producer, errors)
        outcome.done += _close(conn, closed, "reprocessed")


def discard(conn: Connection[Any], letters: Sequence[Letter | Undecodable], *, actor: str, reason: str) -> Outcome:
    """Close letters for good; their records stay in the dead-letter topic until they expire. `conn` is autocommit."""
    outcome = Outcome()
    for batch in _batches([letter for letter in letters if isinstance(letter, Letter)]):
        with conn.transaction():
            closed = [batch[i] for i in _lock(conn, batch, outcome)]
            conn.execute(sql.queries("deliveries")["discard"], {"items": _places(closed)})
            _audit(conn, closed, "dead_letter.discarded", actor, reason)
        outcome.done += [letter.id for letter in closed]
    for unread in _batches([letter for letter in letters if isinstance(letter, Undecodable)]):
        with conn.transaction():
            outcome.done += _close(conn, unread, "discarded")
    return outcome


def _lock(conn: Connection[Any], letters: Sequence[Letter], outcome: Outcome) -> list[int]:
    items = orjson.dumps(
        [
            {
                "i": i,
                "event_created_at": letter.event_created_at,
                "worker": letter.worker,
                "event_id": letter.event_id,
                "target": letter.target,
                "generation": letter.generation,
            }
            for i, letter in enumerate(letters)
        ]
    ).decode()
    locked = sorted(i for (i,) in conn.execute(sql.queries("deliveries")["lock_dead"], {"items": items}))
    for i in sorted(set(range(len(letters))) - set(locked)):
        outcome.failed.append({"id": letters[i].id, "error": "is no longer a dead letter: someone else was faster"})
    return locked


def _close(conn: Connection[Any], letters: Sequence[Undecodable], state: str) -> list[str]:
    items = orjson.dumps(
        [
            {
                "worker": letter.worker,
                "topic": letter.topic,
                "partition": letter.partition,
                "record_offset": letter.record_offset,
                "record_timestamp": letter.record_timestamp,
            }
            for letter in letters
        ]
    ).decode()
    closed = conn.execute(sql.queries("deliveries")["close_undecodable"], {"items": items, "state": state})
    return [f"{worker}@{topic}/{partition}/{offset}" for worker, topic, partition, offset in closed]


def _audit(conn: Connection[Any], letters: Sequence[Letter], action: str, actor: str, reason: str) -> None:
    items = [
        {
            "organization_id": letter.organization_id,
            "event_id": letter.event_id,
            "details": {
                "worker": letter.worker,
                "target": letter.target,
                "generation": letter.generation,
                "error_class": letter.error_class,
                "reason": reason,
            },
        }
        for letter in letters
    ]
    parameters = {"items": orjson.dumps(items).decode(), "action": action, "actor": actor[:255]}
    conn.execute(sql.queries("deliveries")["audit"], parameters)


def _produce(
    producer: Producer, topic: str, record: records.Record, headers: records.Headers, errors: list[KafkaError]
) -> None:
    def report(error: KafkaError | None, _: Message) -> None:
        if error is not None:
            errors.append(error)

    while True:
        try:
            producer.produce(topic, value=record.value, key=record.key, headers=list(headers), on_delivery=report)
            return
        except BufferError:
            producer.poll(0.1)


def _flush(producer: Producer, errors: list[KafkaError]) -> None:
    """Nothing is closed unless every copy is there."""
    left = producer.flush(_FLUSH_S)
    if errors:
        raise KafkaException(errors[0])
    if left:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, f"{left} copies were not confirmed in {_FLUSH_S:.0f} s"))


def _places(letters: Sequence[Letter]) -> str:
    return orjson.dumps(
        [
            {
                "event_created_at": letter.event_created_at,
                "worker": letter.worker,
                "event_id": letter.event_id,
                "target": letter.target,
            }
            for letter in letters
        ]
    ).decode()


def _batches(letters: list[Any]) -> Iterator[list[Any]]:
    for start in range(0, len(letters), _AT_ONCE):
        yield letters[start : start + _AT_ONCE]
