"""Workers that the real command runs in tests of faults: each run of a handler is noted where no crash takes it back.

The note is a line in the file RUNS, written before anything else happens: "begin" or "end", worker, event, target,
attempt, milliseconds, process. A payload's body says how its delivery goes: "ok", "fail N" (the first N attempts),
"dead" (all of them) and "reject".
"""

import asyncio
import faulthandler
import os
import signal
import time
from typing import ClassVar

from afluente import kafka as clients
from afluente.telemetry import get_logger
from consumers import ExternalWorker, Policy, Reject, TransactionalWorker

ATTEMPTS = 4
TIMEOUT_S = float(os.environ.get("TIMEOUT_S", "20"))
POLICY = Policy(attempts=ATTEMPTS, timeout_s=TIMEOUT_S, concurrency=50)
ORDERED = Policy(attempts=ATTEMPTS, timeout_s=TIMEOUT_S, concurrency=50, ordering="key")

_EFFECT = "INSERT INTO effect (worker, event_id, target, attempt, organization_id, key) VALUES (%s, %s, %s, %s, %s, %s)"


def _consumer(*arguments, consumer=clients.consumer, **overrides):
    """The classic protocol keeps the session's length with the member: as short as the broker lets it be."""
    if overrides.get("group_protocol") == "classic":
        overrides |= {"session_timeout_ms": 6000, "heartbeat_interval_ms": 500}
    if interval := os.environ.get("MAX_POLL_MS"):
        overrides["max_poll_interval_ms"] = int(interval)
    return consumer(*arguments, **overrides)


clients.consumer = _consumer
faulthandler.register(signal.SIGUSR1, all_threads=True)  # where its threads are, for one that does not end


def note(what, delivery):
    line = f"{what} {delivery.worker} {delivery.event.id} {delivery.target or '-'} {delivery.attempt}"
    runs = os.open(os.environ["RUNS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(runs, f"{line} {time.time_ns() / 1e6} {os.getpid()}\n".encode())
    finally:
        os.close(runs)


def fail_as_told(delivery):
    match str(delivery.payload["body"]).split():
        case ["reject"]:
            raise Reject("asked to")
        case ["dead"]:
            raise RuntimeError(f"attempt {delivery.attempt} fails")
        case ["fail", times] if delivery.attempt <= int(times):
            raise RuntimeError(f"attempt {delivery.attempt} fails")


class _Noted:
    event_types = frozenset({"message.received"})
    policy: ClassVar[Policy] = POLICY

    def key(self, event, target):
        return event.payload["conversation_id"]

    async def effect(self, conn, delivery):
        key = self.key(delivery.event, delivery.target)
        event = delivery.event
        await conn.execute(
            _EFFECT, (delivery.worker, event.id, delivery.target, delivery.attempt, delivery.organization_id, key)
        )


class Writer(_Noted, TransactionalWorker):
    name = "writer-worker"

    async def handle(self, delivery, ctx):
        note("begin", delivery)
        await self.effect(ctx.connection, delivery)
        fail_as_told(delivery)


class StrictWriter(Writer):
    name = "strict-writer-worker"
    policy = ORDERED


class Caller(_Noted, ExternalWorker):
    """Two targets for each event."""

    name = "caller-worker"

    async def targets(self, event, conn):
        return ("a", "b")

    async def call(self, delivery, prepared):
        note("begin", delivery)
        await asyncio.sleep(float(os.environ.get("CALL_S", "0.02")))
        note("end", delivery)
        fail_as_told(delivery)

    async def record(self, delivery, result, ctx):
        await self.effect(ctx.connection, delivery)


class StrictCaller(Caller):
    name = "strict-caller-worker"
    policy = ORDERED

    async def targets(self, event, conn):
        return ("",)


class Gated(Caller):
    """Says that it calls, then waits for the file GATE to appear."""

    name = "gated-worker"
    policy = Policy(attempts=ATTEMPTS, timeout_s=60)

    async def targets(self, event, conn):
        return ("",)

    async def call(self, delivery, prepared):
        note("begin", delivery)
        get_logger(__name__).info("test.calling", event_id=str(delivery.event.id))
        while not os.path.exists(os.environ["GATE"]):
            await asyncio.sleep(0.02)
        note("end", delivery)


ALL = (Writer, StrictWriter, Caller, StrictCaller)
