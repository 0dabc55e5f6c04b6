"""The requests about transactions, asked of a real broker about a real producer's transaction."""

import pytest

from afluente import kafka as clients
from afluente.errors import Unavailable
from afluente.kafka.transactions import Known, Place, connect
from afluente.settings import KafkaSettings


@pytest.fixture
def producer(topics):
    """With a committed transaction in partitions 0 and 1, and an open one in 0 and 2."""
    topics.create(f"{topics.prefix}t", partitions=3)
    producer = clients.producer(topics.settings, transactional_id=f"{topics.prefix}who", transaction_timeout_ms=50_000)
    producer.init_transactions(20)
    for partitions in ((0, 1), (0, 2)):
        producer.begin_transaction()
        for partition in partitions:
            producer.produce(f"{topics.prefix}t", b"v", b"key", partition=partition)
        assert producer.flush(10) == 0
        if partitions == (0, 1):
            producer.commit_transaction(10)
    return producer


async def test_an_open_transaction_is_described_and_ended_in_one_partition_only(topics, producer):
    places = [Place(f"{topics.prefix}t", number) for number in range(3)]
    async with connect(topics.settings) as transactions:
        assert await transactions.partitions([places[0].topic, f"{topics.prefix}none"]) == {places[0].topic: 3}
        states = {place: found[0] for place, found in (await transactions.producers(places)).items()}
        assert [states[place].start_offset for place in places] == [2, None, 0], "behind the first one's marker"
        (number,) = {state.producer_id for state in states.values()}
        expected = Known(f"{topics.prefix}who", number, "Ongoing", 50_000, frozenset({places[0], places[2]}))
        assert await transactions.known([number]) == {number: expected}
        assert await transactions.known([number], [f"{topics.prefix}who", f"{topics.prefix}nobody"]) == {
            number: expected
        }
        assert await transactions.known([10**9]) == {}
        assert expected.will_end(places[2])
        assert not expected.will_end(places[1])

        await transactions.end(places[2], states[places[2]], commit=False)
        found = {
            place: state.start_offset for place in places for state in (await transactions.producers(places))[place]
        }
        assert found == {places[0]: 2, places[1]: None, places[2]: None}
        held = [batch async for batch in transactions.batches(places[2], 0, keys=True)]
        assert [(b.offset, b.producer_id, b.commit) for b in held] == [(0, number, None), (1, number, False)]
        assert held[0].key == b"key"
        assert [b.commit async for b in transactions.batches(places[0], 0)] == [None, True, None]
        assert await transactions.offset_at(places[0], held[1].max_timestamp + 60_000) == 3
        assert await transactions.offset_at(places[0], 0) == 0
    assert [record.partition() for record in topics.records(places[0].topic)] == [0, 1]
    producer.abort_transaction(10)


async def test_a_commit_marker_shows_the_records(topics, producer):
    place = Place(f"{topics.prefix}t", 2)
    async with connect(topics.settings) as transactions:
        (state,) = (await transactions.producers([place]))[place]
        await transactions.end(place, state, commit=True)
    assert [record.partition() for record in topics.records(place.topic)] == [0, 1, 2]
    producer.abort_transaction(10)


async def test_a_cluster_that_is_away_is_said_so():
    with pytest.raises(Unavailable, match="Unable to bootstrap"):
        async with connect(KafkaSettings(bootstrap_servers="127.0.0.1:1")):
            pass
