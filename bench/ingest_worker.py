"""How many stored deliveries `webhook-normalize-worker` works off in a second: the worker's own command, from Kafka.

The deliveries are stored and published before it starts. Rate = those after the first fifth / the time they took, by
the moments that it notes itself; every one must be processed, and have its contact event.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import psycopg

from afluente import postgres
from afluente.secrets import Keyring
from bench import usage
from bench.errors import BenchError
from bench.ingest_posts import connect, posts
from bench.servers import Servers
from consumers.workers.webhook_normalize import WebhookNormalizeWorker
from producers.ingest import store
from producers.ingest.sources import registered

WORKER = WebhookNormalizeWorker.name
TURNS = ("whatsapp", "shopify", "whatsapp", "stripe")
READY_WITHIN_S = 90.0
DONE_WITHIN_S = 120.0
LOOK_EVERY_S = 0.2

_STATE = """
SELECT count(*) FILTER (WHERE status = 'processed'), count(*) FILTER (WHERE status = 'received'),
       (SELECT count(DISTINCT webhook_event_id) FROM contact_events)
  FROM webhook_events WHERE parent_id IS NOT NULL
"""
_TIMES = """
SELECT count(*) - count(*) / 5,
       extract(epoch FROM max(processed_at) - percentile_disc(0.2) WITHIN GROUP (ORDER BY processed_at))::float8
  FROM webhook_events WHERE parent_id IS NOT NULL
"""


@dataclass(frozen=True)
class Run:
    """One run. CPU in microseconds for each delivery, start-up included."""

    deliveries: int
    per_s: float
    cpu_us: float
    postgres_cpu_us: float
    rss_mb: float

    def as_row(self) -> dict[str, Any]:
        return {name: round(value) if isinstance(value, float) else value for name, value in asdict(self).items()}


def measure(servers: Servers, deliveries: int, label: str, said: Callable[[str], None]) -> Run:
    """One run. BenchError when not all of it was done."""
    url, prefix = servers.database(label), f"{label}."
    keyring = Keyring.parse(Keyring.generate())
    with ExitStack() as ending:
        ending.callback(servers.drop, label)
        asyncio.run(_fill(url, keyring, deliveries))
        ending.enter_context(servers.topics(prefix, [WORKER]))
        _publish(servers, url, prefix, label, deliveries)
        servers.checkpoint()
        process = servers.command(["worker", "run", WORKER], url, prefix, f"{label}-worker")
        ending.callback(process.terminate)
        process.wait_for("worker.ready", timeout=READY_WITHIN_S)
        before = usage.cpu_s(process.pid), usage.family_cpu_s(servers.postgres_pid)
        with psycopg.connect(url, autocommit=True) as conn:
            _wait(conn, deliveries)
            (steady, seconds) = conn.execute(_TIMES).fetchone() or (0, 0.0)
        after = usage.cpu_s(process.pid), usage.family_cpu_s(servers.postgres_pid)
        cpu, postgres_cpu = (now - then for now, then in zip(after, before, strict=True))
        run = Run(
            deliveries=deliveries,
            per_s=steady / seconds,
            cpu_us=cpu / deliveries * 1e6,
            postgres_cpu_us=postgres_cpu / deliveries * 1e6,
            rss_mb=usage.peak_rss_mb(process.pid),
        )
        said(f"worker {label}: {run.per_s:,.0f}/s, {run.cpu_us:.0f} + {run.postgres_cpu_us:.0f} us CPU a delivery")
        return run


async def _fill(url: str, keyring: Keyring, deliveries: int) -> None:
    """Store them as the receiver does."""
    addresses = connect(url, keyring)
    sources = registered()
    async with await postgres.connect_async(url) as conn:
        for post in posts(addresses, deliveries, TURNS):
            headers = {name.lower(): value for name, value in post.headers.items()}
            incoming = store.Incoming(
                sources[post.address.source], post.address.channel_id, post.body, headers, datetime.now(UTC)
            )
            receipt = await store.receive(conn, keyring, incoming)
            if receipt.events != 1:
                raise BenchError(f"a delivery was not stored: {receipt}")


def _publish(servers: Servers, url: str, prefix: str, label: str, deliveries: int) -> None:
    from producers.relay.status import look

    relay = servers.relay(url, prefix, f"{label}-relay")
    try:
        relay.wait_for("relay.ready", timeout=READY_WITHIN_S)
        deadline = time.monotonic() + DONE_WITHIN_S
        while look(servers.settings(prefix), url).waiting.rows:
            if time.monotonic() > deadline:
                raise BenchError(f"the relay did not publish {deliveries} events")
            time.sleep(LOOK_EVERY_S)
    finally:
        relay.terminate()


def _wait(conn: psycopg.Connection[Any], deliveries: int) -> None:
    deadline = time.monotonic() + DONE_WITHIN_S
    while True:
        processed, waiting, recorded = conn.execute(_STATE).fetchone() or (0, 0, 0)
        if not waiting:
            break
        if time.monotonic() > deadline:
            raise BenchError(f"{waiting} of {deliveries} deliveries still wait after {DONE_WITHIN_S:.0f} s")
        time.sleep(LOOK_EVERY_S)
    if processed != deliveries or recorded != deliveries:
        raise BenchError(f"of {deliveries} deliveries {processed} were processed and {recorded} recorded")
