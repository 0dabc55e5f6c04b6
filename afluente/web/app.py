"""The web application: which parts it serves, its pool, and its health.

`/healthz` says that the process lives, `/readyz` that Postgres answers. The pool is opened without waiting: a
receiver that starts while Postgres is away answers 503, and takes deliveries once it is back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import StrEnum

import psycopg
from fastapi import FastAPI
from psycopg_pool import PoolTimeout
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from afluente import postgres
from afluente.clock import Clock
from afluente.secrets import Keyring
from producers.ingest.app import Observer, Receiver, ignore

POOL_SIZE = 8
# Two write deliveries; the others read connections, and take what has to go alone.
INGEST_POOL_SIZE = 8
READY_WITHIN_S = 2.0


class Part(StrEnum):
    """What a process serves."""

    INGEST = "ingest"


class Application(FastAPI):
    """FastAPI, with the receiver before it: a delivery needs none of what it does for a request."""

    receiver: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.receiver is not None and scope["type"] == "http" and scope["path"].startswith("/webhooks/"):
            await self.receiver(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def build(dsn: str, keyring: Keyring, *, clock: Clock | None = None, observer: Observer = ignore) -> FastAPI:
    """The application over a pool of its own, opened and closed with it."""
    pool = postgres.pool_async(dsn, min_size=1, max_size=POOL_SIZE, application_name="afluente web")
    # Apart, so that nothing else that is served keeps deliveries waiting; each of its statements commits by itself.
    ingest_pool = postgres.pool_async(
        dsn, min_size=2, max_size=INGEST_POOL_SIZE, application_name="afluente ingest", autocommit=True
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await pool.open(wait=False)
        await ingest_pool.open(wait=False)
        try:
            yield
        finally:
            await ingest_pool.close()
            await pool.close()

    async def ready(_: Request) -> Response:
        try:
            async with pool.connection(timeout=READY_WITHIN_S):
                return PlainTextResponse("ready\n")
        except (psycopg.OperationalError, PoolTimeout):
            return PlainTextResponse("postgres is away\n", 503)

    async def healthy(_: Request) -> Response:
        return PlainTextResponse("alive\n")

    # The receiver is no API for people: it stays out of the OpenAPI document, which this process does not serve.
    app = Application(title="Afluente", lifespan=lifespan, openapi_url=None)
    app.receiver = Receiver(ingest_pool, keyring, clock=clock, observer=observer)
    app.add_route("/healthz", healthy)
    app.add_route("/readyz", ready)
    return app
