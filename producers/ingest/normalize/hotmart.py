"""Hotmart (webhook 2.0.0): purchases, subscriptions, carts that were left, and members' areas.

One purchase is known by its transaction. PURCHASE_APPROVED (the money came) and PURCHASE_COMPLETE (the warranty is
over, days later) are twins: whichever comes first is the purchase, and they say the same of it. A refund and a
chargeback give the same money back once. A renewal is a purchase of its own; the subscription was created with its
first charge.

The event says what happened, not the dates: `approved_date` stands in expired and cancelled purchases too. Amounts are
numbers in units of the currency whose code is called `currency_value`. Times are epoch milliseconds. What their sandbox
sends is the same data for everybody, and does not count on a live connection.
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
    Fact,
    FinancialStatus,
    Identity,
    Normalized,
    OrderLine,
    OrderState,
    OrderStatus,
    Person,
    email_identity,
    ignored,
    person,
    phone_identity,
    processed,
    tax_identity,
    unrecognised,
)
from producers.ingest.normalize.money import as_text, currency_code, in_units

SANDBOX_PRODUCT, SANDBOX_TRANSACTION = "0", "HP16015479281022"
MAX_CODE = 4  # no country's calling code is longer, area codes of North America included
# Older payloads do not name their currency; the seeds' default.
DEFAULT_CURRENCY = "BRL"


def normalize(document: Document, headers: Mapping[str, str], context: Context) -> Normalized:
    """The facts of one event."""
    topic = document.need_text("event")
    reason = _IGNORED.get(topic)
    if reason is not None:
        return ignored(reason)
    handler = _HANDLERS.get(topic)
    if handler is None:
        return unrecognised("unknown_topic")
    event = _Event(document, context)
    if event.is_sandbox and not context.test_channel:
        return ignored("test_delivery")
    return handler(event)


class _Event:
    """One event and what all handlers ask of it."""

    def __init__(self, document: Document, context: Context) -> None:
        self.data = document.need_child("data")
        self.context = context
        self.purchase = self.data.child("purchase")
        self.product = self.data.child("product")
        # CLUB_* spell it in another way.
        created = self.moment(document.raw("creation_date")) or self.moment(document.raw("creationDate"))
        self.at = created or context.received_at
        self._id = document.identifier("id")

    @property
    def is_sandbox(self) -> bool:
        return (
            self.product.identifier("id") == SANDBOX_PRODUCT
            or self.purchase.identifier("transaction") == SANDBOX_TRANSACTION
        )

    @property
    def id(self) -> str:
        if self._id is None:
            raise Malformed("id")
        return self._id

    def moment(self, value: object) -> datetime | None:
        """Epoch milliseconds; None for what is none."""
        found = moments.from_epoch_ms(value) if isinstance(value, int | str) else None
        return None if found is None else moments.occurred(found, self.context.received_at)


class _Purchase:
    """What all events of one purchase say alike: nothing here depends on which of them it is."""

    def __init__(self, event: _Event) -> None:
        if not event.purchase.value:
            raise Malformed("data.purchase")
        purchase = event.purchase
        self.transaction = purchase.need_identifier("transaction")
        price, full = purchase.child("price"), purchase.child("full_price")
        amount = price.decimal("value") if price.decimal("value") is not None else full.decimal("value")
        if amount is None or amount < 0:
            raise Malformed("data.purchase.price.value")
        named = currency_code(price.text("currency_value", "currency_code"))
        named = named or currency_code(full.text("currency_value", "currency_code"))
        self.currency = named or DEFAULT_CURRENCY
        self.amount = in_units(amount, self.currency)
        self.method = purchase.child("payment").text("type")
        self.approved_at = event.moment(purchase.raw("approved_date"))
        self.placed_at = event.moment(purchase.raw("order_date"))
        self.product_id = event.product.identifier("id")
        self.product_name = event.product.text("name")
        self.event = event

    def fact(
        self,
        fact: str,
        metric: str,
        at: datetime,
        properties: Mapping[str, Any],
        *,
        event_type: str | None = None,
        source_id: str | None = None,
        value: Decimal | None = None,
    ) -> ContactEvent:
        return ContactEvent(
            fact=fact,
            source_id=source_id or self.transaction,
            event_type=event_type,
            metric=metric,
            occurred_at=at,
            entity_type="order",
            entity_id=self.transaction,
            object_id_ref=self.transaction,
            value=value,
            currency=self.currency if value is not None else None,
            properties=properties,
        )

    def paid(self) -> ContactEvent:
        item = {
            "productId": self.product_id,
            "productName": self.product_name,
            "quantity": 1,
            "amount": as_text(self.amount),
        }
        properties = {
            "productId": self.product_id,
            "productName": self.product_name,
            "amount": as_text(self.amount),
            "currency": self.currency,
            "paymentMethod": self.method,
            "items": [item],
        }
        return self.fact(
            "order_paid", "Order Paid", self.approved_at or self.event.at, properties,
            event_type="purchase_completed", value=self.amount,
        )  # fmt: skip

    def state(self, financial: FinancialStatus, status: OrderStatus = "open") -> OrderState:
        paid = financial in ("paid", "refunded", "partially_refunded")
        cancelled = status == "cancelled"
        payment = self.event.purchase.child("payment")
        return OrderState(
            external_id=self.transaction,
            number=self.transaction,
            status=status,
            financial_status=financial,
            fulfillment_status="unfulfilled",
            currency=self.currency,
            total=self.amount,
            payment_method=self.method,
            placed_at=self.placed_at,
            paid_at=self.approved_at if paid else None,
            fulfilled_at=None,
            cancelled_at=self.event.at if cancelled else None,
            cancel_reason=payment.text("refusal_reason") if cancelled else None,
            updated_at=self.event.at,
            lines=(
                OrderLine(
                    external_id=self.product_id or "1",
                    product_id=self.product_id,
                    variant_id=None,
                    name=self.product_name,
                    sku=None,
                    quantity=Decimal(1),
                    unit_price=self.amount,
                ),
            ),
        )


# Purchases


def _approved(event: _Event) -> Normalized:
    """Also PURCHASE_COMPLETE, whose facts have the same names: they count only if the other one never came."""
    purchase = _Purchase(event)
    facts: list[Fact] = [purchase.state("paid")]
    reason = "order_paid"
    if purchase.amount > 0:
        facts.append(purchase.paid())
    else:
        reason = "nothing_paid"  # a trial, or a coupon for all of it
    subscription = _subscription_created(purchase)
    if subscription is not None:
        facts.append(subscription)
    return processed(reason, *facts, person=_buyer(event))


def _subscription_created(purchase: _Purchase) -> ContactEvent | None:
    """With the first charge; renewals count on from there."""
    event = purchase.event
    subscription = event.data.child("subscription")
    code = subscription.child("subscriber").identifier("code")
    if code is None or (event.purchase.integer("recurrence_number") or 1) > 1:
        return None
    plan = subscription.child("plan")
    return ContactEvent(
        fact="subscription_created",
        source_id=code,
        event_type="subscription_created",
        metric=None,
        occurred_at=purchase.approved_at or event.at,
        entity_type="subscription",
        entity_id=code,
        object_id_ref=code,
        properties={
            "planId": plan.identifier("id"),
            "planName": plan.text("name"),
            "amount": as_text(purchase.amount),
            "currency": purchase.currency,
        },
    )


def _billet_printed(event: _Event) -> Normalized:
    """Ordered, and paid later, if at all."""
    purchase = _Purchase(event)
    properties = {"order_number": purchase.transaction, "paymentMethod": purchase.method}
    at = purchase.placed_at or event.at
    placed = purchase.fact("order_placed", "Order Placed", at, properties, value=purchase.amount)
    return processed("order_placed", purchase.state("pending"), placed, person=_buyer(event))


def _canceled(event: _Event) -> Normalized:
    purchase = _Purchase(event)
    reason = event.purchase.child("payment").text("refusal_reason")
    properties = {"order_number": purchase.transaction, "reason": reason}
    cancelled = purchase.fact("order_cancelled", "Order Cancelled", event.at, properties, value=purchase.amount)
    return processed("order_cancelled", purchase.state("voided", "cancelled"), cancelled, person=_buyer(event))


def _refunded(reason: str) -> Callable[[_Event], Normalized]:
    def handle(event: _Event) -> Normalized:
        purchase = _Purchase(event)
        properties = {"order_number": purchase.transaction, "reason": reason}
        if event.purchase.text("status") == "PARTIALLY_REFUNDED":
            # How much is not said; the price is still the whole price.
            given_back = purchase.fact(
                "order_refunded", "Order Refunded", event.at, properties, source_id=f"{purchase.transaction}:{event.id}"
            )
            return processed("order_refunded", purchase.state("partially_refunded"), given_back, person=_buyer(event))
        given_back = purchase.fact("order_refunded", "Order Refunded", event.at, properties, value=purchase.amount)
        return processed("order_refunded", purchase.state("refunded"), given_back, person=_buyer(event))

    return handle


def _state_only(
    reason: str, financial: FinancialStatus, status: OrderStatus = "open"
) -> Callable[[_Event], Normalized]:
    """Nothing that counts; the order is kept as it stands now."""
    return lambda event: processed(reason, _Purchase(event).state(financial, status), person=_buyer(event))


def _cart_left(event: _Event) -> Normalized:
    """The product and who it was; neither a price nor an id of the cart."""
    product_id = event.product.identifier("id")
    abandoned = ContactEvent(
        fact="checkout_abandoned",
        source_id=event.id,
        event_type="purchase_abandoned",
        metric="Checkout Abandoned",
        occurred_at=event.at,
        entity_type="checkout",
        object_id_ref=product_id,
        properties={"productIds": [product_id] if product_id else [], "stageAbandoned": "cart"},
    )
    return processed("checkout_abandoned", abandoned, person=_buyer(event))


# Subscriptions and members


def _subscription_cancelled(event: _Event) -> Normalized:
    subscriber = event.data.need_child("subscriber")
    code = subscriber.need_identifier("code")
    phone = subscriber.child("phone")
    cell = f"{phone.identifier('dddCell') or ''}{phone.identifier('cell') or ''}"
    landline = f"{phone.identifier('dddPhone') or ''}{phone.identifier('phone') or ''}"
    cancelled = ContactEvent(
        fact="subscription_cancelled",
        source_id=code,
        event_type="subscription_cancelled",
        metric=None,
        occurred_at=event.moment(event.data.raw("cancellation_date")) or event.at,
        entity_type="subscription",
        entity_id=code,
        object_id_ref=code,
        properties={"planId": event.data.child("subscription").child("plan").identifier("id"), "reason": None},
    )
    country = event.context.country
    who = person(
        email_identity(subscriber.text("email")),
        phone_identity(cell, country) or phone_identity(landline, country),
        name=subscriber.text("name"),
    )
    return processed("subscription_cancelled", cancelled, person=who)


def _member(fact: str, metric: str) -> Callable[[_Event], Normalized]:
    """What a member did in the course: a metric of its own."""

    def handle(event: _Event) -> Normalized:
        user = event.data.need_child("user")
        module = event.data.child("module")
        properties = {
            "product_id": event.product.identifier("id"),
            "product_name": event.product.text("name"),
            "module_id": module.identifier("id"),
            "module_name": module.text("name"),
        }
        done = ContactEvent(
            fact=fact,
            source_id=event.id,
            event_type=None,
            metric=metric,
            occurred_at=event.at,
            entity_type="course",
            entity_id=event.product.identifier("id"),
            object_id_ref=event.product.identifier("id"),
            properties={name: value for name, value in properties.items() if value is not None},
        )
        return processed(fact, done, person=person(email_identity(user.text("email")), name=user.text("name")))

    return handle


def _buyer(event: _Event) -> Person:
    buyer = event.data.child("buyer")
    address = buyer.child("address")
    country = (
        address.text("country_iso")
        or event.purchase.child("checkout_country").text("iso")
        or event.data.child("checkout_country").text("iso")
        or event.context.country
    )
    document = buyer.text("document") if buyer.text("document_type") in ("CPF", "CNPJ") else None
    name = f"{buyer.text('first_name') or ''} {buyer.text('last_name') or ''}".strip()
    return person(
        email_identity(buyer.text("email")),
        tax_identity(document),
        _phone(buyer, country.upper()),
        name=buyer.text("name") or name,
    )


def _phone(buyer: Document, country: str) -> Identity | None:
    """In two fields at the checkout, in one at the cart. The sandbox fills in nonsense: no phone then, and no error."""
    code, number = buyer.identifier("checkout_phone_code"), buyer.identifier("checkout_phone")
    if number is None:
        return phone_identity(buyer.identifier("phone"), country)
    if code is None:
        return phone_identity(number, country)
    code, number = code.lstrip("+0"), number.lstrip("+0")
    if len(code) > MAX_CODE:
        return None
    whole = phone_identity(f"+{code}{number}")
    # Some buyers type the country's code a second time.
    return whole or (phone_identity(f"+{number}") if number.startswith(code) else None)


_HANDLERS: Mapping[str, Callable[[_Event], Normalized]] = {
    "PURCHASE_APPROVED": _approved,
    "PURCHASE_COMPLETE": _approved,
    "PURCHASE_BILLET_PRINTED": _billet_printed,
    "PURCHASE_CANCELED": _canceled,
    "PURCHASE_REFUNDED": _refunded("refund"),
    "PURCHASE_CHARGEBACK": _refunded("chargeback"),
    "PURCHASE_EXPIRED": _state_only("not_paid", "voided", "closed"),
    "PURCHASE_DELAYED": _state_only("not_paid_yet", "pending"),
    # Asked for, not given yet.
    "PURCHASE_PROTEST": _state_only("refund_asked_for", "paid"),
    "PURCHASE_OUT_OF_SHOPPING_CART": _cart_left,
    "SUBSCRIPTION_CANCELLATION": _subscription_cancelled,
    "CLUB_FIRST_ACCESS": _member("club_first_access", "Club First Access"),
    "CLUB_MODULE_COMPLETED": _member("club_module_completed", "Club Module Completed"),
}

_IGNORED: Mapping[str, str] = {
    "SWITCH_PLAN": "subscription_changed",
    "UPDATE_SUBSCRIPTION_CHARGE_DATE": "subscription_changed",
}
