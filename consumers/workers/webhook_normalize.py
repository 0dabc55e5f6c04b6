"""``webhook-normalize-worker``: what a delivery that came in means, in rows and events.

Transactional: everything it needs is in the row, so many deliveries share one transaction and a killed worker leaves
nothing half done. Thin webhooks, which only say where to look, are not its targets: asking the sender's API is a call
outside any transaction, and one sender's slow API must not hold up the others' deliveries. `webhook-fetch-worker` takes
them, as a consumer group of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar
from uuid import UUID

from psycopg import AsyncConnection

from consumers.inbound import part
from consumers.worker import Context, Delivery, TransactionalWorker
from producers.ingest.normalize import needs_fetch
from schemas import Event


class WebhookNormalizeWorker(TransactionalWorker):
    """Deliveries whose body says it all."""

    name: ClassVar[str] = "webhook-normalize-worker"
    event_types: ClassVar[frozenset[str]] = frozenset({"webhook.received"})

    async def targets(self, event: Event, conn: AsyncConnection[Any]) -> Sequence[str]:
        return () if needs_fetch(event.payload.get("source"), event.payload.get("topic")) else ("",)

    async def handle(self, delivery: Delivery, ctx: Context) -> None:
        """Write down what the delivery says. An erased row is no failure: there is nothing left to say."""
        webhook_event_id = UUID(delivery.data.webhook_event_id)
        stored = await part.read(ctx.connection, delivery.organization_id, webhook_event_id)
        if stored is not None:
            await part.digest(stored, stored.context(), delivery, ctx)
