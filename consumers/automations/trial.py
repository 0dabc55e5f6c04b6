"""A run that is only tried: carried out as it would be, in a transaction that is rolled back. For `afluente automation
test`, before an automation is switched on.

Waits are passed and calls are not made; everything else is what a worker would do, and its rows and events are gone at
the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

from psycopg import AsyncConnection
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

import sql
from afluente.errors import Refused
from afluente.postgres import act_for
from consumers.automations import conditions
from consumers.automations import facts as f
from consumers.automations.definition import Definition, ScheduleTrigger, WebhookTrigger, read
from consumers.automations.runs import Automation, Runs
from schemas import Event

_SQL = sql.queries("automations")


@dataclass(frozen=True)
class Tried:
    """What would come of an automation and an event."""

    triggered: bool
    why: str
    conditions: dict[str, Any] | None
    holds: bool
    contact_id: UUID | None
    steps: list[dict[str, Any]]
    state: str | None
    reason: str | None
    emits: list[str]


async def find_event(conn: AsyncConnection[Any], event_id: UUID) -> Event:
    """An event of event_log, or that of a contact event, by its id. Refused when it is not there (any more)."""
    async with conn.cursor(row_factory=dict_row) as cursor:
        for query in ("event", "event_of_fact"):
            row = await (await cursor.execute(_SQL[query], {"event_id": event_id})).fetchone()
            if row is not None:
                return Event(**row)
    raise Refused(
        f"there is no event {event_id} in event_log, and no contact event",
        hint="`afluente contact-events list` shows ids; events older than 90 days are in the archive",
    )


def made_up(
    definition: Definition, organization_id: UUID, payload: Mapping[str, Any], contact_id: UUID | None
) -> Event:
    """An event as one that starts the automation would be, with this payload."""
    metric, event_type = definition.keys
    given = dict(payload)
    if contact_id is not None:
        given.setdefault("contact_id", str(contact_id))
    match definition.trigger:
        case ScheduleTrigger():
            kind = f.DUE
            given.setdefault("due_at", datetime.now(UTC).isoformat())
        case WebhookTrigger():
            kind = "webhook.received"
        case _ if event_type is not None and "." in event_type:
            kind = event_type
        case _:
            kind = "contact_event.recorded"
            given.setdefault("metric_name", metric)
            given.setdefault("contact_event_type", event_type)
    return Event(uuid4(), organization_id, kind, "contact", contact_id, given, {}, datetime.now(UTC))


async def attempt(
    conn: AsyncConnection[Any],
    organization_id: UUID,
    source: Mapping[str, Any],
    event: Event,
    *,
    now: datetime,
    links_url: str | None,
) -> Tried:
    """Try the definition against the event. `conn` is outside a transaction; nothing of this is kept."""
    definition = read(source)
    async with conn.transaction(force_rollback=True), act_for(conn, organization_id):
        automation = await _stand_in(conn, organization_id, definition, source)
        known = await _known(conn, event, definition)
        contact = await f.of_contact(conn, organization_id, known.contact_id)
        facts = known.with_contact(contact)
        judged = None if definition.conditions is None else conditions.judge(definition.conditions, facts)
        triggered, why = _is_triggered(definition, event, await f.delivery(conn, event))
        holds = judged is None or judged.holds
        tried: list[dict[str, Any]] = []
        state = reason = None
        emits: list[str] = []
        if triggered and holds:
            run_id = await Runs(conn, now, links_url, dry=True).begin(automation, event, known)
            if run_id is not None:
                state, reason = await _outcome(conn, run_id)
                tried = await _steps(conn, run_id)
                emits = await _emitted(conn, run_id)
        return Tried(
            triggered=triggered,
            why=why,
            conditions=None if judged is None else judged.shown(),
            holds=holds,
            contact_id=None if contact is None else contact.id,
            steps=tried,
            state=state,
            reason=reason,
            emits=emits,
        )


def _is_triggered(definition: Definition, event: Event, came: f.Delivery) -> tuple[bool, str]:
    metric, event_type = definition.keys
    match definition.trigger:
        case ScheduleTrigger():
            return event.event_type == f.DUE, "a schedule is started by its times"
        case WebhookTrigger(source=source, topic=topic):
            meant = (
                event.event_type == "webhook.received"
                and source in (None, event.payload.get("source"), came.sender)
                and topic in (None, event.payload.get("topic"))
            )
            return meant, f"it waits for webhook.received of {source or 'any source'}, {topic or 'any topic'}"
    if event_type is not None and "." in event_type:
        return event.event_type == event_type, f"it waits for {event_type}; this is {event.event_type}"
    said = event.payload.get("metric_name" if metric else "contact_event_type")
    is_fact = event.event_type == "contact_event.recorded"
    return (
        is_fact and said == (metric or event_type),
        f"it waits for a contact event {metric or event_type!r}; this is {event.event_type} {said!r}",
    )


async def _known(conn: AsyncConnection[Any], event: Event, definition: Definition) -> f.Known:
    trigger = definition.trigger
    if isinstance(trigger, WebhookTrigger) and event.event_type == "webhook.received":
        known = await f.of_webhook(conn, event, trigger.contact)
        return known if known.contact_id else f.Known(f.as_uuid(event.payload.get("contact_id")), known.said)
    return await f.of_event(conn, event)


async def _stand_in(
    conn: AsyncConnection[Any],
    organization_id: UUID,
    definition: Definition,
    source: Mapping[str, Any],
) -> Automation:
    """The automation to try: a copy, so that it may begin for an event that has started it before, and be edited."""
    metric, event_type = definition.keys
    name = f"trial of {definition.name}"[:90] + f" {uuid4().hex[:8]}"
    made = await conn.execute(
        _SQL["create"],
        {
            "organization_id": organization_id,
            "name": name,
            "description": definition.description,
            "trigger_type": definition.trigger.type,
            "trigger_metric": metric,
            "trigger_event_type": event_type,
        },
    )
    row = await made.fetchone()
    assert row is not None
    which = {"organization_id": organization_id, "automation_id": row[0]}
    await conn.execute(_SQL["add_version"], which | {"version": 1, "definition": Jsonb(dict(source))})
    timezone = await (await conn.execute(_SQL["automation"], which)).fetchone()
    assert timezone is not None
    return Automation(row[0], definition.name, "enabled", 1, definition, timezone[5])


async def _outcome(conn: AsyncConnection[Any], run_id: UUID) -> tuple[str, str | None]:
    row = await (await conn.execute(_SQL["state"], {"run_id": run_id})).fetchone()
    assert row is not None
    return row[0], row[1]


async def _steps(conn: AsyncConnection[Any], run_id: UUID) -> list[dict[str, Any]]:
    async with conn.cursor(row_factory=dict_row) as cursor:
        rows = await (await cursor.execute(_SQL["steps"], {"run_ids": [run_id]})).fetchall()
    shown = ("step", "type", "state", "reason", "error", "wake_at", "details")
    return [{name: row[name] for name in shown} for row in rows]


async def _emitted(conn: AsyncConnection[Any], run_id: UUID) -> list[str]:
    found = await conn.execute(_SQL["emitted_here"], {"run_id": str(run_id)})
    return [f"{kind}: {metric}" if metric else kind for kind, metric in await found.fetchall()]
