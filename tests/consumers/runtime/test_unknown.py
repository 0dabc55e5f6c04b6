"""A call that may have been made, and of which nobody knows what came: looked up or left to people, never made again
blindly."""

import asyncio
import signal
from collections import Counter
from datetime import UTC, datetime

import pytest

import schemas
from consumers import ExternalWorker, Policy, dead_letters
from consumers.errors import BadWorker
from consumers.runtime import testing
from consumers.runtime.service import check
from tests.consumers.runtime.limited_workers import Delicate, Metered, Once
from tests.consumers.runtime.support import (
    MESSAGE,
    ROOT,
    create_topics,
    delivery,
    produce,
    row,
    short_sessions,
    states,
    until,
)
from tests.consumers.runtime.workers import Plain


@pytest.fixture
def notes(tmp_path, monkeypatch):
    """Where the workers write what they do; the gate that lets hanging calls go."""
    for name in ("CALLS_FILE", "LOOKUPS_FILE", "GATE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    (tmp_path / "CALLS_FILE").touch()
    (tmp_path / "LOOKUPS_FILE").touch()
    return tmp_path


def count(notes, name):
    return Counter((notes / name).read_text().split())


def with_effects(database, worker):
    """What `record` was given, by event."""
    return dict(database.execute("SELECT event_id, key FROM public.effect WHERE worker = %s", [worker]))


def event(organization, body):
    return row(organization, payload=MESSAGE | {"body": body})


async def cut_short(topics, running, notes, worker, rows):
    """Every call of these events is made, and the process stopped before it comes back."""
    async with running(worker, backoff_scale=0.001) as member:
        produce(topics, rows)
        await asyncio.to_thread(until, lambda: len(count(notes, "CALLS_FILE")) == len(rows))
        await member.stop_now()
    (notes / "GATE").touch()


async def test_lookup_decides_whether_the_call_is_made_again(database, topics, running, notes):
    organization = database.organization()
    create_topics(topics, Delicate.name)
    bodies = ["hang", "hang, not made", "hang, cannot be told", "hang, nobody answers"]
    made, not_made, untold, unanswered = rows = [event(organization, body) for body in bodies]
    await cut_short(topics, running, notes, Delicate(), rows)
    async with running(Delicate(), backoff_scale=0.001) as member:
        await member.of("worker.delivered", event_id=str(made.id), attempt=1)
        await member.of("worker.delivered", event_id=str(not_made.id), attempt=1)
        await member.of("worker.needs_review", event_id=str(untold.id), attempt=1)
        await member.of("worker.needs_review", event_id=str(unanswered.id), attempt=3)
        await asyncio.to_thread(until, lambda: len(topics.records(topics.dead_letter(Delicate.name))) == 2)
        assert await member.stop()
    assert with_effects(database, Delicate.name) == {made.id: "looked up", not_made.id: "called"}
    assert count(notes, "CALLS_FILE") == {str(r.id): 2 if r is not_made else 1 for r in rows}
    assert count(notes, "LOOKUPS_FILE") == {str(r.id): 3 if r is unanswered else 1 for r in rows}
    found = delivery(database, Delicate.name, unanswered.id)
    assert (found["state"], found["attempts"], found["error_class"]) == ("needs_review", 3, "ConnectionError")


async def test_without_a_lookup_people_decide_and_their_retry_calls(database, topics, running, notes):
    organization = database.organization()
    create_topics(topics, Once.name)
    [cut] = [event(organization, "hang")]
    await cut_short(topics, running, notes, Once(), [cut])
    async with running(Once()) as member:
        await member.of("worker.needs_review", event_id=str(cut.id))
        await asyncio.to_thread(until, lambda: topics.records(topics.dead_letter(Once.name)))
        assert states(database, Once.name) == {"needs_review": 1}
        assert count(notes, "CALLS_FILE") == {str(cut.id): 1}

        def retry():
            with database.connect(autocommit=True) as conn:
                letters = dead_letters.find(conn, dead_letters.Filter(worker=Once.name))
                assert [(letter.state, letter.error_class) for letter in letters] == [("needs_review", "Unknown")]
                return dead_letters.reprocess(
                    conn, topics.settings, letters, actor="test", reason="it was not made", now=datetime.now(UTC)
                )

        await asyncio.to_thread(retry)
        await member.of("worker.delivered", event_id=str(cut.id))
        assert await member.stop()
    assert with_effects(database, Once.name) == {cut.id: "called"}
    assert count(notes, "CALLS_FILE") == {str(cut.id): 2}


@pytest.mark.faults_long
async def test_a_call_cut_by_its_timeout_is_looked_up_too(database, topics, running, notes, monkeypatch):
    monkeypatch.setattr(Delicate, "policy", Policy(timeout_s=0.3, attempts=3))
    monkeypatch.setattr(Once, "policy", Policy(timeout_s=0.3))
    organization = database.organization()
    create_topics(topics, Delicate.name, Once.name)
    async with running(Delicate(), backoff_scale=0.001) as looking, running(Once()) as once:
        slow, broken = produce(topics, [event(organization, "hang"), event(organization, "unknown at first")])
        await looking.of("worker.delivered", event_id=str(slow.id), attempt=2)
        await looking.of("worker.delivered", event_id=str(broken.id), attempt=2)
        await once.of("worker.needs_review", event_id=str(slow.id), attempt=1)
        await once.of("worker.needs_review", event_id=str(broken.id), attempt=1)
        assert await looking.stop()
        assert await once.stop()
    assert with_effects(database, Delicate.name) == {slow.id: "looked up", broken.id: "looked up"}
    assert count(notes, "CALLS_FILE") == {str(slow.id): 2, str(broken.id): 2}  # each worker once


@pytest.mark.parametrize(
    ("worker", "body", "outcome", "result", "calls", "lookups"),
    [
        (Delicate(), "hang", "done", "called", 1, 0),
        (Delicate(), "hang, not made", "done", "called", 1, 1),
        (Delicate(), "hang, cannot be told", "needs_review", None, 0, 1),
        (Delicate(), "hang, nobody answers", "failed", None, 0, 1),
        (Once(), "hang", "needs_review", None, 0, 0),
    ],
)
async def test_the_kit_shows_each_way(database, effects_table, notes, worker, body, outcome, result, calls, lookups):
    (notes / "GATE").touch()
    happened = schemas.decode(schemas.encode(event(database.organization(), body)))
    async with await database.connect_async(autocommit=True) as conn:
        ran = await testing.run(worker, happened, conn, unknown=lookups > 0 or worker.resend == "never")
    assert (ran.outcome, ran.result) == (outcome, result)
    assert (count(notes, "CALLS_FILE").total(), count(notes, "LOOKUPS_FILE").total()) == (calls, lookups)


@pytest.mark.timeout(120)
def test_a_process_killed_between_call_and_record_calls_nobody_twice(
    database, topics, processes, tmp_path, effects_table
):
    """What they call is in a file that the kill cannot take back."""
    organization = database.organization()
    create_topics(topics, Delicate.name, Once.name)
    short_sessions(topics, Delicate.name, Once.name)
    rows = produce(topics, [event(organization, "oi") for _ in range(3)])
    log, notes = tmp_path / "faults", {}
    started = []
    for kind in (Delicate, Once):
        env = {
            "PYTHONPATH": ROOT,
            "AFLUENTE_CLAIM_RENEW_S": "0.5",
            "AFLUENTE_CLAIM_TAKEOVER_S": "2",
            "CALLS_FILE": tmp_path / f"{kind.name}-calls",
            "LOOKUPS_FILE": tmp_path / f"{kind.name}-lookups",
        }
        notes[kind] = env
        fault = {"AFLUENTE_FAULT": "worker.after_call:2", "AFLUENTE_FAULT_LOG": log}
        spelling = f"tests.consumers.runtime.limited_workers:{kind.__name__}"
        started.append((kind, spelling, env, processes.start("worker", "run", spelling, env=env | fault)))
    for _, _, _, victim in started:
        assert victim.wait(60) == -signal.SIGKILL, victim.log[-3000:]
    assert log.read_text().count("KILL") == 2
    after = [processes.start("worker", "run", spelling, env=env) for _, spelling, env, _ in started]
    until(lambda: states(database, Delicate.name) == {"done": 3}, 40)
    until(lambda: sum(states(database, Once.name).values()) == 3 and "claimed" not in states(database, Once.name), 40)
    for process in after:
        assert process.terminate() == 0
    wanted = {str(r.id): 1 for r in rows}
    called = {kind: Counter(env["CALLS_FILE"].read_text().split()) for kind, env in notes.items()}
    assert called[Delicate] == wanted
    # those that it had claimed and not recorded wait for people; no call was made twice
    assert states(database, Once.name)["needs_review"] >= 1
    assert max(called[Once].values()) == 1
    looked_up = Counter(notes[Delicate]["LOOKUPS_FILE"].read_text().split())
    assert 1 <= len(looked_up) <= 3
    assert with_effects(database, Delicate.name).keys() == {r.id for r in rows}


class NoLookup(ExternalWorker):
    name = "no-lookup-worker"
    event_types = frozenset({"message.received"})
    resend = "lookup"

    async def call(self, delivery, prepared):
        return None


class RatedPlain(Plain):
    policy = Metered.policy


@pytest.mark.parametrize(("worker", "reason"), [(NoLookup(), "no lookup"), (RatedPlain(), "are for calls")])
def test_what_cannot_be_kept_is_refused_at_the_start(worker, reason):
    with pytest.raises(BadWorker, match=reason):
        check(worker)
