"""A peer that did less than the work, or other work, gets no figure."""

import pytest

import schemas
from afluente import kafka as clients
from bench.check import RELAY, check
from bench.errors import BenchError
from bench.rows import EVENT_TYPE, fill
from producers.relay.position import Entry
from producers.relay.source import Source

ROWS = 400


@pytest.fixture
def work(database, topics):
    """The rows, what they are as records, and how to check the topic after `produce`."""
    topics.create_families()
    rows = fill(database.url, ROWS)
    source = Source(database.url)
    records = [schemas.record(row) for row in source.chunk(Entry()).rows]
    source.close()
    producer = clients.producer(topics.settings)
    topic = topics.event(EVENT_TYPE)

    def outcome(records):
        for key, value, headers in records:
            producer.produce(topic, value, key, headers=headers)
        producer.flush()
        return check("peer", topics.settings, topic, database.url, rows, RELAY)

    return records, outcome


def test_all_of_the_work_is_found(work):
    records, outcome = work
    assert outcome(records).records == ROWS


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda records: records[:-1], "missing: \\+1"),
        (lambda records: [*records, records[-1]], "twice: \\+1"),
        (lambda records: records[::-1], "out of order"),
        (lambda records: [records[0]._replace(key=records[1].key), *records[1:]], "wrong key: \\+1"),
        (lambda records: [records[0]._replace(value=records[1].value), *records[1:]], "payloads that differ: \\+1"),
    ],
)
def test_less_or_other_work_is_refused(work, spoil, problem):
    records, outcome = work
    with pytest.raises(BenchError, match=problem):
        outcome(spoil(records))
