"""Hotmart events as rows and events, on a real Postgres: a purchase counts once, in any order."""

import json
import random
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest

from tests.consumers.workers.normalizing import Inbound
from tests.producers.ingest.normalize.test_hotmart import event

SAMPLES = Path(__file__).resolve().parents[4] / "shared" / "samples" / "hotmart"
SUBSCRIPTION = {"subscription": {"subscriber": {"code": "SUB9"}, "plan": {"id": 12, "name": "Anual"}}}
TRANSACTION = "HP9007199254740993"
DAY_MS = 86_400_000
START_MS = 1_794_000_000_123


def later(topic, days, number):
    return event(topic, id=f"e-{number}", creation_date=START_MS + days * DAY_MS, data=SUBSCRIPTION)


# One purchase from the order to the money given back, and its subscription's end.
STORY = [
    later("PURCHASE_BILLET_PRINTED", 0, 1),
    later("PURCHASE_APPROVED", 1, 2),
    later("PURCHASE_COMPLETE", 8, 3),
    later("PURCHASE_PROTEST", 9, 4),
    later("PURCHASE_REFUNDED", 10, 5),
    later("PURCHASE_CHARGEBACK", 11, 6),
    {
        "id": "e-7",
        "event": "SUBSCRIPTION_CANCELLATION",
        "creation_date": START_MS + 12 * DAY_MS,
        "data": {"subscriber": {"code": "SUB9", "email": "livia@example.com"}, "cancellation_date": START_MS},
    },
]
FACTS = {
    f"order_placed:{TRANSACTION}": ("Order Placed", Decimal("149.50")),
    f"order_paid:{TRANSACTION}": ("Order Paid", Decimal("149.50")),
    f"order_refunded:{TRANSACTION}": ("Order Refunded", Decimal("149.50")),
    "subscription_created:SUB9": (None, None),
    "subscription_cancelled:SUB9": (None, None),
}


@pytest.fixture
def inbound(database):
    return Inbound(database)


@pytest.fixture
def account(database, inbound):
    return inbound.channel("hotmart", database.organization())


def state(inbound, organization=None):
    """What is left when all is handled, without ids and times of ours."""

    def rows(query, order):
        where = "WHERE organization_id = COALESCE(%s, organization_id)"
        return inbound.rows(f"{query} {where} ORDER BY {order}", organization)

    events = rows(
        "SELECT external_event_id, event_type, metric_name, value, currency, occurred_at, properties, source"
        " FROM contact_events",
        "external_event_id",
    )
    orders = rows(
        "SELECT external_id, status, financial_status, total_cents, currency, payment_method, placed_at, paid_at,"
        " cancelled_at, source_updated_at FROM orders",
        "external_id",
    )
    lines = rows("SELECT product_external_id, name, total_cents FROM order_lines", "line_no")
    contacts = rows("SELECT name, email, phone_e164 FROM contacts", "email")
    return [e for e in events if e["metric_name"] != "Contact Created"], orders, lines, contacts


async def play(inbound, account, *events):
    for given in events:
        await inbound.receive("hotmart", account, given)
    await inbound.work()


async def test_story_of_a_purchase(inbound, account):
    await play(inbound, account, *STORY)
    events, orders, lines, contacts = state(inbound)
    assert {e["external_event_id"]: (e["metric_name"], e["value"]) for e in events} == FACTS
    # what gave the money back first says why; the chargeback changes nothing
    refund = next(e for e in events if e["metric_name"] == "Order Refunded")
    assert refund["properties"]["reason"] == "refund"
    assert [(o["external_id"], o["financial_status"], o["total_cents"]) for o in orders] == [
        (TRANSACTION, "refunded", 14950)
    ]
    assert [(line["product_external_id"], line["total_cents"]) for line in lines] == [("9007199254740993", 14950)]
    assert contacts == [{"name": "Lívia Torres", "email": "livia@example.com", "phone_e164": "+5581988887777"}]


async def test_twice_posted_changes_nothing_and_replayed_neither(inbound, account, database):
    await play(inbound, account, *STORY)
    before, emitted = state(inbound), len(inbound.emitted())
    await play(inbound, account, *STORY)
    assert (state(inbound), len(inbound.emitted())) == (before, emitted)
    # a resend by hand under another event id is another delivery of the same facts
    await play(inbound, account, *({**given, "id": f"again-{given['id']}"} for given in STORY))
    assert state(inbound) == before
    assert len(inbound.outcomes()) == 2 * len(STORY)


async def test_any_order_comes_to_the_same(inbound, database):
    # The refund and the chargeback say different reasons of one fact: whichever comes first.
    story = [given for given in STORY if given["event"] != "PURCHASE_CHARGEBACK"]
    organizations = [database.organization(f"in order {number}") for number in range(2)]
    for number, organization in enumerate(organizations):
        account = inbound.channel("hotmart", organization)
        shuffled = random.Random(number).sample(story, len(story)) if number else story
        await play(inbound, account, *shuffled)
    expected, *others = (state(inbound, organization) for organization in organizations)
    assert expected[0]
    assert all(other == expected for other in others)


async def test_complete_alone_is_the_purchase_and_the_token_of_its_body_is_stored_nowhere(inbound, account):
    await play(inbound, account, {**STORY[2], "hottok": "whsec_test"})
    assert inbound.facts() == [f"order_paid:{TRANSACTION}", "subscription_created:SUB9"]
    for table in ("webhook_events", "event_log", "contact_events"):
        assert "whsec_test" not in str(inbound.rows(f"SELECT w.*, {table == 'webhook_events'} FROM {table} w"))
    (body,) = inbound.rows("SELECT raw_body FROM webhook_events WHERE raw_body IS NOT NULL")
    assert json.loads(body["raw_body"])["hottok"] == "removed"


async def test_two_organizations_with_one_sandbox_are_apart(inbound, database):
    for name in ("A", "B"):
        account = inbound.channel("hotmart", database.organization(name), mode="test")
        sandbox = event(purchase={"transaction": "HP16015479281022"})
        await play(inbound, account, sandbox)
    assert inbound.facts() == ["order_paid:HP16015479281022"] * 2


@pytest.mark.parametrize("folder", [SAMPLES] if SAMPLES.exists() else [])
async def test_samples_through_the_receiver(inbound, database, folder):
    account = inbound.channel("hotmart", database.organization(), mode="test")
    for path in sorted(folder.glob("*.json")):
        await inbound.receive("hotmart", account, path.read_bytes())
    await inbound.work()
    assert {status for status, _ in inbound.outcomes()} == {"processed"}
    rows = {row["external_event_id"]: row for row in inbound.contact_events()}
    paid = rows["order_paid:HP12345670000TEST"]
    assert (paid["event_type"], paid["value"], paid["currency"]) == ("purchase_completed", Decimal("100.00"), "USD")
    assert paid["occurred_at"] == datetime(2025, 9, 30, 1, 15, 27, tzinfo=UTC)
    assert sorted(rows) == [
        "checkout_abandoned:2f6b9a3e-5d0c-4a77-9b1e-7c5d0a4f1e21",
        "club_first_access:7fe795fa-285c-430f-9a91-afce10a9216f",
        "order_cancelled:HP16015479281022",
        "order_paid:HP12345670000TEST",
        "order_paid:HP16015479281022",
        "order_refunded:HP12345670000TEST",
        "subscription_cancelled:SUB001",
        "subscription_created:I9OT62C3",
        "subscription_created:SUB001",
    ]
    assert inbound.rows("SELECT name, phone_e164 FROM contacts ORDER BY name") == [
        {"name": "Ana Beatriz Prado", "phone_e164": "+5511900010001"},
        {"name": "Bruno Teixeira", "phone_e164": "+5521900020002"},
        {"name": "Carla Nogueira", "phone_e164": "+5562980030003"},
    ]
