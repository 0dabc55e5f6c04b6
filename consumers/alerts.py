"""Alerts: what workers ask people to look at. One is open for each cause, and counts how often."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.types.json import Jsonb

import sql

_ALERT = sql.queries("alerts")["alert"]


async def alert(
    conn: AsyncConnection[Any],
    organization_id: UUID,
    kind: str,
    *,
    title: str,
    dedupe_key: str,
    details: Mapping[str, Any],
    audience: str = "operators",
    event_id: UUID | None = None,
) -> None:
    """Ask, in the connection's transaction. `dedupe_key` names the cause."""
    await conn.execute(
        _ALERT,
        {
            "organization_id": organization_id,
            "kind": kind,
            "audience": audience,
            "title": title[:255],
            "details": Jsonb(dict(details)),
            "dedupe_key": dedupe_key,
            "event_id": event_id,
        },
    )
