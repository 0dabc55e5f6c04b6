"""Every sample of the chat senders, posted as it lies there: rows and contact events, posted again, and in any order.

The people of the samples are contacts already: a status about a message that is not known counts for whoever is.
"""

import random
import re
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from afluente import postgres
from afluente.clock import SystemClock
from consumers.runtime.context import HandlerContext
from tests.consumers.workers.normalizing import Inbound
from tests.producers.ingest.normalize.test_samples import SAMPLES

SENDERS = {"whatsapp_cloud": "whatsapp", "waha": "waha", "evolution": "evolution"}
PEOPLE = ["5511900010001", "5521900020002", "5562980030003", "5551990040004", "14155550105"]
_ID = re.compile(r":?[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


class OneConnection(Inbound):
    """For many deliveries: a transaction for each, on the same connection."""

    async def work(self):
        async with await postgres.connect_async(self.database.url) as self.conn:
            await super().work()

    @asynccontextmanager
    async def transaction(self, event):
        async with self.conn.transaction(), postgres.act_for(self.conn, event.organization_id):
            deliveries = SimpleNamespace(worker=self.worker.name)
            yield HandlerContext(self.conn, SystemClock(), deliveries, event)


class Posted:
    """The connections of one organization that the samples name."""

    def __init__(self, database):
        self.inbound = OneConnection(database)
        self.organization = database.organization()
        names = {"waha": ["loja-exemplo"], "evolution": ["loja-exemplo"],
                 "whatsapp": ["106540352242001", "106540352242002"]}  # fmt: skip
        self._channels = {
            source: [self.inbound.channel(source, self.organization, external_id=name, settings=settings)
                     for name, settings in zip(given, ({"account_id": "102290129340001"}, {}), strict=False)]
            for source, given in names.items()
        }  # fmt: skip
        for number in PEOPLE:
            database.execute(
                "SELECT contact_id FROM upsert_contact(%s, %s, NULL, 'import')",
                [self.organization, f'[{{"kind": "phone", "value": "+{number}"}}]'],
            )

    async def post(self, *paths):
        for path in paths:
            source = SENDERS[path.parent.name]
            receipt = await self.inbound.receive(source, self._channels[source][0], path.read_bytes())
            assert receipt.outcome in ("stored", "duplicate"), path
        await self.inbound.work()

    def state(self):
        """Everything that the deliveries left, without ids of ours and without the times of arrival."""
        rows = self.inbound.rows
        return {
            "messages": rows(
                "SELECT m.waha_message_id, m.direction, m.status, m.message_type, m.body, m.occurred_at, c.phone_e164"
                " FROM messages m JOIN contacts c ON c.id = m.contact_id ORDER BY 1"
            ),
            "message_events": rows("SELECT source, external_id, kind, details FROM message_events ORDER BY 1, 2"),
            "contact_events": rows(
                "SELECT e.external_event_id, e.metric_name, e.event_type, e.source, e.source_type, c.phone_e164,"
                " CASE WHEN e.event_type IS NULL THEN e.object_id_ref END AS object"
                " FROM contact_events e JOIN contacts c ON c.id = e.contact_id"
                " WHERE e.external_event_id !~ '^(contact_created|conversation_opened):' ORDER BY 1, 4"
            ),
            "conversations": rows("SELECT count(*), sum(message_count) AS messages FROM conversations"),
            "contacts": rows("SELECT phone_e164, name, subscriber_state FROM contacts ORDER BY 1"),
            "identities": rows("SELECT kind, source, value FROM contact_identities ORDER BY 1, 2, 3"),
            "sessions": rows("SELECT session, status, status_at FROM whatsapp_sessions ORDER BY 1, 3"),
        }

    def plain(self):
        """The same with ids of connections and persons taken out of names."""
        return _without_ids(self.state())


def _without_ids(value):
    if isinstance(value, str):
        return _ID.sub("", value)
    if isinstance(value, dict):
        return {name: _without_ids(inner) for name, inner in value.items()}
    return [_without_ids(inner) for inner in value] if isinstance(value, list) else value


def samples():
    return sorted(path for sender in SENDERS for path in (SAMPLES / sender).glob("*.json"))


# A machine that has only the repository has no samples: then there is nothing to run.
@pytest.mark.parametrize("seed", [7, pytest.param(8, marks=pytest.mark.faults_long)] if samples() else [])
async def test_samples_leave_their_rows_and_again_nothing_and_in_another_order_the_same(database, seed):
    posted = Posted(database)
    await posted.post(*samples())
    state, plain, emitted = posted.state(), posted.plain(), posted.inbound.emitted()
    assert {status for status, _ in posted.inbound.outcomes()} == {"processed", "ignored"}

    messages = {row["waha_message_id"]: row for row in plain["messages"]}
    assert len(messages) == 32
    text = messages["false_5511900010001@c.us_60C5590F72EEF292F9545AFC28BF63CA"]
    # the number changed later
    assert (text["direction"], text["phone_e164"]) == ("in", "+5511900010099")
    assert text["body"] == "Oi, quero saber mais sobre o plano enterprise"
    assert messages["true_FD122CABEE892743C94CD6"]["direction"] == "out"

    counted = {(row["metric_name"], row["external_event_id"], row["phone_e164"]) for row in plain["contact_events"]}
    ana, bruno, carla = "+5511900010099", "+5521900020002", "+5562980030003"
    assert counted >= {
        ("Message Received", "received:false_5562980030003@c.us_ACF74C317ABADED4BE7EDC7E41BE13EE", carla),
        ("Message Sent", "sent:true_8B6F47BB922A2C64D3E41E", ana),
        ("Message Delivered", "delivered:true_3EB0E62EC94C6C01256AE4", ana),
        ("Message Read", "read:true_762036E1EF0CEA7232ACD90A28BDE917", ana),
        ("Message Failed", "failed:wamid.HBgNNTUyMTkwMDAyMDAwMhUCABEYFDdBNTBEMjhBOTI5REJDRkQzMTNEAA==", bruno),
        ("Contact Updated", "number_changed:+5511900010099:20250730T045515", ana),
    }
    changes = [(row["kind"], row["details"]) for row in plain["message_events"] if row["source"] == "waha"]
    assert ("edited", {"type": "text", "body": "Oi, quero o plano pro"}) in changes
    assert ("reaction", {"emoji": "🙏"}) in changes
    assert [row["status"] for row in plain["sessions"]] == ["FAILED", "FAILED"]
    assert "76201000000001" in [row["value"] for row in plain["identities"]]
    assert not any(row["value"].startswith(("+762", "+1203")) for row in plain["identities"])
    assert len(plain["contacts"]) == len(PEOPLE)

    await posted.post(*samples())
    assert posted.state() == state
    assert posted.inbound.emitted() == emitted

    database.execute(
        "TRUNCATE webhook_events, contact_events, message_events, messages, conversations, contacts,"
        " contact_identities, whatsapp_sessions, channels, channel_secrets, alerts, organizations CASCADE"
    )
    again = Posted(database)
    shuffled = samples()
    random.Random(seed).shuffle(shuffled)
    await again.post(*shuffled)
    assert again.plain() == plain
