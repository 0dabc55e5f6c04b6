"""The limits that no relay can pass here: COPY of the same columns out of Postgres, and producing without a source."""

from __future__ import annotations

import time
from dataclasses import dataclass

import psycopg
from confluent_kafka import Producer

from afluente import kafka
from bench.errors import BenchError
from bench.rows import EVENT_TYPE, Rows
from bench.servers import Servers

BATCH_BYTES = 1_000_000
VALUE_BYTES = 560  # of an Avro record of such a row

_COPY = """
COPY (SELECT seq, id, organization_id, event_type, entity_kind, entity_id, convert_to(payload::text, 'UTF8'),
             convert_to(metadata::text, 'UTF8'), created_at
        FROM event_log ORDER BY seq) TO STDOUT (FORMAT binary)
"""


@dataclass(frozen=True)
class Raw:
    """One run: rows a second out of Postgres, and into Kafka."""

    copy_rows_per_s: float
    produce_rows_per_s: float


def measure(servers: Servers, url: str, rows: Rows, run: int) -> Raw:
    """The rows are not looked at on the way out; what is produced has the size and the keys of the rows."""
    began = time.monotonic()
    size = 0
    with psycopg.connect(url) as conn, conn.cursor().copy(_COPY) as copy:
        for block in copy:
            size += len(block)
    copied_s = time.monotonic() - began
    if size < rows.count * rows.payload_bytes:
        raise BenchError(f"COPY gave {size} bytes for {rows.count} rows: less than their payloads")
    return Raw(rows.count / copied_s, rows.count / _produce(servers, rows, run))


def _produce(servers: Servers, rows: Rows, run: int) -> float:
    prefix = f"raw{run}."
    value = b"\0" * VALUE_BYTES
    failed: list[str] = []
    with servers.topics(prefix) as topics:
        topic = topics.event(EVENT_TYPE)
        producer: Producer = kafka.producer(
            servers.settings(prefix),
            compression_type="none",
            batch_size=BATCH_BYTES,
            queue_buffering_max_messages=rows.count + 1,
            queue_buffering_max_kbytes=2_000_000,
            delivery_report_only_error=True,
            on_delivery=lambda error, message: failed.append(str(error)),
        )
        # The first one waits for metadata and a producer id: no part of the pace.
        producer.produce(topic, value, rows.keys[0])
        producer.flush()
        began = time.monotonic()
        for number in rows.organizations[1:]:
            producer.produce(topic, value, rows.keys[number])
        producer.flush()
        took_s = time.monotonic() - began
        found = sum(1 for _ in kafka.read_topic(servers.settings(prefix), topic))
        if failed or found != rows.count:
            raise BenchError(f"plain produce: {found} of {rows.count} records arrived; {failed[:1]}")
    return took_s
