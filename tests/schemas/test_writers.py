"""The fast way to a record gives what the walk along the schema gives, to the byte, or leaves the row to it."""

from datetime import UTC, datetime, timedelta
from io import BytesIO

import fastavro
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas import Encoded, EncodeError, RawRow, codec, encode, headers, record
from tests.schemas.rows import CREATED_AT, ORGANIZATION, RECORDED, row
from tests.schemas.strategies import JSON_OBJECTS, catalogue_payloads

MOMENTS = st.one_of(
    st.datetimes(datetime(1960, 1, 1), datetime(9998, 12, 31), timezones=st.just(UTC)),
    st.integers(0, 10**7).map(lambda micros: CREATED_AT + timedelta(microseconds=micros)),
)
MESSAGE = {
    "direction": "in",
    "conversation_id": "c1",
    "contact_id": "c2",
    "body": "Olá ção 🎉",
    "waha_message_id": "w1",
}


def outcome(made):
    try:
        return made()
    except EncodeError as error:
        return error.field, error.reason


def both_ways(emitted):
    key = str(emitted.organization_id).encode()
    fast = outcome(lambda: record(emitted))
    assert outcome(lambda: record(RawRow.of(emitted))) == fast
    return fast, outcome(lambda: (key, encode(emitted), headers(emitted)))


def by_fastavro(value):
    """The bytes that fastavro makes of what it has read from `value`."""
    schema = codec._reader(codec.schema_id_of(value)).schema
    out = BytesIO(value[:5])
    out.seek(5)
    fastavro.schemaless_writer(out, schema, codec.decode_record(value)[1])
    return out.getvalue()


@settings(max_examples=200)
@given(catalogue_payloads(), MOMENTS, JSON_OBJECTS, st.booleans(), st.booleans())
def test_a_record_is_what_encode_and_headers_give(typed, created_at, metadata, has_entity, is_stated):
    event_type, payload, stated = typed
    metadata = stated if is_stated else metadata
    emitted = row(event_type, payload, metadata, created_at=created_at)
    emitted = emitted if has_entity else emitted._replace(entity_id=None)
    assert RawRow.of(emitted).row() == emitted
    fast, walked = both_ways(emitted)
    assert fast == walked
    if isinstance(fast, Encoded):
        assert by_fastavro(fast.value) == fast.value


@settings(max_examples=200)
@given(st.sampled_from(sorted(MESSAGE)), st.one_of(st.none(), st.integers(), st.floats(allow_nan=False), st.text()))
def test_a_field_of_another_kind_has_the_walks_answer(field, value):
    fast, walked = both_ways(row("message.received", {**MESSAGE, field: value}))
    assert fast == walked


@pytest.mark.parametrize(
    "payload",
    [
        MESSAGE | {"body": "x" * 9_000},
        MESSAGE | {"nobody_declared": 1},
        MESSAGE | {"media_urls": None},
        MESSAGE | {"media_urls": ["https://a", 3]},
        b'{"direction":"in","conversation_id":"c\\u0000","contact_id":"c","body":null,"waha_message_id":"w"}',
        {key: value for key, value in MESSAGE.items() if key != "contact_id"},
        b"[]",
        b"{",
    ],
)
def test_what_is_not_plain_has_the_walks_answer(payload):
    emitted = row("message.received", payload)
    with pytest.raises(Exception):  # noqa: B017, PT011  any: it means no
        assert codec._plain_parts(RawRow.of(emitted))
    fast, walked = both_ways(emitted)
    assert fast == walked


@pytest.mark.parametrize(
    ("event_type", "payload"),
    [
        ("message.received", MESSAGE),
        ("message.received", MESSAGE | {"body": None, "message_id": "m1", "media_urls": ["https://a"]}),
        ("contact_event.recorded", RECORDED),
        ("tenant.own", {"anything": [1, 2.5, None]}),
    ],
)
def test_what_services_emit_is_plain(event_type, payload):
    emitted = row(event_type, payload, {"request_id": "r1", "traceparent": "00-1-2-03"})
    plain = codec._plain_parts(RawRow.of(emitted))
    assert plain == (str(ORGANIZATION).encode(), encode(emitted), headers(emitted))


def test_an_integer_beyond_64_bits_is_not_written_as_what_orjson_makes_of_it():
    text = b'{"n": 12345678901234567890123}'
    fast, walked = both_ways(row("tenant.own", text))
    assert fast == walked
    assert text in fast.value
    with_number = {**RECORDED, "properties": {**RECORDED["properties"], "order_number": 10**25}}
    fast, walked = both_ways(row("contact_event.recorded", with_number))
    assert fast == walked


def test_what_rows_have_in_common_is_not_kept_without_end(monkeypatch):
    monkeypatch.setattr(codec, "_KEPT", 3)
    for number in range(10):
        emitted = row(f"tenant.own{number}", {})
        assert record(emitted).value == encode(emitted)
    assert len(codec._types) <= 3


def test_a_moment_too_early_for_the_fast_way_has_the_walks_answer():
    for created_at in (
        datetime(1, 1, 1, tzinfo=UTC),
        datetime(1970, 1, 1, tzinfo=UTC),
        datetime(9999, 12, 31, tzinfo=UTC),
    ):
        fast, walked = both_ways(row("message.received", MESSAGE, created_at=created_at))
        assert fast == walked
