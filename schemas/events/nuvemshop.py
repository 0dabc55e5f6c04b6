"""nuvemshop.*: orders, carts and products of a connected shop. Amounts are whole cents."""

from typing import Literal

from schemas.events.base import Instant, Json, Payload


class OrderCreated(Payload):
    """An order was placed; ns_order_id is the shop's number for it."""

    order_id: str
    ns_order_id: str
    contact_id: str | None = None
    total_cents: int


class OrderPaid(Payload):
    """An order was paid."""

    order_id: str
    paid_at: Instant
    amount_cents: int


class OrderCancelled(Payload):
    """An order was cancelled."""

    order_id: str
    cancelled_at: Instant
    reason: str | None = None


class OrderFulfilled(Payload):
    """An order was sent; tracking is what the shop says about the parcel."""

    order_id: str
    fulfilled_at: Instant
    tracking: Json | None = None


class CartAbandoned(Payload):
    """A cart was left."""

    cart_id: str
    contact_id: str | None = None
    value_cents: int
    abandoned_at: Instant


class CustomerRedactReceived(Payload):
    """The shop asks to forget a customer."""

    ns_customer_id: str
    ns_request_id: str


class ProductSynced(Payload):
    """A product changed in the shop."""

    product_id: str
    action: Literal["created", "updated", "deleted"]


class FullResync(Payload):
    """Somebody asked to read the whole shop again."""

    store_id: str | None = None
    requested_by: str | None = None


EVENTS: dict[str, type[Payload]] = {
    "nuvemshop.order_created": OrderCreated,
    "nuvemshop.order_paid": OrderPaid,
    "nuvemshop.order_cancelled": OrderCancelled,
    "nuvemshop.order_fulfilled": OrderFulfilled,
    "nuvemshop.cart_abandoned": CartAbandoned,
    "nuvemshop.customer_redact_received": CustomerRedactReceived,
    "nuvemshop.product_synced": ProductSynced,
    "nuvemshop.full_resync": FullResync,
}
