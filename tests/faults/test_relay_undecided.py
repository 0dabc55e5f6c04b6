"""Transactions that a broker confirmed and left undecided: in parts, by hand, on 4.2.2; by the defect, on 4.4.0."""

import json
import os
import signal
import threading
import uuid

import pytest

from afluente import faults, local
from afluente.errors import Refused
from afluente.local.process import Ticket
from producers.relay import repair as repairing
from producers.relay.repair import State
from tests.fixtures.kafka import Kafka
from tests.fixtures.processes import Processes
from tests.fixtures.topics import TestTopics
from tests.producers.relay import hanging
from tests.producers.relay.oracle import Writers
from tests.producers.relay.running import relay_of

pytestmark = pytest.mark.faults_long

DEFECTIVE = "4.4.0"
TRIES = 12
COORDINATING = 8  # partitions of __transaction_state, of which 0 and 1 come last among a thousand
COMMITS_BEFORE = 20  # so that the kill is in the middle of the work


@pytest.fixture
def broker(tmp_path):
    broker = local.start_kafka(tmp_path / "broker")
    yield broker
    broker.kill()


@pytest.fixture
def kafka(broker):
    return Kafka(broker.bootstrap_servers)


@pytest.fixture
def writers(database):
    return Writers(database)


@pytest.fixture
def lost(monkeypatch, kafka, topics, database, writers):
    hanging.take_anything(kafka)
    topics.create_families()
    return hanging.lose_transaction(monkeypatch, topics, database, writers)


@pytest.mark.parametrize("commit", [True, False], ids=["committed", "aborted"])
def test_one_partition_of_the_events_decides_for_the_rest(commit, topics, database, writers, lost):
    hanging.end(topics.settings, lost[0], commit=commit)
    ended = repairing.repair(topics.settings, lambda: None, older_than_s=0)
    assert {item.commit for item in ended} == {commit}
    assert len(ended) == len(lost) - 1
    hanging.assert_the_relay_goes_on(topics, database, writers)


def test_one_that_was_ended_both_ways_is_left_to_a_person(topics, lost):
    hanging.end(topics.settings, lost[0], commit=False)
    hanging.end(topics.settings, lost[1], commit=True)
    with pytest.raises(Refused, match=r"committed in .* and aborted in"):
        repairing.repair(topics.settings, lambda: None, older_than_s=0)


@pytest.fixture
def brokers(tmp_path):
    """Starts brokers with the defect, one at a time, each of a new cluster."""
    started = []

    def start():
        for broker in started:
            broker.kill()
        started.append(local.start_kafka(tmp_path / f"broker-{len(started)}", version=DEFECTIVE))
        return started[-1]

    yield start
    for broker in started:
        broker.kill()


@pytest.mark.timeout(1200)
def test_a_broker_with_the_defect_leaves_a_confirmed_transaction_undecided_and_it_is_said_and_mended(
    monkeypatch, brokers, database, writers, tmp_path
):
    storm = Storm(writers)
    try:
        topics = next(filter(None, (undecided_topics(monkeypatch, brokers(), database) for _ in range(TRIES))), None)
        assert topics is not None, f"{DEFECTIVE} decided its transactions after {TRIES} kills: is the defect gone?"
    finally:
        storm.stop()

    env = {"DATABASE_URL": database.url, "KAFKA_BOOTSTRAP_SERVERS": topics.kafka.bootstrap_servers}
    processes = Processes(tmp_path, env | {"AFLUENTE_TOPIC_PREFIX": topics.prefix, "LOG_FORMAT": "json"})
    refused = processes.start("relay", "run")
    try:
        assert refused.wait(timeout=60) == 1
    finally:
        processes.stop()
    assert "undecided transactions: " in refused.log
    assert "afluente relay repair" in refused.log

    found = processes.run("relay", "repair", "--format", "json")
    assert found.returncode == 3, found.stderr
    rows = json.loads(found.stdout)
    assert {row["state"] for row in rows} == {"hanging"}
    assert {row["transactional_id"] for row in rows} == {f"{topics.prefix}relay-1-0"}
    mended = processes.run("relay", "repair", "--yes", "--format", "json")
    assert mended.returncode == 0, mended.stderr
    assert [row["applied"] for row in json.loads(mended.stdout)] == [True] * len(rows)
    assert processes.run("relay", "repair").returncode == 0
    hanging.assert_the_relay_goes_on(topics, database, writers)


def undecided_topics(monkeypatch, broker, database):
    """The topics of a new cluster, if a kill left a transaction undecided there; else None.

    It is a race at the restart, and here the side that we want to see win is given the time for it. The broker hears
    that all its partitions are without a leader, and goes through them in the order of a hash table. Until it comes to
    the one in which it keeps the transaction, it can note there that the transaction is complete, having skipped the
    markers because nobody leads the others. So that one is late in the order, and there are many partitions before it.
    """
    while True:
        topics = TestTopics(Kafka(broker.bootstrap_servers), f"undecided-{uuid.uuid4().hex[:6]}.")
        if java_hash(f"{topics.prefix}relay-1-0") % COORDINATING == 0:
            break
    topics.create_families()
    topics.create(f"{topics.prefix}many", partitions=700)
    return topics if kill_after_a_commit(monkeypatch, broker, topics, database) else None


def java_hash(text):
    """The absolute value of Java's String.hashCode, by which Kafka picks the coordinating partition."""
    number = 0
    for character in text:
        number = (31 * number + ord(character)) & 0xFFFFFFFF
    return abs(number if number < 1 << 31 else number - (1 << 32))


def kill_after_a_commit(monkeypatch, broker, topics, database):
    """Whether a kill of the broker, in the middle of a relay's work, left a transaction that nobody will end."""
    pid = Ticket.load(broker.folder / "ticket.json").pid
    commits = iter(range(1, 10**6))
    killed, claimed_again = threading.Event(), threading.Event()
    point = faults.point

    def strike(name):
        point(name)
        if name != "relay.after_commit":
            return
        if killed.is_set():
            claimed_again.set()
        elif next(commits) == COMMITS_BEFORE:
            os.kill(pid, signal.SIGKILL)
            killed.set()

    with monkeypatch.context() as patch:
        patch.setattr(faults, "point", strike)
        with relay_of(topics, database, chunk_rows=50):
            assert killed.wait(60)
            broker.kill()  # returns once it is dead
            local.start_kafka(broker.folder)
            for _ in range(600):
                if claimed_again.wait(0.1):
                    return False  # all was decided, or its new session would not have committed
                found = repairing.find(topics.settings, older_than_s=0)
                if any(item.state is State.hanging for item in found):
                    return True
    raise AssertionError("the relay neither goes on nor is anything undecided")


class Storm:
    """Writers in the background, until stopped."""

    def __init__(self, writers):
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(writers,))
        self._thread.start()

    def _run(self, writers):
        number = 0
        while not self._stop.is_set():
            number += 1
            writers.storm(100, threads=2, seed=f"undecided-{number}")

    def stop(self):
        self._stop.set()
        self._thread.join()
