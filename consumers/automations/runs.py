"""Runs: an automation begins, sleeps, goes on, ends. Everything in the transaction of the delivery that makes it so.

    running -> waiting | calling -> running ... -> done | failed | cancelled         held: woken while paused
    stopped: by the guard, before its first step

What must stay true:
- An event starts an automation once: the run's row says so, whatever becomes of the delivery afterwards (a replay).
- The steps up to the next wait, call or end are one transaction. A worker that is killed has done none of them, the
  next one does them all.
- A run sleeps as a row with `wake_at` and an event that is deferred to that moment; whoever gets the event locks the
  row and sees whether it is still what the run waits for. A second one, or one that comes late, changes nothing.
- A run goes on with the version that it began with.
- What begins or wakes up holds its automation: it is switched on or off before that, or after.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

import sql
from afluente import faults
from consumers.alerts import alert
from consumers.automations import conditions, guard
from consumers.automations import facts as f
from consumers.automations.definition import CallWebhook, Definition, read
from consumers.automations.steps import Did, Run, Steps
from schemas import Event

ERROR_CHARS = 1000

_SQL = sql.queries("automations")


@dataclass(frozen=True)
class Automation:
    """An automation as it is now."""

    id: UUID
    name: str
    status: str
    version: int
    definition: Definition
    timezone: str


async def find(conn: AsyncConnection[Any], organization_id: UUID, automation_id: UUID) -> Automation | None:
    """The automation with its newest version, held as it is to the end of the transaction."""
    parameters = {"organization_id": organization_id, "automation_id": automation_id}
    await conn.execute(_SQL["hold_automation"], parameters)
    row = await (await conn.execute(_SQL["automation"], parameters)).fetchone()
    return None if row is None else Automation(row[0], row[1], row[2], row[3], read(row[4]), row[5])


class Runs:
    """Begins runs and has them go on, on a connection that acts for their organization. `now` is the worker's clock."""

    def __init__(self, conn: AsyncConnection[Any], now: datetime, links_url: str | None, *, dry: bool = False) -> None:
        """`links_url`, `dry`: see `Steps`."""
        self._conn = conn
        self._now = now
        self._steps = Steps(conn, now, links_url, dry=dry)

    async def begin(self, automation: Automation, event: Event, known: f.Known, *, attempt: int = 1) -> UUID | None:
        """Begin a run for an event and carry out what can be done now; None when it is not to be, or was before.

        A chain of causes that has to stop leaves a run in the state `stopped`, and an alert.
        """
        contact = await f.of_contact(self._conn, event.organization_id, known.contact_id)
        if contact is not None and contact.is_anonymized:
            return None
        if not conditions.holds(automation.definition.conditions, known.with_contact(contact)):
            return None
        depth = _depth(event)
        why = guard.stopped(depth, await self._earlier(automation, event, contact, depth), self._now)
        row = await self._one(
            "begin_run",
            event.organization_id,
            automation_id=automation.id,
            version=automation.version,
            contact_id=None if contact is None else contact.id,
            trigger_event_id=event.id,
            trigger_event_type=event.event_type,
            causation_depth=depth,
            request_id=event.metadata.get("request_id"),
            trace_id=event.metadata.get("trace_id"),
            traceparent=event.metadata.get("traceparent"),
            state="running" if why is None else "stopped",
            reason=why,
            now=self._now,
            finished_at=None if why is None else self._now,
        )
        if row is None:
            return None
        run_id: UUID = row[0]
        if why is not None:
            await self._alert(automation, event, run_id, why)
            return run_id
        run = Run(
            id=run_id,
            organization_id=event.organization_id,
            automation_id=automation.id,
            automation_name=automation.name,
            version=automation.version,
            definition=automation.definition,
            contact=contact,
            trigger_event_id=event.id,
            trigger_event_type=event.event_type,
            causation_depth=depth,
            request_id=event.metadata.get("request_id"),
            trace_id=event.metadata.get("trace_id"),
            traceparent=event.metadata.get("traceparent"),
            timezone=automation.timezone,
            said=known.said,
        )
        await self._advance(run, 0, attempt)
        return run_id

    async def wake(self, organization_id: UUID, run_id: UUID, step: int, *, attempt: int = 1) -> None:
        """A wait or a call is over: go on after it. Nothing when the run has gone on or ended meanwhile."""
        parameters = {"organization_id": organization_id, "run_id": run_id}
        await self._conn.execute(_SQL["hold_automation_of_run"], parameters)
        async with self._conn.cursor(row_factory=dict_row) as cursor:
            row = await (await cursor.execute(_SQL["open_run"], parameters)).fetchone()
        if row is None or row["position"] != step or row["state"] not in ("waiting", "calling", "held"):
            return
        run = await self._run(organization_id, row)
        if row["status"] == "disabled":
            await self._cancel(run, step, "automation_disabled")
            return
        if run.contact is not None and run.contact.is_anonymized:
            await self._cancel(run, step, "contact_anonymized")
            return
        if row["status"] == "paused":
            await self._execute("hold_run", organization_id, run_id=run_id, now=self._now)
            return
        slept = await self._one("step", organization_id, run_id=run_id, step=step)
        definition = run.definition.steps[step]
        if slept is not None and slept[0] == "calling":
            return  # the call's last word is still to come
        if slept is not None and slept[0] == "failed":
            if isinstance(definition, CallWebhook) and definition.on_error == "stop":
                await self._set(run, "failed", step, reason="step_failed", keep=True)
                return
        else:
            await self._set_step(run, step, definition.type, slept[1] if slept else attempt, Did("done"))
        await self._advance(run, step + 1, attempt)

    async def _run(self, organization_id: UUID, row: Mapping[str, Any]) -> Run:
        return Run(
            id=row["id"],
            organization_id=organization_id,
            automation_id=row["automation_id"],
            automation_name=row["name"],
            version=row["version"],
            definition=read(row["definition"]),
            contact=await f.of_contact(self._conn, organization_id, row["contact_id"]),
            trigger_event_id=row["trigger_event_id"],
            trigger_event_type=row["trigger_event_type"],
            causation_depth=row["causation_depth"],
            request_id=row["request_id"],
            trace_id=row["trace_id"],
            traceparent=row["traceparent"],
            timezone=row["timezone"],
            said=row["context"],
        )

    async def _advance(self, run: Run, position: int, attempt: int) -> None:
        """Carry out the steps from a position on, to the next one that takes time, or the end."""
        steps = run.definition.steps
        for number in range(position, len(steps)):
            step = steps[number]
            faults.point("automation.before_step")
            if conditions.holds(step.when, run.facts):
                did = await self._steps.do(run, number, step)
            else:
                did = Did("skipped", "condition")
            await self._set_step(run, number, step.type, attempt, did)
            faults.point("automation.after_step")
            if did.state in ("waiting", "calling"):
                await self._set(run, did.state, number, wake_at=did.wake_at, wake_event_id=did.wake_event_id, keep=True)
                return
            if did.state == "failed":
                await self._set(run, "failed", number, reason=did.reason)
                return
            if "tag" in did.details and run.contact is not None and number + 1 < len(steps):
                # What the step changed is a fact for those that follow.
                contact = await f.of_contact(self._conn, run.organization_id, run.contact.id)
                run = replace(run, contact=contact)
        await self._set(run, "done", len(steps))

    async def _cancel(self, run: Run, step: int, reason: str) -> None:
        await self._execute("end_open_steps", run.organization_id, run_id=run.id, reason=reason, now=self._now)
        await self._set(run, "cancelled", step, reason=reason)

    async def _set(
        self,
        run: Run,
        state: str,
        position: int,
        *,
        reason: str | None = None,
        wake_at: datetime | None = None,
        wake_event_id: UUID | None = None,
        keep: bool = False,
    ) -> None:
        """What the run is now. `keep`: there may be steps to come that name what the event said."""
        context = Jsonb(dict(run.said) if keep else {})
        await self._execute(
            "set_run",
            run.organization_id,
            run_id=run.id,
            state=state,
            reason=reason,
            position=position,
            wake_at=wake_at,
            wake_event_id=wake_event_id,
            context=context,
            now=self._now,
            finished_at=self._now if state in ("done", "failed", "cancelled") else None,
        )

    async def _set_step(self, run: Run, number: int, kind: str, attempt: int, did: Did) -> None:
        await self._execute(
            "set_step",
            run.organization_id,
            run_id=run.id,
            step=number,
            type=kind,
            state=did.state,
            reason=did.reason,
            attempt=0 if did.state == "calling" else attempt,
            wake_at=did.wake_at,
            error=None if did.error is None else did.error[:ERROR_CHARS],
            effect_id=did.effect_id,
            outcome=did.outcome,
            details=Jsonb(did.details),
            now=self._now,
            finished_at=None if did.state in ("waiting", "calling") else self._now,
        )

    async def _earlier(
        self, automation: Automation, event: Event, contact: f.Contact | None, depth: int
    ) -> list[datetime]:
        """When this automation began for this contact in the chain of causes of the event."""
        if depth == 0:
            return []
        parameters = {
            "organization_id": event.organization_id,
            "causation_id": f.as_uuid(event.metadata.get("causation_id")),
            "automation_run": f.as_uuid(event.metadata.get("automation_run")),
            "created_at": event.created_at,
            "depth": guard.MAX_DEPTH,
            "automation_id": automation.id,
            "contact_id": None if contact is None else contact.id,
        }
        return [row[0] for row in await (await self._conn.execute(_SQL["runs_behind"], parameters)).fetchall()]

    async def _alert(self, automation: Automation, event: Event, run_id: UUID, why: str) -> None:
        await alert(
            self._conn,
            event.organization_id,
            "automation_loop",
            title=f"The automation {automation.name} set itself off",
            details={"automation_id": str(automation.id), "run_id": str(run_id), "reason": why},
            dedupe_key=f"automation_loop:{automation.id}",
            event_id=event.id,
        )

    async def _one(self, query: str, organization_id: UUID, **parameters: Any) -> tuple[Any, ...] | None:
        given = {"organization_id": organization_id, **parameters}
        row: tuple[Any, ...] | None = await (await self._conn.execute(_SQL[query], given)).fetchone()
        return row

    async def _execute(self, query: str, organization_id: UUID, **parameters: Any) -> None:
        await self._conn.execute(_SQL[query], {"organization_id": organization_id, **parameters})


def _depth(event: Event) -> int:
    depth = event.metadata.get("causation_depth", 0)
    return depth if isinstance(depth, int) and depth >= 0 else 0
