"""Whatever the bytes: a fact, None, or a reason."""

import uuid
from contextlib import suppress
from datetime import UTC, datetime
from decimal import Decimal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import schemas
from streams.errors import Unreadable
from streams.summaries import decode
from streams.summaries.fold import Fact
from tests.streams.records import START, ContactEvent

EVENT = ContactEvent(
    id=uuid.UUID("0190aaaa-0000-7000-8000-000000000001"),
    organization_id=uuid.UUID("0190bbbb-0000-7000-8000-000000000001"),
    contact_id=uuid.UUID("0190cccc-0000-7000-8000-000000000001"),
    metric_name="Order Paid",
    occurred_at=datetime(2026, 5, 4, 3, 2, 1, 987654, tzinfo=UTC),
    value="297.90",
    currency="BRL",
)


def test_a_contact_event_becomes_a_fact():
    assert decode.fact(EVENT.value_bytes()) == Fact(
        organization_id=str(EVENT.organization_id),
        contact_event_id=str(EVENT.id),
        contact_id=str(EVENT.contact_id),
        metric_name="Order Paid",
        occurred_at=EVENT.occurred_at,
        value=Decimal("297.90"),
        currency="BRL",
    )


def test_ids_are_the_same_however_they_are_written():
    assert decode.fact(EVENT.value_bytes(contact_id=str(EVENT.contact_id).upper())) == decode.fact(EVENT.value_bytes())


def test_typed_contact_events_are_facts_too():
    value = EVENT.value_bytes(contact_event_type="purchase_completed", properties={"amount": "297.90"})
    fact = decode.fact(value)
    assert fact is not None
    assert fact.metric_name == "Order Paid"


def test_an_event_without_a_metric_is_none():
    assert decode.fact(EVENT.value_bytes(metric_name=None, contact_event_type="product_viewed")) is None


@given(st.binary(max_size=200))
@example(b"")
@example(b"\0")
@example(b"\0\x40\0\0\0")
def test_random_bytes_are_unreadable(value):
    with pytest.raises(Unreadable):
        decode.fact(value)


@given(st.data())
def test_damaged_records_never_raise_anything_else(data):
    value = bytearray(EVENT.value_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        value[data.draw(st.integers(5, len(value) - 1))] = data.draw(st.integers(0, 255))
    with suppress(Unreadable):
        fact = decode.fact(bytes(value))
        assert fact is None or "\0" not in fact.metric_name


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "no value"),
        (b"\0\x4f\xff\xff\xff" + b"x" * 20, "schema id"),
        (b"\0\x00\x00\x00\x07" + b"x" * 20, "schema id"),
        (b"{}", "zero byte"),
        (EVENT.value_bytes()[:-3], "do not fit|left over|metadata"),
        (EVENT.value_bytes() + b"x", "left over"),
        (EVENT.value_bytes(contact_id="nobody"), "contact_id 'nobody' is not a UUID"),
        (EVENT.value_bytes(contact_event_id=""), "contact_event_id '' is not a UUID"),
        (EVENT.value_bytes(metric_name=""), "metric_name has 0 characters"),
        (EVENT.value_bytes(metric_name="x" * 256), "metric_name has 256 characters"),
        (EVENT.value_bytes(currency="x" * 17), "currency has 17 characters"),
    ],
)
def test_what_cannot_be_folded_says_why(value, reason):
    with pytest.raises(Unreadable, match=reason):
        decode.fact(value)


def test_another_event_type_is_refused_by_name():
    row = EVENT.row()._replace(event_type="shop.opened", payload=b"{}", created_at=START)
    with pytest.raises(Unreadable, match=r"'shop.opened' is not contact_event.recorded"):
        decode.fact(schemas.encode(row))


@pytest.mark.parametrize("key", [None, b"", b"acme", b"\xff\xfe", b"0190"])
def test_a_key_that_is_no_organization_is_none(key):
    assert decode.organization_of(key) is None


def test_a_key_names_the_organization():
    assert decode.organization_of(str(EVENT.organization_id).encode()) == str(EVENT.organization_id)
