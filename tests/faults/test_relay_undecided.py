"""Transactions that a broker confirmed and left undecided: in parts, by hand, on 4.2.2; by the defect, on 4.4.0."""

import json
import os
import signal
import threading

import pytest

from afluente import faults, local
from afluente.errors import Refused
from afluente.local.process import Ticket
from producers.relay import repair as repairing
from producers.relay.repair import State
from tests.fixtures.kafka import Kafka
from tests.producers.relay import hanging
from tests.producers.relay.oracle import Writers
from tests.producers.relay.running import relay_of

pytestmark = pytest.mark.faults_long

DEFECTIVE = "4.4.0"
TRIES = 15  # each leaves a transaction undecided in about three of five
COMMITS_BEFORE = 20  # so that the kill is in the middle of the work


@pytest.fixture
def broker(request, tmp_path):
    """A broker of the test's own, of the release that the test is parametrized with."""
    broker = local.start_kafka(tmp_path / "broker", version=getattr(request, "param", None))
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


@pytest.mark.timeout(900)
@pytest.mark.parametrize("broker", [DEFECTIVE], indirect=True)
def test_a_broker_with_the_defect_leaves_a_confirmed_transaction_undecided_and_it_is_said_and_mended(
    monkeypatch, broker, topics, database, writers, processes
):
    topics.create_families()
    storm = Storm(writers)
    try:
        tries = 1
        while not kill_after_a_commit(monkeypatch, broker, topics, database):
            tries += 1
            assert tries <= TRIES, f"{DEFECTIVE} decided its transactions after {TRIES} kills: is the defect gone?"
    finally:
        storm.stop()

    refused = processes.start("relay", "run")
    assert refused.wait(timeout=60) == 1
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
            writers.storm(100, threads=3, seed=f"undecided-{number}")

    def stop(self):
        self._stop.set()
        self._thread.join()
