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
from itertools import chain

import confluent_kafka

from afluente import memory
from afluente.clock import SystemClock
from afluente.errors import Refused
from afluente.postgres import pool_async
from afluente.settings import GroupProtocol, MetricsSettings, WorkerSettings
from afluente.telemetry import get_logger, metrics
from consumers.runtime.health import Health
from consumers.runtime.service import Options, WorkerService
from consumers.worker import Worker

_POOL_PER_WORKER = 4
_KIP_848_SINCE = (2, 15)  # of librdkafka: before, members stall for minutes and fence each other (STALE_MEMBER_EPOCH)
_WATCH_EVERY_S = 10.0

_log = get_logger(__name__)


async def run(workers: Sequence[Worker], settings: WorkerSettings, *, log_records: bool = False) -> bool:
    """Work until a signal. True when all that was in hand was finished; raises what ended a worker by itself."""
    check_client(settings.runtime.group_protocol, confluent_kafka.libversion()[0])
    memory.expect_no_cycles(50_000)
    stop, stop_now = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (stop_now if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    runtime = settings.runtime
    options = Options(
        group_protocol=runtime.group_protocol.value,
        group_instance_id=runtime.group_instance_id,
        drain_s=runtime.drain_s,
        takeover_s=runtime.takeover_s,
        renew_s=runtime.renew_s,
        held_recheck_s=min(5.0, runtime.takeover_s),
        backoff_scale=settings.backoff.scale,
        stalled_s=runtime.stalled_s,
        watch_every_s=min(_WATCH_EVERY_S, runtime.stalled_s / 4),
        log_records=log_records,
    )
    name = "+".join(worker.name for worker in workers)
    async with AsyncExitStack() as stack:
        pool = pool_async(
            settings.postgres.dsn,
            max_size=_POOL_PER_WORKER * len(workers),
            application_name=f"afluente {name}",
            # A process that stands still in a transaction holds its locks: whoever has its partitions now waits for
            # them. A handler is cut off before that by its own timeout.
            idle_in_transaction_s=max(runtime.takeover_s, *(worker.policy.timeout_s for worker in workers)),
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
        health = Health([service.signs for service in services], stalled_s=runtime.stalled_s)
        beating = asyncio.create_task(health.beat())
        stack.callback(beating.cancel)
        _serve(settings.metrics, services, health)
        tasks = [asyncio.create_task(service.run(stop, stop_now)) for service in services]
        for task in tasks:
            task.add_done_callback(lambda _: stop.set())  # the others drain when one fails
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return all(bool(result) for result in results)


def check_client(protocol: GroupProtocol, version: str) -> None:
    """Refused for a Kafka client (librdkafka's `version`) that does not do this group protocol well."""
    found = tuple(int(part) for part in version.split(".")[:2])
    if protocol is GroupProtocol.consumer and found < _KIP_848_SINCE:
        needed = ".".join(map(str, _KIP_848_SINCE))
        raise Refused(
            f"AFLUENTE_GROUP_PROTOCOL=consumer needs librdkafka {needed}, and here is {version}",
            hint="a newer confluent-kafka, or AFLUENTE_GROUP_PROTOCOL=classic",
        )


def _serve(settings: MetricsSettings, services: Sequence[WorkerService], health: Health) -> None:
    """Numbers and health where the settings say; nothing when they say nothing. Refused when the port is taken."""
    if (address := settings.address) is None:
        return
    metrics.ask(lambda: chain.from_iterable(service.samples() for service in services))
    try:
        port = metrics.serve(*address, health.pages)
    except OSError as error:
        raise Refused(f"AFLUENTE_METRICS={settings.listen}: {error}") from error
    _log.info("process.metrics", address=address[0], port=port)
