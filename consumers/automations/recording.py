"""Facts about a contact that an automation made: contact events of the source `automation`, which name their run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from psycopg import AsyncConnection

import sql
from producers import Causation
from producers.emit import to_json
from schemas.contact_events import contact_event_type_of

SOURCE = "automation"

_SQL = sql.queries("automations")


@dataclass(frozen=True)
class Origin:
    """The run that made a fact, and whom the fact is about."""

    organization_id: UUID
    automation_id: UUID
    run_id: UUID
    contact_id: UUID
    request_id: str | None
    trace_id: str | None


@dataclass(frozen=True)
class Fact:
    """What happened. `name` is the fact's own, '<fact>:<id>': the same fact is recorded once."""

    name: str
    metric: str
    occurred_at: datetime
    properties: Mapping[str, Any]
    entity_type: str
    entity_id: str
    object_id: str | None = None
    object_id_ref: str | None = None


async def record(conn: AsyncConnection[Any], origin: Origin, fact: Fact, cause: Causation) -> None:
    """Record it on a connection that acts for the organization; automations and summaries follow through the bus."""
    metadata = {
        "source": SOURCE,
        "causation_id": cause.event_id,
        "causation_depth": cause.depth,
        "traceparent": cause.traceparent,
        "automation_run": cause.automation_run,
        "request_id": origin.request_id,
        "trace_id": origin.trace_id,
    }
    properties = {
        **fact.properties,
        "automation_execution_id": origin.run_id,
        "automation_id": origin.automation_id,
    }
    await conn.execute(
        _SQL["record_contact_event"],
        {
            "contact_id": origin.contact_id,
            "event_type": contact_event_type_of(fact.metric),
            "metric": fact.metric,
            "fact": fact.name,
            "entity_type": fact.entity_type,
            "entity_id": fact.entity_id,
            "object_id": fact.object_id,
            "object_id_ref": fact.object_id_ref,
            "occurred_at": fact.occurred_at,
            "properties": to_json(properties, "properties"),
            "metadata": to_json({name: value for name, value in metadata.items() if value is not None}, "metadata"),
        },
    )
