"""A worker is paused and resumed: what runs is finished, nothing begins, partitions are kept; who did it is known."""

import asyncio
import json
from datetime import timedelta

import pytest
from confluent_kafka import TopicPartition
from typer.testing import CliRunner

import schemas
from afluente import kafka as clients
from afluente.cli import doctor_worker
from afluente.cli.worker import app
from consumers import ExternalWorker, Policy, Snooze
from consumers.errors import UnknownWorker
from consumers.runtime import control, status
from tests.consumers.runtime.support import MESSAGE, ROOT, create_topics, delivery, effects, lag, produce, row, until
from tests.consumers.runtime.workers import RECEIVED, write_effect


class Gated(ExternalWorker):
    """Each call says that it began, and waits for the gate; one that is asked to wants to come back later."""

    name = "gated-worker"
    event_types = RECEIVED
    policy = Policy(timeout_s=30)

    def __init__(self):
        self.began = []
        self.gate = asyncio.Event()

    async def call(self, delivery, prepared):
        if delivery.payload["body"] == "later" and not self.began:
            raise Snooze(timedelta(hours=3))
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
        core = service.service._core
        later = produce(topics, [row(organization, payload=MESSAGE | {"body": "later"})])[0]
        await service.of("worker.snoozed")
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
        await asyncio.to_thread(until, lambda: len(core.lanes) == 5)
        # what waits in Postgres stays there, though it is due: in a topic it would expire
        database.execute("UPDATE event_delivery SET next_attempt_at = now() WHERE event_id = %s", [later.id])
        core.keep_work.set()
        await asyncio.to_thread(until, lambda: not core.keep_work.is_set())
        assert delivery(database, worker.name, later.id)["kept"]
        signs = service.service.signs()
        assert (signs.partitions, signs.paused, signs.ready) == (partitions, held, True)
        assert worker.began == [first.id]

        assert ordered(control.resume) == held
        await service.of("worker.delivered", count=7)
        assert ordered(control.resume) is None
    assert {event for event, *_ in effects(database)} == {later.id, first.id, *(event.id for event in others)}
    history = "SELECT paused_by, reason, resumed_by, resumed_at > paused_at FROM worker_control"
    assert database.execute(history) == [("ana", "the provider is down", "ana", True)]


@pytest.fixture
def command(processes):
    """`afluente worker ...` in this process: each costs a second as one of its own."""

    def run(*arguments):
        """(exit status, what its JSON says, or else what it said)."""
        done = CliRunner().invoke(app, [*arguments, "--format", "json"], env=processes.env)
        if isinstance(done.exception, UnknownWorker):
            return done.exception.exit_status, str(done.exception)
        return done.exit_code, json.loads(done.stdout)

    return run


@pytest.mark.usefixtures("effects_table")
def test_a_process_that_starts_while_it_is_paused_begins_nothing(database, topics, processes, command):
    """And the commands say what they did, and how the worker stands."""
    create_topics(topics, "plain-worker")
    spelled = "tests.consumers.runtime.workers:Plain"
    code, paused = command("pause", spelled, "--reason", "a new release")
    assert (code, paused["worker"], paused["changed"]) == (0, "plain-worker", True)
    produce(topics, [row(database.organization()) for _ in range(3)], transactional=True)
    worker = processes.start("worker", "run", spelled, env={"PYTHONPATH": ROOT})
    assert worker.wait_for("worker.paused")["reason"] == "a new release"
    worker.wait_for("worker.ready")

    code, state = command("status", "plain-worker", "--over", "0")
    assert (code, state["state"], state["paused"]["by"]) == (0, "paused", paused["by"])
    assert state["lag"] >= 3
    assert state["lag_s"] > 0
    assert state["oldest_unfinished"]["topic"] == topics.event("message.received")
    assert state["time_to_clear_s"] is None
    assert [process["pid"] for process in state["processes"]] == [worker.pid]
    partitions = 3 * len([topics.event("message.received"), *topics.retries("plain-worker")])
    assert [member["partitions"] for member in state["group"]["members"]] == [partitions]
    listed = {each["worker"]: each for each in command("list")[1]}
    assert listed["plain-worker"]["paused"]["reason"] == "a new release"
    assert listed["webhook-dispatch-worker"]["paused"] is None
    [found] = doctor_worker.examine(processes.env)
    assert (found.check, found.fix) == ("worker.paused", "afluente worker resume plain-worker")
    assert found.found.endswith(": a new release")
    assert worker.events("worker.delivered") == []

    code, resumed = command("resume", "plain-worker")
    assert (code, resumed["changed"], resumed["reason"]) == (0, True, "a new release")
    worker.wait_for("worker.delivered", count=3)
    until(lambda: lag(topics, "plain-worker", [topics.event("message.received")]) == 0)
    [state] = [each for each in command("status", "--over", "0.5")[1] if each["worker"] == "plain-worker"]
    assert (state["state"], state["lag"], state["lag_s"], state["time_to_clear_s"]) == ("idle", 0, 0.0, 0.0)
    assert (state["partitions"], state["rate_per_s"]) == ([], 0.0)
    code, error = command("resume", "plane-worker")
    assert (code, "did you mean plain-worker?" in error) == (2, True)
    assert worker.terminate() == 0


def test_the_time_to_clear_is_that_of_the_net_rate(database, topics):
    """Looked at twice: of what was finished in between, and what came besides."""
    create_topics(topics, "plain-worker")
    organization = database.organization()
    source = topics.event("message.received")
    produce(topics, [row(organization) for _ in range(10)])
    reader = clients.consumer(topics.settings, "plain-worker")
    partition = schemas.topics.partition_of(organization, 3)

    def work(finished, came):
        reader.commit(offsets=[TopicPartition(source, partition, finished)], asynchronous=False)
        produce(topics, [row(organization) for _ in range(came)])

    def look(finished, came):
        with database.connect() as conn:
            [state] = status.look(
                topics.settings, conn, {"plain-worker": RECEIVED}, over_s=1.0, wait=lambda _: work(finished, came)
            )
        # as if it had been one second
        return state.lag, round(state.rate_per_s * state.rate_over_s), round(state.net_per_s * state.rate_over_s), state

    assert look(0, 0)[:3] == (10, 0, 0)
    lagging = look(6, 2)
    assert lagging[:3] == (6, 6, 4)
    state = lagging[3]
    assert state.time_to_clear_s == pytest.approx(6 / 4 * state.rate_over_s, rel=0.01)
    assert state.words == "not running"
    losing = look(7, 9)
    assert losing[:3] == (14, 1, -8)
    assert losing[3].time_to_clear_s is None
    # what is parked is behind the committed offset, and not finished
    database.execute(
        """INSERT INTO worker_parked (worker, topic, partition, organization_id, from_offset, passed_over, process)
           VALUES ('plain-worker', %s, %s, %s, 3, 5, uuidv7())""",
        [source, partition, organization],
    )
    with database.connect() as conn:
        [state] = status.look(topics.settings, conn, {"plain-worker": RECEIVED}, over_s=0)
    assert (state.lag, state.parked.organizations, state.parked.records) == (19, 1, 5)
    assert state.lag_s is not None
    reader.close()
