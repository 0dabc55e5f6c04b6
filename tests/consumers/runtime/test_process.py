"""`afluente worker run` as a process: its signals, its exit status, its list."""

import json
import signal

import pytest

from tests.consumers.runtime.support import ROOT, create_topics, effect_table, effects, produce, row, states

ENV = {"PYTHONPATH": ROOT, "AFLUENTE_CLAIM_RENEW_S": "0.5", "AFLUENTE_CLAIM_TAKEOVER_S": "3"}
WORKERS = "tests.consumers.runtime.workers"


@pytest.fixture
def organization(database):
    effect_table(database)
    return database.organization()


def test_sigterm_when_idle_ends_at_once_with_0(organization, topics, processes):
    create_topics(topics, "plain-worker")
    worker = processes.start("worker", "run", f"{WORKERS}:Plain", env=ENV)
    worker.wait_for("worker.ready")
    assert worker.terminate(timeout=10) == 0


def test_sigterm_finishes_what_runs(organization, database, topics, processes, tmp_path):
    create_topics(topics, "patient-worker")
    rows = produce(topics, [row(organization) for _ in range(3)])
    gate = tmp_path / "gate"
    worker = processes.start("worker", "run", f"{WORKERS}:Patient", env=ENV | {"GATE": gate})
    worker.wait_for("test.calling", count=3)
    worker.signal(signal.SIGTERM)
    worker.wait_for("process.stopping")
    gate.touch()
    assert worker.wait(20) == 0
    assert {e for e, *_ in effects(database)} == {r.id for r in rows}
    assert states(database, "patient-worker") == {"done": 3}


@pytest.mark.parametrize("signals", [1, 2])
def test_what_does_not_finish_is_handed_back_without_an_attempt(
    organization, database, topics, processes, tmp_path, signals
):
    """One signal: at the deadline. A second one: now."""
    create_topics(topics, "patient-worker")
    rows = produce(topics, [row(organization) for _ in range(3)])
    gate = tmp_path / "gate"
    env = ENV | {"GATE": gate, "AFLUENTE_DRAIN_S": "1" if signals == 1 else "60"}
    worker = processes.start("worker", "run", f"{WORKERS}:Patient", env=env)
    worker.wait_for("test.calling", count=3)
    worker.signal(signal.SIGTERM)
    if signals == 2:
        worker.wait_for("process.stopping")
        worker.signal(signal.SIGTERM)
    assert worker.wait(20) == 1
    assert worker.events("worker.handed_back")[0]["count"] == 3
    assert effects(database) == []
    assert database.execute("SELECT DISTINCT state, attempts, claimed_by FROM event_delivery") == [("claimed", 0, None)]
    # the next process takes them at once, as the first attempt
    gate.touch()
    worker = processes.start("worker", "run", f"{WORKERS}:Patient", env=env)
    for event in rows:
        worker.wait_for("worker.delivered", event_id=str(event.id), attempt=1)
    assert worker.terminate() == 0


def test_several_workers_share_a_process(organization, database, topics, processes):
    create_topics(topics, "plain-worker", "batch-worker", "caller-worker")
    rows = produce(topics, [row(organization) for _ in range(5)])
    names = [f"{WORKERS}:{name}" for name in ("Plain", "Batch", "Caller")]
    process = processes.start("worker", "run", *names, env=ENV)
    process.wait_for("worker.delivered", count=15)
    assert process.terminate() == 0
    assert len(effects(database)) == 3 * len(rows)


def test_when_one_of_several_cannot_run_all_end(organization, topics, processes):
    create_topics(topics, "plain-worker")
    process = processes.start("worker", "run", f"{WORKERS}:Plain", f"{WORKERS}:Batch", env=ENV)
    assert process.wait(30) == 1
    assert "batch-worker needs topics that do not exist" in process.log


def test_a_stop_is_heard_while_postgres_is_away(organization, topics, processes):
    create_topics(topics, "plain-worker")
    nobody = {"DATABASE_URL": "postgresql://postgres@127.0.0.1:1/nowhere", "AFLUENTE_METRICS": "127.0.0.1:0"}
    process = processes.start("worker", "run", f"{WORKERS}:Plain", env=ENV | nobody)
    process.wait_for("process.metrics")
    assert process.terminate(timeout=15) == 0


def test_a_worker_nobody_knows_and_topics_nobody_made(organization, topics, processes):
    unknown = processes.run("worker", "run", "webhook-dispach-worker", env=ENV)
    assert unknown.returncode == 2
    assert "did you mean webhook-dispatch-worker?" in unknown.stderr
    missing = processes.run("worker", "run", f"{WORKERS}:Plain", env=ENV)
    assert missing.returncode == 1
    assert "needs topics that do not exist" in missing.stderr
    assert "afluente topics apply" in missing.stderr
    assert processes.run("worker", "run", env=ENV).returncode == 2


def test_the_list_names_every_worker_and_what_is_open(organization, database, topics, processes):
    database.execute(
        """INSERT INTO event_delivery
               (event_created_at, worker, event_id, organization_id, event_type, key, state, next_attempt_at)
           VALUES (now(), 'webhook-dispatch-worker', uuidv7(), %s, 'lead.created', 'k', 'waiting', now())""",
        [organization],
    )
    listed = processes.run("worker", "list", "--format", "json")
    assert listed.returncode == 0, listed.stderr
    found = {entry["worker"]: entry for entry in json.loads(listed.stdout)}
    assert found["webhook-dispatch-worker"]["waiting"] == 1
    assert found["webhook-dispatch-worker"]["kind"] == "external"
    assert found["webhook-normalize-worker"]["event_types"] == ["webhook.checkout_due", "webhook.received"]
