"""Nuvemshop's thin webhooks: asked for at a stand-in of its API, on a real Postgres."""

from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from types import SimpleNamespace

import pytest

from afluente import postgres
from afluente.clock import SystemClock
from afluente.local.services.nuvemshop import Nuvemshop
from consumers import Delivery, Reject, RetryAfter
from consumers.inbound.nuvemshop import ApiError, NotAllowed
from consumers.runtime.context import HandlerContext
from consumers.workers.webhook_fetch import WebhookFetchWorker
from tests.consumers.workers.normalizing import Inbound

STORE, TOKEN = "1679854", "token-of-the-store"


def order(**given):
    return {
        "id": 871254203,
        "number": 101,
        "currency": "BRL",
        "total": "58.00",
        "status": "open",
        "payment_status": "pending",
        "shipping_status": "unpacked",
        "gateway": "pagseguro",
        "payment_details": {"method": "pix"},
        "created_at": "2026-11-20T10:00:00-0300",
        "updated_at": "2026-11-20T10:00:00-0300",
        "customer": {"id": 101, "name": "Carla Nogueira", "email": "carla@example.com", "phone": "+556280030003"},
        "products": [
            {"id": 1, "product_id": 12, "name": {"pt": "Café"}, "sku": None, "quantity": "2", "price": "29.00"}
        ],
        **given,
    }


def paid(**given):
    at = "2026-11-20T10:05:00-0300"
    return order(payment_status="paid", paid_at=at, updated_at=at, **given)


class Fetching(Inbound):
    """The steps of an external worker, each in the transaction that the runtime gives it."""

    async def handle(self, event, attempt=1):
        delivery = Delivery(self.worker.name, event, "", attempt, 0)
        async with self.transaction(event) as ctx:
            prepared = await self.worker.prepare(delivery, ctx)
        try:
            result = await self.worker.call(delivery, prepared)
        except (ApiError, RetryAfter) as error:
            async with self.transaction(event, datetime.now(UTC)) as ctx:
                await self.worker.failed(delivery, prepared, error, ctx)
            raise
        async with self.transaction(event) as ctx:
            await self.worker.record(delivery, result, ctx)

    @asynccontextmanager
    async def transaction(self, event, next_attempt_at=None):
        async with (
            await postgres.connect_async(self.database.url) as conn,
            conn.transaction(),
            postgres.act_for(conn, event.organization_id),
        ):
            deliveries = SimpleNamespace(worker=self.worker.name)
            yield HandlerContext(conn, SystemClock(), deliveries, event, next_attempt_at=next_attempt_at)

    async def thin(self, channel, topic, identifier=871254203, **given):
        return await self.receive(
            "nuvemshop", channel, {"store_id": int(STORE), "event": topic, "id": identifier}, **given
        )


@pytest.fixture
async def api():
    async with Nuvemshop() as api:
        api.tokens[TOKEN] = STORE
        yield api


@pytest.fixture
async def inbound(database, api):
    inbound = Fetching(database)
    inbound.worker = WebhookFetchWorker(inbound.keyring, api.url)
    await inbound.worker.open()
    yield inbound
    await inbound.worker.close()


@pytest.fixture
def shop(database, inbound):
    return inbound.channel(
        "nuvemshop", database.organization(), external_id=STORE, secrets={"api_token": TOKEN.encode()}
    )


async def test_paid_order_is_asked_for_and_recorded(inbound, shop, api):
    api.put("orders", paid())
    await inbound.thin(shop, "order/paid")
    await inbound.work()
    assert api.calls == [("orders/871254203", 200)]
    (event,) = inbound.contact_events()
    assert (event["event_type"], event["metric_name"]) == ("purchase_completed", "Order Paid")
    assert (event["value"], event["currency"]) == (Decimal("58.00"), "BRL")
    assert event["unique_event_id"] == "nuvemshop:order:order_paid:871254203"
    (stored,) = inbound.rows("SELECT * FROM orders")
    assert (stored["ns_order_id"], stored["total_cents"], stored["payment_method"]) == ("871254203", 5800, "pix")
    (emitted,) = inbound.emitted("nuvemshop.order_paid")
    assert emitted == {
        "order_id": str(stored["id"]),
        "amount_cents": 5800,
        "paid_at": "2026-11-20T13:05:00+00:00",
    }
    (contact,) = inbound.rows("SELECT * FROM contacts")
    assert (contact["phone_e164"], contact["email"]) == ("+5562980030003", "carla@example.com")
    assert inbound.outcomes() == [("processed", "order_paid")]


async def test_one_order_through_its_life_is_four_facts_and_four_events(inbound, shop, api):
    api.put("orders", order())
    await inbound.thin(shop, "order/created")
    await inbound.work()
    api.put("orders", paid())
    await inbound.thin(shop, "order/paid")
    await inbound.work()
    shipped = paid(shipping_status="shipped", shipped_at="2026-11-21T10:00:00-03:00", shipping_tracking_number="BR1")
    api.put("orders", shipped)
    await inbound.thin(shop, "order/fulfilled")
    await inbound.work()
    api.put(
        "orders",
        shipped | {"status": "cancelled", "cancelled_at": "2026-11-22T10:00:00-03:00", "cancel_reason": "customer"},
    )
    await inbound.thin(shop, "order/cancelled")
    await inbound.work()
    assert inbound.facts() == [
        f"{fact}:871254203" for fact in ("order_placed", "order_paid", "order_fulfilled", "order_cancelled")
    ]
    assert inbound.emitted() == [
        "contact.created",
        "nuvemshop.order_created",
        "nuvemshop.order_paid",
        "nuvemshop.order_fulfilled",
        "nuvemshop.order_cancelled",
    ]
    (fulfilled,) = inbound.emitted("nuvemshop.order_fulfilled")
    assert fulfilled["tracking"]["number"] == "BR1"
    (created,) = inbound.emitted("nuvemshop.order_created")
    assert created["total_cents"] == 5800
    assert created["contact_id"] == str(inbound.rows("SELECT id FROM contacts")[0]["id"])


async def test_resource_that_moved_on_has_the_last_word(inbound, shop, api):
    """The paid webhook is handled after the order was voided: no purchase."""
    api.put("orders", order(payment_status="voided", status="cancelled"))
    await inbound.thin(shop, "order/paid")
    await inbound.work()
    assert inbound.facts() == []
    assert inbound.outcomes() == [("processed", "order_no_longer_paid")]
    assert inbound.rows("SELECT status FROM orders") == [{"status": "cancelled"}]


async def test_what_is_gone_is_finished_with(inbound, shop, api):
    await inbound.thin(shop, "order/updated")
    await inbound.work()
    assert inbound.outcomes() == [("ignored", "gone_at_the_source")]
    assert api.calls == [("orders/871254203", 404)]


async def test_updates_that_came_before_the_fetch_are_collapsed(inbound, shop, api):
    api.put("orders", order())
    for _ in range(3):
        await inbound.thin(shop, "order/updated")
    await inbound.work()
    assert len(api.calls) == 1
    assert inbound.outcomes() == [
        ("processed", "order_updated"),
        ("ignored", "fetched_since_it_came"),
        ("ignored", "fetched_since_it_came"),
    ]
    await inbound.thin(shop, "order/updated")
    await inbound.work()
    assert len(api.calls) == 2


async def test_paid_is_never_collapsed(inbound, shop, api):
    api.put("orders", paid())
    await inbound.thin(shop, "order/paid")
    await inbound.thin(shop, "order/updated")
    await inbound.thin(shop, "order/fulfilled")
    await inbound.work()
    assert [reason for _, reason in inbound.outcomes()] == [
        "order_paid",
        "fetched_since_it_came",
        "order_no_longer_fulfilled",
    ]


@pytest.mark.parametrize(
    ("orders", "error"),
    [
        ([{"do": "status", "status": 500}], ApiError),
        ([{"do": "status", "status": 302}], ApiError),
        # the HTTP client asks a second time by itself when a connection ends without an answer
        ([{"do": "cut"}, {"do": "cut"}], ApiError),
        ([{"do": "garbage"}], ApiError),
        ([{"do": "status", "status": 429}], RetryAfter),
    ],
)
async def test_sender_that_fails_is_an_attempt_and_the_next_one_works(inbound, shop, api, orders, error):
    api.put("orders", paid())
    api.orders.extend(orders)
    await inbound.thin(shop, "order/paid")
    (event,) = inbound.pending()
    with pytest.raises(error):
        await inbound.handle(event)
    assert inbound.outcomes() == [("received", "sender_not_reached")]
    await inbound.handle(event, attempt=2)
    assert inbound.facts() == ["order_paid:871254203"]
    assert inbound.outcomes() == [("processed", "order_paid")]


async def test_rate_limit_says_how_long_to_wait(inbound, shop, api):
    api.put("orders", paid())
    await inbound.thin(shop, "order/paid")
    (event,) = inbound.pending()
    api._level[STORE] = 40.0
    with pytest.raises(RetryAfter) as refused:
        await inbound.handle(event)
    assert 1 <= refused.value.seconds <= 30


async def test_token_that_is_not_taken_is_shown_as_such(inbound, shop, api):
    api.tokens.clear()
    await inbound.thin(shop, "order/paid")
    (event,) = inbound.pending()
    with pytest.raises(NotAllowed):
        await inbound.handle(event)
    assert inbound.outcomes() == [("received", "sender_refuses")]


async def test_channel_without_a_token_is_a_dead_letter_that_says_what_to_do(inbound, database):
    connection = inbound.channel("nuvemshop", database.organization(), external_id=STORE)
    await inbound.thin(connection, "order/paid")
    (event,) = inbound.pending()
    with pytest.raises(Reject, match="api_token"):
        await inbound.handle(event)


@pytest.mark.parametrize("identifier", ["../../2/orders/1", "1?x=1", None, {"a": 1}, True, ""])
async def test_id_that_is_no_number_leads_nowhere(inbound, shop, api, identifier):
    await inbound.thin(shop, "order/paid", identifier)
    (event,) = inbound.pending()
    if isinstance(identifier, str) and identifier:
        with pytest.raises(ApiError):
            await inbound.handle(event)
    else:
        await inbound.handle(event)
        assert inbound.outcomes() == [("unrecognised", "unknown_shape:id")]
    assert api.calls == []


async def test_customer_is_asked_for_and_known_by_tax_number_too(inbound, shop, api):
    api.put("customers", {"id": 101, "name": "Ana", "email": "ana@example.com", "identification": "287.762.556-70"})
    await inbound.thin(shop, "customer/created", 101)
    await inbound.work()
    assert inbound.facts() == ["customer_created:101"]
    kinds = {(row["kind"], row["source"]) for row in inbound.rows("SELECT kind, source FROM contact_identities")}
    assert kinds == {("external", "nuvemshop"), ("email", ""), ("external", "cpf_cnpj")}


async def test_only_thin_webhooks_are_its_targets(inbound, shop, database):
    from consumers.workers.webhook_normalize import WebhookNormalizeWorker

    await inbound.thin(shop, "order/paid")
    await inbound.thin(shop, "product/updated")
    await inbound.shopify(inbound.channel("shopify", database.organization()), "orders/paid", {})
    taken = {}
    for event in inbound.pending():
        async with inbound.transaction(event) as ctx:
            fetch = await inbound.worker.targets(event, ctx.connection)
            normalize = await WebhookNormalizeWorker().targets(event, ctx.connection)
        # each is for exactly one of the two
        assert sorted([*fetch, *normalize]) == [""]
        taken[event.payload["topic"]] = "fetch" if fetch else "normalize"
    assert taken == {"order/paid": "fetch", "product/updated": "normalize", "orders/paid": "normalize"}


async def test_older_answer_does_not_overwrite_a_newer_state(inbound, shop, api):
    api.put("orders", paid())
    await inbound.thin(shop, "order/paid")
    await inbound.work()
    api.put("orders", order(updated_at="2026-11-20T09:00:00-0300"))
    await inbound.thin(shop, "order/updated", received_at=datetime.now(UTC) + timedelta(minutes=1))
    await inbound.work()
    assert inbound.rows("SELECT financial_status FROM orders") == [{"financial_status": "paid"}]
