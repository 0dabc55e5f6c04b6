"""What the tests of inbound deliveries share: deliveries stored as the receiver stores them, and the workers' steps run
on the real database in the transactions that the runtime gives them."""

import itertools
import json
from collections import deque
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from types import SimpleNamespace

from psycopg.rows import dict_row

from afluente import postgres
from afluente.clock import SystemClock
from afluente.secrets import Keyring
from consumers import Delivery
from consumers.inbound.apply.writing import NotYet
from consumers.runtime.context import HandlerContext
from consumers.workers.webhook_normalize import WebhookNormalizeWorker
from producers.ingest import channels, store
from producers.ingest.sources import registered
from schemas import Event
from tests.producers.ingest import conftest as signing

SIGN = {
    "shopify": signing.shopify,
    "nuvemshop": signing.nuvemshop,
    "stripe": signing.stripe,
    "hotmart": signing.hotmart,
    "typeform": signing.typeform,
    "generic": signing.generic,
    "whatsapp": signing.whatsapp,
    "waha": signing.waha,
    "evolution": signing.evolution,
}


_EVENT = ("id", "organization_id", "event_type", "entity_kind", "entity_id", "payload", "metadata", "created_at")


class Inbound:
    """Stores deliveries and runs the worker over what they emitted."""

    def __init__(self, database, worker=None, clock=None):
        self.database = database
        self.clock = clock or SystemClock()
        self.keyring = Keyring.parse(Keyring.generate("test"))
        self.worker = worker or WebhookNormalizeWorker()
        self._numbers = itertools.count(1)
        self._handled = set()

    def channel(self, source, organization, **given):
        with postgres.connect(self.database.url) as conn:
            return channels.add(
                conn,
                self.keyring,
                organization_id=organization,
                source=source,
                secrets={"signature": signing.SECRET, **given.pop("secrets", {})},
                **given,
            )

    async def receive(self, source, channel, body, *, url_topic=None, received_at=None, **headers):
        """One POST, as the receiver stores it. A Shopify delivery gets an event id of its own unless it has one."""
        raw = body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()
        if source == "shopify":
            headers.setdefault("X-Shopify-Event-Id", f"evt-{next(self._numbers)}")
        signed = SIGN[source](raw, **headers)
        async with await postgres.connect_async(self.database.url) as conn:
            return await store.receive(
                conn,
                self.keyring,
                store.Incoming(
                    source=registered()[source],
                    channel_id=channel,
                    body=raw,
                    headers={name.lower(): value for name, value in signed.items()},
                    received_at=received_at or datetime.now(UTC),
                    url_topic=url_topic,
                    request_id="req-1",
                ),
            )

    async def shopify(self, channel, topic, body, **headers):
        return await self.receive("shopify", channel, body, **{"X-Shopify-Topic": topic, **headers})

    def pending(self):
        """The events for the worker that were not handled here yet, oldest first."""
        with postgres.connect(self.database.url) as conn:
            rows = conn.cursor(row_factory=dict_row).execute(
                "SELECT * FROM event_log WHERE event_type = ANY (%s) ORDER BY seq", [list(self.worker.event_types)]
            )
            return [Event(**{name: row[name] for name in _EVENT}) for row in rows if row["id"] not in self._handled]

    async def work(self):
        """Handle everything that waits. What needs something that is not there yet comes again after all others."""
        waiting = deque((event, 1) for event in self.pending())
        while waiting:
            event, attempt = waiting.popleft()
            self._handled.add(event.id)
            async with self.transaction(event) as ctx:
                if not await self.worker.targets(event, ctx.connection):
                    continue
            try:
                await self.handle(event, attempt)
            except NotYet:
                waiting.append((event, attempt + 1))

    async def handle(self, event, attempt=1):
        """One run of the handler, committed if it returns."""
        delivery = Delivery(self.worker.name, event, "", attempt, 0)
        async with self.transaction(event) as ctx:
            await self.worker.handle(delivery, ctx)

    @asynccontextmanager
    async def transaction(self, event):
        async with (
            await postgres.connect_async(self.database.url) as conn,
            conn.transaction(),
            postgres.act_for(conn, event.organization_id),
        ):
            deliveries = SimpleNamespace(worker=self.worker.name)
            yield HandlerContext(conn, self.clock, deliveries, event)  # type: ignore[arg-type]

    def rows(self, query, *parameters):
        """The rows of a query as dicts, seen as the owner."""
        with postgres.connect(self.database.url) as conn:
            return conn.cursor(row_factory=dict_row).execute(query, parameters).fetchall()

    def contact_events(self, organization=None):
        return self.rows(
            "SELECT * FROM contact_events WHERE metric_name IS DISTINCT FROM 'Contact Created'"
            " AND (%s::uuid IS NULL OR organization_id = %s) ORDER BY created_at, id",
            organization,
            organization,
        )

    def facts(self, organization=None):
        return [row["external_event_id"] for row in self.contact_events(organization)]

    def outcomes(self):
        return [
            (row["status"], row["reason"])
            for row in self.rows("SELECT status, reason FROM webhook_events WHERE parent_id IS NOT NULL ORDER BY id")
        ]

    def emitted(self, event_type=None):
        """Payloads of one type, or the types of everything but webhook.received and contact_event.recorded."""
        rows = self.rows("SELECT event_type, payload FROM event_log ORDER BY seq")
        if event_type is not None:
            return [row["payload"] for row in rows if row["event_type"] == event_type]
        skipped = ("webhook.received", "contact_event.recorded")
        return [row["event_type"] for row in rows if row["event_type"] not in skipped]
