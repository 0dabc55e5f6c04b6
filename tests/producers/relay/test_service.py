"""The relay end to end, in this process: exactly once, in causal order, whatever the writers do."""

from tests.producers.relay.oracle import assert_exactly_once_in_order
from tests.producers.relay.running import relay_of


def test_a_thousand_events_of_concurrent_writers_are_published_once_and_in_causal_order(
    database, topics, writers, reader
):
    """Interleaved, out of order, rolled back, with savepoints, and one transaction open throughout."""
    held_organization = writers.add(database.organization("aberta"))
    held = database.connect()
    writers.emit(held, held_organization, 3)
    with relay_of(topics, database):
        writers.storm(1_000, seed=1)
        reader.wait_for(1_000)  # all of them, with the transaction still open
        assert held_organization not in {record.key().decode() for record in reader.records}
        writers.emit(held, held_organization, 2)
        held.commit()
        reader.wait_for(1_005)
    records = reader.read_to_the_end()
    assert len(records) == 1_005
    assert_exactly_once_in_order(database, records)
