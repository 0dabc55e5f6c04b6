"""Mappings over payloads: every sample of the shipped ones, and each thing that a mapping may say."""

import json
from datetime import UTC, datetime
from decimal import Decimal

import pytest

from producers.ingest import mapping
from producers.ingest.normalize import facts as f
from producers.ingest.normalize import normalize
from schemas.contact_events import METRICS

RECEIVED = datetime(2026, 11, 29, 12, tzinfo=UTC)
LIVIA = ["livia.torres@example.com", "+5581988887777"]
YAMPI_LIVIA = ["70110042", LIVIA[0], "52998224725", LIVIA[1]]
ORDER = "9007199254740995"
PARCEL = "AF100200300BR"

# Sample of a shipped mapping -> status, reason, facts (external id, metric, value, time), person.
SHIPPED = {
    ("yampi", "order_created"): (
        "order", [(f"order_placed:{ORDER}", "Order Placed", "289.90", "2026-11-10T12:15:30")], YAMPI_LIVIA),
    ("yampi", "order_paid"): (
        "order", [(f"order_paid:{ORDER}", "Order Paid", "289.90", "2026-11-10T12:18:02")], YAMPI_LIVIA),
    ("yampi", "order_shipped"): (
        "order",
        [(f"order_paid:{ORDER}", "Order Paid", "289.90", "2026-11-10T12:18:02"),
         (f"order_fulfilled:{ORDER}", "Order Fulfilled", "289.90", "2026-11-11T17:00:00")], YAMPI_LIVIA),
    ("yampi", "order_delivered"): (
        "order",
        [(f"order_paid:{ORDER}", "Order Paid", "289.90", "2026-11-10T12:18:02"),
         (f"shipment_delivered:{ORDER}", "Shipment Delivered", None, "2026-11-14T19:30:00")], YAMPI_LIVIA),
    ("yampi", "order_cancelled"): (
        "order", [(f"order_cancelled:{ORDER}", "Order Cancelled", "289.90", "2026-11-12T13:00:00")], YAMPI_LIVIA),
    ("yampi", "order_refunded"): (
        "order", [(f"order_refunded:{ORDER}", "Order Refunded", "289.90", "2026-11-20T14:00:00")], YAMPI_LIVIA),
    ("yampi", "cart_left"): (
        "cart_left", [("checkout_abandoned:c4rt-7d2f", "Checkout Abandoned", "159.80", "2026-11-10T13:30:00")],
        ["caio.mendes@example.com"]),
    ("yampi", "customer_created"): (
        "customer_created", [("customer_created:70110042", "Customer Created", None, "2026-11-10T12:00:00")],
        YAMPI_LIVIA),
    ("yampi", "product_updated"): ("not_about_a_contact", [], []),
    ("courier", "created"): (
        "shipment_created", [(f"shipment_created:{PARCEL}", "Shipment Created", None, "2026-11-11T16:40:00")], LIVIA),
    ("courier", "in_transit"): (
        "shipment_in_transit",
        [(f"shipment_in_transit:{PARCEL}:2026-11-12T06:10:00-03:00", "Shipment In Transit", None,
          "2026-11-12T09:10:00")], LIVIA),
    ("courier", "out_for_delivery"): (
        "shipment_out_for_delivery",
        [(f"shipment_out_for_delivery:{PARCEL}:2026-11-14T08:05:00-03:00", "Shipment Out For Delivery", None,
          "2026-11-14T11:05:00")], LIVIA),
    ("courier", "exception"): (
        "shipment_exception",
        [(f"shipment_exception:{PARCEL}:2026-11-14T11:20:00-03:00", "Shipment Exception", None,
          "2026-11-14T14:20:00")], LIVIA),
    ("courier", "delivered"): (
        "shipment_delivered", [(f"shipment_delivered:{PARCEL}", "Shipment Delivered", None, "2026-11-14T19:28:00")],
        LIVIA),
}  # fmt: skip


def read(given, payload, *, headers=None, **context):
    known = f.Context(topic="x", received_at=RECEIVED, settings={"mapping": given}, **context)
    return normalize("generic", json.dumps(payload).encode(), headers or {}, known)


def test_table_names_every_shipped_sample():
    assert set(SHIPPED) == {(name, sample) for name in mapping.examples() for sample in mapping.samples(name)}


@pytest.mark.parametrize(("name", "sample"), SHIPPED)
def test_shipped_mapping_makes_the_facts_of_its_sample(name, sample):
    result = read(mapping.example(name), mapping.samples(name)[sample])
    events = [fact for fact in result.facts if isinstance(fact, f.ContactEvent)]
    described = [
        (e.external_id, e.metric, str(e.value) if e.value else None, f"{e.occurred_at:%Y-%m-%dT%H:%M:%S}")
        for e in events
    ]
    who = [i.value for i in result.person.identities] if result.person else []
    assert (result.reason, described, who) == SHIPPED[name, sample]
    assert all(event.metric in METRICS for event in events)
    assert result.source == (name if result.status == "processed" else None)


def test_order_of_a_shipped_mapping_has_lines_and_the_parcel():
    state = read(mapping.example("yampi"), mapping.samples("yampi")["order_delivered"]).facts[0]
    assert (state.external_id, state.number, state.total, state.currency) == (ORDER, "20417", Decimal("289.90"), "BRL")
    assert (state.status, state.financial_status, state.fulfillment_status) == ("closed", "paid", "fulfilled")
    assert state.tracking["number"] == PARCEL
    assert [(line.sku, line.quantity, line.unit_price) for line in state.lines] == [
        ("MOCHILA-AZ", 1, Decimal("199.90")),
        ("GARRAFA-1L", 2, Decimal("45.00")),
    ]


# What a mapping may say


def simple(**fact):
    return {
        "source": "our_shop",
        "verify": {"by": "token"},
        "topic": "topic",
        "person": {"email": "email", "phone": {"first": ["phone", "mobile"]}, "external_id": "customer"},
        "rules": [{"name": "rule", "facts": [{"fact": "thing_done", "id": "id", "metric": "Thing Done", **fact}]}],
    }


def fact_of(given, payload, **context):
    (found,) = read(given, {"id": 1, "topic": "t", "email": "a@example.com", **payload}, **context).facts
    return found


@pytest.mark.parametrize(
    ("given", "payload", "value", "currency"),
    [
        ({"value": "v"}, {"v": 149.5}, "149.50", "BRL"),
        ({"value": "v"}, {"v": "149.5"}, "149.50", "BRL"),
        ({"value": {"path": "v", "unit": "minor"}}, {"v": 29790}, "297.90", "BRL"),
        ({"value": {"path": "v", "unit": "minor"}, "currency": "c"}, {"v": 500, "c": "jpy"}, "500", "JPY"),
        ({"value": {"path": "v", "unit": "minor"}, "currency": "c"}, {"v": 1234, "c": "KWD"}, "1.234", "KWD"),
        ({"value": {"path": "v", "decimal_comma": True}}, {"v": "R$ 1.234,56"}, "1234.56", "BRL"),
        ({"value": {"first": ["x", "v"]}, "currency": {"const": "USD"}}, {"v": "0.1"}, "0.10", "USD"),
        # what is no amount is none
        ({"value": "v"}, {"v": "1e9"}, None, None),
        ({"value": "v"}, {"v": True}, None, None),
        ({"value": {"path": "v", "unit": "minor"}}, {"v": 1.5}, None, None),
    ],
)
def test_money_is_exact_by_the_currencys_decimals(given, payload, value, currency):
    found = fact_of(simple(**given), payload)
    assert (None if found.value is None else str(found.value), found.currency) == (value, currency)


@pytest.mark.parametrize(
    ("at", "payload", "expected"),
    [
        ("at", {"at": "2026-11-20T10:00:00-03:00"}, "2026-11-20T13:00:00"),
        ({"path": "at", "form": "epoch_s"}, {"at": 1_794_000_000}, "2026-11-06T21:20:00"),
        ({"path": "at", "form": "epoch_s"}, {"at": "1794000000"}, "2026-11-06T21:20:00"),
        ({"path": "at", "form": "epoch_ms"}, {"at": 1_794_000_000_000}, "2026-11-06T21:20:00"),
        (
            {"path": "at", "form": "local", "zone": "America/Recife"}, {"at": "2026-11-20 10:00:00"},
            "2026-11-20T13:00:00",
        ),
        (
            {"path": "at", "form": "local", "zone": "America/Sao_Paulo", "zone_from": "tz"},
            {"at": "2026-11-20 10:00:00.000000", "tz": "America/Manaus"}, "2026-11-20T14:00:00",
        ),
        (
            {"path": "at", "form": "local", "zone": "UTC", "zone_from": "tz"},
            {"at": "2026-11-20 10:00:00", "tz": "-03:00"}, "2026-11-20T13:00:00",
        ),
        (
            {"path": "at", "form": "local", "zone": "UTC", "zone_from": "tz"},
            {"at": "2026-11-20 10:00:00", "tz": "../../etc/passwd"}, "2026-11-20T10:00:00",
        ),
        # what is no time, or far ahead, is when it came
        ("at", {"at": "2026-11-20T10:00:00"}, "2026-11-29T12:00:00"),
        ("at", {"at": "2036-11-20T10:00:00Z"}, "2026-11-29T12:00:00"),
        ({"path": "at", "form": "epoch_s"}, {"at": True}, "2026-11-29T12:00:00"),
    ],
)  # fmt: skip
def test_times_become_utc(at, payload, expected):
    assert f"{fact_of(simple(at=at), payload).occurred_at:%Y-%m-%dT%H:%M:%S}" == expected


def test_ids_are_whole_whatever_their_size():
    found = fact_of(simple(), {"id": 2**64 + 1})
    assert found.external_id == f"thing_done:{2**64 + 1}"
    assert len(fact_of(simple(), {"id": "x" * 1000}).external_id) <= 255


def test_first_phone_that_can_be_read_counts():
    payload = {"id": 1, "phone": "sem telefone", "mobile": "(81) 8888-7777", "customer": 7}
    who = read(simple(), payload).person
    assert [(i.kind, i.source, i.value) for i in who.identities] == [
        ("external", "our_shop", "7"),
        ("phone", "", "+5581988887777"),
    ]


def test_custom_metric_and_properties_of_each_kind():
    properties = {
        "text": "p.text",
        "number": {"path": "p.n", "as": "number"},
        "amount": {"path": "p.n", "as": "amount"},
        "yes": {"path": "p.yes", "as": "boolean"},
        "when": {"path": "p.when", "as": "time"},
        "tags": {"path": "p.tags", "as": "list"},
        "skus": {"path": "p.lines[*].sku", "as": "list"},
        "full": {"join": ["p.first", "p.last", "p.none"]},
        "word": {"path": "p.word", "map": {"pago": "paid"}, "default": "unknown"},
        "other": {"path": "p.text", "map": {"pago": "paid"}},
        "missing": "p.nothing",
    }
    p = {
        "text": " x ", "n": 7.5, "yes": True, "when": "2026-11-20T10:00:00-03:00", "tags": ["a", 1, {}, ""],
        "lines": [{"sku": "A"}, {}, {"sku": "B"}], "first": "Lívia", "last": "Torres", "word": "pago",
    }  # fmt: skip
    found = fact_of(simple(properties=properties), {"p": p})
    assert (found.metric, found.event_type) == ("Thing Done", None)
    assert found.properties == {
        "text": " x ", "number": 7.5, "amount": "7.5", "yes": True, "when": "2026-11-20T13:00:00+00:00",
        "tags": ["a", "1"], "skus": ["A", "B"], "full": "Lívia Torres", "word": "paid",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("condition", "payload", "holds"),
    [
        ({"equals": "paid"}, "paid", True),
        ({"equals": "paid"}, "Paid", False),
        ({"equals": 1}, "1", True),
        ({"equals": True}, True, True),
        ({"one_of": ["a", "b"]}, "b", True),
        ({"one_of": ["a", "b"]}, None, False),
        ({"starts_with": "re"}, "refunded", True),
        ({"more_than": 0}, "0.01", True),
        ({"more_than": 0}, 0, False),
        ({"more_than": 0}, "x", False),
        ({"exists": True}, "", False),
        ({"exists": False}, None, True),
        ({"equals": "paid", "not": True}, "open", True),
    ],
)
def test_conditions(condition, payload, holds):
    given = simple()
    given["rules"][0]["when"] = [{"path": "status", **condition}]
    result = read(given, {"id": 1, "topic": "t", "status": payload})
    assert (result.status, result.reason) == (("processed", "rule") if holds else ("unrecognised", "unknown_topic"))


def test_first_rule_that_fits_is_the_one():
    given = simple()
    given["rules"] = [
        {"name": "not_ours", "topics": ["ping", "product.*"], "ignore": True},
        {"name": "one", "topics": ["order.paid"], "facts": given["rules"][0]["facts"]},
        {"name": "any_order", "topics": ["order.*"]},
    ]
    outcomes = [
        read(given, {"id": 1, "topic": topic}).reason for topic in ("ping", "product.x", "order.paid", "order.x")
    ]
    assert outcomes == ["not_ours", "not_ours", "one", "any_order"]
    assert read(given, {"topic": "else"}).status == "unrecognised"
    assert read(given, {}).reason == "no_topic"


def test_topic_may_stand_in_a_header():
    given = simple() | {"topic": {"header": "X-Topic"}}
    given["rules"][0]["topics"] = ["paid"]
    assert read(given, {"id": 1}, headers={"x-topic": "paid"}).status == "processed"
    assert read(given, {"id": 1}).status == "unrecognised"


def test_test_deliveries_count_on_a_test_connection_only():
    given = simple() | {"test": [{"path": "sandbox", "equals": True}]}
    assert read(given, {"id": 1, "topic": "t", "sandbox": True}).reason == "test_delivery"
    assert read(given, {"id": 1, "topic": "t", "sandbox": True}, test_channel=True).status == "processed"
    assert read(given, {"id": 1, "topic": "t"}).status == "processed"


def items_of(*items):
    given = simple() | {"each": "events[*]", "topic": "@.status"}
    given["person"] = {"phone": "@.phone"}
    given["rules"][0] |= {"topics": ["done"]}
    given["rules"][0]["facts"][0]["id"] = {"join": ["batch", "@.id"], "between": "-"}
    return read(given, {"batch": "b", "events": list(items)})


def test_each_item_is_read_by_the_rules_and_is_its_own_persons():
    one = {"status": "done", "id": 1, "phone": "81988887777"}
    same = items_of(one, one | {"id": 2})
    assert [fact.external_id for fact in same.facts] == ["thing_done:b-1", "thing_done:b-2"]
    assert (same.person.identities[0].value, same.facts[0].of_person) == ("+5581988887777", None)
    two = items_of(one, one | {"id": 2, "phone": "11977776666"})
    assert two.person is None
    assert [fact.of_person.identities[0].value for fact in two.facts] == ["+5581988887777", "+5511977776666"]
    assert items_of(one, {"status": "new"}).reason == "rule+unrecognised_items"
    assert items_of({"status": "new"}).status == "unrecognised"
    assert items_of().reason == "no_items"


def test_what_a_fact_needs_is_named_when_it_is_missing():
    assert read(simple(), {"topic": "t"}).reason == "unknown_shape:rules[0].facts[0].id"
    given = simple()
    given["rules"][0] = {"name": "o", "order": {"id": "id", "total": "total", "updated_at": "at"}}
    for payload, missing in (({}, "id"), ({"id": 1}, "updated_at"), ({"id": 1, "at": "2026-11-20T10:00:00Z"}, "total")):
        assert read(given, {"topic": "t", **payload}).reason == f"unknown_shape:rules[0].order.{missing}"


def test_properties_that_do_not_fit_their_type_are_named():
    given = simple(event_type="discount_accepted", properties={"discountPercent": "p"})
    assert read(given, {"id": 1, "topic": "t", "p": "ten"}).reason == (
        "unknown_shape:rules[0].facts[0].properties.discountPercent"
    )
    assert read(given, {"id": 1, "topic": "t", "p": "10"}).status == "processed"


def test_too_much_to_read_is_kept_and_takes_no_time():
    """The largest mapping over the widest payload stops at a bound."""
    fact = {
        "fact": "x",
        "id": "id",
        "metric": "X",
        "properties": {f"p{n}": {"path": "l[*].a", "as": "list"} for n in range(60)},
    }
    given = simple() | {"each": "items[*]", "rules": [{"name": "r", "facts": [fact] * 10}]}
    payload = {"id": 1, "topic": "t", "l": [{"a": "x"}] * 300, "items": [1] * 300}
    assert read(given, payload).reason == "unknown_shape:too_much_to_read"


def test_connection_without_a_usable_mapping_keeps_what_comes():
    assert read({"source": "x"}, {}).reason == "mapping_unusable"
