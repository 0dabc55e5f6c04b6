"""FastStream as its documentation shows it: a handler for one message, in a transaction of its own, acknowledged after.

Its confluent-kafka broker, the quicker of its two. Run by the Python of its own virtual environment, by its path.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import asyncio
import json
import os
from io import BytesIO
from typing import Any

import fastavro
from faststream import AckPolicy, FastStream
from faststream.confluent import KafkaBroker, KafkaMessage
from psycopg_pool import AsyncConnectionPool
from saying import ready  # the script's own folder is on the path

_FRAMING_BYTES = 5

with open(os.environ["PEER_SCHEMA"]) as file:
    schema = fastavro.parse_schema(json.load(file))
broker = KafkaBroker(os.environ["PEER_BOOTSTRAP_SERVERS"])
app = FastStream(broker)
pool: AsyncConnectionPool[Any] = AsyncConnectionPool(os.environ["PEER_DATABASE_URL"], open=False, max_size=4)


async def decode(message: KafkaMessage) -> dict[str, Any]:
    return fastavro.schemaless_reader(BytesIO(message.body[_FRAMING_BYTES:]), schema, None)  # type: ignore[return-value]


@app.on_startup
async def opened() -> None:
    await pool.open()


@app.after_startup
async def started() -> None:
    ready()


@app.after_shutdown
async def closed() -> None:
    await pool.close()


@broker.subscriber(
    os.environ["PEER_TOPIC"],
    group_id=os.environ["PEER_GROUP"],
    auto_offset_reset="earliest",
    isolation_level="read_committed",
    ack_policy=AckPolicy.NACK_ON_ERROR,
    decoder=decode,
)
async def handle(event: dict[str, Any]) -> None:
    async with pool.connection() as conn:
        fresh = await conn.execute(
            "INSERT INTO bench_inbox (worker, event_id) VALUES ('faststream', %s) ON CONFLICT DO NOTHING",
            [event["id"]],
        )
        if fresh.rowcount:
            payload = event["payload"]
            await conn.execute(
                "INSERT INTO bench_effect (event_id, organization_id, contact_id, body) VALUES (%s, %s, %s, %s)",
                [event["id"], event["organization_id"], payload["contact_id"], payload["body"]],
            )


if __name__ == "__main__":
    asyncio.run(app.run())
