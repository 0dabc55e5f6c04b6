"""What every part of the writer is given: the stored part, the delivery, its transaction, the counts of what it did.

What must stay true: every statement names the organization, and all of them run in the delivery's own transaction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

import sql
from consumers.alerts import alert
from consumers.worker import Context, Delivery
from producers import Causation
from producers.emit import metadata_of

_SQL = sql.queries("inbound")


@dataclass
class Applied:
    """What was written: counts by kind, for people who look at deliveries."""

    counts: Counter[str] = field(default_factory=Counter)

    def summary(self) -> dict[str, int]:
        return dict(self.counts)


@dataclass(frozen=True)
class Part:
    """The stored part that the facts are from."""

    id: UUID
    channel_id: UUID
    source: str
    received_at: datetime


class NotYet(Exception):
    """Something that this delivery is about is on its way: a failed attempt, and the backoff waits for it."""


class Writing:
    """One delivery being written down."""

    def __init__(self, part: Part, delivery: Delivery, ctx: Context) -> None:
        self.part = part
        self.delivery = delivery
        self.ctx = ctx
        self.applied = Applied()

    @property
    def counts(self) -> Counter[str]:
        return self.applied.counts

    async def one(self, query: str, /, **parameters: Any) -> tuple[Any, ...] | None:
        """The first row of a named query of inbound.sql; None when there is none."""
        given = {"organization_id": self.delivery.organization_id, **parameters}
        cursor = await self.ctx.connection.execute(_SQL[query], given)
        row: tuple[Any, ...] | None = await cursor.fetchone()
        return row

    async def rows(self, query: str, /, **parameters: Any) -> list[tuple[Any, ...]]:
        given = {"organization_id": self.delivery.organization_id, **parameters}
        cursor = await self.ctx.connection.execute(_SQL[query], given)
        return await cursor.fetchall()

    async def execute(self, query: str, /, **parameters: Any) -> None:
        given = {"organization_id": self.delivery.organization_id, **parameters}
        await self.ctx.connection.execute(_SQL[query], given)

    async def emit(
        self,
        event_type: str,
        *,
        entity_kind: str,
        payload: Mapping[str, Any],
        entity_id: UUID | None = None,
        idempotency_key: str | None = None,
    ) -> None:
        """With a key: once, as the first delivery said it. What is told again may differ by now, by a merge or an edit,
        and is the same fact all the same."""
        if idempotency_key is not None and await self.one("is_emitted", key=idempotency_key) is not None:
            return
        await self.ctx.emit(
            event_type, entity_kind=entity_kind, entity_id=entity_id, payload=payload, idempotency_key=idempotency_key
        )

    async def alert(self, kind: str, *, title: str, audience: str, dedupe_key: str, details: Mapping[str, Any]) -> None:
        """Ask people to look at what the delivery brought."""
        await alert(
            self.ctx.connection,
            self.delivery.organization_id,
            kind,
            title=title,
            audience=audience,
            dedupe_key=dedupe_key,
            details=details,
            event_id=self.delivery.event.id,
        )

    def metadata(self) -> str:
        """What `ctx.emit` would give, for SQL functions that emit: the request, and what led here."""
        event = self.delivery.event
        return metadata_of(
            Causation.of(event),
            source=self.delivery.worker,
            request_id=event.metadata.get("request_id"),
            trace_id=event.metadata.get("trace_id"),
        )


def cut(text: str | None, length: int) -> str | None:
    """Text as long as its column: what is longer at the sender is no reason to lose the rest."""
    return None if text is None else text[:length]
