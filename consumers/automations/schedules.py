"""Schedules: their times become events, and an event for an audience becomes one for each of its contacts.

What must stay true: each due time is emitted once, over all members and restarts: the row that says which is next is
moved in the transaction that emits. Times that passed while no worker ran are made up for when they are no older than
CATCH_UP; older ones are passed over, with an alert that says since when.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import dict_row

import sql
from afluente import faults
from consumers.alerts import alert
from consumers.automations import conditions, times
from consumers.automations import facts as f
from consumers.automations.definition import Audience, Definition, ScheduleTrigger, read
from consumers.automations.errors import BadDefinition
from consumers.automations.runs import Automation
from consumers.worker import Context
from producers import Causation, emit_async
from schemas import Event

CATCH_UP = timedelta(hours=1)
AT_ONCE = 1000  # events in one turn of the hook, about: the rest is the next turn's
PAGE = 500  # contacts of an audience in one transaction

_NOBODY = UUID(int=0)
_SQL = sql.queries("automations")


def next_due(definition: Definition, timezone: str, after: datetime) -> datetime | None:
    """When a schedule is due next; None for another trigger, and for a schedule without times to come."""
    trigger = definition.trigger
    if not isinstance(trigger, ScheduleTrigger):
        return None
    tz = times.zone(trigger.timezone) if trigger.timezone else times.zone_or_utc(timezone)
    return times.Cron.parse(trigger.cron).after(after, tz)


async def emit_due(ctx: Context) -> int:
    """Emit what is due, over all organizations; returns how many events. For the worker's periodic hook."""
    now, emitted = ctx.now(), 0
    async with ctx.connection.cursor(row_factory=dict_row) as cursor:
        rows = await (await cursor.execute(_SQL["due_schedules"], {"now": now, "limit": AT_ONCE})).fetchall()
    for row in rows:
        if emitted >= AT_ONCE:
            break
        try:
            definition = read(row["definition"])
        except BadDefinition as error:
            await _alert(ctx, row, "automation_unreadable", "A schedule cannot be read any more", {"error": str(error)})
            await _set_next(ctx, row, None)
            continue
        due: datetime | None = row["next_due_at"]
        missed = 0
        while due is not None and due <= now:
            if now - due <= CATCH_UP:
                await ctx.emit(
                    f.DUE,
                    entity_kind="automation",
                    entity_id=row["id"],
                    payload={"automation_id": str(row["id"]), "due_at": due},
                    organization_id=row["organization_id"],
                    idempotency_key=f"schedule:{row['id']}:{due.isoformat()}",
                )
                emitted += 1
                faults.point("automation.due_emitted")
            else:
                # Not one by one: a schedule of every minute may have been due for a year.
                missed += 1
                due = max(due, now - CATCH_UP - timedelta(microseconds=1))
            due = next_due(definition, row["timezone"], due)
        await _set_next(ctx, row, due)
        if missed:
            await _alert(
                ctx,
                row,
                "automation_schedule_missed",
                "Times of a schedule passed while no worker ran",
                {"first_missed": row["next_due_at"].isoformat(), "made_up_since": (now - CATCH_UP).isoformat()},
            )
    return emitted


async def _set_next(ctx: Context, row: Mapping[str, Any], due: datetime | None) -> None:
    await ctx.connection.execute(
        _SQL["set_next_due"],
        {"organization_id": row["organization_id"], "automation_id": row["id"], "next_due_at": due},
    )


async def _alert(ctx: Context, row: Mapping[str, Any], kind: str, title: str, details: dict[str, Any]) -> None:
    await alert(
        ctx.connection,
        row["organization_id"],
        kind,
        title=title,
        details={"automation_id": str(row["id"]), **details},
        dedupe_key=f"{kind}:{row['id']}",
    )


async def spread(conn: AsyncConnection[Any], automation: Automation, trigger: ScheduleTrigger, event: Event) -> int:
    """A page of a schedule's audience: an event for each contact that the conditions hold for, and one for the next
    page.

    Each contact's own event has its place among that contact's others, and its own attempts. Returns how many.
    """
    payload = event.payload
    tag = trigger.audience.tag if isinstance(trigger.audience, Audience) else None
    parameters = {
        "organization_id": event.organization_id,
        "after": f.as_uuid(payload.get("after_contact_id")) or _NOBODY,
        "tag": tag,
        "limit": PAGE,
    }
    async with conn.cursor(row_factory=dict_row) as cursor:
        contacts = [f.contact_of(row) for row in await (await cursor.execute(_SQL["audience"], parameters)).fetchall()]
    said = {"schedule": {"due_at": payload.get("due_at")}}

    async def emit(kind: str, entity_id: UUID, **more: str) -> None:
        await emit_async(
            conn,
            f.DUE,
            entity_kind=kind,
            entity_id=entity_id,
            payload={"automation_id": str(automation.id), "due_at": payload.get("due_at"), **more},
            organization_id=event.organization_id,
            source="automation",
            # A page is no step of a chain: the thousandth is as near to the schedule as the first.
            causation=Causation(event.id, 1),
        )

    found = 0
    for contact in contacts:
        if conditions.holds(automation.definition.conditions, {**said, "contact": contact.shown}):
            await emit("contact", contact.id, contact_id=str(contact.id))
            found += 1
    if len(contacts) == PAGE:
        await emit("automation", automation.id, after_contact_id=str(contacts[-1].id))
    return found
