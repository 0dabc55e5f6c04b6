"""A worker running inside the test: the real service on the real servers, with an observer to wait on."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from afluente.clock import SystemClock
from afluente.postgres import pool_async
from consumers.runtime.service import Options, WorkerService
from tests.consumers.runtime.support import create_topics, effect_table
from tests.fixtures.signals import Signals

OPTIONS = {"commit_interval_s": 0.1, "drain_s": 10.0, "held_recheck_s": 0.2, "renew_s": 0.5, "takeover_s": 3.0}


class Running:
    """A service at work. `signals` has everything it said."""

    def __init__(self, service, signals, stop, stop_now, task):
        self.service = service
        self.signals = signals
        self._stop = stop
        self._stop_now = stop_now
        self.task = task

    async def of(self, name, timeout=30.0, count=1, **fields):
        """Wait for a signal, or fail with what ended the service."""
        waiting = asyncio.ensure_future(self.signals.of(name, timeout, count, **fields))
        await asyncio.wait([waiting, self.task], return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done() and self.task.done():
            self.task.result()
        return await waiting

    async def stop(self):
        self._stop.set()
        return await self.task

    async def stop_now(self):
        self._stop.set()
        self._stop_now.set()
        return await self.task


@pytest.fixture
def effects_table(database):
    effect_table(database)


@pytest.fixture
def running(database, topics, effects_table):
    """`async with running(Worker()) as worker:` with the worker's topics made; keyword arguments go to Options."""

    @asynccontextmanager
    async def start(worker, *, clock=None, random=lambda: 0.5, **options):
        create_topics(topics, worker.name)
        signals = Signals()
        stop, stop_now = asyncio.Event(), asyncio.Event()
        async with pool_async(database.url, max_size=6, application_name=f"test {worker.name}") as pool:
            service = WorkerService(
                worker,
                kafka_settings=topics.settings,
                pool=pool,
                clock=clock or SystemClock(),
                random=random,
                options=Options(**(OPTIONS | options)),
                observer=signals,
            )
            task = asyncio.create_task(service.run(stop, stop_now))
            running = Running(service, signals, stop, stop_now, task)
            try:
                await running.of("worker.ready")
                yield running
            finally:
                stop.set()
                await asyncio.wait([task], timeout=30)
        if not task.cancelled():
            task.result()

    return start
