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
from consumers.inbound.apply import checkouts
from consumers.worker import Context, Delivery, TransactionalWorker
from producers.ingest.normalize import needs_fetch
from schemas import Event


class WebhookNormalizeWorker(TransactionalWorker):
    """Deliveries whose body says it all, and the times when what they said may have come to nothing."""

    name: ClassVar[str] = "webhook-normalize-worker"
    event_types: ClassVar[frozenset[str]] = frozenset({"webhook.received", checkouts.DUE})

    async def targets(self, event: Event, conn: AsyncConnection[Any]) -> Sequence[str]:
        return () if needs_fetch(event.payload.get("source"), event.payload.get("topic")) else ("",)

    async def handle(self, delivery: Delivery, ctx: Context) -> None:
        """Write down what the delivery says. An erased row is no failure: there is nothing left to say."""
        if delivery.event.event_type == checkouts.DUE:
            await checkouts.due(delivery, ctx)
            return
        webhook_event_id = UUID(delivery.data.webhook_event_id)
        stored = await part.read(ctx.connection, delivery.organization_id, webhook_event_id)
        if stored is not None:
            await part.digest(stored, stored.context(), delivery, ctx)
