"""Records of anybody's making and topics that refuse: nothing of it ends the process, holds an offset, or is lost."""

import asyncio
import random
import time
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from confluent_kafka import TopicPartition

import schemas
import schemas.topics
from afluente import kafka as clients
from consumers import ExternalWorker, Snooze, TransactionalWorker, dead_letters
from consumers.dead_letters import actions
from tests.consumers.runtime.support import (
    MESSAGE,
    PARTITIONS,
    ROOT,
    create_topics,
    delivery,
    effect_table,
    effects,
    lag,
    produce,
    produce_raw,
    row,
    states,
    until,
)
from tests.consumers.runtime.workers import Plain, write_effect

RECEIVED = "message.received"
ENV = {"PYTHONPATH": ROOT, "AFLUENTE_BACKOFF_SCALE": "0.0001"}
PLAIN = "tests.consumers.runtime.workers:Plain"
BROKER_LIMIT = 1_048_588


def message(body):
    return MESSAGE | {"body": body}


def noise(size):
    """Text that does not compress to less than half of it."""
    return random.Random(size).randbytes(size // 2).hex()


def put(topics, topic, event, headers):
    """An event with headers beside its own."""
    producer = clients.producer(topics.settings)
    value, key = schemas.encode(event), str(event.organization_id).encode()
    produce_raw(producer, topic, value, key, [*schemas.headers(event), *headers])
    assert producer.flush(30) == 0


def origin(partition=b"1", offset=b"1", topic=b"events.lead", **others):
    forged = {"x-origin-topic": topic, "x-origin-partition": partition, "x-origin-offset": offset, **others}
    return list(forged.items())


@pytest.mark.faults_long
def test_forged_headers_of_ours_do_not_end_the_process(database, topics, processes):
    effect_table(database)
    organization = database.organization()
    create_topics(topics, "plain-worker")
    source, again = topics.event(RECEIVED), topics.retry("plain-worker", "now")
    forged = {
        "on the source, partition": (source, origin(partition=b"99999999999")),
        "on the source, offset": (source, origin(offset=b"9" * 30)),
        "on the source, topic": (source, origin(topic=b"a\x00b")),
        "on the source, possible": (source, origin()),
        "on the source, a mark": (source, [("x-generation", b"9" * 40), ("x-attempt", b"\xff"), ("x-target", b"\x00")]),
        "on a retry topic, offset": (again, origin(offset=b"9" * 30)),
        "on retry.now, a time to come": (
            again,
            [("x-generation", b"0"), ("x-attempt", b"1"), ("x-due-ms", b"%d" % ((time.time() + 3600) * 1000))],
        ),
        "on a retry topic, generation": (again, [("x-generation", b"1000000"), ("x-attempt", b"3")]),
    }
    events = {name: row(organization, payload=message("fail")) for name in forged}
    for name, (topic, headers) in forged.items():
        put(topics, topic, events[name], headers)
    refused = [
        [("x-generation", b"2147483647"), ("x-attempt", b"1")],
        [("x-generation", b"0"), ("x-attempt", b"1"), ("x-target", b"t" * 3000)],
        [("x-generation", b"0"), ("x-attempt", b"1"), ("x-target", b"\x00")],
        [("x-generation", b"0"), ("x-attempt", b"1"), ("x-due-ms", b"253402300799999")],
        [("x-generation", "٣".encode()), ("x-attempt", b"1")],
    ]
    for headers in refused:
        put(topics, again, row(organization), headers)
    [good] = produce(topics, [row(organization)])
    worker = processes.start("worker", "run", PLAIN, env=ENV)
    worker.wait_for("worker.delivered", event_id=str(good.id), timeout=30)
    for event in events.values():
        worker.wait_for("worker.dead", event_id=str(event.id), attempt=8, timeout=60)
    worker.wait_for("worker.dead", event_id=None, count=len(refused))
    until(lambda: lag(topics, "plain-worker", [source, again]) == 0)
    assert worker.terminate() == 0
    found = {name: delivery(database, "plain-worker", event.id) for name, event in events.items()}
    assert {name: d["origin_topic"] for name, d in found.items()} == {name: t for name, (t, _) in forged.items()}
    assert all(d["origin_partition"] < PARTITIONS and d["target"] == "" for d in found.values())
    assert database.execute("SELECT error_class, count(*) FROM undecodable_record GROUP BY 1") == [
        ("BadHeaders", len(refused))
    ]
    letters = topics.records(topics.dead_letter("plain-worker"))
    assert len(letters) == len(events) + len(refused)


@pytest.mark.parametrize("protocol", ["consumer", pytest.param("classic", marks=pytest.mark.faults_long)])
def test_a_worker_away_for_longer_than_the_log_keeps_goes_on_with_what_there_is(database, topics, processes, protocol):
    effect_table(database)
    organization = database.organization()
    create_topics(topics, "plain-worker")
    source = topics.event(RECEIVED)
    partition = schemas.topics.partition_of(organization, PARTITIONS)
    env = ENV | {"AFLUENTE_GROUP_PROTOCOL": protocol}
    produce(topics, [row(organization)])
    worker = processes.start("worker", "run", PLAIN, env=env)
    worker.wait_for("worker.delivered", timeout=30)
    until(lambda: lag(topics, "plain-worker", [source]) == 0)
    assert worker.terminate() == 0

    def expire(before):
        admin = clients.admin(topics.settings)
        for future in admin.delete_records([TopicPartition(source, partition, before)]).values():
            future.result(20)

    produce(topics, [row(organization) for _ in range(4)])
    kept = produce(topics, [row(organization) for _ in range(3)])
    expire(5)
    worker = processes.start("worker", "run", PLAIN, env=env)
    expired = worker.wait_for("worker.records_expired", timeout=30)
    assert (expired["topic"], expired["partition"], expired["offset"]) == (source, partition, 5)
    for event in kept:
        worker.wait_for("worker.delivered", event_id=str(event.id), timeout=30)
    until(lambda: lag(topics, "plain-worker", [source]) == 0)
    assert worker.terminate() == 0
    # and when nothing is left: it is said once, not at each start
    produce(topics, [row(organization) for _ in range(2)])
    expire(10)
    worker = processes.start("worker", "run", PLAIN, env=env)
    worker.wait_for("worker.records_expired", timeout=30)
    until(lambda: lag(topics, "plain-worker", [source]) == 0)
    assert worker.terminate() == 0
    worker = processes.start("worker", "run", PLAIN, env=env)
    worker.wait_for("worker.ready", timeout=30)
    [last] = produce(topics, [row(organization)])
    worker.wait_for("worker.delivered", event_id=str(last.id), timeout=30)
    assert worker.terminate() == 0
    assert worker.events("worker.records_expired") == []


def largest(topics, topic, headers=()):
    """A record that just fits the topic: noise of the largest size that the broker takes."""
    producer = clients.producer(topics.settings, message_max_bytes=4_000_000)
    value = b"\x01" + random.Random(7).randbytes(BROKER_LIMIT - 200 - sum(len(n) + len(v) + 8 for n, v in headers))
    produce_raw(producer, topic, value, b"k", headers)
    assert producer.flush(30) == 0
    return value


async def test_a_record_at_its_topics_limit_is_buried_whole_where_the_topics_are_as_declared(database, topics, running):
    config = {"max.message.bytes": str(schemas.topics.LETTER_MAX_BYTES)}
    topics.create(topics.dead_letter("plain-worker"), partitions=PARTITIONS, config=config)
    create_topics(topics, "plain-worker")
    value = largest(topics, topics.event(RECEIVED), [("traceparent", b"00-x")])
    async with running(Plain()) as worker:
        await worker.of("worker.dead")
        assert not [name for name, _ in worker.signals.seen if name == "worker.record_refused"]
    [letter] = topics.records(topics.dead_letter("plain-worker"))
    assert letter.value() == value
    assert dict(letter.headers())["traceparent"] == b"00-x"


async def test_a_dead_letter_that_does_not_fit_goes_without_the_sources_headers_then_without_its_value(
    database, topics, running
):
    """Topics made with the broker's defaults: none is larger than that of the events."""
    create_topics(topics, "plain-worker")
    source = topics.event(RECEIVED)
    producer = clients.producer(topics.settings, message_max_bytes=4_000_000)
    headers = [(f"h{n}", random.Random(n).randbytes(10_000)) for n in range(104)] + [
        ("last", random.Random(0).randbytes(7_650))
    ]
    produce_raw(producer, source, b"no event", b"k", headers)
    assert producer.flush(30) == 0
    value = largest(topics, source)
    async with running(Plain()) as worker:
        await worker.of("worker.dead", count=2)
        refused = [f["left_out"] for name, f in worker.signals.seen if name == "worker.record_refused"]
        assert not [name for name, _ in worker.signals.seen if name == "worker.kafka_away"]
        await asyncio.to_thread(until, lambda: lag(topics, "plain-worker", [source]) == 0)
    assert sorted(refused) == ["headers", "headers", "headers, value"]
    bare, reference = sorted(topics.records(topics.dead_letter("plain-worker")), key=lambda r: r.value() is None)
    assert (bare.value(), dict(bare.headers())["x-omitted"]) == (b"no event", b"headers")
    assert "h0" not in dict(bare.headers())
    said = dict(reference.headers())
    assert (reference.key(), reference.value(), said["x-omitted"]) == (b"k", None, b"headers, value")
    assert said["x-origin-topic"].decode() == source
    assert database.execute("SELECT count(*) FROM undecodable_record WHERE dead_offset IS NOT NULL") == [(2,)]
    # the letter is read from the place it refers to
    with database.connect(role="afluente_worker") as conn:
        letters = dead_letters.find_undecodable(conn, dead_letters.Filter())
        found = [dead_letters.record_of(topics.settings, conn, letter) for letter in letters]
    assert {record.value for record in found} == {b"no event", value}


class Late(ExternalWorker):
    """Comes back in a week, when it is kept in Postgres meanwhile."""

    name = "late-worker"
    event_types = frozenset({RECEIVED})

    async def call(self, delivery, prepared):
        raise Snooze(timedelta(days=7))


@pytest.mark.parametrize("kind", [Plain, Late])
async def test_a_delivery_whose_retry_record_no_topic_takes_is_dead_and_can_be_retried(database, topics, running, kind):
    organization = database.organization()
    small = {"max.message.bytes": "4000"}
    topics.create(*topics.retries(kind.name), topics.dead_letter(kind.name), partitions=PARTITIONS, config=small)
    create_topics(topics, kind.name)
    event = row(organization, payload=message("fail 1") | {"waha_message_id": noise(20_000)})
    [event, good] = produce(topics, [event, row(organization)])
    async with running(kind(), backoff_scale=0.001) as worker:
        if kind is Late:
            await worker.of("worker.snoozed", count=2)
            database.execute("UPDATE event_delivery SET next_attempt_at = clock_timestamp()")
            await worker.of("worker.snoozed", event_id=str(good.id), count=2)
        else:
            await worker.of("worker.delivered", event_id=str(good.id))
        await asyncio.to_thread(
            until, lambda: (delivery(database, kind.name, event.id) or {}).get("dead_offset") is not None
        )
        await asyncio.to_thread(until, lambda: lag(topics, kind.name, [topics.event(RECEIVED)]) == 0)
        found = delivery(database, kind.name, event.id)
        assert (found["state"], found["error_class"], found["kept"]) == ("dead", "RecordRefused", False)
        assert "too large" in found["last_error"]
        [letter] = topics.records(topics.dead_letter(kind.name))
        assert letter.value() is None
        assert dict(letter.headers())["x-event-id"].decode() == str(event.id)
        assert dict(letter.headers())["x-origin-topic"].decode() == topics.event(RECEIVED)
        if kind is Plain:
            topics.configure(topics.retry(kind.name, "now"), {"max.message.bytes": "2000000"})
            with database.connect(role="afluente_worker", autocommit=True) as conn:
                chosen = dead_letters.find(conn, dead_letters.Filter(worker=kind.name))
                outcome = actions.reprocess(
                    conn, topics.settings, chosen, actor="test", reason="larger now", now=datetime.now(UTC)
                )
            assert outcome.failed == []
            # run again, and refused again, as the other retry topics are as small as they were
            await worker.of("worker.dead", event_id=str(event.id), attempt=1, count=2)


class Deferred(TransactionalWorker):
    """Its effect breaks a constraint that is checked at the commit only."""

    name = "deferred-worker"
    event_types = frozenset({RECEIVED})

    async def handle(self, delivery, ctx):
        await write_effect(ctx.connection, delivery)
        if delivery.payload["body"] == "twice":
            await write_effect(ctx.connection, delivery)


class DeferredCall(ExternalWorker):
    name = "deferred-call-worker"
    event_types = frozenset({RECEIVED})

    async def record(self, delivery, result, ctx):
        await Deferred.handle(self, delivery, ctx)

    async def call(self, delivery, prepared):
        return None


@pytest.mark.parametrize("kind", [Deferred, DeferredCall])
async def test_a_constraint_that_fails_at_the_commit_is_an_attempt_of_the_one_that_broke_it(
    database, topics, running, kind
):
    organization = database.organization()
    create_topics(topics, kind.name)
    database.execute(
        """ALTER TABLE public.effect ADD CONSTRAINT once UNIQUE (worker, event_id, target)
           DEFERRABLE INITIALLY DEFERRED"""
    )
    bodies = ["oi"] * 10 + ["twice"] + ["oi"] * 10
    rows = produce(topics, [row(organization, payload=message(body)) for body in bodies])
    async with running(kind()) as worker:
        retried = await worker.of("worker.retried", event_id=str(rows[10].id), attempt=1)
        assert "once" in retried["error"]
        await worker.of("worker.delivered", count=20)
        await asyncio.to_thread(until, lambda: lag(topics, kind.name, [topics.event(RECEIVED)]) == 0)
    assert states(database, kind.name) == {"done": 20, "waiting": 1}
    assert len(effects(database)) == 20


@pytest.mark.parametrize("kind", [Plain, DeferredCall])
async def test_a_delivery_that_the_table_cannot_hold_is_buried_and_the_batch_goes_on(database, topics, running, kind):
    """No value is known that gets there; the next one will be found by somebody else."""
    organization = database.organization()
    create_topics(topics, kind.name)
    rows = [row(organization) for _ in range(20)]
    database.execute(
        f"""CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
              IF NEW.event_id = '{rows[7].id}' THEN
                RAISE EXCEPTION 'out of range' USING ERRCODE = 'numeric_value_out_of_range';
              END IF;
              RETURN NEW;
            END $$;
            CREATE TRIGGER refuse BEFORE INSERT OR UPDATE ON event_delivery FOR EACH ROW EXECUTE FUNCTION refuse()"""
    )
    produce(topics, rows)
    async with running(kind()) as worker:
        await worker.of("worker.dead", event_id=None)
        await worker.of("worker.delivered", count=19)
        await asyncio.to_thread(until, lambda: lag(topics, kind.name, [topics.event(RECEIVED)]) == 0)
    [letter] = topics.records(topics.dead_letter(kind.name))
    assert letter.value() == schemas.encode(rows[7])
    assert database.execute("SELECT error_class FROM undecodable_record") == [("NumericValueOutOfRange",)]


class Impossible(ExternalWorker):
    """Asks to come back beyond the end of time."""

    name = "impossible-worker"
    event_types = frozenset({RECEIVED})

    async def call(self, delivery, prepared):
        raise Snooze(1e18)


async def test_a_wait_beyond_the_end_of_time_is_a_failed_attempt(database, topics, running):
    organization = database.organization()
    create_topics(topics, "impossible-worker")
    [event] = produce(topics, [row(organization, entity_id=uuid4())])
    async with running(Impossible()) as worker:
        await worker.of("worker.retried", event_id=str(event.id), attempt=1)
    assert delivery(database, "impossible-worker", event.id)["error_class"] == "OverflowError"
