"""Phones, money, times and JSON of unknown make."""

import json
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.ingest import sources
from producers.ingest.normalize import facts, moments, money, normalize
from producers.ingest.normalize import phone as phones
from producers.ingest.normalize.document import read_document
from producers.ingest.normalize.facts import Context

RECEIVED = datetime(2026, 11, 29, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # the pairs of the reference: one person, and a landline that stays
        ("556280030003", "+5562980030003"),
        ("5562980030003", "+5562980030003"),
        ("551130000010", "+551130000010"),
        ("+55 (62) 8003-0003", "+5562980030003"),
        ("(62) 98003-0003", "+5562980030003"),
        ("62 8003 0003", "+5562980030003"),
        ("062980030003", "+5562980030003"),
        ("0 15 11 90001-0001", "+5511900010001"),
        ("0055 11 90001-0001", "+5511900010001"),
        ("11 90001-0001 ramal 12", "+5511900010001"),
        # area code 55 is not the country's
        ("(55) 99123-4567", "+5555991234567"),
        ("+1 415 555 0105", "+14155550105"),
        ("+52 1 55 1234 5678", "+5215512345678"),
        ("sem telefone", None),
        ("555-555-SHIP", None),
        ("90001-0001", None),
        ("0800 123 4567", None),
        ("(10) 90001-0001", None),
        ("1" * 30, None),
        ("", None),
        (None, None),
    ],
)
def test_phone_in_brazil(text, expected):
    assert phones.canonical(text) == expected


@pytest.mark.parametrize(
    ("text", "country", "expected"),
    [("(415) 555-0105", "US", "+14155550105"), ("123-123-1234", "CA", None), ("600 123 456", "ES", "+34600123456")],
)
def test_phone_elsewhere_is_checked_by_its_countrys_rules(text, country, expected):
    assert phones.canonical(text, country) == expected


@given(st.integers(11, 99), st.integers(6, 9), st.integers(0, 9_999_999))
def test_both_forms_of_a_brazilian_mobile_are_one(area, first, rest):
    if area % 10 == 0:
        return
    short = f"55{area}{first}{rest:07d}"
    long = f"55{area}9{first}{rest:07d}"
    assert phones.whatsapp(short) == phones.whatsapp(long) == phones.canonical(long) == f"+{long}"


@given(st.text(max_size=40))
def test_no_text_breaks_the_phone_reader(text):
    for found in (phones.canonical(text), phones.whatsapp(text), phones.canonical(text, "US")):
        assert found is None or (found.startswith("+") and found[1:].isdigit())


@pytest.mark.parametrize(
    ("amount", "currency", "minor"),
    [("297.90", "BRL", 29790), ("500", "JPY", 500), ("1.234", "KWD", 1234), ("0.015", "USD", 2), ("0", "BRL", 0)],
)
def test_minor_units_by_the_currencys_exponent(amount, currency, minor):
    assert money.to_minor(Decimal(amount), currency) == minor


@given(st.integers(0, 10**12), st.sampled_from(["BRL", "JPY", "KWD", "USD", "CLP"]))
def test_stripes_integers_there_and_back(minor, currency):
    assert money.to_minor(money.from_stripe(minor, currency), currency) == minor


@pytest.mark.parametrize(("text", "code"), [("brl", "BRL"), (" usd ", "USD"), ("R$", None), ("", None), (None, None)])
def test_currency_code(text, code):
    assert money.currency_code(text) == code


@pytest.mark.parametrize(
    ("text", "hour"),
    [
        ("2021-12-31T19:00:00-05:00", 0),
        ("2021-12-31T21:00:00-0300", 0),
        ("2022-01-01T00:00:00+0000", 0),
        ("2022-01-01T00:00:00.000Z", 0),
        ("2024-08-07T22:49:09.417931715Z", 22),
    ],
)
def test_iso_times_with_and_without_a_colon(text, hour):
    assert moments.from_iso(text).hour == hour
    assert moments.from_iso(text).tzinfo is UTC


@pytest.mark.parametrize(
    "text",
    [
        "2022-01-01T00:00:00",
        "0001-01-01T00:00:00+14:00",
        "0001-01-01T00:00:00Z",
        "9999-12-31T23:59:59Z",
        "9999-12-31T23:59:59-12:00",
        "yesterday",
        "",
        None,
    ],
)
def test_time_without_an_offset_is_no_time(text):
    assert moments.from_iso(text) is None


@pytest.mark.parametrize("value", ["x", "1_0", "-1x", None, True, "9" * 30, "", 253402300799, -62135596800])
def test_epoch_that_is_none(value):
    assert moments.from_epoch_s(value) is None


@pytest.mark.parametrize("text", ["1e999999999", "-1e999999999", "1e12", "0e999999999", "NaN"])
def test_number_beyond_all_bounds_is_no_epoch(text):
    assert moments.from_epoch_long_s(Decimal(text)) is None
    assert moments.from_epoch_long_s(Decimal("1796020498.5")).microsecond == 500_000


def test_time_far_ahead_is_when_it_came():
    assert moments.occurred(RECEIVED + timedelta(days=2), RECEIVED) == RECEIVED
    assert moments.occurred(RECEIVED + timedelta(hours=2), RECEIVED) == RECEIVED + timedelta(hours=2)
    offset = datetime(2026, 11, 28, 21, tzinfo=timezone(timedelta(hours=-3)))
    assert moments.occurred(offset, RECEIVED) == RECEIVED


def test_numbers_are_exact():
    document = read_document(b'{"id": 820982911946154508, "a": 297.90, "b": "297.90", "c": 0.1}')
    assert document.identifier("id") == "820982911946154508"
    assert document.decimal("a") == document.decimal("b") == Decimal("297.90")
    assert str(document.decimal("c")) == "0.1"


def test_of_endless_decimals_twenty_are_kept():
    body = b'{"a": 297.89999999999997726263245567679405212402343750, "b": 0.%s}' % (b"1" * 1_000_000)
    document = read_document(body)
    assert str(document.decimal("a")) == "297.89999999999997726263"
    assert str(document.decimal("b")) == f"0.{'1' * 20}"


def test_count_or_minor_amount_is_one_that_a_double_holds():
    document = read_document(b'{"a": 9007199254740992, "b": 9007199254740993, "c": -%s}' % (b"9" * 400))
    assert [document.integer(name) for name in "abc"] == [2**53, None, None]


@pytest.mark.parametrize("value", ["NaN", "1e5", "1,5", "--1", "", "1" * 41, "9" * 16, True, None, {}])
def test_what_is_no_amount(value):
    assert read_document(json.dumps({"a": value}).encode()).decimal("a") is None


@pytest.mark.parametrize("body", [b"", b"[]", b"1", b'{"a": NaN}', b"{", b"[" * 100_000, b'{"a":' * 100_000, b"\xff"])
def test_what_is_no_object(body):
    assert read_document(body) is None


def test_nul_and_lone_surrogates_become_a_mark_and_pairs_stay():
    document = read_document(rb'{"a": "x\u0000y\ud83d", "b\u0000": ["\ud83d\ude00"]}')
    assert document.text("a") == "x�y�"
    assert document.raw("b�") == ["😀"]


def test_what_only_a_lax_sender_writes_is_read_too():
    absurd = read_document(b'{"a": 1e99999999999999999999, "b": 2.50, "c": "\xed\xa0\x80"}')
    assert (absurd.decimal("a"), absurd.decimal("b"), absurd.text("c")) == (None, Decimal("2.50"), "�")
    assert read_document('{"a": 1.10, "b": 9007199254740993}'.encode("utf-16")).value == {
        "a": Decimal("1.10"),
        "b": 9007199254740993,
    }
    assert read_document(b'{"a": 123456789012345678901234567890}').raw("a") == 123456789012345678901234567890


def test_e_mails():
    assert facts.email_identity(" Ana@Example.COM ").value == "ana@example.com"
    for text in ("ana", "@x.com", "a b@x.com", "a@x", None, "", "a" * 320 + "@x.com"):
        assert facts.email_identity(text) is None


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=20,
)
_TOPICS = [
    ("shopify", "orders/create"), ("shopify", "refunds/create"), ("shopify", "customers/redact"),
    ("shopify", "checkouts/create"), ("shopify", "fulfillments/create"), ("stripe", "any"), ("whatsapp", "messages"),
    ("nuvemshop", "order/paid"), ("nuvemshop", "customers/redact"), ("nuvemshop", "product/created"),
    ("hotmart", "any"), ("typeform", "any"),
]  # fmt: skip


@given(
    st.dictionaries(
        st.sampled_from(["id", "customer", "data", "type", "entry", "order_id", "currency", "token"]), _json
    )
)
def test_no_shape_makes_a_normaliser_fail(value):
    body = json.dumps(value).encode()
    for source, topic in _TOPICS:
        context = Context(topic=topic, received_at=RECEIVED, test_channel=True, resource=value, fetched=True)
        assert normalize(source, body, {}, context).status in ("processed", "ignored", "unrecognised")


def test_unknown_source_is_kept():
    result = normalize("nobody", b"{}", {}, Context(topic="x", received_at=RECEIVED))
    assert (result.status, result.reason) == ("unrecognised", "unknown_source")


def test_a_body_of_more_parts_than_any_delivery_has_is_not_read():
    wide = b'{"a":[' + b"[]," * sources.MAX_CONTAINERS + b"[]]}"
    assert read_document(wide) is None
    assert sources.read_object(wide) is None
    assert read_document(b'{"a":[' + b"[]," * 1000 + b"[]]}") is not None
