"""What the dispatch tests share: a worker, subscribers, and deliveries run the way the runtime runs them.

``Dispatching`` plays the runtime's part between the worker's steps (transactions, roles, the delivery's row) on the
real database, so that a step can be held up or repeated; ``test_webhook_dispatch_process.py`` has the real one.
"""

import ipaddress
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from uuid import UUID, uuid4

import orjson

from afluente import postgres
from afluente.secrets import Keyring
from consumers import Delivery, Reject, Snooze
from consumers.outbound import subscriptions
from consumers.outbound.client import OutboundClient
from consumers.workers.webhook_dispatch import WebhookDispatchWorker
from schemas import Event

LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"),)


def event_of(organization_id, event_type="lead.created", payload=None, created_at=None):
    return Event(
        id=uuid4(),
        organization_id=organization_id,
        event_type=event_type,
        entity_kind="lead",
        entity_id=uuid4(),
        payload=payload if payload is not None else {"name": "José", "source": "site"},
        metadata={},
        created_at=created_at or datetime.now(UTC),
    )


class StepContext:
    """What the worker's steps get: a transaction on the real database, as the event's organization."""

    def __init__(self, connection, event):
        self.connection = connection
        self.next_attempt_at = None
        self._event = event

    def now(self):
        return datetime.now(UTC)

    @asynccontextmanager
    async def as_worker(self):
        async with postgres.act_for(self.connection, self._event.organization_id, role=postgres.WORKER_ROLE):
            yield

    async def emit(self, event_type, *, entity_kind, entity_id=None, payload, idempotency_key=None, deliver_at=None):
        row = await (
            await self.connection.execute(
                "SELECT emit_event(%s, %s, %s, %s)",
                (event_type, entity_kind, entity_id, orjson.dumps(payload).decode()),
            )
        ).fetchone()
        return row[0]

    async def reject_waiting(self, reason):
        async with self.as_worker():
            done = await self.connection.execute(
                "UPDATE event_delivery SET state = 'dead', last_error = %s, finished_at = now(), next_attempt_at = NULL"
                " WHERE worker = 'webhook-dispatch-worker' AND state = 'waiting' AND organization_id = %s"
                " AND target = (SELECT target FROM event_delivery WHERE event_id = %s AND state = 'claimed' LIMIT 1)",
                (reason, self._event.organization_id, self._event.id),
            )
        return done.rowcount


class Dispatching:
    def __init__(self, database, worker, keyring):
        self.database = database
        self.worker = worker
        self.keyring = keyring

    @classmethod
    @asynccontextmanager
    async def open(cls, database, *, allowed=LOOPBACK, deadline_s=5.0):
        keyring = Keyring.parse(Keyring.generate("test"))
        worker = WebhookDispatchWorker(
            keyring, OutboundClient(https_only=False, allowed=allowed, deadline_s=deadline_s)
        )
        await worker.open()
        try:
            yield cls(database, worker, keyring)
        finally:
            await worker.close()

    def subscribe(self, organization_id, url, event_types=("*",)):
        with self.database.connect() as conn:
            return subscriptions.create(
                conn, self.keyring, organization_id=organization_id, url=url, event_types=event_types
            )

    async def targets(self, event):
        async with self._transaction(event) as ctx:
            return list(await self.worker.targets(event, ctx.connection))

    async def run(self, event, subscription_id, attempt=1):
        """One attempt, all its steps. Returns 'done', or the error that the runtime would act on."""
        delivery = Delivery(self.worker.name, event, str(subscription_id), attempt, 0)
        self.claim(event, subscription_id)
        try:
            async with self._transaction(event) as ctx:
                prepared = await self.worker.prepare(delivery, ctx)
        except Reject as refused:
            return refused
        try:
            result = await self.worker.call(delivery, prepared)
        except Snooze as snoozed:
            return snoozed
        except Exception as error:
            try:
                async with self._transaction(event) as ctx:
                    # A Reject says what becomes of the delivery; what `failed` wrote stays.
                    rejected: Reject | None = None
                    try:
                        await self.worker.failed(delivery, prepared, error, ctx)
                    except Reject as reject:
                        rejected = reject
            finally:
                self.settle(event, subscription_id, "waiting")
            return rejected or error
        async with self._transaction(event) as ctx:
            await self.worker.record(delivery, result, ctx)
        self.settle(event, subscription_id, "done")
        return "done"

    def claim(self, event, subscription_id):
        self.database.execute(
            "INSERT INTO event_delivery (event_created_at, worker, event_id, target, organization_id, event_type, key,"
            " state) VALUES (%s, %s, %s, %s, %s, %s, %s, 'claimed')"
            " ON CONFLICT (event_created_at, worker, event_id, target)"
            " DO UPDATE SET state = 'claimed', next_attempt_at = NULL, finished_at = NULL",
            (
                event.created_at,
                self.worker.name,
                event.id,
                str(subscription_id),
                event.organization_id,
                event.event_type,
                str(subscription_id),
            ),
        )

    def settle(self, event, subscription_id, state):
        self.database.execute(
            "UPDATE event_delivery SET state = %s, next_attempt_at = CASE WHEN %s = 'waiting' THEN now() END,"
            " finished_at = CASE WHEN %s = 'done' THEN now() END WHERE event_id = %s AND target = %s",
            (state, state, state, event.id, str(subscription_id)),
        )

    def state(self, event, subscription_id):
        return self.database.execute(
            "SELECT state, last_error FROM event_delivery WHERE event_id = %s AND target = %s",
            (event.id, str(subscription_id)),
        )[0]

    def subscription(self, subscription_id):
        columns = "enabled, consecutive_failures, disabled_reason, last_error"
        row = self.database.execute(
            f"SELECT {columns} FROM webhook_subscriptions WHERE id = %s", (UUID(str(subscription_id)),)
        )[0]
        return dict(zip(columns.split(", "), row, strict=True))

    def emitted(self, event_type):
        return [
            row[0]
            for row in self.database.execute(
                "SELECT payload FROM event_log WHERE event_type = %s ORDER BY seq", (event_type,)
            )
        ]

    def attempts(self, subscription_id):
        columns = (
            "organization_id, event_id, delivery_id, attempt, status_code, error, snippet, duration_ms, started_at"
        )
        rows = self.database.execute(
            f"SELECT {columns} FROM webhook_delivery_attempts WHERE subscription_id = %s ORDER BY id",
            (UUID(str(subscription_id)),),
        )
        return [dict(zip(columns.split(", "), row, strict=True)) for row in rows]

    @asynccontextmanager
    async def _transaction(self, event):
        async with (
            await self.database.connect_async() as conn,
            conn.transaction(),
            postgres.act_for(conn, event.organization_id),
        ):
            yield StepContext(conn, event)
