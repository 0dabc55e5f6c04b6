"""S1: ids are given out in one order and committed in another, and some are never used at all."""

import time

from tests.producers.relay.oracle import assert_exactly_once_in_order, event_id_of
from tests.producers.relay.running import relay_of

SEQUENCE = "pg_get_serial_sequence('event_log', 'seq')::regclass"


def test_the_lower_id_that_is_committed_last_is_not_passed_over(database, topics, writers, reader):
    first = database.connect()
    writers.emit(first, writers.organizations[0])
    with relay_of(topics, database):
        writers.commit(1, writers.organizations[1])
        (second,) = list(reader.wait_for(1))  # the relay has been past both ids
        first.commit()
        reader.wait_for(2)
    ids = [row[0] for row in database.execute("SELECT id FROM event_log ORDER BY seq")]
    assert ids[1] == event_id_of(second), "the story was another one"
    assert_exactly_once_in_order(database, reader.read_to_the_end())


def test_holes_in_the_ids_neither_stop_nor_slow_the_relay(database, topics, writers, reader):
    with relay_of(topics, database):
        writers.commit(1)
        reader.wait_for(1)
        delays = []
        for number in range(5):
            database.execute(f"SELECT count(nextval({SEQUENCE})) FROM generate_series(1, 50000)")
            with database.connect() as conn:
                writers.emit(conn, writers.organizations[1], 20)
                conn.rollback()
            writers.commit(1, writers.organizations[number % 3])
            committed = time.monotonic()
            reader.wait_for(number + 2)
            delays.append(time.monotonic() - committed)
    assert max(delays) < 1.5, delays
    ((top,),) = database.execute("SELECT max(seq) FROM event_log")
    assert top > 250_000
    assert_exactly_once_in_order(database, reader.read_to_the_end())


def test_a_sequence_with_a_cache_loses_nothing(database, topics, writers, reader):
    """A person's ALTER SEQUENCE: each session then has ids of its own in hand, and the lower ones come later. What the
    order between two sessions is worth then is another matter, so each writes for an organization of its own."""
    database.execute("ALTER SEQUENCE event_log_seq_seq CACHE 25")
    with relay_of(topics, database):
        sessions = [database.connect() for _ in range(3)]
        for number in range(30):
            session = sessions[number % 3]
            writers.emit(session, writers.organizations[number % 3])
            session.commit()
            if number % 10 == 9:
                reader.wait_for(number + 1)
    in_order = [row[0] for row in database.execute("SELECT seq FROM event_log ORDER BY tx_id")]
    assert in_order != sorted(in_order), "no id came after a higher one"
    assert_exactly_once_in_order(database, reader.read_to_the_end())
