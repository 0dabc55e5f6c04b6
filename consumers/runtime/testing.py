"""Run a worker's handler against events, with Postgres and without a broker. For the tests of workers.

The handler gets what the runtime gives it: the role and organization of its transaction, the context, the timeout,
and a rollback when it raises. `event_delivery` is not touched: whether a delivery runs at all is the runtime's matter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal
from uuid import UUID, uuid4

from psycopg import AsyncConnection

from afluente.clock import Clock, SystemClock
from afluente.postgres import act_for
from consumers.runtime.context import HandlerContext
from consumers.runtime.deliveries import Deliveries
from consumers.worker import (
    BatchWorker,
    Context,
    Delivery,
    ExternalWorker,
    NotMade,
    Reject,
    RetryAfter,
    Snooze,
    TransactionalWorker,
    Unknown,
    Worker,
)
from schemas import Event


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of a delivery. `error` is what the handler raised; `result` what an external call returned."""

    outcome: Literal["done", "snoozed", "retried", "rejected", "failed", "needs_review"]
    """`retried`: it raised RetryAfter, an attempt with a wait of its own; `failed`: any other error, with backoff."""
    error: BaseException | None = None
    result: Any = None
    emitted: list[UUID] = field(default_factory=list)
    """The events it emitted that are committed."""


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
    unknown: bool = False,
    clock: Clock | None = None,
) -> Ran:
    """One run of one delivery, committed when it is done. `conn` is an `afluente_worker` connection outside a
    transaction.

    `next_attempt_at` is what `failed` sees: None makes this the last attempt. `unknown`: a call was made before, and
    its outcome is not known, as after a crash (see `ExternalWorker.resend`).
    """
    kit = _Kit(worker, conn, clock or SystemClock())
    delivery = Delivery(worker.name, event, target, attempt, generation)
    if isinstance(worker, BatchWorker):
        return await kit.batch_of_one(worker, delivery)
    if isinstance(worker, TransactionalWorker):
        return await kit.transactional(worker, delivery)
    assert isinstance(worker, ExternalWorker)
    return await kit.external(worker, delivery, next_attempt_at, unknown)


async def run_batch(
    worker: BatchWorker, events: Sequence[Event], conn: AsyncConnection[Any], *, clock: Clock | None = None
) -> list[Ran]:
    """One batch as the runtime does it: all in one transaction, and after an error by halves until the failing delivery
    stands alone. What came of each, in their order; what one run emitted is with the first of its deliveries."""
    kit = _Kit(worker, conn, clock or SystemClock())
    async with conn.transaction():
        return await kit.batch(worker, [Delivery(worker.name, event, "", 1, 0) for event in events])


async def run_periodic(worker: Worker, conn: AsyncConnection[Any], *, clock: Clock | None = None) -> list[UUID]:
    """The periodic hook once, committed; the events it emitted. Raises what it raises, and then nothing is kept."""
    context = _Recording(conn, clock or SystemClock(), _deliveries(worker), None)
    async with conn.transaction(), asyncio.timeout(worker.policy.timeout_s):
        await worker.periodic(context)
    return context.emitted


class _Recording(HandlerContext):
    """Remembers what was emitted."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.emitted: list[UUID] = []

    async def emit(self, event_type: str, **given: Any) -> UUID:
        emitted = await super().emit(event_type, **given)
        self.emitted.append(emitted)
        return emitted


def _deliveries(worker: Worker) -> Deliveries:
    return Deliveries(worker.name, uuid4(), transactional=True, ordered=False, takeover_s=300)


class _Kit:
    def __init__(self, worker: Worker, conn: AsyncConnection[Any], clock: Clock) -> None:
        self._worker, self._conn, self._clock = worker, conn, clock
        self._deliveries = _deliveries(worker)

    def _context(self, delivery: Delivery | None, due: datetime | None = None) -> _Recording:
        event, target = (None, "") if delivery is None else (delivery.event, delivery.target)
        return _Recording(self._conn, self._clock, self._deliveries, event, target, next_attempt_at=due)

    def _timeout(self) -> asyncio.Timeout:
        return asyncio.timeout(self._worker.policy.timeout_s)

    def _ran(self, error: BaseException) -> Ran:
        if isinstance(error, Snooze):
            return Ran("snoozed", error)
        if isinstance(error, (Reject, *self._worker.policy.reject_on)):
            return Ran("rejected", error)
        return Ran("retried" if isinstance(error, RetryAfter) else "failed", error)

    async def transactional(self, worker: TransactionalWorker, delivery: Delivery) -> Ran:
        context = self._context(delivery)
        try:
            async with self._conn.transaction(), act_for(self._conn, delivery.organization_id), self._timeout():
                await worker.handle(delivery, context)
        except Exception as error:
            return self._ran(error)
        return Ran("done", emitted=context.emitted)

    async def batch_of_one(self, worker: BatchWorker, delivery: Delivery) -> Ran:
        async with self._conn.transaction():
            [ran] = await self.batch(worker, [delivery])
        return ran

    async def batch(self, worker: BatchWorker, deliveries: list[Delivery]) -> list[Ran]:
        context = self._context(None)
        try:
            async with self._conn.transaction(), self._timeout():
                await worker.handle_batch(deliveries, context)
        except Exception as error:
            if len(deliveries) <= 1:
                return [self._ran(error) for _ in deliveries]
            middle = len(deliveries) // 2
            first = await self.batch(worker, deliveries[:middle])
            return first + await self.batch(worker, deliveries[middle:])
        return [Ran("done", emitted=context.emitted if i == 0 else []) for i in range(len(deliveries))]

    async def external(
        self, worker: ExternalWorker, delivery: Delivery, next_attempt_at: datetime | None, unknown: bool
    ) -> Ran:
        if unknown and worker.resend == "never":
            return Ran("needs_review")
        prepared, result = None, None
        emitted: list[UUID] = []

        async def step(body: Callable[[Delivery, Any, Context], Awaitable[Any]], given: Any) -> Any:
            context = self._context(delivery)
            async with self._conn.transaction(), act_for(self._conn, delivery.organization_id), self._timeout():
                returned = await body(delivery, given, context)
            emitted.extend(context.emitted)
            return returned

        try:
            prepared = await step(lambda delivery, _, context: worker.prepare(delivery, context), None)
            made = False
            if unknown and worker.resend == "lookup":
                try:
                    async with self._timeout():
                        result = await worker.lookup(delivery, prepared)
                    made = True
                except NotMade:
                    unknown = False
            if not made:
                async with self._timeout():
                    result = await worker.call(delivery, prepared)
            if type(worker).record_all is ExternalWorker.record_all:
                await step(worker.record, result)
            else:
                context = self._context(delivery)
                async with self._conn.transaction(), self._timeout():
                    await worker.record_all([(delivery, result)], context)
                emitted.extend(context.emitted)
        except Exception as error:
            ran = self._ran(error)
            if isinstance(error, Unknown) and worker.resend == ("lookup" if unknown else "never"):
                ran = Ran("needs_review", error)
            if ran.outcome != "snoozed":
                context = self._context(delivery, next_attempt_at)
                async with self._conn.transaction(), act_for(self._conn, delivery.organization_id), self._timeout():
                    try:
                        await worker.failed(delivery, prepared, error, context)
                    except Reject as rejected:
                        ran = Ran("rejected", rejected)  # what it wrote before it raised stays, as at work
                emitted.extend(context.emitted)
            return replace(ran, emitted=emitted)
        return Ran("done", result=result, emitted=emitted)
