"""Rows to bytes and back: nothing changes, nothing unfit gets through, no bytes make it fall over."""

import contextlib
import json
from datetime import UTC, datetime, timedelta, timezone

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas import DecodeError, EncodeError, UnknownSchemaError, decode, encode, headers, published
from schemas.codec import decode_record
from schemas.events.webhook import Received
from tests.schemas.rows import CREATED_AT, ENTITY, ORGANIZATION, RECORDED, row
from tests.schemas.strategies import JSON_OBJECTS, catalogue_payloads


def test_event_equals_the_row_it_was_made_of():
    emitted = row("webhook.received", {"webhook_event_id": "w1", "source": "shopify", "topic": "orders/paid"}, {"a": 1})
    event = decode(encode(emitted))
    assert event.id == emitted.id
    assert event.organization_id == ORGANIZATION
    assert (event.event_type, event.entity_kind, event.entity_id) == ("webhook.received", "webhook", ENTITY)
    assert event.created_at == CREATED_AT
    assert event.created_at.tzinfo is not None
    assert event.payload == {"webhook_event_id": "w1", "source": "shopify", "topic": "orders/paid"}
    assert event.metadata == {"a": 1}
    assert isinstance(event.data, Received)
    assert event.data.topic == "orders/paid"


def test_framing_is_a_zero_byte_and_the_committed_id():
    value = encode(row("lead.created", {"name": "n", "source": "s", "pipeline_id": "p", "stage_id": "s"}))
    entry = published.current("lead.created", "")[0]
    assert value[0] == 0
    assert int.from_bytes(value[1:5], "big") == 0x40000000 + entry.number


def test_contact_event_has_the_schema_of_its_type():
    value = encode(row("contact_event.recorded", RECORDED))
    assert published.by_number()[int.from_bytes(value[1:5], "big") - 0x40000000].variant == "purchase_completed"
    assert decode(value).payload == RECORDED
    event_type, record = decode_record(value)
    assert event_type == "contact_event.recorded"
    assert record["payload"]["value"] == "297.90"
    assert record["payload"]["occurred_at"] == datetime(2026, 11, 29, 12, 0, 0, 1, tzinfo=UTC)


@pytest.mark.parametrize("contact_event_type", [None, "something_newer"])
def test_contact_event_without_a_known_type_has_free_properties(contact_event_type):
    properties = {"phone": "+55", "n": [1, {"a": None}]}
    payload = {**RECORDED, "contact_event_type": contact_event_type, "properties": properties}
    value = encode(row("contact_event.recorded", payload))
    assert published.by_number()[int.from_bytes(value[1:5], "big") - 0x40000000].variant == ""
    assert decode(value).payload == payload


def test_event_type_outside_the_catalogue_is_carried_as_its_own_text():
    text = '{"z":1,"a":{"big":123456789012345678901234567890},"é":[null]}'.encode()
    event = decode(encode(row("loyalty.points_earned", text)))
    assert event.payload == json.loads(text)
    assert event.data.model_extra == event.payload


@settings(max_examples=150, deadline=None)
@given(catalogue_payloads())
def test_payloads_of_the_catalogue_come_back_equal(case):
    event_type, payload, metadata = case
    event = decode(encode(row(event_type, payload, metadata)))
    # As text, because True == 1 and 1 == 1.0 in Python; numbers of a double field may gain ".0".
    assert event.payload == payload
    assert _kinds(event.payload) == _kinds(payload)
    assert event.metadata == metadata


@settings(max_examples=150, deadline=None)
@given(JSON_OBJECTS)
def test_unknown_fields_come_back_equal_wherever_they_are(extra):
    payload = {**RECORDED, **{f"x_{k}": v for k, v in extra.items()}}
    payload["properties"] = {**RECORDED["properties"], **{f"x_{k}": v for k, v in extra.items()}}
    assert decode(encode(row("contact_event.recorded", payload))).payload == payload
    assert decode(encode(row("custom_thing.happened", extra))).payload == extra


def _kinds(value):
    if isinstance(value, dict):
        return {key: _kinds(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_kinds(inner) for inner in value]
    return "number" if type(value) in (int, float) else type(value).__name__


@pytest.mark.parametrize("absent", [{}, {"reason": None}, {"reason": "r"}])
def test_missing_and_null_stay_apart(absent):
    payload = {"reopened_by": "u1", **absent}
    assert decode(encode(row("conversation.reopened", payload))).payload == payload


@pytest.mark.parametrize(
    "text",
    [
        "2026-01-15T14:00:00Z",
        "2026-01-15T14:00:00.120-03:00",
        "2026-10-25T02:30:00.000001+02:00",
        "1969-12-31T23:59:59.999999+00:00",
        "0001-01-01T00:00:00+00:00",
        "9999-12-31T23:59:59.999999+00:00",
        "2026-01-15 14:00:00.1234567+00",
    ],
)
def test_moments_keep_their_microseconds_and_their_spelling(text):
    event = decode(encode(row("message.read", {"message_id": "m", "read_at": text})))
    assert event.payload["read_at"] == text
    _, record = decode_record(encode(row("message.read", {"message_id": "m", "read_at": text})))
    assert record["payload"]["read_at"] == datetime.fromisoformat(text)


@pytest.mark.parametrize("amount", ["297.90", "-0.01", "12345678901234567890.1234", 297, 297.9, 1e22, "0"])
def test_amounts_keep_their_digits(amount):
    payload = {"value": amount, "won_at": "2026-01-15T14:00:00Z"}
    assert decode(encode(row("lead.won", payload))).payload == payload


@pytest.mark.parametrize(
    "created_at",
    [
        datetime(2026, 3, 1, 0, 0, 0, 1, tzinfo=UTC),
        datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
        datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
        datetime(2026, 3, 1, 1, 2, 3, 4, tzinfo=timezone(timedelta(hours=-3))),
    ],
)
def test_created_at_keeps_its_microseconds(created_at):
    assert decode(encode(row("a_b.c", {}, created_at=created_at))).created_at == created_at


READ = {"message_id": "m", "read_at": "2026-01-15T14:00:00Z"}
ORDER = {"order_id": "o", "ns_order_id": "n", "total_cents": 100}


@pytest.mark.parametrize(
    ("event_type", "payload", "field", "reason"),
    [
        ("message.read", b'{"message_id":"m","read_at":NaN}', "payload.read_at", "not a JSON number"),
        ("x.y", b'{"a":{"b":[1,NaN]}}', "payload.a.b[1]", "not a JSON number"),
        ("x.y", b'{"a":-Infinity}', "payload.a", "not a JSON number"),
        ("x.y", b'{"a":1e400}', "payload.a", "not a JSON number"),
        ("x.y", b'{"a":["ok","\\ud800"]}', "payload.a[1]", "lone surrogate"),
        ("x.y", b'{"\\ud800":1}', "payload.\\ud800", "lone surrogate"),
        ("x.y", b'{"a":"b\\u0000"}', "payload.a", "NUL"),
        ("x.y", b"[]", "payload", "must be a JSON object, not a list"),
        ("x.y", b"null", "payload", "must be a JSON object, not null"),
        ("x.y", b"{", "payload", "not JSON"),
        ("x.y", '{"a":1}'.encode("utf-16"), "payload", "not JSON in UTF-8"),
        ("x.y", b'{"a":"\xff"}', "payload", "not JSON"),
        ("x.y", b"[" * 100_000, "payload", "not JSON"),
        ("message.read", {**READ, "read_at": "2026-01-15T14:00:00"}, "payload.read_at", "no offset"),
        ("message.read", {**READ, "read_at": "2026-01-15"}, "payload.read_at", "no offset"),
        ("message.read", {**READ, "read_at": "yesterday"}, "payload.read_at", "ISO 8601"),
        ("message.read", {**READ, "read_at": 1768485600}, "payload.read_at", "not a number"),
        ("message.read", {**READ, "read_at": "9999-12-31T23:59:59-03:00"}, "payload.read_at", "9999"),
        ("message.read", {"read_at": READ["read_at"]}, "payload.message_id", "required and missing"),
        ("message.read", {**READ, "message_id": None}, "payload.message_id", "must not be null"),
        ("message.read", {**READ, "message_id": 5}, "payload.message_id", "must be text, not a number"),
        ("nuvemshop.order_created", {**ORDER, "total_cents": 2**63}, "payload.total_cents", "64 bits"),
        ("nuvemshop.order_created", {**ORDER, "total_cents": 10**30}, "payload.total_cents", "64 bits"),
        ("nuvemshop.order_created", {**ORDER, "total_cents": 1.5}, "payload.total_cents", "whole number"),
        ("nuvemshop.order_created", {**ORDER, "total_cents": True}, "payload.total_cents", "whole number"),
        ("nuvemshop.order_created", {**ORDER, "total_cents": "100"}, "payload.total_cents", "whole number"),
        ("contact.blocked", {"reason": "unknown"}, "payload.reason", "one of stop, manual"),
        ("contact.blocked", {"reason": ["stop"]}, "payload.reason", "one of stop, manual"),
        ("lead.deleted", {"soft": 1, "deleted_by": "u"}, "payload.soft", "true or false"),
        ("lead.updated", {"changes": {"name": {"from": 1}}}, "payload.changes.name.to", "required"),
        ("lead.updated", {"changes": []}, "payload.changes", "must be an object"),
        ("contact.merged", {"from_contact_id": "a", "into_contact_id": "b", "merged_fields": ["a", 1]},
         "payload.merged_fields[1]", "must be text"),
        ("ai.sentiment_alert", {"conversation_id": "c", "sentiment": "angry", "score": 2**53 + 1},
         "payload.score", "more digits"),
        ("ai.sentiment_alert", {"conversation_id": "c", "sentiment": "angry", "score": 10**400},
         "payload.score", "beyond a double"),
        ("lead.won", {"value": "1e3", "won_at": READ["read_at"]}, "payload.value", "decimal"),
        ("lead.won", {"value": "NaN", "won_at": READ["read_at"]}, "payload.value", "decimal"),
        ("contact_event.recorded", {**RECORDED, "occurred_at": "2026-11-29T12:00:00"},
         "payload.occurred_at", "no offset"),
        ("contact_event.recorded", {**RECORDED, "properties": {"items": [{}, {"quantity": "2"}]}},
         "payload.properties.items[1].quantity", "must be a number"),
        ("contact_event.recorded", {**RECORDED, "contact_event_type": 5}, "payload.contact_event_type", "text or null"),
    ],
)  # fmt: skip
def test_unfit_payload_is_refused_with_its_field(event_type, payload, field, reason):
    with pytest.raises(EncodeError) as caught:
        encode(row(event_type, payload))
    assert caught.value.field == field
    assert reason in caught.value.reason


@pytest.mark.parametrize(
    ("metadata", "field"),
    [
        (b"[]", "metadata"),
        (b'{"request_id":"\\ud800"}', "metadata.request_id"),
        ({"schema_version": "one"}, "metadata.schema_version"),
        ({"schema_version": 1}, "metadata.schema_version"),
        ({"schema_version": "9.0.0"}, "metadata.schema_version"),
    ],
)
def test_unfit_metadata_is_refused_with_its_field(metadata, field):
    with pytest.raises(EncodeError) as caught:
        encode(row("message.read", READ, metadata))
    assert caught.value.field == field


def test_naive_created_at_is_refused():
    with pytest.raises(EncodeError) as caught:
        encode(row("message.read", READ, created_at=datetime(2026, 1, 1)))
    assert caught.value.field == "created_at"


def test_integers_beyond_64_bits_survive_in_unknown_fields():
    payload = {**READ, "shop_id": 2**70, "deep": [{"n": -(2**64)}]}
    assert decode(encode(row("message.read", payload))).payload == payload


def test_headers_are_those_of_cloud_events():
    got = dict(
        headers(
            row(
                "message.read",
                READ,
                {"request_id": "req-1", "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
            )
        )
    )
    assert got == {
        "ce_specversion": b"1.0",
        "ce_id": b"0193f2a0-1111-7000-8000-000000000001",
        "ce_type": b"message.read",
        "ce_source": b"/organizations/7f3c1d2e-5b6a-4c8d-9e0f-112233445566",
        "ce_time": b"2026-12-01T12:30:15.123456+00:00",
        "ce_subject": b"message/0193f2a0-0000-7000-8000-00000000beef",
        "content-type": b"application/vnd.confluent.avro",
        "traceparent": b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "x-request-id": b"req-1",
        "seq": b"7",
    }
    assert "seq" not in dict(headers(row("message.read", READ, seq=0)))


def test_unknown_schema_id_is_named():
    for schema_id in (1, 0x40000000, 0x40000000 + 999_999, 0xFFFFFFFF):
        with pytest.raises(UnknownSchemaError) as caught:
            decode(b"\0" + schema_id.to_bytes(4, "big") + b"x")
        assert caught.value.schema_id == schema_id


@pytest.mark.parametrize("value", [b"", b"\0", b"\0\0\0\0", b"\1\0\0\0\0\0", b'{"json": true}'])
def test_value_without_framing_is_refused(value):
    with pytest.raises(DecodeError):
        decode(value)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(published.all_published()), st.binary(max_size=200))
def test_random_bytes_never_raise_anything_else(entry, body):
    with contextlib.suppress(DecodeError):
        decode(b"\0" + entry.schema_id.to_bytes(4, "big") + body)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damaged_records_never_raise_anything_else(data):
    value = bytearray(encode(row("contact_event.recorded", RECORDED)))
    for _ in range(data.draw(st.integers(1, 5))):
        value[data.draw(st.integers(0, len(value) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(value)))
    with contextlib.suppress(DecodeError):
        decode(bytes(value[:cut]))


def test_bytes_after_the_record_are_refused():
    with pytest.raises(DecodeError, match="left over"):
        decode(encode(row("message.read", READ)) + b"\0")


def test_payload_of_orjson_and_json_agree():
    text = orjson.dumps(RECORDED)
    assert decode(encode(row("contact_event.recorded", text))).payload == json.loads(text)


def test_a_payload_nested_too_deep_for_json_is_an_error_of_ours():
    deep = b'{"a":' + b"[" * 5_000 + b"123456789012345678901234567890" + b"]" * 5_000 + b"}"
    with pytest.raises(EncodeError, match="payload"):
        encode(row("loyalty.earned", {})._replace(payload=deep))
