"""An organization whose surplus fills a worker's hands is parked: its records of that partition are passed over, so
that the others' behind them come, and are read again from where they are, at its own pace.

Nothing is copied. The surplus stays in its topic, where it is durable already; the mark in Postgres (from which offset
on) is what makes it safe to commit beyond it. Passing over a million records takes seconds, as only their key is looked
at; copied to another topic they would take the broker's disk and several times as long.

What must stay true:
- a record is passed over only when the mark that covers it is committed; until then its offset is held;
- a parked organization's records are handed over in the order of their offsets, each once: what was in hand before the
  mark first, then what was passed over, then what the partition's reader has reached (`Surplus.read`);
- a mark is moved only over what is finished, and only by the process that has the partition.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from uuid import UUID

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from consumers.runtime.places import Limits, Place
from consumers.runtime.records import Record

if TYPE_CHECKING:
    from consumers.runtime.marks import Marks

LARGE_SHARE = 8
"""Whoever has an eighth of what is in hand may be parked: of many that have little each, none keeps others waiting."""
_IN_TURN = 2_000  # records of one organization before the reader turns to the next: turning costs a fetch
_AT_ONCE = 500
_READ_S = 0.005
_UUID = re.compile(rb"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(slots=True, eq=False)
class Parked(Place):
    """One organization's surplus on one partition. Its records' finishes come here, not to the partition's place."""

    key: bytes = b""
    main: Place = field(default_factory=lambda: Place("", 0, waits=False))
    at: int = 0
    """The offset from which on it is to be read again."""
    marked: bool = False
    """Its mark is committed."""
    held: list[int] = field(default_factory=list)
    """Offsets that were passed over before that."""
    passed_over: int = 0
    """Of its records so many wait in the topic, about."""
    saved: tuple[int, int] | None = None

    @property
    def organization_id(self) -> UUID:
        return UUID(self.key.decode())

    @property
    def mark(self) -> int:
        """Everything before this is finished."""
        if self.offsets.idle:
            return self.at
        return self.offsets.committable or self.start


def largest(places: Iterable[Place], records: int) -> tuple[Place, bytes] | None:
    """Whose records on which partition are the most of the `records` in hand, if they are enough to park it."""
    found: tuple[int, Place, bytes] | None = None
    for place in places:
        for key, share in place.shares.items():
            if key in place.parked or key in place.unparking or (found is not None and share.records <= found[0]):
                continue
            if share.records * LARGE_SHARE >= records and _UUID.fullmatch(key):
                found = share.records, place, key
    return found and found[1:]


class Surplus:
    """For the poll thread: parks, and reads again what is parked, by a consumer of its own that joins no group."""

    def __init__(
        self,
        make: Callable[[], Consumer],
        record: Callable[[Message, Place], Record],
        limits: Limits,
        marks: Marks,
        expired: Callable[[Place, int | None, KafkaError], None],
        warn: Callable[[KafkaError], None],
    ) -> None:
        self._make, self._record, self._marks, self._expired, self._warn = make, record, marks, expired, warn
        self._most_records, self._most_bytes = limits.records // 2, limits.bytes // 2
        self._consumer: Consumer | None = None
        self._line: OrderedDict[Parked, None] = OrderedDict()
        self._current: Parked | None = None
        self._in_turn = 0

    @property
    def reading(self) -> bool:
        return self._current is not None

    def park(self, place: Place, key: bytes) -> None:
        """From the next record of it on."""
        start = place.last + 1
        parked = Parked(place.topic, place.partition, waits=False, start=start, key=key, main=place, at=start)
        place.parked[key] = parked
        self._marks.park(parked)

    def resume(self, place: Place, marks: Iterable[tuple[bytes, int, int]]) -> None:
        """A partition that came with marks: (key, from which offset on, how many about)."""
        begins = max(place.start, 0)
        for key, at, passed_over in marks:
            parked = Parked(place.topic, place.partition, waits=False, start=at, key=key, main=place, at=at)
            parked.marked, parked.passed_over = True, passed_over
            if at >= begins:
                # The partition is read again from before the mark: everything comes in its order without it.
                self._marks.unpark(parked)
            else:
                place.parked[key] = parked
                self._line[parked] = None

    def marked(self, parked: Parked) -> None:
        """The mark is committed: what was passed over meanwhile is nobody's to wait for."""
        if not parked.alive:
            return
        parked.marked = True
        for offset in parked.held:
            parked.main.offsets.finish(offset)
        parked.held.clear()
        self._line[parked] = None

    def pass_over(self, parked: Parked, offset: int) -> None:
        """A record of the partition that is read again later."""
        offsets = parked.main.offsets
        if parked.marked:
            offsets.pass_over(offset)
        else:
            offsets.hand_out(offset)
            parked.held.append(offset)
        parked.passed_over += 1

    def read(self, room: int) -> list[Record]:
        """The next records of whose turn it is; `room`: at most so many."""
        if (parked := self._current) is None:
            self._current = parked = self._next()
            if parked is None:
                return []
            self._in_turn = 0
            self._reader.assign([TopicPartition(parked.topic, parked.partition, parked.at)])
        room = min(room, self._most_records - parked.records)
        if room <= 0 or parked.bytes >= self._most_bytes:
            self._end_turn()
            return []
        found: list[Record] = []
        for message in self._reader.consume(min(_AT_ONCE, room), _READ_S):
            if (error := message.error()) is not None:
                self._failed(parked, error)
                break
            offset = message.offset() or 0
            if offset < parked.at or (message.topic(), message.partition()) != (parked.topic, parked.partition):
                continue
            if offset > parked.main.last:
                parked.at = parked.main.last + 1
                break
            parked.at = offset + 1
            if message.key() == parked.key:
                found.append(self._record(message, parked))
        self._in_turn += len(found)
        parked.passed_over = max(0, parked.passed_over - len(found))
        if parked.at > parked.main.last:
            self._unpark(parked)
        elif self._in_turn >= _IN_TURN and any(self._may_read(other) for other in self._line):
            self._end_turn()
        return found

    def settle(self, places: Iterable[Place]) -> None:
        """Let go whoever has nothing to read again, and forget whose surplus is finished."""
        for place in places:
            for parked in list(place.parked.values()):
                share = place.shares.get(parked.key)
                if (
                    parked.marked
                    and parked.at > place.last
                    and (share is None or share.records * 2 < self._most_records)
                ):
                    self._unpark(parked)
            for parked in list(place.unparking.values()):
                if parked.offsets.idle:
                    del place.unparking[parked.key]
                    parked.alive = False
                    self._marks.unpark(parked)

    def save(self, places: Iterable[Place]) -> None:
        """Write how far each is: as often as offsets are committed, as it is a transaction."""
        for place in places:
            for parked in _all_of(place):
                if parked.marked and (now := (parked.mark, parked.passed_over)) != parked.saved:
                    parked.saved = now
                    self._marks.move(parked, *now)

    def forget(self, place: Place) -> list[Place]:
        """The partition goes: with it what was parked on it. The marks stay."""
        gone = _all_of(place)
        for parked in gone:
            self._line.pop(parked, None)
            if self._current is parked:
                self._end_turn()
        return list(gone)

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()

    @property
    def _reader(self) -> Consumer:
        if self._consumer is None:
            self._consumer = self._make()
        return self._consumer

    def _may_read(self, parked: Parked) -> bool:
        """It has room, and the partition has been read to where it goes on."""
        return (
            parked.at <= parked.main.last
            and parked.records * 2 <= self._most_records
            and parked.bytes * 2 <= self._most_bytes
        )

    def _next(self) -> Parked | None:
        for parked in self._line:
            if self._may_read(parked):
                self._line.move_to_end(parked)
                return parked
        return None

    def _end_turn(self) -> None:
        self._current = None
        self._reader.unassign()

    def _unpark(self, parked: Parked) -> None:
        """The partition's reader goes on with it; the mark stays until everything here is finished."""
        del parked.main.parked[parked.key]
        parked.main.unparking[parked.key] = parked
        self._line.pop(parked, None)
        if self._current is parked:
            self._end_turn()

    def _failed(self, parked: Parked, error: KafkaError) -> None:
        if error.fatal():
            raise KafkaException(error)
        if error.code() != KafkaError._AUTO_OFFSET_RESET:
            self._warn(error)
            return
        try:
            low, _ = self._reader.get_watermark_offsets(TopicPartition(parked.topic, parked.partition), timeout=10.0)
        except KafkaException:
            low = None
        self._expired(parked, low, error)
        parked.at = max(parked.at, low or 0)
        self._end_turn()


def _all_of(place: Place) -> Collection[Parked]:
    return [*place.parked.values(), *place.unparking.values()]


def in_hand(places: Iterable[Place]) -> Iterator[Place]:
    """The places of `places`, and of what is parked on them."""
    for place in places:
        yield place
        yield from _all_of(place)
