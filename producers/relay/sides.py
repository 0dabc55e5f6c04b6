"""The two sides of a comparison: rows of the table and of the archive, and records and dead letters of the topics.

What must stay true: an event is left out on both sides or on neither. That is decided by what both hold of it: when it
was created, and the partition it belongs to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import psycopg
from confluent_kafka import Message

import schemas
import sql
from afluente import archive
from afluente.archive import digest
from afluente.archive.format import Sum
from afluente.kafka.reading import Place, Retained, TopicReader, headers_of
from producers.relay.comparing import Bucket, Buckets, Key, Published, Seen, Source, key_of, tally
from schemas import Event, Row
from schemas.topics import Topics, partition_of

CLOCKS_DIFFER = timedelta(minutes=1)  # Postgres' and the brokers', at most
# Rows so much older than what a partition still holds are left out before anything is counted; of the younger ones it
# is looked, one by one, whether they are there.
CERTAINLY_EXPIRED = timedelta(minutes=10)
FETCH_ROWS = 500
PROGRESS_EVERY = 2_000
LYING_AT_MOST = 10_000  # records whose headers are not their value's; with more of them no header is believed

_SQL = sql.queries("relay_verify")
_DAY = timedelta(days=1)

Progress = Callable[[str, int, int | None], None]  # what is read, how many so far, of how many (None: not known)


@dataclass(frozen=True, slots=True)
class NotComparable:
    """A part of the window of which nothing can be said, and why; `events`: the rows, or else the records, in it."""

    what: str
    before: datetime | None
    events: int
    reason: str


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A row that stands in the topics as a dead letter of the relay."""

    event_id: UUID
    organization_id: UUID
    created_at: datetime
    reason: str


@dataclass(frozen=True, slots=True)
class Window:
    """since <= created_at < until, of one organization or of all."""

    since: datetime
    until: datetime
    organization_id: UUID | None = None

    def includes(self, moment: datetime) -> bool:
        return self.since <= moment < self.until


class Limits:
    """What of the window can be compared, and what could not be."""

    def __init__(
        self,
        window: Window,
        topics: Topics,
        partitions: Mapping[str, int],
        held: Mapping[Place, Retained],
        months: Iterable[date],
        now: datetime,
        letters_kept: timedelta | None,
    ) -> None:
        self.window, self.topics, self.months = window, topics, frozenset(months)
        self._partitions = partitions
        # What a partition holds was appended then or later, if something was ever deleted from it.
        floors = {place: what.since or now for place, what in held.items() if what.first}
        letters = [floor for (topic, _), floor in floors.items() if topic == topics.relay_dead_letter]
        self._floors = {place: floor for place, floor in floors.items() if place[0] != topics.relay_dead_letter}
        self._letters_floor: datetime | None = None
        if letters:
            # Letters are few, so the oldest one left says little; how long they are kept says more.
            kept_since = max(letters) if letters_kept is None else now - letters_kept
            self._letters_floor = min(max(letters), kept_since)
        self._all_have_floors = len(self._floors) == sum(partitions[name] for name in topics.families())
        self.expired: Counter[Place] = Counter()
        self.expired_days: dict[date, int] = {}
        self.without_rows: dict[date, int] = {}

    def expired_at(
        self, event_type: str, organization_id: UUID, entity_id: UUID | None, moment: datetime
    ) -> Place | None:
        """The partition where an event of then can no longer be looked for; None when it can."""
        if not self._floors:
            return None
        place = self._place(event_type, organization_id, entity_id)
        floor = self._floors.get(place)
        return place if floor is not None and moment < floor - CERTAINLY_EXPIRED else None

    def may_be_expired(self, row: Row) -> bool:
        """May its record, or its dead letter, have been there and be gone?"""
        moment = row.created_at - CLOCKS_DIFFER
        if self._letters_floor is not None and moment < self._letters_floor:
            return True
        if not self._floors:
            return False
        floor = self._floors.get(self._place(row.event_type, row.organization_id, row.entity_id))
        return floor is not None and moment < floor

    def are_all_expired(self, until: datetime) -> bool:
        """Has every partition deleted what was created before then?"""
        return self._all_have_floors and until <= min(self._floors.values()) - CERTAINLY_EXPIRED

    def are_all_held(self, since: datetime) -> bool:
        """Does every partition hold whatever was created since then?"""
        floors = [*self._floors.values(), *([] if self._letters_floor is None else [self._letters_floor])]
        return all(since >= floor + CLOCKS_DIFFER for floor in floors)

    def leaves_out(self, event: Seen) -> bool:
        """Is it of a time, or of a partition, that is not compared?"""
        if not self.window.includes(event.created_at):
            return True
        if self.window.organization_id not in (None, event.organization_id):
            return True  # a record under another organization's key
        place = self.expired_at(event.event_type, event.organization_id, event.entity_id, event.created_at)
        return place is not None or day_of(event.created_at) in self.expired_days

    def not_comparable(self) -> Iterator[NotComparable]:
        for (topic, partition), rows in sorted(self.expired.items()):
            before = self._floors[topic, partition]
            yield NotComparable(f"{topic}[{partition}]", before, rows, "its records were deleted by retention")
        for days, ends, rows in _stretches(self.expired_days):
            yield NotComparable(days, ends, rows, "all topics have deleted the records of that time")
        for days, ends, records in _stretches(self.without_rows):
            yield NotComparable(days, ends, records, "the month is not in the table, and the archive has no such day")

    def _place(self, event_type: str, organization_id: UUID, entity_id: UUID | None) -> Place:
        topic = self.topics.event(event_type)
        return topic, partition_of(organization_id, self._partitions[topic], entity_id)


def day_of(moment: datetime) -> date:
    return moment.astimezone(UTC).date()


def start_of(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=UTC)


def _stretches(days: Mapping[date, int]) -> Iterator[tuple[str, datetime, int]]:
    """Days that follow each other: in words, when they end, and their sum."""
    first: date | None = None
    last, total = date.min, 0
    for day in [*sorted(days), None]:
        if first is not None and (day is None or day - last > _DAY):
            yield str(first) if first == last else f"{first} to {last}", start_of(last) + _DAY, total
            first, total = None, 0
        if day is not None:
            first, last, total = first or day, day, total + days[day]


class Rows:
    """The rows of the window: from the table, and of months that have left it from the archive.

    `connection`: in a transaction whose snapshot all readings share.
    """

    def __init__(
        self, connection: psycopg.Connection[Any], limits: Limits, published: Published, archived: Path | None
    ) -> None:
        self._conn, self._limits, self._published, self._archived = connection, limits, published, archived
        self._by_manifest: dict[date, archive.Manifest] = {}
        self._by_line: list[date] = []
        day = day_of(limits.window.since)
        while start_of(day) < limits.window.until:
            if day.replace(day=1) not in limits.months:
                self._plan(day)
            day += _DAY

    def add_up(self, buckets: Buckets, progress: Progress) -> None:
        """Everything, for the first time: what is left out is counted."""
        for manifest in self._by_manifest.values():
            for organization, hour, sums in self._sums(manifest):
                buckets.setdefault((organization.int, hour), Bucket()).add(Source.row, sums.total, sums.rows)
        tally(self._seen(self._by_line, None, progress, self._limits.expired), buckets, lambda event: event.key)

    def of(self, keys: set[Key], progress: Progress) -> Iterator[Seen]:
        """The rows of these organizations and hours, once more."""
        return self._seen([*self._by_manifest, *self._by_line], keys, progress)

    def _plan(self, day: date) -> None:
        """A day that is not in the table: compared by its manifest, by its file, or not at all."""
        window, begins = self._limits.window, start_of(day)
        manifest = None if self._archived is None else archive.read_manifest(self._archived, day)
        if manifest is None:
            self._limits.without_rows[day] = 0
        elif not (window.since <= begins and begins + _DAY <= window.until):
            self._by_line.append(day)
        elif self._limits.are_all_expired(begins + _DAY):
            self._limits.expired_days[day] = sum(sums.rows for _, _, sums in self._sums(manifest))
        elif self._limits.are_all_held(begins):
            self._by_manifest[day] = manifest
        else:
            self._by_line.append(day)

    def _seen(
        self, days: Iterable[date], keys: set[Key] | None, progress: Progress, expired: Counter[Place] | None = None
    ) -> Iterator[Seen]:
        limits, count = self._limits, 0
        for row, tx_id in self._read(days, None if keys is None else {key[1] for key in keys}):
            count += 1
            if count % PROGRESS_EVERY == 0:
                progress("rows", count, None)
            if keys is not None and key_of(row.organization_id, row.created_at) not in keys:
                continue
            place = limits.expired_at(row.event_type, row.organization_id, row.entity_id, row.created_at)
            if place is not None:
                if expired is not None:
                    expired[place] += 1
                continue
            parts = digest.row_parts(row)
            yield Seen(
                # What is in the archive was published before it was archived.
                Source.row if tx_id is None or self._published(row.organization_id, tx_id, row.seq) else Source.waiting,
                row.id,
                row.organization_id,
                row.created_at,
                row.event_type,
                row.entity_id,
                row.seq,
                digest.combine(row.id, parts),
                parts,
                expired=limits.may_be_expired(row),
            )
        progress("rows", count, count)

    def _read(self, days: Iterable[date], hours: set[int] | None) -> Iterator[tuple[Row, int | None]]:
        """(row, the transaction that wrote it; None of an archived one)."""
        since, until, organization = self._limits.window.since, self._limits.window.until, self._organization
        if hours is not None:
            since = max(since, digest.start_of(min(hours)))
            until = min(until, digest.start_of(max(hours) + 1))
        for day in days:
            first = digest.hour_of(start_of(day))
            if self._archived is not None and (hours is None or not hours.isdisjoint(range(first, first + 24))):
                bounds = max(since, start_of(day)), min(until, start_of(day) + _DAY)
                for row in archive.read(self._archived, since=bounds[0], until=bounds[1]):
                    if organization in (None, row.organization_id):
                        yield row, None
        parameters = {"since": since, "until": until, "organization": organization}
        with closing(self._stream(parameters)) as rows:
            for *columns, tx_id in rows:
                yield _make_row(columns), tx_id

    def _stream(self, parameters: Mapping[str, Any]) -> Generator[tuple[Any, ...], None, None]:
        yield from self._conn.cursor().stream(_SQL["rows"], parameters, binary=True, size=FETCH_ROWS)

    @property
    def _organization(self) -> UUID | None:
        return self._limits.window.organization_id

    def _sums(self, manifest: archive.Manifest) -> Iterator[tuple[UUID, int, Sum]]:
        """(organization, hour since 1970, its sum)."""
        first = digest.hour_of(start_of(manifest.day))
        for organization, hours in manifest.hours.items():
            if self._organization in (None, organization):
                for hour, sums in hours.items():
                    yield organization, first + hour, sums


_make_row = cast(Callable[[list[Any]], Row], partial(tuple.__new__, Row))


class Records:
    """The relay's records and dead letters of the window, between offsets that were taken once.

    `directly_produced`: records of services; `letters`: the first dead letters. Both are of the first reading.
    """

    def __init__(
        self,
        reader: TopicReader,
        limits: Limits,
        starts: Mapping[Place, int],
        ends: Mapping[Place, int],
        *,
        letters_named: int,
    ) -> None:
        self._reader, self._limits, self._starts, self._ends = reader, limits, starts, ends
        self._letters_named = letters_named
        organization = limits.window.organization_id
        self._key = None if organization is None else str(organization).encode()
        self._is_first = True
        self._lying: set[str] = set()
        self.directly_produced = 0
        self.letters: list[DeadLetter] = []

    def seen(self, progress: Progress) -> Iterator[Seen]:
        """Everything, for the first time."""
        yield from self._seen(None, progress)
        self._is_first = False

    def of(self, keys: set[Key], progress: Progress) -> Iterator[Seen]:
        """Those of these organizations and hours, once more."""
        return (event for event in self._seen(keys, progress) if event.key in keys)

    def _seen(self, keys: set[Key] | None, progress: Progress) -> Iterator[Seen]:
        total = sum(self._ends[place] - self._starts[place] for place in self._ends)
        count = 0
        for message in self._reader.between(self._starts, self._ends):
            count += 1
            if count % PROGRESS_EVERY == 0:
                progress("records", count, total)
            if self._key is not None and message.key() != self._key:
                continue
            is_letter = message.topic() == self._limits.topics.relay_dead_letter
            event = _letter(message) if is_letter else self._record(message, keys)
            if event is None or self._limits.leaves_out(event):
                continue
            if (day := day_of(event.created_at)) in self._limits.without_rows:
                self._limits.without_rows[day] += self._is_first
                continue
            if is_letter and self._is_first and len(self.letters) < self._letters_named:
                reason = headers_of(message).get("x-error-message", "")
                self.letters.append(DeadLetter(event.event_id, event.organization_id, event.created_at, reason))
            yield event
        progress("records", count, count)

    def _record(self, message: Message, keys: set[Key] | None) -> Seen | None:
        headers = headers_of(message)
        stated = _moment(headers.get("ce_time"))
        # Decoding is what takes time, so the headers decide what is left out. A record whose header lies about its time
        # is missing where its row is; one that was seen to lie is looked at again.
        if stated is not None and not self._limits.window.includes(stated):
            return None
        if "seq" not in headers:
            self.directly_produced += self._is_first
            return None
        place = _place(message)
        if keys is not None and stated is not None and len(self._lying) < LYING_AT_MOST and place not in self._lying:
            organization = _organization(message)
            if organization is not None and key_of(organization, stated) not in keys:
                return None
        try:
            event = schemas.decode(message.value() or b"")
        except schemas.DecodeError as error:
            return _by_headers(Source.record, message, f"cannot be decoded: {error}")
        problem = _disagreement(message, headers, event)
        if problem and self._is_first and len(self._lying) < LYING_AT_MOST:
            self._lying.add(place)
        return _by_value(Source.record, event, _number(headers["seq"]), message, problem)


def _letter(message: Message) -> Seen | None:
    try:
        letter = digest.loads(message.value() or b"")
        if (row := letter["row"]) is not None:
            event = Event(
                UUID(row["id"]),
                UUID(row["organization_id"]),
                row["event_type"],
                row["entity_kind"],
                None if row["entity_id"] is None else UUID(row["entity_id"]),
                row["payload"],
                row["metadata"],
                datetime.fromisoformat(row["created_at"]),
            )
            return _by_value(Source.letter, event, row["seq"], message)
        return Seen(
            Source.letter,
            UUID(letter["event_id"]),
            UUID(letter["organization_id"]),
            datetime.fromisoformat(letter["created_at"]),
            letter["event_type"],
            None,
            letter["seq"],
            None,
            place=_place(message),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        # What is nested too deeply to be read is a letter all the same: its headers say whose.
        return _by_headers(Source.letter, message)


def _by_value(source: Source, event: Event, seq: int | None, message: Message, problem: str = "") -> Seen:
    parts = digest.event_parts(event)
    return Seen(
        source,
        event.id,
        event.organization_id,
        event.created_at,
        event.event_type,
        event.entity_id,
        seq,
        None if problem else digest.combine(event.id, parts),
        parts,
        _place(message),
        problem,
    )


def _by_headers(source: Source, message: Message, problem: str = "") -> Seen | None:
    """What its headers say of a record whose value says nothing; None when they do not say either."""
    headers = headers_of(message)
    moment = _moment(headers.get("ce_time"))
    try:
        event_id = UUID(headers.get("x-event-id") or headers["ce_id"])
        organization = _organization(message) or UUID(headers["ce_source"].removeprefix("/organizations/"))
    except (KeyError, ValueError):
        return None
    if moment is None:
        return None
    seq = _number(headers.get("seq") or headers.get("x-seq", ""))
    return Seen(
        source,
        event_id,
        organization,
        moment,
        headers.get("ce_type", ""),
        None,
        seq,
        None,
        place=_place(message),
        problem=problem,
    )


def _disagreement(message: Message, headers: Mapping[str, str], event: Event) -> str:
    """What a record says of itself outside of its value, and wrongly."""
    if (key := message.key()) != str(event.organization_id).encode():
        return f"its key is {key!r}, its organization {event.organization_id}"
    moment = event.created_at.isoformat(timespec="microseconds")
    for name, value in (("ce_id", str(event.id)), ("ce_type", event.event_type), ("ce_time", moment)):
        if headers.get(name) != value:
            return f"its header {name} is {headers.get(name)!r}, its value says {value}"
    return ""


def _organization(message: Message) -> UUID | None:
    key = message.key()
    try:
        return UUID(key.decode()) if isinstance(key, bytes) else None
    except ValueError:
        return None


def _place(message: Message) -> str:
    return f"{message.topic()}[{message.partition()}]@{message.offset()}"


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


def _moment(text: str | None) -> datetime | None:
    try:
        moment = None if text is None else datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment is not None and moment.tzinfo is not None else None
