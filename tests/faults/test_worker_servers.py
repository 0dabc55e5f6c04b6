"""The broker and Postgres go away under workers and come back: no attempt is used, nothing is lost, SIGTERM is heard.

Servers of this module's own.
"""

import signal
import time

import pytest

from afluente import local
from tests.consumers.runtime.support import MESSAGE, effect_table, produce, row, states
from tests.faults.worker_crew import Crew, Load, Story
from tests.faults.worker_members import Caller, Gated, StrictWriter
from tests.fixtures.kafka import Kafka
from tests.fixtures.postgres import Database, Server, migrate
from tests.fixtures.processes import Processes
from tests.fixtures.topics import TestTopics

pytestmark = pytest.mark.faults_long

DRAIN_S = 25


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    broker = local.start_kafka(tmp_path_factory.mktemp("broker"))
    yield broker
    local.stop_kafka(broker.folder)


@pytest.fixture
def topics(broker):
    topics = TestTopics(Kafka(broker.bootstrap_servers), "own.")
    yield topics
    broker.resume()
    if not broker.alive:
        broker.restart()
    topics.delete()


@pytest.fixture
def processes(tmp_path, broker, database, topics):
    env = {
        "DATABASE_URL": database.url,
        "KAFKA_BOOTSTRAP_SERVERS": broker.bootstrap_servers,
        "AFLUENTE_TOPIC_PREFIX": topics.prefix,
        "LOG_FORMAT": "json",
    }
    processes = Processes(tmp_path, env)
    yield processes
    processes.stop()


@pytest.mark.parametrize("how", ["kill", "pause"])
def test_sigterm_ends_a_worker_whatever_is_away(how, broker, database, topics, processes, tmp_path):
    """200 calls are in flight, and the broker is gone: what is done is recorded, the exit status is 0."""
    effect_table(database)
    topics.create(topics.event("message.received"), *topics.retries("gated-worker"), topics.dead_letter("gated-worker"))
    organization = database.organization()
    gate = tmp_path / "gate"
    crew = Crew(
        processes, topics, tmp_path, workers=[Gated], env={"GATE": gate, "AFLUENTE_DRAIN_S": DRAIN_S, "TIMEOUT_S": "60"}
    )
    member = crew.join()
    payloads = [MESSAGE | {"conversation_id": f"c{n}"} for n in range(200)]
    rows = produce(topics, [row(organization, payload=payload) for payload in payloads])
    member.wait_for("test.calling", count=len(rows))
    getattr(broker, how)()
    member.signal(signal.SIGTERM)
    member.wait_for("process.stopping")
    began = time.monotonic()
    gate.touch()
    assert member.wait(DRAIN_S + 30) == 0, member.tail()
    assert time.monotonic() - began < DRAIN_S + 2  # what a supervisor grants before it kills
    assert states(database, "gated-worker") == {"done": len(rows)}


@pytest.fixture
def server(tmp_path_factory):
    server = local.start_postgres(tmp_path_factory.mktemp("postgres"))
    yield server
    server.remove()


@pytest.mark.timeout(400)
def test_both_servers_restart_under_load_and_no_attempt_is_used(broker, server, topics, tmp_path):
    postgres = Server(server.url)
    with postgres.admin() as admin:
        admin.execute("CREATE DATABASE own")
    migrate(postgres.url_of("own"))
    database = Database(postgres, "own")
    effect_table(database)
    env = {
        "DATABASE_URL": database.url,
        "KAFKA_BOOTSTRAP_SERVERS": broker.bootstrap_servers,
        "AFLUENTE_TOPIC_PREFIX": topics.prefix,
        "LOG_FORMAT": "json",
    }
    processes = Processes(tmp_path, env)
    kinds = (StrictWriter, Caller)
    story = Story(database, topics, 5, workers=kinds)
    crew = Crew(processes, topics, tmp_path, workers=kinds)
    try:
        members = [crew.join(), crew.join()]
        load = Load(story)
        crew.go_on(100)
        for which, how in ((broker, "kill"), (server, "kill"), (broker, "stop"), (server, "stop")):
            getattr(which, how)()
            crew.moments.append(time.time_ns() / 1e6)
            which.restart()
            crew.moments.append(time.time_ns() / 1e6)
            crew.go_on(60, timeout=90)
        load.stop()
        story.wait_until_over(120)
        story.check(crew)
        for member in members:
            crew.end(member)
    finally:
        processes.stop()
