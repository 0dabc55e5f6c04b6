"""Reading for the reconciliation: committed records to the end, committed offsets, how long topics keep their records.

What must stay true: only committed records are seen; nothing is committed and no group is joined, so that looking
changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    ConsumerGroupTopicPartitions,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from afluente import kafka
from afluente.errors import Unavailable
from afluente.settings import KafkaSettings

TIMEOUT_S = 30.0
BATCH = 1000
# consume() returns when the batch is full or this is over, so it is what the end of a reading costs.
TURN_S = 0.05


class TopicReader:
    """Reads topics from their beginning to their end, and on from there. Use it as a context manager."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._consumer: Consumer = kafka.consumer(
            settings, "afluente-verify", enable_partition_eof=True, fetch_wait_max_ms=20
        )
        self._unread: set[tuple[str, int]] = set()

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
