"""Headers as anybody may write them, read without harm."""

import gc

import pytest

from afluente import kafka as clients
from tests.fixtures.raw_records import BAD_NAME, produce_batch


@pytest.fixture
def read_back(topics):
    """Produce one record for each list of headers, and read them all."""

    def read_back(*lists):
        topic = f"{topics.prefix}headers"
        topics.create(topic, partitions=1)
        produce_batch(topics.settings, topic, [(None, b"value", headers) for headers in lists])
        return topics.records(topic)

    return read_back


def test_headers_come_in_their_order_with_every_repetition(read_back):
    given = [("b", b"1"), ("a", b""), ("b", None), ("nó", b"\xff"), ("", b"no name")]
    plain, none = read_back(given, [])
    assert clients.headers_of(plain) == given
    assert clients.headers_of(none) == []


def test_a_name_that_is_not_utf8_makes_them_unreadable_and_harms_nothing(read_back):
    # Often enough for the interpreter to have its short way ready, which is the one that crashes.
    bad = [("before", b"1"), (BAD_NAME, b"2"), ("after", b"3")]
    records = read_back(*[bad, [("good", b"1")]] * 100)
    found = [clients.headers_of(record) for record in records]
    assert found == [None, [("good", b"1")]] * 100
    assert {record.value() for record in records} == {b"value"}
    del records
    gc.collect()


def test_they_are_unreadable_also_while_garbage_is_collected(read_back):
    records = read_back(*[[(BAD_NAME, b"v"), *((f"h{n}", None) for n in range(5_000))]] * 5)
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        found = [clients.headers_of(record) for record in records]
    finally:
        gc.set_threshold(*thresholds)
    assert found == [None] * 5


def test_what_the_client_gives_out_without_an_error_is_not_looked_at(read_back):
    """The second time it is asked, it does."""
    [record] = read_back([("before", b"1"), (BAD_NAME, b"2"), ("after", b"3")])
    assert [clients.headers_of(record) for _ in range(3)] == [None] * 3


def test_a_great_many_headers_are_read(read_back):
    given = [(f"h{n}", b"v" * 10) for n in range(20_000)]
    [record] = read_back(given)
    assert clients.headers_of(record) == given
