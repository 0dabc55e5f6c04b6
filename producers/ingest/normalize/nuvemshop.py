"""Nuvemshop (Tiendanube): the webhook says where to look, the resource says what is.

`context.resource` is what `webhook-fetch-worker` fetched. It may be newer than the webhook (a paid order that was
cancelled since), so it has the last word: an order is paid if the resource says so, whatever the topic. What is gone at
the source (404) is finished with. Events of orders are emitted once for each order; `*/updated` only brings the state.

Amounts are decimal text with a currency; times ISO with an offset, with or without its colon.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Literal

from producers.ingest.normalize import moments, orders
from producers.ingest.normalize.document import Document, Malformed
from producers.ingest.normalize.facts import (
    CartAbandoned,
    ChannelUninstalled,
    ContactEvent,
    Context,
    Fact,
    FinancialStatus,
    Normalized,
    OrderEvent,
    OrderLine,
    OrderState,
    Person,
    PrivacyRequest,
    ProductSynced,
    email_identity,
    external_identity,
    ignored,
    person,
    phone_identity,
    processed,
    tax_identity,
    unrecognised,
)
from producers.ingest.normalize.money import as_text, currency_code, to_minor

SOURCE = "nuvemshop"

_FINANCIAL: Mapping[str, FinancialStatus] = {**orders.FINANCIAL, "abandoned": "voided"}
_SENT = frozenset({"shipped", "fulfilled", "delivered"})
_ACTIONS: Mapping[str, Literal["created", "updated", "deleted"]] = {
    "created": "created",
    "updated": "updated",
    "deleted": "deleted",
}
_NOT_ABOUT_CONTACTS = (
    "category/",
    "domain/",
    "product_variant/",
    "fulfillment_order/",
    "fulfillment/",
    "location/",
    "subscription/",  # the shop's own, to the app
)


def normalize(document: Document, headers: Mapping[str, str], context: Context) -> Normalized:
    """The facts of one webhook and of the resource it points to."""
    topic = context.topic
    resource, _, action = topic.partition("/")
    if resource in ("order", "customer", "checkout"):
        if context.resource is None:
            return ignored("gone_at_the_source") if context.fetched else unrecognised("resource_not_fetched")
        return _FETCHED[resource](action, Document(dict(context.resource), resource), context)
    if resource == "product":
        return _product(action, document)
    handler = _HANDLERS.get(topic)
    if handler is not None:
        return handler(document, context)
    if topic.startswith(_NOT_ABOUT_CONTACTS):
        return ignored(f"not_about_a_contact:{topic}"[:255])
    return unrecognised("unknown_topic")


# Orders


def _order(action: str, order: Document, context: Context) -> Normalized:
    state = _state(order, context)
    who = _buyer(order, context)
    minor = to_minor(state.total, state.currency)
    facts: list[Fact] = [state]
    reason = f"order_{action or 'unknown'}"
    if action == "created":
        at = moments.occurred(state.placed_at, context.received_at)
        payload = {"ns_order_id": state.external_id, "total_cents": minor}
        facts += [
            OrderEvent("nuvemshop.order_created", state.external_id, payload, with_contact=True),
            orders.fact("order_placed", "Order Placed", state, at),
        ]
    elif action == "paid" and state.paid_at is not None:
        facts += [
            OrderEvent("nuvemshop.order_paid", state.external_id, {"paid_at": state.paid_at, "amount_cents": minor}),
            orders.paid(state, state.paid_at),
        ]
    elif action == "cancelled" and state.cancelled_at is not None:
        payload = {"cancelled_at": state.cancelled_at, "reason": state.cancel_reason}
        properties = {"order_number": state.number, "reason": state.cancel_reason}
        facts += [
            OrderEvent("nuvemshop.order_cancelled", state.external_id, payload),
            orders.fact("order_cancelled", "Order Cancelled", state, state.cancelled_at, properties),
        ]
    elif action == "fulfilled" and state.fulfilled_at is not None:
        payload = {"fulfilled_at": state.fulfilled_at, "tracking": dict(state.tracking) if state.tracking else None}
        properties = {"order_number": state.number, **(state.tracking or {})}
        facts += [
            OrderEvent("nuvemshop.order_fulfilled", state.external_id, payload),
            orders.fact("order_fulfilled", "Order Fulfilled", state, state.fulfilled_at, properties),
        ]
    elif action in ("paid", "cancelled", "fulfilled"):
        # It was, when the webhook was sent; it is not any more.
        reason = f"order_no_longer_{action}"
    return processed(reason, *facts, person=who)


def _state(order: Document, context: Context) -> OrderState:
    currency = currency_code(order.text("currency"))
    total = order.decimal("total") if order.decimal("total") is not None else order.decimal("price")
    if currency is None or total is None or total < 0:
        raise Malformed("order.currency" if currency is None else "order.price")
    financial = _FINANCIAL.get(order.text("payment_status") or "", "pending")
    updated_at = moments.occurred(moments.from_iso(order.text("updated_at")), context.received_at)
    cancelled = order.text("status") == "cancelled" or order.text("cancelled_at") is not None
    sent = order.text("shipping_status") in _SENT
    paid_at = moments.from_iso(order.text("paid_at"))
    tracking = {
        "number": order.text("shipping_tracking_number"),
        "url": order.text("shipping_tracking_url"),
        "carrier": order.text("shipping"),
    }
    return OrderState(
        external_id=order.need_identifier("id"),
        number=order.identifier("number") or order.text("name"),
        status="cancelled" if cancelled else "closed" if order.text("status") == "closed" else "open",
        financial_status=financial,
        fulfillment_status="fulfilled" if sent else "unfulfilled",
        currency=currency,
        total=total,
        payment_method=order.child("payment_details").text("method") or order.text("gateway"),
        placed_at=moments.from_iso(order.text("created_at")),
        paid_at=paid_at or updated_at if financial in orders.PAID else paid_at,
        fulfilled_at=(moments.from_iso(order.text("shipped_at")) or updated_at) if sent else None,
        cancelled_at=(moments.from_iso(order.text("cancelled_at")) or updated_at) if cancelled else None,
        cancel_reason=order.text("cancel_reason") if cancelled else None,
        updated_at=updated_at,
        tracking=tracking if sent and tracking["number"] else None,
        lines=tuple(
            OrderLine(
                external_id=line.identifier("id") or str(place),
                product_id=line.identifier("product_id"),
                variant_id=line.identifier("variant_id"),
                name=_translated(line, "name"),
                sku=line.text("sku"),
                quantity=line.decimal("quantity") or Decimal(1),
                unit_price=line.decimal("price"),
            )
            for place, line in enumerate(order.children("products"), start=1)
        ),
    )


def _translated(document: Document, name: str) -> str | None:
    """A text, or the first of its translations."""
    return document.text(name) or document.child(name).text("pt", "es", "en")


def _buyer(order: Document, context: Context) -> Person:
    customer, shipping = order.child("customer"), order.child("shipping_address")
    billing_country = order.text("billing_country") or context.country
    phones = (
        (customer.text("phone"), context.country),
        (order.text("contact_phone"), context.country),
        (customer.child("default_address").text("phone"), context.country),
        (order.text("billing_phone"), billing_country),
        (shipping.text("phone"), shipping.text("country") or context.country),
    )
    return person(
        external_identity(SOURCE, customer.identifier("id")),
        email_identity(customer.text("email")) or email_identity(order.text("contact_email")),
        tax_identity(customer.text("identification") or order.text("contact_identification")),
        next((found for text, country in phones if (found := phone_identity(text, country))), None),
        name=customer.text("name") or order.text("contact_name", "billing_name") or shipping.text("name"),
    )


# Customers, carts, products


def _customer(action: str, customer: Document, context: Context) -> Normalized:
    identifier = customer.need_identifier("id")
    address = customer.child("default_address")
    phones = (
        (customer.text("phone"), context.country),
        (address.text("phone"), context.country),
        (customer.text("billing_phone"), customer.text("billing_country") or context.country),
    )
    who = person(
        external_identity(SOURCE, identifier),
        email_identity(customer.text("email")),
        tax_identity(customer.text("identification")),
        next((found for text, country in phones if (found := phone_identity(text, country))), None),
        name=customer.text("name"),
    )
    if action != "created":
        return processed("customer_updated", person=who)
    at = moments.occurred(moments.from_iso(customer.text("created_at")), context.received_at)
    return processed("customer_created", orders.customer_created(identifier, at), person=who)


def _checkout(action: str, checkout: Document, context: Context) -> Normalized:
    """A checkout that was left: there is no webhook for it, it is found by asking (`GET /checkouts`)."""
    identifier = checkout.need_identifier("id")
    if checkout.text("completed_at") is not None:
        return ignored("checkout_completed")
    currency, total = currency_code(checkout.text("currency")), checkout.decimal("total")
    if currency is None or total is None:
        raise Malformed("checkout.currency" if currency is None else "checkout.total")
    left_at = moments.occurred(moments.from_iso(checkout.text("updated_at", "created_at")), context.received_at)
    products = [found for line in checkout.children("products") if (found := line.identifier("product_id"))]
    abandoned = ContactEvent(
        fact="checkout_abandoned",
        source_id=identifier,
        event_type="purchase_abandoned",
        metric="Checkout Abandoned",
        occurred_at=left_at,
        entity_type="checkout",
        entity_id=identifier,
        object_id_ref=identifier,
        value=total,
        currency=currency,
        properties={
            "productIds": products,
            "cartValue": as_text(total),
            "currency": currency,
            "stageAbandoned": _stage(checkout),
        },
    )
    who = person(
        email_identity(checkout.text("contact_email")),
        tax_identity(checkout.text("contact_identification")),
        phone_identity(checkout.text("contact_phone"), context.country)
        or phone_identity(checkout.text("billing_phone", "shipping_phone"), context.country),
        name=checkout.text("contact_name"),
    )
    cart = CartAbandoned(cart_id=identifier, value_minor=to_minor(total, currency), abandoned_at=left_at)
    return processed("cart_abandoned", cart, abandoned, person=who)


def _stage(checkout: Document) -> str:
    if checkout.text("gateway"):
        return "payment"
    if checkout.text("shipping_option", "shipping_address"):
        return "shipping"
    return "contact" if checkout.text("contact_email", "contact_phone") else "cart"


def _product(action: str, document: Document) -> Normalized:
    known = _ACTIONS.get(action)
    if known is None:
        return unrecognised("unknown_topic")
    return processed("product_synced", ProductSynced(document.need_identifier("id"), known))


# The shop and its customers' rights


def _privacy(request_type: Literal["access", "redact"]) -> Callable[[Document, Context], Normalized]:
    def handle(request: Document, context: Context) -> Normalized:
        customer = request.need_child("customer")
        identifier = customer.identifier("id")
        if request_type == "access":
            request_id = request.need_child("data_request").need_identifier("id")
        else:
            if not isinstance(request.raw("orders_to_redact"), list):
                raise Malformed("orders_to_redact")
            # Nothing names a redaction: it is one a customer and day.
            request_id = f"redact:{identifier or 'unknown'}:{context.received_at:%Y-%m-%d}"
        who = person(
            external_identity(SOURCE, identifier),
            email_identity(customer.text("email")),
            tax_identity(customer.text("identification")),
            phone_identity(customer.text("phone"), context.country),
        )
        return processed(f"privacy_{request_type}", PrivacyRequest(request_type, request_id, who, identifier))

    return handle


def _store_redact(request: Document, context: Context) -> Normalized:
    """48 hours after the app was removed: all of the shop's data. A person starts that; till then it stays in sight."""
    request.need_identifier("store_id")
    return unrecognised("store_redact_needs_an_operator")


_FETCHED: Mapping[str, Callable[[str, Document, Context], Normalized]] = {
    "order": _order,
    "customer": _customer,
    "checkout": _checkout,
}
_HANDLERS: Mapping[str, Callable[[Document, Context], Normalized]] = {
    "app/uninstalled": lambda document, context: processed("channel_uninstalled", ChannelUninstalled()),
    "app/suspended": lambda document, context: ignored("app_suspended"),
    "app/resumed": lambda document, context: ignored("app_resumed"),
    "customers/redact": _privacy("redact"),
    "customers/data_request": _privacy("access"),
    "store/redact": _store_redact,
}
