"""Orders with their lines, and what shops say about orders, carts and products as domain events.

What must stay true: an older state of an order never overwrites a newer one; a domain event of an order is emitted once
for each order, whichever delivery saw it first.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any
from uuid import UUID

from psycopg.types.json import Jsonb

from consumers.inbound.apply.writing import NotYet, Writing, cut
from producers.emit import to_json
from producers.ingest.normalize import facts as f
from producers.ingest.normalize.money import to_minor


class OrderUnknown(NotYet):
    """A fact names an order that is not here yet."""

    def __init__(self) -> None:
        super().__init__("the order is not known yet")


class PaymentUnknown(NotYet):
    """A fact names a payment that is not here yet, and nobody whom it could be about."""

    def __init__(self) -> None:
        super().__init__("the payment is not known yet")


class Orders:
    def __init__(self, writing: Writing, wait_for_orders: bool) -> None:
        self._writing = writing
        self._wait_for_orders = wait_for_orders
        self._ids: dict[str, UUID] = {}

    def known(self, external_id: str | None) -> UUID | None:
        """Our id of an order that this delivery wrote."""
        return self._ids.get(external_id) if external_id else None

    async def buyer(self, order: f.OrderReference) -> UUID | None:
        """The contact of an order. OrderUnknown when it is not here, unless nobody waits for it, or no more."""
        source = order.source or (self._writing.part.source if order.by == "id" else None)
        row = await self._writing.one(f"contact_of_order_by_{order.by}", source=source, value=order.value)
        if row is None and order.waits and self._wait_for_orders:
            raise OrderUnknown()
        return None if row is None else row[0]

    async def payer(self, payment_id: str) -> UUID | None:
        """The contact of an earlier fact about a payment. PaymentUnknown when there is none, unless nobody waits."""
        names = [f"{name}:{payment_id}" for name in ("order_paid", "order_placed")]
        source = self._writing.part.source
        row = await self._writing.one("contact_of_payment", source=source, external_event_ids=names)
        if row is None and self._wait_for_orders:
            raise PaymentUnknown()
        return None if row is None else row[0]

    async def write(self, order: f.OrderState, contact_id: UUID | None) -> None:
        part = self._writing.part
        state: dict[str, Any] = {
            "contact_id": contact_id,
            "channel_id": part.channel_id,
            "source": part.source,
            "external_id": order.external_id,
            "ns_order_id": order.external_id if part.source == "nuvemshop" else None,
            "order_number": cut(order.number, 255),
            "status": order.status,
            "financial_status": order.financial_status,
            "fulfillment_status": order.fulfillment_status,
            "total_cents": to_minor(order.total, order.currency),
            "currency": order.currency,
            "payment_method": cut(order.payment_method, 100),
            "cancel_reason": cut(order.cancel_reason, 255),
            "tracking": Jsonb(dict(order.tracking)) if order.tracking else None,
            "placed_at": order.placed_at,
            "paid_at": order.paid_at,
            "cancelled_at": order.cancelled_at,
            "fulfilled_at": order.fulfilled_at,
            "source_updated_at": order.updated_at,
        }
        row = await self._writing.one("upsert_order", **state)
        if row is not None:
            await self._lines(order, row[0])
            self._writing.counts["orders"] += 1
        else:
            row = await self._writing.one("older_order", **state)
        assert row is not None
        self._ids[order.external_id] = row[0]

    async def _lines(self, order: f.OrderState, order_id: UUID) -> None:
        content = []
        for line_no, line in enumerate((line for line in order.lines if line.quantity > 0), start=1):
            price = max(line.unit_price or Decimal(0), Decimal(0))
            content.append(
                {
                    "line_no": line_no,
                    "external_id": cut(line.external_id, 255),
                    "product_external_id": cut(line.product_id, 255),
                    "sku": cut(line.sku, 255),
                    "name": cut(line.name, 1000) or "",
                    "quantity": line.quantity,
                    "unit_price_cents": to_minor(price, order.currency),
                    "total_cents": to_minor(price * line.quantity, order.currency),
                }
            )
        text = to_json({"lines": content}, "lines")
        await self._writing.execute("replace_lines", order_id=order_id, lines=len(content), content=text)

    async def event(self, fact: f.OrderEvent, contact_id: UUID | None) -> None:
        order_id = self._ids[fact.order_id]
        payload = {"order_id": str(order_id), **fact.payload}
        if fact.with_contact:
            payload["contact_id"] = str(contact_id) if contact_id else None
        await self._writing.emit(
            fact.event_type,
            entity_kind="order",
            entity_id=order_id,
            payload=payload,
            # Once for each order, whichever delivery saw it first.
            idempotency_key=f"{fact.event_type}:{order_id}",
        )
        self._writing.counts["domain_events"] += 1

    async def cart_abandoned(self, fact: f.CartAbandoned, contact_id: UUID | None) -> None:
        part = self._writing.part
        await self._writing.emit(
            f"{part.source}.cart_abandoned",
            entity_kind="cart",
            payload={
                "cart_id": fact.cart_id,
                "contact_id": str(contact_id) if contact_id else None,
                "value_cents": fact.value_minor,
                "abandoned_at": fact.abandoned_at,
            },
            idempotency_key=cut(f"cart_abandoned:{part.channel_id}:{fact.cart_id}", 255),
        )
        self._writing.counts["domain_events"] += 1

    async def product(self, fact: f.ProductSynced) -> None:
        await self._writing.emit(
            f"{self._writing.part.source}.product_synced",
            entity_kind="product",
            payload={"product_id": fact.product_id, "action": fact.action},
        )
        self._writing.counts["domain_events"] += 1
