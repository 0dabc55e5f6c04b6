"""The web application: which parts it serves, their pools, and its health.

`/healthz` says that the process lives, `/readyz` that Postgres answers. The pool is opened without waiting: a
receiver that starts while Postgres is away answers 503, and takes deliveries once it is back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from enum import StrEnum

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from afluente import postgres
from afluente.clock import Clock
from afluente.secrets import Keyring
from afluente.web.api.app import Api
from afluente.web.links import Links
from producers.ingest.app import Observer, Receiver, ignore

POOL_SIZE = 8
# Two write deliveries; the others read connections, and take what has to go alone.
INGEST_POOL_SIZE = 8
# Visitors wait for it when Postgres is slow, which is to keep nothing else waiting.
LINKS_POOL_SIZE = 4
READY_WITHIN_S = 2.0


class Part(StrEnum):
    """What a process serves."""

    INGEST = "ingest"
    API = "api"
    LINKS = "links"


class Application(FastAPI):
    """FastAPI, with the receiver and the API before it: they need none of what it does for a request. And no path is
    too odd for a prefix: of one with a line break in it, FastAPI's own mounts would not know that it is theirs."""

    receiver: ASGIApp | None = None
    api: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        if self.receiver is not None and path.startswith("/webhooks/"):
            await self.receiver(scope, receive, send)
        elif self.api is not None and (path.startswith("/v1/") or path == "/v1"):
            await self.api(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def build(
    dsn: str,
    keyring: Keyring | None,
    *,
    parts: Collection[Part] = frozenset(Part),
    clock: Clock | None = None,
    observer: Observer = ignore,
) -> FastAPI:
    """The application of these parts over pools of its own, opened and closed with it. Ingest needs the keyring."""
    pool = postgres.pool_async(dsn, min_size=1, max_size=POOL_SIZE, application_name="afluente web")
    pools = [pool]
    links: Links | None = None

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for opened in pools:
                await opened.open(wait=False)
                stack.push_async_callback(opened.close)
            if links is not None:
                await stack.enter_async_context(links.running())
            yield

    async def ready(_: Request) -> Response:
        try:
            async with pool.connection(timeout=READY_WITHIN_S):
                return PlainTextResponse("ready\n")
        except postgres.AWAY:
            return PlainTextResponse("postgres is away\n", 503)

    async def healthy(_: Request) -> Response:
        return PlainTextResponse("alive\n")

    # The API serves a document of its own, at /v1/openapi.json.
    app = Application(title="Afluente", lifespan=lifespan, openapi_url=None)
    if Part.INGEST in parts:
        assert keyring is not None
        # Apart, so that nothing else that is served keeps deliveries waiting; each of its statements commits by itself.
        ingest_pool = postgres.pool_async(
            dsn, min_size=2, max_size=INGEST_POOL_SIZE, application_name="afluente ingest", autocommit=True
        )
        pools.append(ingest_pool)
        app.receiver = Receiver(ingest_pool, keyring, clock=clock, observer=observer)
    if Part.API in parts:
        app.api = Api(pool, clock=clock, observer=observer).app()
    if Part.LINKS in parts:
        links_pool = postgres.pool_async(dsn, min_size=1, max_size=LINKS_POOL_SIZE, application_name="afluente links")
        pools.append(links_pool)
        links = Links(links_pool, clock=clock)
        app.router.routes.extend(links.routes())
    app.add_route("/healthz", healthy)
    app.add_route("/readyz", ready)
    return app
