"""Hotmart's topics and fields, beyond what the samples show. Values of our own."""

import json
from datetime import UTC, datetime
from decimal import Decimal

import pytest

from producers.ingest.normalize import facts as f
from producers.ingest.normalize import normalize

RECEIVED = datetime(2026, 11, 29, 12, tzinfo=UTC)
AT_MS = 1_794_000_000_123
AT = datetime(2026, 11, 6, 21, 20, 0, 123000, tzinfo=UTC)
BUYER = {
    "email": "Livia@Example.com",
    "name": "Lívia Torres",
    "checkout_phone_code": "55",
    "checkout_phone": "8188887777",
}


def event(topic="PURCHASE_APPROVED", *, data=None, purchase=None, **more):
    purchase = {
        "transaction": "HP9007199254740993",
        "status": "APPROVED",
        "approved_date": AT_MS - 1000,
        "order_date": AT_MS - 2000,
        "price": {"value": 149.5, "currency_value": "BRL"},
        "payment": {"type": "PIX"},
        **(purchase or {}),
    }
    content = {
        "product": {"id": 9007199254740993, "name": "Curso"},
        "buyer": BUYER,
        "purchase": purchase,
        **(data or {}),
    }
    return {"id": "e-1", "event": topic, "creation_date": AT_MS, "data": content, **more}


def read(given, **context):
    body = json.dumps(given).encode()
    return normalize("hotmart", body, {}, f.Context(topic="x", received_at=RECEIVED, **context))


def only(given, kind=f.ContactEvent):
    (found,) = (fact for fact in read(given).facts if isinstance(fact, kind))
    return found


def test_purchase_is_exact():
    paid = only(event())
    assert (paid.external_id, paid.event_type, paid.metric) == (
        "order_paid:HP9007199254740993", "purchase_completed", "Order Paid",
    )  # fmt: skip
    assert (paid.value, str(paid.value), paid.currency) == (Decimal("149.50"), "149.50", "BRL")
    assert paid.properties["productId"] == "9007199254740993"
    assert paid.properties["paymentMethod"] == "PIX"
    assert paid.occurred_at == datetime(2026, 11, 6, 21, 19, 59, 123000, tzinfo=UTC)
    who = read(event()).person
    assert [i.value for i in who.identities] == ["livia@example.com", "+5581988887777"]
    assert who.name == "Lívia Torres"


@pytest.mark.parametrize(
    ("price", "value", "currency"),
    [
        ({"value": 1500, "currency_value": "BRL"}, "1500.00", "BRL"),
        ({"value": 500.0, "currency_value": "JPY"}, "500", "JPY"),
        ({"value": 1.234, "currency_value": "KWD"}, "1.234", "KWD"),
        ({"value": 19990, "currency_value": "CLP"}, "19990", "CLP"),
        ({"value": "97.9", "currency_value": "usd"}, "97.90", "USD"),
        # older payloads name no currency
        ({"value": 1500}, "1500.00", "BRL"),
    ],
)
def test_amounts_by_the_currencys_decimals(price, value, currency):
    paid = only(event(purchase={"price": price}))
    assert (str(paid.value), paid.currency, paid.properties["amount"]) == (value, currency, value)


def test_price_is_what_the_buyer_paid_and_neither_interest_nor_offer():
    money = {
        "price": {"value": 100, "currency_value": "USD"},
        "full_price": {"value": 117, "currency_value": "USD"},
        "original_offer_price": {"value": 500, "currency_value": "BRL"},
    }
    assert (only(event(purchase=money)).value, only(event(purchase=money)).currency) == (Decimal("100.00"), "USD")


def test_first_charge_creates_the_subscription_and_a_renewal_does_not():
    subscription = {"subscriber": {"code": "SUB9"}, "plan": {"id": 12, "name": "Anual"}, "status": "ACTIVE"}
    first = read(event(data={"subscription": subscription}))
    assert [fact.external_id for fact in first.facts[1:]] == [
        "order_paid:HP9007199254740993",
        "subscription_created:SUB9",
    ]
    assert first.facts[2].properties == {"planId": "12", "planName": "Anual", "amount": "149.50", "currency": "BRL"}
    renewal = read(event(data={"subscription": subscription}, purchase={"transaction": "HP2", "recurrence_number": 2}))
    assert [fact.external_id for fact in renewal.facts[1:]] == ["order_paid:HP2"]


def test_nothing_is_bought_for_nothing_but_a_trial_is_a_subscription():
    trial = event(
        data={"subscription": {"subscriber": {"code": "SUB9"}}},
        purchase={"price": {"value": 0, "currency_value": "BRL"}},
    )
    result = read(trial)
    assert result.reason == "nothing_paid"
    assert [fact.external_id for fact in result.facts[1:]] == ["subscription_created:SUB9"]


def test_complete_says_the_same_of_a_purchase_as_approved():
    approved, complete = event(), event("PURCHASE_COMPLETE", id="e-2", creation_date=AT_MS + 10**9)
    assert only(approved) == only(complete)


def test_refund_and_chargeback_give_the_same_money_back_once():
    refund, chargeback = only(event("PURCHASE_REFUNDED")), only(event("PURCHASE_CHARGEBACK"))
    assert refund.external_id == chargeback.external_id == "order_refunded:HP9007199254740993"
    assert (refund.metric, refund.value) == ("Order Refunded", Decimal("149.50"))
    assert (refund.properties["reason"], chargeback.properties["reason"]) == ("refund", "chargeback")
    assert only(event("PURCHASE_REFUNDED"), f.OrderState).financial_status == "refunded"


def test_refund_in_part_does_not_claim_the_whole_price():
    part = only(event("PURCHASE_REFUNDED", purchase={"status": "PARTIALLY_REFUNDED"}))
    assert (part.external_id, part.value) == ("order_refunded:HP9007199254740993:e-1", None)


@pytest.mark.parametrize(
    ("topic", "reason", "financial", "metrics"),
    [
        ("PURCHASE_BILLET_PRINTED", "order_placed", "pending", ["Order Placed"]),
        ("PURCHASE_CANCELED", "order_cancelled", "voided", ["Order Cancelled"]),
        ("PURCHASE_EXPIRED", "not_paid", "voided", []),
        ("PURCHASE_DELAYED", "not_paid_yet", "pending", []),
        ("PURCHASE_PROTEST", "refund_asked_for", "paid", []),
    ],
)
def test_approved_date_makes_no_purchase_of_the_other_topics(topic, reason, financial, metrics):
    result = read(event(topic))
    state, *facts = result.facts
    assert (result.reason, state.financial_status) == (reason, financial)
    assert [fact.metric for fact in facts] == metrics


def test_cart_has_a_product_and_no_price():
    buyer = {"name": "Caio", "email": "caio@example.com", "phone": "5581988887777"}
    left = only(event("PURCHASE_OUT_OF_SHOPPING_CART", data={"buyer": buyer}))
    assert (left.event_type, left.metric, left.value, left.currency) == (
        "purchase_abandoned", "Checkout Abandoned", None, None,
    )  # fmt: skip
    assert left.properties == {"productIds": ["9007199254740993"], "stageAbandoned": "cart"}
    assert left.occurred_at == AT


def test_cancelled_subscription_by_its_subscriber():
    data = {
        "subscriber": {"code": "SUB9", "email": "caio@example.com", "phone": {"dddCell": "62", "cell": "80030003"}},
        "subscription": {"plan": {"id": 12}},
        "cancellation_date": AT_MS,
    }
    given = event("SUBSCRIPTION_CANCELLATION", data=data)
    cancelled = only(given)
    assert (cancelled.external_id, cancelled.properties, cancelled.occurred_at) == (
        "subscription_cancelled:SUB9", {"planId": "12", "reason": None}, AT,
    )  # fmt: skip
    assert [i.value for i in read(given).person.identities] == ["caio@example.com", "+5562980030003"]


def test_members_area_is_a_metric_of_its_own():
    data = {"user": {"email": "caio@example.com"}, "module": {"id": 7, "name": "Módulo 1"}}
    given = {"id": "e-9", "creationDate": AT_MS, "event": "CLUB_MODULE_COMPLETED", "data": data}
    done = only(given)
    assert (done.metric, done.external_id, done.occurred_at) == (
        "Club Module Completed", "club_module_completed:e-9", AT,
    )  # fmt: skip
    assert done.properties == {"module_id": "7", "module_name": "Módulo 1"}


@pytest.mark.parametrize("topic", ["SWITCH_PLAN", "UPDATE_SUBSCRIPTION_CHARGE_DATE"])
def test_changed_subscription_is_understood_and_nothing_for_us(topic):
    assert read(event(topic)).status == "ignored"


@pytest.mark.parametrize(
    ("phone", "expected"),
    [
        ({"checkout_phone_code": "55", "checkout_phone": "5581988887777"}, "+5581988887777"),
        ({"checkout_phone_code": "1", "checkout_phone": "4155550105"}, "+14155550105"),
        ({"checkout_phone": "81988887777"}, "+5581988887777"),
        ({"phone": "5581988887777"}, "+5581988887777"),
        # the sandbox's nonsense stops nothing
        ({"checkout_phone_code": "999999999", "checkout_phone": "99999999900"}, None),
        ({}, None),
    ],
)
def test_phone_of_the_checkout_or_the_cart(phone, expected):
    who = read(event(data={"buyer": {"email": "a@example.com", **phone}})).person
    assert next((i.value for i in who.identities if i.kind == "phone"), None) == expected


def test_unknown_topics_and_shapes_are_kept():
    assert read(event("PURCHASE_TELEPORTED")).reason == "unknown_topic"
    assert read({"event": "PURCHASE_APPROVED", "data": {}}).reason == "unknown_shape:data.purchase"
    assert read(event(purchase={"transaction": None})).reason == "unknown_shape:data.purchase.transaction"
    assert read(event(purchase={"price": {"value": -1}})).reason == "unknown_shape:data.purchase.price.value"
