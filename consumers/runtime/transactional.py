"""Deliveries whose effects are in Postgres only: many in one transaction, with the rows that record them.

What must stay true: the effect and the delivery's row are one transaction; a delivery that fails is separated from its
batch, the rest commits; what fails the whole transaction is looked for in it by halves.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from typing import Any

from afluente import faults
from afluente.postgres import act_for
from consumers.runtime.context import HandlerContext
from consumers.runtime.core import FAULTY, Core, Separate, by_organization, is_away, savepoint
from consumers.runtime.deliveries import Connection, Item, PutOff, Run
from consumers.runtime.judging import KEEP_BEYOND, Behind, Done, Outcome
from consumers.runtime.lanes import Taken
from consumers.runtime.settling import Settling
from consumers.worker import BatchWorker, Reject, TransactionalWorker

_AT_ONCE = 2  # batches: one in the database, one being decoded and claimed
_PER_LANE = 100  # of one key in one batch, so that one key does not fill it
_BREAKS = 3  # a delivery that breaks the connection this often is at fault itself


class Transactional:
    """`begin` what `take` gave."""

    def __init__(self, core: Core, settling: Settling) -> None:
        self._core, self._settling = core, settling
        self._running = 0
        self._breaks: dict[tuple[str, str], list[BaseException]] = defaultdict(list)

    @property
    def busy(self) -> bool:
        """There are outcomes that are not recorded, besides the tasks that record them."""
        return False

    async def loop(self) -> None:
        """Nothing to do beside the batches."""

    def take(self) -> list[Taken[Item]]:
        """What may begin now."""
        return self._core.lanes.take(self._core.policy.batch, per_lane=_PER_LANE) if self._running < _AT_ONCE else []

    def begin(
        self, lanes: list[tuple[Any, str]], items: list[Item], put_back: dict[tuple[Any, str], list[Item]]
    ) -> None:
        """Run a batch of these lanes, which go on after it."""
        self._running += 1
        self._core.spawn(None, self._run(lanes, items, put_back))

    async def _run(
        self, lanes: list[tuple[Any, str]], items: list[Item], put_back: dict[tuple[Any, str], list[Item]]
    ) -> None:
        """One transaction: claim, effects, records of what failed. Then the lanes go on, and the rest is settled."""
        try:
            outcomes = await self._handle_all(items) if items else []
        finally:
            self._running -= 1
            if not self._core.abandoned:
                self._core.release_all(lanes, put_back)
        self._core.say_delivered(
            [item for item, outcome in zip(items, outcomes, strict=True) if isinstance(outcome, Done)]
        )
        await self._settling.settle_all(list(zip(items, outcomes, strict=True)))

    async def _handle_all(self, items: list[Item]) -> list[Outcome]:
        """In one transaction; if something in it fails all of it, by halves, in their order, until that one stands
        alone."""
        try:
            return await self._handle_together(items)
        except FAULTY as error:
            self._core.say_unfit(error, len(items))
            if len(items) == 1:
                return [await self._core.put_off_alone(items[0], error)]
        middle = len(items) // 2
        return [*await self._handle_all(items[:middle]), *await self._handle_all(items[middle:])]

    async def _handle_together(self, items: list[Item]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        separate = False

        async def work(conn: Connection) -> None:
            outcomes.clear()
            outcomes.extend(await self._handle_in(conn, items, separate))

        while True:
            try:
                await self._core.transaction(work)
                faults.point("worker.after_commit")
                return outcomes
            except Separate:
                separate = True

    async def _handle_in(self, conn: Connection, items: list[Item], separate: bool) -> list[Outcome]:
        now = self._core.clock.now()
        outcomes: list[Outcome] = [
            *await self._core.deliveries.claim(conn, items, now, self._core.policy.delay, KEEP_BEYOND)
        ]
        faults.point("worker.after_claim")
        runs = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, Run)]
        if not runs:
            return outcomes
        done = Done()
        for i in runs:
            if (run := outcomes[i]).taken_over_from is not None:  # type: ignore[union-attr]
                self._core.say_taken_over(items[i], run)
            outcomes[i] = done
        errors: dict[int, BaseException]
        if isinstance(self._core.worker, BatchWorker):
            errors = await self._handle_batch(conn, self._core.worker, items, runs, separate)
        else:
            assert isinstance(self._core.worker, TransactionalWorker)
            errors = await self._handle_each(conn, self._core.worker, items, runs, separate)
        for i, error in errors.items():
            outcomes[i] = (
                PutOff("blocked", 0, keep=True)
                if isinstance(error, Behind)
                else self._core.judge.outcome(items[i], error)
            )
        put_off = [(items[i], outcome) for i in errors if isinstance(outcome := outcomes[i], PutOff)]
        if put_off:
            await self._core.deliveries.put_off(conn, put_off, now, locked=True)
        if self._core.deliveries.ordered:
            over = [items[i].key for i in runs if not (isinstance(o := outcomes[i], PutOff) and o.state != "dead")]
            if over and await self._core.deliveries.release_keys(conn, over, now):
                self._core.keep_work.set()
        return outcomes

    async def _handle_each(
        self, conn: Connection, worker: TransactionalWorker, items: list[Item], runs: list[int], separate: bool
    ) -> dict[int, BaseException]:
        """Run the handlers. Together: the first error fails the transaction. Separate: each within a savepoint."""
        errors: dict[int, BaseException] = {}
        behind: set[str] = set()
        began, figures = time.perf_counter(), self._core.figures
        for organization_id, group in by_organization(runs, lambda i: items[i].event):
            async with act_for(conn, organization_id):
                for i in group:
                    item = items[i]
                    if item.key in behind:
                        errors[i] = Behind()
                        continue
                    if len(broke := self._breaks.get(item.identity) or []) >= _BREAKS:
                        # The connection broke each time this one ran: it is not the server, it is the delivery.
                        if not separate:
                            raise Separate
                        errors[i] = broke[-1]
                        del self._breaks[item.identity]
                        continue
                    context = HandlerContext(conn, self._core.clock, self._core.deliveries, item.event, item.target)
                    figures.runs += 1
                    try:
                        async with savepoint(conn, separate), asyncio.timeout(self._core.policy.timeout_s):
                            faults.point("worker.in_handler")
                            await worker.handle(self._core.delivery(item), context)
                    except Exception as error:
                        if is_away(error, conn):
                            self._breaks[item.identity].append(error)
                            raise
                        if not separate:
                            raise Separate from error
                        errors[i] = error
                        if self._core.deliveries.ordered and not isinstance(error, Reject):
                            behind.add(item.key)
        figures.handler_s.add((time.perf_counter() - began) / len(runs), len(runs))
        return errors

    async def _handle_batch(
        self, conn: Connection, worker: BatchWorker, items: list[Item], runs: list[int], separate: bool
    ) -> dict[int, BaseException]:
        """All at once; after a failure by halves, until the failing delivery stands alone."""
        errors: dict[int, BaseException] = {}
        context = HandlerContext(conn, self._core.clock, self._core.deliveries, None)

        async def attempt(part: list[int]) -> None:
            began = time.perf_counter()
            self._core.figures.runs += len(part)
            try:
                async with savepoint(conn, separate), asyncio.timeout(self._core.policy.timeout_s):
                    faults.point("worker.in_handler")
                    await worker.handle_batch([self._core.delivery(items[i]) for i in part], context)
                self._core.figures.handler_s.add((time.perf_counter() - began) / len(part), len(part))
            except Exception as error:
                if is_away(error, conn):
                    raise
                if not separate:
                    raise Separate from error
                if len(part) == 1:
                    errors[part[0]] = error
                    return
                middle = len(part) // 2
                await attempt(part[:middle])
                await attempt(part[middle:])

        await attempt(runs)
        return errors
