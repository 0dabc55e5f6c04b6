"""A worker on a real broker and a real Postgres: what is handled, retried, dead, skipped, and in which order."""

import asyncio
import itertools
import json
import random
from collections import Counter
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest

import schemas
from afluente import kafka as clients
from afluente.clock import SystemClock
from afluente.postgres import pool_async
from consumers import (
    ALL_BUT_WEBHOOK,
    ExternalWorker,
    Policy,
    Reject,
    RetryAfter,
    Snooze,
    TransactionalWorker,
    dead_letters,
)
from consumers.errors import BadWorker
from consumers.runtime import testing
from consumers.runtime.parking import in_hand
from consumers.runtime.places import Limits
from consumers.runtime.service import WorkerService
from schemas.topics import RETRY_DELAYS_S
from tests.consumers.runtime.support import (
    MESSAGE,
    PARTITIONS,
    create_topics,
    delivery,
    effects,
    lag,
    produce,
    produce_raw,
    reset,
    row,
    states,
    until,
)
from tests.consumers.runtime.workers import Batch, Caller, Plain, write_effect
from tests.fixtures.raw_records import BAD_NAME, produce_batch

SCALE = 0.001
RECEIVED = "message.received"


def message(body):
    return MESSAGE | {"body": body}


@pytest.mark.parametrize("kind", [Plain, Batch, Caller])
@pytest.mark.parametrize("protocol", ["consumer", "classic"])
async def test_each_event_is_handled_once_and_lag_reaches_zero(database, topics, running, kind, protocol):
    organizations = [database.organization(f"o{n}") for n in range(3)]
    create_topics(topics, kind.name)
    # each record in a transaction of its own: offsets 0, 2, 4, ... with a marker behind the last one
    rows = produce(topics, [row(organizations[n % 3]) for n in range(30)], transactional=True)
    async with running(kind(), group_protocol=protocol) as worker:
        await worker.of("worker.delivered", count=30)
        again = produce(topics, rows)  # every record a second time
        last = produce(topics, [row(organizations[0]), row(organizations[1]), row(organizations[2])])
        for event in last:
            await worker.of("worker.delivered", event_id=str(event.id))
        await asyncio.to_thread(until, lambda: lag(topics, kind.name, [topics.event(RECEIVED)]) == 0)
        assert await worker.stop()
    assert Counter(e for e, *_ in effects(database)) == dict.fromkeys([r.id for r in again + last], 1)
    assert states(database, kind.name) == {"done": 33}
    assert lag(topics, kind.name, [topics.event(RECEIVED)]) == 0


@pytest.mark.parametrize("kind", [Plain, Caller])
async def test_a_handler_that_always_fails_is_dead_after_8_runs_with_the_seeds_delays(database, topics, running, kind):
    organization = database.organization()
    create_topics(topics, kind.name)
    [event] = produce(topics, [row(organization, payload=message("fail"))])
    draws = itertools.cycle([0.0, 0.25, 0.5, 0.75, 0.999])
    async with running(kind(), backoff_scale=SCALE, random=lambda: next(draws)) as worker:
        dead = await worker.of("worker.dead", timeout=60, event_id=str(event.id))
        retried = [fields for name, fields in worker.signals.seen if name == "worker.retried"]
        assert await worker.stop()
    assert dead["attempt"] == 8
    assert [fields["attempt"] for fields in retried] == [1, 2, 3, 4, 5, 6, 7]
    # seven waits: each retry record lies in its tier's topic and says when it is due
    found = []
    for delay in RETRY_DELAYS_S:
        found += topics.records(topics.retry(kind.name, delay))
    assert [r.topic() for r in found] == [topics.retry(kind.name, delay) for delay in RETRY_DELAYS_S[:7]]
    headers = [dict(r.headers()) for r in found]
    assert [h["x-attempt"] for h in headers] == [b"2", b"3", b"4", b"5", b"6", b"7", b"8"]
    assert len({tuple(sorted(h)) for h in headers}) == 1
    assert {h["x-origin-topic"].decode() for h in headers} == {topics.event(RECEIVED)}
    assert all(r.value() == schemas.encode(event) for r in found)
    dues = [int(h["x-due-ms"]) for h in headers]
    failed_at = [r.timestamp()[1] for r in found]  # the broker's append follows the failure within a moment
    for base, due, at, share in zip(RETRY_DELAYS_S, dues, failed_at, itertools.cycle([0.0, 0.25, 0.5, 0.75, 0.999])):
        assert due - at == pytest.approx(base * 1000 * SCALE * (1 + 0.3 * share), abs=1500)
    # and none ran before it was due: the next failure, and so its record, comes after it
    assert all(at >= due for due, at in zip(dues, failed_at[1:], strict=False))
    row_ = delivery(database, kind.name, event.id)
    assert (row_["state"], row_["attempts"], row_["error_class"]) == ("dead", 8, "RuntimeError")
    assert row_["last_error"] == "attempt 8 fails"
    [letter] = topics.records(topics.dead_letter(kind.name))
    assert letter.value() == schemas.encode(event)
    assert dict(letter.headers())["x-error-message"] == b"attempt 8 fails"
    assert effects(database) == []


@pytest.mark.parametrize("kind", [Plain, Caller])
async def test_what_fails_twice_succeeds_the_third_time(database, topics, running, kind):
    organization = database.organization()
    create_topics(topics, kind.name)
    [event] = produce(topics, [row(organization, payload=message("fail 2"))])
    async with running(kind(), backoff_scale=SCALE) as worker:
        await worker.of("worker.delivered", event_id=str(event.id), attempt=3)
    assert effects(database) == [(event.id, "", 3)]
    row_ = delivery(database, kind.name, event.id)
    assert (row_["state"], row_["attempts"]) == ("done", 3)


@pytest.mark.parametrize("kind", [Plain, Batch])
async def test_one_bad_event_in_500_leaves_499_committed(database, topics, running, kind):
    organization = database.organization()
    create_topics(topics, kind.name)
    bodies = ["ok"] * 500
    bodies[250] = "fail"
    rows = produce(topics, [row(organization, payload=message(body)) for body in bodies])
    async with running(kind()) as worker:
        await worker.of("worker.retried", event_id=str(rows[250].id))
        await worker.of("worker.delivered", count=499)
        assert await worker.stop()
    assert {e for e, *_ in effects(database)} == {r.id for n, r in enumerate(rows) if n != 250}
    assert len(effects(database)) == 499
    assert states(database, kind.name) == {"done": 499, "waiting": 1}
    assert delivery(database, kind.name, rows[250].id)["attempts"] == 1
    assert len(topics.records(topics.retry(kind.name, 30))) == 1


async def test_rejected_is_dead_at_once_and_the_rest_goes_on(database, topics, running):
    organization = database.organization()
    create_topics(topics, "plain-worker")
    bad, good = produce(topics, [row(organization, payload=message(body)) for body in ("reject", "ok")])
    async with running(Plain()) as worker:
        await worker.of("worker.dead", event_id=str(bad.id), attempt=1)
        await worker.of("worker.delivered", event_id=str(good.id))
    assert delivery(database, "plain-worker", bad.id)["state"] == "dead"
    assert [e for e, *_ in effects(database)] == [good.id]


class Typed(TransactionalWorker):
    name = "typed-worker"
    event_types = frozenset({"message.delivered"})

    async def handle(self, delivery, ctx):
        delivery.data  # noqa: B018  the typed payload, which an invalid one does not give
        await write_effect(ctx.connection, delivery)


async def test_an_invalid_payload_is_dead_at_once(database, topics, running, monkeypatch):
    organization = database.organization()
    create_topics(topics, "typed-worker")
    # what passes the Avro schema and not the model: only a producer of another make writes such a thing
    payload = {"message_id": "m", "delivered_at": "2026-11-29T10:00:00.000000+00:00"}
    good, bad = produce(topics, [row(organization, "message.delivered", payload=payload) for _ in range(2)])
    model_of = vars(schemas.Event)["data"].fget

    def data(event):
        if event.id == bad.id:
            raise ValueError("delivered_at: is no moment")
        return model_of(event)

    monkeypatch.setattr(schemas.Event, "data", property(data))
    async with running(Typed()) as worker:
        await worker.of("worker.dead", event_id=str(bad.id), attempt=1)
        await worker.of("worker.delivered", event_id=str(good.id))
    found = delivery(database, "typed-worker", bad.id)
    assert found["state"] == "dead"
    assert "invalid payload of message.delivered" in found["last_error"]
    [letter] = topics.records(topics.dead_letter("typed-worker"))
    assert letter.value() == schemas.encode(bad)


class Sleepy(ExternalWorker):
    """Snoozes twice, then works."""

    name = "sleepy-worker"
    event_types = frozenset({RECEIVED})

    def __init__(self, wait):
        self.wait = wait
        self.runs = Counter()

    async def call(self, delivery, prepared):
        self.runs[delivery.event.id] += 1
        if self.runs[delivery.event.id] <= 2:
            raise Snooze(self.wait)

    async def record(self, delivery, result, ctx):
        await write_effect(ctx.connection, delivery)


async def test_a_snooze_uses_no_attempt(database, topics, running):
    organization = database.organization()
    create_topics(topics, "sleepy-worker")
    [event] = produce(topics, [row(organization)])
    async with running(Sleepy(0.2)) as worker:
        await worker.of("worker.snoozed", event_id=str(event.id), count=2)
        await worker.of("worker.delivered", event_id=str(event.id), attempt=1)
    assert effects(database) == [(event.id, "", 1)]
    row_ = delivery(database, "sleepy-worker", event.id)
    assert (row_["attempts"], row_["first_failure_at"], row_["last_error"]) == (1, None, None)


async def test_a_long_snooze_is_kept_in_postgres_and_comes_back_through_retry_now(database, topics, running):
    organization = database.organization()
    create_topics(topics, "sleepy-worker")
    [event] = produce(topics, [row(organization)])
    async with running(Sleepy(timedelta(days=7))) as worker:
        await worker.of("worker.snoozed", event_id=str(event.id))
        row_ = await asyncio.to_thread(delivery, database, "sleepy-worker", event.id)
        assert row_["kept"]
        assert row_["next_attempt_at"] - datetime.now(UTC) > timedelta(days=6)
        for _ in range(2):
            database.execute("UPDATE event_delivery SET next_attempt_at = clock_timestamp()")
            await worker.of("worker.snoozed", event_id=str(event.id), count=2)
        await worker.of("worker.delivered", event_id=str(event.id), attempt=1)
    assert not delivery(database, "sleepy-worker", event.id)["kept"]
    assert len(topics.records(topics.retry("sleepy-worker", "now"))) == 2
    assert all(topics.records(topics.retry("sleepy-worker", delay)) == [] for delay in RETRY_DELAYS_S)


class Asked(ExternalWorker):
    """Comes back when the other side says, and is told of each failure in the transaction that records it."""

    name = "asked-worker"
    event_types = frozenset({RECEIVED})

    def __init__(self):
        self.told = []

    async def call(self, delivery, prepared):
        raise RetryAfter(0.3 if delivery.attempt == 1 else 10_000, "429")

    async def failed(self, delivery, prepared, error, ctx):
        self.told.append((delivery.attempt, str(error), ctx.next_attempt_at is not None))
        await write_effect(ctx.connection, delivery)


async def test_retry_after_uses_an_attempt_and_says_when(database, topics, running):
    organization = database.organization()
    create_topics(topics, "asked-worker")
    [event] = produce(topics, [row(organization)])
    asked = Asked()
    async with running(asked) as worker:
        await worker.of("worker.retried", event_id=str(event.id), count=2)
    assert asked.told == [(1, "429", True), (2, "429", True)]
    row_ = delivery(database, "asked-worker", event.id)
    assert (row_["state"], row_["attempts"], row_["kept"]) == ("waiting", 2, True)
    assert timedelta(seconds=9_900) < row_["next_attempt_at"] - datetime.now(UTC) < timedelta(seconds=10_001)
    assert [attempt for *_, attempt in effects(database)] == [1, 2]


class Fanned(ExternalWorker):
    """Three targets, one of them dead; events of the kind "nobody" have none."""

    name = "fanned-worker"
    event_types = frozenset({RECEIVED})
    policy = Policy(attempts=2, concurrency=10)
    targets_of = ("a", "b", "dead")

    def key(self, event, target):
        return target

    async def targets(self, event, conn):
        return () if event.payload["body"] == "nobody" else self.targets_of

    async def call(self, delivery, prepared):
        if delivery.target == "dead":
            raise ConnectionError("refused")

    async def record(self, delivery, result, ctx):
        await write_effect(ctx.connection, delivery)


async def test_one_dead_target_leaves_the_others_untouched(database, topics, running):
    organization = database.organization()
    create_topics(topics, "fanned-worker")
    rows = produce(topics, [row(organization) for _ in range(10)])
    [nobodys] = produce(topics, [row(organization, payload=message("nobody"))])
    async with running(Fanned(), backoff_scale=SCALE) as worker:
        await worker.of("worker.dead", count=10)
        await worker.of("worker.delivered", count=20)
        # the targets were fixed at first sight: a replay after a change of mind brings nothing new
        worker.service.worker.targets_of = ("a", "b", "c")
        produce(topics, rows)
        [last] = produce(topics, [row(organization)])
        for target in "abc":
            await worker.of("worker.delivered", event_id=str(last.id), target=target)
        assert await worker.stop()
    by_target = Counter(target for _, target, _ in effects(database))
    assert by_target == {"a": 11, "b": 11, "c": 1}
    assert states(database, "fanned-worker") == {"done": 23, "dead": 10, "skipped": 1}
    assert delivery(database, "fanned-worker", nobodys.id)["state"] == "skipped"
    letters = topics.records(topics.dead_letter("fanned-worker"))
    assert {dict(r.headers())["x-target"] for r in letters} == {b"dead"}
    assert len(letters) == 10


class Chosen(TransactionalWorker):
    """Chooses its events by `targets`, with one delivery for each; while `broken` the choice itself fails."""

    name = "chosen-worker"
    event_types = frozenset({RECEIVED})
    policy = Policy(attempts=3)
    broken = False

    async def targets(self, event, conn):
        if self.broken:
            await conn.execute("SELECT 1 / 0")
        return () if event.payload["body"] == "not mine" else ("",)

    async def handle(self, delivery, ctx):
        await write_effect(ctx.connection, delivery)
        if delivery.payload["body"] == "fail 1" and delivery.attempt == 1:
            raise RuntimeError("once")


async def test_a_worker_may_choose_its_events_by_their_targets(database, topics, running):
    organization = database.organization()
    create_topics(topics, "chosen-worker")
    bodies = ("oi", "not mine", "fail 1")
    good, skipped, failing = produce(topics, [row(organization, payload=message(body)) for body in bodies])
    async with running(Chosen(), backoff_scale=SCALE) as worker:
        await worker.of("worker.delivered", event_id=str(good.id), attempt=1)
        await worker.of("worker.delivered", event_id=str(failing.id), attempt=2)
    assert {e for e, *_ in effects(database)} == {good.id, failing.id}
    assert delivery(database, "chosen-worker", skipped.id)["state"] == "skipped"


async def test_targets_that_cannot_be_found_are_a_dead_letter_and_looked_for_again_when_reprocessed(
    database, topics, running
):
    organization = database.organization()
    create_topics(topics, "chosen-worker")
    chosen = Chosen()
    chosen.broken = True
    [event] = produce(topics, [row(organization)])
    async with running(chosen, backoff_scale=SCALE) as worker:
        await worker.of("worker.targets_failed", event_id=str(event.id), count=2)
        dead = await worker.of("worker.dead", event_id=str(event.id))
        assert "division by zero" in dead["error"]
        await asyncio.to_thread(
            until, lambda: delivery(database, "chosen-worker", event.id, "?")["dead_offset"] is not None
        )
        chosen.broken = False
        with database.connect(autocommit=True) as conn:
            [letter] = dead_letters.find(conn, dead_letters.Filter(worker="chosen-worker"))
            done = dead_letters.reprocess(
                conn, topics.settings, [letter], actor="test", reason="", now=datetime.now(UTC)
            )
        assert done.done == [f"chosen-worker:{event.id}:?"]
        await worker.of("worker.delivered", event_id=str(event.id), target="", attempt=1)
        await asyncio.to_thread(until, lambda: states(database, "chosen-worker") == {"done": 2})
    assert effects(database) == [(event.id, "", 1)]


POISON = {
    "a wrong magic byte": b"\x01\x40\x00\x00\x01abc",
    "an unknown schema id": b"\x00\x7f\xff\xff\xff" + b"x" * 20,
    "a truncated body": None,
    "random bytes": bytes(range(256)),
    "an empty value": b"",
    "no value at all": False,
}


class Everything(TransactionalWorker):
    name = "everything-worker"
    event_types = ALL_BUT_WEBHOOK

    async def handle(self, delivery, ctx):
        await write_effect(ctx.connection, delivery)


async def test_poison_on_every_topic_is_a_dead_letter_with_its_bytes_and_stops_nothing(database, topics, running):
    organization = database.organization()
    create_topics(topics, "everything-worker", families=topics.families())
    good = row(organization)
    poison = {name: schemas.encode(good)[:20] if value is None else value or None for name, value in POISON.items()}
    producer = clients.producer(topics.settings)
    sources = [name for name in topics.families() if name != topics.family("webhook")]
    places = sources + topics.retries("everything-worker")
    for name in places:
        for value in poison.values():
            produce_raw(producer, name, value, key=None)
    # a retry record whose headers nobody can read
    broken = [("x-generation", b"zero"), ("x-attempt", b"1")]
    produce_raw(producer, topics.retry("everything-worker", 30), schemas.encode(good), headers=broken)
    assert producer.flush(30) == 0
    produce(topics, [good])
    count = len(places) * len(poison) + 1
    async with running(Everything()) as worker:
        await worker.of("worker.delivered", event_id=str(good.id))
        await worker.of("worker.dead", count=count)
        await asyncio.to_thread(until, lambda: lag(topics, "everything-worker", places) == 0)
        assert await worker.stop()
    letters = topics.records(topics.dead_letter("everything-worker"))
    assert len(letters) == count
    places_found = {dict(r.headers())["x-origin-topic"].decode() for r in letters}
    assert places_found == set(places)
    values = Counter(r.value() for r in letters if r.value() is not None and r.value() != schemas.encode(good))
    assert values == {value: len(places) for value in poison.values() if value is not None}
    assert database.execute("SELECT count(*), count(DISTINCT dead_offset) > 1 FROM undecodable_record") == [
        (count, True)
    ]
    # read again from the start, they are known
    reset(topics, "everything-worker", places)
    async with running(Everything()) as worker:
        await asyncio.to_thread(until, lambda: lag(topics, "everything-worker", places) == 0)
        assert await worker.stop()
    assert len(topics.records(topics.dead_letter("everything-worker"))) == count


async def test_headers_nobody_can_read_are_a_dead_letter_where_they_are_needed_and_odd_ones_are_passed_on(
    database, topics, running
):
    organization = database.organization()
    create_topics(topics, "plain-worker")
    bad, good, odd, many = (row(organization) for _ in range(4))
    key = str(organization).encode()
    headers = [*schemas.headers(bad), (BAD_NAME, b"v")]
    source, retry = topics.event(RECEIVED), topics.retry("plain-worker", 30)
    records = [
        (key, schemas.encode(bad), headers),
        (key, schemas.encode(good), schemas.headers(good)),
        (key, schemas.encode(odd), [*schemas.headers(odd), ("x-target", None), ("x-generation", None), ("", b"")]),
        (key, schemas.encode(many), [*schemas.headers(many), *((f"h{n}", b"v" * 10) for n in range(20_000))]),
    ]
    produce_batch(topics.settings, source, records, partition=1)
    produce_batch(topics.settings, retry, records[:1], partition=2)
    async with running(Plain()) as worker:
        for event in (bad, good, odd, many):
            await worker.of("worker.delivered", event_id=str(event.id))
        await worker.of("worker.dead")
        await asyncio.to_thread(until, lambda: lag(topics, "plain-worker", [source, retry]) == 0)
        assert await worker.stop()
    assert {event for event, _, _ in effects(database)} == {bad.id, good.id, odd.id, many.id}
    letters = topics.records(topics.dead_letter("plain-worker"))
    assert [(letter.key(), letter.value()) for letter in letters] == [(key, schemas.encode(bad))]
    kept = [dict(clients.headers_of(letter) or ()) for letter in letters]
    assert all(found["x-error-class"] == b"BadHeaders" and "ce_id" not in found for found in kept)
    places = {
        (found["x-origin-topic"].decode(), found["x-origin-partition"], found["x-origin-offset"]) for found in kept
    }
    assert places == {(retry, b"2", b"0")}
    assert database.execute("SELECT DISTINCT error_class FROM undecodable_record") == [("BadHeaders",)]
    # read again from the start, they are known
    reset(topics, "plain-worker", [source, retry])
    async with running(Plain()) as worker:
        await asyncio.to_thread(until, lambda: lag(topics, "plain-worker", [source, retry]) == 0)
        assert await worker.stop()
    assert len(topics.records(topics.dead_letter("plain-worker"))) == 1
    assert len(effects(database)) == 4


class Ordered(TransactionalWorker):
    """Notes who runs when; a key never runs twice at once."""

    name = "ordered-worker"
    event_types = frozenset({RECEIVED})

    def __init__(self):
        self.running = set()
        self.order = []

    def key(self, event, target):
        return event.payload["conversation_id"]

    async def handle(self, delivery, ctx):
        key = self.key(delivery.event, "")
        assert key not in self.running
        self.running.add(key)
        try:
            await asyncio.sleep(0)
            await write_effect(ctx.connection, delivery, key)
            body = delivery.payload["body"]
            if body.startswith("fail ") and delivery.attempt <= int(body[5:]):
                raise RuntimeError("not yet")
        finally:
            self.running.discard(key)


class OrderedCaller(ExternalWorker):
    name = "ordered-caller-worker"
    event_types = frozenset({RECEIVED})

    def __init__(self):
        self.running = set()
        self.most = 0

    def key(self, event, target):
        return event.payload["conversation_id"]

    async def call(self, delivery, prepared):
        key = self.key(delivery.event, "")
        assert key not in self.running
        self.running.add(key)
        self.most = max(self.most, len(self.running))
        await asyncio.sleep(0.002)
        self.running.discard(key)
        body = delivery.payload["body"]
        if body.startswith("fail ") and delivery.attempt <= int(body[5:]):
            raise RuntimeError("not yet")

    async def record(self, delivery, result, ctx):
        await write_effect(ctx.connection, delivery, self.key(delivery.event, ""))


@pytest.mark.parametrize("kind", [Ordered, OrderedCaller])
async def test_keys_run_side_by_side_and_a_key_in_order(database, topics, running, kind):
    organization = database.organization()
    create_topics(topics, kind.name)
    rows = [row(organization, payload=MESSAGE | {"conversation_id": f"c{n % 7}", "body": "oi"}) for n in range(140)]
    produce(topics, rows)
    async with running(kind()) as worker:
        await worker.of("worker.delivered", count=140)
        if kind is OrderedCaller:
            assert worker.service.worker.most > 1
    by_key = {}
    for event_id, key in database.execute("SELECT event_id, key FROM effect ORDER BY number"):
        by_key.setdefault(key, []).append(event_id)
    for n in range(7):
        assert by_key[f"c{n}"] == [r.id for r in rows[n::7]]


class Strict(Ordered):
    name = "strict-worker"
    policy = Policy(ordering="key", attempts=3)


class StrictCaller(OrderedCaller):
    name = "strict-caller-worker"
    policy = Policy(ordering="key", attempts=3)


@pytest.mark.parametrize("kind", [Strict, StrictCaller])
async def test_with_ordering_by_key_later_events_wait_behind_a_failing_one(database, topics, running, kind):
    organization = database.organization()
    create_topics(topics, kind.name)
    bodies = [
        ("k", "fail 2"),
        ("k", "ok"),
        ("other", "ok"),
        ("k", "fail 1"),
        ("k", "ok"),
        ("dead", "fail 9"),
        ("dead", "ok"),
    ]
    rows = [row(organization, payload=MESSAGE | {"conversation_id": key, "body": body}) for key, body in bodies]
    produce(topics, rows)
    async with running(kind(), backoff_scale=SCALE) as worker:
        for event in [rows[4], rows[2], rows[6]]:
            await worker.of("worker.delivered", event_id=str(event.id))
        await worker.of("worker.dead", event_id=str(rows[5].id))
        assert await worker.stop()
    done = [e for e, *_ in effects(database)]
    assert [e for e in done if e in {rows[n].id for n in (0, 1, 3, 4)}] == [rows[n].id for n in (0, 1, 3, 4)]
    assert done.index(rows[2].id) < done.index(rows[0].id)  # other keys do not wait
    assert states(database, kind.name) == {"done": 6, "dead": 1}


class Foreign(TransactionalWorker):
    """Reaches for another organization's rows."""

    name = "foreign-worker"
    event_types = frozenset({RECEIVED})

    def __init__(self, other):
        self.other = other
        self.seen = None

    async def handle(self, delivery, ctx):
        cursor = await ctx.connection.execute("SELECT count(*) FROM effect WHERE organization_id = %s", (self.other,))
        self.seen = (await cursor.fetchone())[0]
        async with ctx.as_worker():
            cursor = await ctx.connection.execute("SELECT count(*) FROM effect")
            assert (await cursor.fetchone())[0] == 1
        await ctx.connection.execute(
            "INSERT INTO effect (worker, event_id, target, attempt, organization_id) VALUES ('x', %s, '', 1, %s)",
            (delivery.event.id, self.other),
        )


async def test_a_handler_is_refused_another_organizations_rows(database, topics, running):
    mine, other = database.organization("mine"), database.organization("other")
    database.execute(
        """INSERT INTO public.effect (worker, event_id, target, attempt, organization_id)
           VALUES ('theirs', %s, '', 1, %s)""",
        [uuid4(), other],
    )
    create_topics(topics, "foreign-worker")
    [event] = produce(topics, [row(mine)])
    foreign = Foreign(other)
    async with running(foreign) as worker:
        retried = await worker.of("worker.retried", event_id=str(event.id))
    assert foreign.seen == 0
    assert "row-level security" in retried["error"]
    assert [e for e, *_ in effects(database, "x")] == []


class Emitting(ExternalWorker):
    """Emits one event with its record and one with each failure."""

    name = "emitting-worker"
    event_types = frozenset({RECEIVED})

    async def call(self, delivery, prepared):
        if delivery.attempt == 1:
            raise RuntimeError("first")

    async def record(self, delivery, result, ctx):
        payload = {"message_id": "m", "error_code": "1", "error_message": "e", "retryable": False}
        await ctx.emit("message.failed", entity_kind="message", entity_id=delivery.event.entity_id, payload=payload)

    async def failed(self, delivery, prepared, error, ctx):
        await self.record(delivery, None, ctx)
        raise RuntimeError("the hook itself fails: what it did is undone, the attempt is recorded")


async def test_what_a_handler_emits_is_committed_with_its_delivery_and_names_its_cause(database, topics, running):
    organization = database.organization()
    create_topics(topics, "emitting-worker")
    [event] = produce(topics, [row(organization, metadata={"request_id": "r-1", "causation_depth": 2})])
    async with running(Emitting(), backoff_scale=SCALE) as worker:
        await worker.of("worker.failed_hook_failed", event_id=str(event.id))
        await worker.of("worker.delivered", event_id=str(event.id), attempt=2)
    [(organization_id, metadata)] = database.execute("SELECT organization_id, metadata FROM event_log")
    assert organization_id == organization
    assert metadata["causation_id"] == str(event.id)
    assert metadata["causation_depth"] == 3
    assert metadata["request_id"] == "r-1"
    assert metadata["source"] == "emitting-worker"


class Slow(ExternalWorker):
    name = "slow-worker"
    event_types = frozenset({RECEIVED})
    policy = Policy(timeout_s=0.2)

    async def call(self, delivery, prepared):
        if delivery.attempt == 1:
            await asyncio.Event().wait()


async def test_a_call_over_its_timeout_is_an_attempt(database, topics, running):
    organization = database.organization()
    create_topics(topics, "slow-worker")
    [event] = produce(topics, [row(organization)])
    async with running(Slow(), backoff_scale=SCALE) as worker:
        retried = await worker.of("worker.retried", event_id=str(event.id), attempt=1)
        await worker.of("worker.delivered", event_id=str(event.id), attempt=2)
    assert "timeout" in retried["error"]


class Closing(ExternalWorker):
    """Its target is closed by the second failure: what waits for it is dead at once."""

    name = "closing-worker"
    event_types = frozenset({RECEIVED})

    def __init__(self):
        self.failures = 0

    def key(self, event, target):
        return target

    async def targets(self, event, conn):
        return ("t",)

    async def call(self, delivery, prepared):
        raise ConnectionError("refused")

    async def failed(self, delivery, prepared, error, ctx):
        self.failures += 1
        if self.failures >= 2:
            assert await ctx.reject_waiting("target is disabled") == 1
            raise Reject("target is disabled")


async def test_a_worker_can_close_a_target(database, topics, running):
    organization = database.organization()
    create_topics(topics, "closing-worker")
    closing = Closing()
    async with running(closing, backoff_scale=0.1) as worker:
        [first] = produce(topics, [row(organization)])
        await worker.of("worker.retried", event_id=str(first.id))
        [second] = produce(topics, [row(organization)])
        await worker.of("worker.dead", event_id=str(second.id))
        # the waiting one's retry record comes due, and goes to the dead letters as well
        await asyncio.to_thread(
            until, lambda: delivery(database, "closing-worker", first.id, "t")["dead_offset"] is not None
        )
    for event in (first, second):
        found = delivery(database, "closing-worker", event.id, "t")
        assert (found["state"], found["last_error"]) == ("dead", "target is disabled")
    assert len(topics.records(topics.dead_letter("closing-worker"))) == 2
    assert closing.failures in (2, 3)  # the hook ran in a transaction that was undone, and again


class Gated(ExternalWorker):
    """Calls that wait until the test lets them."""

    name = "gated-worker"
    event_types = frozenset({RECEIVED})
    policy = Policy(timeout_s=60, concurrency=20)

    def __init__(self):
        self.gate = asyncio.Event()
        self.calls = []

    async def call(self, delivery, prepared):
        self.calls.append(delivery.idempotency_key)
        await self.gate.wait()

    async def record(self, delivery, result, ctx):
        await write_effect(ctx.connection, delivery)


async def test_what_is_in_hand_is_bounded_and_goes_on_when_the_slow_ones_do(database, topics, running):
    organization = database.organization()
    create_topics(topics, "gated-worker")
    rows = produce(topics, [row(organization) for _ in range(1000)])
    gated = Gated()
    async with running(gated, limits=Limits(records=50, bytes=1024 * 1024)) as worker:
        await worker.of("worker.parked", organization_id=str(organization))
        await asyncio.to_thread(until, lambda: len(gated.calls) == 20)
        assert sum(place.records for place in in_hand(worker.service._core.poller.places)) <= 100
        gated.gate.set()
        await worker.of("worker.delivered", count=1000)
        assert await worker.stop()
    assert len(effects(database)) == len(rows)


async def test_an_organization_with_a_backlog_does_not_hold_up_another(database, topics, running):
    """1,000 events of one organization in hand; the other's, behind them in the same partition, is not the last."""
    big = database.organization("big")
    create_topics(topics, "gated-worker")
    small = next(
        organization
        for n in range(200)
        if schemas.topics.partition_of(organization := database.organization(f"s{n}"), PARTITIONS)
        == schemas.topics.partition_of(big, PARTITIONS)
    )
    produce(topics, [row(big) for _ in range(1000)])
    [theirs] = produce(topics, [row(small)])
    gated = Gated()
    async with running(gated) as worker:
        await asyncio.to_thread(until, lambda: len(gated.calls) == 20)
        await asyncio.to_thread(until, lambda: len(worker.service._core.lanes) >= 981)
        gated.gate.set()
        await worker.of("worker.delivered", event_id=str(theirs.id))
        place = [e for e, *_ in effects(database)]
        position = place.index(theirs.id) if theirs.id in place else 0
        assert position < 100
        await worker.of("worker.delivered", count=1001)


class Together(ExternalWorker):
    """Writes its effects by one statement, which takes no body "fail"."""

    name = "together-worker"
    event_types = frozenset({RECEIVED})
    policy = Policy(attempts=2)

    def __init__(self):
        self.batches = []

    async def call(self, delivery, prepared):
        return delivery.payload["body"]

    async def record_all(self, done, ctx):
        self.batches.append(len(done))
        assert all(delivery.payload["body"] == result for delivery, result in done)
        await ctx.connection.execute(
            """INSERT INTO effect (worker, event_id, target, attempt, organization_id)
               SELECT 'together-worker', id, '', 1, organization_id
                 FROM jsonb_to_recordset(%s::jsonb) AS input (id uuid, organization_id uuid, body text)
                WHERE 1 / CASE body WHEN 'fail' THEN 0 ELSE 1 END = 1""",
            [
                json.dumps(
                    [
                        {"id": d.event.id_text, "organization_id": d.event.organization_text, "body": result}
                        for d, result in done
                    ]
                )
            ],
        )


async def test_what_comes_back_together_is_recorded_together_and_the_bad_one_apart(database, topics, running):
    organizations = [database.organization(f"o{n}") for n in range(5)]
    create_topics(topics, "together-worker")
    good = produce(topics, [row(organizations[n % 5]) for n in range(300)])
    [bad] = produce(topics, [row(organizations[0], payload=message("fail"))])
    together = Together()
    async with running(together, backoff_scale=SCALE) as worker:
        await worker.of("worker.dead", event_id=str(bad.id))
        await worker.of("worker.delivered", count=300)
        assert await worker.stop()
    assert sorted(e for e, *_ in effects(database)) == sorted(event.id for event in good)
    assert states(database, "together-worker") == {"done": 300, "dead": 1}
    assert max(together.batches) > 10
    assert database.execute(
        "SELECT count(*) FROM effect e JOIN event_delivery d USING (event_id)"
        " WHERE e.organization_id <> d.organization_id"
    ) == [(0,)]


async def test_a_zombies_outcome_is_not_recorded(database, topics, running):
    """Its process was given up for dead while it ran: the one that took over records, the late one is refused."""
    organization = database.organization()
    create_topics(topics, "gated-worker")
    [event] = produce(topics, [row(organization)])
    gated = Gated()
    async with running(gated) as worker:
        await asyncio.to_thread(until, lambda: len(gated.calls) == 1)
        taken = database.execute(
            "UPDATE event_delivery SET claim = claim + 1, claimed_by = %s RETURNING claim", [uuid4()]
        )
        assert taken == [(2,)]
        gated.gate.set()
        await worker.of("worker.superseded", event_id=str(event.id))
    assert effects(database) == []
    assert delivery(database, "gated-worker", event.id)["state"] == "claimed"


async def test_a_claim_nobody_renews_is_taken_over_from_event_log(database, topics, running):
    """The record is behind the committed offset; the reaper brings the event back from the table."""
    organization = database.organization()
    create_topics(topics, "caller-worker")
    database.execute(
        "SELECT emit_event_for(%s, 'message.received', 'message', %s, %s::jsonb)",
        [organization, uuid4(), json.dumps(MESSAGE)],
        role="afluente_worker",
    )
    [(event_id, created_at)] = database.execute("SELECT id, created_at FROM event_log")
    database.execute(
        """INSERT INTO event_delivery (event_created_at, worker, event_id, organization_id, event_type, key, state,
        claim, claimed_by) VALUES (%s, 'caller-worker', %s, %s, 'message.received', 'k', 'claimed', 1, %s)""",
        [created_at, event_id, organization, uuid4()],
    )
    async with running(Caller()) as worker:
        await worker.of("worker.claim_taken_over", event_id=str(event_id))
        await worker.of("worker.delivered", event_id=str(event_id), attempt=1)
    assert [e for e, *_ in effects(database)] == [event_id]


async def test_events_of_types_it_does_not_take_are_passed_over(database, topics, running):
    organization = database.organization()
    create_topics(topics, "plain-worker")
    payload = {"message_id": "m", "read_at": "2026-11-29T10:00:00.000000+00:00"}
    produce(topics, [row(organization, "message.read", payload=payload) for _ in range(5)])
    [mine] = produce(topics, [row(organization)])
    async with running(Plain()) as worker:
        await worker.of("worker.delivered", event_id=str(mine.id))
        await asyncio.to_thread(until, lambda: lag(topics, "plain-worker", [topics.event(RECEIVED)]) == 0)
    assert states(database, "plain-worker") == {"done": 1}
    assert database.execute("SELECT worker, event_type FROM worker_event_types") == [("plain-worker", RECEIVED)]


async def test_an_event_of_a_month_without_a_partition_gets_one_and_one_too_old_is_dead(database, topics, running):
    organization = database.organization()
    create_topics(topics, "plain-worker")
    now = datetime.now(UTC)
    old, too_old = (
        row(organization, created_at=now - timedelta(days=200)),
        row(organization, created_at=now - timedelta(days=500)),
    )
    future = row(organization, created_at=now + timedelta(days=90))
    produce(topics, [old, too_old, future])
    async with running(Plain()) as worker:
        await worker.of("worker.delivered", event_id=str(old.id))
        await worker.of("worker.dead", count=2)
    kinds = {error_class for (error_class,) in database.execute("SELECT error_class FROM undecodable_record")}
    assert kinds == {"TooOld", "InTheFuture"}


async def test_missing_topics_are_said_at_start(database, topics, running):
    class Nowhere(Plain):
        name = "nowhere-worker"

    topics.create(topics.event(RECEIVED))
    async with pool_async(database.url) as pool:
        service = WorkerService(
            Nowhere(), kafka_settings=topics.settings, pool=pool, clock=SystemClock(), random=lambda: 0.0
        )
        with pytest.raises(BadWorker, match=r"nowhere-worker needs topics that do not exist"):
            await service.run(asyncio.Event())


class Cut(TransactionalWorker):
    """Its first run loses its connection in the middle, after it has written."""

    name = "cut-worker"
    event_types = frozenset({RECEIVED})

    def __init__(self, database, times):
        self.database = database
        self.times = times

    async def handle(self, delivery, ctx):
        await write_effect(ctx.connection, delivery)
        if self.times and delivery.payload["body"] == "cut":
            self.times -= 1
            [pid] = await (await ctx.connection.execute("SELECT pg_backend_pid()")).fetchone()
            await asyncio.to_thread(self.database.execute, "SELECT pg_terminate_backend(%s)", [pid])
            await ctx.connection.execute("SELECT 1")


async def test_a_connection_lost_in_the_middle_is_no_attempt(database, topics, running):
    organization = database.organization()
    create_topics(topics, "cut-worker")
    rows = produce(topics, [row(organization, payload=message(body)) for body in ("oi", "cut", "oi")])
    async with running(Cut(database, times=1)) as worker:
        await worker.of("worker.postgres_away")
        for event in rows:
            await worker.of("worker.delivered", event_id=str(event.id), attempt=1)
    assert Counter(e for e, *_ in effects(database)) == dict.fromkeys([r.id for r in rows], 1)


class GivesWay(TransactionalWorker):
    """Postgres ends its first transaction as it ends one of a deadlock's."""

    name = "gives-way-worker"
    event_types = frozenset({RECEIVED})
    ended = False

    async def handle(self, delivery, ctx):
        await write_effect(ctx.connection, delivery)
        if not self.ended:
            self.ended = True
            await ctx.connection.execute("DO $$ BEGIN RAISE 'deadlock detected' USING ERRCODE = '40P01'; END $$")


async def test_a_transaction_that_gave_way_is_repeated_and_said_to_be_that(database, topics, running):
    create_topics(topics, "gives-way-worker")
    [event] = produce(topics, [row(database.organization())])
    async with running(GivesWay()) as worker:
        repeated = await worker.of("worker.transaction_repeated")
        await worker.of("worker.delivered", event_id=str(event.id), attempt=1)
    assert "deadlock detected" in repeated["error"]
    assert [e for e, *_ in effects(database)] == [event.id]


async def test_a_delivery_that_always_breaks_its_connection_is_at_fault_itself(database, topics, running):
    organization = database.organization()
    create_topics(topics, "cut-worker")
    bad, good = produce(topics, [row(organization, payload=message(body)) for body in ("cut", "oi")])
    async with running(Cut(database, times=1000)) as worker:
        retried = await worker.of("worker.retried", event_id=str(bad.id), attempt=1)
        await worker.of("worker.delivered", event_id=str(good.id))
    assert "terminating connection" in retried["error"]
    assert [e for e, *_ in effects(database)] == [good.id]


async def test_a_dead_letter_that_cannot_be_written_holds_its_offset_and_nothing_else(database, topics, running):
    organization = database.organization()
    small = {"max.message.bytes": "100"}  # not even a reference fits
    topics.create(topics.dead_letter("plain-worker"), partitions=3, config=small)
    create_topics(topics, "plain-worker")
    producer = clients.producer(topics.settings)
    poison = b"\x01" + random.Random(3).randbytes(3000)  # does not compress
    produce_raw(producer, topics.event(RECEIVED), poison, key=str(organization).encode())
    assert producer.flush(30) == 0
    rows = produce(topics, [row(organization) for _ in range(20)])
    async with running(Plain()) as worker:
        await worker.of("worker.record_refused", topic=topics.dead_letter("plain-worker"), left_out=None)
        await worker.of("worker.delivered", count=20)
        assert lag(topics, "plain-worker", [topics.event(RECEIVED)]) == 21
        assert database.execute("SELECT count(*) FROM undecodable_record") == [(0,)]
        topics.configure(topics.dead_letter("plain-worker"), {"max.message.bytes": "1000000"})
        await worker.of("worker.dead")
        await asyncio.to_thread(until, lambda: lag(topics, "plain-worker", [topics.event(RECEIVED)]) == 0)
    [letter] = topics.records(topics.dead_letter("plain-worker"))
    assert dict(letter.headers())["x-origin-offset"] == b"0"
    assert len(effects(database)) == len(rows)


class Timed(ExternalWorker):
    """Fails once, and notes when it ran again."""

    name = "timed-worker"
    event_types = frozenset({RECEIVED})

    def __init__(self):
        self.ran = []

    async def call(self, delivery, prepared):
        if delivery.attempt == 1:
            raise RuntimeError("once")
        self.ran.append((delivery.event.id, datetime.now(UTC)))


async def test_a_burst_of_failures_comes_back_in_due_order_and_never_early(database, topics, running):
    organization = database.organization()
    create_topics(topics, "timed-worker")
    produce(topics, [row(organization) for _ in range(300)])
    source = random.Random(11)
    timed = Timed()
    async with running(timed, backoff_scale=0.1, random=source.random) as worker:
        await worker.of("worker.delivered", count=300, timeout=60)
        retried = [fields for name, fields in worker.signals.seen if name == "worker.retried"]
    due = {fields["event_id"]: datetime.fromisoformat(fields["next_attempt_at"]) for fields in retried}
    late = [(ran - due[str(event_id)]).total_seconds() for event_id, ran in timed.ran]
    assert min(late) >= 0
    # spread over the jitter as they were drawn: in log order they would all come at the end of it
    assert sum(late) / len(late) < 0.5
    dues = [due[str(event_id)] for event_id, _ in timed.ran]
    assert all(later - earlier > timedelta(seconds=-0.5) for earlier, later in itertools.pairwise(dues))


async def test_the_test_kit_runs_a_handler_without_a_broker(database, effects_table):
    organization = database.organization()
    event = schemas.decode(schemas.encode(row(organization, payload=message("fail 1"))))
    async with await database.connect_async() as conn:
        failed = await testing.run(Plain(), event, conn)
        assert (failed.outcome, str(failed.error)) == ("failed", "attempt 1 fails")
        assert (await testing.run(Plain(), event, conn, attempt=2)).outcome == "done"
        called = await testing.run(Caller(), event, conn, attempt=2)
        assert (called.outcome, called.result) == ("done", "called")
        assert (await testing.run(Sleepy(1), event, conn)).outcome == "snoozed"
        assert await testing.targets(Fanned(), event, conn) == ["a", "b", "dead"]
    assert effects(database) == [(event.id, "", 2), (event.id, "", 2)]
