"""Deliveries on their way into Postgres: whoever waits when a writer is free goes in one transaction with the others.

Nobody waits for company: a delivery that finds the writer free goes alone, at once. Under load a transaction carries
what came while the one before it was on its way, and its cost is shared.

What must stay true: nobody is answered before the commit; and nobody fails by another's fault. When a transaction of
several fails, each of them is tried again in one of its own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from typing import Any
from uuid import UUID

import psycopg
from psycopg.pq import TransactionStatus
from psycopg_pool import AsyncConnectionPool

from afluente.postgres import AWAY
from producers.ingest import store
from producers.ingest.store import Judged

# Not all that wait: who is answered sends its next while the others are in Postgres, and neither side stands idle.
MAX_TOGETHER = 16
MAX_TOGETHER_BYTES = 1024 * 1024
# What is larger has a connection and a transaction of its own: others do not wait behind it.
LARGE_BYTES = 256 * 1024
# What comes while a transaction is in Postgres is the next one. Another beside it makes both smaller, and each costs as
# much as four deliveries: only where two are waiting already.
WRITERS = 2
# For so long a writer keeps its connection when nobody waits: to take one out of the pool is a round trip of its own.
LINGER_S = 0.05

Pool = AsyncConnectionPool[psycopg.AsyncConnection[Any]]
Waiting = tuple[Judged, asyncio.Future[int | None]]


class Writer:
    """One for each process. `pool`'s connections are in autocommit: one statement is one transaction."""

    def __init__(self, pool: Pool, within_s: float) -> None:
        """`within_s`: what a transaction may take."""
        self._pool, self._within_s = pool, within_s
        self._waiting: deque[Waiting] = deque()
        self._come = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._running = 0

    async def write(self, delivery: Judged) -> int | None:
        """Store it; returns once it is committed: how many events it led to, None if it must be judged again.

        Raises what psycopg raises; one of AWAY when it is not known to be stored.
        """
        future: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        if len(delivery.body) > LARGE_BYTES:
            self._begin(self._alone((delivery, future)))
            return await future
        self._waiting.append((delivery, future))
        self._come.set()
        if self._running < (WRITERS if len(self._waiting) > 2 * MAX_TOGETHER else 1):
            self._running += 1
            self._begin(self._run())
        return await future

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self) -> None:
        """Write until nobody waits."""
        try:
            while self._waiting:
                try:
                    async with self._pool.connection(timeout=self._within_s) as conn:
                        # A connection that broke, or is still at what was given up, goes back: there are others.
                        while conn.info.transaction_status == TransactionStatus.IDLE and (
                            together := await self._next()
                        ):
                            await self._together(conn, together)
                except AWAY as error:
                    # No connection within the time that each of them may take.
                    _fail(self._take(), error)
        finally:
            self._running -= 1

    async def _next(self) -> list[Waiting]:
        """Those that go together next; none when nobody has come for a while."""
        while True:
            if taken := self._take():
                return taken
            self._come.clear()
            try:
                async with asyncio.timeout(LINGER_S):
                    await self._come.wait()
            except TimeoutError:
                return []

    def _take(self) -> list[Waiting]:
        """As many of those who wait as go together; who has stopped waiting is left out."""
        taken: list[Waiting] = []
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

    async def _together(self, conn: psycopg.AsyncConnection[Any], taken: list[Waiting]) -> None:
        try:
            async with asyncio.timeout(self._within_s):
                found = await store.write(conn, [delivery for delivery, _ in taken])
        except Exception as error:
            held = isinstance(error, psycopg.errors.LockNotAvailable)
            if conn.broken or isinstance(error, TimeoutError) or (len(taken) == 1 and not held):
                _fail(taken, error)
                return
            # One of them is to blame, and it is not said which. Not waited for: others go on meanwhile.
            for item in taken:
                self._begin(self._alone(item))
            return
        _tell(taken, found)

    async def _alone(self, item: Waiting) -> None:
        """In a transaction of its own, as long as the sender is waiting for it."""
        delivery, future = item
        try:
            async with asyncio.timeout(self._within_s), self._pool.connection(timeout=self._within_s) as conn:
                while not future.done():
                    # Somebody else stores this very delivery at the moment, and takes longer than one waits together.
                    with suppress(psycopg.errors.LockNotAvailable):
                        _tell([item], await store.write(conn, [delivery]))
        except Exception as error:
            _fail([item], error)


def _tell(taken: list[Waiting], found: Mapping[UUID, int | None]) -> None:
    for delivery, future in taken:
        if not future.done():
            future.set_result(found[delivery.id])


def _fail(taken: list[Waiting], error: Exception) -> None:
    for _, future in taken:
        if not future.done():
            future.set_exception(error)
