"""Lanes whose processes, supervisor and changing command are killed: nothing lost, nothing twice, order kept."""

import random
import signal
import threading
from contextlib import suppress

import psutil
import pytest

from afluente.local.processes import NotSeen
from tests.producers.relay.oracle import Reader, Writers, assert_exactly_once_in_order


@pytest.fixture
def writers(database):
    return Writers(database, organizations=8)


@pytest.fixture
def reader(topics):
    topics.create_families()
    reader = Reader(topics)
    yield reader
    reader.close()


def lanes_of(relay):
    """The processes of its lanes, by lane."""
    children = [child for child in psutil.Process(relay.pid).children() if "--lane" in child.cmdline()]
    return {int(child.cmdline()[child.cmdline().index("--lane") + 1]): child for child in children}


def test_a_killed_lane_is_started_again_and_a_killed_supervisor_takes_its_lanes_with_it(
    database, topics, writers, reader, processes
):
    relay = processes.start("relay", "run", "--lanes", "2")
    relay.wait_for("relay.ready", count=2, timeout=40)
    for organization in writers.organizations:
        writers.commit(10, organization)
    lanes_of(relay)[1].kill()
    for organization in writers.organizations:
        writers.commit(10, organization)
    relay.wait_for("relay.ready", count=3, timeout=40)
    reader.wait_for(160)
    orphans = list(lanes_of(relay).values())
    assert len(orphans) == 2
    relay.kill()
    _, alive = psutil.wait_procs(orphans, timeout=15)
    assert not alive
    assert_exactly_once_in_order(database, reader.read_to_the_end())


@pytest.mark.faults_long
@pytest.mark.timeout(600)
def test_lanes_change_back_and_forth_while_everything_is_killed(database, topics, writers, reader, processes):
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    chance = random.Random(seed)
    relays = [processes.start("relay", "run", "--chunk-rows", "20") for _ in range(2)]
    relays[0].wait_for("relay.ready", timeout=40)
    storm = threading.Thread(target=writers.storm, args=(6_000,), kwargs={"threads": 4, "seed": seed})
    storm.start()
    killed = 0
    for turn in range(14):
        point = chance.choice(["lanes.begun:1", "lanes.closed:1", "lanes.made:1", "lanes.made:2", None, None])
        fault = {"AFLUENTE_FAULT": point} if point else {}
        command = processes.start("relay", "lanes", str(chance.randint(1, 4)), env=fault)
        victim = chance.randrange(len(relays))
        if chance.random() < 0.5:
            with suppress(psutil.NoSuchProcess, IndexError):
                chance.choice(list(lanes_of(relays[victim]).values())).kill()
                killed += 1
        elif chance.random() < 0.5:
            relays[victim].kill()
            killed += 1
        killed += command.wait(60) == -signal.SIGKILL
        for index, relay in enumerate(relays):
            if relay.returncode is not None:
                relays[index] = processes.start("relay", "run", "--chunk-rows", "20")
        with suppress(NotSeen):
            relays[turn % 2].wait_for("relay.ready", timeout=3)
    storm.join()
    assert killed >= 5
    reader.wait_for(database.execute("SELECT count(*) FROM event_log")[0][0], timeout=90)
    for relay in relays:
        relay.terminate()
    assert_exactly_once_in_order(database, reader.read_to_the_end())
