"""Facts about contacts: rows of contact_events, and `contact_event.recorded` of each.

What must stay true: a fact has a name, and is recorded once by it; without a contact it is not recorded, and counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from consumers.inbound.apply.orders import Orders
from consumers.inbound.apply.writing import Writing
from producers.emit import to_json
from producers.ingest.normalize import facts as f
from schemas.contact_events import metric_of
from schemas.events.contact_event import PROPERTIES

_SOURCE_TYPES = {"whatsapp": "DIRECT", "waha": "DIRECT", "evolution": "DIRECT"}


class ContactEvents:
    def __init__(self, writing: Writing, orders: Orders) -> None:
        self._writing = writing
        self._orders = orders

    async def write(self, fact: f.ContactEvent, contact_id: UUID | None) -> None:
        """A fact of the sender's, about the delivery's contact or the one of the order or payment that it names."""
        if fact.of_order is not None:
            contact_id = await self._orders.buyer(fact.of_order) or contact_id
        if fact.of_payment is not None and contact_id is None:
            contact_id = await self._orders.payer(fact.of_payment)
        order_id = self._orders.known(fact.entity_id)
        await self.record(
            contact_id,
            fact=fact.external_id,
            event_type=fact.event_type,
            metric=fact.metric,
            occurred_at=fact.occurred_at,
            entity_type=fact.entity_type,
            entity_id=fact.entity_id,
            object_id=str(order_id) if order_id else None,
            object_id_ref=fact.object_id_ref,
            value=fact.value,
            currency=fact.currency,
            properties=fact.properties,
        )

    async def record(
        self,
        contact_id: UUID | None,
        *,
        fact: str,
        event_type: str | None,
        metric: str | None,
        occurred_at: datetime,
        entity_type: str | None = None,
        entity_id: str | None = None,
        object_id: str | None = None,
        object_id_ref: str | None = None,
        value: Decimal | None = None,
        currency: str | None = None,
        properties: Mapping[str, Any] | None = None,
    ) -> None:
        writing = self._writing
        if contact_id is None:
            writing.counts["without_contact"] += 1
        if event_type is not None:
            # The relay would set a row aside that does not fit; here the delivery fails, where somebody looks.
            PROPERTIES[event_type].model_validate(dict(properties or {}))
            metric = metric or metric_of(event_type)
        row = await writing.one(
            "record_contact_event",
            contact_id=contact_id,
            event_type=event_type,
            metric_name=metric,
            external_event_id=fact,
            object_id=object_id,
            object_id_ref=object_id_ref,
            entity_type=entity_type,
            entity_id=entity_id,
            value=value,
            currency=currency,
            occurred_at=occurred_at,
            properties=to_json(properties or {}, "properties"),
            **self.origin(),
        )
        if row is not None and row[0] is not None:
            writing.counts["contact_events"] += 1

    def origin(self) -> dict[str, Any]:
        """Where a fact is from, as SQL functions take it: the sender, the stored part, what led here."""
        part = self._writing.part
        return {
            "source": part.source,
            "source_type": _SOURCE_TYPES.get(part.source, "EXTERNAL"),
            "received_at": part.received_at,
            "integration_id": part.channel_id,
            "webhook_event_id": part.id,
            "metadata": self._writing.metadata(),
        }
