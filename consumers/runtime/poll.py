"""The Kafka side of a worker: one thread owns one consumer, subscribed to the event topics and all retry topics.

What must stay true:
- Every call of the consumer is made by this thread. A commit from another one starves beside a consume loop.
- It never waits for a handler, so `max.poll.interval.ms` is only a watchdog for the process. Too much in hand pauses
  partitions; polling goes on.
- An offset is committed only when everything handed out below it is finished. A finish that comes after its partition
  was taken away touches nothing.
- At a revoke: what has not begun is dropped, what runs is waited for (bounded), the mark is committed, then forgotten.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from afluente import faults, kafka
from afluente.telemetry import get_logger, heartbeat
from consumers.runtime.marks import Found, Marks
from consumers.runtime.parking import Parked, Surplus, in_hand, largest
from consumers.runtime.places import Limits, Place
from consumers.runtime.records import Record, bytes_of

_log = get_logger(__name__)

_CONSUME_S = 0.05
_CONSUME_RECORDS = 500
_PASSED_RECORDS = 2000  # while most are only passed over
# A pause throws away what was fetched ahead: hands that are full for a moment are waited for.
_PAUSE_AFTER_S = 0.2
_FULL_S = 0.01
_COMMITTED_TIMEOUT_S = 10.0


class Poller(threading.Thread):
    """`deliver`, `revoke` and `failed` are called in this thread and must only pass on."""

    def __init__(
        self,
        make: Callable[..., Consumer],
        *,
        make_reader: Callable[[], Consumer],
        marks: Marks,
        may_park: Callable[[], bool],
        topics: Iterable[str],
        waiting_topics: Iterable[str],
        limits: Limits,
        commit_interval_s: float,
        revoke_drain_s: float,
        deliver: Callable[[list[Record]], None],
        revoke: Callable[[list[Place], threading.Event], None],
        assigned: Callable[[int], None],
        failed: Callable[[BaseException], None],
        waited: Callable[[float], None],
        worker: str,
    ) -> None:
        super().__init__(name=f"poll-{worker}", daemon=True)
        self._make = make
        self._topics = [*topics, *waiting_topics]
        self._waiting_topics = frozenset(waiting_topics)
        self._limits = limits
        self._commit_interval_s = commit_interval_s
        self._revoke_drain_s = revoke_drain_s
        self._deliver = deliver
        self._revoke = revoke
        self._assigned = assigned
        self._failed = failed
        self._waited = waited
        self._worker = worker
        self._marks, self._may_park = marks, may_park
        self._surplus = Surplus(make_reader, self._record, limits, marks, self._say_expired, self._warn)
        self._asked: deque[Callable[[], None]] = deque()
        self._places: dict[tuple[str, int], Place] = {}
        self._finished: deque[Record] = deque()
        self._full_since: float | None = None
        self._freed = threading.Event()
        self._draining = threading.Event()
        self._ending = threading.Event()
        self._fresh: set[tuple[str, int]] = set()
        self._average_bytes = 1000.0
        self._header_bytes = 0
        self._next_commit = 0.0
        self._warned: dict[str, float] = {}
        self.turned_at = time.monotonic()
        """When the loop last turned: what liveness is about."""
        self.member_id = ""
        """As the group knows it, while it has no partition."""

    # Called from any thread.

    def finish(self, record: Record) -> None:
        """Everything the record asked for is durable."""
        self._finished.append(record)
        if self._full_since is not None:
            self._freed.set()

    def marked(self, parked: Parked) -> None:
        """What `Marks.park` was asked for is committed."""
        self._asked.append(lambda: self._surplus.marked(parked))

    def found_marks(self, place: Place, found: Found) -> None:
        """What `Marks.load` was asked for."""
        self._asked.append(lambda: self._load(place, found))

    def drain(self) -> None:
        """Read nothing more; stay a member and go on committing."""
        self._draining.set()

    def end(self) -> None:
        """Commit what is finished, leave the group, end the thread."""
        self._draining.set()
        self._ending.set()

    @property
    def places(self) -> list[Place]:
        """The partitions this member has now."""
        return list(self._places.values())

    # The thread.

    def run(self) -> None:
        try:
            self._consumer = self._make(on_commit=self._on_commit, error_cb=self._on_error)
            self._consumer.subscribe(
                self._topics, on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
            )
            try:
                while not self._ending.is_set():
                    self._turn()
                self._take_finished()
                self._commit(synchronous=True)
            finally:
                self._surplus.close()
                self._consumer.close()
        except BaseException as error:
            self._failed(error)

    def _turn(self) -> None:
        self.turned_at = time.monotonic()
        heartbeat.beat()
        if not self._places:
            self.member_id = self._consumer.memberid() or ""
        while self._asked:
            self._asked.popleft()()
        self._take_finished()
        self._surplus.settle(self._places.values())
        self._balance()
        self._fresh.clear()
        count, size = self._in_hand()
        room = min(self._limits.records - count, int((self._limits.bytes - size) / self._average_bytes))
        if room <= 0 and not self._draining.is_set():
            self._freed.wait(_FULL_S)
            self._freed.clear()
            self._take_finished()
            room = self._limits.records - self._in_hand()[0]
        passing = any(place.parked for place in self._places.values())
        asked = max(1, min(_PASSED_RECORDS if passing else _CONSUME_RECORDS, room))
        # Asked for many, the client waits for many; so it is asked for the first, and then for what else is there.
        messages = [] if (first := self._consumer.poll(self._patience_s())) is None else [first]
        if messages and asked > 1:
            messages += self._consumer.consume(asked - 1, 0.0)
        records = [record for message in messages if (record := self._read(message)) is not None]
        if records:
            # Nobody counts each one's headers: those of the first tell, and large ones are remembered for a while.
            self._header_bytes = max(bytes_of(records[0].headers), self._header_bytes * 9 // 10)
        # What was passed over comes after what may be behind it, but for as much as keeps the handlers busy.
        left = 2 * self._limits.records - self._all_in_hand()
        if passing and not self._draining.is_set() and (len(messages) < asked or left > 2 * self._limits.records - 500):
            records += self._surplus.read(left)
        if records:
            self._deliver(records)
        if time.monotonic() >= self._next_commit:
            self._take_finished()
            self._commit(synchronous=False)
            self._surplus.save(self._places.values())
            self._next_commit = time.monotonic() + self._commit_interval_s

    def _patience_s(self) -> float:
        return 0.0 if self._surplus.reading else _CONSUME_S

    def _read(self, message: Message) -> Record | None:
        if (error := message.error()) is not None:
            self._read_error(message, error)
            return None
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        assert topic is not None
        assert partition is not None
        assert offset is not None
        place = self._places.get((topic, partition))
        if place is None or offset <= place.last:
            return None
        if (topic, partition) in self._fresh:
            # Taken away and given back within one call: the message may have been fetched before that, with a hole in
            # front of it. Read the partition from its start again.
            self._consumer.seek(TopicPartition(topic, partition, place.start))
            return None
        if place.loading:
            self._consumer.seek(TopicPartition(topic, partition, place.start))
            return None
        if place.parked and (parked := place.parked.get(_bytes(message.key()) or b"")) is not None:
            place.last = offset
            self._surplus.pass_over(parked, offset)
            return None
        return self._record(message, place)

    def _record(self, message: Message, place: Place) -> Record:
        record = Record(
            place.topic,
            place.partition,
            message.offset() or 0,
            message.timestamp()[1],
            _bytes(message.key()),
            _bytes(message.value()),
            partial(kafka.headers_of, message),
            place,
            header_bytes=self._header_bytes,
        )
        place.took(record.offset, record.key, record.size, record.timestamp_ms)
        self._average_bytes += (record.size - self._average_bytes) / 100
        return record

    def _read_error(self, message: Message, error: KafkaError) -> None:
        if error.fatal():
            raise KafkaException(error)
        if error.code() == KafkaError._AUTO_OFFSET_RESET and message.topic() is not None:
            # The committed offset is no longer in the log: records expired unread. Say so and go on with what there is;
            # the events are in event_log, and a replay to this worker brings them.
            self._records_expired(str(message.topic()), int(message.partition() or 0), error)
            return
        self._warn(error)

    def _records_expired(self, topic: str, partition: int, error: KafkaError) -> None:
        place = self._places.get((topic, partition))
        if place is None:
            return
        try:
            low, _ = self._consumer.get_watermark_offsets(
                TopicPartition(topic, partition), timeout=_COMMITTED_TIMEOUT_S
            )
        except KafkaException:
            low = None  # only for the log and the commit: the beginning is found without it
        self._say_expired(place, low, error)
        # A seek is refused here: with auto.offset.reset=error the client has given the partition up. Assigned anew it
        # reads on; this is the assignment's own affair, so both group protocols have it.
        self._consumer.incremental_unassign([TopicPartition(topic, partition)])
        self._consumer.incremental_assign([TopicPartition(topic, partition, OFFSET_BEGINNING)])
        self._consumer.resume([TopicPartition(topic, partition)])  # a pause outlasts the assignment it was made in
        place.start = OFFSET_BEGINNING
        place.paused = False
        place.last = -1  # in a topic made anew the offsets begin anew
        # Committed even if no record comes, or an idle partition would say so again at each start.
        place.low = low

    def _say_expired(self, place: Place, low: int | None, error: KafkaError) -> None:
        _log.error(
            "worker.records_expired",
            worker=self._worker,
            topic=place.topic,
            partition=place.partition,
            offset=low,
            error=error.str(),
        )

    def _warn(self, error: KafkaError) -> None:
        """One line a minute for each kind: a broker that is away says so many times a second."""
        now = time.monotonic()
        if now - self._warned.get(error.name(), -60.0) >= 60.0:
            self._warned[error.name()] = now
            _log.warning("worker.kafka_error", worker=self._worker, error=error.str(), code=error.name())

    def _take_finished(self) -> None:
        while self._finished:
            record = self._finished.popleft()
            place: Place = record.place
            if place.alive:
                place.finished(record.offset, record.key, record.size)

    def _load(self, place: Place, found: Found) -> None:
        if place.alive:
            self._surplus.resume(place, found)
            place.loading = False

    def _in_hand(self) -> tuple[int, int]:
        """Records and bytes in hand, but for those that are read ahead of their due time, and those of the parked."""
        count = size = 0
        for place in self._places.values():
            if not place.waits:
                count, size = count + place.records, size + place.bytes
                for key in place.parked:
                    if (share := place.shares.get(key)) is not None:
                        count, size = count - share.records, size - share.bytes
        return count, size

    def _all_in_hand(self) -> int:
        return sum(place.records for place in in_hand(self._places.values()) if not place.waits)

    def _balance(self) -> None:
        """Pause what is over its limit, let go on what is under half of it."""
        limits, draining = self._limits, self._draining.is_set()
        count, size = self._in_hand()
        over = count >= limits.records or size >= limits.bytes
        if (
            over
            and not draining
            and self._may_park()
            and (found := largest([place for place in self._places.values() if not place.waits], count)) is not None
        ):
            self._surplus.park(*found)
            over = False
        now = time.monotonic()
        if not over:
            self._full_since = None
        elif self._full_since is None:
            self._full_since = now
        over = over and (size >= limits.bytes or now - (self._full_since or now) >= _PAUSE_AFTER_S)
        over = draining or over or self._all_in_hand() >= 2 * limits.records
        under = not over and count <= limits.records / 2 and size <= limits.bytes / 2
        pause: list[Place] = []
        resume: list[Place] = []
        for place in self._places.values():
            if place.waits:
                place_over = draining or place.records >= limits.waiting_records or place.bytes >= limits.waiting_bytes
                place_under = (
                    not draining
                    and place.records <= limits.waiting_records / 2
                    and place.bytes <= limits.waiting_bytes / 2
                )
            else:
                # Until a mark is committed, what it lets pass is held: then so little as possible.
                held = place.loading or any(not parked.marked for parked in place.parked.values())
                place_over, place_under = over or held, (under or bool(place.parked)) and not (over or held)
            if place_over and not place.paused:
                pause.append(place)
            elif place_under and place.paused:
                resume.append(place)
        for places, call, paused in ((pause, self._consumer.pause, True), (resume, self._consumer.resume, False)):
            if places:
                call([TopicPartition(place.topic, place.partition) for place in places])
                for place in places:
                    place.paused = paused

    def _commit(self, *, synchronous: bool, between_reads: bool = True) -> None:
        offsets = []
        for place in self._places.values():
            _forget_moments(place)
            mark = place.offsets.committable
            if place.low is not None:
                mark = max(mark or 0, place.low)
            if between_reads and place.offsets.idle and place.last >= 0:
                # Nothing is out: what the consumer has passed is finished, the markers of transactions at the end
                # included. Without this the lag of a transactional topic never reaches zero. Only between two reads:
                # inside one (a revoke) the consumer has passed records that it has not handed over.
                [position] = self._consumer.position([TopicPartition(place.topic, place.partition)])
                if position.offset > (mark or 0):
                    mark = position.offset
            if mark is not None and mark != place.committed:
                offsets.append(TopicPartition(place.topic, place.partition, mark))
                place.committed = mark
        if not offsets:
            return
        faults.point("worker.before_offset_commit")
        if not synchronous:
            self._consumer.commit(offsets=offsets, asynchronous=True)
            return
        try:
            self._consumer.commit(offsets=offsets, asynchronous=False)
        except KafkaException as error:
            # A lost partition, or a broker that is away at the end: the records come again, and are known.
            _log.warning("worker.commit_failed", worker=self._worker, error=str(error))

    # Callbacks of the client: in this thread, inside consume, commit and close.

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        if partitions:
            committed = consumer.committed(partitions, timeout=_COMMITTED_TIMEOUT_S)
            for partition in committed:
                if partition.error is not None:
                    raise KafkaException(partition.error)
                start = partition.offset if partition.offset >= 0 else OFFSET_BEGINNING
                partition.offset = start
                place = (partition.topic, partition.partition)
                self._fresh.add(place)
                waits = partition.topic in self._waiting_topics
                self._places[place] = Place(
                    partition.topic,
                    partition.partition,
                    waits=waits,
                    start=start,
                    committed=None if start == OFFSET_BEGINNING else start,
                    last=max(start, 0) - 1,
                    paused=not waits,
                    loading=not waits,
                )
            consumer.incremental_assign(committed)
            if sources := [p for p in committed if p.topic not in self._waiting_topics]:
                consumer.pause(sources)
                self._marks.load([self._places[p.topic, p.partition] for p in sources])
        self._assigned(len(self._places))

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        places = [place for p in partitions if (place := self._places.get((p.topic, p.partition))) is not None]
        if places:
            drained = threading.Event()
            began = time.monotonic()
            self._revoke(list(in_hand(places)), drained)
            drained.wait(self._revoke_drain_s)
            faults.point("worker.in_revoke")
            self._waited(time.monotonic() - began)
            self._take_finished()
            self._commit(synchronous=True, between_reads=False)
        self._forget(places)

    def _on_lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        places = [place for p in partitions if (place := self._places.get((p.topic, p.partition))) is not None]
        if places:
            self._revoke(list(in_hand(places)), threading.Event())
        self._forget(places)

    def _forget(self, places: list[Place]) -> None:
        for place in places:
            for parked in self._surplus.forget(place):
                parked.alive = False
            place.alive = False
            del self._places[place.topic, place.partition]

    def _on_commit(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        if error is None or error.code() == KafkaError._NO_OFFSET:
            return
        self._warn(error)
        for partition in partitions:
            if (place := self._places.get((partition.topic, partition.partition))) is not None:
                place.committed = None  # offered again at the next turn

    def _on_error(self, error: KafkaError) -> None:
        if error.fatal():
            self._failed(KafkaException(error))
        else:
            self._warn(error)


def _forget_moments(place: Place) -> None:
    """Those of records before the first unfinished one, but for the nearest."""
    first, moments = place.offsets.first_unfinished, place.moments
    if first is None:
        moments.clear()
        return
    while len(moments) > 1 and moments[1][0] <= first:
        moments.popleft()


def _bytes(value: Any) -> bytes | None:
    return value.encode() if isinstance(value, str) else value
