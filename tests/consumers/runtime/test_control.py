"""A worker is paused and resumed: what runs is finished, nothing begins, partitions are kept; who did it is known."""

import asyncio
import json

import pytest

from consumers import ExternalWorker, Policy
from consumers.runtime import control
from tests.consumers.runtime.support import ROOT, create_topics, effects, lag, produce, row, until
from tests.consumers.runtime.workers import RECEIVED, write_effect


class Gated(ExternalWorker):
    """Each call says that it began, and waits for the gate."""

    name = "gated-worker"
    event_types = RECEIVED
    policy = Policy(timeout_s=30)

    def __init__(self):
        self.began = []
        self.gate = asyncio.Event()

    async def call(self, delivery, prepared):
        self.began.append(delivery.event.id)
        await self.gate.wait()

    async def record(self, delivery, result, ctx):
        await write_effect(ctx.connection, delivery)


async def test_what_runs_is_finished_and_nothing_begins_until_it_is_resumed(database, topics, running):
    organization, worker = database.organization(), Gated()
    source = [topics.event("message.received")]

    def ordered(action, **given):
        with database.connect(autocommit=True) as conn:
            return action(conn, "gated-worker", by="ana", **given)

    async with running(worker) as service:
        first = produce(topics, [row(organization)])[0]
        await asyncio.to_thread(until, lambda: worker.began)
        held, changed = ordered(control.pause, reason="the provider is down")
        assert changed
        said = await service.of("worker.paused", timeout=3)
        assert (said["by"], said["reason"]) == ("ana", "the provider is down")
        again, changed = ordered(control.pause, reason="another")
        assert (again, changed) == (held, False)
        partitions = service.service.signs().partitions

        others = produce(topics, [row(organization) for _ in range(5)])
        worker.gate.set()
        await service.of("worker.delivered", event_id=str(first.id))
        # what was done is committed, and the others are in hand
        await asyncio.to_thread(until, lambda: lag(topics, worker.name, source) == len(others))
        await asyncio.to_thread(
            until, lambda: service.service.signs().partitions and len(service.service._core.lanes) == 5
        )
        signs = service.service.signs()
        assert (signs.partitions, signs.paused, signs.ready) == (partitions, held, True)
        assert worker.began == [first.id]

        assert ordered(control.resume) == held
        await service.of("worker.delivered", count=6)
        assert ordered(control.resume) is None
    assert {event for event, *_ in effects(database)} == {first.id, *(event.id for event in others)}
    history = "SELECT paused_by, reason, resumed_by, resumed_at > paused_at FROM worker_control"
    assert database.execute(history) == [("ana", "the provider is down", "ana", True)]


@pytest.mark.usefixtures("effects_table")
def test_a_process_that_starts_while_it_is_paused_begins_nothing(database, topics, processes):
    """And the commands say what they did, and how the worker stands."""

    def run(*arguments):
        done = processes.run("worker", *arguments, "--format", "json", env={"PYTHONPATH": ROOT})
        return done.returncode, json.loads(done.stdout) if done.stdout else done.stderr

    create_topics(topics, "plain-worker")
    spelled = "tests.consumers.runtime.workers:Plain"
    code, paused = run("pause", spelled, "--reason", "a new release")
    assert (code, paused["worker"], paused["changed"]) == (0, "plain-worker", True)
    produce(topics, [row(database.organization()) for _ in range(3)], transactional=True)
    worker = processes.start("worker", "run", spelled, env={"PYTHONPATH": ROOT})
    assert worker.wait_for("worker.paused")["reason"] == "a new release"
    worker.wait_for("worker.ready")

    code, state = run("status", "plain-worker", "--over", "0")
    assert (code, state["state"], state["paused"]["by"]) == (0, "paused", paused["by"])
    assert state["lag"] >= 3
    assert state["lag_s"] > 0
    assert state["oldest_unfinished"]["topic"] == topics.event("message.received")
    assert state["time_to_clear_s"] is None
    assert [process["pid"] for process in state["processes"]] == [worker.pid]
    assert [member["partitions"] for member in state["group"]["members"]] == [
        len(topics.retries("plain-worker")) * 3 + 3
    ]
    assert worker.events("worker.delivered") == []

    code, resumed = run("resume", "plain-worker")
    assert (code, resumed["changed"], resumed["reason"]) == (0, True, "a new release")
    worker.wait_for("worker.delivered", count=3)
    until(lambda: lag(topics, "plain-worker", [topics.event("message.received")]) == 0)
    code, [state] = run("status")[0], [s for s in run("status", "--over", "1")[1] if s["worker"] == "plain-worker"]
    assert (code, state["state"], state["lag"], state["lag_s"], state["time_to_clear_s"]) == (0, "idle", 0, 0.0, 0.0)
    code, error = run("resume", "plane-worker")
    assert (code, "did you mean plain-worker?" in error) == (2, True)
    assert worker.terminate() == 0
