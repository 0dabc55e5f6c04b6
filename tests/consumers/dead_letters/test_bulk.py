"""Many letters at once: one tried first, at a pace, ended in the middle, and one among them that no topic takes."""

import json
import random
import signal
import string
import threading
import time

import pytest
from confluent_kafka import KafkaException, Producer

from consumers import ExternalWorker, Policy, Reject
from consumers.dead_letters import sending
from tests.consumers.dead_letters.test_dlq import command, letters_of
from tests.consumers.runtime.support import create_topics, delivery, states, until
from tests.consumers.runtime.workers import write_effect

COMMAND = ("retry", "--worker", "mended-worker", "--yes", "--reason", "mended", "--format", "json")


class Mended(ExternalWorker):
    """Target "b" is rejected at first; once `is_well` it works, but for a body of "never"."""

    name = "mended-worker"
    event_types = frozenset({"message.received"})
    policy = Policy(concurrency=10)
    is_well = False

    def __init__(self):
        self.runs = []

    async def targets(self, event, conn):
        return ("a", "b")

    async def call(self, delivery, prepared):
        self.runs.append((delivery.event.id, delivery.target, delivery.generation))
        if delivery.target == "b" and (not self.is_well or delivery.payload["body"] == "never"):
            raise Reject("b is broken")

    async def record(self, delivery, result, ctx):
        await write_effect(ctx.connection, delivery)


async def test_the_rest_follows_only_a_probe_that_succeeds(database, topics, running, processes):
    organization, worker = database.organization(), Mended()
    create_topics(topics, "mended-worker")
    probe = (*COMMAND, "--probe", "--probe-timeout", "30")
    async with running(worker) as service:
        rows = await letters_of(service, topics, organization, ["oi", "oi", "oi"])
        [last] = await letters_of(service, topics, organization, ["never"])  # the newest is tried
        worker.is_well = True
        failed = await command(processes, *probe)
        assert failed.returncode == 1, failed.stderr
        result = json.loads(failed.stdout)
        assert (result["count"], result["left"], result["interrupted"]) == (1, 3, False)
        answer = result["probe"]
        assert (answer["id"], answer["outcome"], answer["attempts"]) == (f"mended-worker:{last.id}:b", "failed", 1)
        assert answer["error"] == "Reject: b is broken"
        assert f"trying mended-worker:{last.id}:b" in failed.stderr
        assert len([run for run in worker.runs if run[2] == 1]) == 1  # nobody else's letter was touched
        database.execute("UPDATE event_delivery SET state = 'discarded' WHERE event_id = %s", [last.id])

        done = await command(processes, *probe, "--rate", "2000")
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert (result["count"], result["left"], result["probe"]["outcome"]) == (3, 0, "delivered")
        for event in rows:
            await service.of("worker.delivered", event_id=str(event.id), target="b", attempt=1)
        worker.is_well = False
        [event] = await letters_of(service, topics, organization, ["oi"])
    unknown = await command(processes, *probe[:-1], "0.2")  # the worker does not run
    assert unknown.returncode == 75
    assert json.loads(unknown.stdout)["probe"]["outcome"] == "unknown"
    assert delivery(database, "mended-worker", event.id, "b")["state"] == "waiting"


def test_a_bulk_run_is_ended_between_two_batches_and_goes_on_when_run_again(database, topics, here, bury, processes):
    topics.create(topics.retry("mended-worker", "now"), partitions=1)
    organization = database.organization()
    for _ in range(25):
        bury(organization)
    process = processes.start("dlq", *COMMAND, "--rate", "10")
    until(lambda: states(database, "mended-worker").get("waiting"))
    process.signal(signal.SIGTERM)
    assert process.wait(30) == 130, process.log
    said = process.log
    result = json.loads(said[said.index("{\n") : said.index("\n}") + 2])
    assert (result["interrupted"], result["failed"]) == (True, [])
    assert result["count"] in (10, 20)
    assert result["count"] + result["left"] == 25
    assert states(database, "mended-worker") == {"waiting": result["count"], "dead": result["left"]}
    rest = here(*COMMAND[:-2])
    assert (rest.status, rest.data["count"], rest.data["left"]) == (0, result["left"], 0)
    copies = topics.records(topics.retry("mended-worker", "now"))
    assert len(copies) == len({dict(r.headers())["x-event-id"] for r in copies}) == 25
    audited = database.execute("SELECT entity_id, details ->> 'reason' FROM audit_logs")
    assert len({entity for entity, _ in audited}) == len(audited) == 25


def test_one_that_no_topic_takes_does_not_keep_the_others_dead(database, topics, here, bury):
    topics.create(topics.retry("mended-worker", "now"), partitions=1, config={"max.message.bytes": "20000"})
    organization = database.organization()
    text = "".join(random.Random(7).choices(string.printable, k=60_000))
    fine, large, also = (bury(organization, payload={"text": text[:size]}) for size in (1, 60_000, 2))
    ran = here(*COMMAND[:-2])
    assert ran.status == 5
    assert {*ran.data["ids"]} == {f"mended-worker:{fine}", f"mended-worker:{also}"}
    [failure] = ran.data["failed"]
    assert failure["id"] == f"mended-worker:{large}"
    assert "does not take its record" in failure["error"]
    assert states(database, "mended-worker") == {"waiting": 2, "dead": 1}


def test_a_probe_is_of_one_worker_and_a_missing_topic_is_said(database, topics, here, bury):
    topics.create(topics.relay_dead_letter, partitions=1)
    organization = database.organization()
    bury(organization)
    missing = here("retry", "--all", "--yes", "--reason", "x")
    assert (missing.status, "retry.now does not exist" in missing.words) == (1, True)
    bury(organization, worker="other-worker")
    for arguments, status in ((["--all"], 2), (["--relay", "--all"], 3)):
        assert here("retry", "--probe", *arguments, "--yes", "--reason", "x").status == status
    assert states(database, "mended-worker") == {"dead": 1}


def test_told_to_stop_it_does_not_wait_for_a_broker_that_is_away(monkeypatch):
    monkeypatch.setattr(sending, "_FLUSH_STOPPED_S", 0.2)
    stop = threading.Event()
    stop.set()
    producer = Producer({"bootstrap.servers": "127.0.0.1:1", "log_level": 0})
    began = time.monotonic()
    with pytest.raises(KafkaException, match="1 of the copies were not confirmed"):
        sending._put(producer, [sending.Copy("worker.retry.now", b"k", b"v", ())], stop)
    assert time.monotonic() - began < 5
