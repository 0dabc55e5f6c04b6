"""Reading topics to compare them: committed records between two places, offsets by time, how long records are kept.

What must stay true: only committed records are seen; nothing is committed and no group is joined, so that looking
changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, ConfigResource, OffsetSpec, ResourceType

from afluente import kafka
from afluente.errors import Unavailable
from afluente.settings import KafkaSettings

TIMEOUT_S = 30.0
BATCH = 1000
# consume() returns when the batch is full or this is over, so it is what the end of a reading costs.
TURN_S = 0.05
# What librdkafka reads ahead; its default is 64 MiB.
AHEAD_KIB = 16 * 1024

MOVED_FOR_S = 5.0
LEADER_MOVED = frozenset(  # librdkafka does not call these retriable when an admin client gets them
    {
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
    }
)

Place = tuple[str, int]  # topic, partition


@dataclass(frozen=True, slots=True)
class Retained:
    """What a partition holds: offsets from `first` to before `end`, and when the first of them was appended (None:
    nothing is left). With `first` 0 nothing was ever deleted."""

    first: int
    end: int
    since: datetime | None


class TopicReader:
    """Reads topics from their beginning to their end and on from there, or between offsets. Use it as a context
    manager."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._consumer: Consumer = kafka.consumer(
            settings,
            "afluente-verify",
            enable_partition_eof=True,
            fetch_wait_max_ms=20,
            queued_max_messages_kbytes=AHEAD_KIB,
        )
        self._unread: set[Place] = set()

    def __enter__(self) -> TopicReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()

    def existing(self, topics: Iterable[str]) -> list[str]:
        """Those of ``topics`` that the cluster has, in their order."""
        there = self._consumer.list_topics(timeout=TIMEOUT_S).topics
        return [topic for topic in topics if topic in there]

    def to_the_end(self, topics: Sequence[str]) -> Iterator[Message]:
        """Every committed record of these topics, up to where each partition ended when the reading got there.

        Raises Unavailable when the cluster falls silent before the end.
        """
        there = self._consumer.list_topics(timeout=TIMEOUT_S).topics
        self._unread = {(topic, partition) for topic in topics for partition in there[topic].partitions}
        self._consumer.assign([TopicPartition(*place, OFFSET_BEGINNING) for place in sorted(self._unread)])
        heard = time.monotonic()
        while self._unread:
            for record in self._consumer.consume(BATCH, TURN_S):
                heard = time.monotonic()
                if self._is_record(record):
                    yield record
            if time.monotonic() - heard > TIMEOUT_S:
                raise Unavailable(f"nothing was heard of {len(self._unread)} partitions for {TIMEOUT_S:.0f} s")

    def between(self, starts: Mapping[Place, int], ends: Mapping[Place, int]) -> Iterator[Message]:
        """The committed records from `starts` to before `ends`, which are offsets; those of a partition in order.

        An open transaction below an end is waited for. Raises Unavailable when it, or the cluster, stays silent.
        """
        unread = {place: end for place, end in ends.items() if starts[place] < end}
        self._consumer.assign([TopicPartition(*place, starts[place]) for place in sorted(unread)])
        heard = time.monotonic()
        try:
            while unread:
                finished = []
                for record in self._consumer.consume(BATCH, TURN_S):
                    place, offset = (str(record.topic()), int(record.partition() or 0)), int(record.offset() or 0)
                    if (end := unread.get(place)) is None:
                        continue
                    if (error := record.error()) is None:
                        heard = time.monotonic()
                        if offset < end:
                            yield record
                        offset += 1
                    elif error.code() != KafkaError._PARTITION_EOF:
                        if not error.retriable():
                            raise KafkaException(error)
                        continue
                    # Control records have offsets too, so no record need be the last before the end. And this is not
                    # the end while a transaction below it is open: then it comes again, further on.
                    if offset >= end:
                        del unread[place]
                        finished.append(TopicPartition(*place))
                if finished:
                    self._consumer.incremental_unassign(finished)
                if time.monotonic() - heard > TIMEOUT_S:
                    places = ", ".join(f"{topic}[{partition}]" for topic, partition in sorted(unread)[:5])
                    raise Unavailable(
                        f"{places} cannot be read to the end: nothing was heard for {TIMEOUT_S:.0f} s",
                        hint="a transaction there may be undecided: afluente relay repair",
                    )
        finally:
            self._consumer.unassign()

    def onward(self, seconds: float) -> Iterator[Message | None]:
        """What is committed after that, for so long; None now and then, so that the caller can see whether it has
        enough."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            for record in self._consumer.consume(BATCH, min(left, TURN_S)):
                if self._is_record(record):
                    yield record
            yield None

    def _is_record(self, record: Message) -> bool:
        error = record.error()
        if error is None:
            return True
        if error.code() == KafkaError._PARTITION_EOF:
            self._unread.discard((str(record.topic()), int(record.partition() or 0)))
        elif not error.retriable():
            raise KafkaException(error)
        return False


def retained(admin: AdminClient, places: Iterable[Place]) -> dict[Place, Retained]:
    """What each partition holds. The ends include what is not committed yet: whoever reads up to them has seen every
    transaction that was begun before."""
    asked = list(places)
    ends = _offsets(admin, asked, OffsetSpec.latest())  # type: ignore[no-untyped-call]
    firsts = _offsets(admin, asked, OffsetSpec.earliest())  # type: ignore[no-untyped-call]
    oldest = _offsets(admin, asked, OffsetSpec.for_timestamp(0))
    return {
        place: Retained(
            firsts[place][0],
            ends[place][0],
            datetime.fromtimestamp(oldest[place][1] / 1000, UTC) if oldest[place][1] >= 0 else None,
        )
        for place in asked
    }


def offsets_at(admin: AdminClient, places: Iterable[Place], moment: datetime) -> dict[Place, int | None]:
    """The first offset of each partition that was appended at `moment` or later; None when there is none."""
    found = _offsets(admin, list(places), OffsetSpec.for_timestamp(max(0, int(moment.timestamp() * 1000))))
    return {place: offset if offset >= 0 else None for place, (offset, _) in found.items()}


def _offsets(admin: AdminClient, places: Sequence[Place], spec: OffsetSpec) -> dict[Place, tuple[int, int]]:
    """(offset, timestamp in milliseconds) of each; -1 where there is none."""
    asked = {TopicPartition(*place): spec for place in places}
    deadline = time.monotonic() + MOVED_FOR_S
    while asked:
        futures = admin.list_offsets(asked, isolation_level=IsolationLevel.READ_UNCOMMITTED, request_timeout=TIMEOUT_S)
        try:
            found = {(place.topic, place.partition): future.result(TIMEOUT_S) for place, future in futures.items()}
        except KafkaException as error:
            # A leader that has just moved, or a topic that has just been made: the next metadata know it.
            if error.args[0].code() not in LEADER_MOVED or time.monotonic() > deadline:
                raise
            time.sleep(TURN_S)
        else:
            return {place: (info.offset, info.timestamp) for place, info in found.items()}
    return {}


def committed_offsets(admin: AdminClient, group: str) -> dict[tuple[str, int], int]:
    """(topic, partition) to the offset a consumer group goes on from; empty for a group that never was."""
    asked = admin.list_consumer_group_offsets(
        [ConsumerGroupTopicPartitions(group)], require_stable=True, request_timeout=TIMEOUT_S
    )
    try:
        answer = asked[group].result(TIMEOUT_S)
    except KafkaException as error:
        if error.args[0].code() == KafkaError.GROUP_ID_NOT_FOUND:
            return {}
        raise
    return {
        (place.topic, place.partition): place.offset for place in answer.topic_partitions or () if place.offset >= 0
    }


def retention(admin: AdminClient, topics: Sequence[str]) -> timedelta | None:
    """How long records are certain to be kept in all of these topics; None for ever."""
    if not topics:
        return None
    asked = admin.describe_configs(
        [ConfigResource(ResourceType.TOPIC, topic) for topic in topics], request_timeout=TIMEOUT_S
    )
    kept = [int(future.result(TIMEOUT_S)["retention.ms"].value) for future in asked.values()]
    finite = [milliseconds for milliseconds in kept if milliseconds >= 0]
    return timedelta(milliseconds=min(finite)) if finite else None


def headers_of(record: Message) -> Mapping[str, str]:
    """The headers as text, the last of each name; what is not text is left out. None of a record whose headers nobody
    can read: it is none of ours."""
    found = {}
    for name, value in kafka.headers_of(record) or ():
        try:
            found[name] = value.decode() if isinstance(value, bytes) else ""
        except UnicodeDecodeError:
            continue
    return found
