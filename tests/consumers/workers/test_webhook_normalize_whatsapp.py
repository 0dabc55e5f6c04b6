"""WhatsApp Cloud API deliveries as conversations, messages and events, on a real Postgres."""

import asyncio

import pytest

from tests.consumers.workers.normalizing import Inbound

NUMBER = "106540352242001"
ANA, CARLA = "5511900010001", "556280030003"


def text(wamid, body="oi", sender=ANA, at=1_700_000_000, **given):
    return {"from": sender, "id": wamid, "timestamp": str(at), "type": "text", "text": {"body": body}, **given}


def status(wamid, state, at=1_700_000_100, recipient=ANA, **given):
    return {"id": wamid, "status": state, "timestamp": str(at), "recipient_id": recipient, **given}


def post(messages=(), statuses=(), number=NUMBER, contacts=None, **value):
    found = {"metadata": {"phone_number_id": number}, **value}
    if messages:
        found |= {
            "messages": list(messages),
            "contacts": contacts or [{"profile": {"name": "Ana"}, "wa_id": m.get("from")} for m in messages],
        }
    if statuses:
        found["statuses"] = list(statuses)
    return {"entry": [{"id": "waba-1", "changes": [{"field": "messages", "value": found}]}]}


@pytest.fixture
def inbound(database):
    return Inbound(database)


@pytest.fixture
def organization(database):
    return database.organization()


@pytest.fixture
def channel(inbound, organization):
    return inbound.channel("whatsapp", organization, external_id=NUMBER)


async def play(inbound, channel, *posts):
    for body in posts:
        await inbound.receive("whatsapp", channel, body)
    await inbound.work()


def sent_by_us(inbound, organization, channel, wamid="out-1", template=False):
    """A message of ours, as the send worker leaves it."""
    database = inbound.database
    contact = database.execute(
        "SELECT contact_id FROM upsert_contact(%s, %s, 'Ana', 'manual')",
        [organization, '[{"kind": "phone", "value": "+5511900010001"}]'],
    )[0][0]
    conversation = database.execute(
        "INSERT INTO conversations (organization_id, contact_id, channel_id) VALUES (%s, %s, %s) RETURNING id",
        [organization, contact, channel],
    )[0][0]
    template_id = None
    if template:
        template_id = database.execute(
            "INSERT INTO templates (organization_id, name) VALUES (%s, 'promo') RETURNING id", [organization]
        )[0][0]
    return database.execute(
        "INSERT INTO messages (organization_id, conversation_id, contact_id, direction, body, waha_message_id, status,"
        " template_id) VALUES (%s, %s, %s, 'out', 'olá', %s, 'queued', %s) RETURNING id",
        [organization, conversation, contact, wamid, template_id],
    )[0][0]


async def test_message_opens_a_conversation_and_is_received(inbound, channel):
    await play(inbound, channel, post([text("w1")]))
    assert inbound.emitted() == ["contact.created", "conversation.opened", "message.received"]
    (received,) = inbound.emitted("message.received")
    (message,) = inbound.rows("SELECT * FROM messages")
    (conversation,) = inbound.rows("SELECT * FROM conversations")
    assert received == {
        "direction": "in",
        "body": "oi",
        "media_urls": None,
        "waha_message_id": "w1",
        "message_id": str(message["id"]),
        "conversation_id": str(conversation["id"]),
        "contact_id": str(message["contact_id"]),
    }
    assert conversation["message_count"] == 1
    assert inbound.facts() == [f"conversation_opened:{conversation['id']}", "received:w1"]
    opened, got = inbound.contact_events()
    assert (opened["event_type"], opened["metric_name"]) == ("conversation_started", "Conversation Opened")
    assert (opened["source_type"], opened["occurred_at"], opened["received_at"], opened["webhook_event_id"]) == (
        got["source_type"], got["occurred_at"], got["received_at"], got["webhook_event_id"],
    )  # fmt: skip
    assert (got["event_type"], got["metric_name"], got["source_type"]) == (None, "Message Received", "DIRECT")
    assert got["unique_event_id"] == "whatsapp:message:received:w1"
    assert got["occurred_at"].timestamp() == 1_700_000_000


async def test_two_messages_in_one_post_open_one_conversation(inbound, channel):
    await play(inbound, channel, post([text("w1"), text("w2")]))
    assert inbound.emitted() == ["contact.created", "conversation.opened", "message.received", "message.received"]


async def test_messages_of_one_new_person_at_once_make_one_contact_and_one_conversation(inbound, channel):
    for number in range(10):
        await inbound.receive("whatsapp", channel, post([text(f"w{number}")]))
    await asyncio.gather(*(inbound.handle(event) for event in inbound.pending()))
    assert len(inbound.rows("SELECT FROM contacts")) == len(inbound.rows("SELECT FROM conversations")) == 1
    assert inbound.rows("SELECT message_count FROM conversations") == [{"message_count": 10}]
    assert inbound.emitted().count("conversation.opened") == 1


async def test_same_wamid_twice_counts_once_in_one_post_or_two(inbound, channel):
    await play(inbound, channel, post([text("w1"), text("w1")]), post([text("w1"), text("w2")]))
    assert [row["waha_message_id"] for row in inbound.rows("SELECT waha_message_id FROM messages ORDER BY id")] == [
        "w1",
        "w2",
    ]
    assert inbound.emitted().count("message.received") == 2


async def test_person_with_and_without_the_ninth_digit_is_one(inbound, channel):
    await play(inbound, channel, post([text("w1", sender=CARLA)]), post([text("w2", sender="5562980030003")]))
    (contact,) = inbound.rows("SELECT phone_e164 FROM contacts")
    assert contact["phone_e164"] == "+5562980030003"
    # answers go to the form that WhatsApp knows
    assert inbound.rows("SELECT as_received FROM contact_identities") == [{"as_received": CARLA}]


async def test_landline_stays_as_it_is(inbound, channel):
    await play(inbound, channel, post([text("w1", sender="551130000010")]))
    assert inbound.rows("SELECT phone_e164 FROM contacts") == [{"phone_e164": "+551130000010"}]


async def test_person_without_a_number_is_known_by_the_business_scoped_id(inbound, channel):
    message = text("w1", from_user_id="BR.1")
    del message["from"]
    contacts = [{"profile": {"name": "Ana"}, "user_id": "BR.1"}]
    await play(
        inbound,
        channel,
        post([message], contacts=contacts),
        post([text("w2")], contacts=[contacts[0] | {"wa_id": ANA}]),
    )
    (contact,) = inbound.rows("SELECT name, phone_e164 FROM contacts")
    assert contact == {"name": "Ana", "phone_e164": "+5511900010001"}
    assert len(inbound.rows("SELECT FROM messages")) == 2


async def test_statuses_in_any_order_end_in_the_furthest_and_count_once(inbound, channel, organization):
    message_id = sent_by_us(inbound, organization, channel)
    await play(
        inbound,
        channel,
        post(statuses=[status("out-1", "read", 300)]),
        post(statuses=[status("out-1", "delivered", 200), status("out-1", "played", 400)]),
        post(statuses=[status("out-1", "sent", 100)]),
        post(statuses=[status("out-1", "read", 300), status("out-1", "delivered", 200)]),
    )
    assert inbound.rows("SELECT status FROM messages") == [{"status": "read"}]
    assert inbound.emitted() == ["message.read", "message.delivered"]
    assert inbound.emitted("message.read") == [
        {"message_id": str(message_id), "read_at": "1970-01-01T00:05:00+00:00"}
    ] or (inbound.emitted("message.read")[0]["message_id"] == str(message_id))
    assert inbound.facts() == ["read:out-1", "delivered:out-1"]
    assert [row["metric_name"] for row in inbound.contact_events()] == ["Message Read", "Message Delivered"]


async def test_status_sent_emits_only_if_nobody_has(inbound, channel, organization):
    sent_by_us(inbound, organization, channel)
    await play(inbound, channel, post(statuses=[status("out-1", "sent")]))
    (sent,) = inbound.emitted("message.sent")
    assert sent["waha_message_id"] == "out-1"
    assert inbound.rows("SELECT status FROM messages") == [{"status": "sent"}]


async def test_status_of_a_template_counts_as_the_templates(inbound, channel, organization):
    sent_by_us(inbound, organization, channel, template=True)
    await play(inbound, channel, post(statuses=[status("out-1", "delivered"), status("out-1", "read")]))
    assert [row["metric_name"] for row in inbound.contact_events()] == ["Template Delivered", "Template Read"]


@pytest.mark.parametrize(("code", "retryable"), [(131047, False), (130429, True), (131026, False), (131016, True)])
async def test_failed_says_whether_trying_again_can_help(inbound, channel, organization, code, retryable):
    message_id = sent_by_us(inbound, organization, channel)
    errors = [{"code": code, "title": "t", "error_data": {"details": "why"}}]
    await play(inbound, channel, post(statuses=[status("out-1", "failed", errors=errors)]))
    assert inbound.emitted("message.failed") == [
        {"message_id": str(message_id), "error_code": str(code), "error_message": "why", "retryable": retryable}
    ]
    assert ("system.window_24h_expired" in inbound.emitted()) is (code == 131047)


async def test_status_before_its_message_is_held_and_counts_when_it_comes(inbound, channel, organization):
    await play(inbound, channel, post(statuses=[status("out-1", "delivered")]))
    assert inbound.emitted() == []
    sent_by_us(inbound, organization, channel)
    assert inbound.rows("SELECT status FROM messages") == [{"status": "delivered"}]


async def test_reaction_edit_and_revoke_are_kept_with_the_message(inbound, channel):
    await play(
        inbound,
        channel,
        post([text("w1")]),
        post([{"from": ANA, "id": "r1", "timestamp": "1", "type": "reaction", "reaction": {
            "message_id": "w1", "emoji": "👍"}}]),
        post([{"from": ANA, "id": "r2", "timestamp": "2", "type": "reaction", "reaction": {"message_id": "w1"}}]),
        post([{"from": ANA, "id": "e1", "timestamp": "3", "type": "edit", "edit": {
            "original_message_id": "w1", "message": {"type": "text", "text": {"body": "olá"}}}}]),
        post([{"from": ANA, "id": "d1", "timestamp": "4", "type": "revoke", "revoke": {"original_message_id": "w1"}}]),
    )  # fmt: skip
    events = inbound.rows("SELECT kind, details FROM message_events ORDER BY occurred_at, id")
    assert {"kind": "reaction", "details": {"emoji": "👍"}} in events
    assert {"kind": "reaction", "details": {"emoji": None}} in events
    assert {"kind": "edited", "details": {"type": "text", "body": "olá"}} in events
    assert "revoked" in [event["kind"] for event in events]
    assert len(inbound.rows("SELECT FROM messages")) == 1


async def test_echo_of_the_phone_app_is_sent_not_received(inbound, channel):
    echo = {
        "from": "551130000010",
        "to": ANA,
        "id": "x1",
        "timestamp": "1700000000",
        "type": "text",
        "text": {"body": "oi"},
    }
    body = post(message_echoes=[echo])
    body["entry"][0]["changes"][0]["field"] = "smb_message_echoes"
    await play(inbound, channel, body)
    assert inbound.emitted() == ["contact.created", "conversation.opened", "message.sent"]
    assert inbound.facts()[-1] == "sent:x1"


@pytest.mark.parametrize(
    ("word", "keyword"),
    [("SAIR", "SAIR"), (" stop ", "STOP"), ("¡Párar!", "SAIR"), ("baja", "STOP"), ("sair daqui", None)],
)
async def test_word_that_stops_blocks_once(inbound, channel, word, keyword):
    await play(inbound, channel, post([text("w1", word)]), post([text("w2", word, at=1_700_000_900)]))
    (contact,) = inbound.rows("SELECT id, subscriber_state FROM contacts")
    blocked = inbound.emitted("system.contact_blocked_by_stop")
    assert [(one["contact_id"], one["keyword"]) for one in blocked] == [(str(contact["id"]), keyword)] * bool(keyword)
    assert inbound.emitted("contact.blocked") == [{"reason": "stop"}] * bool(keyword)
    assert contact["subscriber_state"] == ("blocked" if keyword else "unknown")


async def test_menu_of_the_bot_does_not_stop_but_a_templates_button_does(inbound, channel):
    reply = {"type": "button_reply", "button_reply": {"id": "1", "title": "Sair"}}
    said = {"from": ANA, "id": "w1", "timestamp": "1700000000"}
    await play(inbound, channel, post([said | {"type": "interactive", "interactive": reply}]))
    assert inbound.emitted("contact.blocked") == []
    await play(
        inbound, channel, post([said | {"id": "w2", "type": "button", "button": {"text": "Parar", "payload": "x"}}])
    )
    assert inbound.emitted("contact.blocked") == [{"reason": "stop"}]


async def test_preferences_are_consent_and_an_older_one_changes_nothing(inbound, channel):
    def preference(value, at):
        body = post(
            user_preferences=[{"wa_id": ANA, "category": "marketing_messages", "value": value, "timestamp": at}]
        )
        body["entry"][0]["changes"][0]["field"] = "user_preferences"
        return body

    await play(inbound, channel, preference("stop", 1_700_000_500), preference("signup", 1_700_000_100))
    (consent,) = inbound.emitted("lgpd.consent_changed")
    assert (consent["granted"], consent["consent_type"]) == (False, "marketing_messages")
    assert inbound.emitted("contact.blocked") == [{"reason": "stop"}]
    assert inbound.rows("SELECT subscriber_state FROM contacts") == [{"subscriber_state": "unsubscribed"}]
    await play(inbound, channel, preference("resume", 1_700_000_900))
    assert [p["granted"] for p in inbound.emitted("lgpd.consent_changed")] == [False, True]


def changed(wamid="s1", old=ANA, new="5511900010099"):
    system = {"type": "user_changed_number", "wa_id": new}
    return {"from": old, "id": wamid, "timestamp": "1700000000", "type": "system", "system": system}


async def test_changed_number_is_the_same_person(inbound, channel):
    await play(
        inbound,
        channel,
        post([text("w1")]),
        post([changed()], contacts=[{}]),
        post([text("w2", sender="5511900010099")]),
    )
    assert inbound.rows("SELECT phone_e164 FROM contacts") == [{"phone_e164": "+5511900010099"}]
    assert len(inbound.rows("SELECT FROM messages")) == 2


async def test_new_number_brings_a_new_id_and_it_is_the_same_person(inbound, channel):
    contacts = [{"profile": {"name": "Ana"}, "wa_id": ANA, "user_id": "BR.1"}]
    moved = changed()
    moved["system"]["user_id"] = "BR.2"
    told = post(user_id_update=[{"user_id": {"previous": "BR.2", "current": "BR.3"}, "timestamp": "1700000100"}])
    told["entry"][0]["changes"][0]["field"] = "user_id_update"
    nobody = {
        "id": "s2",
        "timestamp": "1",
        "type": "system",
        "system": {"type": "user_changed_user_id", "user_id": "BR.3"},
    }
    hidden = text("w2", from_user_id="BR.3")
    del hidden["from"]
    await play(inbound, channel, post([text("w1")], contacts=contacts), post([moved], contacts=[{}]), told)
    await play(inbound, channel, post([nobody], contacts=[{}]), post([hidden], contacts=[{}]))
    assert inbound.rows("SELECT phone_e164 FROM contacts") == [{"phone_e164": "+5511900010099"}]
    assert len(inbound.rows("SELECT FROM messages")) == 2
    assert ("ignored", "user_id_changed") in inbound.outcomes()


async def test_changed_number_of_somebody_else_is_not_a_silent_merge(inbound, channel):
    await play(
        inbound,
        channel,
        post([text("w1")]),
        post([text("w2", sender="5511900010099")]),
        post([changed()], contacts=[{}]),
    )
    assert len(inbound.rows("SELECT FROM contacts")) == 2
    assert [row["kind"] for row in inbound.rows("SELECT kind FROM alerts")] == ["contact_conflict"]


async def test_batch_over_two_organizations_and_an_unknown_number(inbound, channel, database, organization):
    other = database.organization("Outra")
    inbound.channel("whatsapp", other, external_id="222")
    batch = {
        "entry": post([text("a")])["entry"]
        + post([text("b")], number="222")["entry"]
        + post([text("c")], number="9")["entry"]
    }
    await play(inbound, channel, batch)
    found = inbound.rows("SELECT organization_id, waha_message_id FROM messages ORDER BY waha_message_id")
    assert found == [
        {"organization_id": organization, "waha_message_id": "a"},
        {"organization_id": other, "waha_message_id": "b"},
    ]
    assert len(inbound.rows("SELECT FROM contacts")) == 2


async def test_message_of_a_new_type_is_still_a_message(inbound, channel):
    await play(
        inbound, channel, post([{"from": ANA, "id": "w1", "timestamp": "1", "type": "hologram", "hologram": {}}])
    )
    assert inbound.rows("SELECT message_type, body, metadata FROM messages") == [
        {"message_type": "hologram", "body": None, "metadata": {"not_understood": "hologram"}}
    ]


async def test_what_is_not_understood_does_not_stop_the_rest(inbound, channel):
    await play(inbound, channel, post([text("w1"), {"type": "text"}], [status("x", "teleported")], contacts=[{}, {}]))
    assert inbound.outcomes() == [("processed", "message,not_understood:2")]
    await play(inbound, channel, {"entry": [{"changes": [{"field": "messages", "value": 7}]}]})
    assert inbound.outcomes()[-1] == ("unrecognised", "unknown_shape:value")


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({"errors": [{"code": 130429, "title": "Rate limit hit"}]}, ("ignored", "provider_errors:130429")),
        ({"messages": [text("w1", group_id="120363")]}, ("ignored", "group")),
        (
            {"messages": [{"from": ANA, "id": "s1", "timestamp": "1", "type": "system", "system": {
                "type": "customer_identity_changed", "identity": "x"}}]},
            ("ignored", "identity_changed"),
        ),
    ],
)  # fmt: skip
async def test_understood_and_nothing_for_us(inbound, channel, change, outcome):
    await play(inbound, channel, post(**change, contacts=[{}]))
    assert inbound.outcomes() == [outcome]
    assert inbound.rows("SELECT FROM contacts") == []


async def test_history_of_a_phone_is_no_new_message(inbound, channel):
    for field in ("history", "smb_app_state_sync"):
        body = post([text("w1")])
        body["entry"][0]["changes"][0]["field"] = field
        await play(inbound, channel, body)
    assert inbound.outcomes() == [("ignored", "history"), ("ignored", "address_book")]
    assert inbound.emitted() == []


async def test_errors_beside_an_unsupported_message_are_kept_with_it(inbound, channel):
    message = {"from": ANA, "id": "w1", "timestamp": "1", "type": "unsupported"}
    await play(inbound, channel, post([message], errors=[{"code": 131051, "title": "unsupported"}]))
    (stored,) = inbound.rows("SELECT metadata FROM messages")
    assert stored["metadata"]["errors"][0]["code"] == 131051


async def test_message_taken_back_on_the_phone_is_no_message(inbound, channel):
    echo = {"from": "551130000010", "to": ANA, "timestamp": "1700000000"}
    sent = echo | {"id": "x1", "type": "text", "text": {"body": "oi"}}
    body = post(message_echoes=[sent, echo | {"id": "x2", "type": "revoke", "revoke": {"original_message_id": "x1"}}])
    body["entry"][0]["changes"][0]["field"] = "smb_message_echoes"
    await play(inbound, channel, body)
    assert inbound.rows("SELECT waha_message_id FROM messages") == [{"waha_message_id": "x1"}]
    assert inbound.rows("SELECT kind, waha_message_id FROM message_events") == [
        {"kind": "revoked", "waha_message_id": "x1"}
    ]


async def test_time_far_ahead_or_absurd_is_when_it_came(inbound, channel):
    await play(inbound, channel, post([text("w1", at=99_999_999_999), text("w2", at="x"), text("w3", at=5)]))
    (received,) = inbound.rows("SELECT received_at FROM webhook_events WHERE parent_id IS NOT NULL")
    times = {row["occurred_at"] for row in inbound.rows("SELECT occurred_at FROM messages")}
    assert times == {received["received_at"]}
