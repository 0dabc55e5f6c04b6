"""What the topics should hold, from the table, and what they do hold, by a plain consumer.

Shares no code with the relay. Rows carry a version number of their organization, taken under a row lock: whoever took 7
had seen 6. So the records of an organization, in the order of their offsets, must count 1, 2, 3 ...
"""

import random
import threading
import time
import uuid
from collections import Counter, defaultdict

from confluent_kafka import Consumer, KafkaError, TopicPartition
from psycopg.types.json import Jsonb

import schemas

EVENT_TYPE = "probe.counted"  # not in the catalogue, so all of it is on one topic

_TAKE = "UPDATE public.probe SET version = version + 1 WHERE organization_id = %s RETURNING version"
_EMIT = "SELECT emit_event_for(%s, %s, 'contact', %s, %s)"


class Writers:
    """Organizations and their version numbers, and the ways to write an event."""

    def __init__(self, database, organizations=4):
        self.database = database
        database.execute(
            "CREATE TABLE public.probe (organization_id uuid PRIMARY KEY, version bigint NOT NULL DEFAULT 0);"
            "GRANT ALL ON public.probe TO afluente_worker"
        )
        self.organizations = [database.organization(f"Loja {number}") for number in range(organizations)]
        for organization in self.organizations:
            self.add(organization)

    def add(self, organization):
        self.database.execute("INSERT INTO public.probe (organization_id) VALUES (%s)", [organization])
        return organization

    def emit(self, conn, organization, count=1, padding=""):
        """Emit `count` events in `conn`'s transaction."""
        for _ in range(count):
            (version,) = conn.execute(_TAKE, [organization]).fetchone()
            payload = Jsonb({"version": version, "padding": padding})
            conn.execute(_EMIT, [organization, EVENT_TYPE, uuid.uuid4(), payload])

    def commit(self, count=1, organization=None, padding=""):
        """Emit `count` events in one committed transaction."""
        with self.database.connect() as conn:
            self.emit(conn, organization or self.organizations[0], count, padding)

    def storm(self, events, threads=8, seed=None):
        """Commit `events` in transactions of all kinds from `threads` connections at once; returns at their end."""
        left, lock = [events], threading.Lock()
        failures = []

        def write(number):
            chance = random.Random(f"{seed}-{number}")
            try:
                with self.database.connect() as conn:
                    while True:
                        with lock:
                            if left[0] <= 0:
                                return
                            wanted = min(left[0], chance.choice([1, 1, 1, 2, 3, 10]))
                            left[0] -= wanted
                        self._transaction(conn, chance, wanted)
            except Exception as error:  # seen by the caller
                failures.append(error)

        workers = [threading.Thread(target=write, args=(number,)) for number in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if failures:
            raise failures[0]

    def _transaction(self, conn, chance, wanted):
        organization = chance.choice(self.organizations)
        if chance.random() < 0.2:  # takes its id early and its rows late
            conn.execute("SELECT pg_current_xact_id(), pg_sleep(%s)", [chance.random() * 0.02])
        if chance.random() < 0.15:  # all for nothing, once, with the sequence numbers gone
            self.emit(conn, organization, chance.randint(1, 3))
            conn.rollback()
        if chance.random() < 0.2:
            with conn.transaction(force_rollback=True):
                self.emit(conn, organization, 2)
        for step in range(wanted):
            if chance.random() < 0.2:
                with conn.transaction():  # a savepoint: its rows bear the top level's id
                    self.emit(conn, organization)
            else:
                self.emit(conn, organization)
            if step == 0 and chance.random() < 0.2:  # rows first, the commit after others
                conn.execute("SELECT pg_sleep(%s)", [chance.random() * 0.02])
        conn.commit()


class Reader:
    """A read_committed consumer of all event topics and the relay's dead letters, from their beginning."""

    def __init__(self, topics, *, bootstrap_servers=None):
        self.names = [*topics.families(), topics.relay_dead_letter]
        self.dead_letter = topics.relay_dead_letter
        self.records = []
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap_servers or topics.kafka.bootstrap_servers,
                "group.id": "oracle",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "fetch.wait.max.ms": 20,
                "reconnect.backoff.max.ms": 500,
            }
        )
        partitions = self._consumer.list_topics(timeout=10).topics
        self._places = [(name, number) for name in self.names for number in partitions[name].partitions]
        self._consumer.assign([TopicPartition(*place, 0) for place in self._places])

    def wait_for(self, count, timeout=60.0):
        """Read until there are `count` records; returns them all."""
        deadline = time.monotonic() + timeout
        while len(self.records) < count:
            assert time.monotonic() < deadline, f"{len(self.records)} of {count} records after {timeout} s"
            self._take(self._consumer.poll(0.5))
        return self.records

    def read_to_the_end(self, timeout=60.0):
        """Read up to the high watermarks of now; returns all records. An open transaction makes it fail."""
        ends = {
            place: self._consumer.get_watermark_offsets(TopicPartition(*place), timeout=10)[1] for place in self._places
        }
        deadline = time.monotonic() + timeout
        while True:
            self._take(self._consumer.poll(0.1))
            at = self._consumer.position([TopicPartition(*place) for place in self._places])
            if all(max(p.offset, 0) >= ends[p.topic, p.partition] for p in at):
                return self.records
            assert time.monotonic() < deadline, f"the end is not reached: {ends}, {at}"

    def close(self):
        self._consumer.close()

    def _take(self, record):
        if record is None:
            return
        if record.error() is None:
            self.records.append(record)
        else:
            assert record.error().retriable() or record.error().code() in (
                KafkaError._ALL_BROKERS_DOWN,
                KafkaError._TRANSPORT,
            ), record.error()


def event_id_of(record):
    return uuid.UUID(dict(record.headers())["ce_id"].decode())


def assert_exactly_once_in_order(database, records):
    """Every committed row is one record, no other record exists, and each organization counts up by one."""
    table = {row[0] for row in database.execute("SELECT id FROM event_log")}
    ids = Counter(event_id_of(record) for record in records)
    assert not (missing := table - set(ids)), f"{len(missing)} of {len(table)} lost: {list(missing)[:5]}"
    assert not (unknown := set(ids) - table), f"{len(unknown)} records of no committed row: {list(unknown)[:5]}"
    assert not (twice := [key for key, count in ids.items() if count > 1]), f"{len(twice)} twice: {twice[:5]}"
    versions = defaultdict(list)
    for record in sorted(records, key=lambda r: (r.topic(), r.partition(), r.offset())):
        if record.topic().endswith("relay.dead-letter"):
            continue  # a row that could not be published is there, and has no version to follow
        event = schemas.decode(record.value())
        if event.event_type == EVENT_TYPE:
            versions[event.organization_id].append(event.payload["version"])
    for organization, seen in versions.items():
        assert seen == list(range(1, len(seen) + 1)), f"{organization} out of order: {seen}"
