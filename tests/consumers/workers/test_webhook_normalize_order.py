"""What comes in any order, or at the same moment, ends in the same rows."""

import itertools

import pytest

from tests.consumers.workers.normalizing import Inbound
from tests.consumers.workers.test_webhook_normalize_whatsapp import NUMBER, post, text


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
