"""What the steps of an automation do, in the transaction that records them.

What must stay true: every effect is a row or an event of this transaction, so a step is done if and only if it is
recorded as done; a step's message and its calls have an id that follows from run and step. Nothing is sent to a contact
who does not want it. Metrics are recorded when the fact has happened: tags and conversations at once; a message's and
the bot's when their outcome comes (`outcomes`).
"""

from __future__ import annotations

import re
import secrets as random
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, assert_never
from urllib.parse import urlsplit
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.types.json import Jsonb

import sql
from consumers.automations import text, times
from consumers.automations.definition import (
    AddTag,
    AiRespond,
    CallWebhook,
    CloseConversation,
    Definition,
    RemoveTag,
    SendMessage,
    SendTemplate,
    Step,
    Wait,
)
from consumers.automations.facts import DUE, Contact
from consumers.automations.recording import SOURCE, Origin
from producers import Causation, emit_async

CALL_REQUESTED = "system.automation_call_requested"

_NUMBERED = re.compile(r"\{\{([0-9]{1,3})\}\}")
_EFFECTS = UUID("5b1d2c86-9d1e-5c42-8a53-0b2f6a1c7e90")
_SQL = sql.queries("automations")


@dataclass(frozen=True)
class Run:
    """A run under way, and everything that its steps need."""

    id: UUID
    organization_id: UUID
    automation_id: UUID
    automation_name: str
    version: int
    definition: Definition
    contact: Contact | None
    trigger_event_id: UUID
    trigger_event_type: str
    causation_depth: int
    request_id: str | None
    trace_id: str | None
    traceparent: str | None
    timezone: str
    said: Mapping[str, Any]
    """What the event said (`facts.Known.said`)."""

    @property
    def facts(self) -> dict[str, Any]:
        return {**self.said, **({} if self.contact is None else {"contact": self.contact.shown})}

    @property
    def causation(self) -> Causation:
        """Of everything that the run emits: the event that started it, however often the run has slept since. Its waits
        are no steps of a chain."""
        return Causation(self.trigger_event_id, self.causation_depth + 1, self.traceparent, self.id)

    def place(self, number: int) -> dict[str, Any]:
        """Which step of which run it is about, for what a run tells itself."""
        return {
            "automation_id": str(self.automation_id),
            "run_id": str(self.id),
            "step": number,
            "contact_id": None if self.contact is None else str(self.contact.id),
        }

    @property
    def origin(self) -> Origin:
        return Origin(self.automation_id, self.id, self.request_id, self.trace_id, self.causation)


def effect_id(run_id: UUID, step: int) -> UUID:
    """The id of what a step causes, a message or a call: the same in every attempt."""
    return uuid.uuid5(_EFFECTS, f"{run_id}:{step}")


@dataclass(frozen=True)
class Did:
    """What came of a step. `waiting` and `calling` are not the end of it."""

    state: str
    reason: str | None = None
    error: str | None = None
    wake_at: datetime | None = None
    wake_event_id: UUID | None = None
    effect_id: UUID | None = None
    outcome: str | None = None
    details: dict[str, Any] = field(default_factory=dict)


def skipped(reason: str, **details: Any) -> Did:
    return Did("skipped", reason, details=details)


def failed(reason: str, error: str) -> Did:
    return Did("failed", reason, error)


class Steps:
    """Carries steps out on a connection that acts for the run's organization, inside its transaction."""

    def __init__(self, conn: AsyncConnection[Any], now: datetime, links_url: str | None, *, dry: bool = False) -> None:
        """`links_url`: where tracked links are served; None: nowhere, and a step with one fails. `dry`: nothing is
        waited for and nobody is called."""
        self._conn = conn
        self._now = now
        self._links_url = links_url
        self._dry = dry

    async def do(self, run: Run, number: int, step: Step) -> Did:
        """Carry out one step. Raises only what another attempt may mend."""
        match step:
            case Wait():
                return await self._wait(run, number, step)
            case CallWebhook():
                return await self._call(run, number, step)
        if run.contact is None:
            return skipped("no_contact")
        match step:
            case SendMessage():
                return await self._send_message(run, number, step, run.contact)
            case SendTemplate():
                return await self._send_template(run, number, step, run.contact)
            case AddTag():
                return await self._add_tag(run, step, run.contact)
            case RemoveTag():
                return await self._remove_tag(run, step, run.contact)
            case CloseConversation():
                return await self._close(run, step, run.contact)
            case AiRespond():
                return await self._ai_respond(run, number, step, run.contact)
            case _:
                assert_never(step)

    # Time and the world outside

    async def _wait(self, run: Run, number: int, step: Wait) -> Did:
        tz = times.zone_or_utc(run.timezone)
        wake_at = self._now + times.span(step.span) if step.span else times.until(step.until or "", self._now, tz)
        if wake_at <= self._now:
            return Did("done", "time_has_passed", wake_at=wake_at)
        if self._dry:
            return Did("done", "would_wait", wake_at=wake_at)
        return Did("waiting", wake_at=wake_at, wake_event_id=await self.emit_due(run, number, wake_at))

    async def emit_due(self, run: Run, number: int, at: datetime) -> UUID:
        """The event by which a run goes on, at a time."""
        return await self._emit(
            run,
            DUE,
            "automation_run",
            run.id,
            run.place(number) | {"due_at": at},
            deliver_at=at,
        )

    async def _call(self, run: Run, number: int, step: CallWebhook) -> Did:
        facts = run.facts
        data = text.fill_all(step.data, facts) if step.data is not None else facts
        request = {
            "url": step.url,
            "data": {
                "automation": {"id": str(run.automation_id), "name": run.automation_name},
                "run": {"id": str(run.id), "step": number},
                "data": data,
            },
        }
        if self._dry:
            return Did("done", "would_call", details=request)
        await self._emit(
            run,
            CALL_REQUESTED,
            "automation_run",
            run.id,
            run.place(number) | {"host": urlsplit(step.url).hostname},
        )
        return Did("calling", details=request)

    # Messages

    async def _send_message(self, run: Run, number: int, step: SendMessage, contact: Contact) -> Did:
        message_id = effect_id(run.id, number)
        if (refused := await self._unwilling(run, contact, message_id)) is not None:
            return refused
        links: list[tuple[str, str]] = []

        def link(url: str) -> str:
            token = random.token_urlsafe(16)
            links.append((token, url))
            return f"{self._links_url}/l/{token}"

        if self._links_url is None and text.links(step.body):
            return failed("no_links_url", "AFLUENTE_LINKS_URL is not set: there is nowhere for tracked links to lead")
        body = text.fill(step.body, run.facts, link).strip()
        if not body:
            return skipped("empty_body")
        conversation_id = await self._conversation(run, contact, step.channel)
        if conversation_id is None:
            return failed("no_channel", _NO_CHANNEL)
        await self._queue(
            run, number, contact, message_id, conversation_id, body, kind="text", template_id=None, template=None
        )
        for token, url in links:
            await self._execute(
                "create_link",
                run,
                url=url,
                contact_id=contact.id,
                run_id=run.id,
                step=number,
                message_id=message_id,
                token=token,
            )
        return Did(
            "done",
            effect_id=message_id,
            outcome="pending",
            details={
                "message_id": str(message_id),
                "conversation_id": str(conversation_id),
                **({"links": len(links)} if links else {}),
                **({"body": body} if self._dry else {}),
            },
        )

    async def _send_template(self, run: Run, number: int, step: SendTemplate, contact: Contact) -> Did:
        message_id = effect_id(run.id, number)
        if (refused := await self._unwilling(run, contact, message_id)) is not None:
            return refused
        channel_id = await self._channel(run, contact, step.channel)
        if channel_id is None:
            return failed("no_channel", _NO_CHANNEL)
        template = await self._one("template", run, name=step.template, language=step.language, channel_id=channel_id)
        if template is None:
            return failed("no_template", f"there is no template {step.template!r} in {step.language}")
        template_id, status, components = template
        if status != "approved":
            return failed("template_not_approved", f"the template {step.template!r} is {status}, not approved")
        parameters = [text.fill(value, run.facts, lambda url: url) for value in step.parameters]
        conversation_id = await self._conversation(run, contact, channel_id)
        assert conversation_id is not None  # the channel is one that is written to
        await self._queue(
            run,
            number,
            contact,
            message_id,
            conversation_id,
            _template_text(components, parameters),
            kind="template",
            template_id=template_id,
            template={"name": step.template, "language": step.language, "parameters": parameters},
        )
        return Did(
            "done",
            effect_id=message_id,
            outcome="pending",
            details={
                "message_id": str(message_id),
                "conversation_id": str(conversation_id),
                "template": step.template,
                **({"parameters": parameters} if self._dry else {}),
            },
        )

    async def _unwilling(self, run: Run, contact: Contact, message_id: UUID | None) -> Did | None:
        """Why nothing may be sent to the contact; None when it may. It is said, too: who watches sends sees it."""
        if contact.subscriber_state in ("blocked", "unsubscribed"):
            reason = f"contact_{contact.subscriber_state}"
        elif contact.is_anonymized:
            reason = "contact_anonymized"
        elif not contact.is_reachable:
            return skipped("contact_has_no_number")
        else:
            return None
        payload = {"contact_id": str(contact.id), "reason": reason, "automation_run": str(run.id)}
        if message_id is not None:
            payload["attempted_message_id"] = str(message_id)
        await self._emit(run, "system.send_blocked", "contact", contact.id, payload)
        return skipped(reason)

    async def _channel(self, run: Run, contact: Contact, channel: UUID | None) -> UUID | None:
        row = await self._one("sending_channel", run, contact_id=contact.id, channel=channel)
        return None if row is None else row[0]

    async def _conversation(self, run: Run, contact: Contact, channel: UUID | None) -> UUID | None:
        """The contact's open conversation, opened if there is none; None without a channel to have it on."""
        channel_id = await self._channel(run, contact, channel)
        if channel_id is None:
            return None
        said = {"context": SOURCE}
        [row] = await self._change("open_conversation", run, contact, said, channel_id=channel_id)
        conversation_id: UUID = row[0]
        return conversation_id

    async def _queue(
        self,
        run: Run,
        number: int,
        contact: Contact,
        message_id: UUID,
        conversation_id: UUID,
        body: str,
        *,
        kind: str,
        template_id: UUID | None,
        template: dict[str, Any] | None,
    ) -> None:
        """The message's row, and the event that has it sent."""
        metadata: dict[str, Any] = {
            "automation_run": str(run.id),
            "automation_id": str(run.automation_id),
            "step": number,
        }
        if template is not None:
            metadata["template"] = template
        await self._execute(
            "queue_message",
            run,
            id=message_id,
            conversation_id=conversation_id,
            contact_id=contact.id,
            message_type=kind,
            body=body,
            template_id=template_id,
            metadata=Jsonb(metadata),
            now=self._now,
        )
        await self._emit(
            run,
            "message.queued",
            "message",
            message_id,
            {
                "message_id": str(message_id),
                "conversation_id": str(conversation_id),
                "contact_id": str(contact.id),
                "direction": "out",
                "channel": "whatsapp",
                "body": body,
                "automation_run": str(run.id),
            },
        )

    async def _ai_respond(self, run: Run, number: int, step: AiRespond, contact: Contact) -> Did:
        if (refused := await self._unwilling(run, contact, None)) is not None:
            return refused
        conversation_id = await self._conversation(run, contact, step.channel)
        if conversation_id is None:
            return failed("no_channel", _NO_CHANNEL)
        instructions = None if step.instructions is None else text.fill(step.instructions, run.facts, lambda url: url)
        request_id = await self._emit(
            run,
            "ai.response_requested",
            "conversation",
            conversation_id,
            {
                "conversation_id": str(conversation_id),
                "contact_id": str(contact.id),
                "instructions": instructions,
                "automation_run": str(run.id),
            },
        )
        return Did(
            "done",
            effect_id=request_id,
            outcome="pending",
            details={
                "conversation_id": str(conversation_id),
                **({"instructions": instructions} if self._dry else {}),
            },
        )

    # Tags and conversations

    async def _add_tag(self, run: Run, step: AddTag, contact: Contact) -> Did:
        [(added,)] = await self._change("add_tag", run, contact, tag=step.tag)
        return Did("done", None if added else "had_it_already", details={"tag": step.tag})

    async def _remove_tag(self, run: Run, step: RemoveTag, contact: Contact) -> Did:
        [(removed,)] = await self._change("remove_tag", run, contact, tag=step.tag)
        return Did("done", None if removed else "had_it_not", details={"tag": step.tag})

    async def _close(self, run: Run, step: CloseConversation, contact: Contact) -> Did:
        note = None if step.note is None else text.fill(step.note, run.facts, lambda url: url)
        rows = await self._change("close_conversations", run, contact, note=note)
        closed = [str(conversation_id) for conversation_id, was_open in rows if was_open]
        return Did("done", details={"conversations": closed}) if closed else Did("done", "none_open")

    async def _change(
        self, query: str, run: Run, contact: Contact, said: Mapping[str, Any] | None = None, **parameters: Any
    ) -> list[tuple[Any, ...]]:
        """Have a function of SQL make a change and record it. `said`: properties of the fact, besides whose it is."""
        origin = run.origin
        given = {
            "organization_id": run.organization_id,
            "contact_id": contact.id,
            "metadata": origin.metadata,
            "properties": origin.properties(**(said or {})),
        }
        return await (await self._conn.execute(_SQL[query], given | parameters)).fetchall()

    # What is written

    async def _emit(
        self,
        run: Run,
        event_type: str,
        entity_kind: str,
        entity_id: UUID,
        payload: Mapping[str, Any],
        *,
        deliver_at: datetime | None = None,
    ) -> UUID:
        return await emit_async(
            self._conn,
            event_type,
            entity_kind=entity_kind,
            entity_id=entity_id,
            payload=payload,
            organization_id=run.organization_id,
            request_id=run.request_id,
            trace_id=run.trace_id,
            source=SOURCE,
            causation=run.causation,
            deliver_at=deliver_at,
        )

    async def _one(self, query: str, run: Run, **parameters: Any) -> tuple[Any, ...] | None:
        given = {"organization_id": run.organization_id, **parameters}
        row: tuple[Any, ...] | None = await (await self._conn.execute(_SQL[query], given)).fetchone()
        return row

    async def _execute(self, query: str, run: Run, **parameters: Any) -> None:
        await self._conn.execute(_SQL[query], {"organization_id": run.organization_id, **parameters})


_NO_CHANNEL = (
    "there is no WhatsApp channel to write on: either none is active, or there are several and the contact has had no "
    "conversation on any of them: name one in the step (`channel`)"
)


def _template_text(components: Any, parameters: list[str]) -> str:
    """What the contact will read, for people who look at the conversation: the template's body with its numbered
    places filled in."""
    for component in components if isinstance(components, list) else ():
        if isinstance(component, Mapping) and str(component.get("type", "")).upper() == "BODY":
            # In one pass: what is filled in is not looked at again.
            return _NUMBERED.sub(
                lambda found: parameters[int(found[1]) - 1] if 0 < int(found[1]) <= len(parameters) else found[0],
                str(component.get("text", "")),
            )
    return ""
