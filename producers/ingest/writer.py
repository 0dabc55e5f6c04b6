"""Deliveries on their way into Postgres: whoever waits when a writer is free goes in one transaction with the others.

Nobody waits for company: a delivery that finds a writer free goes alone, at once. Under load a transaction carries what
came while the ones before it were on their way, and its cost is shared.

What must stay true: nobody is answered before the commit; and nobody fails by another's fault. When a transaction of
several fails, each of them is tried again in one of its own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import psycopg
from psycopg_pool import AsyncConnectionPool, PoolClosed, PoolTimeout, TooManyRequests

from producers.ingest import store
from producers.ingest.store import Judged

# Two, so that one fills while the other is in Postgres. More of them make smaller transactions of the same load.
WRITERS = 2
MAX_TOGETHER = 32
MAX_TOGETHER_BYTES = 4 * 1024 * 1024

# What says that Postgres is not to be reached, or too slow: the sender tries again.
UNAVAILABLE = (psycopg.OperationalError, PoolTimeout, PoolClosed, TooManyRequests, TimeoutError)

Pool = AsyncConnectionPool[psycopg.AsyncConnection[Any]]


class Writer:
    """One for each process. `pool`'s connections are in autocommit: one statement is one transaction."""

    def __init__(self, pool: Pool, within_s: float) -> None:
        """`within_s`: what a transaction may take."""
        self._pool, self._within_s = pool, within_s
        self._waiting: deque[tuple[Judged, asyncio.Future[int | None]]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._running = 0

    async def write(self, delivery: Judged) -> int | None:
        """Store it; returns once it is committed: how many events it led to, None if it must be judged again.

        Raises what psycopg raises; one of UNAVAILABLE when it is not known to be stored.
        """
        future: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((delivery, future))
        if self._running < WRITERS:
            self._running += 1
            self._begin(self._run())
        return await future

    def _begin(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self) -> None:
        """Write until nobody waits."""
        try:
            while self._waiting:
                try:
                    async with self._pool.connection(timeout=self._within_s) as conn:
                        while not conn.broken and (together := self._take()):
                            await self._together(conn, together)
                except UNAVAILABLE as error:
                    # No connection within the time that each of them may take.
                    _fail(self._take(), error)
        finally:
            self._running -= 1

    def _take(self) -> list[tuple[Judged, asyncio.Future[int | None]]]:
        """Those that go together next; who has stopped waiting is left out."""
        taken: list[tuple[Judged, asyncio.Future[int | None]]] = []
        size = 0
        while self._waiting and len(taken) < MAX_TOGETHER:
            delivery, future = self._waiting[0]
            size += len(delivery.body)
            if taken and size > MAX_TOGETHER_BYTES:
                break
            self._waiting.popleft()
            if not future.done():
                taken.append((delivery, future))
        return taken

    async def _together(
        self, conn: psycopg.AsyncConnection[Any], taken: list[tuple[Judged, asyncio.Future[int | None]]]
    ) -> None:
        try:
            async with asyncio.timeout(self._within_s):
                found = await store.write(conn, [delivery for delivery, _ in taken])
        except Exception as error:
            if len(taken) == 1 or conn.broken or isinstance(error, TimeoutError):
                _fail(taken, error)
                return
            # One of them is to blame, and it is not said which. Not waited for: others go on meanwhile.
            for item in taken:
                self._begin(self._alone(item))
            return
        for delivery, future in taken:
            if not future.done():
                future.set_result(found[delivery.id])

    async def _alone(self, item: tuple[Judged, asyncio.Future[int | None]]) -> None:
        try:
            async with self._pool.connection(timeout=self._within_s) as conn:
                await self._together(conn, [item])
        except UNAVAILABLE as error:
            _fail([item], error)


def _fail(taken: list[tuple[Judged, asyncio.Future[int | None]]], error: Exception) -> None:
    for _, future in taken:
        if not future.done():
            future.set_exception(error)
