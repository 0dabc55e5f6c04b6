"""Lanes: how the positions are divided, and a change of their number while relays run and things are killed."""

import json
import signal
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afluente.clock import SystemClock
from afluente.errors import Refused
from producers.relay.cluster import Cluster
from producers.relay.errors import LanesChanged, PositionError
from producers.relay.lanes import divided, read_positions, settle_lanes
from producers.relay.position import Entry, Position, Snapshot, Window, lane_slots, slot_of
from producers.relay.service import Relay
from tests.producers.relay.oracle import assert_exactly_once_in_order
from tests.producers.relay.test_position import IDENTITY, organizations


@st.composite
def layouts(draw):
    """The positions of all lanes of a layout, one entry each."""
    lanes = draw(st.integers(1, 5))
    window = Window(Snapshot(90, 90), 70, 60)
    return [
        Position(
            IDENTITY,
            (
                Entry(
                    Snapshot(50 + lane, 50 + lane), lane, draw(st.sampled_from([None, window])), lane_slots(lane, lanes)
                ),
            ),
            lane=lane,
            lanes=lanes,
            published=draw(st.integers(0, 9)),
        )
        for lane in range(lanes)
    ]


@given(layouts(), st.integers(1, 6), organizations)
def test_a_division_keeps_every_organizations_place_and_all_counts(old, lanes, organization):
    new = divided(old, lanes)

    def place(positions):
        (entry,) = (entry for position in positions for entry in position.entries if entry.covers(organization))
        return entry.s1, entry.t1, entry.window

    assert place(new) == place(old)
    assert sum(position.published for position in new) == sum(position.published for position in old)
    (owner,) = (position for position in new if any(e.covers(organization) for e in position.entries))
    ((first, last),) = lane_slots(owner.lane, lanes)
    assert first <= slot_of(organization) <= last


def test_a_division_of_some_of_the_lanes_is_refused():
    old = Position(IDENTITY, (Entry(slots=lane_slots(1, 2)),), lane=1, lanes=2)
    with pytest.raises(PositionError, match="of 2 lanes, only 1"):
        divided([old], 3)


def change(topics, database, lanes, **options):
    return settle_lanes(
        topics.settings,
        database.url,
        lanes,
        instance="a test",
        clock=SystemClock(),
        heartbeat=lambda: None,
        **options,
    )


def positions(topics):
    cluster = Cluster(topics.settings, topics)
    try:
        return read_positions(cluster, lambda: None)
    finally:
        cluster.close()


def test_relays_go_over_to_other_lanes_under_load(database, topics, writers, reader, processes):
    storm = threading.Thread(target=writers.storm, args=(600,), kwargs={"threads": 3, "seed": 5})
    relay = processes.start("relay", "run", "--chunk-rows", "20")
    relay.wait_for("relay.ready", timeout=30)
    storm.start()
    for lanes in (3, 2):
        done = processes.run("relay", "lanes", lanes, "--format", "json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["lanes"] == lanes
    storm.join()
    reader.wait_for(database.execute("SELECT count(*) FROM event_log")[0][0])
    assert relay.terminate() == 0
    assert_exactly_once_in_order(database, reader.read_to_the_end())
    assert [(p.layout, p.lane, p.lanes) for p in positions(topics)] == [(3, 0, 2), (3, 1, 2)]


@pytest.mark.parametrize(
    "point", [pytest.param("lanes.begun", marks=pytest.mark.faults_long), "lanes.closed", "lanes.made"]
)
def test_a_change_killed_anywhere_is_completed_by_whoever_comes_next(
    point, database, topics, writers, reader, processes, tmp_path
):
    change(topics, database, 2)
    writers.commit(30)
    fault = {"AFLUENTE_FAULT": f"{point}:1", "AFLUENTE_FAULT_LOG": tmp_path / "faults"}
    killed = processes.start("relay", "lanes", "3", env=fault)
    assert killed.wait() == -signal.SIGKILL
    for organization in writers.organizations:
        writers.commit(10, organization)
    relay = processes.start("relay", "run")
    reader.wait_for(70)
    assert relay.terminate() == 0
    assert_exactly_once_in_order(database, reader.read_to_the_end())
    assert [(p.layout, p.lane, p.lanes) for p in positions(topics)] == [(3, 0, 3), (3, 1, 3), (3, 2, 3)]


def test_another_number_is_not_taken_from_under_a_running_relay(database, topics, writers, reader, processes):
    relay = processes.start("relay", "run")
    relay.wait_for("relay.ready", timeout=30)
    with pytest.raises(Refused, match="run 1 lane, not 2") as refused:
        change(topics, database, 2)
    assert "afluente relay lanes 2" in str(refused.value.hint)
    assert relay.terminate() == 0
    assert change(topics, database, 2).lanes == 2
    lane = processes.run("relay", "run", "--lane", "2")
    assert lane.returncode == 1
    assert "there is no lane 2: the relay has 2" in lane.stderr


def test_a_lane_of_a_number_that_is_over_begins_nothing(database, topics):
    """Its supervisor counted 2, and then there were 3: with two of those running, one would stand still unseen."""
    topics.create_families()
    change(topics, database, 3)
    for lane in (0, 1):
        with pytest.raises(LanesChanged) as changed:
            Relay(topics.settings, database.url, lane=lane, lanes=2).run()
        assert changed.value.lanes == 3
    with pytest.raises(LanesChanged):  # not "there is no lane 3": whoever counted counts again
        Relay(topics.settings, database.url, lane=3, lanes=4).run()
