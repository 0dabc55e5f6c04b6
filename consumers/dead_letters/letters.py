"""What dead letters there are, and the records they are made of.

A letter is a row of event_delivery whose state is dead (or needs_review), with its record in the worker's dead-letter
topic, and in event_log when the topic has let it go. Records that are no event are listed beside them, by their place.
A letter that did not fit its topic says there only where its record is (`x-omitted`): it is read from that place. The
record of a letter that a person has edited is the one whose value has the digest in its row, and no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from hashlib import sha256
from typing import Any
from uuid import UUID

from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, KafkaError, KafkaException, TopicPartition
from psycopg import Connection

import schemas
import sql
from afluente import kafka
from afluente.settings import KafkaSettings
from consumers.runtime.records import OMITTED, Headers, Record
from schemas.topics import Topics

_READ_TIMEOUT_S = 10.0
_SKIP = 1000  # further ahead than this a seek is cheaper than reading on

DEAD = ("dead", "needs_review")
STATES = (*DEAD, "discarded", "reprocessed")
"""What a filter may ask for; reprocessed: of records that are no event, which are then letters anew or events."""

_QUERIES = sql.queries("dead_letters")


@dataclass(frozen=True, slots=True)
class Filter:
    """Which letters; None: any."""

    worker: str | None = None
    event_id: UUID | None = None
    target: str | None = None
    event_type: str | None = None
    entity_kind: str | None = None
    organization_id: UUID | None = None
    error: str | None = None
    """Part of the error's class or message, in any case."""
    cause: str | None = None
    """What `causes` calls it."""
    since: datetime | None = None
    until: datetime | None = None
    states: tuple[str, ...] = DEAD
    limit: int = 1000

    @property
    def about_events(self) -> bool:
        """It names something that undecodable records do not have."""
        return any((self.event_id, self.target, self.event_type, self.entity_kind, self.organization_id))

    @property
    def is_narrow(self) -> bool:
        """It leaves something out."""
        return self.about_events or any((self.worker, self.error, self.cause, self.since, self.until))

    @property
    def parameters(self) -> dict[str, Any]:
        """Of the statements."""
        return {
            "states": list(self.states),
            "worker": self.worker,
            "event_id": self.event_id,
            "target": self.target,
            "event_type": self.event_type,
            "entity_kind": self.entity_kind,
            "organization_id": self.organization_id,
            "error": self.error,
            "cause": self.cause,
            "since": self.since,
            "until": self.until,
            "limit": self.limit,
        }


@dataclass(frozen=True, slots=True)
class Letter:
    """A delivery that is dead."""

    worker: str
    event_id: UUID
    target: str
    organization_id: UUID
    event_type: str
    state: str
    attempts: int
    generation: int
    error_class: str | None
    error: str | None
    first_failure_at: datetime | None
    dead_at: datetime
    event_created_at: datetime
    origin_topic: str | None
    origin_partition: int | None
    origin_offset: int | None
    dead_partition: int | None
    dead_offset: int | None
    edited_sha256: bytes | None = None
    """Of the value that a person gave it in place of the event's."""

    @property
    def id(self) -> str:
        """What commands and pages call it: the delivery's idempotency key, less the colon when there is no target."""
        return f"{self.worker}:{self.event_id}:{self.target}".removesuffix(":")


@dataclass(frozen=True, slots=True)
class Undecodable:
    """A record whose bytes are no event."""

    worker: str
    topic: str
    partition: int
    record_offset: int
    record_timestamp: datetime
    state: str
    error_class: str
    error: str
    dead_at: datetime
    dead_partition: int | None
    dead_offset: int | None
    size_bytes: int

    @property
    def id(self) -> str:
        return f"{self.worker}@{self.topic}/{self.partition}/{self.record_offset}"


def find(conn: Connection[Any], wanted: Filter) -> list[Letter]:
    """Letters that match, the newest first."""
    return [Letter(*row) for row in conn.execute(_QUERIES["find"], wanted.parameters)]


def find_undecodable(
    conn: Connection[Any], wanted: Filter, place: tuple[str, int, int] | None = None
) -> list[Undecodable]:
    """Records that are no event; none when the filter asks for what only events have. `place`: topic, partition,
    offset."""
    if wanted.about_events:
        return []
    return [Undecodable(*row) for row in conn.execute(_QUERIES["find_undecodable"], _with_place(wanted, place))]


def each(conn: Connection[Any], wanted: Filter, at_once: int) -> Iterator[list[Letter | Undecodable]]:
    """`find` and `find_undecodable` by so many at once, however many there are: those that there were at the beginning,
    kept by the server. `conn` is autocommit."""
    kinds: list[tuple[str, dict[str, Any], Any]] = [("find", wanted.parameters, Letter)]
    if not wanted.about_events:
        kinds.append(("find_undecodable", _with_place(wanted, None), Undecodable))
    left = wanted.limit
    for name, parameters, kind in kinds:
        with conn.cursor(name=f"dead_letters_{name}", withhold=True) as cursor:
            cursor.execute(_QUERIES[name], parameters | {"limit": left})
            while rows := cursor.fetchmany(at_once):
                left -= len(rows)
                yield [kind(*row) for row in rows]


def _with_place(wanted: Filter, place: tuple[str, int, int] | None) -> dict[str, Any]:
    topic, partition, offset = place or (None, None, None)
    return wanted.parameters | {"topic": topic, "partition": partition, "offset": offset}


def described(letter: Letter | Undecodable) -> dict[str, Any]:
    """What commands and pages show of a letter; the same keys for both kinds."""
    event = letter if isinstance(letter, Letter) else None
    unread = letter if isinstance(letter, Undecodable) else None
    return {
        "id": letter.id,
        "kind": "delivery" if event else "undecodable",
        "worker": letter.worker,
        "event_id": event and event.event_id,
        "target": event and event.target,
        "organization_id": event and event.organization_id,
        "event_type": event and event.event_type,
        "state": letter.state,
        "attempts": event.attempts if event else 0,
        "generation": event.generation if event else 0,
        "edited": event is not None and event.edited_sha256 is not None,
        "error_class": letter.error_class,
        "error": letter.error,
        "first_failure_at": event and event.first_failure_at,
        "dead_at": letter.dead_at,
        "origin": {
            "topic": unread.topic if unread else event and event.origin_topic,
            "partition": unread.partition if unread else event and event.origin_partition,
            "offset": unread.record_offset if unread else event and event.origin_offset,
        },
        "dead_letter": {"partition": letter.dead_partition, "offset": letter.dead_offset},
    }


def described_event(event: schemas.Event) -> dict[str, Any]:
    """An event as an object of JSON."""
    return {
        "id": event.id,
        "organization_id": event.organization_id,
        "event_type": event.event_type,
        "entity_kind": event.entity_kind,
        "entity_id": event.entity_id,
        "payload": event.payload,
        "metadata": event.metadata,
        "created_at": event.created_at,
    }


def history_of(conn: Connection[Any], letter: Letter | Undecodable) -> list[dict[str, Any]]:
    """What people did with it, the first first: at, by, action, details."""
    name = "history" if isinstance(letter, Letter) else "history_of_undecodable"
    rows = conn.execute(_QUERIES[name], asdict(letter))
    return [dict(zip(("at", "by", "action", "details"), row, strict=True)) for row in rows]


def record_of(settings: KafkaSettings, conn: Connection[Any], letter: Letter | Undecodable) -> Record | None:
    """The letter's record, from its dead-letter topic or made again from event_log; None when neither has it. Its topic
    is then "event_log"."""
    return records_of(settings, conn, [letter])[0]


def records_of(
    settings: KafkaSettings, conn: Connection[Any], letters: Sequence[Letter | Undecodable]
) -> list[Record | None]:
    """`record_of` for many, each partition read once."""
    topics = Topics(settings.topic_prefix)
    places = [
        (topics.dead_letter(letter.worker), letter.dead_partition, letter.dead_offset)
        for letter in letters
        if letter.dead_partition is not None and letter.dead_offset is not None
    ]
    read = {(r.topic, r.partition, r.offset): r for r in _read(settings, places)}
    for letter_record in read.values():
        letter_record.ours = True
    referred = {(r.topic, r.partition, r.offset): r for r in _read(settings, _referred(topics, letters, read))}
    found: list[Record | None] = []
    for letter in letters:
        record = read.get((topics.dead_letter(letter.worker), letter.dead_partition or 0, letter.dead_offset or 0))
        if letter.dead_offset is None:
            record = None
        if isinstance(letter, Letter):
            # A topic made anew has other records at these offsets.
            if record is not None and record.header("x-event-id") != str(letter.event_id):
                record = None
            if letter.edited_sha256 is not None:
                # event_log and the event's own topic have what it was before.
                if record is not None and sha256(record.value or b"").digest() != letter.edited_sha256:
                    record = None
            elif record is None or _is_reference(record):
                record = _from_log(conn, letter) or referred.get(_source(letter))
        elif record is not None and _is_reference(record):
            record = referred.get(_source(letter))
        found.append(record)
    return found


def _is_reference(record: Record) -> bool:
    return record.value is None and record.header(OMITTED) is not None


def _source(letter: Letter | Undecodable) -> tuple[str, int, int]:
    """Where the letter's record was read."""
    if isinstance(letter, Undecodable):
        return letter.topic, letter.partition, letter.record_offset
    return letter.origin_topic or "", letter.origin_partition or 0, letter.origin_offset or 0


def _referred(
    topics: Topics, letters: Sequence[Letter | Undecodable], read: dict[tuple[str, int, int], Record]
) -> list[tuple[str, int, int]]:
    """The places of the records that letters only refer to."""
    places = []
    for letter in letters:
        place = (topics.dead_letter(letter.worker), letter.dead_partition or 0, letter.dead_offset or 0)
        if (record := read.get(place)) is not None and _is_reference(record) and _source(letter)[0]:
            places.append(_source(letter))
    return places


def _from_log(conn: Connection[Any], letter: Letter) -> Record | None:
    found = conn.execute(
        _QUERIES["event_row"],
        {"event_id": letter.event_id, "event_created_at": letter.event_created_at},
    ).fetchone()
    if found is None:
        return None
    seq, event_id, organization_id, event_type, entity_kind, entity_id, payload, metadata, created_at = found
    row = schemas.Row(
        seq,
        event_id,
        organization_id,
        event_type,
        entity_kind,
        entity_id,
        payload.encode(),
        metadata.encode(),
        created_at,
    )
    try:
        value = schemas.encode(row)
    except schemas.EncodeError:
        return None
    return Record("event_log", 0, 0, 0, str(organization_id).encode(), value, [*schemas.headers(row)])


def _read(settings: KafkaSettings, places: Iterable[tuple[str, int, int]]) -> Iterator[Record]:
    """The records at these places, those that are still there."""
    wanted: dict[tuple[str, int], list[int]] = {}
    for topic, partition, offset in places:
        wanted.setdefault((topic, partition), []).append(offset)
    if not wanted:
        return
    client = kafka.consumer(settings, "afluente-dlq", enable_partition_eof=True, auto_offset_reset="earliest")
    try:
        for (topic, partition), offsets in wanted.items():
            yield from _read_partition(client, topic, partition, sorted(set(offsets)))
    finally:
        client.close()


def _read_partition(client: Any, topic: str, partition: int, offsets: list[int]) -> Iterator[Record]:
    client.assign([TopicPartition(topic, partition, offsets[0])])
    waiting = iter(offsets)
    offset: int | None = next(waiting)
    while offset is not None:
        message = client.poll(_READ_TIMEOUT_S)
        if message is None:
            return
        if (error := message.error()) is not None:
            if error.code() == KafkaError._PARTITION_EOF:
                return
            if error.retriable():
                continue
            raise KafkaException(error)
        here = message.offset()
        if here == offset:
            yield _record(message)
        last = offset
        while offset is not None and offset <= here:
            offset = next(waiting, None)
        if offset is not None and offset != last and offset - here > _SKIP:
            client.seek(TopicPartition(topic, partition, offset))


def _record(message: Any) -> Record:
    kind, timestamp = message.timestamp()
    headers: Headers = kafka.headers_of(message) or []
    return Record(
        message.topic(),
        message.partition(),
        message.offset(),
        0 if kind == TIMESTAMP_NOT_AVAILABLE else timestamp,
        message.key(),
        message.value(),
        headers,
    )
