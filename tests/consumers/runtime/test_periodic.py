"""The periodic hook: of all members one runs it, once for each interval; and all of it is kept or nothing."""

import asyncio
import random
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest

import sql
from afluente.clock import SystemClock
from afluente.postgres import pool_async
from consumers import TransactionalWorker
from consumers.runtime.control import Pause
from consumers.runtime.core import Core, Options
from consumers.runtime.periodic import Periodic
from schemas.topics import Topics
from tests.consumers.runtime.support import until
from tests.fixtures.signals import Signals

EVERY = timedelta(seconds=0.6)
QUERIES = sql.queries("worker_control")


class Ticking(TransactionalWorker):
    name = "ticking-worker"
    event_types = frozenset({"message.received"})
    every = EVERY

    def __init__(self, fails=0):
        self.fails = fails

    async def handle(self, delivery, ctx):
        """Never."""

    async def periodic(self, ctx):
        await ctx.connection.execute("INSERT INTO tick DEFAULT VALUES")
        self.fails -= 1
        if self.fails >= 0:
            raise RuntimeError("not now")


@pytest.fixture
def ticks(database):
    """When it ran, as far as that was kept."""
    database.execute(
        "CREATE TABLE tick (at timestamptz DEFAULT clock_timestamp()); GRANT ALL ON tick TO afluente_worker"
    )
    return lambda: [at for (at,) in database.execute("SELECT at FROM tick ORDER BY at")]


@asynccontextmanager
async def member(database, worker, *, paused=None):
    """A member without Kafka, which has no part in this."""
    signals = Signals()
    async with pool_async(database.url, max_size=2, application_name="test periodic") as pool:
        core = Core(
            worker,
            topics=Topics(),
            pool=pool,
            clock=SystemClock(),
            random=random.random,
            options=Options(),
            observer=signals,
        )
        core.start()
        core.paused = paused
        loop = asyncio.create_task(Periodic(core).loop())
        try:
            yield core, signals
        finally:
            loop.cancel()


async def test_of_three_members_one_runs_it_each_time(database, ticks):
    async with AsyncExitStack() as stack:
        signals = [(await stack.enter_async_context(member(database, Ticking())))[1] for _ in range(3)]
        await asyncio.to_thread(until, lambda: len(ticks()) >= 4)
    ran = ticks()
    # a start of the statement lies between the decision and the row: allow it a little
    assert min(after - before for before, after in pairwise(ran)) > EVERY - timedelta(seconds=0.1)
    assert 4 <= sum(len(each._matching("worker.periodic_done", {})) for each in signals) <= len(ran)
    assert database.execute("SELECT count(*) FROM worker_periodic") == [(1,)]


async def test_what_fails_leaves_nothing_and_is_tried_again(database, ticks):
    worker = Ticking(fails=1)
    async with member(database, worker) as (_, signals):
        failed = await signals.of("worker.periodic_failed")
        assert failed["error"] == "RuntimeError: not now"
        assert ticks() == []
        assert database.execute("SELECT count(*) FROM worker_periodic") == [(0,)]
        await signals.of("worker.periodic_done", timeout=5)
    assert len(ticks()) >= 1


async def test_a_new_member_waits_for_the_interval_and_a_paused_one_for_its_end(database, ticks):
    class Rarely(Ticking):
        every = timedelta(hours=1)

    async with member(database, Rarely()) as (_, signals):
        await signals.of("worker.periodic_done")
    async with member(database, Rarely()) as (core, signals):
        parameters = {"worker": core.name, "every_s": 3600.0, "process": core.process}
        async with core.connection() as conn:
            assert await (await conn.execute(QUERIES["take_turn"], parameters)).fetchone() is None
            [left] = await (await conn.execute(QUERIES["until_turn"], parameters)).fetchone()
            assert 3590 < left <= 3600
    assert len(ticks()) == 1
    database.execute("UPDATE worker_periodic SET last_run_at = last_run_at - interval '1 hour'")
    async with member(database, Rarely(), paused=Pause("ana", datetime.now(UTC), "")) as (core, signals):
        # it has looked and found it due, and waits
        with pytest.raises(AssertionError):
            await signals.of("worker.periodic_done", timeout=0.5)
        core.paused = None
        await signals.of("worker.periodic_done", timeout=5)
