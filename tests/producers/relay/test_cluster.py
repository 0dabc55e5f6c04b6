"""Reading the position back, and looking for undecided transactions, with other producers' transactions in the way."""

import threading
from datetime import UTC, datetime

import pytest
from confluent_kafka import KafkaException, Producer

from afluente.errors import Unavailable
from producers.relay import cluster as module
from producers.relay.cluster import Cluster
from producers.relay.errors import SessionLost, UndecidedError
from producers.relay.position import DatabaseIdentity, Entry, Identity, KafkaIdentity, Position
from producers.relay.publish import FENCED, Session, code_of

IDENTITY = Identity(DatabaseIdentity("1", 1, 1, "x"), KafkaIdentity("x", {}))
NOW = datetime(2026, 11, 29, tzinfo=UTC)


def nothing():
    pass


@pytest.fixture
def cluster(topics):
    topics.create_families()
    cluster = Cluster(topics.settings, topics.names)
    yield cluster
    cluster.close()


@pytest.fixture
def sessions(topics, cluster):
    """Makes initialised sessions with their own transactional ids."""
    made = []

    def make(name):
        session = Session(topics.settings, topics.names, cluster.facts(), topics.prefix + name, nothing)
        session.init()
        made.append(session)
        return session

    yield make
    for session in made:
        session.discard()


@pytest.fixture
def other(topics):
    """A producer with an open transaction in the lane's own partition of the positions."""
    producer = Producer(
        {"bootstrap.servers": topics.kafka.bootstrap_servers, "transactional.id": f"{topics.prefix}other"}
    )
    producer.init_transactions(30)
    return producer


def position(number):
    return Position(IDENTITY, (Entry(t1=number),), number=number, instance="me", written_at=NOW)


def test_there_is_no_position_before_the_first(cluster):
    assert cluster.read_position(0, "relay-1-0", nothing) is None


def test_the_newest_position_is_read_back_behind_another_producers_open_transaction(cluster, sessions, other, topics):
    """A client that reads committed records is shown an end before the open transaction, and an old position there."""
    lane = sessions("relay-1-0")
    lane.publish((), position(1))
    other.begin_transaction()
    other.produce(topics.positions, b"{}", b"relay-1-7", partition=0)
    assert other.flush(10) == 0
    lane.publish((), position(2))
    lane.publish((), position(3))
    read = []
    thread = threading.Thread(target=lambda: read.append(cluster.read_position(0, "relay-1-0", nothing)))
    thread.start()
    thread.join(1.5)
    assert thread.is_alive(), f"it did not wait for the end, and believed {read}"
    other.abort_transaction(30)
    thread.join(30)
    assert read == [position(3)]


def test_the_position_is_found_however_many_records_of_others_follow_it(cluster, sessions, topics, monkeypatch):
    sessions("relay-1-0").publish((), position(4))
    producer = Producer({"bootstrap.servers": topics.kafka.bootstrap_servers})
    for number in range(700):
        producer.produce(topics.positions, b"{}", f"relay-1-{number}".encode() + b"x", partition=0)
    assert producer.flush(10) == 0
    assert cluster.read_position(0, "relay-1-0", nothing) == position(4)


def test_each_lane_reads_its_own_partition(cluster, sessions):
    sessions("relay-1-0").publish((), position(4))
    assert cluster.read_position(1, "relay-1-1", nothing) is None


def test_an_end_that_is_not_reached_is_an_error_and_not_an_old_position(cluster, sessions, other, topics, monkeypatch):
    monkeypatch.setattr(module, "READ_TIMEOUT_S", 1.0)
    sessions("relay-1-0").publish((), position(1))
    other.begin_transaction()
    other.produce(topics.positions, b"{}", b"relay-1-7", partition=0)
    assert other.flush(10) == 0
    with pytest.raises(Unavailable, match="a transaction in it is open"):
        cluster.read_position(0, "relay-1-0", nothing)
    other.abort_transaction(30)


def test_a_transaction_that_stays_undecided_is_found_and_named(cluster, other, topics, monkeypatch):
    monkeypatch.setattr(module, "UNDECIDED_AFTER_S", 1.0)
    facts = cluster.facts()
    cluster.require_decided(facts.partitions, nothing)
    other.begin_transaction()
    other.produce(topics.family("lead"), b"x", b"k", partition=2)
    assert other.flush(10) == 0
    with pytest.raises(UndecidedError) as found:
        cluster.require_decided(facts.partitions, nothing)
    assert found.value.partitions == ((topics.family("lead"), 2, 0),)
    assert "afluente relay repair" in found.value.hint
    other.abort_transaction(30)
    cluster.require_decided(facts.partitions, nothing)


def test_a_session_that_lost_its_connection_does_not_commit(sessions, cluster):
    session = sessions("relay-1-0")
    session.publish((), position(1))
    session._lost = "as the client's error callback notes it"
    with pytest.raises(SessionLost, match="connection to the broker was lost"):
        session.publish((), position(2))
    assert cluster.read_position(0, "relay-1-0", nothing) == position(1)


def test_a_new_session_ends_the_open_transaction_of_the_one_before(sessions, cluster, topics):
    first = sessions("relay-1-0")
    first.publish((), position(1))
    first._producer.begin_transaction()
    first._producer.produce(topics.positions, position(2).format(), b"relay-1-0", partition=0)
    assert first._producer.flush(10) == 0
    sessions("relay-1-0")
    assert cluster.read_position(0, "relay-1-0", nothing) == position(1)
    with pytest.raises(KafkaException) as fenced:
        first._again(lambda: first._producer.commit_transaction(3))
    assert code_of(fenced.value) in FENCED
