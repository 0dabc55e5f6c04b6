"""Clients of the cluster, opened at the edge and passed down: producer, consumer, admin, and a reader for whole topics.

What must stay true: no client of ours commits offsets by itself, and every one reads read_committed unless told
otherwise. librdkafka's own log lines go to the structured log, not to stderr.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from afluente.errors import Unavailable

if TYPE_CHECKING:
    from afluente.settings import KafkaSettings

__all__ = ["admin", "consumer", "headers_of", "producer", "read_topic"]

METADATA_TIMEOUT_S = 10.0
READ_STALL_S = 30.0

_log = logging.getLogger("afluente.kafka")

_read_headers = methodcaller("headers")


def producer(settings: KafkaSettings, **overrides: Any) -> Producer:
    """An idempotent producer. `overrides` are librdkafka's names with `_` for `.`: transactional_id="relay-1-0"."""
    config = {
        **settings.client_config(),
        "enable.idempotence": True,
        "partitioner": "murmur2_random",
        "compression.type": "lz4",
        "linger.ms": 5,
        **_dotted(overrides),
    }
    return Producer(config, logger=_log)


def consumer(settings: KafkaSettings, group: str, **overrides: Any) -> Consumer:
    """A consumer of the group `group` (the installation's prefix is added here). The caller commits offsets."""
    config = {
        **settings.client_config(),
        "group.id": settings.group_id(group),
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "earliest",
        "isolation.level": "read_committed",
        **_dotted(overrides),
    }
    return Consumer(config, logger=_log)


def admin(settings: KafkaSettings, **overrides: Any) -> AdminClient:
    """An admin client. Silent: what goes wrong is in the error of the call, said once and in our words."""
    return AdminClient({**settings.client_config(), "log_level": 0, **_dotted(overrides)})


def read_topic(
    settings: KafkaSettings, topic: str, isolation: str = "read_committed", *, stall_s: float = READ_STALL_S
) -> Iterator[Message]:
    """Every record of `topic` (its full name) from the beginning to the end as it was when the reading got there.

    For tests and tools: no group, nothing committed. With read_committed the end is the last stable offset, so an open
    transaction ends the reading before its records. Records of one partition come in order. Unavailable when the
    topic does not exist or nothing arrives for `stall_s` seconds.
    """
    client = Consumer(
        {
            **settings.client_config(),
            "group.id": "afluente-read-topic",  # librdkafka wants one; it is never joined
            "enable.auto.commit": False,
            "isolation.level": isolation,
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 20,
        },
        logger=_log,
    )
    try:
        metadata = client.list_topics(topic, timeout=METADATA_TIMEOUT_S).topics[topic]
        if metadata.error is not None:
            raise Unavailable(f"topic {topic} cannot be read: {metadata.error.str()}", hint="afluente topics apply")
        unread = set(metadata.partitions)
        client.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in unread])
        while unread:
            record = client.poll(stall_s)
            if record is None:
                raise Unavailable(
                    f"topic {topic}: nothing arrived for {stall_s:.0f} s, {len(unread)} partitions unread"
                )
            error = record.error()
            if error is None:
                yield record
            elif error.code() == KafkaError._PARTITION_EOF:
                unread.discard(record.partition())
            elif not error.retriable():
                raise KafkaException(error)
    finally:
        client.close()


def headers_of(record: Message) -> list[tuple[str, bytes | None]] | None:
    """The record's headers in their order, names repeated as they are; None when they cannot be read.

    Anybody who may produce can write a header name that is not UTF-8, and confluent-kafka then answers with a list that
    must not be looked at: it holds NULL where the name should be, and the interpreter, which takes the short way for
    `record.headers()`, crashes on it. Called through methodcaller the answer is checked, and is a SystemError. Ask only
    once for each record, and only here: after a failure the client gives out that list without an error.
    """
    try:
        found = _read_headers(record) or []
    except (SystemError, UnicodeDecodeError):
        return None
    # Should the error ever get lost on its way here, this counts what is in the pairs without touching a NULL among it.
    return found if len(gc.get_referents(*found)) == 2 * len(found) else None


def _dotted(overrides: dict[str, Any]) -> dict[str, Any]:
    # Callbacks keep their underscore (error_cb, stats_cb, on_commit), and so does log_level.
    return {
        name if name.endswith("_cb") or name.startswith("on_") or name == "log_level" else name.replace("_", "."): value
        for name, value in overrides.items()
    }
