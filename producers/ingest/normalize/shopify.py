"""Shopify: orders, checkouts, refunds, customers, and the privacy topics.

The topic is a header that the signature does not cover, so the signed body has the last word: a paid order must say
it is paid, a cancelled one when it was cancelled, a redaction must have the documented minimal body. A body that
contradicts its topic is kept as unrecognised; on a test channel the topic is believed, since Shopify's test
deliveries send one body under every topic. Test deliveries and test orders do not count on a live channel.

That a checkout was left is no topic: it is a time without a change and without an order (`CheckoutState`).

One purchase is one event for the order, with all its lines in `items`; `order_paid:<id>` is the same fact from
orders/paid and from orders/create with a paid order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from producers.ingest.normalize import moments, orders
from producers.ingest.normalize.document import Document, Malformed
from producers.ingest.normalize.facts import (
    ChannelUninstalled,
    CheckoutState,
    ContactEvent,
    Context,
    Fact,
    FulfillmentStatus,
    Normalized,
    OrderLine,
    OrderReference,
    OrderState,
    Person,
    PrivacyRequest,
    email_identity,
    external_identity,
    ignored,
    person,
    phone_identity,
    processed,
    unrecognised,
)
from producers.ingest.normalize.money import currency_code

SOURCE = "shopify"
LEFT_AFTER_MIN, DEFAULT_LEFT_AFTER = "left_after_min", timedelta(hours=1)
MAX_PRODUCTS = 200

_FULFILLMENT: Mapping[str, FulfillmentStatus] = {"fulfilled": "fulfilled", "partial": "partial"}
_SHIPMENTS: Mapping[str, tuple[str, str]] = {
    "in_transit": ("shipment_in_transit", "Shipment In Transit"),
    "out_for_delivery": ("shipment_out_for_delivery", "Shipment Out For Delivery"),
    "delivered": ("shipment_delivered", "Shipment Delivered"),
    "attempted_delivery": ("shipment_exception", "Shipment Exception"),
    "failure": ("shipment_exception", "Shipment Exception"),
}
# Nothing of these is about a contact. Carts have neither customer nor currency; checkouts follow them.
_NOT_ABOUT_CONTACTS = (
    "products/",
    "carts/",
    "collections/",
    "inventory_",
    "order_transactions/",
    "themes/",
    "locations/",
)


def normalize(document: Document, headers: Mapping[str, str], context: Context) -> Normalized:
    """The facts of one delivery; `context.topic` is X-Shopify-Topic as stored."""
    topic = context.topic
    if _is_test(document, headers) and not context.test_channel:
        return ignored("test_delivery")
    handler = _HANDLERS.get(topic)
    if handler is not None:
        return handler(document, context)
    if topic.startswith(_NOT_ABOUT_CONTACTS):
        return ignored(f"not_about_a_contact:{topic}")
    return unrecognised("unknown_topic")


def _is_test(document: Document, headers: Mapping[str, str]) -> bool:
    return headers.get("x-shopify-test", "").lower() == "true" or document.flag("test")


# Orders


def _order_created(order: Document, context: Context) -> Normalized:
    state = _order(order, context)
    who = _buyer(order, context)
    facts: list[Fact] = [
        state,
        orders.fact("order_placed", "Order Placed", state, moments.occurred(state.placed_at, context.received_at)),
    ]
    if order.text("financial_status") == "paid":
        facts.append(_paid(state, context))
    return processed("order_placed", *facts, person=who)


def _order_paid(order: Document, context: Context) -> Normalized:
    if order.text("financial_status") not in orders.PAID and not context.test_channel:
        return unrecognised("topic_contradicts_body")
    state = _order(order, context)
    return processed("order_paid", state, _paid(state, context), person=_buyer(order, context))


def _order_cancelled(order: Document, context: Context) -> Normalized:
    state = _order(order, context)
    if state.cancelled_at is None:
        return unrecognised("topic_contradicts_body")
    properties = {"order_number": state.number, "reason": order.text("cancel_reason")}
    at = moments.occurred(state.cancelled_at, context.received_at)
    event = orders.fact("order_cancelled", "Order Cancelled", state, at, properties)
    return processed("order_cancelled", state, event, person=_buyer(order, context))


def _order_fulfilled(order: Document, context: Context) -> Normalized:
    if order.text("fulfillment_status") != "fulfilled" and not context.test_channel:
        return unrecognised("topic_contradicts_body")
    state = _order(order, context)
    event = orders.fact("order_fulfilled", "Order Fulfilled", state, state.updated_at)
    return processed("order_fulfilled", state, event, person=_buyer(order, context))


def _order_updated(order: Document, context: Context) -> Normalized:
    """The state alone: what happened comes under its own topic."""
    return processed("order_updated", _order(order, context), person=_buyer(order, context))


def _order(order: Document, context: Context) -> OrderState:
    currency = currency_code(order.text("currency"))
    total = order.decimal("total_price")
    if currency is None or total is None or total < 0:
        raise Malformed("currency" if currency is None else "total_price")
    cancelled_at = moments.from_iso(order.text("cancelled_at"))
    financial = orders.FINANCIAL.get(order.text("financial_status") or "", "pending")
    fulfillment = _FULFILLMENT.get(order.text("fulfillment_status") or "", "unfulfilled")
    placed_at = moments.from_iso(order.text("processed_at", "created_at"))
    updated_at = moments.occurred(moments.from_iso(order.text("updated_at")), context.received_at)
    return OrderState(
        external_id=order.need_identifier("id"),
        number=order.text("name") or order.identifier("order_number"),
        status="cancelled" if cancelled_at else "closed" if order.text("closed_at") else "open",
        financial_status=financial,
        fulfillment_status=fulfillment,
        currency=currency,
        total=total,
        payment_method=next(iter(order.texts("payment_gateway_names")), None),
        placed_at=placed_at,
        paid_at=_paid_at(order, placed_at) if financial in orders.PAID else None,
        fulfilled_at=updated_at if fulfillment == "fulfilled" else None,
        cancelled_at=cancelled_at,
        cancel_reason=order.text("cancel_reason") if cancelled_at else None,
        updated_at=updated_at,
        tracking=_shipment(order),
        checkout_token=order.identifier("checkout_token"),
        cart_token=order.identifier("cart_token"),
        lines=tuple(
            OrderLine(
                external_id=line.identifier("id") or str(place),
                product_id=line.identifier("product_id"),
                variant_id=line.identifier("variant_id"),
                name=line.text("title", "name"),
                sku=line.text("sku"),
                quantity=line.decimal("quantity") or Decimal(1),
                unit_price=line.decimal("price"),
            )
            for place, line in enumerate(order.children("line_items"), start=1)
        ),
    )


def _shipment(order: Document) -> dict[str, Any] | None:
    """The last parcel of the order that has a number: a courier's events find the buyer by it."""
    found = None
    for fulfillment in order.children("fulfillments"):
        if number := fulfillment.text("tracking_number"):
            company, url = fulfillment.text("tracking_company"), fulfillment.text("tracking_url")
            found = {"number": number, "url": url, "carrier": company}
    return found


def _paid(state: OrderState, context: Context) -> ContactEvent:
    return orders.paid(state, moments.occurred(state.paid_at or state.updated_at, context.received_at))


def _paid_at(order: Document, placed_at: datetime | None) -> datetime | None:
    """Few bodies say when the money came; an order is paid when it is placed, or shortly after."""
    return moments.from_iso(order.text("paid_at")) or placed_at


# Refunds and shipments: about an order whose buyer the delivery does not name


def _refund_created(refund: Document, context: Context) -> Normalized:
    order_id = refund.need_identifier("order_id")
    amount = Decimal(0)
    currency: str | None = None
    for transaction in refund.children("transactions"):
        if transaction.text("kind") == "refund" and transaction.text("status") in (None, "success"):
            amount += transaction.decimal("amount") or Decimal(0)
            currency = currency or currency_code(transaction.text("currency"))
    lines = next(refund.children("refund_line_items"), Document({}))
    currency = currency or currency_code(lines.child("subtotal_set").child("shop_money").text("currency_code"))
    event = ContactEvent(
        fact="order_refunded",
        # An order can be refunded in parts: the refund is the fact.
        source_id=refund.need_identifier("id"),
        event_type=None,
        metric="Order Refunded",
        occurred_at=moments.occurred(moments.from_iso(refund.text("processed_at", "created_at")), context.received_at),
        entity_type="order",
        entity_id=order_id,
        object_id_ref=order_id,
        value=amount,
        currency=currency,
        properties={"refund_id": refund.identifier("id")},
        of_order=OrderReference(order_id),
    )
    return processed("order_refunded", event)


def _fulfillment_created(fulfillment: Document, context: Context) -> Normalized:
    order_id = fulfillment.need_identifier("order_id")
    event = ContactEvent(
        fact="shipment_created",
        source_id=fulfillment.need_identifier("id"),
        event_type=None,
        metric="Shipment Created",
        occurred_at=moments.occurred(moments.from_iso(fulfillment.text("created_at")), context.received_at),
        entity_type="order",
        entity_id=order_id,
        object_id_ref=order_id,
        properties={
            "tracking_company": fulfillment.text("tracking_company"),
            "tracking_number": fulfillment.text("tracking_number"),
            "tracking_url": fulfillment.text("tracking_url"),
        },
        of_order=OrderReference(order_id),
    )
    # The order's buyer if we know the order; the e-mail is of whoever gets the parcel, and serves when we do not.
    destination = fulfillment.child("destination")
    who = person(
        email_identity(fulfillment.text("email")),
        phone_identity(destination.text("phone"), destination.text("country_code") or context.country),
        name=destination.text("name"),
    )
    return processed("shipment_created", event, person=who)


def _fulfillment_updated(fulfillment: Document, context: Context) -> Normalized:
    """Where the parcel is, each news of it once."""
    order_id = fulfillment.need_identifier("order_id")
    news = _SHIPMENTS.get(fulfillment.text("shipment_status") or "")
    if news is None:
        return ignored("no_news_of_the_shipment")
    fact, metric = news
    event = ContactEvent(
        fact=fact,
        source_id=fulfillment.need_identifier("id"),
        event_type=None,
        metric=metric,
        occurred_at=moments.occurred(moments.from_iso(fulfillment.text("updated_at")), context.received_at),
        entity_type="order",
        entity_id=order_id,
        object_id_ref=order_id,
        properties={
            "tracking_number": fulfillment.text("tracking_number"),
            "status": fulfillment.text("shipment_status"),
        },
        of_order=OrderReference(order_id),
    )
    return processed(fact, event)


# Checkouts and customers


def _checkout_started(checkout: Document, context: Context) -> Normalized:
    token = checkout.identifier("token") or checkout.need_identifier("id")
    total = checkout.decimal("total_price")
    currency = currency_code(checkout.text("currency")) if total is not None else None
    products = [found for line in checkout.children("line_items") if (found := line.identifier("product_id"))]
    state = CheckoutState(
        token=token,
        cart_token=checkout.identifier("cart_token"),
        value=total,
        currency=currency,
        product_ids=tuple(products[:MAX_PRODUCTS]),
        stage=_stage(checkout),
        updated_at=moments.occurred(moments.from_iso(checkout.text("updated_at", "created_at")), context.received_at),
        completed_at=moments.from_iso(checkout.text("completed_at")),
        left_after=_left_after(context.settings),
    )
    event = ContactEvent(
        fact="checkout_started",
        # create and every update of one checkout are one start
        source_id=token,
        event_type=None,
        metric="Checkout Started",
        occurred_at=moments.occurred(moments.from_iso(checkout.text("created_at")), context.received_at),
        entity_type="checkout",
        entity_id=token,
        object_id_ref=checkout.identifier("cart_token"),
        value=total,
        currency=currency,
        properties={"productIds": products[:MAX_PRODUCTS], "stage": state.stage},
    )
    return processed("checkout_started", event, state, person=_buyer(checkout, context))


def _left_after(settings: Mapping[str, Any]) -> timedelta:
    """How long without a change a checkout is not left yet."""
    minutes = settings.get(LEFT_AFTER_MIN)
    known = isinstance(minutes, int) and not isinstance(minutes, bool) and minutes > 0
    return timedelta(minutes=minutes) if known and isinstance(minutes, int) else DEFAULT_LEFT_AFTER


def _stage(checkout: Document) -> str:
    """How far the buyer got, by what is filled in."""
    if checkout.text("gateway"):
        return "payment"
    if checkout.child("shipping_address").value:
        return "shipping"
    return "contact" if checkout.text("email", "phone") else "cart"


def _customer_created(customer: Document, context: Context) -> Normalized:
    identifier = customer.need_identifier("id")
    at = moments.occurred(moments.from_iso(customer.text("created_at")), context.received_at)
    return processed("customer_created", orders.customer_created(identifier, at), person=_customer(customer, context))


def _customer_updated(customer: Document, context: Context) -> Normalized:
    customer.need_identifier("id")
    return processed("customer_updated", person=_customer(customer, context))


def _customer(customer: Document, context: Context) -> Person:
    address = customer.child("default_address")
    return person(
        external_identity(SOURCE, customer.identifier("id")),
        phone_identity(customer.text("phone"), context.country)
        or phone_identity(address.text("phone"), address.text("country_code") or context.country),
        email_identity(customer.text("email")),
        name=f"{customer.text('first_name') or ''} {customer.text('last_name') or ''}",
    )


def _buyer(order: Document, context: Context) -> Person:
    """Whoever ordered: the customer if there is one, else what the order itself says. POS orders may name nobody."""
    customer = order.child("customer")
    billing, shipping = order.child("billing_address"), order.child("shipping_address")
    phones = [(order.text("phone"), context.country), (customer.text("phone"), context.country)]
    phones += [(place.text("phone"), place.text("country_code") or context.country) for place in (billing, shipping)]
    if customer.value:
        # The customer's own number before what was typed into this order's forms.
        phones[0], phones[1] = phones[1], phones[0]
    name = f"{customer.text('first_name') or ''} {customer.text('last_name') or ''}".strip()
    return person(
        external_identity(SOURCE, customer.identifier("id")),
        next((found for text, country in phones if (found := phone_identity(text, country))), None),
        email_identity(customer.text("email")) or email_identity(order.text("email", "contact_email")),
        name=name or billing.text("name") or shipping.text("name"),
    )


# The shop itself


def _privacy(request_type: str) -> Callable[[Document, Context], Normalized]:
    def handle(request: Document, context: Context) -> Normalized:
        customer = request.need_child("customer")
        identifier = customer.identifier("id")
        if request_type == "access":
            request_id = request.need_child("data_request").need_identifier("id")
        else:
            if "orders_to_redact" not in request:
                raise Malformed("orders_to_redact")
            # Nothing names a redaction: it is one a customer and day.
            request_id = f"redact:{identifier or 'unknown'}:{context.received_at:%Y-%m-%d}"
        who = person(
            external_identity(SOURCE, identifier),
            email_identity(customer.text("email")),
            phone_identity(customer.text("phone"), context.country),
        )
        fact = PrivacyRequest(
            request_type="access" if request_type == "access" else "redact",
            request_id=request_id,
            person=who,
            customer_id=identifier,
        )
        return processed(f"privacy_{request_type}", fact)

    return handle


def _shop_redact(request: Document, context: Context) -> Normalized:
    """48 hours after the shop has gone: all of its data. A person starts that; till then it stays in sight."""
    request.need_identifier("shop_id")
    return unrecognised("shop_redact_needs_an_operator")


def _uninstalled(shop: Document, context: Context) -> Normalized:
    # The body is the shop; an order relabelled as this topic has no shop's fields.
    if shop.text("shop_owner", "plan_name", "myshopify_domain") is None:
        return unrecognised("topic_contradicts_body")
    return processed("channel_uninstalled", ChannelUninstalled())


def _deleted(shape: frozenset[str]) -> Callable[[Document, Context], Normalized]:
    def handle(body: Document, context: Context) -> Normalized:
        if not body.value.keys() <= shape:
            return unrecognised("topic_contradicts_body")
        return ignored("deleted_at_the_source")

    return handle


_HANDLERS: Mapping[str, Callable[[Document, Context], Normalized]] = {
    "orders/create": _order_created,
    "orders/paid": _order_paid,
    "orders/cancelled": _order_cancelled,
    "orders/fulfilled": _order_fulfilled,
    "orders/updated": _order_updated,
    "orders/edited": lambda body, context: ignored("order_edited_comes_as_orders_updated"),
    "orders/delete": _deleted(frozenset({"id"})),
    "refunds/create": _refund_created,
    "fulfillments/create": _fulfillment_created,
    "fulfillments/update": _fulfillment_updated,
    "checkouts/create": _checkout_started,
    "checkouts/update": _checkout_started,
    "customers/create": _customer_created,
    "customers/update": _customer_updated,
    "customers/delete": _deleted(frozenset({"id", "tax_exemptions", "admin_graphql_api_id"})),
    "customers/data_request": _privacy("access"),
    "customers/redact": _privacy("redact"),
    "shop/redact": _shop_redact,
    "app/uninstalled": _uninstalled,
}
