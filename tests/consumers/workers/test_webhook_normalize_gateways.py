"""WAHA and Evolution deliveries as conversations, messages and events, on a real Postgres."""

import itertools
import random
from datetime import UTC, datetime

import pytest

from producers.ingest.normalize import jids
from tests.consumers.workers.normalizing import Inbound
from tests.consumers.workers.test_webhook_normalize_whatsapp import sent_by_us

ANA = "5511900010001@s.whatsapp.net"
LID = "76201000000001@lid"
AT = 1_746_132_673


def upsert(message_id, text="oi", *, own=False, jid=ANA, message=None, event="messages.upsert", **key):
    data = {
        "key": {"remoteJid": jid, "fromMe": own, "id": message_id, **key},
        "message": message or {"conversation": text},
        "pushName": "Loja" if own else "Ana",
        "messageTimestamp": AT,
    }
    return {"event": event, "instance": "loja", "data": data, "sender": "551130000010@s.whatsapp.net"}


def update(message_id, status, jid=ANA):
    data = {"keyId": message_id, "remoteJid": jid, "fromMe": True, "status": status}
    return {"event": "messages.update", "instance": "loja", "data": data}


_numbers = itertools.count(1)


def waha(event, at=1_741_249_702_485, **payload):
    """One event of WAHA's, with an id of its own."""
    name = f"evt_{next(_numbers)}"
    return {"id": name, "timestamp": at, "event": event, "session": "loja", "payload": payload}


def text(message_id="AB12", body="oi", chat="5511900010001@c.us", **payload):
    own = payload.pop("own", False)
    told = {"id": f"{str(own).lower()}_{chat}_{message_id}", "timestamp": AT, "fromMe": own, "body": body, **payload}
    return told | ({"to": chat} if own else {"from": chat})


@pytest.fixture
def inbound(database):
    return Inbound(database)


@pytest.fixture
def organization(database):
    return database.organization()


@pytest.fixture
def evolution(inbound, organization):
    return inbound.channel("evolution", organization, external_id="loja")


@pytest.fixture
def gateway(inbound, organization):
    return inbound.channel("waha", organization, external_id="loja")


async def play(inbound, channel, *posts, source=None):
    for body in posts:
        await inbound.receive(source or ("waha" if "session" in body else "evolution"), channel, body)
    await inbound.work()


def ledger(inbound):
    """Names, direction and status of all messages, the connection's id left out."""
    rows = inbound.rows("SELECT waha_message_id, direction, status FROM messages ORDER BY waha_message_id")
    return [(row["waha_message_id"].rpartition(":")[0], row["direction"], row["status"]) for row in rows]


async def test_message_of_a_linked_phone(inbound, evolution):
    await play(inbound, evolution, upsert("AB12"))
    assert inbound.emitted() == ["contact.created", "conversation.opened", "message.received"]
    (message,) = inbound.rows("SELECT * FROM messages")
    name = f"false_5511900010001@c.us_AB12:{evolution}"
    assert (message["waha_message_id"], message["body"]) == (name, "oi")
    assert message["metadata"] == {"chat": ANA, "provider_id": "AB12"}
    assert message["occurred_at"] == datetime(2025, 5, 1, 20, 51, 13, tzinfo=UTC)
    (contact,) = inbound.rows("SELECT name, phone_e164, source FROM contacts")
    assert contact == {"name": "Ana", "phone_e164": "+5511900010001", "source": "evolution"}
    assert inbound.facts()[-1] == f"received:{name}"
    assert inbound.contact_events()[-1]["source_type"] == "DIRECT"


async def test_message_and_message_any_count_once(inbound, gateway):
    await play(inbound, gateway, waha("message", **text()), waha("message.any", **text()))
    assert inbound.emitted().count("message.received") == 1
    assert [fact.partition(":")[0] for fact in inbound.facts()] == ["conversation_opened", "received"]


async def test_message_told_again_under_another_address_counts_once(inbound, evolution):
    await play(
        inbound,
        evolution,
        upsert("AB12", jid=LID, remoteJidAlt="556280030003@s.whatsapp.net"),
        upsert("AB12", jid="5562980030003:4@s.whatsapp.net"),
        upsert("AB12", jid=LID),
    )
    assert ledger(inbound) == [("false_5562980030003@c.us_AB12", "in", "received")]
    assert len(inbound.rows("SELECT FROM contacts")) == 1


async def test_ids_are_unique_only_inside_a_chat_and_a_device(inbound, evolution, organization):
    other = inbound.channel("evolution", organization, external_id="filial")
    await play(inbound, evolution, upsert("AB12"), upsert("AB12", jid="5521900020002@s.whatsapp.net"))
    await play(inbound, other, upsert("AB12") | {"instance": "filial"})
    assert inbound.emitted().count("message.received") == 3


async def test_hidden_number_is_a_contact_without_a_phone(inbound, evolution):
    await play(inbound, evolution, upsert("A", jid=LID))
    assert inbound.rows("SELECT phone_e164 FROM contacts") == [{"phone_e164": None}]
    await play(inbound, evolution, upsert("B", jid=LID, senderPn="556280030003@s.whatsapp.net"))
    assert inbound.rows("SELECT phone_e164 FROM contacts") == [{"phone_e164": "+5562980030003"}]
    phone = inbound.rows("SELECT as_received FROM contact_identities WHERE kind = 'phone'")
    assert phone == [{"as_received": "556280030003"}]


async def test_hidden_number_of_somebody_known_by_phone_is_merged_when_whatsapp_says_so(inbound, evolution):
    carla = "556280030003@s.whatsapp.net"
    await play(inbound, evolution, upsert("A", jid=carla), upsert("B", jid=LID))
    assert len(inbound.rows("SELECT FROM contacts")) == 2
    await play(
        inbound, evolution, upsert("C", jid=LID, remoteJidAlt=carla), upsert("D", jid=LID), upsert("B", jid=carla)
    )
    (stays,) = inbound.rows("SELECT id, phone_e164 FROM contacts WHERE merged_into IS NULL")
    assert stays["phone_e164"] == "+5562980030003"
    (merged,) = inbound.emitted("contact.merged")
    assert merged["into_contact_id"] == str(stays["id"])
    assert inbound.rows("SELECT contact_id, count(*) AS n FROM messages GROUP BY 1") == [
        {"contact_id": stays["id"], "n": 4}
    ]
    assert inbound.rows("SELECT FROM alerts") == []
    (entry,) = inbound.rows("SELECT actor_kind, actor_id FROM audit_logs WHERE action = 'contact.merged'")
    assert entry == {"actor_kind": "worker", "actor_id": "webhook-normalize-worker"}


async def test_hidden_number_of_somebody_known_by_more_is_a_question(inbound, evolution):
    await play(inbound, evolution, upsert("A", jid="556280030003@s.whatsapp.net"))
    await play(inbound, evolution, upsert("B", jid=LID, senderPn="5521900020002@s.whatsapp.net"))
    await play(inbound, evolution, upsert("C", jid=LID, senderPn="556280030003@s.whatsapp.net"))
    assert inbound.emitted("contact.merged") == []
    assert [row["kind"] for row in inbound.rows("SELECT kind FROM alerts")] == ["contact_conflict"]


async def test_groups_and_broadcasts_leave_no_row(inbound, evolution):
    for jid in ("1203@g.us", "status@broadcast", "12@newsletter"):
        await play(inbound, evolution, upsert("A", jid=jid, participant=ANA))
    assert {status for status, _ in inbound.outcomes()} == {"ignored"}
    assert inbound.emitted() == inbound.rows("SELECT FROM contacts") == []


async def test_what_was_typed_on_the_phone_is_sent_and_not_received(inbound, evolution, gateway):
    await play(inbound, evolution, upsert("AB12", "até logo", own=True))
    await play(inbound, gateway, waha("message.any", **text("CD34", own=True, source="app")))
    assert inbound.emitted().count("message.sent") == 2
    assert "message.received" not in inbound.emitted()
    assert ledger(inbound) == [("true_AB12", "out", "sent"), ("true_CD34", "out", "sent")]
    assert inbound.rows("SELECT DISTINCT name FROM contacts") == [{"name": None}]


def named_by_the_sender(inbound, organization, message_id, name):
    """What the send worker writes down when the gateway has answered."""
    inbound.database.execute(
        "INSERT INTO message_events (organization_id, message_id, waha_message_id, kind)"
        " VALUES (%s, %s, %s, 'sent') RETURNING id",
        [organization, message_id, name],
    )


async def test_own_send_that_comes_back_is_found_by_its_id(inbound, gateway, organization):
    message_id = sent_by_us(inbound, organization, gateway, wamid=None)
    name = jids.ledger_id(jids.own_name("AB12"), gateway)
    named_by_the_sender(inbound, organization, message_id, name)
    chat = "76201000000001@lid"
    await play(
        inbound,
        gateway,
        waha("message.any", **text(own=True, source="api")),
        waha("message.ack", id=f"true_{chat}_AB12", ack=3, fromMe=True),
    )
    assert inbound.rows("SELECT id, status FROM messages") == [{"id": message_id, "status": "read"}]
    assert inbound.emitted() == ["message.read"]


async def test_echo_waits_while_the_send_is_under_way(inbound, gateway, organization):
    message_id = sent_by_us(inbound, organization, gateway, wamid=None)
    await inbound.receive("waha", gateway, waha("message.any", **text(own=True, source="api")))
    (event,) = inbound.pending()
    with pytest.raises(Exception, match="a message to this contact is being sent"):
        await inbound.handle(event)
    assert len(inbound.rows("SELECT FROM messages")) == 1
    named_by_the_sender(inbound, organization, message_id, jids.ledger_id("true_AB12", gateway))
    await inbound.handle(event, attempt=2)
    assert inbound.rows("SELECT id, status FROM messages") == [{"id": message_id, "status": "sent"}]
    assert inbound.emitted() == []


async def test_echo_that_nobody_claims_is_written_down_at_last(inbound, gateway, organization):
    sent_by_us(inbound, organization, gateway, wamid=None)
    await inbound.receive("waha", gateway, waha("message.any", **text(own=True, source="api")))
    (event,) = inbound.pending()
    await inbound.handle(event, attempt=8)
    assert inbound.emitted() == ["message.sent"]
    # what was typed on the phone waits for nothing
    await play(inbound, gateway, waha("message.any", **text("CD34", own=True, source="app")))
    assert inbound.emitted().count("message.sent") == 2


@pytest.mark.parametrize("seed", range(4))
async def test_acks_in_any_order_and_before_the_send_end_in_the_furthest(inbound, evolution, organization, seed):
    acks = [update("AB12", status) for status in ("SERVER_ACK", "DELIVERY_ACK", "READ", "PLAYED", "PENDING", "READ")]
    random.Random(seed).shuffle(acks)
    await play(inbound, evolution, *acks[:3])
    message_id = sent_by_us(inbound, organization, evolution, wamid=None)
    named_by_the_sender(inbound, organization, message_id, jids.ledger_id("true_AB12", evolution))
    await play(inbound, evolution, *acks[3:])
    assert inbound.rows("SELECT status FROM messages") == [{"status": "read"}]
    kinds = inbound.rows(
        "SELECT kind, count(*) AS n FROM message_events WHERE source = 'evolution' GROUP BY 1 ORDER BY 1"
    )
    assert [(row["kind"], row["n"]) for row in kinds] == [("delivered", 1), ("read", 1), ("sent", 1)]
    assert inbound.emitted().count("message.read") <= 1


async def test_failure_is_kept_and_does_not_take_back_a_reading(inbound, evolution, organization):
    message_id = sent_by_us(inbound, organization, evolution, wamid=jids.ledger_id("true_AB12", evolution))
    await play(inbound, evolution, update("AB12", "READ"), update("AB12", "ERROR"))
    assert inbound.rows("SELECT status FROM messages") == [{"status": "read"}]
    (failed,) = inbound.emitted("message.failed")
    assert (failed["message_id"], failed["error_code"], failed["retryable"]) == (str(message_id), "error", False)
    metrics = [row["metric_name"] for row in inbound.contact_events()]
    assert metrics == ["Message Read", "Message Failed"]


async def test_reaction_edit_and_taking_back_find_their_message(inbound, gateway):
    chat = "5511900010001@c.us"
    await play(
        inbound,
        gateway,
        waha("message", **text("A")),
        waha("message.any", **text("B", own=True, source="app")),
        waha("message.reaction", id=f"false_{chat}_R", timestamp=AT + 0.5, **{"from": chat},
             reaction={"text": "🙏", "messageId": f"true_{chat}_B"}),
        waha("message.edited", id=f"false_{chat}_E", editedMessageId="A", body="olá", **{"from": chat}),
        waha("message.revoked", after={"id": f"false_{chat}_D", "from": chat}, revokedMessageId="A", before=None),
        waha("message", **text("C", replyTo={"id": "B"})),
    )  # fmt: skip
    ids = {name: row["id"] for row in inbound.rows("SELECT id, waha_message_id FROM messages")
           for name in "ABC" if f"_{name}:" in row["waha_message_id"]}  # fmt: skip
    events = inbound.rows("SELECT kind, message_id, details FROM message_events ORDER BY kind")
    assert events == [
        {"kind": "edited", "message_id": ids["A"], "details": {"type": "text", "body": "olá"}},
        {"kind": "reaction", "message_id": ids["B"], "details": {"emoji": "🙏"}},
        {"kind": "revoked", "message_id": ids["A"], "details": {}},
    ]
    replies = inbound.rows("SELECT reply_to FROM messages WHERE id = %s", ids["C"])
    assert replies == [{"reply_to": ids["B"]}]


async def test_word_that_stops_on_either_gateway(inbound, evolution, gateway, organization):
    await play(inbound, evolution, upsert("A", "Parar."), upsert("B", "SAIR"))
    await play(inbound, gateway, waha("message", **text("C", "unsubscribe", chat="5521900020002@c.us")))
    blocked = inbound.emitted("system.contact_blocked_by_stop")
    assert [(one["keyword"], one["word"]) for one in blocked] == [("SAIR", "PARAR"), ("STOP", "UNSUBSCRIBE")]
    assert inbound.emitted("contact.blocked") == [{"reason": "stop"}] * 2
    # what the business itself writes stops nobody
    await play(inbound, evolution, upsert("D", "STOP", own=True, jid="5531900030003@s.whatsapp.net"))
    assert len(inbound.emitted("contact.blocked")) == 2


def session(status, since):
    return waha("session.status", status=status, statuses=[{"status": status, "timestamp": since}])


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
async def test_newest_status_of_a_session_holds_in_any_order(inbound, gateway, order):
    told = [session("STARTING", 1_000_000_000_000), session("WORKING", 1_000_000_001_000),
            session("FAILED", 1_000_000_002_000)]  # fmt: skip
    await play(inbound, gateway, *(told[place] for place in order))
    assert inbound.rows("SELECT session, status FROM whatsapp_sessions") == [{"session": "loja", "status": "FAILED"}]
    changes = inbound.emitted("system.session_changed")
    assert changes[-1] | {"from_status": None} == {
        "session": "loja", "from_status": None, "to_status": "FAILED", "channel_id": str(gateway)}  # fmt: skip
    assert [one["from_status"] for one in changes] == [None, *(one["to_status"] for one in changes[:-1])]


async def test_session_that_stays_as_it_is_has_not_changed(inbound, gateway, evolution):
    await play(inbound, gateway, session("WORKING", 1_000_000_000_000), session("WORKING", 1_000_000_009_000))
    await play(inbound, gateway, session("FAILED", 1_000_000_005_000))
    assert len(inbound.emitted("system.session_changed")) == 1
    for state in ("open", "open", "close"):
        data = {"state": state, "statusReason": 401}
        await play(inbound, evolution, {"event": "connection.update", "instance": "loja", "data": data})
    states = [one["to_status"] for one in inbound.emitted("system.session_changed")]
    assert states == ["WORKING", "WORKING", "FAILED"]


async def test_address_book_names_who_wrote_and_makes_no_contact(inbound, evolution):
    def named(jid, name):
        return {"event": "CONTACTS_UPSERT", "instance": "loja", "data": [{"remoteJid": jid, "pushName": name}]}

    await play(inbound, evolution, named(ANA, "Ana Prado"))
    assert inbound.rows("SELECT FROM contacts") == []
    message = upsert("A")
    del message["data"]["pushName"]
    await play(inbound, evolution, message, named(ANA, "Ana  Prado "), named(ANA, "Outra"))
    assert inbound.rows("SELECT name FROM contacts") == [{"name": "Ana Prado"}]


async def test_longest_text_there_is(inbound, evolution):
    await play(inbound, evolution, upsert("A", "\N{ROCKET}" * 70_000))
    assert inbound.emitted().count("message.received") == 1


async def test_another_instance_does_not_write_through_this_connection(inbound, evolution):
    await play(inbound, evolution, upsert("A") | {"instance": "outra"})
    assert inbound.outcomes() == inbound.emitted() == []
