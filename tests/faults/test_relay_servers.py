"""The broker and Postgres go away under load and come back; the relay needs no hand. Servers of this module's own."""

import random
import threading

import pytest

from afluente import local
from tests.fixtures.kafka import Kafka
from tests.fixtures.postgres import Database, Server, migrate
from tests.fixtures.processes import Processes
from tests.fixtures.topics import TestTopics
from tests.producers.relay.oracle import Reader, Writers, assert_exactly_once_in_order

# Ten restarts at random moments in the long run, one of each server in the short one.
RESTARTS = [
    pytest.param("kill", 1, id="kill"),
    pytest.param("kill", 5, id="kill-5", marks=pytest.mark.faults_long),
    pytest.param("stop", 5, id="stop-5", marks=pytest.mark.faults_long),
]
EVENTS_EACH = 300


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    broker = local.start_kafka(tmp_path_factory.mktemp("broker"))
    yield broker
    local.stop_kafka(broker.folder)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = local.start_postgres(tmp_path_factory.mktemp("postgres"))
    yield server
    server.remove()


@pytest.fixture
def topics(broker):
    topics = TestTopics(Kafka(broker.bootstrap_servers), "own.")
    topics.create_families()
    yield topics
    topics.delete()


@pytest.fixture
def database(server):
    postgres = Server(server.url)
    with postgres.admin() as admin:
        admin.execute("DROP DATABASE IF EXISTS own WITH (FORCE)")
        admin.execute("CREATE DATABASE own")
    migrate(postgres.url_of("own"))
    database = Database(postgres, "own")
    yield database
    database.close()


@pytest.fixture
def relay(tmp_path, broker, database, topics):
    processes = Processes(
        tmp_path,
        {
            "DATABASE_URL": database.url,
            "KAFKA_BOOTSTRAP_SERVERS": broker.bootstrap_servers,
            "AFLUENTE_TOPIC_PREFIX": topics.prefix,
            "LOG_FORMAT": "json",
        },
    )
    relay = processes.start("relay", "run", "--chunk-rows", "50")
    relay.wait_for("relay.ready")
    yield relay
    processes.stop()


class Storm:
    """Writers in the background. Their transactions may fail while Postgres is away: what is committed counts."""

    def __init__(self, database, seed):
        self.writers = Writers(database)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(seed,))
        self._thread.start()

    def _run(self, seed):
        import psycopg

        round_number = 0
        while not self._stop.is_set():
            round_number += 1
            try:
                self.writers.storm(100, threads=3, seed=f"{seed}-{round_number}")
            except psycopg.OperationalError:
                self._stop.wait(0.2)

    def stop(self):
        self._stop.set()
        self._thread.join()


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("how", "restarts"), RESTARTS)
def test_the_broker_restarts_under_load_and_nothing_is_lost_or_twice(how, restarts, broker, database, topics, relay):
    storm = Storm(database, seed=11)
    for _ in range(restarts):
        published, ready = len(relay.events("relay.published")), len(relay.events("relay.ready"))
        relay.wait_for("relay.published", count=published + 1)
        at_random(restarts)
        getattr(broker, how)()
        local.start_kafka(broker.folder)
        relay.wait_for("relay.ready", count=ready + 1, timeout=60)
    relay.wait_for_total("relay.published", "count", EVENTS_EACH * (restarts + 1), timeout=60)
    storm.stop()
    _check(database, topics, relay)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("how", "restarts"), RESTARTS)
def test_postgres_restarts_under_load_and_nothing_is_lost_or_twice(how, restarts, server, database, topics, relay):
    storm = Storm(database, seed=12)
    for restart in range(restarts):
        relay.wait_for_total("relay.published", "count", EVENTS_EACH * (restart + 1))
        at_random(restarts)
        getattr(server, how)()
        local.start_postgres(server.folder)
        relay.wait_for("relay.ready", count=restart + 2, timeout=60)
    relay.wait_for_total("relay.published", "count", EVENTS_EACH * (restarts + 1), timeout=60)
    storm.stop()
    _check(database, topics, relay)


def at_random(restarts):
    """Some moment later, where there are several to come."""
    threading.Event().wait(random.random() if restarts > 1 else 0)


def test_both_are_away_at_once_and_sigterm_still_ends_the_relay(broker, server, database, topics, relay):
    Writers(database).commit(20)
    relay.wait_for_total("relay.published", "count", 20)
    broker.kill()
    server.kill()
    try:
        relay.wait_for("relay.session_lost")
        assert relay.terminate(timeout=10) == 0
    finally:
        local.start_kafka(broker.folder)
        local.start_postgres(server.folder)


def _check(database, topics, relay):
    count = len(database.execute("SELECT 1 FROM event_log"))
    reader = Reader(topics)
    try:
        reader.wait_for(count)
        assert relay.terminate() == 0
        assert_exactly_once_in_order(database, reader.read_to_the_end())
    finally:
        reader.close()
