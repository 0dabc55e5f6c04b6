"""Forms, a shop and its courier by their mappings, as rows and events on a real Postgres."""

import copy
import json
import random
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest

import schemas
from afluente import postgres
from producers.ingest import channels, mapping, store
from tests.consumers.workers.normalizing import Inbound
from tests.consumers.workers.test_webhook_normalize_hotmart import state
from tests.producers.ingest.normalize.test_typeform import event as form

SAMPLES = Path(__file__).resolve().parents[4] / "shared" / "samples" / "typeform"
ORDER, PARCEL = "9007199254740995", "AF100200300BR"
YAMPI, COURIER = mapping.samples("yampi"), mapping.samples("courier")
STORY = ("customer_created", "order_created", "order_paid", "order_shipped", "order_delivered", "order_refunded")
CHECKPOINTS = ("created", "in_transit", "out_for_delivery", "exception", "delivered")


@pytest.fixture
def inbound(database):
    return Inbound(database)


def connect(inbound, organization, name, **changes):
    return inbound.channel("generic", organization, settings={"mapping": mapping.example(name) | changes})


async def test_story_of_a_shop_and_its_courier(inbound, database):
    organization = database.organization()
    shop, courier = connect(inbound, organization, "yampi"), connect(inbound, organization, "courier")
    for name in STORY:
        await inbound.receive("generic", shop, YAMPI[name])
    for name in CHECKPOINTS:
        # the courier knows the order's number, and neither the buyer's mail nor phone
        await inbound.receive("generic", courier, {**COURIER[name], "shipment": parcel(name, recipient=None)})
    await inbound.work()
    rows = {row["external_event_id"]: row for row in inbound.contact_events()}
    assert {name: (row["source"], row["metric_name"], row["value"]) for name, row in rows.items()} == {
        "customer_created:70110042": ("yampi", "Customer Created", None),
        f"order_placed:{ORDER}": ("yampi", "Order Placed", Decimal("289.90")),
        f"order_paid:{ORDER}": ("yampi", "Order Paid", Decimal("289.90")),
        f"order_fulfilled:{ORDER}": ("yampi", "Order Fulfilled", Decimal("289.90")),
        f"shipment_delivered:{ORDER}": ("yampi", "Shipment Delivered", None),
        f"order_refunded:{ORDER}": ("yampi", "Order Refunded", Decimal("289.90")),
        f"shipment_created:{PARCEL}": ("courier", "Shipment Created", None),
        f"shipment_in_transit:{PARCEL}:2026-11-12T06:10:00-03:00": ("courier", "Shipment In Transit", None),
        f"shipment_out_for_delivery:{PARCEL}:2026-11-14T08:05:00-03:00": ("courier", "Shipment Out For Delivery", None),
        f"shipment_exception:{PARCEL}:2026-11-14T11:20:00-03:00": ("courier", "Shipment Exception", None),
        f"shipment_delivered:{PARCEL}": ("courier", "Shipment Delivered", None),
    }
    assert len({row["contact_id"] for row in rows.values()}) == 1
    paid = rows[f"order_paid:{ORDER}"]
    assert (paid["event_type"], paid["currency"], paid["unique_event_id"]) == (
        "purchase_completed", "BRL", f"yampi:order:order_paid:{ORDER}",
    )  # fmt: skip
    assert [item["sku"] for item in paid["properties"]["items"]] == ["MOCHILA-AZ", "GARRAFA-1L"]
    (order,) = inbound.rows("SELECT source, status, financial_status, total_cents, tracking_number FROM orders")
    assert order == {
        "source": "yampi", "status": "open", "financial_status": "refunded", "total_cents": 28990,
        "tracking_number": PARCEL,
    }  # fmt: skip
    assert {status for status, _ in inbound.outcomes()} == {"processed"}
    encoded(inbound)


def parcel(name, **changes):
    return {**COURIER[name]["shipment"], **changes}


def encoded(inbound):
    """Everything emitted fits the schema that the relay publishes with."""
    for row in inbound.rows("SELECT * FROM event_log ORDER BY seq"):
        schemas.encode(
            schemas.Row(
                row["seq"], row["id"], row["organization_id"], row["event_type"], row["entity_kind"], row["entity_id"],
                json.dumps(row["payload"]).encode(), json.dumps(row["metadata"]).encode(), row["created_at"],
            )
        )  # fmt: skip


async def test_parcel_finds_its_buyer_by_the_number_that_the_shop_was_told(inbound, database):
    organization = database.organization()
    by_tracking = mapping.example("courier")
    for rule in by_tracking["rules"]:
        for fact in rule.get("facts", []):
            fact["of_order"] = {"by": "tracking", "value": "shipment.tracking_number"}
    shop = connect(inbound, organization, "yampi")
    courier = inbound.channel("generic", organization, settings={"mapping": by_tracking})
    # the parcel is faster than the shop: it waits for the order
    await inbound.receive("generic", courier, {**COURIER["delivered"], "shipment": parcel("delivered", recipient=None)})
    await inbound.receive("generic", shop, YAMPI["order_shipped"])
    await inbound.work()
    contacts = {row["source"]: row["contact_id"] for row in inbound.contact_events()}
    assert contacts["courier"] == contacts["yampi"]
    # nobody's order: the recipient is the contact
    other = database.organization("no shop")
    await inbound.receive("generic", connect(inbound, other, "courier"), COURIER["created"])
    await inbound.work()
    assert inbound.rows("SELECT name, email, phone_e164 FROM contacts WHERE organization_id = %s", other) == [
        {"name": "Lívia Torres", "email": "livia.torres@example.com", "phone_e164": "+5581988887777"}
    ]
    assert inbound.facts(other) == [f"shipment_created:{PARCEL}"]


async def test_any_order_and_repeats_come_to_the_same(inbound, database):
    organizations = [database.organization(f"in order {number}") for number in range(2)]
    for number, organization in enumerate(organizations):
        shop = connect(inbound, organization, "yampi")
        posts = random.Random(number).sample(STORY, len(STORY)) if number else STORY
        for name in (*posts, *posts):
            await inbound.receive("generic", shop, YAMPI[name])
        await inbound.work()
    expected, *others = (state(inbound, organization) for organization in organizations)
    assert len(expected[0]) == len(STORY)
    assert all(other == expected for other in others)
    assert len(inbound.outcomes()) == 2 * len(STORY)


async def test_two_shops_of_one_kind_both_have_order_one(inbound, database):
    organization = database.organization()
    for source in ("yampi", "yampi_outlet"):
        shop = connect(inbound, organization, "yampi", source=source)
        await inbound.receive("generic", shop, YAMPI["order_paid"])
    await inbound.work()
    assert [(row["source"], row["external_event_id"]) for row in inbound.contact_events()] == [
        ("yampi", f"order_paid:{ORDER}"),
        ("yampi_outlet", f"order_paid:{ORDER}"),
    ]


async def test_what_no_rule_takes_is_kept_and_replayed_under_a_better_mapping(inbound, database):
    shop = connect(inbound, database.organization(), "yampi")
    vip = {"event": "vip.joined", "resource": {"id": 5, "customer": {"data": {"email": "livia.torres@example.com"}}}}
    await inbound.receive("generic", shop, vip)
    await inbound.work()
    assert inbound.outcomes() == [("unrecognised", "unknown_topic")]
    better = copy.deepcopy(mapping.example("yampi"))
    fact = {"fact": "vip_joined", "id": "resource.id", "metric": "VIP Joined"}
    better["rules"].append({"name": "vip", "topics": ["vip.joined"], "facts": [fact]})
    with postgres.connect(database.url) as conn:
        channels.set_mapping(conn, shop, better)
    (part,) = inbound.rows("SELECT id FROM webhook_events WHERE parent_id IS NOT NULL")
    async with await postgres.connect_async(database.url) as conn:
        assert await store.replay(conn, inbound.keyring, part["id"], datetime.now(UTC)) == 1
    await inbound.work()
    (row,) = inbound.contact_events()
    assert (row["metric_name"], row["external_event_id"]) == ("VIP Joined", "vip_joined:5")
    assert inbound.rows("SELECT category FROM metrics WHERE name = 'VIP Joined'") == [{"category": "custom"}]


async def test_form_is_one_submission_however_often_it_is_sent(inbound, database):
    channel = inbound.channel("typeform", database.organization())
    for event_id in ("01", "02"):  # a resend from their panel has another event id
        await inbound.receive("typeform", channel, {**form(), "event_id": event_id})
    await inbound.receive("typeform", channel, form(token="t2", answers=[]))
    await inbound.work()
    submitted, *others = inbound.contact_events()
    # nobody gave the second one, so there is nobody to record it for
    assert (submitted["external_event_id"], others) == ("form_submitted:F1:t1", [])
    assert submitted["event_type"] == "form_submitted"
    assert submitted["occurred_at"] == datetime(2026, 11, 20, 10, tzinfo=UTC)
    assert submitted["properties"]["responses"][6]["value"] == 9007199254740993
    assert inbound.outcomes() == [("processed", "form_submitted")] * 2
    assert inbound.rows("SELECT email, phone_e164 FROM contacts") == [
        {"email": "livia@example.com", "phone_e164": "+5581988887777"}
    ]
    encoded(inbound)
    # a channel of one form takes no other
    channel = inbound.channel("typeform", database.organization("one form"), external_id="F1")
    assert (await inbound.receive("typeform", channel, form())).outcome == "stored"
    assert (await inbound.receive("typeform", channel, form(form_id="F2"))).outcome == "unrouted"


@pytest.mark.parametrize("folder", [SAMPLES] if SAMPLES.exists() else [])
async def test_samples_of_forms_through_the_receiver(inbound, database, folder):
    channel = inbound.channel("typeform", database.organization())
    for path in sorted(folder.glob("*.json")):
        await inbound.receive("typeform", channel, path.read_bytes())
    await inbound.work()
    rows = inbound.rows(
        "SELECT c.email, c.name, e.occurred_at, jsonb_array_length(e.properties -> 'responses') AS answers"
        " FROM contact_events e JOIN contacts c ON c.id = e.contact_id WHERE event_type = 'form_submitted' ORDER BY 1"
    )
    assert [tuple(row.values()) for row in rows] == [
        ("ana.prado@example.com", "Ana Beatriz Prado", datetime(2026, 4, 16, 21, 0, 39, tzinfo=UTC), 5),
        ("carla.nogueira@example.com", None, datetime(2022, 1, 18, 18, 17, 2, tzinfo=UTC), 7),
        ("elis.hart@example.com", "Elis", datetime(2018, 1, 18, 18, 17, 2, tzinfo=UTC), 13),
    ]
