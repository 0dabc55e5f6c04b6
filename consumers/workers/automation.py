"""``automation-worker``: begins automations when what they wait for happens, and carries out their steps.

One delivery is one event for one automation, so one automation's failure is felt by no other; and the event of a run
that goes on, of a schedule's time, or an outcome of a step.

Transactional: all effects of a step are rows and events of the delivery's transaction. What leaves the house is done by
others who take those events: messages by the worker that sends them, answers by the bot's, calls by
`automation-call-worker`.

Order is that of the contact: an event that waits for another attempt holds up that contact's others. The exact moment
of a wait is a deferred event's; the hook looks for schedules that are due.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Self
from uuid import UUID

from psycopg import AsyncConnection

import sql
from consumers.automations import facts, outcomes, runs, schedules
from consumers.automations.definition import EVENT_TRIGGERS, ScheduleTrigger, WebhookTrigger, read
from consumers.automations.errors import BadDefinition
from consumers.worker import Context, Delivery, Policy, Reject, Snooze, TransactionalWorker
from schemas import Event
from schemas.contact_events import SCHEDULE_TRIGGER_METRIC, WEBHOOK_TRIGGER_METRIC

if TYPE_CHECKING:
    from afluente.settings import WorkerSettings

CONTACT_EVENT = "contact_event.recorded"
WEBHOOK = "webhook.received"

OUTCOME = "outcome"  # the target of a delivery that notes one; automations are targets by their ids

# A delivery that came in is normalised by another worker, whom it is waited for: briefly at first, not for ever.
WEBHOOK_FIRST_WAIT = timedelta(seconds=1)
WEBHOOK_LONGEST_WAIT = timedelta(minutes=5)
WEBHOOK_GIVEN_UP_AFTER = timedelta(hours=24)

_SQL = sql.queries("automations")


class AutomationWorker(TransactionalWorker):
    """Starts, steps, waits and schedules of automations."""

    name: ClassVar[str] = "automation-worker"
    event_types: ClassVar[frozenset[str]] = frozenset(
        {CONTACT_EVENT, WEBHOOK, facts.DUE, *EVENT_TRIGGERS, *outcomes.OUTCOMES}
    )
    policy: ClassVar[Policy] = Policy(ordering="key", batch=100)
    every: ClassVar[timedelta | None] = timedelta(seconds=5)

    def __init__(self, links_url: str | None) -> None:
        """`links_url`: where tracked links are served."""
        self._links_url = links_url

    @classmethod
    def configure(cls, settings: WorkerSettings) -> Self:
        return cls(settings.links.url)

    def key(self, event: Event, target: str) -> str:
        """The contact, where the event says whom it is about."""
        contact_id = event.payload.get("contact_id")
        return contact_id if isinstance(contact_id, str) else super().key(event, target)

    async def targets(self, event: Event, conn: AsyncConnection[Any]) -> Sequence[str]:
        if event.event_type == facts.DUE:
            return ("",)
        if event.event_type == WEBHOOK:
            return await self._started_by_webhook(event, conn)
        found = [OUTCOME] if await outcomes.concerns(conn, event) else []
        if event.event_type == CONTACT_EVENT or event.event_type in EVENT_TRIGGERS:
            found += await self._started_by(event, conn)
        return found

    async def _started_by(self, event: Event, conn: AsyncConnection[Any]) -> list[str]:
        if event.metadata.get("automations") == "no":
            return []  # imported: it happened long ago
        is_fact = event.event_type == CONTACT_EVENT
        kind = event.payload.get("contact_event_type") if is_fact else event.event_type
        metric = event.payload.get("metric_name") if is_fact else None
        # A fact may be called anything by who brings it: it is no other event, no delivery and no schedule for that.
        if is_fact and kind in EVENT_TRIGGERS:
            kind = None
        if metric in (WEBHOOK_TRIGGER_METRIC, SCHEDULE_TRIGGER_METRIC):
            metric = None
        parameters = {
            "organization_id": event.organization_id,
            "metric": metric,
            "event_types": [] if kind is None else [kind],
            "emitted_at": event.created_at,
        }
        return [str(row[0]) for row in await (await conn.execute(_SQL["started_by"], parameters)).fetchall()]

    async def _started_by_webhook(self, event: Event, conn: AsyncConnection[Any]) -> list[str]:
        parameters = {"organization_id": event.organization_id, "emitted_at": event.created_at}
        rows = await (await conn.execute(_SQL["webhook_triggers"], parameters)).fetchall()
        if not rows:
            return []
        came = await facts.delivery(conn, event)
        return [str(row[0]) for row in rows if _is_meant(row[1], event, came)]

    async def handle(self, delivery: Delivery, ctx: Context) -> None:
        event = delivery.event
        if delivery.target == OUTCOME:
            await outcomes.note(ctx.connection, event)
        elif event.event_type == facts.DUE:
            await self._due(delivery, ctx)
        else:
            await self._begin(UUID(delivery.target), delivery, ctx)

    async def _due(self, delivery: Delivery, ctx: Context) -> None:
        """A run goes on, or a schedule's time has come."""
        due, event = delivery.data, delivery.event
        if due.run_id is not None:
            work = runs.Runs(ctx.connection, ctx.now(), self._links_url)
            await work.wake(event.organization_id, UUID(due.run_id), due.step, attempt=delivery.attempt)
            return
        automation = await self._find(UUID(due.automation_id), delivery, ctx)
        trigger = None if automation is None else automation.definition.trigger
        if automation is None or not isinstance(trigger, ScheduleTrigger):
            return  # edited meanwhile: its times are no more
        if trigger.audience != "none" and due.contact_id is None:
            await schedules.spread(ctx.connection, automation, trigger, event)
            return
        known = await facts.of_event(ctx.connection, event)
        await runs.Runs(ctx.connection, ctx.now(), self._links_url).begin(
            automation, event, known, attempt=delivery.attempt
        )

    async def _begin(self, automation_id: UUID, delivery: Delivery, ctx: Context) -> None:
        event = delivery.event
        automation = await self._find(automation_id, delivery, ctx)
        if automation is None:
            return
        if event.event_type == WEBHOOK:
            trigger = automation.definition.trigger
            if not isinstance(trigger, WebhookTrigger):
                return
            status = (await facts.delivery(ctx.connection, event)).status
            age = ctx.now() - event.created_at
            if status == "received" and age < WEBHOOK_GIVEN_UP_AFTER:
                wait = min(max(WEBHOOK_FIRST_WAIT, age / 4), WEBHOOK_LONGEST_WAIT)
                raise Snooze(wait, "the delivery that came in is not normalised yet")
            known = await facts.of_webhook(ctx.connection, event, trigger.contact)
        else:
            known = await facts.of_event(ctx.connection, event)
        await runs.Runs(ctx.connection, ctx.now(), self._links_url).begin(
            automation, event, known, attempt=delivery.attempt
        )

    async def _find(self, automation_id: UUID, delivery: Delivery, ctx: Context) -> runs.Automation | None:
        """The automation, if it may begin something now."""
        try:
            found = await runs.find(ctx.connection, delivery.organization_id, automation_id)
        except BadDefinition as error:
            raise Reject(f"the automation cannot be read: {error}") from None
        return found if found is not None and found.status == "enabled" else None

    async def periodic(self, ctx: Context) -> None:
        await schedules.emit_due(ctx)


def _is_meant(definition: Any, event: Event, came: facts.Delivery) -> bool:
    """Whether a webhook trigger is for this delivery. One that cannot be read is: the delivery then says why."""
    try:
        trigger = read(definition).trigger
    except BadDefinition:
        return True
    return isinstance(trigger, WebhookTrigger) and (
        trigger.channel in (None, came.channel_id)
        and trigger.source in (None, event.payload.get("source"), came.sender)
        and trigger.topic in (None, event.payload.get("topic"))
    )
