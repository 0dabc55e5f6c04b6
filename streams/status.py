"""How far the summaries are: the fences in Postgres against the ends in Kafka. Reads only.

Kafka's committed offsets of the group are not looked at: they are written for displays and may be behind. Records of
open transactions count as waiting: a transaction is confirmed to its producer before its records can be read, so a lag
without them would be 0 too early.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg
from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import OffsetSpec

import sql
from afluente import kafka as clients
from afluente.errors import Unavailable
from afluente.settings import KafkaSettings

KAFKA_TIMEOUT_S = 10.0

_QUERIES = sql.queries("summaries")


@dataclass(frozen=True)
class PartitionStatus:
    """next_offset is the fence, end_offset the end of the partition; None when the partition was never claimed."""

    partition: int
    next_offset: int | None
    end_offset: int
    lag: int
    claimed_by: UUID | None
    updated_at: datetime | None


@dataclass(frozen=True)
class Status:
    """The live generation: what it holds, and how many records wait for it."""

    generation: int
    topic: str
    lag: int
    summaries: int
    events: int
    dead_letters: int
    partitions: list[PartitionStatus]


def status(conn: psycopg.Connection[Any], kafka: KafkaSettings, topic: str) -> Status:
    """The state of folding `topic`. Unavailable when Kafka does not answer or has no such topic."""
    generation, summaries, events, dead_letters = conn.execute(_QUERIES["totals"]).fetchall()[0]
    fences = {
        partition: (next_offset, claimed_by, updated_at)
        for _, name, partition, next_offset, claimed_by, updated_at in conn.execute(_QUERIES["fences"]).fetchall()
        if name == topic
    }
    partitions = []
    for partition, (first, end) in sorted(bounds(kafka, topic).items()):
        next_offset, claimed_by, updated_at = fences.get(partition, (None, None, None))
        lag = max(0, end - max(first, next_offset or 0))
        partitions.append(PartitionStatus(partition, next_offset, end, lag, claimed_by, updated_at))
    return Status(
        generation, topic, sum(partition.lag for partition in partitions), summaries, events, dead_letters, partitions
    )


def dead_letters(conn: psycopg.Connection[Any], limit: int) -> list[dict[str, Any]]:
    """The newest records that could not be folded, without their bytes."""
    cursor = conn.execute(_QUERIES["dead_letters"], {"limit": limit})
    names = [column.name for column in cursor.description or ()]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def bounds(kafka: KafkaSettings, topic: str) -> dict[int, tuple[int, int]]:
    """The first offset and the end of each partition, open transactions included."""
    admin = clients.admin(kafka)
    try:
        metadata = admin.list_topics(topic, timeout=KAFKA_TIMEOUT_S).topics[topic]
        if metadata.error is not None:
            raise Unavailable(f"topic {topic} cannot be read: {metadata.error.str()}", hint="afluente topics apply")
        found = []
        specs: Any = OffsetSpec  # its constructors have no types
        for spec in (specs.earliest(), specs.latest()):
            futures = admin.list_offsets(
                {TopicPartition(topic, partition): spec for partition in metadata.partitions},
                isolation_level=IsolationLevel.READ_UNCOMMITTED,
                request_timeout=KAFKA_TIMEOUT_S,
            )
            found.append({tp.partition: future.result(KAFKA_TIMEOUT_S).offset for tp, future in futures.items()})
    except KafkaException as error:
        raise Unavailable(f"Kafka does not answer: {error.args[0].str()}", hint="afluente doctor") from error
    first, end = found
    return {partition: (first[partition], end[partition]) for partition in first}
