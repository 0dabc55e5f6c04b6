"""What is known when an automation is judged and carried out: the facts that conditions and texts name.

    event      the payload of the event, and `name`: its event type
    contact    id, name, first_name, phone, email, source, subscriber_state, created_at, tags
    message    of an event about a message: text, type, direction, conversation_id
    webhook    of a delivery that came in: source, topic, channel_id, body
    schedule   due_at

The contact is always as it is now; the rest is what the event said, and is kept with a run for as long as it has steps
to come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import dict_row

import sql
from consumers.automations import conditions
from consumers.automations.definition import ContactPaths
from consumers.inbound import part
from producers.ingest.normalize import phone
from producers.ingest.normalize.document import read_document
from schemas import Event

DUE = "system.automation_due"

_SQL = sql.queries("automations")


@dataclass(frozen=True)
class Contact:
    """A person as an automation sees them."""

    id: UUID
    subscriber_state: str
    is_anonymized: bool
    is_reachable: bool
    shown: Mapping[str, Any]


@dataclass(frozen=True)
class Known:
    """Everything about one event, but for the contact: `said` is kept with the run."""

    contact_id: UUID | None
    said: Mapping[str, Any] = field(default_factory=dict)

    def with_contact(self, contact: Contact | None) -> dict[str, Any]:
        return {**self.said, **({} if contact is None else {"contact": contact.shown})}


async def of_contact(conn: AsyncConnection[Any], organization_id: UUID, contact_id: UUID | None) -> Contact | None:
    """The contact, or the one it was merged into; None for nobody."""
    if contact_id is None:
        return None
    async with conn.cursor(row_factory=dict_row) as cursor:
        row = await (
            await cursor.execute(_SQL["contact"], {"organization_id": organization_id, "contact_id": contact_id})
        ).fetchone()
    return None if row is None else contact_of(row)


def contact_of(row: Mapping[str, Any]) -> Contact:
    """A row of the queries `contact` and `audience`."""
    name = row["name"]
    return Contact(
        id=row["id"],
        subscriber_state=row["subscriber_state"],
        is_anonymized=row["anonymized_at"] is not None,
        is_reachable=row["is_reachable"],
        shown={
            "id": str(row["id"]),
            "name": name,
            "first_name": name.split()[0] if name and name.split() else None,
            "phone": row["phone_e164"],
            "email": row["email"],
            "source": row["source"],
            "subscriber_state": row["subscriber_state"],
            "created_at": row["created_at"].isoformat(),
            "tags": list(row["tags"]),
        },
    )


async def of_event(conn: AsyncConnection[Any], event: Event) -> Known:
    """What an event says, and whom it is about."""
    payload = event.payload
    if event.event_type == DUE:
        return Known(as_uuid(payload.get("contact_id")), {"schedule": {"due_at": payload.get("due_at")}})
    said: dict[str, Any] = {"event": {**payload, "name": event.event_type}}
    contact_id = as_uuid(payload.get("contact_id"))
    if contact_id is None and event.entity_id is not None:
        contact_id = await _contact_of_entity(conn, event)
    message_id = _message_of(event)
    if message_id is not None and (message := await _message(conn, event.organization_id, message_id)) is not None:
        said["message"] = message
    elif event.event_type == "message.received":
        said["message"] = {"text": payload.get("body"), "direction": "in"}
    return Known(contact_id, said)


@dataclass(frozen=True)
class Delivery:
    """What came in, as far as triggers ask: `sender` is what a generic connection's mapping calls its sender."""

    status: str | None = None
    channel_id: UUID | None = None
    sender: str | None = None


async def delivery(conn: AsyncConnection[Any], event: Event) -> Delivery:
    """The delivery that an event names; of one that is not there everything is None."""
    parameters = {
        "organization_id": event.organization_id,
        "webhook_event_id": as_uuid(event.payload.get("webhook_event_id")),
    }
    row = await (await conn.execute(_SQL["webhook_status"], parameters)).fetchone()
    return Delivery() if row is None else Delivery(*row)


async def of_webhook(conn: AsyncConnection[Any], event: Event, paths: ContactPaths) -> Known:
    """What a delivery that came in says. The contact is whoever its facts are about, once it is normalised; else the
    one that its body names, if that is known."""
    webhook_event_id = as_uuid(event.payload.get("webhook_event_id"))
    stored = None if webhook_event_id is None else await part.read(conn, event.organization_id, webhook_event_id)
    webhook: dict[str, Any] = {"source": event.payload.get("source"), "topic": event.payload.get("topic")}
    if stored is not None:
        document = read_document(stored.body)
        webhook |= {
            "channel_id": str(stored.channel_id),
            "body": None if document is None else _jsonable(document.value),
        }
    said = {"webhook": webhook, "event": {**event.payload, "name": event.event_type}}
    contact_id = await _one(
        conn, "contact_of_webhook", organization_id=event.organization_id, webhook_event_id=webhook_event_id
    )
    if contact_id is None:
        contact_id = await _named(conn, event.organization_id, webhook.get("body"), paths)
    return Known(contact_id, said)


async def _named(conn: AsyncConnection[Any], organization_id: UUID, body: Any, paths: ContactPaths) -> UUID | None:
    for kind, path, form in (
        ("phone", paths.phone, phone.canonical),
        ("email", paths.email, lambda text: text.strip().lower() or None),
    ):
        for value in conditions.values(body, path) if path else ():
            if isinstance(value, str | int) and not isinstance(value, bool) and (canonical := form(str(value))):
                found = await _one(
                    conn, "contact_of_identity", organization_id=organization_id, kind=kind, value=canonical
                )
                if found is not None:
                    return found
    return None


async def _contact_of_entity(conn: AsyncConnection[Any], event: Event) -> UUID | None:
    return await _one(
        conn,
        "contact_of_entity",
        organization_id=event.organization_id,
        entity_id=event.entity_id,
        entity_kind=event.entity_kind,
    )


def _message_of(event: Event) -> UUID | None:
    if event.event_type == "contact_event.recorded" and event.payload.get("entity_type") == "message":
        return as_uuid(event.payload.get("object_id"))
    return as_uuid(event.payload.get("message_id")) if event.event_type.startswith("message.") else None


async def _message(conn: AsyncConnection[Any], organization_id: UUID, message_id: UUID) -> dict[str, Any] | None:
    parameters = {"organization_id": organization_id, "message_id": message_id}
    row = await (await conn.execute(_SQL["message"], parameters)).fetchone()
    if row is None:
        return None
    return {"text": row[0], "type": row[1], "direction": row[2], "conversation_id": str(row[3])}


async def _one(conn: AsyncConnection[Any], query: str, **parameters: Any) -> UUID | None:
    row = await (await conn.execute(_SQL[query], parameters)).fetchone()
    return None if row is None else row[0]


def as_uuid(value: Any) -> UUID | None:
    """The id that a text is; None for anything else."""
    try:
        return UUID(value) if isinstance(value, str) else None
    except ValueError:
        return None


def _jsonable(value: Any) -> Any:
    """A document's exact numbers as text: what JSON would round."""
    match value:
        case dict():
            return {name: _jsonable(each) for name, each in value.items()}
        case list():
            return [_jsonable(each) for each in value]
        case None | bool() | int() | str():
            return value
    return str(value)
