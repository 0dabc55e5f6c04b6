"""Fault points: nothing unless armed, exact when armed, and every pass of an armed one on record."""

import signal
import subprocess
import sys

import pytest

from afluente import faults

PROGRAM = """
import os
from afluente import faults
faults.arm_from(os.environ)
for number in range(5):
    print(number, flush=True)
    faults.point("a")
    faults.point("b")
"""


@pytest.fixture(autouse=True)
def _disarmed():
    yield
    faults.disarm()


def run(fault, log):
    return subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"AFLUENTE_FAULT": fault, "AFLUENTE_FAULT_LOG": str(log)},
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_an_unarmed_point_does_nothing():
    faults.point("never.armed")


def test_the_process_is_killed_at_the_nth_pass_and_the_passes_are_on_record(tmp_path):
    done = run("a:3", tmp_path / "log")
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.split() == ["0", "1", "2"]
    passes = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert [(name, number, action) for name, number, _, action in passes] == [
        ("a", "1", "passed"),
        ("a", "2", "passed"),
        ("a", "3", "KILL"),
    ]


def test_a_point_that_only_counts_leaves_the_process_alone(tmp_path):
    done = run("a:0, b:0", tmp_path / "log")
    assert done.returncode == 0
    assert len((tmp_path / "log").read_text().splitlines()) == 10


def test_a_point_may_raise_and_only_once():
    faults.arm("a:2:raise")
    faults.point("a")
    with pytest.raises(faults.FaultInjected, match="a"):
        faults.point("a")
    faults.point("a")


@pytest.mark.parametrize("text", ["a", "a:", "a:x", ":1", "a:1:TERM", "a:-1"])
def test_what_cannot_be_read_is_refused(text):
    with pytest.raises(ValueError, match="is not name:n"):
        faults.arm(text)
