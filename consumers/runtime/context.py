"""What a handler is given: its connection inside the delivery's transaction, the clock, and `emit`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any
from uuid import UUID

from psycopg import AsyncConnection

from afluente.clock import Clock
from afluente.postgres import WORKER_ROLE, act_for
from consumers.runtime.deliveries import Deliveries
from producers import Causation, emit_async
from schemas import Event


class HandlerContext:
    """`consumers.Context` for one delivery; for a batch `event` and `target` are those of no one, and None."""

    def __init__(
        self,
        connection: AsyncConnection[Any],
        clock: Clock,
        deliveries: Deliveries,
        event: Event | None,
        target: str = "",
        next_attempt_at: datetime | None = None,
    ) -> None:
        self.connection = connection
        self.next_attempt_at = next_attempt_at
        self._clock = clock
        self._deliveries = deliveries
        self._event = event
        self._target = target

    def now(self) -> datetime:
        return self._clock.now()

    @asynccontextmanager
    async def as_worker(self) -> AsyncIterator[None]:
        if self._event is None:
            yield  # a batch handler is the worker role already
            return
        async with act_for(self.connection, self._event.organization_id, role=WORKER_ROLE):
            yield

    async def emit(
        self,
        event_type: str,
        *,
        entity_kind: str,
        entity_id: UUID | None = None,
        payload: Mapping[str, Any],
        idempotency_key: str | None = None,
        deliver_at: datetime | None = None,
        caused_by: Event | None = None,
        organization_id: UUID | None = None,
    ) -> UUID:
        """Emit in this transaction, caused by the delivery's event (a batch handler says by which: `caused_by`; a
        periodic hook has none, and says whose it is: `organization_id`)."""
        cause = caused_by or self._event
        if cause is None and organization_id is None:
            raise ValueError(
                "a batch handler says which event is the cause: emit(..., caused_by=delivery.event); "
                "a periodic hook whose the event is: emit(..., organization_id=...)"
            )
        if cause is not None and organization_id not in (None, cause.organization_id):
            raise ValueError("an event belongs to the organization of its cause")
        return await emit_async(
            self.connection,
            event_type,
            entity_kind=entity_kind,
            entity_id=entity_id,
            payload=payload,
            organization_id=organization_id if cause is None else cause.organization_id,
            request_id=None if cause is None else cause.metadata.get("request_id"),
            trace_id=None if cause is None else cause.metadata.get("trace_id"),
            source=self._deliveries.worker,
            idempotency_key=idempotency_key,
            deliver_at=deliver_at,
            causation=None if cause is None else Causation.of(cause),
        )

    async def reject_waiting(self, reason: str) -> int:
        if self._event is None:
            raise ValueError("reject_waiting is about one delivery's target")
        async with self.as_worker():
            return await self._deliveries.reject_waiting(self.connection, self._event, self._target, reason)
