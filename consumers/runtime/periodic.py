"""A worker's periodic hook: one member at a time, once for each interval, restarts included.

What must stay true: the row that says when it last ran is written in the transaction of what the hook does. So a member
that is killed in the middle has done nothing, and the next one runs it; and two members cannot both be in time. The
interval is measured by Postgres's clock: those of the members differ.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

import sql
from consumers.runtime.context import HandlerContext
from consumers.runtime.core import Core
from consumers.runtime.deliveries import Connection
from consumers.runtime.judging import describe, kind

_LOOK_AT_MOST_EVERY_S = 60.0  # a member that ran it may be gone, and another's clock says nothing here
_AGAIN_S = 30.0  # after it failed, if the interval is longer
_PAUSED_S = 1.0

_QUERIES = sql.queries("worker_control")


class Periodic:
    """`loop` runs as long as the worker; it ends at once for one without a hook."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def loop(self) -> None:
        if (every := self._core.worker.every) is None:
            return
        while True:
            wait_s = await self._wait_s(every)
            if wait_s <= 0 and (self._core.stopping or self._core.paused is not None):
                wait_s = _PAUSED_S
            elif wait_s <= 0:
                # One of the worker's tasks, so that a stop waits for it as for a delivery.
                over: asyncio.Future[float] = self._core.loop.create_future()
                self._core.spawn(None, self._turn(every, over))
                wait_s = await over
            await asyncio.sleep(wait_s)

    async def _wait_s(self, every: timedelta) -> float:
        seconds = 0.0

        async def ask(conn: Connection) -> None:
            nonlocal seconds
            parameters = {"worker": self._core.name, "every_s": every.total_seconds()}
            row = await (await conn.execute(_QUERIES["until_turn"], parameters)).fetchone()
            seconds = 0.0 if row is None else float(row[0])

        await self._core.transaction(ask)
        return min(seconds, _LOOK_AT_MOST_EVERY_S)

    async def _turn(self, every: timedelta, over: asyncio.Future[float]) -> None:
        """Run the hook if it is this member's turn; `over` gets the seconds to wait before the next look."""
        ran = False

        async def work(conn: Connection) -> None:
            nonlocal ran
            parameters = {
                "worker": self._core.name,
                "process": self._core.process,
                "every_s": every.total_seconds(),
            }
            ran = await (await conn.execute(_QUERIES["take_turn"], parameters)).fetchone() is not None
            if ran:
                context = HandlerContext(conn, self._core.clock, self._core.deliveries, None)
                async with asyncio.timeout(self._core.policy.timeout_s):
                    await self._core.worker.periodic(context)

        wait_s = 1.0
        try:
            await self._core.transaction(work)
            if ran:
                self._core.say("worker.periodic_done", level="debug")
                wait_s = 0.0
        except Exception as error:
            self._core.say("worker.periodic_failed", level="error", error=f"{kind(error)}: {describe(error)}")
            wait_s = min(every.total_seconds(), _AGAIN_S)
        finally:
            if not over.done():
                over.set_result(wait_s)
