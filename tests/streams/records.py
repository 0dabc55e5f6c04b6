"""Contact events as records, what they must come to, and what the tables say."""

import json
import random
import time
import uuid
from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import NamedTuple

import schemas
from afluente import kafka as clients
from schemas.partitioner import partition_for
from streams.status import bounds

START = datetime(2026, 3, 1, tzinfo=UTC)
METRICS = ("Order Placed", "Order Paid", "Message Received", "Link Clicked")


@dataclass(frozen=True)
class ContactEvent:
    """One row of contact_events, as far as the summaries see it."""

    id: uuid.UUID
    organization_id: uuid.UUID
    contact_id: uuid.UUID
    metric_name: str | None
    occurred_at: datetime
    value: str | None = None
    currency: str | None = None
    event_type: str | None = None

    def row(self, seq=1, **changes):
        payload = {
            "contact_event_id": str(self.id),
            "contact_id": str(self.contact_id),
            "contact_event_type": self.event_type,
            "metric_name": self.metric_name,
            "category": None,
            "source_type": "EXTERNAL",
            "source": "shopify",
            "external_event_id": f"order_paid:{self.id}",
            "unique_event_id": None,
            "object_id": None,
            "object_id_ref": None,
            "entity_type": None,
            "entity_id": None,
            "value": self.value,
            "currency": self.currency,
            "occurred_at": self.occurred_at.isoformat(timespec="microseconds"),
            "received_at": self.occurred_at.isoformat(timespec="microseconds"),
            "properties": {},
        } | changes
        return schemas.Row(
            seq=seq,
            id=uuid.uuid5(self.id, "event"),
            organization_id=self.organization_id,
            event_type="contact_event.recorded",
            entity_kind="contact",
            entity_id=self.contact_id,
            payload=json.dumps(payload).encode(),
            metadata=b"{}",
            created_at=self.occurred_at,
        )

    def value_bytes(self, **changes):
        return schemas.encode(self.row(**changes))


def some_events(count, *, organizations=3, contacts=5, seed=1):
    """Contact events of a few contacts, out of order in time, some with amounts, some without a metric."""
    rng = random.Random(seed)
    people = [
        (organization, uuid.UUID(int=rng.getrandbits(128), version=4))
        for organization in (uuid.UUID(int=rng.getrandbits(128), version=4) for _ in range(organizations))
        for _ in range(contacts)
    ]
    events = []
    for _ in range(count):
        organization, contact = rng.choice(people)
        amount = rng.random() < 0.5
        events.append(
            ContactEvent(
                id=uuid.UUID(int=rng.getrandbits(128), version=4),
                organization_id=organization,
                contact_id=contact,
                metric_name=rng.choice([*METRICS, None]) if rng.random() < 0.3 else rng.choice(METRICS),
                occurred_at=START + timedelta(microseconds=rng.randrange(90 * 86400 * 1_000_000)),
                value=f"{rng.randrange(-999, 10_000_000)}.{rng.randrange(100):02d}" if amount else None,
                currency=rng.choice(["BRL", "USD", None]) if amount else None,
                event_type="product_viewed",
            )
        )
    return events


def expected(events):
    """The recount: what the summaries of these contact events must be, each counted once."""
    groups = defaultdict(list)
    for event in {(event.organization_id, event.id): event for event in events}.values():
        if event.metric_name is not None:
            groups[event.organization_id, event.contact_id, event.metric_name].append(event)
    result = {}
    for key, found in groups.items():
        totals: defaultdict[str, Decimal] = defaultdict(Decimal)
        for event in found:
            if event.value is not None:
                totals[event.currency or "BRL"] += Decimal(event.value)
        times = [event.occurred_at for event in found]
        result[key] = (len(found), min(times), max(times), dict(totals))
    return result


def summaries(database, generation=1):
    """The same from the tables, as they are at one moment."""
    return {
        (organization, contact, metric): (
            count,
            first,
            last,
            {currency: Decimal(total) for currency, total in (totals or {}).items()},
        )
        for organization, contact, metric, count, first, last, totals in database.execute(
            """
            SELECT organization_id, contact_id, metric_name, event_count, first_event_at, last_event_at,
                   (SELECT jsonb_object_agg(c.currency, c.total_value::text)
                    FROM contact_metrics_summary_currency c
                    WHERE (c.generation, c.organization_id, c.contact_id, c.metric_name)
                        = (s.generation, s.organization_id, s.contact_id, s.metric_name))
            FROM contact_metrics_summary s
            WHERE generation = %s
            """,
            [generation],
        )
    }


class Record(NamedTuple):
    """A record as the sink wants it, without Kafka."""

    offset: int
    value: bytes | None
    key: bytes | None = None
    headers: tuple = ()


def records_of(events, start=0):
    """These contact events as records of one partition."""
    return [
        Record(offset, event.value_bytes(), str(event.organization_id).encode())
        for offset, event in enumerate(events, start)
    ]


class Feed:
    """Produces to the contact events' topic the way the relay does: in transactions, keyed by organization."""

    def __init__(self, topics, partitions=6):
        self.topic = topics.event("contact_event.recorded")
        self.partitions = partitions
        self.sent = []
        self._producer = clients.producer(topics.settings, transactional_id=f"{topics.prefix}feed", linger_ms=0)
        self._producer.init_transactions(30)

    def send(self, events, *, abort=False):
        """One transaction. Aborted events do not count as sent."""
        self._producer.begin_transaction()
        for event in events:
            self._put(event.organization_id, event.value_bytes(), schemas.headers(event.row()))
        self._producer.flush(30)
        if abort:
            self._producer.abort_transaction(30)
        else:
            self._producer.commit_transaction(30)
            self.sent += events

    def send_bytes(self, *values, organization_id=None, headers=()):
        """Records of any bytes, in one transaction."""
        organization_id = organization_id or uuid.uuid4()
        self._producer.begin_transaction()
        for value in values:
            self._put(organization_id, value, list(headers))
        self._producer.commit_transaction(30)
        return organization_id

    def _put(self, organization_id, value, headers):
        key = str(organization_id).encode()
        self._producer.produce(
            self.topic,
            value,
            key,
            partition_for(key, self.partitions),
            headers=headers,
        )


class Fences:
    """Waits for fences to move, by a notification from the table: killed processes cannot say how far they were."""

    def __init__(self, database, settings, topic):
        self.topic = topic
        self._settings = settings
        self._conn = database.connect(role=None, autocommit=True)
        self._conn.execute(
            """
            CREATE OR REPLACE FUNCTION tell_of_fence() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN
                PERFORM pg_notify('fence', '');
                RETURN NULL;
            END $$
            """
        )
        self._conn.execute(
            "CREATE OR REPLACE TRIGGER tell AFTER INSERT OR UPDATE ON stream_offset"
            " FOR EACH STATEMENT EXECUTE FUNCTION tell_of_fence()"
        )
        self._conn.execute("LISTEN fence")

    def now(self):
        rows = self._conn.execute(
            "SELECT partition, next_offset FROM stream_offset WHERE topic = %s AND generation = 1", [self.topic]
        )
        return dict(rows.fetchall())

    def ends(self):
        """The ends, open transactions included: a commit is confirmed before its records can be read."""
        return {partition: end for partition, (_, end) in bounds(self._settings, self.topic).items()}

    def wait_for(self, reached, timeout=60.0):
        """Until `reached(fences)` holds."""
        deadline = time.monotonic() + timeout
        while not reached(fences := self.now()):
            left = deadline - time.monotonic()
            assert left > 0, f"fences are at {fences} after {timeout} s; the ends are {self.ends()}"
            for _ in self._conn.notifies(timeout=min(left, 5), stop_after=1):
                pass

    def wait_until_folded(self, timeout=60.0):
        """Until every record produced so far is behind a fence."""
        ends = self.ends()
        self.wait_for(lambda fences: all(fences.get(partition, 0) >= end for partition, end in ends.items()), timeout)

    def wait_for_progress(self, timeout=30.0):
        """Until any fence has moved from where it is now."""
        before = self.now()
        self.wait_for(lambda fences: any(fences[partition] > before.get(partition, 0) for partition in fences), timeout)
