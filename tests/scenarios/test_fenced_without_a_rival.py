"""S7: the relay is fenced, and there is no second one: it begins anew by itself, and nothing is twice.

The broker's own time-out takes 10 s and more (`tests/faults/test_relay_kills.py`). What the relay is told of it is what
it is told here, where the id is taken once by somebody who publishes nothing. With a broker of its own: the relay
sleeps until the broker has forgotten it.
"""

import signal
import threading

import pytest
from confluent_kafka import Producer

from afluente import kafka as clients
from afluente import local
from afluente.local import kafka as embedded
from tests.fixtures.kafka import Kafka
from tests.fixtures.processes import Processes
from tests.fixtures.topics import TestTopics
from tests.producers.relay.oracle import Reader, assert_exactly_once_in_order

FORGETFUL = """
transactional.id.expiration.ms=4000
transaction.remove.expired.transaction.cleanup.interval.ms=1000
"""


def test_a_relay_whose_id_was_taken_once_goes_on(database, topics, writers, reader, processes):
    relay = processes.start("relay", "run")
    relay.wait_for("relay.ready")
    writers.commit(5)
    reader.wait_for(5)
    for number in (1, 2):
        taker = Producer(
            {
                "bootstrap.servers": topics.kafka.bootstrap_servers,
                "transactional.id": f"{topics.prefix}relay-1-0",
                "log_level": 0,
            }
        )
        taker.init_transactions(30)
        writers.commit(5, writers.organizations[number])
        relay.wait_for("relay.session_lost", count=number)
        reader.wait_for(5 + 5 * number)
    assert relay.terminate() == 0
    assert_exactly_once_in_order(database, reader.read_to_the_end())


@pytest.mark.faults_long
@pytest.mark.timeout(180)
def test_a_relay_that_sleeps_until_the_broker_has_forgotten_it_goes_on(database, writers, tmp_path, monkeypatch):
    monkeypatch.setattr(embedded, "_PROPERTIES", embedded._PROPERTIES + FORGETFUL)
    broker = local.start_kafka(tmp_path / "kafka")
    try:
        topics = TestTopics(Kafka(broker.bootstrap_servers), "forgetful.")
        topics.create_families()
        reader = Reader(topics)
        processes = Processes(
            tmp_path,
            {
                "DATABASE_URL": database.url,
                "KAFKA_BOOTSTRAP_SERVERS": broker.bootstrap_servers,
                "AFLUENTE_TOPIC_PREFIX": topics.prefix,
                "LOG_FORMAT": "json",
            },
        )
        relay = processes.start("relay", "run")
        relay.wait_for("relay.ready")
        writers.commit(5)
        reader.wait_for(5)
        relay.signal(signal.SIGSTOP)
        waiting = threading.Event()
        while not is_forgotten(topics):
            waiting.wait(0.5)
        relay.signal(signal.SIGCONT)
        writers.commit(5, writers.organizations[1])
        reader.wait_for(10)
        assert len(relay.events("relay.session_lost")) == 1
        assert relay.terminate() == 0
        assert_exactly_once_in_order(database, reader.read_to_the_end())
        reader.close()
    finally:
        broker.kill()


def is_forgotten(topics):
    """The broker puts an empty record over what it knew of a transactional id."""
    states = clients.read_topic(topics.kafka.settings, "__transaction_state", "read_uncommitted")
    return any(record.value() is None and b"relay-1-0" in record.key() for record in states)
