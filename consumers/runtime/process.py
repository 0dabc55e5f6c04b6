"""One process with one or several workers in it: built from the settings, stopped by signals.

SIGTERM or SIGINT drains; a second one ends at once. Each worker is a group member of its own, so several in one process
share nothing but the loop, the pool and the fate: when one fails, all end, and the exit status says so.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Sequence
from contextlib import AsyncExitStack

from afluente.clock import SystemClock
from afluente.postgres import pool_async
from afluente.settings import WorkerSettings
from consumers.runtime.service import Options, WorkerService
from consumers.worker import Worker

_POOL_PER_WORKER = 4


async def run(workers: Sequence[Worker], settings: WorkerSettings, *, log_records: bool = False) -> bool:
    """Work until a signal. True when all that was in hand was finished; raises what ended a worker by itself."""
    stop, stop_now = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (stop_now if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    runtime = settings.runtime
    options = Options(
        group_protocol=runtime.group_protocol.value,
        drain_s=runtime.drain_s,
        takeover_s=runtime.takeover_s,
        renew_s=runtime.renew_s,
        held_recheck_s=min(5.0, runtime.takeover_s),
        backoff_scale=settings.backoff.scale,
    )
    name = "+".join(worker.name for worker in workers)
    async with AsyncExitStack() as stack:
        pool = pool_async(
            settings.postgres.dsn, max_size=_POOL_PER_WORKER * len(workers), application_name=f"afluente {name}"
        )
        await stack.enter_async_context(pool)
        services = [
            WorkerService(
                worker,
                kafka_settings=settings.kafka,
                pool=pool,
                clock=SystemClock(),
                random=random.random,
                options=options,
            )
            for worker in workers
        ]
        tasks = [asyncio.create_task(service.run(stop, stop_now)) for service in services]
        for task in tasks:
            task.add_done_callback(lambda _: stop.set())  # the others drain when one fails
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return all(bool(result) for result in results)
