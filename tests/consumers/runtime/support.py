"""Records of events as the relay would produce them, an effect table, and looking at what came of it."""

import json
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from confluent_kafka import TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

import schemas
import schemas.topics
from afluente import kafka as clients

MESSAGE = {"direction": "in", "conversation_id": "c-1", "contact_id": "p-1", "body": "oi", "waha_message_id": "w-1"}


PARTITIONS = 3
ROOT = Path(__file__).parents[3]  # where `tests` is found by the commands


def create_topics(topics, *workers, families=(), partitions=PARTITIONS):
    """The topics of these workers and of messages, and no others: making all that there are takes seconds."""
    names = [*families] or [topics.event("message.received")]
    for worker in workers:
        names += [*topics.retries(worker), topics.dead_letter(worker)]
    topics.create(*names, partitions=partitions)


def organizations_everywhere(database, count):
    """So many organizations, with at least one in each partition."""
    found = {}
    while len(found) < count or {schemas.topics.partition_of(o, PARTITIONS) for o in found} != set(range(PARTITIONS)):
        found[database.organization(f"o{len(found)}")] = True
    return list(found)


def row(organization_id, event_type="message.received", entity_id=None, payload=None, created_at=None, metadata=None):
    """An event_log row that was never in the table."""
    body = payload if payload is not None else MESSAGE
    return schemas.Row(
        seq=1,
        id=uuid4(),
        organization_id=organization_id,
        event_type=event_type,
        entity_kind=event_type.split(".")[0],
        entity_id=entity_id or uuid4(),
        payload=json.dumps(body).encode(),
        metadata=json.dumps(metadata or {}).encode(),
        created_at=created_at or datetime.now(UTC),
    )


def produce(topics, rows, transactional=False, topic=None):
    """Put the rows on their topics and wait for the broker. `transactional`: one transaction a record, so that each is
    followed by a marker that takes an offset of its own."""
    overrides = {"transactional_id": f"{topics.prefix}test"} if transactional else {}
    producer = clients.producer(topics.settings, **overrides)
    if transactional:
        producer.init_transactions(30)
    for event in rows:
        if transactional:
            producer.begin_transaction()
        produce_raw(
            producer,
            topic or topics.event(event.event_type),
            schemas.encode(event),
            key=str(event.organization_id).encode(),
            headers=schemas.headers(event),
        )
        if transactional:
            producer.commit_transaction(30)
    assert producer.flush(30) == 0
    return rows


def produce_raw(producer, topic, value, key=None, headers=()):
    """One record of any bytes; the delivery is checked."""

    def check(error, _):
        assert error is None, error

    while True:
        try:
            producer.produce(topic, value=value, key=key, headers=list(headers), on_delivery=check)
            return
        except BufferError:
            producer.poll(0.1)


def effect_table(database):
    """A table that handlers write one row to for each run; nothing in it keeps duplicates out."""
    database.execute(
        """
        CREATE TABLE public.effect (
            worker text NOT NULL, event_id uuid NOT NULL, target text NOT NULL, attempt integer NOT NULL,
            organization_id uuid NOT NULL, key text, number bigint GENERATED ALWAYS AS IDENTITY);
        SELECT tenancy.protect('public.effect');
        GRANT SELECT, INSERT ON public.effect TO afluente_app, afluente_worker;
        """
    )


def effects(database, worker=None):
    """(event_id, target, attempt) of each run that was committed, in order."""
    return database.execute(
        "SELECT event_id, target, attempt FROM public.effect WHERE worker = %s OR %s::text IS NULL ORDER BY number",
        [worker, worker],
    )


def states(database, worker):
    """How many deliveries of a worker are in each state."""
    return dict(
        database.execute("SELECT state, count(*) FROM event_delivery WHERE worker = %s GROUP BY state", [worker])
    )


def delivery(database, worker, event_id, target=""):
    """One delivery's row as a dict."""
    found = database.execute(
        """SELECT to_jsonb(d), d.next_attempt_at, d.kept_value IS NOT NULL FROM event_delivery d
            WHERE worker = %s AND event_id = %s AND target = %s""",
        [worker, event_id, target],
    )
    return found[0][0] | {"next_attempt_at": found[0][1], "kept": found[0][2]} if found else None


def lag(topics, worker, names):
    """Committed offsets against the ends that a read_committed reader sees: what `kafka-consumer-groups` calls lag."""
    consumer = clients.consumer(topics.settings, worker)
    try:
        total = 0
        for name in names:
            partitions = consumer.list_topics(name, timeout=10).topics[name].partitions
            for committed in consumer.committed([TopicPartition(name, p) for p in partitions], timeout=10):
                low, high = consumer.get_watermark_offsets(TopicPartition(name, committed.partition), timeout=10)
                total += high - (committed.offset if committed.offset >= 0 else low)
        return total
    finally:
        consumer.close()


def reset(topics, worker, names):
    """Put the group back to the beginning of its topics. No member may be running."""
    consumer = clients.consumer(topics.settings, worker)
    offsets = []
    for name in names:
        partitions = consumer.list_topics(name, timeout=10).topics[name].partitions
        offsets += [TopicPartition(name, partition, 0) for partition in partitions]
    consumer.commit(offsets=offsets, asynchronous=False)
    consumer.close()


def until(condition, timeout=20.0):
    """Ask the servers again and again until the answer is yes. For what nobody signals; not in the event loop."""
    deadline = time.monotonic() + timeout
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s"
        pause.wait(0.05)


def short_sessions(topics, *workers):
    """A killed member is missed after 3 s: KIP-848 keeps the session time with the broker, for each group."""
    admin = clients.admin(topics.settings)
    values = {"consumer.session.timeout.ms": "3000", "consumer.heartbeat.interval.ms": "500"}
    for worker in workers:
        entries = [ConfigEntry(k, v, incremental_operation=AlterConfigOpType.SET) for k, v in values.items()]
        group = ConfigResource(ResourceType.GROUP, topics.settings.group_id(worker), incremental_configs=entries)
        for future in admin.incremental_alter_configs([group]).values():
            future.result(20)
