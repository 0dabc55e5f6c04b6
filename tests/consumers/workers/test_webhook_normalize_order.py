"""What comes in any order, or at the same moment, ends in the same rows."""

import asyncio
import itertools

import pytest

from afluente import postgres
from consumers import Delivery
from tests.consumers.workers import test_webhook_normalize_gateways as gateways
from tests.consumers.workers.normalizing import Inbound
from tests.consumers.workers.test_webhook_normalize_whatsapp import ANA, NUMBER, play, post, status, text

WAITING = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


@pytest.fixture
def inbound(database):
    return Inbound(database)


@pytest.fixture
def organization(database):
    return database.organization()


@pytest.fixture
def channel(inbound, organization):
    return inbound.channel("whatsapp", organization, external_id=NUMBER)


def preference(sender, value, at):
    said = {"wa_id": sender, "category": "marketing_messages", "value": value, "timestamp": str(at)}
    value = {"metadata": {"phone_number_id": NUMBER}, "contacts": [{"wa_id": sender}], "user_preferences": [said]}
    return {"entry": [{"id": "waba-1", "changes": [{"field": "user_preferences", "value": value}]}]}


async def test_newest_word_of_a_person_counts_in_every_order(inbound, channel):
    """STOP, then messages wanted again, then STOP again: a state that stays the same still is the newest word."""

    def words(sender):
        return [
            post([text(f"{sender}-1", "STOP", sender, 1_700_000_010)]),
            preference(sender, "resume", 1_700_000_030),
            post([text(f"{sender}-2", "SAIR", sender, 1_700_000_040)]),
            # at the same moment: the stricter one
            preference(sender, "resume", 1_700_000_040),
        ]

    for number, order in enumerate(itertools.permutations(range(4))):
        if number % 4 == 1:
            for place in order:
                await inbound.receive("whatsapp", channel, words(f"55119000100{number:02}")[place])
    await inbound.work()
    rows = inbound.rows(
        "SELECT DISTINCT subscriber_state, extract(epoch FROM subscriber_state_at)::int AS at FROM contacts"
    )
    assert rows == [{"subscriber_state": "blocked", "at": 1_700_000_040}]


def echo(wamid, to=ANA, at=1_700_000_050, number=NUMBER):
    said = {"from": "15550001", "to": to, "id": wamid, "timestamp": str(at), "type": "text", "text": {"body": "olá"}}
    value = {"metadata": {"phone_number_id": number}, "message_echoes": [said]}
    return {"entry": [{"id": "waba-1", "changes": [{"field": "smb_message_echoes", "value": value}]}]}


async def test_answer_finds_its_message_whichever_came_first(inbound, channel, organization):
    await play(
        inbound,
        channel,
        post([text("late", "sim", context={"id": "ours"}), text("other", "?", context={"id": "never"})]),
        echo("ours"),
        post([text("in-order", "obrigada", context={"id": "ours"}), text("again", ":)", context={"id": "late"})]),
    )
    answers = inbound.rows(
        "SELECT m.waha_message_id AS name, a.waha_message_id AS answered, w.name AS awaits FROM messages m"
        " LEFT JOIN messages a ON a.id = m.reply_to LEFT JOIN awaited_messages w ON w.answer_id = m.id"
        " WHERE m.direction = 'in' ORDER BY 1"
    )
    assert [tuple(row.values()) for row in answers] == [
        ("again", "late", None),
        ("in-order", "ours", None),
        ("late", "ours", None),
        ("other", None, "never"),
    ]
    # another organization's message of that name is not what is meant
    other = inbound.channel("whatsapp", inbound.database.organization(), external_id="2")
    await play(inbound, other, echo("never", number="2"))
    assert len(inbound.rows("SELECT FROM awaited_messages")) == 1


async def race(inbound):
    """Two deliveries at once: the second is handled while the first is not committed."""
    one, two = inbound.pending()
    async with inbound.transaction(one) as ctx:
        await inbound.worker.handle(Delivery(inbound.worker.name, one, "", 1, 0), ctx)
        racing = asyncio.create_task(inbound.handle(two))
        while not racing.done() and not inbound.database.execute(WAITING):
            await asyncio.sleep(0)
    await racing


@pytest.mark.parametrize("first", ["status", "message"])
async def test_status_at_the_same_moment_as_its_message_counts(inbound, channel, first):
    """Two workers at once, neither sees what the other has not committed."""
    posts = {"message": echo("ours"), "status": post(statuses=[status("ours", "delivered")])}
    for which in (first, *(posts.keys() - {first})):
        await inbound.receive("whatsapp", channel, posts[which])
    await race(inbound)
    assert inbound.rows("SELECT status FROM messages") == [{"status": "delivered"}]
    assert inbound.emitted() == ["contact.created", "conversation.opened", "message.sent", "message.delivered"]
    assert "delivered:ours" in inbound.facts()


@pytest.fixture
def shop(inbound, organization):
    return inbound.channel("shopify", organization, external_id="loja.myshopify.com")


async def shopify(inbound, shop, topic, body):
    await inbound.shopify(shop, topic, body, **{"X-Shopify-Shop-Domain": "loja.myshopify.com"})
    await inbound.work()


async def test_states_of_one_moment_end_in_the_furthest(inbound, shop):
    """A shop's clock has whole seconds: placed and paid within one are told apart by nothing else."""
    at = "2026-11-14T20:00:00-03:00"
    placed = {
        "currency": "BRL", "total_price": "10.00", "created_at": at, "updated_at": at, "financial_status": "pending",
        "line_items": [{"id": 1, "title": "Caneca", "quantity": 1, "price": "10.00"}],
    }  # fmt: skip
    paid = placed | {"financial_status": "paid"}
    shipped = paid | {"fulfillment_status": "fulfilled"}
    for order_id, states in enumerate(itertools.permutations((placed, paid, shipped)), start=1):
        for state in states:
            await inbound.shopify(
                shop, "orders/updated", state | {"id": order_id}, **{"X-Shopify-Shop-Domain": "loja.myshopify.com"}
            )
    await inbound.work()
    assert inbound.rows("SELECT count(*), financial_status, fulfillment_status FROM orders GROUP BY 2, 3") == [
        {"count": 6, "financial_status": "paid", "fulfillment_status": "fulfilled"}
    ]


async def test_request_that_comes_again_after_a_merge_is_the_same_request(inbound, shop, channel, organization):
    request = {
        "shop_id": 1, "shop_domain": "loja.myshopify.com", "orders_requested": [],
        "customer": {"id": 7, "email": "ana@x.com", "phone": None}, "data_request": {"id": 9},
    }  # fmt: skip
    await shopify(inbound, shop, "customers/create", {"id": 7, "email": "ana@x.com", "first_name": "Ana"})
    await play(inbound, channel, post([text("w1")]))
    await shopify(inbound, shop, "customers/data_request", request)
    with postgres.connect(inbound.database.url) as conn, postgres.act_for_sync(conn, organization):
        conn.execute(
            "SELECT merge_contacts(max(id::text) FILTER (WHERE email IS NOT NULL)::uuid,"
            " max(id::text) FILTER (WHERE email IS NULL)::uuid, 'ana', 'one person') FROM contacts"
        )
    await shopify(inbound, shop, "customers/data_request", request)
    assert inbound.emitted().count("lgpd.data_request_received") == 1


def moved(wamid, old, new, at):
    said = {"from": old, "id": wamid, "timestamp": str(at), "type": "system"}
    system = {"type": "user_changed_number", "wa_id": new, "body": "changed"}
    return post([said | {"system": system}])


async def test_number_that_was_left_does_not_come_back(inbound, channel):
    """The change before the last one, told again."""
    first, second, third = ANA, "5511900010002", "5511900010003"
    await play(inbound, channel, post([text("w1")]), moved("c1", first, second, 1_700_000_100))
    await play(inbound, channel, moved("c2", second, third, 1_700_000_200))
    await play(inbound, channel, moved("c1-again", first, second, 1_700_000_100))
    assert inbound.rows("SELECT phone_e164 FROM contacts") == [{"phone_e164": f"+{third}"}]
    # and back to the first: a change of its own
    await play(inbound, channel, moved("c3", third, first, 1_700_000_300))
    assert inbound.rows("SELECT phone_e164 FROM contacts") == [{"phone_e164": f"+{first}"}]
    assert [fact.split(":")[1] for fact in inbound.facts() if fact.startswith("number_changed:")] == [
        f"+{second}", f"+{third}", f"+{first}",
    ]  # fmt: skip


async def test_message_told_at_once_by_the_number_and_by_the_hidden_one_is_one(inbound, organization):
    gateway = inbound.channel("waha", organization, external_id="loja")
    hidden = "76201000000001@lid"
    both = {"_data": {"key": {"remoteJid": hidden, "remoteJidAlt": f"{ANA}@s.whatsapp.net"}}}
    await inbound.receive("waha", gateway, gateways.waha("message", **gateways.text("first", chat=hidden, **both)))
    await inbound.work()
    assert len(inbound.rows("SELECT FROM contact_identities")) == 2
    for chat in (hidden, f"{ANA}@c.us"):
        await inbound.receive("waha", gateway, gateways.waha("message", **gateways.text("twice", chat=chat)))
    await race(inbound)
    assert len(inbound.rows("SELECT FROM messages")) == 2
    assert inbound.emitted().count("message.received") == 2
