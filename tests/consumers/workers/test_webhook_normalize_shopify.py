"""Shopify deliveries as rows and events, on a real Postgres."""

import asyncio
from decimal import Decimal

import pytest

import schemas
from tests.consumers.workers.normalizing import Inbound

PERSON = {"id": 501, "first_name": "Ana", "last_name": "Prado", "email": "Ana@Example.com", "phone": "+5562980030003"}


def order(number=1001, **given):
    return {
        "id": number,
        "name": f"#{number}",
        "currency": "BRL",
        "total_price": "297.90",
        "financial_status": "pending",
        "fulfillment_status": None,
        "payment_gateway_names": ["pix"],
        "created_at": "2026-11-20T10:00:00-03:00",
        "updated_at": "2026-11-20T10:00:00-03:00",
        "customer": PERSON,
        "line_items": [
            {"id": 1, "product_id": 11, "title": "Café 500 g", "sku": "C500", "quantity": 2, "price": "100.00"},
            {"id": 2, "product_id": 12, "title": "Filtro", "sku": "F1", "quantity": 1, "price": "97.90"},
        ],
        **given,
    }


def paid(number=1001, **given):
    return order(number, financial_status="paid", updated_at="2026-11-20T10:05:00-03:00", **given)


def cancelled(number=1001):
    at = "2026-11-21T09:00:00-03:00"
    return order(number, financial_status="refunded", cancelled_at=at, cancel_reason="customer", updated_at=at)


REFUND = {
    "id": 9001,
    "order_id": 1001,
    "processed_at": "2026-11-21T09:00:01-03:00",
    "transactions": [
        {"kind": "refund", "status": "success", "amount": "200.00", "currency": "BRL"},
        {"kind": "refund", "status": "success", "amount": "97.90", "currency": "BRL"},
    ],
}


@pytest.fixture
def inbound(database):
    return Inbound(database)


@pytest.fixture
def shop(database, inbound):
    return inbound.channel("shopify", database.organization())


async def test_paid_order_is_one_purchase_with_every_line(inbound, shop):
    await inbound.shopify(shop, "orders/paid", paid())
    await inbound.work()
    (event,) = inbound.contact_events()
    assert (event["event_type"], event["metric_name"]) == ("purchase_completed", "Order Paid")
    assert (event["value"], event["currency"]) == (Decimal("297.90"), "BRL")
    assert event["external_event_id"] == "order_paid:1001"
    assert event["unique_event_id"] == "shopify:order:order_paid:1001"
    assert (event["source"], event["source_type"], event["object_id_ref"]) == ("shopify", "EXTERNAL", "1001")
    assert event["occurred_at"].isoformat() == "2026-11-20T13:00:00+00:00"
    assert event["properties"]["paymentMethod"] == "pix"
    assert [(i["productId"], i["quantity"], i["amount"]) for i in event["properties"]["items"]] == [
        ("11", 2, "200.00"),
        ("12", 1, "97.90"),
    ]
    (stored,) = inbound.rows("SELECT * FROM orders")
    assert (stored["total_cents"], stored["financial_status"], stored["order_number"]) == (29790, "paid", "#1001")
    assert stored["contact_id"] == event["contact_id"]
    assert event["object_id"] == str(stored["id"])
    lines = inbound.rows("SELECT * FROM order_lines ORDER BY line_no")
    assert [(line["product_external_id"], line["total_cents"]) for line in lines] == [("11", 20000), ("12", 9790)]
    assert inbound.outcomes() == [("processed", "order_paid")]
    assert inbound.emitted() == ["contact.created"]


async def test_what_is_recorded_fits_the_schema_the_relay_publishes_with(inbound, shop):
    await inbound.shopify(shop, "orders/paid", paid())
    await inbound.work()
    for row in inbound.rows("SELECT * FROM event_log ORDER BY seq"):
        import json

        encoded = schemas.encode(
            schemas.Row(
                row["seq"], row["id"], row["organization_id"], row["event_type"], row["entity_kind"], row["entity_id"],
                json.dumps(row["payload"]).encode(), json.dumps(row["metadata"]).encode(), row["created_at"],
            )
        )  # fmt: skip
        decoded = schemas.decode(encoded)
        assert decoded.payload == row["payload"]
        decoded.data  # noqa: B018  the typed payload is made


async def test_placed_paid_cancelled_and_refunded_of_one_order_are_four_rows(inbound, shop):
    await inbound.shopify(shop, "orders/create", order())
    await inbound.shopify(shop, "orders/paid", paid())
    await inbound.shopify(shop, "orders/cancelled", cancelled())
    await inbound.shopify(shop, "refunds/create", REFUND)
    await inbound.work()
    assert inbound.facts() == ["order_placed:1001", "order_paid:1001", "order_cancelled:1001", "order_refunded:9001"]
    assert [row["metric_name"] for row in inbound.contact_events()] == [
        "Order Placed",
        "Order Paid",
        "Order Cancelled",
        "Order Refunded",
    ]
    assert inbound.contact_events()[-1]["value"] == Decimal("297.90")
    assert len(inbound.rows("SELECT FROM contacts")) == len(inbound.rows("SELECT FROM orders")) == 1
    (stored,) = inbound.rows("SELECT status, financial_status, cancel_reason FROM orders")
    assert stored == {"status": "cancelled", "financial_status": "refunded", "cancel_reason": "customer"}


async def test_order_paid_at_once_and_its_paid_topic_count_once(inbound, shop):
    await inbound.shopify(shop, "orders/create", paid())
    await inbound.shopify(shop, "orders/paid", paid())
    await inbound.work()
    assert inbound.facts() == ["order_placed:1001", "order_paid:1001"]
    assert len(inbound.emitted("contact_event.recorded")) == 3  # those two, and the contact's own


async def test_same_delivery_under_two_webhook_ids_counts_once(inbound, shop):
    for webhook_id in ("a", "b"):
        await inbound.shopify(
            shop, "orders/paid", paid(), **{"X-Shopify-Event-Id": "same action", "X-Shopify-Webhook-Id": webhook_id}
        )
    await inbound.work()
    assert inbound.facts() == ["order_paid:1001"]
    assert len(inbound.outcomes()) == 1


async def test_handling_a_delivery_again_changes_nothing(inbound, shop, database):
    await inbound.shopify(shop, "orders/paid", paid())
    (event,) = inbound.pending()
    await inbound.work()
    counts = (
        "SELECT (SELECT count(*) FROM contacts), (SELECT count(*) FROM orders), (SELECT count(*) FROM order_lines),"
    )
    counts += " (SELECT count(*) FROM contact_events), (SELECT count(*) FROM event_log)"
    before = database.execute(counts)
    await inbound.handle(event)
    await inbound.handle(event)
    assert database.execute(counts) == before


async def test_two_organizations_with_the_same_order_and_person_are_apart(inbound, database):
    organizations = [database.organization("A"), database.organization("B")]
    for organization in organizations:
        await inbound.shopify(inbound.channel("shopify", organization), "orders/paid", paid())
    await inbound.work()
    for organization in organizations:
        (event,) = inbound.contact_events(organization)
        (contact,) = inbound.rows("SELECT * FROM contacts WHERE organization_id = %s", organization)
        assert event["contact_id"] == contact["id"]
        assert event["external_event_id"] == "order_paid:1001"


async def test_older_state_that_comes_late_does_not_overwrite_the_newer(inbound, shop):
    await inbound.shopify(shop, "orders/cancelled", cancelled())
    await inbound.shopify(shop, "orders/create", order(total_price="1.00"))
    await inbound.work()
    (stored,) = inbound.rows("SELECT status, total_cents FROM orders")
    assert stored == {"status": "cancelled", "total_cents": 29790}
    assert inbound.facts() == ["order_cancelled:1001", "order_placed:1001"]


async def test_refund_before_its_order_waits_for_it(inbound, shop):
    await inbound.shopify(shop, "refunds/create", REFUND)
    (refund,) = inbound.pending()
    with pytest.raises(Exception, match="the order is not known yet"):
        await inbound.handle(refund)
    assert inbound.facts() == []
    inbound._handled.add(refund.id)
    await inbound.shopify(shop, "orders/create", order())
    await inbound.work()
    await inbound.handle(refund, attempt=2)
    assert inbound.facts() == ["order_placed:1001", "order_refunded:9001"]


async def test_refund_of_an_order_that_never_comes_is_kept_without_a_contact(inbound, shop):
    await inbound.shopify(shop, "refunds/create", REFUND)
    await inbound.work()
    assert inbound.facts() == []
    (row,) = inbound.rows("SELECT status, reason, summary FROM webhook_events WHERE parent_id IS NOT NULL")
    assert row == {"status": "processed", "reason": "order_refunded", "summary": {"without_contact": 1}}


async def test_order_without_anybody_is_still_an_order(inbound, shop):
    await inbound.shopify(shop, "orders/create", order(customer=None, email="", phone="sem telefone"))
    await inbound.work()
    (stored,) = inbound.rows("SELECT contact_id, total_cents FROM orders")
    assert stored == {"contact_id": None, "total_cents": 29790}
    assert inbound.facts() == []
    assert inbound.rows("SELECT FROM contacts") == []


async def test_ninth_digit_twins_are_one_person(inbound, shop):
    for number, phone in ((1, "556280030003"), (2, "+5562980030003"), (3, "(62) 8003-0003")):
        await inbound.shopify(shop, "orders/create", order(number, customer=None, phone=phone))
    await inbound.work()
    (contact,) = inbound.rows("SELECT * FROM contacts")
    assert contact["phone_e164"] == "+5562980030003"
    (identity,) = inbound.rows("SELECT * FROM contact_identities")
    assert identity["as_received"] == "556280030003"
    assert len(inbound.facts()) == 3


async def test_one_new_person_in_many_deliveries_at_once_is_one_contact(inbound, shop):
    for number in range(1, 17):
        person = {"id": 501} if number % 2 else {"phone": "62 8003-0003", "id": 501}
        await inbound.shopify(shop, "orders/create", order(number, customer=person))
    await asyncio.gather(*(inbound.handle(event) for event in inbound.pending()))
    assert len(inbound.rows("SELECT FROM contacts")) == 1
    assert inbound.emitted() == ["contact.created"]
    assert len(inbound.facts()) == 16


async def test_identities_of_two_contacts_are_not_merged_but_shown(inbound, shop):
    await inbound.shopify(shop, "customers/create", {"id": 1, "phone": "+5511900010001"})
    await inbound.shopify(shop, "customers/create", {"id": 2, "email": "ana@example.com"})
    await inbound.shopify(shop, "customers/update", {"id": 1, "email": "ana@example.com"})
    await inbound.work()
    assert len(inbound.rows("SELECT FROM contacts")) == 2
    (alert,) = inbound.rows("SELECT kind, occurrences, details FROM alerts")
    assert (alert["kind"], alert["occurrences"]) == ("contact_conflict", 1)
    stays, other = alert["details"]["contact_ids"]
    assert stays != other
    (command,) = alert["details"]["commands"]
    assert command.startswith(f"afluente contact merge {other} --into {stays} --org ")
    assert "contact.merged" not in inbound.emitted()


async def test_unknown_topic_is_kept_shown_and_replayable(inbound, shop, database):
    from datetime import UTC, datetime

    from afluente import postgres
    from producers.ingest import store

    await inbound.shopify(shop, "subscription_contracts/create", {"id": 1})
    await inbound.work()
    assert inbound.outcomes() == [("unrecognised", "unknown_topic")]
    (row,) = inbound.rows("SELECT id FROM webhook_events WHERE parent_id IS NOT NULL")
    async with await postgres.connect_async(database.url) as conn:
        assert await store.replay(conn, inbound.keyring, row["id"], datetime.now(UTC)) == 1
    assert inbound.outcomes() == [("received", None)]
    await inbound.work()
    assert inbound.outcomes() == [("unrecognised", "unknown_topic")]
    assert inbound.rows("SELECT attempts FROM webhook_events WHERE parent_id IS NOT NULL") == [{"attempts": 2}]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"not json", "not_json"),
        (b"[]", "not_json"),
        (b'{"id": NaN}', "not_json"),
        ({"id": 1}, "unknown_shape:currency"),
        ({"currency": "BRL", "total_price": "1e999"}, "unknown_shape:total_price"),
        ({"currency": "BRL", "total_price": "1.00"}, "unknown_shape:id"),
        ({"id": {"a": 1}, "currency": "BRL", "total_price": "1.00"}, "unknown_shape:id"),
    ],
)
async def test_shape_that_is_not_understood_is_kept_with_its_reason(inbound, shop, body, reason):
    await inbound.shopify(shop, "orders/create", body)
    await inbound.work()
    assert inbound.outcomes() == [("unrecognised", reason)]
    assert inbound.emitted() == []


async def test_nul_and_lone_surrogates_do_not_stop_an_order(inbound, shop):
    text = (
        '{"id": 7, "currency": "BRL", "total_price": "5.00", "customer": {"id": 1, "first_name": "A\\u0000n\\ud800a"}}'
    )
    await inbound.shopify(shop, "orders/create", text.encode())
    await inbound.work()
    (contact,) = inbound.rows("SELECT name FROM contacts")
    assert contact["name"] == "A�n�a"
    assert inbound.facts() == ["order_placed:7"]


async def test_test_deliveries_do_not_count_on_a_live_channel(inbound, shop):
    await inbound.shopify(shop, "orders/paid", paid(), **{"X-Shopify-Test": "true"})
    await inbound.shopify(shop, "orders/paid", paid(test=True))
    await inbound.work()
    assert inbound.outcomes() == [("ignored", "test_delivery")] * 2
    assert inbound.facts() == []


async def test_signed_order_replayed_under_another_topic_is_not_believed(inbound, shop):
    await inbound.shopify(shop, "orders/paid", order())
    await inbound.shopify(shop, "orders/cancelled", order())
    await inbound.shopify(shop, "orders/delete", order())
    await inbound.shopify(shop, "customers/delete", order())
    await inbound.shopify(shop, "app/uninstalled", order())
    await inbound.shopify(shop, "customers/redact", order())
    await inbound.work()
    assert {reason for _, reason in inbound.outcomes()} == {"topic_contradicts_body", "unknown_shape:orders_to_redact"}
    assert inbound.facts() == []
    assert inbound.emitted() == []
    assert inbound.rows("SELECT status FROM channels") == [{"status": "active"}]


async def test_privacy_requests_are_emitted_once_for_a_person_we_know(inbound, shop):
    await inbound.shopify(shop, "customers/create", PERSON)
    request = {"shop_id": 1, "customer": {"id": 501, "email": None, "phone": None}, "data_request": {"id": 9999}}
    redact = {"shop_id": 1, "customer": {"id": 501, "email": None, "phone": None}, "orders_to_redact": []}
    for _ in range(2):
        await inbound.shopify(shop, "customers/data_request", request)
        await inbound.shopify(shop, "customers/redact", redact)
    await inbound.work()
    received = inbound.emitted("lgpd.data_request_received")
    assert [(p["request_type"], p["channel"]) for p in received] == [("access", "shopify"), ("redact", "shopify")]
    assert received[0]["request_id"] == "9999"


async def test_privacy_request_for_nobody_we_know_is_a_success_and_makes_no_contact(inbound, shop):
    await inbound.shopify(
        shop, "customers/redact", {"customer": {"id": 5, "email": "x@example.com"}, "orders_to_redact": []}
    )
    await inbound.work()
    assert inbound.outcomes() == [("processed", "privacy_redact")]
    assert inbound.rows("SELECT FROM contacts") == []
    assert inbound.emitted() == []


async def test_uninstalled_shop_still_gets_its_privacy_requests_through(inbound, shop):
    await inbound.shopify(shop, "app/uninstalled", {"id": 1, "shop_owner": "Ana", "plan_name": "basic"})
    await inbound.work()
    assert inbound.rows("SELECT status FROM channels") == [{"status": "uninstalled"}]
    await inbound.shopify(shop, "customers/redact", {"customer": {"id": 5}, "orders_to_redact": []})
    await inbound.work()
    assert inbound.outcomes()[-1] == ("processed", "privacy_redact")


async def test_events_say_what_caused_them(inbound, shop):
    await inbound.shopify(shop, "orders/paid", paid())
    (received,) = inbound.pending()
    await inbound.work()
    for row in inbound.rows("SELECT metadata FROM event_log WHERE event_type <> 'webhook.received'"):
        assert row["metadata"]["causation_id"] == str(received.id)
        assert row["metadata"]["causation_depth"] == 1
        assert row["metadata"]["request_id"] == "req-1"
        assert row["metadata"]["source"] == "webhook-normalize-worker"


async def test_erased_delivery_is_no_failure(inbound, shop, database):
    await inbound.shopify(shop, "orders/paid", paid())
    database.execute("UPDATE webhook_events SET raw_body = NULL")
    await inbound.work()
    assert inbound.facts() == []


async def test_news_of_a_parcel_are_each_told_once_to_the_orders_buyer(inbound, shop):
    parcel = {"id": 7001, "order_id": 1001, "tracking_number": "T1", "updated_at": "2026-11-22T10:00:00-03:00"}
    news = ("confirmed", "in_transit", "in_transit", "attempted_delivery", "delivered", None)
    for status in news:
        await inbound.shopify(shop, "fulfillments/update", parcel | {"shipment_status": status})
    await inbound.shopify(shop, "orders/paid", paid())
    await inbound.work()
    told = [row for row in inbound.contact_events() if row["metric_name"].startswith("Shipment")]
    assert sorted(row["external_event_id"] for row in told) == [
        "shipment_delivered:7001",
        "shipment_exception:7001",
        "shipment_in_transit:7001",
    ]
    assert len({row["contact_id"] for row in inbound.contact_events()}) == 1
    assert inbound.outcomes().count(("ignored", "no_news_of_the_shipment")) == 2


async def test_parcels_number_is_kept_with_the_order_for_whoever_knows_only_that(inbound, shop):
    parcels = [{"tracking_number": None}, {"tracking_number": "T1", "tracking_company": "Rápido Log"}]
    await inbound.shopify(shop, "orders/fulfilled", paid(fulfillment_status="fulfilled", fulfillments=parcels))
    await inbound.work()
    assert inbound.rows("SELECT tracking_number, tracking ->> 'carrier' AS carrier FROM orders") == [
        {"tracking_number": "T1", "carrier": "Rápido Log"}
    ]
