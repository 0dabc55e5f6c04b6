"""A plain loop on confluent-kafka: 500 records, one JSON parameter, one statement, one transaction, then the offsets.

What somebody writes who has measured and needs nothing else: no retry, no dead letters, no fairness, no order beyond
the partition's, and a bad record stops it.
"""

from __future__ import annotations

import os
import signal
from io import BytesIO
from types import FrameType
from typing import Any

import fastavro
import orjson
import psycopg
from confluent_kafka import Consumer, KafkaException, TopicPartition

from bench.peers.saying import ready

BATCH = 500
WAIT_S = 0.1
_FRAMING_BYTES = 5

_WRITE = """
WITH input AS (
    SELECT * FROM jsonb_to_recordset(%s::jsonb)
           AS input (event_id uuid, organization_id uuid, contact_id text, body text)
), fresh AS (
    INSERT INTO bench_inbox (worker, event_id) SELECT 'loop', event_id FROM input ON CONFLICT DO NOTHING
    RETURNING event_id
)
INSERT INTO bench_effect (event_id, organization_id, contact_id, body)
SELECT event_id, organization_id, contact_id, body FROM input JOIN fresh USING (event_id)
"""


def main() -> None:
    stopping: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        stopping.append(number)

    signal.signal(signal.SIGTERM, stop)
    with open(os.environ["PEER_SCHEMA"]) as file:
        schema: Any = fastavro.parse_schema(orjson.loads(file.read()))
    consumer = Consumer(
        {
            "bootstrap.servers": os.environ["PEER_BOOTSTRAP_SERVERS"],
            "group.id": os.environ["PEER_GROUP"],
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "fetch.queue.backoff.ms": 5,
        }
    )

    def assigned(consumer: Consumer, places: list[TopicPartition]) -> None:
        if places:
            ready()

    consumer.subscribe([os.environ["PEER_TOPIC"]], on_assign=assigned)
    with psycopg.connect(os.environ["PEER_DATABASE_URL"]) as conn:
        while not stopping:
            effects = []
            for record in consumer.consume(BATCH, WAIT_S):
                if (error := record.error()) is not None:
                    raise KafkaException(error)
                event: Any = fastavro.schemaless_reader(BytesIO((record.value() or b"")[_FRAMING_BYTES:]), schema, None)
                payload = event["payload"]
                effects.append(
                    {
                        "event_id": event["id"],
                        "organization_id": event["organization_id"],
                        "contact_id": payload["contact_id"],
                        "body": payload["body"],
                    }
                )
            if effects:
                conn.execute(_WRITE, [orjson.dumps(effects).decode()])
                conn.commit()
                consumer.commit(asynchronous=True)
        places = [place for place in consumer.position(consumer.assignment()) if place.offset >= 0]
        if places:
            consumer.commit(offsets=places, asynchronous=False)
    consumer.close()


if __name__ == "__main__":
    main()
