"""Reading ahead changes when rows are read, and nothing else."""

import psycopg
import pytest

from producers.relay.ahead import Ahead
from producers.relay.position import Entry
from producers.relay.source import Source


@pytest.fixture
def source(database):
    source = Source(database.url, chunk_rows=10, poll_rows=5)
    yield source
    source.close()


def seq_of(row):
    return row.seq


def seqs(ahead, entry):
    found = []
    while True:
        chunk = ahead.next(entry)
        entry = chunk.after
        if not chunk.records:
            return found, entry
        found += chunk.records


def test_the_rows_are_those_of_the_source_in_its_order(writers, source, database):
    writers.commit(95)
    ahead = Ahead(source, seq_of)
    found, entry = seqs(ahead, Entry())
    assert found == [row[0] for row in database.execute("SELECT seq FROM event_log ORDER BY seq")]
    writers.commit(3)
    assert len(seqs(ahead, entry)[0]) == 3


def test_what_was_read_ahead_is_not_used_for_another_entry(writers, source):
    writers.commit(40)
    ahead = Ahead(source, seq_of)
    first = ahead.next(Entry())
    second = ahead.next(first.after)
    assert ahead.next(first.after).records == second.records
    assert ahead.next(first.after, rows=1).records == second.records[:1]


def test_an_error_of_reading_ahead_is_the_next_calls(writers, source, database):
    writers.commit(40)
    made = []

    def make(row):
        made.append(row)
        if len(made) > 10:
            raise psycopg.OperationalError("gone")
        return row

    ahead = Ahead(source, make)
    first = ahead.next(Entry())
    with pytest.raises(psycopg.OperationalError, match="gone"):
        ahead.next(first.after)
    ahead.close()
