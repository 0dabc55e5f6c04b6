"""Stripe: payments, subscriptions, refunds, customers.

One payment comes as several events (session completed, payment intent and charge succeeded, invoice paid). One of them
is the purchase: the checkout session for single payments, the invoice for subscriptions; the others are its twins and
count nothing. A session is known by its payment intent, an invoice by its own id, so invoice.paid and
invoice.payment_succeeded are one fact, and so are a single payment's invoice and session.

Amounts are whole minor units of the currency. Nothing is bought for 0: a trial makes no purchase. Events of test mode
do not count on a live connection. Both shapes of the API are read: since 2025 an invoice's subscription stands under
`parent.subscription_details`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any

from producers.ingest.normalize import moments
from producers.ingest.normalize.document import Document, Malformed
from producers.ingest.normalize.facts import (
    ContactEvent,
    Context,
    Normalized,
    Person,
    email_identity,
    external_identity,
    ignored,
    person,
    phone_identity,
    processed,
    unrecognised,
)
from producers.ingest.normalize.money import as_text, currency_code, from_stripe

SOURCE = "stripe"

_SUBSCRIPTION_REASONS = frozenset({"subscription_create", "subscription_cycle", "subscription_update", "subscription"})


def normalize(document: Document, headers: Mapping[str, str], context: Context) -> Normalized:
    """The facts of one event."""
    topic = document.need_text("type")
    if document.raw("livemode") is False and not context.test_channel:
        return ignored("test_mode_event")
    reason = _IGNORED.get(topic)
    if reason is not None:
        return ignored(reason)
    handler = _HANDLERS.get(topic)
    if handler is None:
        return unrecognised("unknown_topic")
    return handler(_Event(document, context))


class _Event:
    """One event and what all handlers ask of it."""

    def __init__(self, document: Document, context: Context) -> None:
        self.object = document.need_child("data").need_child("object")
        self.previous = document.child("data").child("previous_attributes")
        self.context = context
        self.at = moments.occurred(moments.from_epoch_s(document.integer("created")), context.received_at)

    def amount(self, name: str) -> tuple[Decimal, str]:
        """An amount in units and its currency."""
        minor, currency = self.object.integer(name), currency_code(self.object.text("currency"))
        if minor is None or currency is None:
            raise Malformed(f"data.object.{name if minor is None else 'currency'}")
        return from_stripe(minor, currency), currency

    def reference(self, name: str) -> str | None:
        """An id, whether the object stands there or its id alone."""
        return self.object.identifier(name) or self.object.child(name).identifier("id")


def _session_completed(event: _Event) -> Normalized:
    session = event.object
    who = _payer(event)
    mode = session.text("mode")
    if mode != "payment":
        # A subscription's money is its invoice; a set-up has none.
        return processed(f"checkout_{mode or 'unknown'}", person=who)
    if session.text("payment_status") == "no_payment_required":
        return processed("nothing_paid", person=who)
    if session.text("payment_status") != "paid":
        # Boleto or Pix: ordered, and paid days later, if at all.
        amount, currency = event.amount("amount_total")
        placed = ContactEvent(
            fact="order_placed",
            source_id=_payment_of(event),
            event_type=None,
            metric="Order Placed",
            occurred_at=event.at,
            entity_type="payment",
            entity_id=_payment_of(event),
            object_id_ref=event.reference("payment_intent"),
            value=amount,
            currency=currency,
            properties={"paymentMethod": next(iter(session.texts("payment_method_types")), None)},
        )
        return processed("checkout_unpaid", placed, person=who)
    return _purchase_of_session(event, who)


def _session_paid_later(event: _Event) -> Normalized:
    return _purchase_of_session(event, _payer(event))


def _purchase_of_session(event: _Event, who: Person) -> Normalized:
    amount, currency = event.amount("amount_total")
    if amount <= 0:
        return processed("nothing_paid", person=who)
    method = next(iter(event.object.texts("payment_method_types")), None)
    lines = [_item(line, currency) for line in event.object.child("line_items").children("data")]
    return processed("order_paid", _purchase(event, _payment_of(event), amount, currency, method, lines), person=who)


def _session_expired(event: _Event) -> Normalized:
    identifier = event.object.need_identifier("id")
    properties: dict[str, Any] = {"stageAbandoned": "checkout"}
    value: Decimal | None = None
    currency: str | None = None
    if event.object.integer("amount_total") is not None:
        value, currency = event.amount("amount_total")
        properties |= {"cartValue": as_text(value), "currency": currency}
    abandoned = ContactEvent(
        fact="checkout_abandoned",
        source_id=identifier,
        event_type="purchase_abandoned",
        metric="Checkout Abandoned",
        occurred_at=event.at,
        entity_type="checkout",
        entity_id=identifier,
        value=value,
        currency=currency,
        properties=properties,
    )
    return processed("checkout_abandoned", abandoned, person=_payer(event))


def _invoice_paid(event: _Event) -> Normalized:
    invoice = event.object
    identifier = invoice.need_identifier("id")
    who = person(
        external_identity(SOURCE, event.reference("customer")),
        phone_identity(invoice.text("customer_phone"), _country(invoice.child("customer_address"), event.context)),
        email_identity(invoice.text("customer_email")),
        name=invoice.text("customer_name"),
    )
    amount, currency = event.amount("amount_paid")
    if amount <= 0:
        return processed("nothing_paid", person=who)
    if invoice.text("billing_reason") in _SUBSCRIPTION_REASONS:
        source_id = identifier
    else:
        # A single payment's invoice: the same money as its checkout session, which is known by the payment intent.
        payment = event.reference("payment_intent")
        if payment is None:
            return ignored("invoice_of_a_single_payment")
        source_id = payment
    items = [_item(line, currency) for line in invoice.child("lines").children("data")]
    purchase = _purchase(event, source_id, amount, currency, None, items, subscription=_subscription_of(invoice))
    return processed("order_paid", purchase, person=who)


def _purchase(
    event: _Event,
    source_id: str,
    amount: Decimal,
    currency: str,
    method: str | None,
    items: list[dict[str, Any]],
    subscription: str | None = None,
) -> ContactEvent:
    metadata = event.object.child("metadata")
    first = items[0] if items else {}
    properties: dict[str, Any] = {
        # Neither is in a session's event unless it was expanded; shops put them into metadata.
        "productId": first.get("productId") or metadata.text("product_id", "productId"),
        "productName": first.get("productName") or metadata.text("product_name", "productName"),
        "amount": as_text(amount),
        "currency": currency,
        "paymentMethod": method,
        "items": items or None,
    }
    if subscription:
        properties["subscriptionId"] = subscription
    return ContactEvent(
        fact="order_paid",
        source_id=source_id,
        event_type="purchase_completed",
        metric="Order Paid",
        occurred_at=event.at,
        entity_type="payment",
        entity_id=source_id,
        object_id_ref=event.reference("payment_intent") or source_id,
        value=amount,
        currency=currency,
        properties=properties,
    )


def _item(line: Document, currency: str) -> dict[str, Any]:
    """A line of a session or an invoice; the price's place differs between API versions."""
    price = line.child("price").value or line.child("pricing").child("price_details").value
    product = Document(price).identifier("product")
    minor = line.integer("amount") if line.integer("amount") is not None else line.integer("amount_total")
    return {
        "productId": product,
        "productName": line.text("description"),
        "quantity": line.integer("quantity"),
        "amount": as_text(from_stripe(minor, currency)) if minor is not None else None,
    }


def _subscription_created(event: _Event) -> Normalized:
    price, quantity = _plan(event)
    currency = currency_code(price.text("currency")) or currency_code(event.object.text("currency"))
    unit = price.integer("unit_amount") if price.integer("unit_amount") is not None else price.integer("amount")
    amount = from_stripe(unit * quantity, currency) if unit is not None and currency else None
    properties = {
        "planId": price.identifier("id"),
        "planName": price.text("nickname") or price.identifier("product"),
        "amount": as_text(amount) if amount is not None else None,
        "currency": currency if amount is not None else None,
    }
    return _subscription_fact(event, "subscription_created", "subscription_created", event.at, properties)


def _subscription_deleted(event: _Event) -> Normalized:
    price, _ = _plan(event)
    details = event.object.child("cancellation_details")
    properties = {"planId": price.identifier("id"), "reason": details.text("feedback", "reason")}
    ended_at = moments.from_epoch_s(event.object.integer("ended_at")) or event.at
    return _subscription_fact(event, "subscription_cancelled", "subscription_cancelled", ended_at, properties)


def _subscription_updated(event: _Event) -> Normalized:
    return ignored("subscription_will_end" if event.object.flag("cancel_at_period_end") else "subscription_changed")


def _subscription_fact(
    event: _Event, fact: str, event_type: str, at: datetime, properties: Mapping[str, Any]
) -> Normalized:
    identifier = event.object.need_identifier("id")
    found = ContactEvent(
        fact=fact,
        source_id=identifier,
        event_type=event_type,
        metric=None,
        occurred_at=moments.occurred(at, event.context.received_at),
        entity_type="subscription",
        entity_id=identifier,
        object_id_ref=identifier,
        properties=properties,
    )
    return processed(fact, found, person=person(external_identity(SOURCE, event.reference("customer"))))


def _plan(event: _Event) -> tuple[Document, int]:
    item = next(event.object.child("items").children("data"), Document({}))
    price = item.child("price").value or item.child("plan").value or event.object.child("plan").value
    return Document(price), item.integer("quantity") or 1


def _subscription_of(invoice: Document) -> str | None:
    return invoice.identifier("subscription") or invoice.child("parent").child("subscription_details").identifier(
        "subscription"
    )


def _charge_refunded(event: _Event) -> Normalized:
    charge = event.object
    identifier = charge.need_identifier("id")
    total, currency = event.amount("amount_refunded")
    before = event.previous.integer("amount_refunded")
    # amount_refunded is what was given back so far: the step is this refund, and the sum so far is its name.
    step = total - from_stripe(before, currency) if before is not None else total
    billing = charge.child("billing_details")
    payment = event.reference("payment_intent")
    refund = ContactEvent(
        fact="order_refunded",
        source_id=f"{identifier}:{charge.integer('amount_refunded')}",
        event_type=None,
        metric="Order Refunded",
        occurred_at=event.at,
        entity_type="payment",
        entity_id=payment or identifier,
        object_id_ref=payment or identifier,
        value=step,
        currency=currency,
        properties={"charge_id": identifier, "refunded_in_all": as_text(total)},
        of_payment=payment,
    )
    who = person(
        external_identity(SOURCE, event.reference("customer")),
        phone_identity(billing.text("phone"), _country(billing.child("address"), event.context)),
        email_identity(billing.text("email")) or email_identity(charge.text("receipt_email")),
        name=billing.text("name"),
    )
    return processed("order_refunded", refund, person=who)


def _dispute_closed(event: _Event) -> Normalized:
    if event.object.text("status") != "lost":
        return ignored("dispute_not_lost")
    identifier = event.object.need_identifier("id")
    amount, currency = event.amount("amount")
    payment = event.reference("payment_intent")
    refund = ContactEvent(
        fact="dispute_lost",
        source_id=identifier,
        event_type=None,
        metric="Order Refunded",
        occurred_at=event.at,
        entity_type="payment",
        entity_id=payment or event.reference("charge"),
        object_id_ref=payment or event.reference("charge"),
        value=amount,
        currency=currency,
        properties={"reason": event.object.text("reason")},
        of_payment=payment,
    )
    return processed("dispute_lost", refund)


def _customer_created(event: _Event) -> Normalized:
    identifier = event.object.need_identifier("id")
    created = ContactEvent(
        fact="customer_created",
        source_id=identifier,
        event_type=None,
        metric="Customer Created",
        occurred_at=event.at,
        entity_type="customer",
        entity_id=identifier,
        object_id_ref=identifier,
    )
    return processed("customer_created", created, person=_customer(event))


def _customer_updated(event: _Event) -> Normalized:
    return processed("customer_updated", person=_customer(event))


def _customer(event: _Event) -> Person:
    customer = event.object
    return person(
        external_identity(SOURCE, customer.need_identifier("id")),
        phone_identity(customer.text("phone"), _country(customer.child("address"), event.context)),
        email_identity(customer.text("email")),
        name=customer.text("name"),
    )


def _payer(event: _Event) -> Person:
    details = event.object.child("customer_details")
    return person(
        external_identity(SOURCE, event.reference("customer")),
        phone_identity(details.text("phone"), _country(details.child("address"), event.context)),
        email_identity(details.text("email")) or email_identity(event.object.text("customer_email")),
        name=details.text("name"),
    )


def _payment_of(event: _Event) -> str:
    return event.reference("payment_intent") or event.object.need_identifier("id")


def _country(address: Document, context: Context) -> str:
    return address.text("country") or context.country


_HANDLERS: Mapping[str, Callable[[_Event], Normalized]] = {
    "checkout.session.completed": _session_completed,
    "checkout.session.async_payment_succeeded": _session_paid_later,
    "checkout.session.expired": _session_expired,
    "invoice.paid": _invoice_paid,
    "invoice.payment_succeeded": _invoice_paid,
    "customer.subscription.created": _subscription_created,
    "customer.subscription.updated": _subscription_updated,
    "customer.subscription.deleted": _subscription_deleted,
    "charge.refunded": _charge_refunded,
    "charge.dispute.closed": _dispute_closed,
    "customer.created": _customer_created,
    "customer.updated": _customer_updated,
}

_IGNORED: Mapping[str, str] = {
    "payment_intent.succeeded": "twin_of_the_checkout_or_invoice",
    "charge.succeeded": "twin_of_the_checkout_or_invoice",
    "payment_intent.created": "not_paid_yet",
    "payment_intent.canceled": "not_paid",
    "payment_intent.payment_failed": "not_paid",
    "charge.failed": "not_paid",
    "invoice.payment_failed": "not_paid",
    "invoice.created": "not_paid_yet",
    "invoice.finalized": "not_paid_yet",
    "invoice.upcoming": "not_paid_yet",
    "checkout.session.async_payment_failed": "not_paid",
    "customer.subscription.trial_will_end": "subscription_changed",
    "customer.subscription.paused": "subscription_changed",
    "customer.subscription.resumed": "subscription_changed",
    "charge.dispute.created": "dispute_not_lost",
    "charge.dispute.updated": "dispute_not_lost",
    # What the bank takes for the time of a dispute, and gives back: charge.dispute.closed says how it ended.
    "charge.dispute.funds_withdrawn": "dispute_not_lost",
    "charge.dispute.funds_reinstated": "dispute_not_lost",
    "charge.refund.updated": "twin_of_the_charges_refund",
    "refund.created": "twin_of_the_charges_refund",
    "refund.updated": "twin_of_the_charges_refund",
    "charge.captured": "twin_of_the_checkout_or_invoice",
    "charge.updated": "twin_of_the_checkout_or_invoice",
    "customer.deleted": "deleted_at_the_source",
    "price.created": "not_about_a_contact",
    "price.updated": "not_about_a_contact",
    "price.deleted": "not_about_a_contact",
    "product.created": "not_about_a_contact",
    "product.updated": "not_about_a_contact",
    "product.deleted": "not_about_a_contact",
    "ping": "not_about_a_contact",
}
