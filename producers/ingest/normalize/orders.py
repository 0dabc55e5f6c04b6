"""What shops say of orders and customers in the same words: how payment stands, and the facts about the buyer."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any

from producers.ingest.normalize.facts import ContactEvent, FinancialStatus, OrderState
from producers.ingest.normalize.money import as_text

FINANCIAL: Mapping[str, FinancialStatus] = {
    "pending": "pending",
    "authorized": "authorized",
    "paid": "paid",
    "partially_paid": "partially_paid",
    "partially_refunded": "partially_refunded",
    "refunded": "refunded",
    "voided": "voided",
}
PAID = frozenset({"paid", "partially_refunded", "refunded"})


def fact(
    name: str,
    metric: str,
    state: OrderState,
    at: datetime,
    properties: Mapping[str, Any] | None = None,
    event_type: str | None = None,
) -> ContactEvent:
    """A fact about an order's buyer. `properties`: the order's number, when nothing else is to be said."""
    return ContactEvent(
        fact=name,
        source_id=state.external_id,
        event_type=event_type,
        metric=metric,
        occurred_at=at,
        entity_type="order",
        entity_id=state.external_id,
        object_id_ref=state.external_id,
        value=state.total,
        currency=state.currency,
        properties=properties or {"order_number": state.number},
    )


def paid(state: OrderState, at: datetime) -> ContactEvent:
    """One purchase is one fact, with all its lines."""
    first = state.lines[0] if state.lines else None
    properties = {
        "productId": first.product_id if first else None,
        "productName": first.name if first else None,
        "amount": as_text(state.total),
        "currency": state.currency,
        "paymentMethod": state.payment_method,
        "items": [
            {
                "productId": line.product_id,
                "productName": line.name,
                "variantId": line.variant_id,
                "sku": line.sku,
                "quantity": _number(line.quantity),
                "price": as_text(line.unit_price) if line.unit_price is not None else None,
                "amount": as_text(line.unit_price * line.quantity) if line.unit_price is not None else None,
            }
            for line in state.lines
        ],
    }
    return fact("order_paid", "Order Paid", state, at, properties, "purchase_completed")


def customer_created(identifier: str, at: datetime) -> ContactEvent:
    return ContactEvent(
        fact="customer_created",
        source_id=identifier,
        event_type=None,
        metric="Customer Created",
        occurred_at=at,
        entity_type="customer",
        entity_id=identifier,
        object_id_ref=identifier,
    )


def _number(quantity: Decimal) -> int | float:
    return int(quantity) if quantity == quantity.to_integral_value() else float(quantity)
