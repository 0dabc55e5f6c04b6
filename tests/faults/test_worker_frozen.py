"""Processes that stand still and wake up: a machine that swaps, a container that is paused, a stop the world.

Their partitions go to others when the session is over, and what they held must not hold up those: neither a claim nor
the locks of a transaction that nobody ends. Awake again they find that they are too late.
"""

import signal

import pytest

from tests.consumers.runtime.support import effect_table, effects, lag, until
from tests.faults.worker_crew import Crew, Story, runs_in
from tests.faults.worker_members import Caller, StrictCaller, StrictWriter, Writer


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("kind", "protocol"),
    [
        pytest.param(StrictWriter, "consumer", marks=pytest.mark.faults_long),
        pytest.param(Writer, "classic", marks=pytest.mark.faults_long),
        pytest.param(Writer, "consumer", marks=pytest.mark.faults_long),
        pytest.param(Caller, "consumer", marks=pytest.mark.faults_long),
        pytest.param(Caller, "classic", marks=pytest.mark.faults_long),
        pytest.param(StrictCaller, "consumer", marks=pytest.mark.faults_long),
    ],
)
def test_what_a_frozen_process_had_in_hand_is_done_by_others_while_it_stands_still(
    kind, protocol, database, topics, processes, tmp_path
):
    """It stops inside a handler: with a transaction open, or with calls claimed."""
    effect_table(database)
    story = Story(database, topics, 7, workers=[kind])
    crew = Crew(processes, topics, tmp_path, protocol=protocol, workers=[kind], env={"TIMEOUT_S": "3"})
    log = tmp_path / "faults"
    frozen = crew.join(AFLUENTE_FAULT="worker.in_handler:5:STOP", AFLUENTE_FAULT_LOG=log)
    story.emit(60, "ok")
    until(lambda: log.exists() and "STOP" in log.read_text(), 60)
    crew.disturbed[frozen.pid] = 0.0
    second = crew.join()
    story.wait_until_over(60)
    frozen.signal(signal.SIGCONT)
    story.emit(60, "ok")
    story.wait_until_over(60)
    story.check(crew)
    for member in (frozen, second):
        crew.end(member)
    name = kind.name
    assert lag(topics, name, [topics.event("message.received")]) == 0
    assert len(effects(database, name)) == len({(e, t) for e, t, _ in effects(database, name)})
    assert frozen.pid in {run.pid for run in runs_in(crew.runs)}
