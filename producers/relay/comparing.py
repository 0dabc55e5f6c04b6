"""Comparing rows with records: first by sums an organization and hour, then by id where the sums differ. No I/O.

What must stay true: memory is bounded by the organizations' hours, and by AT_ONCE events, whatever there is to compare;
sums that are equal are believed, sums that differ accuse nobody: only looking at the ids does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import IntEnum, StrEnum
from uuid import UUID
from zlib import crc32

from afluente.archive import digest
from producers.relay.position import Entry

AT_ONCE = 50_000  # events whose ids are in memory at a time: 40 MB
PARTS = 4096  # what a differing organization and hour is divided into when it is larger than that

Key = tuple[int, ...]  # organization, hour since 1970, and a part of the ids when it was divided


class Kind(StrEnum):
    missing_in_topic = "missing_in_topic"
    only_in_topic = "only_in_topic"
    twice_in_topic = "twice_in_topic"
    content_differs = "content_differs"


class Source(IntEnum):
    """What stands for an event. A row `waits` when the relay's position is not past it."""

    row = 0
    waiting = 1
    record = 2
    letter = 3


@dataclass(slots=True)
class Seen:
    """An event as it was seen once, in the table, in the archive, or in a topic (`place`: topic[partition]@offset).

    `hash_` is None when the content cannot be compared; `problem` then says why, if that is a fault.
    """

    source: Source
    event_id: UUID
    organization_id: UUID
    created_at: datetime
    event_type: str
    entity_id: UUID | None
    seq: int | None
    hash_: int | None
    parts: tuple[bytes, ...] = ()
    place: str = ""
    problem: str = ""
    expired: bool = False  # of a row: a record of it may have been deleted by retention

    @property
    def key(self) -> tuple[int, int]:
        return key_of(self.organization_id, self.created_at)

    def key_of_part(self) -> Key:
        return (*self.key, self.event_id.int % PARTS)


def key_of(organization_id: UUID, created_at: datetime) -> tuple[int, int]:
    return organization_id.int, digest.hour_of(created_at)


@dataclass(frozen=True, slots=True)
class Difference:
    """One event that is not once, and the same, on both sides. `detail` is a sentence for a person."""

    kind: Kind
    event_id: UUID
    organization_id: UUID
    created_at: datetime
    event_type: str
    seq: int | None
    detail: str


class Bucket:
    """Counts and sums of the events of one key, by what they were seen as (index: Source). Half a kilobyte with its
    key, as there may be a million."""

    __slots__ = ("counts", "must_look", "totals")

    def __init__(self) -> None:
        self.counts = [0] * len(Source)
        self.totals = [0] * len(Source)
        self.must_look = False

    def add(self, source: Source, hash_: int | None, count: int = 1) -> None:
        self.counts[source] += count
        if hash_ is None:
            self.must_look = True
        else:
            self.totals[source] = (self.totals[source] + hash_) % digest.MODULUS

    @property
    def is_equal(self) -> bool:
        """The settled rows are in the topics, with all that wait or with none of them."""
        if self.must_look:
            return False
        published = self._sum(Source.record, Source.letter)
        return published in (self._sum(Source.row), self._sum(Source.row, Source.waiting))

    @property
    def table(self) -> tuple[int, int]:
        return self._sum(Source.row, Source.waiting)

    @property
    def topic(self) -> tuple[int, int]:
        return self._sum(Source.record, Source.letter)

    @property
    def size(self) -> int:
        return sum(self.counts)

    @property
    def waits(self) -> int:
        """The rows of an equal bucket that are not in the topics yet."""
        return self.table[0] - self.topic[0]

    def _sum(self, *sources: Source) -> tuple[int, int]:
        return sum(self.counts[s] for s in sources), sum(self.totals[s] for s in sources) % digest.MODULUS


Buckets = dict[Key, Bucket]


def tally(events: Iterable[Seen], buckets: Buckets, key_of: Callable[[Seen], Key | None]) -> None:
    """Add events up under their keys; None leaves one out."""
    for event in events:
        if (key := key_of(event)) is not None:
            if (bucket := buckets.get(key)) is None:
                bucket = buckets[key] = Bucket()
            bucket.add(event.source, event.hash_)


def differing(buckets: Buckets) -> Buckets:
    return {key: bucket for key, bucket in sorted(buckets.items(), key=lambda item: item[0][1]) if not bucket.is_equal}


def portions(buckets: Buckets, events: int = AT_ONCE) -> Iterator[set[Key]]:
    """The keys in portions of so many events; one that has more is a portion of its own."""
    portion: set[Key] = set()
    size = 0
    for key, bucket in buckets.items():
        if portion and size + bucket.size > events:
            yield portion
            portion, size = set(), 0
        portion.add(key)
        size += bucket.size
    if portion:
        yield portion


@dataclass(slots=True)
class Verdict:
    """What the ids of some buckets say."""

    differences: list[Difference]
    waiting: int = 0
    expired: int = 0
    dead_lettered: int = 0
    reprocessed: frozenset[UUID] = frozenset()


class ById:
    """The events of some buckets, each with all that was seen of it."""

    def __init__(self) -> None:
        self._rows: dict[int, Seen] = {}
        self._published: dict[int, list[Seen]] = {}

    def take(self, event: Seen) -> None:
        # Which field differs can be told from a checksum of each; the fields themselves would be megabytes.
        sums = tuple(crc32(part).to_bytes(4, "big") for part in event.parts)
        event = replace(event, parts=sums)
        if event.source in (Source.row, Source.waiting):
            self._rows[event.event_id.int] = event
        else:
            self._published.setdefault(event.event_id.int, []).append(event)

    def judge(self) -> Verdict:
        verdict = Verdict([])
        reprocessed = set()
        for number in self._rows.keys() | self._published.keys():
            row, published = self._rows.get(number), self._published.get(number, [])
            records = [event for event in published if event.source is Source.record]
            letters = [event for event in published if event.source is Source.letter]
            # A dead letter that was published after all is one event, and so is one that became a letter again.
            standing = records or letters[-1:]
            if records and letters:
                reprocessed.add(records[0].event_id)
            elif letters:
                verdict.dead_lettered += 1
            if row is None:
                verdict.differences.append(_difference(Kind.only_in_topic, standing[0], _places(standing)))
            elif not standing:
                if row.source is Source.waiting:
                    verdict.waiting += 1
                elif row.expired:
                    verdict.expired += 1
                else:
                    verdict.differences.append(_difference(Kind.missing_in_topic, row, "no record and no dead letter"))
            else:
                for event in standing:
                    if detail := _content(row, event):
                        verdict.differences.append(_difference(Kind.content_differs, row, f"{event.place}: {detail}"))
            if len(records) > 1:
                detail = f"{len(records)} records: {_places(records)}"
                verdict.differences.append(_difference(Kind.twice_in_topic, row or records[0], detail))
        verdict.reprocessed = frozenset(reprocessed)
        return verdict


def _content(row: Seen, event: Seen) -> str:
    if event.problem:
        return event.problem
    if row.hash_ is None or event.hash_ is None or row.hash_ == event.hash_:
        return ""
    fields = [name for name, mine, other in zip(digest.FIELDS, row.parts, event.parts, strict=True) if mine != other]
    return f"{', '.join(fields)} {'is' if len(fields) == 1 else 'are'} not the row's"


def _places(events: Sequence[Seen]) -> str:
    return ", ".join(event.place for event in events)


def _difference(kind: Kind, event: Seen, detail: str) -> Difference:
    return Difference(
        kind, event.event_id, event.organization_id, event.created_at, event.event_type, event.seq, detail
    )


class Published:
    """Whether the relay's position is past a row: what is not past waits, and is no difference."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._by_slot: dict[int, Entry] = {}
        self._own: dict[UUID, Entry] = {}
        for entry in entries:
            if entry.organization is not None:
                self._own[entry.organization] = entry
            else:
                for first, last in entry.slots:
                    self._by_slot.update(dict.fromkeys(range(first, last + 1), entry))

    def __call__(self, organization_id: UUID, tx_id: int, seq: int) -> bool:
        entry = self._own.get(organization_id) or self._by_slot.get(organization_id.bytes[-1])
        if entry is None:
            return False
        if seq <= entry.t1 and entry.s1.shows(tx_id):
            return True
        window = entry.window
        return window is not None and seq <= window.last and window.s2.shows(tx_id)
