"""Messages and conversations: what was written to us and by us, and what became of it.

What must stay true: a message is stored once by the provider's id; a status is noted once, also before its message is
known; statuses never go backwards (the ledger's own rule), and `failed` is kept. A message of ours that comes back is
never received, and is matched with its send: while one to the same contact is being sent, it waits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from psycopg.types.json import Jsonb

from consumers.inbound.apply.contact_events import ContactEvents
from consumers.inbound.apply.contacts import Contacts
from consumers.inbound.apply.writing import NotYet, Writing, cut
from producers.emit import to_json
from producers.ingest.normalize import facts as f
from producers.ingest.normalize import jids

# Statuses as the ledger knows them; 'played' is a voice message that was listened to, a reading of its own kind.
_STATUS_KINDS = {"sent": "sent", "delivered": "delivered", "read": "read", "played": "read", "failed": "failed"}
_STATUS_METRICS = {"delivered": "Message Delivered", "read": "Message Read", "failed": "Message Failed"}
_TEMPLATE_METRICS = {"delivered": "Template Delivered", "read": "Template Read"}
# Cloud API's ids are WhatsApp's own; a gateway's are the linked phone's.
_NAMED_PER_DEVICE = frozenset({"waha", "evolution"})
# Of the 256 KiB that an event's payload may have.
_TOLD_BYTES = 200 * 1024
WINDOW_EXPIRED_CODE = "131047"


class SendUnderWay(NotYet):
    """A message of ours comes back while one to the same contact is being sent: the sender is about to name it."""

    def __init__(self) -> None:
        super().__init__("a message to this contact is being sent")


class Messages:
    def __init__(self, writing: Writing, contacts: Contacts, events: ContactEvents, wait: bool) -> None:
        self._writing = writing
        self._contacts = contacts
        self._events = events
        self._wait = wait

    async def incoming(self, message: f.IncomingMessage) -> None:
        contact_id = await self._contacts.of(message.person)
        if contact_id is None:
            return
        if self._writing.part.source in _NAMED_PER_DEVICE:
            # The same message under another of the contact's numbers has other locks, and another name.
            await self._writing.execute("hold_contact", contact_id=contact_id)
        if await self._find((message.wamid, *message.other_names), contact_id) is not None:
            return
        name = self._id(message.wamid)
        conversation_id = await self._conversation(contact_id, message.occurred_at, message.content.get("referral"))
        urls = [url for item in message.media if isinstance(url := item.get("url"), str)]
        message_id = await self._insert_message(
            conversation_id,
            contact_id,
            direction="in",
            status="received",
            message_type=message.kind,
            body=message.body,
            media_urls=urls,
            waha_message_id=name,
            metadata={**message.content, **({"media": list(message.media)} if message.media else {})},
            occurred_at=message.occurred_at,
        )
        if message.reply_to:
            await self._writing.execute("answer_message", message_id=message_id, names=self._ids(message.reply_to))
        await self._writing.emit(
            "message.received",
            entity_kind="message",
            entity_id=message_id,
            payload={
                "direction": "in",
                "conversation_id": str(conversation_id),
                "contact_id": str(contact_id),
                "body": _told(message.body),
                "media_urls": urls or None,
                "waha_message_id": name,
                "message_id": str(message_id),
            },
        )
        await self._message_fact(contact_id, "received", "Message Received", name, message_id, message.occurred_at)
        if message.stop_word is not None:
            await self._contacts.stopped(contact_id, message.stop_word, message.occurred_at)

    async def outgoing(self, message: f.OutgoingMessage) -> None:
        contact_id = await self._contacts.of(message.person)
        if contact_id is None or await self._find((message.wamid,)) is not None:
            return
        if message.through_api and self._wait and await self._under_way(contact_id):
            raise SendUnderWay()
        name = self._id(message.wamid)
        conversation_id = await self._conversation(contact_id, message.occurred_at, None)
        message_id = await self._insert_message(
            conversation_id,
            contact_id,
            direction="out",
            status="sent",
            message_type=message.kind,
            body=message.body,
            media_urls=[],
            waha_message_id=name,
            metadata=dict(message.content),
            occurred_at=message.occurred_at,
        )
        await self._sent(message_id, conversation_id, contact_id, message.body, name)
        await self._message_fact(contact_id, "sent", "Message Sent", name, message_id, message.occurred_at)
        await self._count_held(message, message_id, conversation_id, contact_id)

    async def _count_held(
        self, message: f.OutgoingMessage, message_id: UUID, conversation_id: UUID, contact_id: UUID
    ) -> None:
        """What became of a message before it was known here: told now, as if it had come in order."""
        for kind, at, error_code, error_message, retryable in await self._writing.rows(
            "held_statuses", waha_message_id=self._id(message.wamid)
        ):
            status = f.MessageStatus(
                person=message.person,
                wamid=message.wamid,
                status=kind,
                occurred_at=at,
                error_code=error_code,
                error_message=error_message,
                retryable=bool(retryable),
            )
            await self._status_event(status, kind, message_id, conversation_id, contact_id, "sent", message.body)
            metric, name = _STATUS_METRICS[kind], self._id(message.wamid)
            await self._message_fact(contact_id, kind, metric, name, message_id, at, error_code)

    def _id(self, name: str) -> str:
        """A message's id in the ledger, which is one for all connections of the organization."""
        part = self._writing.part
        return jids.ledger_id(name, part.channel_id) if part.source in _NAMED_PER_DEVICE else name

    def _ids(self, names: Iterable[str]) -> list[str]:
        return [self._id(name) for name in names]

    async def _find(self, names: Iterable[str], contact_id: UUID | None = None) -> tuple[Any, ...] | None:
        """The message that one of these names means, in a chat with this contact if it is told."""
        ids = self._ids(names)
        if contact_id is None or self._writing.part.source not in _NAMED_PER_DEVICE:
            return await self._writing.one("message", names=ids)
        tails = [tail for name in ids if (tail := jids.tail(name)) is not None]
        return await self._writing.one("message_in_any_chat", names=ids, tails=tails, contact_id=contact_id)

    async def _under_way(self, contact_id: UUID) -> bool:
        channel_id = self._writing.part.channel_id
        return await self._writing.one("send_under_way", contact_id=contact_id, channel_id=channel_id) is not None

    async def _conversation(self, contact_id: UUID, at: datetime, referral: Any) -> UUID:
        """The open conversation, opened by this message if there is none."""
        row = await self._writing.one(
            "open_conversation",
            contact_id=contact_id,
            context=Jsonb({"referral": referral} if referral else {}),
            occurred_at=at,
            properties=Jsonb({"context": "ad" if referral else None}),
            **self._events.origin(),
        )
        assert row is not None
        self._writing.counts["contact_events"] += row[1]
        return UUID(str(row[0]))

    async def _insert_message(
        self, conversation_id: UUID, contact_id: UUID, *, metadata: Mapping[str, Any], **values: Any
    ) -> UUID:
        row = await self._writing.one(
            "insert_message",
            conversation_id=conversation_id,
            contact_id=contact_id,
            metadata=to_json(metadata, "metadata"),
            **values,
        )
        assert row is not None  # `_known` said no, and this person's locks are ours
        self._writing.counts["messages"] += 1
        return UUID(str(row[0]))

    async def _sent(
        self, message_id: UUID, conversation_id: UUID, contact_id: UUID, body: str | None, wamid: str
    ) -> None:
        await self._writing.emit(
            "message.sent",
            entity_kind="message",
            entity_id=message_id,
            payload={
                "direction": "out",
                "conversation_id": str(conversation_id),
                "contact_id": str(contact_id),
                "channel": "whatsapp",
                "body": _told(body),
                "message_id": str(message_id),
                "waha_message_id": wamid,
            },
        )

    async def change(self, change: f.MessageChange) -> None:
        look_up = self._contacts.find if change.of_known_only else self._contacts.of
        contact_id = await look_up(change.person)
        row = await self._find((change.wamid, *change.other_names), contact_id)
        stored = await self._writing.one(
            "insert_message_event",
            message_id=None if row is None else row[0],
            waha_message_id=self._id(change.wamid) if row is None else row[6],
            kind=change.kind,
            source=self._writing.part.source,
            external_id=f"{change.kind}:{self._id(change.change_id)}",
            error_code=None,
            error_message=None,
            retryable=None,
            details=to_json(change.content, "details"),
            occurred_at=change.occurred_at,
        )
        self._writing.counts["message_events"] += stored is not None

    async def status(self, status: f.MessageStatus) -> None:
        """What became of a message of ours. One that is not known is not an event yet: see `_count_held`. It is a fact
        about its contact all the same, if that is known: not everything the business sends goes through here."""
        kind = _STATUS_KINDS.get(status.status)
        if kind is None:  # 'deleted' and 'warning' of old versions: nothing becomes of them
            return
        name = self._id(status.wamid)
        row = await self._find((status.wamid,))
        stored = await self._writing.one(
            "insert_message_event",
            message_id=None if row is None else row[0],
            waha_message_id=name,
            kind=kind,
            source=self._writing.part.source,
            # 'played' after 'read' is one reading
            external_id=f"{kind}:{name}",
            error_code=cut(status.error_code, 100),
            error_message=cut(status.error_message, 1000),
            retryable=status.retryable if kind == "failed" else None,
            details=Jsonb({}),
            occurred_at=status.occurred_at,
        )
        if stored is None:
            return
        self._writing.counts["message_events"] += 1
        # What names no message has waited for whoever was about to store one of that name.
        row = row or await self._find((status.wamid,))
        message_id, conversation_id, contact_id, before, template_id, body, _ = row or (None,) * 7
        if message_id is not None and contact_id is not None:
            await self._status_event(status, kind, message_id, conversation_id, contact_id, before, body)
        contact_id = contact_id or await self._contacts.find(status.person)
        metrics = _STATUS_METRICS | (_TEMPLATE_METRICS if template_id is not None else {})
        if kind in metrics:
            await self._message_fact(
                contact_id, kind, metrics[kind], name, message_id, status.occurred_at, status.error_code
            )

    async def _status_event(
        self,
        status: f.MessageStatus,
        kind: str,
        message_id: UUID,
        conversation_id: UUID,
        contact_id: UUID,
        before: str,
        body: str | None,
    ) -> None:
        """The domain event of a status. 'sent' is emitted by whoever sent; here only if that was never recorded."""
        payload: dict[str, Any] = {"message_id": str(message_id)}
        if kind == "sent":
            if before in ("queued", "sending"):
                await self._sent(message_id, conversation_id, contact_id, body, self._id(status.wamid))
            return
        if kind == "failed":
            payload |= {
                "error_code": status.error_code or "unknown",
                "error_message": status.error_message or "",
                "retryable": status.retryable,
            }
        else:
            payload[f"{kind}_at"] = status.occurred_at
        await self._writing.emit(f"message.{kind}", entity_kind="message", entity_id=message_id, payload=payload)
        if status.error_code == WINDOW_EXPIRED_CODE:
            await self._writing.emit(
                "system.window_24h_expired",
                entity_kind="conversation",
                entity_id=conversation_id,
                payload={
                    "conversation_id": str(conversation_id),
                    "contact_id": str(contact_id),
                    "expired_at": status.occurred_at,
                },
            )

    async def _message_fact(
        self,
        contact_id: UUID | None,
        fact: str,
        metric: str,
        wamid: str,
        message_id: UUID | None,
        at: datetime,
        error_code: str | None = None,
    ) -> None:
        await self._events.record(
            contact_id,
            fact=f"{fact}:{wamid}",
            event_type=None,
            metric=metric,
            occurred_at=at,
            entity_type="message",
            entity_id=wamid,
            object_id=str(message_id) if message_id else None,
            object_id_ref=wamid,
            properties={"error_code": error_code} if error_code else {},
        )


def _told(body: str | None) -> str | None:
    """A text as an event can carry it. The longest of WhatsApp's, all emoji, does not fit; the row has all of it."""
    if body is None or len(json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")) <= _TOLD_BYTES:
        return body
    return body[: _TOLD_BYTES // 6]
