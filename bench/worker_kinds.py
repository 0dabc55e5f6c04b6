"""Our workers of the benches, run as anybody's are: `afluente worker run bench.worker_kinds:EffectWorker`.

Their effect is a row of `bench_effect` (worker_effects.py), the same that every peer writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import orjson

from bench.rows import EVENT_TYPE
from consumers import BatchWorker, Context, Delivery, ExternalWorker, Policy, TransactionalWorker

CALL_S = 0.02
SLOW_CALL_S = 1.0

_EFFECTS = """
INSERT INTO bench_effect (worker, event_id, organization_id, contact_id, body, emitted_at)
SELECT %s, event_id, organization_id, contact_id, body, emitted_at
  FROM jsonb_to_recordset(%s::jsonb) AS input (
       event_id uuid, organization_id uuid, contact_id text, body text, emitted_at timestamptz)
"""
_EFFECT = """
INSERT INTO bench_effect (worker, event_id, organization_id, contact_id, body, emitted_at)
VALUES (%s, %s, %s, %s, %s, %s)
"""


class EffectWorker(BatchWorker):
    """Transactional, its effects by one statement with one parameter."""

    name = "bench-effect-worker"
    event_types = frozenset({EVENT_TYPE})
    policy = Policy(batch=500)

    async def handle_batch(self, deliveries: Sequence[Delivery], ctx: Context) -> None:
        await _write_all(self.name, deliveries, ctx)


class NoteWorker(TransactionalWorker):
    """Transactional, one delivery at a time, as most are written."""

    name = "bench-note-worker"
    event_types = frozenset({EVENT_TYPE})

    async def handle(self, delivery: Delivery, ctx: Context) -> None:
        await _write(self.name, delivery, ctx)


class CallWorker(ExternalWorker):
    """A call of 20 ms for each event, as many as 400 at once, then the effects of those that came back together."""

    name = "bench-call-worker"
    event_types = frozenset({EVENT_TYPE})
    policy = Policy(concurrency=400)

    async def call(self, delivery: Delivery, prepared: Any) -> None:
        await asyncio.sleep(CALL_S)

    async def record_all(self, done: Sequence[tuple[Delivery, Any]], ctx: Context) -> None:
        await _write_all(self.name, [delivery for delivery, _ in done], ctx)


class SlowWorker(ExternalWorker):
    """A call of a second, with the bounds that every worker has if it says nothing."""

    name = "bench-slow-worker"
    event_types = frozenset({EVENT_TYPE})

    async def call(self, delivery: Delivery, prepared: Any) -> None:
        await asyncio.sleep(SLOW_CALL_S)

    async def record(self, delivery: Delivery, result: Any, ctx: Context) -> None:
        await _write(self.name, delivery, ctx)


class FailOnceWorker(ExternalWorker):
    """The world outside is away for the first attempt of each event, and there for the second."""

    name = "bench-fail-once-worker"
    event_types = frozenset({EVENT_TYPE})
    policy = Policy(concurrency=400)

    async def call(self, delivery: Delivery, prepared: Any) -> None:
        if delivery.attempt == 1:
            raise ConnectionRefusedError("nobody there")

    async def record(self, delivery: Delivery, result: Any, ctx: Context) -> None:
        await _write(self.name, delivery, ctx)


async def _write_all(worker: str, deliveries: Sequence[Delivery], ctx: Context) -> None:
    effects = [
        {
            "event_id": delivery.event.id_text,
            "organization_id": delivery.event.organization_text,
            "contact_id": delivery.payload["contact_id"],
            "body": delivery.payload["body"],
            "emitted_at": delivery.event.created_at,
        }
        for delivery in deliveries
    ]
    await ctx.connection.execute(_EFFECTS, [worker, orjson.dumps(effects).decode()])


async def _write(worker: str, delivery: Delivery, ctx: Context) -> None:
    event = delivery.event
    body = (event.payload["body"] or "")[:500]
    values = [worker, event.id, event.organization_id, event.payload["contact_id"], body, event.created_at]
    await ctx.connection.execute(_EFFECT, values)
