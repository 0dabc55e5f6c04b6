"""The relay as a process, killed at each place where something is half done, stopped, fenced and replaced.

Kills are counted from the log that the fault points write: a test in which nothing was hit proves nothing and fails.
"""

import signal
import threading

import pytest
from confluent_kafka import IsolationLevel, TopicPartition
from confluent_kafka.admin import OffsetSpec

from afluente import kafka as clients
from tests.producers.relay.oracle import Reader, Writers, assert_exactly_once_in_order

CHUNK = ("--chunk-rows", "20")


@pytest.fixture
def writers(database):
    return Writers(database)


@pytest.fixture
def reader(topics):
    topics.create_families()
    reader = Reader(topics)
    yield reader
    reader.close()


def hits(path, action):
    """How often an armed point was passed with that action."""
    return [line for line in path.read_text().splitlines() if line.endswith(action)] if path.exists() else []


# The first two commits are the claim and the first chunk of the window: a kill at the third is in the middle of it. The
# short run has one of them, and test_relay_long strikes at all points.
@pytest.mark.parametrize(
    ("point", "at"),
    [
        pytest.param("relay.after_read", 1, marks=pytest.mark.faults_long),
        pytest.param("relay.after_read", 3, marks=pytest.mark.faults_long),
        pytest.param("relay.after_send", 1, marks=pytest.mark.faults_long),
        pytest.param("relay.after_send", 3, marks=pytest.mark.faults_long),
        pytest.param("relay.before_commit", 3, marks=pytest.mark.faults_long),
        pytest.param("relay.after_commit", 1, marks=pytest.mark.faults_long),
        ("relay.after_commit", 3),
        pytest.param("relay.in_init", 1, marks=pytest.mark.faults_long),
    ],
)
def test_a_relay_killed_at_a_point_leaves_nothing_lost_and_nothing_twice(
    point, at, database, topics, writers, reader, processes, tmp_path
):
    log = tmp_path / "faults"
    writers.commit(100)
    first = processes.start("relay", "run", *CHUNK, env={"AFLUENTE_FAULT": f"{point}:{at}", "AFLUENTE_FAULT_LOG": log})
    assert first.wait() == -signal.SIGKILL
    assert len(hits(log, "KILL")) == 1
    writers.commit(30, writers.organizations[1])
    second = processes.start("relay", "run", *CHUNK)
    reader.wait_for(130)
    assert second.terminate() == 0
    assert_exactly_once_in_order(database, reader.read_to_the_end())


def test_a_second_relay_stands_by_and_takes_over_when_the_first_is_killed(database, topics, writers, reader, processes):
    first = processes.start("relay", "run")
    first.wait_for("relay.ready")
    second = processes.start("relay", "run")
    second.wait_for("relay.standing_by")
    writers.commit(50)
    reader.wait_for(50)
    first.kill()
    second.wait_for("relay.ready", timeout=10)
    writers.commit(50, writers.organizations[1])
    reader.wait_for(100)
    assert second.terminate() == 0
    assert_exactly_once_in_order(database, reader.read_to_the_end())


@pytest.mark.faults_long  # the next one is this and more
def test_a_stopped_relay_is_replaced_and_ends_when_it_wakes(database, topics, writers, reader, processes):
    first = processes.start("relay", "run")
    first.wait_for("relay.ready")
    second = processes.start("relay", "run")
    second.wait_for("relay.standing_by")
    first.signal(signal.SIGSTOP)
    writers.commit(50)
    second.wait_for("relay.ready", timeout=15)
    reader.wait_for(50)
    first.signal(signal.SIGCONT)
    assert first.wait(15) == 3
    assert "was taken over by" in first.log
    writers.commit(50)
    reader.wait_for(100)
    assert second.terminate() == 0
    assert_exactly_once_in_order(database, reader.read_to_the_end())


def test_a_relay_stopped_inside_a_transaction_cannot_commit_it_when_it_wakes(
    database, topics, writers, reader, processes, tmp_path
):
    log = tmp_path / "faults"
    writers.commit(50)
    fault = {"AFLUENTE_FAULT": "relay.before_commit:2:STOP", "AFLUENTE_FAULT_LOG": log}
    first = processes.start("relay", "run", *CHUNK, env=fault)
    first.wait_for("relay.ready")
    second = processes.start("relay", "run", *CHUNK)
    second.wait_for("relay.ready", timeout=15)
    assert len(hits(log, "STOP")) == 1
    reader.wait_for(50)
    first.signal(signal.SIGCONT)
    assert first.wait(15) == 3
    assert "was taken over by" in first.log
    assert second.terminate() == 0
    assert_exactly_once_in_order(database, reader.read_to_the_end())


def test_take_over_ends_the_owner_and_the_owner_started_again_stands_by(database, topics, writers, reader, processes):
    first = processes.start("relay", "run")
    first.wait_for("relay.ready")
    second = processes.start("relay", "run", "--take-over")
    second.wait_for("relay.ready")
    assert first.wait(15) == 3
    again = processes.start("relay", "run")
    again.wait_for("relay.standing_by")
    writers.commit(20)
    reader.wait_for(20)
    assert second.returncode is None
    assert second.terminate() == 0
    again.wait_for("relay.ready", timeout=10)
    assert again.terminate() == 0
    assert_exactly_once_in_order(database, reader.read_to_the_end())


@pytest.mark.faults_long  # the short form: tests/scenarios/test_fenced_without_a_rival.py
def test_a_transaction_timed_out_by_the_broker_is_no_rival(
    database, topics, writers, reader, processes, kafka, tmp_path
):
    """The relay sleeps in a transaction until the broker has ended it: fenced, as by a rival, but its claim stands."""
    log = tmp_path / "faults"
    writers.commit(50)
    fault = {"AFLUENTE_FAULT": "relay.before_commit:2:STOP", "AFLUENTE_FAULT_LOG": log}
    relay = processes.start("relay", "run", *CHUNK, env=fault)
    relay.wait_for("relay.ready")
    _wait_until_decided(kafka, TopicPartition(topics.positions, 0))
    assert len(hits(log, "STOP")) == 1
    relay.signal(signal.SIGCONT)
    lost = relay.wait_for("relay.session_lost")
    assert "_FENCED" in lost["error"] or "fenced" in lost["error"].lower()
    relay.wait_for("relay.ready", count=2)
    reader.wait_for(50)
    assert relay.terminate() == 0
    assert_exactly_once_in_order(database, reader.read_to_the_end())


def test_sigterm_ends_the_relay_and_gives_the_lane_up(database, topics, writers, reader, processes):
    relay = processes.start("relay", "run")
    relay.wait_for("relay.ready")
    assert relay.terminate(timeout=10) == 0
    assert database.execute("SELECT instance FROM afluente.relay_lane") == [(None,)]


def _wait_until_decided(kafka, place):
    """Until the broker has ended the open transaction in `place`: first it is there, then it is not."""
    admin = clients.admin(kafka.settings)

    def end(isolation):
        asked = admin.list_offsets({place: OffsetSpec.latest()}, isolation_level=isolation)
        return asked[place].result(10).offset

    waiting = threading.Event()
    for wanted in (True, False):  # open, then not
        for _ in range(600):
            if (end(IsolationLevel.READ_COMMITTED) < end(IsolationLevel.READ_UNCOMMITTED)) is wanted:
                break
            waiting.wait(0.1)
        else:
            raise AssertionError(f"the transaction was never {'open' if wanted else 'ended'}")
