"""Tracked links: ``GET /l/<token>`` leads to the address that is stored for the token, and the click is a fact.

What must stay true:

* It leads to the stored address and nowhere else; nothing of the request gets into the answer.
* A click is recorded before the visitor is sent on, when Postgres answers within RECORD_WITHIN_S. When it is slower the
  visitor is sent on all the same, and the click waits in this process's memory until it can be written: a person's way
  is worth more than our count. Lost are the clicks that wait when the process is killed, and those that waited
  GIVE_UP_AFTER_S or found QUEUE of them waiting; they are said (``links.click_lost``).
* When Postgres cannot be asked, links that this process has led to before still lead there; others are 503.
* What is no person's click is not counted: HEAD, a browser that fetches ahead, a program that makes previews.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg
from psycopg_pool import AsyncConnectionPool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

import sql
from afluente.clock import Clock, SystemClock
from afluente.postgres import AWAY, act_for
from afluente.telemetry import get_logger

log = get_logger(__name__)

LOOK_UP_WITHIN_S = 2.0
RECORD_WITHIN_S = 0.5
RETRY_AFTER_S = 1.0
GIVE_UP_AFTER_S = 300.0
STOP_WITHIN_S = 5.0
WRITE_WITHIN_S = 10.0
QUEUE = 1000
BATCH = 100
REMEMBERED = 10_000  # links that lead on while Postgres is away

_TOKEN = re.compile(r"[A-Za-z0-9_-]{22,64}\Z")
_CLICK_ID = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
# Programs that follow links by themselves. WhatsApp, Facebook, Telegram and the like fetch a link to draw its preview.
_PROGRAM = re.compile(
    r"bot\b|bot/|crawl|spider|slurp|preview|facebookexternalhit|facebot|^whatsapp|telegram|slack|discord|twitter|linkedin"
    r"|pinterest|skype|embedly|curl|wget|python|go-http|java/|okhttp|axios|node-fetch|libwww|headless|monitor|scan",
    re.IGNORECASE,
)
_AHEAD = (("purpose", "prefetch"), ("sec-purpose", "prefetch"), ("x-moz", "prefetch"), ("x-purpose", "preview"))
_HEADERS = {
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-robots-tag": "noindex, nofollow",
    "x-content-type-options": "nosniff",
}

_SQL = sql.queries("automations")

Pool = AsyncConnectionPool[psycopg.AsyncConnection[tuple[Any, ...]]]


@dataclass(frozen=True)
class Link:
    """What a token stands for."""

    id: UUID
    organization_id: UUID
    url: str


@dataclass
class _Click:
    link: Link
    click_id: str | None
    clicked_at: datetime
    give_up_at: float
    written: asyncio.Event = field(default_factory=asyncio.Event)


def is_persons(method: str, headers: Mapping[str, str]) -> bool:
    """Whether a request is a person's click, as far as it says itself. `headers` by lower-case names."""
    agent = headers.get("user-agent", "")
    return (
        method == "GET"
        and bool(agent)
        and _PROGRAM.search(agent) is None
        and not any(word in headers.get(name, "").lower() for name, word in _AHEAD)
    )


class Links:
    """The part `links` of the web. Its pool writes as `afluente_worker`, over all organizations."""

    def __init__(self, pool: Pool, *, clock: Clock | None = None) -> None:
        self._pool = pool
        self._clock = clock or SystemClock()
        self._known: OrderedDict[str, Link] = OrderedDict()
        self._waiting: asyncio.Queue[_Click] = asyncio.Queue(QUEUE)

    def routes(self) -> list[BaseRoute]:
        return [Route("/l/{token}", self.follow, methods=["GET", "HEAD"])]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Clicks are written while this lasts; at its end, those that wait, if it does not take long."""
        writing = asyncio.create_task(self._write_all())
        try:
            yield
        finally:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._waiting.join(), STOP_WITHIN_S)
            writing.cancel()
            with suppress(asyncio.CancelledError):
                await writing
            if self._waiting.qsize():
                log.error("links.click_lost", count=self._waiting.qsize(), error="the process ended")

    async def follow(self, request: Request) -> Response:
        """Send a visitor on."""
        token = request.path_params["token"]
        if not _TOKEN.match(token):
            return _not_found()
        try:
            link = await self._look_up(token)
        except AWAY as error:
            log.warning("links.postgres_away", error=type(error).__name__)
            link = self._known.get(token)
            if link is None:
                return PlainTextResponse("please try again\n", 503, {**_HEADERS, "retry-after": "5"})
        if link is None:
            return _not_found()
        if is_persons(request.method, request.headers):
            await self._count(link, request.query_params.get("click_id"))
        return Response(status_code=302, headers={**_HEADERS, "location": link.url})

    async def _look_up(self, token: str) -> Link | None:
        async with (
            asyncio.timeout(LOOK_UP_WITHIN_S),
            self._pool.connection(timeout=LOOK_UP_WITHIN_S) as conn,
        ):
            row = await (await conn.execute(_SQL["link"], {"token": token})).fetchone()
        if row is None:
            self._known.pop(token, None)
            return None
        link = self._known[token] = Link(*row)
        self._known.move_to_end(token)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return link

    async def _count(self, link: Link, click_id: str | None) -> None:
        """Have the click written, and wait for that as long as a person does not notice."""
        click = _Click(
            link,
            click_id if click_id is not None and _CLICK_ID.match(click_id) else None,
            self._clock.now(),
            asyncio.get_running_loop().time() + GIVE_UP_AFTER_S,
        )
        try:
            self._waiting.put_nowait(click)
        except asyncio.QueueFull:
            log.error("links.click_lost", count=1, error="too many wait for Postgres")
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(click.written.wait(), RECORD_WITHIN_S)

    async def _write_all(self) -> None:
        """Write what waits, together what came together."""
        while True:
            batch = [await self._waiting.get()]
            while len(batch) < BATCH and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            try:
                await self._write(batch)
            except Exception as error:  # whatever it is, the clicks after these are still to be written
                log.error("links.click_lost", count=len(batch), error=f"{type(error).__name__}: {error}"[:500])
            finally:
                for click in batch:
                    click.written.set()
                    self._waiting.task_done()

    async def _write(self, batch: list[_Click]) -> None:
        while batch:
            try:
                async with asyncio.timeout(WRITE_WITHIN_S):
                    await self._write_together(batch)
                return
            except AWAY as error:
                now = asyncio.get_running_loop().time()
                given_up = [click for click in batch if click.give_up_at <= now]
                if given_up:
                    log.error("links.click_lost", count=len(given_up), error=type(error).__name__)
                batch = [click for click in batch if click.give_up_at > now]
                await asyncio.sleep(RETRY_AFTER_S)
            except psycopg.Error as error:
                if len(batch) == 1:
                    log.error("links.click_lost", count=1, error=f"{type(error).__name__}: {error}"[:500])
                    return
                # One of them is at fault: the others are written without it.
                for click in batch:
                    await self._write([click])
                return

    async def _write_together(self, batch: list[_Click]) -> None:
        by_organization: defaultdict[UUID, list[_Click]] = defaultdict(list)
        # In one order, so that two processes that count the same links do not wait for each other.
        for click in sorted(batch, key=lambda click: (click.link.organization_id, click.link.id, click.clicked_at)):
            by_organization[click.link.organization_id].append(click)
        async with self._pool.connection(timeout=WRITE_WITHIN_S) as conn, conn.transaction():
            for organization_id, clicks in by_organization.items():
                async with act_for(conn, organization_id):
                    for click in clicks:
                        await conn.execute(
                            _SQL["record_click"],
                            {"link_id": click.link.id, "click_id": click.click_id, "clicked_at": click.clicked_at},
                        )


def _not_found() -> Response:
    return PlainTextResponse("no such link\n", 404, _HEADERS)
