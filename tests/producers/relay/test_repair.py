"""Transactions left undecided: found, told from those under way, ended as one, and the relay goes on exactly.

More of the same, and the defect that leaves them, in tests/faults/test_relay_undecided.py.
"""

import json
import threading

import pytest

from afluente import kafka as clients
from afluente import local
from afluente.cli import doctor
from afluente.kafka.transactions import Place
from producers.relay import repair as repairing
from producers.relay.lease import Lease
from producers.relay.repair import State
from tests.fixtures.kafka import Kafka
from tests.producers.relay import hanging


@pytest.fixture(scope="module")
def kafka(tmp_path_factory):
    """A broker of this module's own, which takes records of transactions that nobody coordinates."""
    broker = local.start_kafka(tmp_path_factory.mktemp("broker"))
    kafka = Kafka(broker.bootstrap_servers)
    hanging.take_anything(kafka)
    yield kafka
    broker.kill()


@pytest.fixture
def lost(monkeypatch, topics, database, writers):
    """The places of a relay's transaction that nobody will end."""
    topics.create_families()
    return hanging.lose_transaction(monkeypatch, topics, database, writers)


def repair(topics, **options):
    return repairing.repair(topics.settings, lambda: None, older_than_s=0, **options)


def test_the_command_shows_then_aborts_and_finishes_what_a_crash_cut_short(
    topics, database, writers, lost, processes, tmp_path, monkeypatch
):
    def run(*arguments, **env):
        done = processes.run("relay", "repair", "--older-than", "0", "--format", "json", *arguments, env=env)
        return done.returncode, json.loads(done.stdout or "null"), done.stderr

    assert {item.state for item in repairing.find(topics.settings)} == {State.young}
    status, shown, words = run()
    assert (status, [row["applied"] for row in shown]) == (3, [False] * len(lost))
    assert {(row["outcome"], row["transactional_id"]) for row in shown} == {("abort", f"{topics.prefix}relay-1-0")}
    in_order = [(place.topic, place.partition) for place in [*sorted(lost[:-1]), lost[-1]]]
    assert [(row["topic"], row["partition"]) for row in shown] == in_order, "events first, the position last"
    assert in_order[-1] == (topics.positions, 0)
    assert "afluente relay repair --yes" in words

    monkeypatch.setattr(repairing, "CLEANUP_INTERVAL_S", -60.0)  # as if 20 s had passed
    (finding,) = doctor._transactions(topics.settings)
    assert (finding.state, finding.fix) == (doctor.State.problem, "stop every relay, then: afluente relay repair")
    assert f"{in_order[0][0]}[{in_order[0][1]}]" in finding.found

    passes = tmp_path / "passes"
    status, *_ = run("--yes", AFLUENTE_FAULT="relay.repair.after_marker:1:KILL", AFLUENTE_FAULT_LOG=passes)
    assert (status, passes.read_text().split()[-1]) == (-9, "KILL")
    status, mended, words = run("--yes")
    assert status == 0, words
    assert [(row["topic"], row["partition"], row["applied"]) for row in mended] == [(*p, True) for p in in_order[1:]]
    assert [finding.state for finding in doctor._transactions(topics.settings)] == [doctor.State.ok]
    hanging.assert_the_relay_goes_on(topics, database, writers)


def test_what_was_committed_in_one_partition_is_committed_in_all(topics, database, writers, lost):
    """The broker had written that marker when it crashed. To abort the events would lose them."""
    hanging.end(topics.settings, Place(topics.positions, 0), commit=True)
    assert {(item.commit, item.applied) for item in repair(topics)} == {(True, True)}
    hanging.assert_the_relay_goes_on(topics, database, writers)


def test_nothing_is_ended_while_a_relay_owns_a_lane(topics, database, processes):
    lease = Lease(database.url, f"{topics.prefix}relay-1-0", "somebody")
    assert lease.acquire(threading.Event())
    try:
        refused = processes.run("relay", "repair", "--yes")
        assert refused.returncode == 1
        assert f"{topics.prefix}relay-1-0 is owned by somebody" in refused.stderr
        database.execute("UPDATE afluente.relay_lane SET renewed_at = renewed_at - interval '1 day'")
        with database.connect() as conn:
            assert repairing.living_owners(conn, topics.prefix), "one that is stopped may wake"
            assert not repairing.living_owners(conn, "another.")
    finally:
        lease.release()
    with database.connect() as conn:
        repairing.require_no_owner(conn, topics.prefix)


def test_what_its_coordinator_will_end_is_left_alone_whatever_its_age(topics):
    topics.create_families()
    producer = clients.producer(topics.settings, transactional_id=f"{topics.prefix}relay-1-0")
    producer.init_transactions(10)
    producer.begin_transaction()
    producer.produce(topics.positions, b"{}", b"relay-1-0", partition=0)
    producer.produce(topics.event("lead.created"), b"x", b"k", partition=3)
    assert producer.flush(10) == 0
    found = repair(topics, any_producer=True)
    assert [(item.place, item.state, item.applied) for item in found] == [
        (Place(topics.event("lead.created"), 3), State.under_way, False),
        (Place(topics.positions, 0), State.under_way, False),
    ]
    producer.commit_transaction(10)
    assert repairing.find(topics.settings) == []
    assert len(topics.records(topics.positions)) == 1


def test_another_producers_hanging_transaction_is_ended_only_when_asked_for(topics):
    topics.create_families()
    place = Place(topics.event("lead.created"), 2)
    hanging.hang(topics.settings, f"{topics.prefix}somebody", place)
    assert [(item.state, item.applied) for item in repair(topics)] == [(State.foreign, False)]
    assert [(item.place, item.applied) for item in repair(topics, any_producer=True)] == [(place, True)]
    assert topics.records(place.topic) == []
