"""What a row becomes, without any server."""

import json
import uuid
from datetime import UTC, datetime

import pytest

import schemas
from producers.relay.records import BY_KEY, record_of
from schemas import Row
from schemas.topics import SPREAD, Topics, partition_of

TOPICS = Topics("p.")
LIMITS = dict.fromkeys([*TOPICS.families(), TOPICS.relay_dead_letter], 1_048_588)
PARTITIONS = dict.fromkeys(LIMITS, 6)
ORGANIZATION = uuid.UUID("7f3c1d2e-5b6a-4c8d-9e0f-112233445566")


def row(event_type="probe.counted", payload=b'{"n": 1}', metadata=b"{}", seq=7):
    return Row(
        seq, uuid.UUID(int=seq), ORGANIZATION, event_type, "probe", uuid.UUID(int=1), payload, metadata,
        datetime(2026, 11, 29, 12, 0, 0, 123456, UTC),
    )  # fmt: skip


def test_a_row_goes_to_its_family_under_its_organization():
    record = record_of(row(), TOPICS, LIMITS, PARTITIONS)
    assert (record.topic, record.key, record.dead) == ("p.events.custom", str(ORGANIZATION).encode(), False)
    assert record.partition == BY_KEY
    assert schemas.decode(record.value).payload == {"n": 1}
    assert dict(record.headers)["seq"] == b"7"


def test_a_row_of_a_spread_organization_goes_to_the_partition_of_its_entity(monkeypatch):
    monkeypatch.setitem(SPREAD, str(ORGANIZATION), 3)
    record = record_of(row(), TOPICS, LIMITS, PARTITIONS)
    assert record.partition == partition_of(ORGANIZATION, 6, uuid.UUID(int=1))


@pytest.mark.parametrize("margin", [-1, 0])
def test_a_record_is_as_large_as_its_topic_takes_and_no_larger(margin):
    size = record_of(row(), TOPICS, LIMITS, PARTITIONS).size
    record = record_of(row(), TOPICS, LIMITS | {"p.events.custom": size + margin}, PARTITIONS)
    assert record.dead is (margin < 0)


def test_what_does_not_fit_is_a_dead_letter_with_reason_and_row():
    record = record_of(row("lead.created", b'{"n": 1.50}'), TOPICS, LIMITS, PARTITIONS)
    assert (record.topic, record.key, record.dead) == ("p.relay.dead-letter", str(ORGANIZATION).encode(), True)
    letter = json.loads(record.value)
    assert letter["error_class"] == "EncodeError"
    assert letter["reason"].startswith("payload.")
    assert letter["event_id"] == str(uuid.UUID(int=7))
    assert (letter["seq"], letter["event_type"], letter["reference"]) == (7, "lead.created", None)
    assert letter["created_at"] == letter["row"]["created_at"] == "2026-11-29T12:00:00.123456+00:00"
    assert letter["row"]["payload"] == {"n": 1.5}
    assert b'"n": 1.50' in record.value  # the text of the table, digit for digit
    headers = dict(record.headers)
    assert headers["x-event-id"] == str(uuid.UUID(int=7)).encode()
    assert headers["x-error-class"] == b"EncodeError"
    assert headers["ce_type"] == b"lead.created"


def test_a_dead_letter_too_large_for_its_topic_says_where_the_row_is():
    large = row(payload=json.dumps({"text": "x" * 5_000}).encode())
    limits = dict.fromkeys(LIMITS, 3_000)
    record = record_of(large, TOPICS, limits, PARTITIONS)
    letter = json.loads(record.value)
    assert letter["error_class"] == "TooLarge"
    assert letter["row"] is None
    assert letter["reference"] == {
        "table": "event_log", "id": str(large.id), "created_at": "2026-11-29T12:00:00.123456+00:00",
    }  # fmt: skip
    assert record.size <= 3_000


def test_what_the_broker_refused_is_a_dead_letter_whatever_its_size():
    record = record_of(row(), TOPICS, LIMITS, PARTITIONS, {7: "the broker refuses its record"})
    assert json.loads(record.value)["error_class"] == "RefusedByBroker"
    assert not record_of(row(seq=8), TOPICS, LIMITS, PARTITIONS, {7: "no"}).dead


@pytest.mark.parametrize(
    ("payload", "metadata"),
    [
        (b'{"n": 1}', b'{"schema_version": "many"}'),
        (b'{"n": 1}', b'{"traceparent": 5, "request_id": {"a": 1}}'),
        (b"[1]", b"{}"),
        (b'{"s": "\\ud800"}', b"{}"),
        (b'{"n": 1' + b"0" * 400 + b"}", b"{}"),
    ],
)
@pytest.mark.parametrize("event_type", ["probe.counted", "lead.created", "message.received"])
def test_no_row_stops_the_others(event_type, payload, metadata):
    """Whatever is in a row, it becomes one record: on its topic or among the dead letters."""
    record = record_of(row(event_type, payload, metadata), TOPICS, LIMITS, PARTITIONS)
    assert record.dead or schemas.decode(record.value).event_type == event_type
