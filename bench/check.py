"""Is all of the work in the topic? Every record is read back; a missing or misplaced one costs the peer its figure."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from confluent_kafka import Message

import schemas
from afluente import kafka
from afluente.settings import KafkaSettings
from bench.errors import BenchError
from bench.rows import Rows, payloads

SAMPLE_EVERY = 97


@dataclass(frozen=True)
class Form:
    """How a peer writes: where a record has its row's seq, and what its value means as JSON."""

    seq: Callable[[dict[str, bytes]], int]
    payload: Callable[[bytes], Any]


RELAY = Form(lambda headers: int(headers["seq"]), lambda value: schemas.decode(value).payload)
# SimpleHeaderConverter writes the number as text; the value is the column's JSON text.
DEBEZIUM = Form(lambda headers: int(headers["id"]), json.loads)


@dataclass(frozen=True)
class Output:
    """What was found: records, and the broker's time of the last one (seconds since 1970)."""

    records: int
    last_at: float
    value_bytes: float


def check(peer: str, settings: KafkaSettings, topic: str, url: str, rows: Rows, form: Form) -> Output:
    """Read the topic read_committed and compare it with the table: count, distinct, complete, keys, order in each
    organization, and the payload of every 97th row. BenchError when anything differs."""
    seen = bytearray(rows.count)
    last_of: dict[tuple[int, bytes], int] = {}
    sample: dict[int, Any] = {}
    twice = misplaced = foreign = count = size = last_ms = 0
    for record in kafka.read_topic(settings, topic):
        count += 1
        seq, value = form.seq(_headers(record)), record.value() or b""
        place = seq - rows.first
        if not 0 <= place < rows.count or (key := record.key()) != rows.keys[rows.organizations[place]]:
            foreign += 1
            continue
        twice += seen[place]
        seen[place] = 1
        where = (record.partition() or 0, key)
        misplaced += seq < last_of.get(where, 0)
        last_of[where] = seq
        size += len(value)
        last_ms = max(last_ms, record.timestamp()[1])
        if place % SAMPLE_EVERY == 0:
            sample[seq] = form.payload(value)
    problems = {
        "records": count - rows.count,
        "twice": twice,
        "missing": rows.count - sum(seen),
        "out of order": misplaced,
        "of no row or under a wrong key": foreign,
        "organizations in two partitions": len(last_of) - len({key for _, key in last_of}),
        "payloads that differ": sum(value != sample[seq] for seq, value in payloads(url, list(sample)).items()),
    }
    if any(problems.values()):
        found = ", ".join(f"{name}: {number:+d}" for name, number in problems.items() if number)
        raise BenchError(f"{peer} did not do the work on {rows.count} rows: {found}")
    return Output(count, last_ms / 1000, size / count)


def _headers(record: Message) -> dict[str, bytes]:
    return dict(record.headers() or [])  # type: ignore[arg-type]
