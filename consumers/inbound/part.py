"""One stored part of a delivery: read with its bytes, normalised, its facts written, its outcome noted.

Shared by `webhook-normalize-worker`, which has all it needs, and `webhook-fetch-worker`, which asks the sender first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

import sql
from consumers.inbound.apply import Part, apply
from consumers.worker import Context, Delivery, Policy
from producers.ingest.normalize import facts as f
from producers.ingest.normalize import normalize
from producers.ingest.normalize.phone import BRAZIL
from producers.ingest.sources.nuvemshop import REPEATABLE_ACTIONS

_SQL = sql.queries("webhook_events")

COLLAPSED_ACTIONS = tuple(f"/{action}" for action in sorted(REPEATABLE_ACTIONS))

# Deliveries of one order come in any order: what needs the order waits for it as long as there are attempts, and in the
# last of them is kept without its contact.
LAST_RUN = Policy().attempts


@dataclass(frozen=True)
class StoredPart:
    """A row of `webhook_events`, a child, with its connection's settings."""

    id: UUID
    channel_id: UUID
    source: str
    topic: str
    subject: str | None
    headers: Mapping[str, str]
    body: bytes
    received_at: datetime
    test_channel: bool
    settings: Mapping[str, Any]
    external_id: str | None

    def context(self, resource: Mapping[str, Any] | None = None, *, fetched: bool = False) -> f.Context:
        country = self.settings.get("country")
        return f.Context(
            topic=self.topic,
            received_at=self.received_at,
            test_channel=self.test_channel,
            country=country if isinstance(country, str) else BRAZIL,
            resource=resource,
            fetched=fetched,
            settings=self.settings,
        )


async def read(conn: AsyncConnection[Any], organization_id: UUID, webhook_event_id: UUID) -> StoredPart | None:
    """The part that an event names; None when it is gone (erased), or its bytes are."""
    parameters = {"id": webhook_event_id, "organization_id": organization_id}
    async with conn.cursor(row_factory=dict_row) as cursor:
        row = await (await cursor.execute(_SQL["handled"], parameters)).fetchone()
    if row is None or row["raw_body"] is None:
        return None
    return StoredPart(
        id=row["id"],
        channel_id=row["channel_id"],
        source=row["source"],
        topic=row["topic"],
        subject=row["subject"],
        headers=row["headers"],
        body=bytes(row["raw_body"]),
        received_at=row["received_at"],
        test_channel=row["mode"] == "test",
        settings=row["settings"],
        external_id=row["external_id"],
    )


async def digest(
    stored: StoredPart,
    context: f.Context,
    delivery: Delivery,
    ctx: Context,
    *,
    fetched_at: datetime | None = None,
) -> f.Normalized:
    """Normalise, write the facts, and note the outcome, all in the delivery's transaction."""
    normalized = normalize(stored.source, stored.body, stored.headers, context)
    part = Part(stored.id, stored.channel_id, normalized.source or stored.source, stored.received_at)
    applied = await apply(normalized, part, delivery, ctx, wait_for_orders=delivery.attempt < LAST_RUN)
    await note(stored, delivery, ctx, normalized, applied.summary(), fetched_at=fetched_at)
    return normalized


async def note(
    stored: StoredPart,
    delivery: Delivery,
    ctx: Context,
    outcome: f.Normalized,
    summary: Mapping[str, Any] | None = None,
    *,
    fetched_at: datetime | None = None,
) -> None:
    """What became of the part, where people look."""
    await ctx.connection.execute(
        _SQL["outcome"],
        {
            "id": stored.id,
            "organization_id": delivery.organization_id,
            "status": outcome.status,
            "reason": outcome.reason[:255],
            "summary": Jsonb(dict(summary or {})),
            "fetched_at": fetched_at,
            "processed_at": ctx.now(),
        },
    )
