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
from producers.emit import metadata_of, to_json
from schemas.contact_events import contact_event_type_of

SOURCE = "automation"

_SQL = sql.queries("automations")


@dataclass(frozen=True)
class Origin:
    """The run that makes a fact, and what led to it."""

    automation_id: UUID
    run_id: UUID
    request_id: str | None
    trace_id: str | None
    cause: Causation

    @property
    def metadata(self) -> str:
        return metadata_of(self.cause, source=SOURCE, request_id=self.request_id, trace_id=self.trace_id)

    def properties(self, **own: Any) -> str:
        """The properties of a fact, as JSON text: its own, and whose it is."""
        whose = {"automation_execution_id": self.run_id, "automation_id": self.automation_id}
        return to_json(own | whose, "properties")


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


async def record(conn: AsyncConnection[Any], contact_id: UUID, fact: Fact, origin: Origin) -> None:
    """Record it on a connection that acts for the organization; automations and summaries follow through the bus."""
    await conn.execute(
        _SQL["record_contact_event"],
        {
            "contact_id": contact_id,
            "event_type": contact_event_type_of(fact.metric),
            "metric": fact.metric,
            "fact": fact.name,
            "entity_type": fact.entity_type,
            "entity_id": fact.entity_id,
            "object_id": fact.object_id,
            "object_id_ref": fact.object_id_ref,
            "occurred_at": fact.occurred_at,
            "properties": origin.properties(**fact.properties),
            "metadata": origin.metadata,
        },
    )
