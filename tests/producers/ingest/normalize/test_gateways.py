"""The words of a linked phone (WAHA, Evolution), without a database: addresses, names of messages, types, words."""

import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.ingest.normalize import baileys, jids, moments, normalize
from producers.ingest.normalize.document import Document
from producers.ingest.normalize.facts import Context
from producers.ingest.normalize.keywords import stop_word
from producers.ingest.sources import evolution, registered, stripping

RECEIVED = datetime(2026, 11, 29, 12, tzinfo=UTC)
ANA, LID = "5511900010001@s.whatsapp.net", "76201000000001@lid"


def read(source, event, **given):
    """The outcome of one event, as the receiver would hand it on."""
    body = json.dumps(event | given).encode()
    (part,) = registered()[source].route(body, {}, None)
    return normalize(source, body, {}, Context(topic=part.topic, received_at=RECEIVED))


def upsert(message, *, own=False, jid=ANA, message_id="AB12", **item):
    key = {"remoteJid": jid, "fromMe": own, "id": message_id}
    data = {"key": key, "message": message, "messageTimestamp": 1_746_132_673, "pushName": "Ana", **item}
    return read("evolution", {"event": "messages.upsert", "instance": "loja", "data": data})


def update(data, event="messages.update"):
    return read("evolution", {"event": event, "instance": "loja", "data": data})


@pytest.mark.parametrize(
    ("text", "kind", "user"),
    [
        ("5511900010001@s.whatsapp.net", "phone", "5511900010001"),
        ("5511900010001@c.us", "phone", "5511900010001"),
        ("5511900010001:90@s.whatsapp.net", "phone", "5511900010001"),
        ("5511900010001_1:2@s.whatsapp.net", "phone", "5511900010001"),
        ("76201000000001@lid", "lid", "76201000000001"),
        ("76201000000001:3@lid", "lid", "76201000000001"),
        ("120363000000000001@g.us", "group", "120363000000000001"),
        ("5511900010001-1600000000@g.us", "group", "5511900010001-1600000000"),
        ("status@broadcast", "broadcast", "status"),
        ("120363000000000009@newsletter", "newsletter", "120363000000000009"),
        ("0@c.us", "other", "0"),
        ("abc@s.whatsapp.net", "other", "abc"),
    ],
)
def test_address(text, kind, user):
    found = jids.parse(text)
    assert (found.kind, found.user, found.as_received) == (kind, user, text)


@pytest.mark.parametrize("text", ["", None, "5511900010001", "@c.us", "a b@c.us", "x" * 400 + "@c.us", "1@C.US"])
def test_what_is_no_address(text):
    assert jids.parse(text) is None


def test_hidden_number_is_never_a_phone():
    (identity,) = jids.chat(LID).person().identities
    assert (identity.kind, identity.source, identity.value) == ("external", "whatsapp_lid", "76201000000001")
    with_phone = jids.chat(LID, "556280030003@s.whatsapp.net")
    assert [i.value for i in with_phone.person().identities] == ["76201000000001", "+5562980030003"]
    assert with_phone.person().identities[1].as_received == "556280030003"
    assert with_phone.sent_to == LID


def test_message_has_one_name_however_its_chat_is_written():
    names = [
        jids.chat(text).names(False, "AB12")
        for text in ("556280030003@c.us", "5562980030003@s.whatsapp.net", "556280030003:7@s.whatsapp.net")
    ]
    assert set(names) == {("false_5562980030003@c.us_AB12",)}
    assert jids.chat(LID, "556280030003@c.us").names(False, "AB12") == (
        "false_5562980030003@c.us_AB12",
        "false_76201000000001@lid_AB12",
    )
    # ours is ours, however the gateway calls the chat
    assert jids.chat(LID).names(True, "AB12") == jids.chat(ANA).names(True, "AB12") == ("true_AB12",)


@given(st.text(max_size=300), st.text(max_size=300))
def test_two_ids_never_have_one_name(one, other):
    assert (jids.own_name(one) == jids.own_name(other)) is (one == other)
    assert len(jids.own_name(one)) < 130


@pytest.mark.parametrize(
    ("text", "from_me", "names"),
    [
        ("true_5511900010001@c.us_AB12", False, ("true_AB12",)),
        ("false_5511900010001@c.us_AB12", True, ("false_5511900010001@c.us_AB12",)),
        ("AB12", False, ("false_5511900010001@c.us_AB12", "true_AB12")),
        ("AB12", True, ("true_AB12", "false_5511900010001@c.us_AB12")),
        ("false_120363000000000001@g.us_AB12_5511900010001@c.us", False, ("false_5511900010001@c.us_AB12",)),
        (" ", False, ()),
        (None, True, ()),
    ],
)
def test_names_that_a_message_may_have(text, from_me, names):
    assert jids.named(text, jids.chat(ANA), from_me) == names


@pytest.mark.parametrize(
    ("message", "kind", "body", "content"),
    [
        ({"conversation": "oi"}, "text", "oi", {}),
        ({"extendedTextMessage": {"text": "oi"}, "messageContextInfo": {}}, "text", "oi", {}),
        ({"extendedTextMessage": {"text": "oi", "contextInfo": {"isForwarded": True, "forwardingScore": 7}}},
         "text", "oi", {"frequently_forwarded": True}),
        ({"ephemeralMessage": {"message": {"viewOnceMessageV2": {"message": {"imageMessage": {"caption": "c"}}}}}},
         "image", "c", {}),
        ({"audioMessage": {"ptt": True, "mimetype": "audio/ogg"}}, "audio", None, {}),
        ({"documentWithCaptionMessage": {"message": {"documentMessage": {"caption": "nota", "fileName": "n.pdf"}}}},
         "document", "nota", {}),
        ({"locationMessage": {"degreesLatitude": 1, "degreesLongitude": 2, "name": "Loja"}},
         "location", "Loja", {"location": {"latitude": Decimal(1), "longitude": Decimal(2), "name": "Loja"}}),
        ({"contactsArrayMessage": {"contacts": [{"displayName": "Bia"}, {"displayName": "Caio"}]}},
         "contacts", "Bia, Caio", None),
        ({"buttonsResponseMessage": {"selectedButtonId": "b1", "selectedDisplayText": "Sim"}},
         "interactive", "Sim", {"interactive": {"type": "button_reply", "id": "b1", "title": "Sim"}}),
        ({"listResponseMessage": {"title": "Plano", "singleSelectReply": {"selectedRowId": "r1"}}},
         "interactive", "Plano", None),
        ({"templateButtonReplyMessage": {"selectedId": "t1", "selectedDisplayText": "Sair"}},
         "button", "Sair", {"payload": "t1"}),
        ({"interactiveResponseMessage": {"body": {"text": "ok"}, "nativeFlowResponseMessage": {
            "name": "flow", "paramsJson": '{"cep": "01000-000"}'}}},
         "interactive", "ok", {"interactive": {"type": "nfm_reply", "name": "flow", "response": {"cep": "01000-000"}}}),
        ({"pollCreationMessageV3": {"name": "Qual?", "options": [{"optionName": "A"}]}}, "poll", "Qual?",
         {"options": ["A"]}),
        ({"hologramMessage": {"x": 1}}, "hologramMessage", None, {"not_understood": "hologramMessage"}),
    ],
)  # fmt: skip
def test_type_of_a_message(message, kind, body, content):
    said = baileys.read(Document(message))
    assert (said.kind, said.body) == (kind, body)
    assert content is None or said.content == content


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"senderKeyDistributionMessage": {"groupId": "x"}},
        {"messageContextInfo": {}, "conversation": ""},
        {"pollUpdateMessage": {"vote": {}}},
        {"protocolMessage": {"type": "EPHEMERAL_SETTING"}},
        {"protocolMessage": {"type": 5, "historySyncNotification": {}}},
        {"encReactionMessage": {}},
    ],
)
def test_what_no_person_said(message):
    assert baileys.read(Document(message)) is None
    assert upsert(message).reason == "no_content"


def test_media_is_kept_without_its_bytes_and_keys():
    image = {"mimetype": "image/jpeg", "mediaKey": "k", "url": "https://mmg.example/x.enc", "fileLength": "52046"}
    outcome = upsert({"imageMessage": image, "base64": "AAAA", "mediaUrl": "https://files.example/1.jpg"})
    (message,) = outcome.facts
    assert message.media == (
        {"type": "image", "url": "https://files.example/1.jpg", "mime_type": "image/jpeg", "bytes": "52046"},
    )
    assert "AAAA" not in repr(outcome)
    assert "'k'" not in repr(outcome)


@pytest.mark.parametrize("stamp", [1_746_132_673, "1746132673", Decimal("1746132673.0"),
                                   {"low": 1_746_132_673, "high": 0, "unsigned": True}])  # fmt: skip
def test_forms_of_a_time(stamp):
    assert moments.from_epoch_long_s(stamp) == datetime(2025, 5, 1, 20, 51, 13, tzinfo=UTC)


def test_fraction_of_a_second_is_kept_and_a_low_half_may_be_negative():
    assert moments.from_epoch_long_s(Decimal("1710481111.853")).microsecond == 853_000
    assert moments.from_epoch_long_s({"low": -1, "high": 0}) == datetime(2106, 2, 7, 6, 28, 15, tzinfo=UTC)


@pytest.mark.parametrize("stamp", [None, True, {}, {"low": 1.5, "high": 0}, {"low": 1, "high": 2**70}, "x", [],
                                   Decimal("NaN"), Decimal("1e999")])  # fmt: skip
def test_what_is_no_time(stamp):
    assert moments.from_epoch_long_s(stamp) is None


def test_local_time_that_says_z():
    came = datetime(2025, 5, 1, 20, 51, 14, tzinfo=UTC)
    assert moments.from_local_marked_utc("2025-05-01T17:51:13.031Z", came) == datetime(
        2025, 5, 1, 20, 51, 13, 31_000, tzinfo=UTC
    )
    # delivered forty minutes late, and from east of here
    assert moments.from_local_marked_utc("2025-05-01T17:11:00Z", came).minute == 11
    assert moments.from_local_marked_utc("2025-05-01T22:51:10Z", came) == came - timedelta(seconds=4)
    assert moments.from_local_marked_utc("2020-05-01T22:51:10Z", came).year == 2020
    assert moments.from_local_marked_utc("never", came) is None


@pytest.mark.parametrize(
    "data",
    [
        {"keyId": "AB12", "remoteJid": ANA, "fromMe": True, "status": "READ", "messageId": "cmk"},
        {"key": {"id": "AB12"}, "status": "READ"},
        [{"key": {"id": "AB12", "fromMe": True, "remoteJid": LID}, "update": {"status": 4}}],
        [{"key": {"id": "AB12", "fromMe": True}, "update": {"status": "4"}}],
    ],
)
def test_three_forms_of_an_update(data):
    (status,) = update(data).facts
    assert (status.wamid, status.status, status.occurred_at) == ("true_AB12", "read", RECEIVED)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(0, "failed"), (2, "sent"), (3, "delivered"), (5, "played"), ("ERROR", "failed"), ("SERVER_ACK", "sent"),
     ("DELIVERY_ACK", "delivered"), ("PLAYED", "played")],
)  # fmt: skip
def test_statuses(status, kind):
    (found,) = update({"keyId": "AB12", "fromMe": True, "remoteJid": ANA, "status": status}).facts
    assert (found.status, found.error_code, found.retryable) == (kind, "error" if kind == "failed" else None, False)


@pytest.mark.parametrize(
    ("data", "status", "reason"),
    [
        ({"keyId": "A", "fromMe": True, "status": 1}, "ignored", "update_without_status"),
        ({"keyId": "A", "fromMe": True, "status": "DELETED"}, "ignored", "update_without_status"),
        ({"keyId": "A", "fromMe": False, "status": "READ", "remoteJid": ANA}, "ignored", "read_by_us"),
        ({"keyId": "A", "fromMe": True, "status": "READ", "remoteJid": "1@g.us"}, "ignored", "group"),
        ({"keyId": "A", "fromMe": True, "status": "TELEPORTED"}, "unrecognised", "unknown_shape:status"),
        ({"status": "READ"}, "unrecognised", "unknown_shape:status"),
        ([], "unrecognised", "unknown_shape:data"),
        (None, "unrecognised", "unknown_shape:data"),
    ],
)
def test_updates_without_a_fact(data, status, reason):
    outcome = update(data)
    assert (outcome.status, outcome.reason) == (status, reason)


def test_edit_and_taking_back_in_every_form():
    forms = [
        upsert({"protocolMessage": {"type": 0, "key": {"id": "X9", "fromMe": True, "remoteJid": "551130000010@c.us"}}}),
        update({"id": "X9", "remoteJid": ANA, "fromMe": False, "status": "DELETED"}, "messages.delete"),
        update({"key": {"id": "X9", "remoteJid": ANA}, "update": {"messageStubType": 1}}),
    ]
    for outcome in forms:
        (change,) = outcome.facts
        assert (change.kind, change.wamid) == ("revoked", "false_5511900010001@c.us_X9")
    forms = [
        upsert({"editedMessage": {"message": {"protocolMessage": {
            "type": "MESSAGE_EDIT", "key": {"id": "X9"}, "editedMessage": {"conversation": "novo"}}}}}),
        update({"key": {"id": "X9", "remoteJid": ANA}, "type": 14, "editedMessage": {"conversation": "novo"},
                "timestampMs": "1746132673000"}, "messages.edited"),
        update({"key": {"id": "X9", "remoteJid": ANA}, "message": {"conversation": "novo"}}, "MESSAGES_EDITED"),
        update({"key": {"id": "X9", "remoteJid": ANA}, "update": {"message": {"editedMessage": {"message": {
            "conversation": "novo"}}}}}),
    ]  # fmt: skip
    for outcome in forms:
        (change,) = outcome.facts
        assert (change.kind, change.wamid) == ("edited", "false_5511900010001@c.us_X9")
        assert change.content == {"type": "text", "body": "novo"}


def test_reaction_is_about_whose_message_its_key_says():
    outcome = upsert({"reactionMessage": {"key": {"id": "X9", "fromMe": True, "remoteJid": ANA}, "text": "🙏"}})
    (change,) = outcome.facts
    assert (change.wamid, change.other_names) == ("true_X9", ("false_5511900010001@c.us_X9",))
    assert change.content == {"emoji": "🙏"}
    (withdrawn,) = upsert({"reactionMessage": {"key": {"id": "X9"}, "text": ""}}).facts
    assert withdrawn.content == {"emoji": None}


@pytest.mark.parametrize(
    ("jid", "reason"),
    [("1203@g.us", "group"), ("status@broadcast", "broadcast"), ("12@newsletter", "newsletter"),
     ("0@c.us", "not_a_person"), ("551130000010@s.whatsapp.net", "own_chat")],
)  # fmt: skip
def test_who_is_nobody_makes_no_contact(jid, reason):
    data = {
        "key": {"remoteJid": jid, "fromMe": False, "id": "A", "participant": ANA},
        "message": {"conversation": "oi"},
    }
    event = {"event": "messages.upsert", "instance": "loja", "sender": "551130000010:5@s.whatsapp.net", "data": data}
    outcome = read("evolution", event)
    assert (outcome.status, outcome.reason, outcome.facts) == ("ignored", reason, ())


@pytest.mark.parametrize("event", ["MESSAGES_SET", "contacts.set", "CHATS_SET"])
def test_history_is_no_new_message(event):
    data = [{"key": {"remoteJid": ANA, "fromMe": False, "id": "A"}, "message": {"conversation": "oi"}}]
    outcome = read("evolution", {"event": event, "data": data})
    assert (outcome.status, outcome.reason) == ("ignored", "history")


def test_list_of_messages_is_read_one_by_one():
    items = [
        {"key": {"remoteJid": ANA, "fromMe": False, "id": name}, "message": {"conversation": "oi"}} for name in "AB"
    ]
    items.append({"message": {"conversation": "sem id"}})
    for data in (items, {"messages": items, "type": "notify"}):
        outcome = read("evolution", {"event": "messages.upsert", "data": data})
        assert outcome.reason == "message,not_understood:1"
        assert [fact.wamid for fact in outcome.facts] == [f"false_5511900010001@c.us_{name}" for name in "AB"]


@pytest.mark.parametrize(
    ("state", "reason", "status"),
    [("open", None, "WORKING"), ("connecting", None, "STARTING"), ("close", 428, "STOPPED"), ("close", 401, "FAILED"),
     ("refused", None, "FAILED")],
)  # fmt: skip
def test_state_of_a_connection(state, reason, status):
    data = {"instance": "loja", "state": state, "statusReason": reason}
    (changed,) = read("evolution", {"event": "CONNECTION_UPDATE", "instance": "loja", "data": data}).facts
    assert (changed.session, changed.status) == ("loja", status)


def test_ended_instance_is_a_stopped_session():
    (changed,) = read("evolution", {"event": "logout.instance", "instance": "loja", "data": None}).facts
    assert changed.status == "STOPPED"


WAHA = {"id": "evt_1", "timestamp": 1_741_249_702_485, "session": "loja", "me": {"id": "551130000010@c.us"}}


def waha(event, **payload):
    return read("waha", WAHA | {"event": event, "payload": payload})


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        ({"type": "ptt"}, "audio"),
        ({"type": "vcard"}, "contacts"),
        ({"message": {"audioMessage": {"ptt": True}}}, "audio"),
        ({"Message": {"imageMessage": {"caption": "c"}}}, "image"),
        ({}, "text"),
    ],
)
def test_type_of_a_message_of_any_engine(data, kind):
    (message,) = waha("message", id="false_5511900010001@c.us_AB12", body="c", _data=data).facts
    assert message.kind == kind


@pytest.mark.parametrize("kind", ["e2e_notification", "ciphertext", "protocol", "revoked"])
def test_notices_of_webjs_are_no_messages(kind):
    outcome = waha("message", id="false_5511900010001@c.us_AB12", body="x", _data={"type": kind})
    assert (outcome.status, outcome.reason) == ("ignored", "no_content")


def test_media_that_was_not_downloaded():
    (message,) = waha("message", id="false_5511900010001@c.us_AB12", hasMedia=True, media=None,
                      _data={"type": "image"}).facts  # fmt: skip
    assert message.media == ({"type": "image"},)


def test_place_and_cards_are_told_by_their_names():
    place = {"latitude": -23.5, "longitude": -46.6, "description": "Loja", "thumbnail": "QUJD"}
    (message,) = waha("message", id="false_5511900010001@c.us_A", body="QUJD", location=place).facts
    assert (message.kind, message.body) == ("location", "Loja")
    assert "QUJD" not in repr(message)
    cards = ["BEGIN:VCARD\r\nFN:Bia Souza\r\nEND:VCARD", "BEGIN:VCARD\nFN;CHARSET=UTF-8:Caio\nEND:VCARD"]
    (message,) = waha("message", id="false_5511900010001@c.us_B", body=cards[0], vCards=cards).facts
    assert (message.kind, message.body) == ("contacts", "Bia Souza, Caio")
    (bare,) = waha("message", id="false_5511900010001@c.us_C", body=cards[0], _data={"type": "vcard"}).facts
    assert (bare.kind, bare.body) == ("contacts", None)


@pytest.mark.parametrize(
    "data",
    [
        {"key": {"remoteJidAlt": "556280030003@s.whatsapp.net"}},
        {"Info": {"SenderAlt": "556280030003:4@s.whatsapp.net"}},
        {"key": {"senderPn": "556280030003@s.whatsapp.net"}},
    ],
)
def test_phone_behind_a_hidden_number(data):
    (message,) = waha("message", id=f"false_{LID}_AB12", **{"from": LID}, body="oi", _data=data).facts
    assert [i.value for i in message.person.identities] == ["76201000000001", "+5562980030003"]
    assert message.wamid == "false_5562980030003@c.us_AB12"


@pytest.mark.parametrize(
    ("ack", "status"), [(-1, "failed"), (1, "sent"), (2, "delivered"), (3, "read"), (4, "played"), ("READ", "read")]
)
def test_acks(ack, status):
    for chat in ("5511900010001@c.us", LID):
        (found,) = waha("message.ack", id=f"true_{chat}_AB12", ack=ack).facts
        assert (found.wamid, found.status) == ("true_AB12", status)
        assert found.occurred_at == datetime(2025, 3, 6, 8, 28, 22, 485_000, tzinfo=UTC)


def test_acks_that_are_nothing_for_us():
    assert waha("message.ack", id="true_5511900010001@c.us_A", ack=0).reason == "pending"
    assert waha("message.ack", id="false_5511900010001@c.us_A", ack=3).reason == "read_by_us"
    assert waha("message.ack.group", id="true_12@g.us_A_9@lid", ack=3).reason == "group"
    assert waha("message.ack", id="true_5511900010001@c.us_A", ack=17).status == "unrecognised"


def test_taken_back_in_waha():
    (change,) = waha(
        "message.revoked", after={"id": "false_5511900010001@c.us_B"}, before=None, revokedMessageId="A"
    ).facts
    assert (change.kind, change.wamid) == ("revoked", "false_5511900010001@c.us_A")
    (older,) = waha("message.revoked", after={"id": "false_5511900010001@c.us_A"}, before={"id": "x"}).facts
    assert older.kind == "revoked"


def test_two_edits_under_one_id_are_two():
    edits = [
        waha("message.edited", id="false_5511900010001@c.us_A", editedMessageId="A", body=body).facts[0].change_id
        for body in ("um", "dois", "um")
    ]
    assert edits[0] == edits[2] != edits[1]


@pytest.mark.parametrize("event", ["presence.update", "group.v2.join", "chat.archive", "call.received", "label.upsert",
                                   "engine.event", "state.change", "message.waiting", "poll.vote"])  # fmt: skip
def test_events_that_are_passed_over(event):
    assert waha(event, id="x").status == "ignored"
    assert waha("message.hologram").reason == "unknown_shape:message.hologram"


@pytest.mark.parametrize(
    ("text", "word"),
    [("STOP", "STOP"), (" Sair! ", "SAIR"), ("párar", "PARAR"), ("CANCELAR.", "CANCELAR"), ("¡Baja!", "BAJA"),
     ("dar de baja", "DAR DE BAJA"), ("opt-out", "OPT OUT"), ("não quero mais", "NAO QUERO MAIS"),
     ("*DESCADASTRAR*", "DESCADASTRAR"), ("unsubscribe\n", "UNSUBSCRIBE")],
)  # fmt: skip
def test_words_that_stop(text, word):
    assert stop_word(text).word == word


@pytest.mark.parametrize(
    "text",
    ["", None, "quero cancelar meu pedido", "não pare", "sair daqui", "stop it", "P A R A R", "🛑", "x" * 10_000],
)
def test_words_that_do_not(text):
    assert stop_word(text) is None


@pytest.mark.parametrize(
    ("name", "event"),
    [("messages.upsert", "messages.upsert"), ("MESSAGES_UPSERT", "messages.upsert"),
     ("messages-upsert", "messages.upsert"), (None, "unknown"), (7, "unknown"), ("é", "unknown")],
)  # fmt: skip
def test_name_of_an_event(name, event):
    assert evolution.event_name(name) == event


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        (b'{"a":1,"apikey":"S3CR3T","b":"\\u00e7 \\/"}', b'{"a":1,"apikey":"removed","b":"\\u00e7 \\/"}'),
        (b'{"data":{"ApiKey" : "S3\\"CR3T"}}', b'{"data":{"ApiKey" : "removed"}}'),
        (b'{"apikey":"S3CR3T', b'{"apikey":"removed"'),
        (b'{"apikey":5353,"x":1}', b'{"apikey":"removed","x":1}'),
        # a person may write whatever it likes
        (b'{"conversation":"\\"apikey\\":\\"x\\""}', b'{"conversation":"\\"apikey\\":\\"x\\""}'),
    ],
)
def test_key_of_the_gateway_is_taken_out_and_nothing_else(body, kept):
    assert evolution.without_secrets(body) == kept


def test_file_in_the_body_leaves_its_digest():
    file = "QUJD" * 20_000
    body = json.dumps({"base64": file, "text": "olá " * 20_000}).encode()
    kept = json.loads(stripping.without_files(body))
    assert kept["base64"].startswith("removed:80000:sha256:")
    assert kept["text"] == "olá " * 20_000
    assert stripping.without_files(b'{"jpegThumbnail":"QUJD"}') == b'{"jpegThumbnail":"QUJD"}'
