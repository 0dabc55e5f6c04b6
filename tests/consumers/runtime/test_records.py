"""What headers say, what they may hold, and that they do not grow."""

from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers.runtime import records
from consumers.runtime.records import Origin, Record

OWN = Origin("events.message", 3, 42, 1_700_000_000_000)


def record(headers=(), topic="events.message", ours=False):
    return Record(topic, 3, 42, 1_700_000_000_000, b"org", b"value", list(headers), ours=ours)


def test_headers_after_the_eighth_attempt_have_the_names_of_the_first_and_bounded_sizes():
    headers: records.Headers = [("ce_id", b"1"), ("traceparent", b"00-x"), ("seq", b"7")]
    origin = records.origin_of(record(headers))
    names = None
    for attempt in range(2, 10):
        headers = records.marked_headers(
            headers,
            worker="w-worker",
            origin=records.origin_of(record(headers, topic="w-worker.retry.30s", ours=True)) if names else origin,
            event_id=uuid4(),
            target="t",
            generation=0,
            attempt=attempt,
            due=datetime(2026, 11, 29, tzinfo=UTC),
            first_failure=datetime(2026, 11, 29, tzinfo=UTC),
            error_class="RuntimeError",
            error="x" * 200_000,
        )
        assert names is None or [name for name, _ in headers] == names
        names = [name for name, _ in headers]
    assert len(names) == len(set(names))
    values = dict(headers)
    assert values["ce_id"] == b"1"
    assert values["x-attempt"] == b"9"
    assert len(values["x-error-message"]) <= records.MAX_ERROR_BYTES
    assert records.origin_of(record(headers, topic="w-worker.retry.1h", ours=True)) == OWN


def test_a_mark_is_read_back():
    due = datetime(2026, 11, 29, 20, 0, 0, 123_000, tzinfo=UTC)
    headers = records.marked_headers(
        [], worker="w", origin=Origin("t", 0, 0, 0), target="alvo", generation=2, attempt=3, due=due
    )
    mark = records.read_mark(record(headers))
    assert (mark.target, mark.generation, mark.attempt, mark.due_ms) == ("alvo", 2, 3, records.to_ms(due))


def test_a_record_without_a_generation_is_no_retry_record():
    assert records.read_mark(record([("x-event-id", b"1"), ("x-attempt", b"1")])) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-attempt", b"-1"),
        ("x-attempt", b"0"),
        ("x-attempt", "\u0661".encode()),
        ("x-attempt", b"9" * 5000),
        ("x-attempt", b"40000"),
        ("x-attempt", b"\xff\xfe"),
        ("x-attempt", b""),
        ("x-generation", b"99999999999"),
        ("x-generation", b"2147483647"),
        ("x-due-ms", b"9999999999999999"),
        ("x-due-ms", b"soon"),
        ("x-target", b"a\x00b"),
        ("x-target", b"\xff"),
        ("x-target", b"a" * 501),
    ],
)
def test_a_broken_mark_is_refused(name, value):
    good = {"x-generation": b"0", "x-attempt": b"1"}
    with pytest.raises(ValueError, match=r"x-|utf-8"):
        records.read_mark(record([*(good | {name: value}).items()]))


ORIGIN = {
    "x-origin-topic": b"events.lead",
    "x-origin-partition": b"1",
    "x-origin-offset": b"7",
    "x-origin-timestamp": b"1700000000001",
}


def test_a_replay_asks_again_by_its_number_and_what_comes_of_it_does_not():
    headers = [("x-replay-id", b"r"), ("x-again", b"12")]
    assert records.read_again(record(headers)) == 12
    assert records.read_again(record([("x-replay-id", b"r")])) == 0
    following = records.marked_headers(headers, worker="w", origin=OWN, generation=3, attempt=2)
    assert ("x-replay-id", b"r") in following
    assert records.read_again(record(following)) == 0
    assert records.read_again(record([*headers, ("x-generation", b"0")])) == 0


@pytest.mark.parametrize("value", [b"", b"0", b"-1", b"1.5", b"again", b"9" * 19, b"9" * 400, "²".encode()])
def test_a_number_that_no_replay_has_is_refused(value):
    with pytest.raises(ValueError, match="x-again"):
        records.read_again(record([("x-again", value)]))


def test_an_origin_is_believed_on_the_workers_own_topics_only():
    assert records.origin_of(record(ORIGIN.items(), ours=True)) == Origin("events.lead", 1, 7, 1_700_000_000_001)
    assert records.origin_of(record(ORIGIN.items())) == OWN


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-origin-topic", b"a\x00b"),
        ("x-origin-topic", b"a" * 250),
        ("x-origin-topic", b"\xff\xfe"),
        ("x-origin-topic", b""),
        ("x-origin-partition", b"99999999999"),
        ("x-origin-partition", b"-1"),
        ("x-origin-offset", b"9" * 30),
        ("x-origin-offset", b"1_000"),
        ("x-origin-timestamp", b"9" * 18),
    ],
)
def test_an_origin_that_cannot_be_true_is_the_records_own_place(name, value):
    assert records.origin_of(record((ORIGIN | {name: value}).items(), ours=True)) == OWN


NUMBERS = st.integers(-(2**70), 2**70).map(lambda number: str(number).encode())
VALUES = st.none() | st.binary(max_size=40) | NUMBERS | st.text(max_size=20).map(lambda t: t.encode("utf-8", "replace"))
ANY_HEADERS = st.lists(st.tuples(st.sampled_from(sorted(records.OURS)), VALUES), max_size=20)


@given(ANY_HEADERS, st.integers(-(2**63), 2**63 - 1), st.booleans())
def test_whatever_headers_say_fits_its_column_or_is_refused(headers, timestamp_ms, ours):
    stranger = record(headers, ours=ours)
    stranger.timestamp_ms = timestamp_ms
    origin = records.origin_of(stranger)
    assert origin.topic.isascii()
    assert 1 <= len(origin.topic) <= 249
    assert "\x00" not in origin.topic
    assert 0 <= origin.partition < 2**31
    assert 0 <= origin.offset < 2**63
    for ms in (origin.timestamp_ms, timestamp_ms):
        assert datetime(1970, 1, 1, tzinfo=UTC) <= records.moment(ms) <= datetime.max.replace(tzinfo=UTC)
    try:
        mark = records.read_mark(stranger)
    except ValueError:
        mark = None
    if mark is not None:
        assert "\x00" not in mark.target
        assert len(mark.target.encode()) <= 500
        assert 0 <= mark.generation < 2**31 - 1
        assert 1 <= mark.attempt < 2**15
        records.moment(mark.due_ms)
    for name, value in records.with_origin(stranger):
        assert name in ORIGIN
        assert b"\x00" not in value


@given(st.lists(st.tuples(st.text(max_size=5), st.none() | st.binary(max_size=20)), max_size=8))
def test_headers_kept_in_postgres_come_back_as_they_were(headers):
    assert records.headers_from_json(records.headers_to_json(headers)) == headers


@given(st.text(), st.integers(10, 50))
def test_texts_are_cut_within_bytes_and_without_what_postgres_refuses(text, limit):
    cut = records.cut(text + "\x00\ud800", limit)
    assert len(cut.encode()) <= limit
    assert "\x00" not in cut


@given(st.datetimes(min_value=datetime(1970, 1, 1), max_value=datetime(2200, 1, 1)))
def test_a_due_time_in_whole_milliseconds_is_the_same_in_header_and_table(moment):
    moment = moment.replace(tzinfo=UTC)
    whole = records.whole_ms(moment)
    assert records.to_ms(whole) == records.to_ms(moment)
    assert timedelta(0) <= moment - whole < timedelta(milliseconds=1)
