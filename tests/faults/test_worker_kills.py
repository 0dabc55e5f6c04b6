"""Workers killed with SIGKILL at each place where something is half done, frozen, and joined and left by others.

Kills are counted from the log that the fault points write: a test in which nothing was hit proves nothing and fails.
"""

import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.consumers.runtime.support import (
    MESSAGE,
    ROOT,
    create_topics,
    effect_table,
    effects,
    lag,
    organizations_everywhere,
    produce,
    row,
    short_sessions,
    states,
    until,
)

WORKERS = "tests.consumers.runtime.workers"
ENV = {
    "PYTHONPATH": ROOT,
    "AFLUENTE_CLAIM_RENEW_S": "0.5",
    "AFLUENTE_CLAIM_TAKEOVER_S": "3",
    "AFLUENTE_BACKOFF_SCALE": "0.001",
}
# Where each kind dies, one after the other: the point, and at which pass of it.
POINTS = {
    "Plain": [
        ("worker.after_claim", 1),
        ("worker.in_handler", 40),
        ("worker.after_retry_produced", 3),
        ("worker.after_commit", 2),
        ("worker.before_offset_commit", 1),
    ],
    "Batch": [
        ("worker.after_claim", 1),
        ("worker.in_handler", 1),
        ("worker.after_commit", 1),
        ("worker.before_offset_commit", 1),
    ],
    "Caller": [
        ("worker.after_claim", 1),
        ("worker.in_handler", 40),
        ("worker.after_retry_produced", 3),
        ("worker.after_commit", 2),
        ("worker.before_offset_commit", 1),
    ],
}
NAMES = {"Plain": "plain-worker", "Batch": "batch-worker", "Caller": "caller-worker"}


def kills(path):
    """The points at which a process killed itself."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.split()[0] for line in lines if line.endswith("KILL")]


@pytest.mark.timeout(300)
def test_1000_messages_by_3_workers_killed_at_every_point_are_each_handled_once(database, topics, processes, tmp_path):
    organizations = [database.organization(f"o{n}") for n in range(4)]
    effect_table(database)
    create_topics(topics, *NAMES.values())
    short_sessions(topics, *NAMES.values())
    # every tenth fails once; a batch handler knows no attempts, and takes them as they are
    bodies = ["fail 1" if n % 10 == 0 else "oi" for n in range(1000)]
    rows = [row(organizations[n % 4], payload=MESSAGE | {"body": body}) for n, body in enumerate(bodies)]
    produce(topics, rows[:400])
    calls = tmp_path / "calls"

    def live(kind):
        """One worker's life: killed at each of its points, then left alone until it is through."""
        log = tmp_path / f"faults-{kind}"
        for point, at in POINTS[kind]:
            fault = {"AFLUENTE_FAULT": f"{point}:{at}", "AFLUENTE_FAULT_LOG": log, "CALLS_FILE": calls}
            victim = processes.start("worker", "run", f"{WORKERS}:{kind}", env=ENV | fault)
            assert victim.wait(60) == -signal.SIGKILL, victim.log[-3000:]
        last = processes.start("worker", "run", f"{WORKERS}:{kind}", env=ENV | {"CALLS_FILE": calls})
        until(lambda: states(database, NAMES[kind]) == {"done": 1000}, 90)
        until(lambda: lag(topics, NAMES[kind], [topics.event("message.received")]) == 0, 30)
        assert last.terminate() == 0
        return kills(log)

    with ThreadPoolExecutor() as pool:
        lives = {kind: pool.submit(live, kind) for kind in POINTS}
        # more work behind every restart
        for start in range(400, 1000, 100):
            produce(topics, rows[start : start + 100])
        hit = {kind: life.result(240) for kind, life in lives.items()}

    assert hit == {kind: [point for point, _ in points] for kind, points in POINTS.items()}
    wanted = dict.fromkeys([r.id for r in rows], 1)
    for kind, name in NAMES.items():
        assert Counter(e for e, *_ in effects(database, name)) == wanted, kind
    # a kill is nobody's attempt: those that never failed were done at the first, the others at the second
    failing = [r.id for r, body in zip(rows, bodies, strict=True) if body != "oi"]
    for name in ("plain-worker", "caller-worker"):
        attempts = database.execute(
            "SELECT attempts, count(*), bool_and(event_id = ANY (%s)) FROM event_delivery WHERE worker = %s GROUP BY 1",
            [failing, name],
        )
        assert sorted(attempts) == [(1, 900, False), (2, 100, True)]
    # a call is repeated only with its own key, and only where a process died between call and record
    called = Counter(calls.read_text().split())
    assert set(called) == {f"caller-worker:{r.id}:" for r in rows}
    assert database.execute("SELECT count(*) FROM event_delivery WHERE state = 'claimed'") == [(0,)]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("protocol", ["consumer", pytest.param("classic", marks=pytest.mark.faults_long)])
@pytest.mark.faults_long
def test_members_join_and_leave_and_no_call_is_made_twice(database, topics, processes, tmp_path, protocol):
    """Joining and leaving by SIGTERM drains: here not even a call is repeated."""
    organizations = organizations_everywhere(database, 6)
    effect_table(database)
    create_topics(topics, "caller-worker")
    calls = tmp_path / "calls"
    env = ENV | {"CALLS_FILE": calls, "CALL_S": "0.02", "AFLUENTE_GROUP_PROTOCOL": protocol}
    rows = [row(organizations[n % len(organizations)]) for n in range(900)]
    first = processes.start("worker", "run", f"{WORKERS}:Caller", env=env)
    first.wait_for("worker.ready")
    produce(topics, rows[:300])
    first.wait_for("worker.delivered", count=50)
    second = processes.start("worker", "run", f"{WORKERS}:Caller", env=env)
    if protocol == "classic":
        second.wait_for("worker.assigned", timeout=40, partitions=15)  # half of all, of whichever topics
        produce(topics, rows[300:600])
    else:
        second.wait_for("worker.ready", timeout=40)
        produce(topics, rows[300:600])
        second.wait_for("worker.delivered", count=20, timeout=40)  # a share of each topic
    assert second.terminate(timeout=30) == 0
    produce(topics, rows[600:])
    until(lambda: states(database, "caller-worker") == {"done": 900}, 60)
    assert first.terminate(timeout=30) == 0
    assert Counter(e for e, *_ in effects(database)) == dict.fromkeys([r.id for r in rows], 1)
    assert Counter(calls.read_text().split()) == {f"caller-worker:{r.id}:": 1 for r in rows}
    assert lag(topics, "caller-worker", [topics.event("message.received")]) == 0


@pytest.mark.timeout(120)
def test_a_frozen_process_is_taken_over_and_its_late_outcome_refused(database, topics, processes, tmp_path):
    organization = database.organization()
    effect_table(database)
    create_topics(topics, "caller-worker")
    short_sessions(topics, "caller-worker")
    [event] = produce(topics, [row(organization)])
    log, calls = tmp_path / "faults", tmp_path / "calls"
    env = ENV | {"CALLS_FILE": calls}
    fault = {"AFLUENTE_FAULT": "worker.in_handler:1:STOP", "AFLUENTE_FAULT_LOG": log}
    frozen = processes.start("worker", "run", f"{WORKERS}:Caller", env=env | fault)
    until(lambda: log.exists() and "STOP" in log.read_text(), 40)
    second = processes.start("worker", "run", f"{WORKERS}:Caller", env=env)
    taken = second.wait_for("worker.claim_taken_over", timeout=60, event_id=str(event.id))
    second.wait_for("worker.delivered", event_id=str(event.id), attempt=1)
    frozen.signal(signal.SIGCONT)
    frozen.wait_for("worker.superseded", event_id=str(event.id), timeout=40)
    assert taken["process"] == frozen.events("worker.ready")[0]["process"]
    assert effects(database) == [(event.id, "", 1)]
    # at least once, with the same key: the receiver tells the second call from a new one
    assert calls.read_text().split() == [f"caller-worker:{event.id}:"] * 2
