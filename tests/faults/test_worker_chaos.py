"""Members of four workers that join, leave, are killed, stopped and continued at random, under load, with handlers that
fail: every delivery has one effect, its attempts and its delays, and keys keep their order.

The disturbances are of a seed, which is printed; AFLUENTE_TEST_SEED plays it again, as far as two runs can be the same.
"""

import os
import random
import time
from itertools import pairwise
from statistics import median

import pytest

from tests.consumers.runtime.support import effect_table, until
from tests.faults.worker_crew import Crew, Load, Story, runs_in

MEMBERS = 5


def seed_of_this_run():
    seed = int(os.environ.get("AFLUENTE_TEST_SEED") or random.SystemRandom().randrange(10**6))
    print(f"AFLUENTE_TEST_SEED={seed}")
    return seed


def disturb(crew, story, chance, *, kills, seconds=0.0, chunk=40):
    """Strike until there were so many kills and so much time has passed. Handlers run before each strike and after."""
    ends = time.monotonic() + seconds
    while crew.done["kill"] < kills or time.monotonic() < ends:
        before = crew.lines()
        story.emit(chunk)
        crew.go_on(40, before)
        until(lambda: any(member.events("worker.delivered") for member in crew.members))
        working = [member for member in crew.members if member.events("worker.delivered")]
        victim = chance.choice(working)
        match chance.choices(["kill", "freeze", "leave", "fewer"], [10, 3, 2, 1])[0]:
            case "kill":
                crew.kill(victim)
                crew.join()
            case "freeze":
                crew.freeze(victim)
                if chance.random() < 0.5:
                    crew.wait_for_heirs(victim)  # it wakes up to find that others have its partitions
                else:
                    before = crew.lines()
                    story.emit(chunk)
                    crew.go_on(40, before)
                crew.thaw(victim)
            case "leave":
                crew.leave(victim)
                crew.join()
            case "fewer" if len(crew.members) > 3:
                crew.kill(victim)
        while len(crew.members) < MEMBERS and chance.random() < 0.5:
            crew.join()


def chaos(database, topics, processes, folder, *, protocol, **how):
    seed = seed_of_this_run()
    effect_table(database)
    story = Story(database, topics, seed)
    crew = Crew(processes, topics, folder, protocol=protocol)
    for _ in range(MEMBERS):
        crew.join()
    began = time.monotonic()
    disturb(crew, story, random.Random(seed), **how)
    took = time.monotonic() - began
    story.wait_until_over(180)
    calm = story.emit(20, "fail 1")
    story.wait_until_over(60)
    story.check(crew)
    # left alone they are on time again
    assert median(story.lateness(crew, calm)) <= 1000
    print(f"{dict(crew.done)} in {took:.0f} s, {len(story.rows)} events; over after {time.monotonic() - began:.0f} s")
    for member in crew.members:
        crew.end(member)
    return crew.done


@pytest.mark.timeout(300)
def test_members_die_freeze_and_come_and_every_delivery_has_one_effect(database, topics, processes, tmp_path):
    done = chaos(database, topics, processes, tmp_path, protocol="consumer", kills=10)
    assert done["kill"] >= 10


@pytest.mark.faults_long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("protocol", ["consumer", "classic"])
def test_members_die_freeze_and_come_for_minutes(database, topics, processes, tmp_path, protocol):
    done = chaos(database, topics, processes, tmp_path, protocol=protocol, kills=20, seconds=200, chunk=100)
    assert done["kill"] >= 20
    assert done["stop"] > 0


@pytest.mark.faults_long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("protocol", ["consumer", "classic"])
def test_rolling_restarts_leave_no_long_silence(database, topics, processes, tmp_path, protocol):
    """Three members, each replaced in its turn, twenty times in all, under a steady load."""
    effect_table(database)
    story = Story(database, topics, 9)
    crew = Crew(processes, topics, tmp_path, protocol=protocol)
    for _ in range(3):
        crew.join().wait_for("worker.ready", timeout=60)
    load = Load(story)
    for _ in range(20):
        crew.go_on(20)
        crew.leave(crew.members[0])
        crew.join().wait_for("worker.ready", timeout=60)
    load.stop()
    story.wait_until_over(120)
    story.check(crew)
    assert crew.done["repeated calls"] == 0
    moments = sorted(run.ms for run in runs_in(crew.runs))
    assert max(later - earlier for earlier, later in pairwise(moments)) < 10_000
