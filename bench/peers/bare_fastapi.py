"""A bare FastAPI endpoint, the limit of the receiver: the raw body, one insert, the answer. It checks nothing.

The pool, the server and its settings are the receiver's; each insert commits by itself (autocommit), in one round trip.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from psycopg_pool import AsyncConnectionPool

POOL_SIZE = 8
KEEP_ALIVE_S = 30

TABLE = """
CREATE TABLE bench_bare (
    id          uuid PRIMARY KEY DEFAULT uuidv7(),
    source      text NOT NULL,
    raw_body    bytea NOT NULL,
    received_at timestamptz NOT NULL DEFAULT clock_timestamp()
)
"""

pool: AsyncConnectionPool[Any] = AsyncConnectionPool(
    os.environ.get("PEER_DATABASE_URL", ""),
    open=False,
    min_size=POOL_SIZE,
    max_size=POOL_SIZE,
    kwargs={"autocommit": True},
)


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    await pool.open(wait=True)
    yield
    await pool.close()


app = FastAPI(lifespan=lifespan)


@app.post("/webhooks/{source}/{channel}")
async def take(source: str, request: Request) -> dict[str, str]:
    body = await request.body()
    async with pool.connection() as conn:
        await conn.execute("INSERT INTO bench_bare (source, raw_body) VALUES (%s, %s)", (source, body))
    return {"status": "stored"}


class Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        print(json.dumps({"event": "web.ready", "host": host, "port": port}), flush=True)


def main() -> None:
    config = uvicorn.Config(
        app, port=0, ws="none", log_config=None, access_log=False, server_header=False, timeout_keep_alive=KEEP_ALIVE_S
    )
    Server(config).run()


if __name__ == "__main__":
    main()
