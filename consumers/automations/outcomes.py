"""What became of what a step caused: its message was sent or failed, the bot answered. The metric is recorded now, when
the fact has happened, and once: it is named by the message.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import dict_row

import sql
from consumers.automations import facts as f
from consumers.automations.recording import Fact, Origin, record
from producers import Causation
from schemas import Event

OUTCOMES = ("message.sent", "message.failed", "ai.responded")

_METRICS = {"send_message": "Message Sent", "send_template": "Template Sent", "ai_respond": "AI Response Sent"}
_SQL = sql.queries("automations")


def effect_of(event: Event) -> UUID | None:
    """What the event is the outcome of: a message, or the request that the bot was asked by."""
    if event.event_type == "ai.responded":
        return f.as_uuid(event.metadata.get("causation_id"))
    return f.as_uuid(event.payload.get("message_id")) if event.event_type in OUTCOMES else None


async def concerns(conn: AsyncConnection[Any], event: Event) -> bool:
    """Whether the event is the outcome of a step of ours."""
    return await _step(conn, event) is not None


async def note(conn: AsyncConnection[Any], event: Event) -> None:
    """Note the outcome with the step, and record its metric if it was sent."""
    step = await _step(conn, event)
    if step is None:
        return
    sent = event.event_type != "message.failed"
    parameters = {
        "organization_id": event.organization_id,
        "run_id": step["run_id"],
        "step": step["step"],
        "outcome": "sent" if sent else "failed",
        "at": event.created_at,
        "error": None if sent else _error(event),
    }
    noted = await (await conn.execute(_SQL["set_outcome"], parameters)).fetchone()
    contact = await f.of_contact(conn, event.organization_id, step["contact_id"])
    if noted is None or not sent or contact is None or contact.is_anonymized:
        return
    message_id = str(event.payload.get("message_id") or event.id)
    provider_id = event.payload.get("waha_message_id")
    properties: dict[str, Any] = {
        "phone": contact.shown["phone"],
        "wa_message_id": provider_id,
        "message_id": message_id,
        "conversation_id": event.payload.get("conversation_id"),
        "template": step["details"].get("template"),
        "model": event.payload.get("model"),
    }
    fact = "ai_response_sent" if step["type"] == "ai_respond" else "sent"
    await record(
        conn,
        contact.id,
        Fact(
            name=f"{fact}:{message_id}",
            metric=_METRICS[step["type"]],
            occurred_at=event.created_at,
            properties={name: value for name, value in properties.items() if value is not None},
            entity_type="message",
            entity_id=message_id,
            object_id=message_id,
            object_id_ref=provider_id if isinstance(provider_id, str) else None,
        ),
        Origin(
            step["automation_id"],
            step["run_id"],
            step["request_id"],
            step["trace_id"],
            replace(Causation.of(event), automation_run=step["run_id"]),
        ),
    )


async def _step(conn: AsyncConnection[Any], event: Event) -> dict[str, Any] | None:
    effect_id = effect_of(event)
    if effect_id is None:
        return None
    parameters = {"organization_id": event.organization_id, "effect_id": effect_id}
    async with conn.cursor(row_factory=dict_row) as cursor:
        return await (await cursor.execute(_SQL["step_of_effect"], parameters)).fetchone()


def _error(event: Event) -> str:
    return f"{event.payload.get('error_code')}: {event.payload.get('error_message')}"[:1000]
