"""Shopify checkouts that are left, become orders, or both: no topic says so, a time does."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from consumers.inbound.apply.checkouts import DUE
from tests.consumers.workers.normalizing import Inbound
from tests.consumers.workers.test_webhook_normalize_shopify import PERSON, order
from tests.fixtures.clock import SettableClock

NOW = datetime.now(UTC).replace(microsecond=0)


def checkout(minutes=0, **given):
    """A checkout as it was `minutes` after NOW."""
    at = (NOW + timedelta(minutes=minutes)).isoformat()
    return {
        "token": "chk_1",
        "cart_token": "cart_1",
        "created_at": NOW.isoformat(),
        "updated_at": at,
        "completed_at": None,
        "total_price": "297.90",
        "currency": "BRL",
        "customer": PERSON,
        "email": PERSON["email"],
        "shipping_address": {"name": "Ana Prado"},
        "line_items": [{"product_id": 9007199254740993}, {"product_id": 12}],
        **given,
    }


class Shop(Inbound):
    """A connected shop, and time that passes when told to."""

    def __init__(self, database, **settings):
        super().__init__(database, clock=SettableClock(NOW))
        self.id = self.channel("shopify", database.organization(), settings=settings)

    async def post(self, topic, body):
        await self.shopify(self.id, topic, body)
        await self.work()

    async def at(self, minutes):
        """So many minutes after NOW, with what is due by then released as the relay does."""
        self.clock.set(NOW + timedelta(minutes=minutes))
        self.database.execute("SELECT release_due_deferred(1000, %s)", [self.clock.now()])
        await self.work()

    def timers(self):
        return self.rows("SELECT deliver_at FROM deferred_event WHERE event_type = %s", DUE)


@pytest.fixture
def shop(database):
    return Shop(database)


async def test_checkout_without_an_order_is_left_after_an_hour(shop):
    await shop.post("checkouts/create", checkout())
    await shop.at(59)
    assert shop.facts() == ["checkout_started:chk_1"]
    await shop.at(60)
    assert shop.facts() == ["checkout_started:chk_1", "checkout_abandoned:chk_1"]
    left = shop.contact_events()[-1]
    assert (left["event_type"], left["metric_name"]) == ("purchase_abandoned", "Checkout Abandoned")
    assert (left["value"], left["currency"], left["occurred_at"]) == (Decimal("297.90"), "BRL", NOW)
    assert left["properties"] == {
        "productIds": ["9007199254740993", "12"],
        "cartValue": "297.90",
        "currency": "BRL",
        "stageAbandoned": "shipping",
    }
    assert left["contact_id"] == shop.contact_events()[0]["contact_id"]
    # once, whatever comes of it later
    await shop.post("checkouts/update", checkout(70))
    await shop.at(500)
    assert len(shop.facts()) == 2


async def test_each_change_puts_it_off_and_the_last_state_counts(shop):
    await shop.post("checkouts/create", checkout())
    await shop.post("checkouts/update", checkout(40, total_price="100.00"))
    await shop.post("checkouts/update", checkout(20, total_price="999.00"))  # late
    assert len(shop.timers()) == 1
    await shop.at(60)
    assert shop.facts() == ["checkout_started:chk_1"]
    await shop.at(100)
    assert shop.contact_events()[-1]["value"] == Decimal("100.00")
    # waiting on is no longer chain of causes
    timers = shop.rows("SELECT metadata ->> 'causation_depth' AS depth FROM event_log WHERE event_type = %s", DUE)
    assert [timer["depth"] for timer in timers] == ["1", "1"]


@pytest.mark.parametrize("order_first", [False, True])
async def test_checkout_that_became_an_order_is_not_left(shop, order_first):
    # the second order names another checkout of the same cart
    for number, token in ((1, "chk_1"), (2, "chk_3")):
        mine = checkout(token=f"chk_{number}", cart_token=f"cart_{number}")
        posts = [
            ("checkouts/create", mine),
            ("orders/create", order(number, checkout_token=token, cart_token=f"cart_{number}")),
        ]
        for topic, body in reversed(posts) if order_first else posts:
            await shop.post(topic, body)
    await shop.at(120)
    assert sorted(shop.facts()) == [
        "checkout_started:chk_1",
        "checkout_started:chk_2",
        "order_placed:1",
        "order_placed:2",
    ]


async def test_order_of_a_checkout_that_was_left_recovers_it(shop):
    await shop.post("checkouts/create", checkout())
    await shop.at(60)
    for topic in ("orders/create", "orders/updated"):
        await shop.post(topic, order(checkout_token="chk_1", cart_token="cart_1"))
    recovered = [row for row in shop.contact_events() if row["metric_name"] == "Checkout Recovered"]
    assert [(row["external_event_id"], row["value"]) for row in recovered] == [
        ("checkout_recovered:chk_1", Decimal("297.90"))
    ]


async def test_checkout_of_nobody_is_left_by_whoever_gives_a_name_later(shop):
    nobody = {"customer": None, "email": None}
    await shop.post("checkouts/create", checkout(**nobody))
    await shop.at(60)
    assert shop.facts() == []
    await shop.post("checkouts/update", checkout(61))
    await shop.at(121)
    assert shop.facts() == ["checkout_started:chk_1", "checkout_abandoned:chk_1"]


async def test_completed_checkouts_and_old_ones_set_no_timer(shop):
    await shop.post("checkouts/create", checkout(completed_at=NOW.isoformat()))
    await shop.post("checkouts/create", checkout(-60 * 24 * 8, token="chk_old", cart_token="cart_old"))
    assert shop.timers() == []
    assert shop.emitted(DUE) == []


async def test_connection_says_how_long(database):
    shop = Shop(database, left_after_min=5)
    await shop.post("checkouts/create", checkout())
    await shop.at(5)
    assert shop.facts()[-1] == "checkout_abandoned:chk_1"


async def test_erased_delivery_takes_its_timer_with_it(shop):
    await shop.post("checkouts/create", checkout())
    shop.database.execute("UPDATE contact_events SET webhook_event_id = NULL")
    shop.database.execute("DELETE FROM webhook_events WHERE parent_id IS NOT NULL")
    await shop.at(60)
    assert shop.facts() == ["checkout_started:chk_1"]
