"""Dead letters by the real commands, while the worker runs: listed, shown, given back to who failed, discarded."""

import asyncio
import json
import signal
from uuid import uuid4

import orjson
import pytest

import schemas
from afluente import kafka as clients
from consumers import ExternalWorker, Policy, Reject
from tests.consumers.runtime.support import (
    MESSAGE,
    create_topics,
    delivery,
    effects,
    produce,
    produce_raw,
    row,
    states,
    until,
)
from tests.consumers.runtime.workers import write_effect


class Mended(ExternalWorker):
    """Two targets. "b" is rejected in a delivery's first life and works in the next, unless the body is "never"."""

    name = "mended-worker"
    event_types = frozenset({"message.received"})
    policy = Policy(concurrency=10)

    def __init__(self):
        self.runs = []

    async def targets(self, event, conn):
        return ("a", "b")

    async def call(self, delivery, prepared):
        self.runs.append((delivery.event.id, delivery.target, delivery.generation, delivery.attempt))
        if delivery.target == "b" and (delivery.generation == 0 or delivery.payload["body"] == "never"):
            raise Reject("b is broken")

    async def record(self, delivery, result, ctx):
        await write_effect(ctx.connection, delivery)


class Other(Mended):
    """Takes the same events; nothing that is done to the first one's letters may reach it."""

    name = "other-worker"


def dlq(processes, *arguments, env=None):
    return processes.run("dlq", *arguments, env=env)


@pytest.fixture
def organization(database):
    return database.organization()


@pytest.fixture
def worker_topics(topics):
    create_topics(topics, "mended-worker", "other-worker")
    topics.create(topics.relay_dead_letter, partitions=1)


async def letters_of(worker, topics, organization, bodies):
    """Events of which target b is dead, when this returns."""
    rows = produce(topics, [row(organization, payload=MESSAGE | {"body": body}) for body in bodies])
    for event in rows:
        await worker.of("worker.dead", event_id=str(event.id), target="b")
        await worker.of("worker.delivered", event_id=str(event.id), target="a")
    return rows


async def command(processes, *arguments, env=None):
    return await asyncio.to_thread(dlq, processes, *arguments, env=env)


async def test_a_retry_reaches_only_the_worker_and_target_that_failed(
    database, topics, organization, worker_topics, running, processes
):
    mended, other = Mended(), Other()
    async with running(mended) as worker, running(other) as other_worker:
        rows = await letters_of(worker, topics, organization, ["oi", "oi", "never"])
        for event in rows:
            await other_worker.of("worker.dead", event_id=str(event.id), target="b")
        before = len(other.runs)
        listed = await command(processes, "list", "--worker", "mended-worker", "--format", "json")
        assert listed.returncode == 0, listed.stderr
        found = json.loads(listed.stdout)
        assert {entry["id"] for entry in found} == {f"mended-worker:{r.id}:b" for r in rows}
        assert found[0]["error"] == "b is broken"
        shown = (await command(processes, "show", found[0]["id"])).stdout
        assert "\n  x-worker " in shown
        assert orjson.loads(shown.partition("\nevent\n")[2])["id"] == found[0]["event_id"]
        assert found[0]["origin"]["topic"] == topics.event("message.received")
        arguments = ["retry", "--worker", "mended-worker", "--error", "broken", "--format", "json"]

        asked = await command(processes, *arguments)
        assert (asked.returncode, asked.stdout) == (2, "")
        assert "retry 3 dead letters of mended-worker in 1 organization?" in asked.stderr
        dry = await command(processes, *arguments, "--dry-run")
        assert dry.returncode == 0
        assert json.loads(dry.stdout)["applied"] is False
        assert states(database, "mended-worker") == {"done": 3, "dead": 3}

        real = await command(processes, *arguments, "--yes", "--reason", "b is back")
        assert real.returncode == 0, real.stderr
        result = json.loads(real.stdout)
        assert (result["applied"], result["count"], result["failed"]) == (True, 3, [])
        for event in rows[:2]:
            await worker.of("worker.delivered", event_id=str(event.id), target="b", attempt=1)
        await worker.of("worker.dead", event_id=str(rows[2].id), target="b", count=2)
    assert len(other.runs) == before
    assert [run for run in mended.runs if run[2] == 1] != []
    assert sorted(run for run in mended.runs if run[2] == 1) == sorted((r.id, "b", 1, 1) for r in rows)
    for event in rows:
        assert delivery(database, "mended-worker", event.id, "a")["generation"] == 0
        assert delivery(database, "mended-worker", event.id, "b")["generation"] == 1
    assert delivery(database, "mended-worker", rows[2].id, "b")["state"] == "dead"
    # the event's own topic was not written to, and every action says who and why
    assert len(topics.records(topics.event("message.received"))) == 3
    copies = topics.records(topics.retry("mended-worker", "now"))
    assert {dict(r.headers())["x-generation"] for r in copies} == {b"1"}
    assert {dict(r.headers())["x-origin-topic"].decode() for r in copies} == {topics.event("message.received")}
    audited = database.execute(
        "SELECT entity_id, actor_id, details FROM audit_logs WHERE action = 'dead_letter.reprocessed'"
    )
    assert {entity_id for entity_id, *_ in audited} == {str(r.id) for r in rows}
    assert all(actor for _, actor, _ in audited)
    assert {details["reason"] for *_, details in audited} == {"b is back"}
    nothing = await command(processes, "retry", "--worker", "no-such-worker", "--yes", "--reason", "x")
    assert nothing.returncode == 3


async def test_a_kill_between_copy_and_close_loses_nothing_and_doubles_nothing(
    database,
    topics,
    organization,
    worker_topics,
    running,
    processes,
    tmp_path,
):
    mended, log = Mended(), tmp_path / "faults"
    async with running(mended) as worker:
        [event] = await letters_of(worker, topics, organization, ["oi"])
        arguments = ["retry", f"mended-worker:{event.id}:b", "--yes", "--reason", "again", "--format", "json"]
        fault = {"AFLUENTE_FAULT": "dlq.after_copy:1", "AFLUENTE_FAULT_LOG": log}
        killed = await command(processes, *arguments, env=fault)
        assert killed.returncode == -signal.SIGKILL
        assert log.read_text().count("KILL") == 1
        # the copy of the life that never began is in the topic; the letter is still dead, and can be retried
        assert len(topics.records(topics.retry("mended-worker", "now"))) == 1
        again = await command(processes, *arguments)
        assert json.loads(again.stdout)["count"] == 1, again.stderr
        await worker.of("worker.delivered", event_id=str(event.id), target="b")
        gone = await command(processes, *arguments)
        assert gone.returncode == 3
    assert [run for run in mended.runs if run[1] == "b"] == [(event.id, "b", 0, 1), (event.id, "b", 1, 1)]
    assert sorted(target for _, target, _ in effects(database)) == ["a", "b"]


async def test_a_letter_whose_record_expired_comes_from_event_log_or_says_that_it_cannot(
    database, topics, organization, worker_topics, running, processes
):
    database.execute(
        "SELECT emit_event_for(%s, 'message.received', 'message', uuidv7(), %s::jsonb)",
        [organization, json.dumps(MESSAGE)],
        role="afluente_worker",
    )
    columns = "seq, id, organization_id, event_type, entity_kind, entity_id, payload::text, metadata::text, created_at"
    [(*found, payload, metadata, created_at)] = database.execute(f"SELECT {columns} FROM event_log")
    seq, event_id, organization_id, event_type, kind, entity_id = found
    logged = schemas.Row(
        seq, event_id, organization_id, event_type, kind, entity_id, payload.encode(), metadata.encode(), created_at
    )
    async with running(Mended()) as worker:
        produce(topics, [logged])
        await worker.of("worker.dead", event_id=str(logged.id), target="b")
        [direct] = await letters_of(worker, topics, organization, ["oi"])
        dead = "SELECT count(*) FROM event_delivery WHERE state = 'dead' AND dead_offset IS NOT NULL"
        await asyncio.to_thread(until, lambda: database.execute(dead) == [(2,)])
        # as if the dead-letter topic had let them go
        database.execute("UPDATE event_delivery SET dead_offset = dead_offset + 1000000 WHERE state = 'dead'")
        arguments = ["--worker", "mended-worker", "--yes", "--reason", "again", "--format", "json"]
        done = await command(processes, "retry", *arguments)
        assert done.returncode == 5, done.stderr
        result = json.loads(done.stdout)
        assert result["ids"] == [f"mended-worker:{logged.id}:b"]
        assert result["failed"] == [
            {"id": f"mended-worker:{direct.id}:b", "error": "its record is neither in Kafka nor in event_log"}
        ]
        await worker.of("worker.delivered", event_id=str(logged.id), target="b")
    assert delivery(database, "mended-worker", direct.id, "b")["state"] == "dead"


async def test_a_discarded_letter_is_closed_for_good(database, topics, organization, worker_topics, running, processes):
    mended = Mended()
    async with running(mended) as worker:
        [event] = await letters_of(worker, topics, organization, ["oi"])
        id = f"mended-worker:{event.id}:b"
        shown = await command(processes, "show", str(event.id), "--format", "json")
        assert json.loads(shown.stdout)["event"]["payload"]["body"] == "oi", shown.stderr
        done = await command(processes, "discard", id, "--yes", "--reason", "a test", "--format", "json")
        assert json.loads(done.stdout)["count"] == 1, done.stderr
        produce(topics, [event])  # a replay does not bring it back
        [last] = await letters_of(worker, topics, organization, ["oi"])
        listed = await command(processes, "list", "--format", "json")
        assert [entry["id"] for entry in json.loads(listed.stdout)] == [f"mended-worker:{last.id}:b"]
    assert delivery(database, "mended-worker", event.id, "b")["state"] == "discarded"
    assert [run[1:] for run in mended.runs if run[0] == event.id and run[1] == "b"] == [("b", 0, 1)]
    assert database.execute("SELECT action FROM audit_logs") == [("dead_letter.discarded",)]


async def test_bytes_that_are_no_event_are_listed_shown_retried_and_discarded(
    database, topics, organization, worker_topics, running, processes
):
    async with running(Mended()) as worker:
        producer = clients.producer(topics.settings)
        for value in (b"one", b"two"):
            produce_raw(producer, topics.event("message.received"), value)
        producer.flush(30)
        await worker.of("worker.dead", count=2)
        listed = await command(processes, "list", "--format", "json")
        one, two = sorted(json.loads(listed.stdout), key=lambda entry: entry["origin"]["offset"])
        assert {entry["kind"] for entry in (one, two)} == {"undecodable"}
        shown = [
            json.loads((await command(processes, "show", entry["id"], "--format", "json")).stdout)["value_hex"]
            for entry in (one, two)
        ]
        assert sorted(shown) == [b"one".hex(), b"two".hex()]
        retried = await command(processes, "retry", one["id"], "--yes", "--reason", "mended", "--format", "json")
        assert json.loads(retried.stdout)["ids"] == [one["id"]], retried.stderr
        await worker.of("worker.dead", count=3)  # still no event, and a letter again, of the retry topic
        discarded = await command(processes, "discard", two["id"], "--yes", "--reason", "junk", "--format", "json")
        assert json.loads(discarded.stdout)["ids"] == [two["id"]]
    assert sorted(database.execute("SELECT state, count(*) FROM undecodable_record GROUP BY state")) == [
        ("dead", 1),
        ("discarded", 1),
        ("reprocessed", 1),
    ]


def test_what_is_not_the_relays_on_its_dead_letter_topic_is_said_to_be_that(topics, worker_topics, here):
    strangers = (b"{", b"[]", b"\xff", b"", None, b"[" * 100_000)
    producer = clients.producer(topics.settings)
    for value in strangers:
        produce_raw(producer, topics.relay_dead_letter, value)
    producer.flush(30)
    listed = here("list", "--relay")
    assert listed.status == 0, listed.words
    assert [letter["error_class"] for letter in listed.data] == ["Unreadable"] * len(strangers)


def test_rows_the_relay_could_not_publish_are_listed(topics, organization, worker_topics, here):
    producer = clients.producer(topics.settings)
    about = {"reason": "payload.x: is no number", "error_class": "EncodeError", "event_id": str(organization), "seq": 7}
    about |= {"created_at": "2026-11-29T10:00:00Z", "organization_id": str(organization), "event_type": "lead.created"}
    produce_raw(producer, topics.relay_dead_letter, orjson.dumps(about | {"row": None, "reference": None}))
    producer.flush(30)
    listed = here("list", "--relay")
    assert listed.status == 0, listed.words
    [letter] = listed.data
    assert (letter["kind"], letter["error"]) == ("relay", "payload.x: is no number")
    text = here("list", "--relay", format="text")
    assert "EncodeError: payload.x: is no number" in text.data


def test_wrong_usage_is_said_and_nothing_is_done(here):
    for arguments, says in (
        (["retry", "--yes"], "say which"),
        (["retry", "x", "--worker", "y-worker"], "not both"),
        (["retry", "not-an-id", "--yes"], "is not an id"),
        (["list", "--since", "soon"], "is no time"),
        (["list", "--since", "999999d"], "no time that a calendar has"),
        (["list", "--since", "0001-01-01T00:00+14:00"], "no time that a calendar has"),
    ):
        ran = here(*arguments)
        assert ran.status == 2
        assert says in ran.words


def test_of_an_organization_by_its_name_and_of_the_relay_beside(database, topics, worker_topics, processes, here):
    organization = database.organization("Loja Azul")
    dead = """
        INSERT INTO event_delivery (event_created_at, worker, event_id, target, organization_id, event_type, key, state,
                                    error_class, last_error, finished_at)
        VALUES (now(), 'mended-worker', %s, %s, %s, 'x.y', '', 'dead', 'Reject', 'no', now())
    """
    whole, targeted = uuid4(), uuid4()
    database.execute(dead, (whole, "", organization))
    database.execute(dead, (targeted, "b", organization))
    database.organization("Other")
    listed = here("list", "--org", "Loja Azul")
    ids = {f"mended-worker:{whole}", f"mended-worker:{targeted}:b"}
    assert {letter["id"] for letter in listed.data} == ids
    assert here("list", "--org", "Other").status == 3
    nobody = here("list", "--org", "Nobody")
    assert (nobody.status, "no organization is called" in nobody.words) == (3, True)
    # a worker of somebody's own: what it takes is what it told the database
    database.execute("INSERT INTO worker_event_types (worker, event_type) VALUES ('mended-worker', 'x.y')")
    workers = {line["worker"]: line for line in json.loads(processes.run("worker", "list", "--format", "json").stdout)}
    assert (workers["mended-worker"]["event_types"], workers["mended-worker"]["dead"]) == (["x.y"], 2)
    # an id with and without the empty target
    for id in (f"mended-worker:{whole}", f"mended-worker:{whole}:"):
        assert here("retry", id, "--dry-run").data["count"] == 1
    assert "of the relay" not in here("list").words
    producer = clients.producer(topics.settings)
    produce_raw(producer, topics.relay_dead_letter, b"{}")
    producer.flush(30)
    assert "2 dead letters, and 1 of the relay: afluente dlq list --relay" in here("list").words


def test_there_is_none(here, organization):
    ran = here("list")
    assert ran.status == 3
    assert "no dead letters" in ran.words
    assert here("show", organization).status == 3
