"""S3: what the relay keeps in the database is dropped, made anew or put back while rows are unpublished.

The position is in Kafka, in one transaction with the records, so none of it can make the relay skip a row. A position,
a topic or a sequence that was put back: `tests/producers/relay/test_identity.py`.
"""

import pytest

from producers.relay import lease
from producers.relay.errors import Superseded
from tests.producers.relay.oracle import assert_exactly_once_in_order
from tests.producers.relay.running import relay_of

CHANGES = (
    "DELETE FROM afluente.relay_lane",
    "UPDATE afluente.relay_lane SET instance = 'an older one', renewed_at = now() - interval '1 day'",
    "DELETE FROM event_log_seal",
)


def test_a_mark_that_is_lost_while_the_relay_is_down_loses_no_row(database, topics, writers, reader):
    with relay_of(topics, database):
        writers.commit(10)
        reader.wait_for(10)
    for number, change in enumerate(CHANGES):
        with database.connect(role=None) as conn:  # the rows and the change come together
            writers.emit(conn, writers.organizations[number], 10)
            conn.execute(change)
        with relay_of(topics, database):
            reader.wait_for(10 * number + 20)
    assert_exactly_once_in_order(database, reader.read_to_the_end())


def test_a_running_relay_notices_that_its_mark_is_gone(database, topics, writers, reader, monkeypatch):
    monkeypatch.setattr(lease, "RENEW_EVERY_S", 0.1)

    def run_and_change():
        with relay_of(topics, database) as thread:
            writers.commit(10)
            reader.wait_for(10)
            with database.connect(role=None) as conn:
                writers.emit(conn, writers.organizations[0], 10)
                conn.execute(CHANGES[0])
            thread.join(10)

    with pytest.raises(Superseded, match="a dropped and remade table"):
        run_and_change()
    with relay_of(topics, database):
        writers.commit(10, writers.organizations[1])
        reader.wait_for(30)
    assert_exactly_once_in_order(database, reader.read_to_the_end())
