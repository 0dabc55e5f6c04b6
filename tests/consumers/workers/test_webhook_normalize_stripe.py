"""Stripe events as contact events, on a real Postgres: one payment counts once, in any order."""

import itertools
import json
from datetime import UTC, datetime
from decimal import Decimal

import pytest

from consumers.inbound.apply.writing import NotYet
from consumers.inbound.part import LAST_RUN
from producers.ingest.normalize import facts, normalize
from tests.consumers.workers.normalizing import Inbound

DETAILS = {"email": "bruno@example.com", "name": "Bruno Teixeira", "phone": "+5521900020002"}
_numbers = itertools.count(1)


def event(kind, **given):
    object_ = {"currency": "brl", **given}
    return {
        "id": f"evt_{next(_numbers)}",
        "type": kind,
        "created": 1769000000,
        "livemode": True,
        "data": {"object": object_},
    }


def session(kind="checkout.session.completed", **given):
    values = {
        "id": "cs_1",
        "mode": "payment",
        "payment_status": "paid",
        "amount_total": 29790,
        "payment_intent": "pi_1",
        "payment_method_types": ["card"],
        "customer": "cus_1",
        "customer_details": DETAILS,
    }
    return event(kind, **(values | given))


def invoice(kind="invoice.paid", **given):
    values = {"id": "in_1", "amount_paid": 9990, "billing_reason": "subscription_cycle", "customer": "cus_1"}
    return event(kind, **(values | given))


@pytest.fixture
def inbound(database):
    return Inbound(database)


@pytest.fixture
def account(database, inbound):
    return inbound.channel("stripe", database.organization())


async def play(inbound, account, *events):
    for body in events:
        await inbound.receive("stripe", account, body)
    await inbound.work()


async def test_paid_session_is_a_purchase_in_units_of_its_currency(inbound, account):
    await play(inbound, account, session())
    (found,) = inbound.contact_events()
    assert (found["event_type"], found["metric_name"]) == ("purchase_completed", "Order Paid")
    assert (found["value"], found["currency"]) == (Decimal("297.90"), "BRL")
    assert (found["external_event_id"], found["object_id_ref"]) == ("order_paid:pi_1", "pi_1")
    assert found["properties"]["paymentMethod"] == "card"
    assert inbound.rows("SELECT name, phone_e164, email FROM contacts") == [
        {"name": "Bruno Teixeira", "phone_e164": "+5521900020002", "email": "bruno@example.com"}
    ]


async def test_twins_of_one_payment_count_once(inbound, account):
    await play(
        inbound,
        account,
        event("charge.succeeded", id="ch_1", payment_intent="pi_1", amount=29790),
        event("payment_intent.succeeded", id="pi_1", amount=29790),
        session(),
        invoice(id="in_9", billing_reason="manual", payment_intent="pi_1", amount_paid=29790),
        session("checkout.session.async_payment_succeeded"),
    )
    assert inbound.facts() == ["order_paid:pi_1"]


async def test_invoice_paid_and_its_twin_count_once_and_each_cycle_again(inbound, account):
    await play(inbound, account, invoice(), invoice("invoice.payment_succeeded"), invoice(id="in_2"))
    assert inbound.facts() == ["order_paid:in_1", "order_paid:in_2"]


async def test_new_api_shape_of_an_invoice_names_its_subscription(inbound, account):
    parent = {"subscription_details": {"subscription": "sub_1"}}
    await play(inbound, account, invoice(subscription=None, parent=parent))
    assert inbound.contact_events()[0]["properties"]["subscriptionId"] == "sub_1"


async def test_boleto_is_ordered_first_and_paid_days_later(inbound, account):
    await play(inbound, account, session(payment_status="unpaid", payment_method_types=["boleto"]))
    assert inbound.facts() == ["order_placed:pi_1"]
    await play(inbound, account, session("checkout.session.async_payment_succeeded", payment_method_types=["boleto"]))
    assert inbound.facts() == ["order_placed:pi_1", "order_paid:pi_1"]


async def test_nothing_is_bought_for_nothing(inbound, account):
    free = session(payment_status="no_payment_required", amount_total=0)
    await play(inbound, account, session(amount_total=0), invoice(amount_paid=0), session(mode="subscription"), free)
    assert inbound.facts() == []
    reasons = ["nothing_paid", "nothing_paid", "checkout_subscription", "nothing_paid"]
    assert [reason for _, reason in inbound.outcomes()] == reasons


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("charge.dispute.funds_withdrawn", "dispute_not_lost"),
        ("refund.created", "twin_of_the_charges_refund"),
        ("charge.captured", "twin_of_the_checkout_or_invoice"),
    ],
)
def test_twins_of_refunds_and_disputes_count_nothing(kind, reason):
    context = facts.Context(topic=kind, received_at=datetime(2026, 11, 29, tzinfo=UTC))
    result = normalize("stripe", json.dumps(event(kind, id="x", amount=1)).encode(), {}, context)
    assert (result.status, result.reason) == ("ignored", reason)


async def test_events_of_one_checkout_in_any_order_are_one_contact(inbound, account):
    await play(
        inbound,
        account,
        event("customer.subscription.created", id="sub_1", customer="cus_1", items={"data": [
            {"price": {"id": "price_1", "nickname": "Plano Ouro", "unit_amount": 4990, "currency": "brl"},
             "quantity": 2}]}),
        invoice(),
        event("customer.created", id="cus_1", email="bruno@example.com", name="Bruno Teixeira", phone=None),
        session(mode="subscription"),
    )  # fmt: skip
    (contact,) = inbound.rows("SELECT name, email, phone_e164 FROM contacts")
    assert contact == {"name": "Bruno Teixeira", "email": "bruno@example.com", "phone_e164": "+5521900020002"}
    created = inbound.contact_events()[0]
    assert created["event_type"] == "subscription_created"
    assert created["properties"] == {
        "planId": "price_1",
        "planName": "Plano Ouro",
        "amount": "99.80",
        "currency": "BRL",
    }


async def test_cancelled_subscription_says_why(inbound, account):
    details = {"reason": "cancellation_requested", "feedback": "too_expensive"}
    await play(
        inbound,
        account,
        event("customer.subscription.updated", id="sub_1", customer="cus_1", cancel_at_period_end=True),
        event("customer.subscription.deleted", id="sub_1", customer="cus_1", cancellation_details=details),
    )
    (found,) = inbound.contact_events()
    assert (found["event_type"], found["properties"]["reason"]) == ("subscription_cancelled", "too_expensive")
    assert inbound.outcomes()[0] == ("ignored", "subscription_will_end")


async def test_refunds_in_parts_add_up_and_find_the_buyer_by_the_payment(inbound, account):
    def refunded(total, before):
        body = event("charge.refunded", id="ch_1", payment_intent="pi_1", amount=29790, amount_refunded=total)
        body["data"]["previous_attributes"] = {"amount_refunded": before}
        return body

    await play(inbound, account, session(), refunded(10000, 0), refunded(29790, 10000), refunded(29790, 10000))
    refunds = [row for row in inbound.contact_events() if row["metric_name"] == "Order Refunded"]
    assert [row["value"] for row in refunds] == [Decimal("100.00"), Decimal("197.90")]
    assert len({row["contact_id"] for row in inbound.contact_events()}) == 1


async def test_left_checkout_is_a_purchase_abandoned(inbound, account):
    await play(inbound, account, session("checkout.session.expired", payment_status="unpaid"))
    (found,) = inbound.contact_events()
    assert (found["event_type"], found["metric_name"]) == ("purchase_abandoned", "Checkout Abandoned")
    assert found["properties"] == {"cartValue": "297.90", "currency": "BRL", "stageAbandoned": "checkout"}


@pytest.mark.parametrize(
    ("currency", "minor", "value"),
    [("jpy", 500, "500"), ("kwd", 1234, "1.234"), ("usd", 1, "0.01"), ("clp", 29790, "29790")],
)
async def test_minor_units_are_the_currencys_own(inbound, account, currency, minor, value):
    await play(inbound, account, session(currency=currency, amount_total=minor))
    (found,) = inbound.contact_events()
    assert (found["value"], found["currency"]) == (Decimal(value), currency.upper())


async def test_test_mode_does_not_count_on_a_live_connection(inbound, account, database):
    body = session() | {"livemode": False}
    await play(inbound, account, body)
    assert inbound.outcomes() == [("ignored", "test_mode_event")]
    test = inbound.channel("stripe", database.organization("T"), mode="test")
    await play(inbound, test, body)
    assert inbound.facts() == ["order_paid:pi_1"]


async def test_two_organizations_with_one_account_are_apart(inbound, database):
    body = session()
    for name in ("A", "B"):
        await play(inbound, inbound.channel("stripe", database.organization(name), external_id="acct_1"), body)
    assert inbound.facts() == ["order_paid:pi_1", "order_paid:pi_1"]


async def test_unknown_type_and_unknown_shape_are_kept(inbound, account):
    await play(
        inbound,
        account,
        event("radar.early_fraud_warning.created"),
        {"id": "evt_x", "type": "invoice.paid"},
        {"id": "x"},
    )
    assert inbound.outcomes() == [
        ("unrecognised", "unknown_topic"),
        ("unrecognised", "unknown_shape:data"),
        ("unrecognised", "unknown_shape:type"),
    ]


@pytest.mark.parametrize("order", [1, -1])
async def test_dispute_lost_is_its_payers_in_any_order(inbound, account, order):
    """It names a payment and nobody: whose it is, is known when the payment is."""
    dispute = {"id": "dp_1", "status": "lost", "amount": 29790, "payment_intent": "pi_1", "charge": "ch_1"}
    await play(inbound, account, *[session(), event("charge.dispute.closed", **dispute)][::order])
    assert sorted(inbound.facts()) == ["dispute_lost:dp_1", "order_paid:pi_1"]
    # one that never comes: the last attempt gives up waiting, and the delivery says so
    await inbound.receive("stripe", account, event("charge.dispute.closed", **dispute | {"payment_intent": "pi_2"}))
    [received] = inbound.pending()
    with pytest.raises(NotYet):
        await inbound.handle(received)
    await inbound.handle(received, attempt=LAST_RUN)
    (told,) = inbound.rows("SELECT summary FROM webhook_events WHERE summary ? 'without_contact'")
    assert told["summary"]["without_contact"] == 1
