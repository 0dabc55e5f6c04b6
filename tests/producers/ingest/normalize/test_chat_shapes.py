"""Deliveries of the chat senders with anything in the place of anything: nothing fails, everything has an outcome."""

import copy
import json
from datetime import UTC, datetime

from hypothesis import given, settings
from hypothesis import strategies as st

from producers.ingest.normalize import normalize
from producers.ingest.normalize.facts import Context
from producers.ingest.sources import registered

RECEIVED = datetime(2026, 11, 29, tzinfo=UTC)
ANA = "5511900010001@s.whatsapp.net"
_KEY = {"remoteJid": "76201000000001@lid", "remoteJidAlt": ANA, "fromMe": False, "id": "AB12"}
_WAHA = {"id": "evt_1", "timestamp": 1_741_249_702_485, "session": "loja", "me": {"id": "551130000010@c.us"}}
_WAHA_ID = "false_5511900010001@c.us_AB12"


def _evolution(event, data):
    return {"event": event, "instance": "loja", "data": data, "date_time": "2025-05-01T17:51:14Z",
            "sender": "551130000010@s.whatsapp.net", "apikey": "secret"}  # fmt: skip


def _upsert(message):
    return _evolution("messages.upsert", {"key": _KEY, "pushName": "Ana", "message": message,
                                          "messageTimestamp": {"low": 1_746_132_673, "high": 0}})  # fmt: skip


def _cloud(**value):
    change = {"field": "messages", "value": {"metadata": {"phone_number_id": "1"}, **value}}
    return {"entry": [{"id": "waba", "changes": [change]}]}


def _said(kind, **part):
    return {"from": "5511900010001", "id": "w1", "timestamp": "1700000000", "type": kind, kind: part}


DELIVERIES = {
    "evolution": [
        _upsert({"conversation": "oi"}),
        _upsert({"extendedTextMessage": {"text": "oi", "contextInfo": {
            "stanzaId": "X", "externalAdReply": {"title": "a"}}}}),
        _upsert({"ephemeralMessage": {"message": {"imageMessage": {"caption": "c", "mimetype": "image/jpeg"}}}}),
        _upsert({"locationMessage": {"degreesLatitude": 1.5, "degreesLongitude": 2.5}}),
        _upsert({"contactsArrayMessage": {"contacts": [{"displayName": "Bia", "vcard": "v"}]}}),
        _upsert({"listResponseMessage": {"title": "t", "singleSelectReply": {"selectedRowId": "r"}}}),
        _upsert({"interactiveResponseMessage": {"nativeFlowResponseMessage": {"paramsJson": "{}"}}}),
        _upsert({"reactionMessage": {"key": {"id": "X", "fromMe": True}, "text": "🙏"}}),
        _upsert({"protocolMessage": {"type": 14, "key": {"id": "X"}, "editedMessage": {"conversation": "novo"}}}),
        _evolution("messages.update", [{"key": {"id": "AB12"}, "update": {"status": 4, "message": {}}}]),
        _evolution("messages.update", {"keyId": "AB12", "remoteJid": ANA, "fromMe": True, "status": "READ"}),
        _evolution("messages.edited", {"key": _KEY, "editedMessage": {"conversation": "novo"}, "timestampMs": "1"}),
        _evolution("messages.delete", _KEY),
        _evolution("contacts.upsert", [{"remoteJid": ANA, "pushName": "Ana"}]),
        _evolution("connection.update", {"state": "close", "statusReason": 401}),
    ],
    "waha": [
        _WAHA | {"event": "message", "payload": {
            "id": _WAHA_ID, "timestamp": 1.5, "from": ANA, "fromMe": False, "to": ANA, "body": "oi", "hasMedia": True,
            "source": "app", "media": {"url": "u", "mimetype": "image/png"}, "location": {"latitude": 1},
            "vCards": ["v"], "replyTo": {"id": "X"}, "_data": {
                "notifyName": "Ana", "type": "chat", "message": {"conversation": "oi"}, "key": _KEY,
                "Info": {"SenderAlt": ANA, "PushName": "Ana"}}}},
        _WAHA | {"event": "message.reaction", "payload": {
            "id": _WAHA_ID, "from": ANA, "timestamp": 1.5, "reaction": {"text": "🙏", "messageId": _WAHA_ID}}},
        _WAHA | {"event": "message.edited", "payload": {"id": _WAHA_ID, "editedMessageId": "AB12", "body": "b"}},
        _WAHA | {"event": "message.revoked", "payload": {
            "after": {"id": _WAHA_ID, "from": ANA}, "before": {"id": "x"}, "revokedMessageId": "AB12"}},
        _WAHA | {"event": "message.ack", "payload": {"id": "true_1@c.us_AB12", "ack": 3, "ackName": "READ"}},
        _WAHA | {"event": "session.status", "payload": {
            "status": "FAILED", "statuses": [{"status": "FAILED", "timestamp": 1_700_000_004_000}]}},
    ],
    "whatsapp": [
        _cloud(contacts=[{"profile": {"name": "Ana"}, "wa_id": "5511900010001", "user_id": "BR.1"}],
               messages=[_said("text", body="oi") | {"context": {"id": "w0"}, "referral": {"source_id": "a"}}]),
        _cloud(messages=[_said("image", id="1", mime_type="image/png", caption="c")]),
        _cloud(messages=[_said("interactive", type="nfm_reply", nfm_reply={"response_json": "{}", "body": "b"})]),
        _cloud(messages=[_said("contacts") | {"contacts": [{"name": {"formatted_name": "Bia"}}]}]),
        _cloud(messages=[_said("reaction", message_id="w0", emoji="x"), _said("revoke", original_message_id="w0")]),
        _cloud(messages=[_said("edit", original_message_id="w0", message={"type": "text", "text": {"body": "b"}})]),
        _cloud(messages=[_said("system", type="user_changed_number", wa_id="5511900010099")], errors=[{"code": 1}]),
        _cloud(message_echoes=[_said("text", body="oi") | {"to": "5511900010001"}]),
        _cloud(statuses=[{"id": "w1", "status": "failed", "timestamp": "1", "recipient_id": "5511900010001",
                          "errors": [{"code": 131047, "error_data": {"details": "d"}}]}]),
        {"entry": [{"changes": [{"field": "user_preferences", "value": {"user_preferences": [
            {"wa_id": "5511900010001", "value": "stop", "timestamp": 1, "category": "c"}]}}]}]},
    ],
}  # fmt: skip

_anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20)
    | st.sampled_from(["\0", "\ud800", "1" * 400, "1203@g.us", "true_1@c.us_X", "false_1@g.us_X", "X" * 9000, 10**400]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def _places(value, path=()):
    yield path
    if isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _places(inner, (*path, name))


ALL = [(source, delivery) for source, deliveries in DELIVERIES.items() for delivery in deliveries]


def outcome(source, document):
    body = json.dumps(document).encode()
    sender = registered()[source]
    body = sender.without_secrets(body)
    parts = sender.route(body, {}, "messages-upsert")
    assert all(len(part.dedupe_key) <= 200 and len(part.topic) <= 255 for part in parts)
    context = Context(topic=parts[0].topic, received_at=RECEIVED)
    return normalize(source, parts[0].body or body, {}, context)


def test_deliveries_as_they_are_say_something():
    for source, delivery in ALL:
        assert outcome(source, delivery).status == "processed", delivery


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_anything_in_the_place_of_anything(data):
    source, delivery = data.draw(st.sampled_from(ALL))
    delivery = copy.deepcopy(delivery)
    for _ in range(data.draw(st.integers(1, 3))):
        places = [path for path in _places(delivery) if path]
        if not places:
            break
        *way, last = data.draw(st.sampled_from(places))
        inner = delivery
        for step in way:
            inner = inner[step]
        if data.draw(st.booleans()) or isinstance(inner, list):
            inner[last] = data.draw(_anything)
        else:
            del inner[last]
    result = outcome(source, delivery)
    assert result.status in ("processed", "ignored", "unrecognised")
    assert len(result.reason) <= 255
    for fact in result.facts:
        assert len(getattr(fact, "wamid", "")) <= 200
        assert fact.occurred_at.tzinfo is UTC if hasattr(fact, "occurred_at") else True


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=300), st.dictionaries(st.sampled_from(
    ["authorization", "x-webhook-secret", "x-webhook-hmac", "x-webhook-hmac-algorithm", "x-webhook-timestamp"]),
    st.text(max_size=60) | st.just("Bearer a.b.c")))  # fmt: skip
def test_no_bytes_and_no_headers_make_a_check_or_a_route_fail(body, headers):
    for name in DELIVERIES:
        sender = registered()[name]
        assert not sender.verify(body, headers, [b"k" * 40], 0.0).ok
        assert sender.route(sender.without_secrets(body), headers, "x")
