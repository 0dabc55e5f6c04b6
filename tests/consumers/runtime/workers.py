"""Workers for the tests, also run by the real command as `tests.consumers.runtime.workers:Class`."""

import asyncio
import os
import threading

from afluente.telemetry import get_logger
from consumers import BatchWorker, ExternalWorker, Policy, Reject, TransactionalWorker

RECEIVED = frozenset({"message.received"})

_EFFECT = "INSERT INTO effect (worker, event_id, target, attempt, organization_id, key) VALUES (%s, %s, %s, %s, %s, %s)"


async def write_effect(conn, delivery, key=None):
    await conn.execute(
        _EFFECT,
        (delivery.worker, delivery.event.id, delivery.target, delivery.attempt, delivery.organization_id, key),
    )


class Plain(TransactionalWorker):
    """One effect row for each delivery; a body of "fail" always fails, "reject" is rejected, "fail N" fails N times."""

    name = "plain-worker"
    event_types = RECEIVED

    async def handle(self, delivery, ctx):
        await write_effect(ctx.connection, delivery)
        body = str(delivery.payload.get("body"))
        if body == "reject":
            raise Reject("asked to")
        if body == "fail" or (body.startswith("fail ") and delivery.attempt <= int(body[5:])):
            raise RuntimeError(f"attempt {delivery.attempt} fails")


class Batch(BatchWorker):
    """The same in one statement for all."""

    name = "batch-worker"
    event_types = RECEIVED

    async def handle_batch(self, deliveries, ctx):
        async with ctx.connection.cursor() as cursor:
            await cursor.executemany(
                _EFFECT, [(d.worker, d.event.id, d.target, d.attempt, d.organization_id, None) for d in deliveries]
            )
        if any(d.payload.get("body") == "fail" for d in deliveries):
            raise RuntimeError("one of them is bad")


class Caller(ExternalWorker):
    """Writes its call to a file that a crash cannot take back, and the effect with the record."""

    name = "caller-worker"
    event_types = RECEIVED
    policy = Policy(timeout_s=5)

    async def call(self, delivery, prepared):
        if path := os.environ.get("CALLS_FILE"):
            with open(path, "a") as calls:
                calls.write(delivery.idempotency_key + "\n")
        await asyncio.sleep(float(os.environ.get("CALL_S", "0")))
        body = str(delivery.payload.get("body"))
        if body == "fail" or (body.startswith("fail ") and delivery.attempt <= int(body[5:])):
            raise RuntimeError(f"attempt {delivery.attempt} fails")
        return "called"

    async def record(self, delivery, result, ctx):
        assert result == "called"
        await write_effect(ctx.connection, delivery)


class Patient(ExternalWorker):
    """Says that it calls, then waits for a file to appear."""

    name = "patient-worker"
    event_types = RECEIVED
    policy = Policy(timeout_s=60)

    async def call(self, delivery, prepared):
        get_logger(__name__).info("test.calling", event_id=str(delivery.event.id))
        while not os.path.exists(os.environ["GATE"]):
            await asyncio.sleep(0.05)

    async def record(self, delivery, result, ctx):
        await write_effect(ctx.connection, delivery)


class Blocking(TransactionalWorker):
    """Blocks the event loop, as no handler may, until a file appears."""

    name = "blocking-worker"
    event_types = RECEIVED

    async def handle(self, delivery, ctx):
        get_logger(__name__).info("test.blocking")
        while not os.path.exists(os.environ["GATE"]):
            threading.Event().wait(0.02)
