"""What comes in any order, or at the same moment, ends in the same rows."""

import asyncio
import itertools

import pytest

from consumers import Delivery
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
        "SELECT m.waha_message_id AS name, a.waha_message_id AS answered, m.reply_to_names AS awaits FROM messages m"
        " LEFT JOIN messages a ON a.id = m.reply_to WHERE m.direction = 'in' ORDER BY 1"
    )
    assert [tuple(row.values()) for row in answers] == [
        ("again", "late", None),
        ("in-order", "ours", None),
        ("late", "ours", None),
        ("other", None, ["never"]),
    ]
    # another organization's message of that name is not what is meant
    other = inbound.channel("whatsapp", inbound.database.organization(), external_id="2")
    await play(inbound, other, echo("never", number="2"))
    assert inbound.rows("SELECT FROM messages WHERE reply_to_names IS NOT NULL") == [{}]


@pytest.mark.parametrize("first", ["status", "message"])
async def test_status_at_the_same_moment_as_its_message_counts(inbound, channel, first):
    """Two workers at once, neither sees what the other has not committed."""
    posts = {"message": echo("ours"), "status": post(statuses=[status("ours", "delivered")])}
    for which in (first, *(posts.keys() - {first})):
        await inbound.receive("whatsapp", channel, posts[which])
    one, two = inbound.pending()
    async with inbound.transaction(one) as ctx:
        await inbound.worker.handle(Delivery(inbound.worker.name, one, "", 1, 0), ctx)
        racing = asyncio.create_task(inbound.handle(two))
        while not racing.done() and not inbound.database.execute(WAITING):
            await asyncio.sleep(0)
    await racing
    assert inbound.rows("SELECT status FROM messages") == [{"status": "delivered"}]
    assert inbound.emitted() == ["contact.created", "conversation.opened", "message.sent", "message.delivered"]
    assert "delivered:ours" in inbound.facts()
