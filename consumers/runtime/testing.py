"""Run a worker's handler against one event, with Postgres and without a broker. For the tests of workers.

The handler gets what the runtime gives it: the role and organization of its transaction, the context, the timeout,
and a rollback when it raises. `event_delivery` is not touched: whether a delivery runs at all is the runtime's matter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal
from uuid import uuid4

from psycopg import AsyncConnection

from afluente.clock import Clock, SystemClock
from afluente.postgres import act_for
from consumers.runtime.context import HandlerContext
from consumers.runtime.deliveries import Deliveries
from consumers.worker import (
    BatchWorker,
    Delivery,
    ExternalWorker,
    Reject,
    Snooze,
    TransactionalWorker,
    Worker,
)
from schemas import Event


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of it. `error` is what the handler raised; `result` what an external call returned."""

    outcome: Literal["done", "snoozed", "rejected", "failed"]
    error: BaseException | None = None
    result: Any = None


async def targets(worker: Worker, event: Event, conn: AsyncConnection[Any]) -> Sequence[str]:
    """The targets that the worker fixes for the event."""
    async with conn.transaction(), act_for(conn, event.organization_id):
        return list(await worker.targets(event, conn))


async def run(
    worker: Worker,
    event: Event,
    conn: AsyncConnection[Any],
    *,
    target: str = "",
    attempt: int = 1,
    generation: int = 0,
    next_attempt_at: datetime | None = None,
    clock: Clock | None = None,
) -> Ran:
    """One run of one delivery, committed when it is done. `conn` is an `afluente_worker` connection outside a
    transaction.

    `next_attempt_at` is what `failed` sees: None makes this the last attempt.
    """
    clock = clock or SystemClock()
    delivery = Delivery(worker.name, event, target, attempt, generation)
    deliveries = Deliveries(worker.name, uuid4(), transactional=True, ordered=False, takeover_s=300)

    def context(due: datetime | None = None) -> HandlerContext:
        return HandlerContext(conn, clock, deliveries, event, target, next_attempt_at=due)

    prepared: Any = None
    try:
        if isinstance(worker, BatchWorker):
            async with conn.transaction():
                await worker.handle_batch([delivery], HandlerContext(conn, clock, deliveries, None))
            return Ran("done")
        if isinstance(worker, TransactionalWorker):
            async with (
                conn.transaction(),
                act_for(conn, event.organization_id),
                asyncio.timeout(worker.policy.timeout_s),
            ):
                await worker.handle(delivery, context())
            return Ran("done")
        assert isinstance(worker, ExternalWorker)
        async with conn.transaction(), act_for(conn, event.organization_id):
            prepared = await worker.prepare(delivery, context())
        async with asyncio.timeout(worker.policy.timeout_s):
            result = await worker.call(delivery, prepared)
        async with conn.transaction(), act_for(conn, event.organization_id):
            await worker.record(delivery, result, context())
        return Ran("done", result=result)
    except Snooze as error:
        return Ran("snoozed", error)
    except Exception as error:
        outcome: Literal["rejected", "failed"] = (
            "rejected" if isinstance(error, (Reject, *worker.policy.reject_on)) else "failed"
        )
        if isinstance(worker, ExternalWorker):
            async with conn.transaction(), act_for(conn, event.organization_id):
                try:
                    await worker.failed(delivery, prepared, error, context(next_attempt_at))
                except Reject as rejected:
                    return Ran("rejected", rejected)  # what it wrote before it raised stays, as at work
        return Ran(outcome, error)
