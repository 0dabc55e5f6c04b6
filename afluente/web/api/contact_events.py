"""Contact events: recorded by POST, read by GET, newest first, page by page.

The rules are record_contact_events': one fact is one row, whoever brings it how often; a contact of another
organization is none; a person that nobody knows becomes a contact. What it leaves to its caller is here: the forms by
which people are matched, and properties that fit the contact event type before anything is committed.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import urlencode
from uuid import UUID

import orjson
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb
from pydantic import TypeAdapter, ValidationError

import schemas
import sql
from afluente.web.api import batch
from afluente.web.api.call import Call, Connection
from afluente.web.api.events import SOURCE, shown, the_id
from afluente.web.api.idempotency import Answer
from afluente.web.api.problems import Problem, refused
from afluente.web.api.requests import ContactEventBatch, ContactEventIn, ContactRef, Id, Moment
from producers import EmitError
from producers.emit import MAX_PAYLOAD_BYTES, to_json
from producers.errors import PayloadError
from producers.ingest.normalize import facts
from schemas.contact_events import contact_event_type_of, metric_of, unknown_type
from schemas.published import CONTACT_EVENT

DEFAULT_LIMIT: Final = 50
MAX_LIMIT: Final = 200
_NOBODY: Final = UUID(int=0)

Prepared = dict[str, Any]

# ---------------------------------------------------------------------------------------------------------------------
# Recording


async def post(call: Call) -> Answer:
    """Record one contact event, or a batch."""
    if isinstance(call.body, dict) and "contact_events" in call.body:
        return await _post_batch(call, batch.model(ContactEventBatch, call.body))
    item = prepare(batch.one(call.body, "contact_events"))

    async def work(conn: Connection) -> Answer:
        ((outcome, new),) = await _record(call, conn, [item])
        if isinstance(outcome, Problem):
            raise outcome
        return Answer(201 if new else 200, {"id": str(outcome), "status": "accepted" if new else "duplicate"})

    answer = await call.once(work)
    location = {"location": f"/v1/contact-events/{answer.content['id']}"}
    return Answer(answer.status, answer.content, answer.headers | location)


async def _post_batch(call: Call, given: ContactEventBatch) -> Answer:
    call.charge(len(given.contact_events) - 1)
    items = batch.prepared(given.contact_events, prepare)

    async def work(conn: Connection) -> Answer:
        batch.require_all(items, given.all_or_nothing)
        recorded = iter(await _record(call, conn, [item for item in items if not isinstance(item, Problem)]))
        outcomes = [(item, False) if isinstance(item, Problem) else next(recorded) for item in items]
        found = [outcome for outcome, _ in outcomes]
        batch.require_all(found, given.all_or_nothing)
        return batch.answer(found, [outcome for outcome, new in outcomes if new and isinstance(outcome, UUID)])

    return await call.once(work)


def prepare(value: Any) -> Prepared:
    """A contact event as an item of record_contact_events. Raises Problem (422)."""
    given = batch.model(ContactEventIn, value)
    try:
        properties = to_json(given.properties, "properties")
        if len(properties.encode()) > MAX_PAYLOAD_BYTES:
            raise Problem("too-large", f"properties have more than {MAX_PAYLOAD_BYTES} bytes of JSON text")
        _check_schema(given, properties)
    except EmitError as error:
        raise refused(error) from None
    item = given.model_dump(mode="json", exclude={"contact", "metric", "properties"})
    return item | {
        "metric_name": given.metric,
        "value": None if given.value is None else f"{given.value:f}",
        "properties": orjson.Fragment(properties),
        **_named(given.contact),
    }


def _named(contact: ContactRef | None) -> Prepared:
    """The contact by what it is known by, in the form used for matching."""
    if contact is None:
        return {}
    phone, email = facts.phone_identity(contact.phone), facts.email_identity(contact.email)
    return {
        "phone": phone and phone.value,
        "phone_as_received": phone and phone.as_received,
        "email": email and email.value,
        "contact_external_id": contact.external_id,
        "name": facts.person(name=contact.name).name,
    }


def _check_schema(given: ContactEventIn, properties: str) -> None:
    """What the relay will do with the event, once it is committed. Raises PayloadError."""
    if (wrong := unknown_type(given.event_type)) is not None:
        raise PayloadError(wrong, field="event_type", hint="GET /v1/event-types lists them")
    event_type = given.event_type or contact_event_type_of(given.metric or "")
    now = datetime.now(UTC)
    payload = {
        "contact_event_id": str(_NOBODY),
        "contact_id": str(_NOBODY),
        "contact_event_type": event_type,
        "metric_name": given.metric or metric_of(given.event_type or ""),
        "category": None,
        "source_type": given.source_type,
        "source": given.source,
        "external_event_id": given.external_event_id,
        "unique_event_id": None,
        "object_id": given.object_id,
        "object_id_ref": given.object_id_ref,
        "entity_type": given.entity_type,
        "entity_id": given.entity_id,
        "value": None if given.value is None else f"{given.value:f}",
        "currency": given.currency,
        "occurred_at": (given.occurred_at or now).astimezone(UTC).isoformat(timespec="microseconds"),
        "received_at": now.isoformat(timespec="microseconds"),
    }
    text = json.dumps(payload, ensure_ascii=False)[:-1] + f', "properties": {properties}}}'
    try:
        schemas.encode(
            schemas.Row(0, _NOBODY, _NOBODY, CONTACT_EVENT, "contact", _NOBODY, text.encode(), b"{}", now),
        )
    except schemas.EncodeError as error:
        raise PayloadError(
            error.reason,
            field=error.field.removeprefix("payload."),
            hint=f"GET /v1/event-types/{event_type} has the schema of its properties" if event_type else None,
        ) from error


async def _record(call: Call, conn: Connection, items: Sequence[Prepared]) -> list[tuple[UUID | Problem, bool]]:
    """Record all; for each its id, or why not, and whether it is new."""
    if not items:
        return []
    metadata = {
        "source": SOURCE,
        "request_id": call.request_id,
        "actor_id": call.actor_id,
        "trace_id": call.trace_id,
        "traceparent": call.traceparent,
    }
    given = {
        "events": orjson.dumps([{"n": place, **item} for place, item in enumerate(items)]).decode(),
        "metadata": Jsonb({name: text for name, text in metadata.items() if text is not None}),
    }
    cursor = await conn.execute(_QUERIES["record"], given)
    found: list[tuple[UUID | Problem, bool]] = []
    for event_id, outcome, reason in await cursor.fetchall():
        if outcome == "rejected":
            found.append((_REJECTED[reason](), False))
        else:
            found.append((event_id, outcome == "recorded"))
    return found


_REJECTED: Final = {
    "unknown_contact": lambda: Problem("contact-unknown", "contact_id is not a contact of the key's organization"),
    "no_contact": lambda: Problem("contact-unknown", "contact names nobody"),
    "too_large": lambda: Problem("too-large", "properties are too large, or nested too deeply"),
}


# ---------------------------------------------------------------------------------------------------------------------
# Reading

_FIELDS = """
SELECT e.id, e.contact_id, e.event_type, e.metric_name AS metric, e.source_type, e.source, e.external_event_id,
       e.unique_event_id, e.object_id, e.object_id_ref, e.entity_type, e.entity_id, e.value, e.currency,
       e.properties::text, e.occurred_at, e.received_at
  FROM contact_events e
"""

# Each condition only where it is asked for, so that the index of the question is what answers it. The organization is
# row-level security's condition.
_CONDITIONS: Final[Mapping[str, str]] = {
    # A person's events are those of all contacts merged into one. In a sub-select: found once, and not for each row.
    "contact_id": "e.contact_id = ANY ((SELECT afluente.contact_ids(auth.organization_id(), %(contact_id)s))::uuid[])",
    "event_type": "e.event_type = %(event_type)s",
    "metric": "e.metric_name = %(metric)s",
    "since": "e.occurred_at >= %(since)s",
    "until": "e.occurred_at < %(until)s",
    "cursor": "(e.occurred_at, e.id) < (%(at)s, %(id)s)",
}

_moment: TypeAdapter[datetime] = TypeAdapter(Moment)
_id: TypeAdapter[UUID] = TypeAdapter(Id)


async def get(call: Call) -> Answer:
    """A page of contact events, newest first."""
    asked = _asked(call.query)
    # One more than is shown: whether there is another page.
    given = {**asked, "rows": asked["limit"] + 1}

    async def work(conn: Connection) -> Answer:
        cursor = await conn.cursor(row_factory=dict_row).execute(statement(asked).encode(), given)
        rows = await cursor.fetchall()
        shown_rows = rows[: asked["limit"]]
        content: dict[str, Any] = {"data": [shown(row) for row in shown_rows], "next_cursor": None}
        headers = {}
        if len(rows) > len(shown_rows):
            last = shown_rows[-1]
            content["next_cursor"] = _cursor(last["occurred_at"], last["id"])
            query = urlencode({**call.query, "cursor": content["next_cursor"]})
            headers["link"] = f'<{call.path}?{query}>; rel="next"'
        return Answer(200, content, headers)

    return await call.transaction(work)


def statement(asked: Collection[str]) -> str:
    """The statement that answers what is asked."""
    conditions = [text for name, text in _CONDITIONS.items() if name in asked]
    where = f" WHERE {' AND '.join(conditions)}\n" if conditions else ""
    return f"{_FIELDS}{where} ORDER BY e.occurred_at DESC, e.id DESC\n LIMIT %(rows)s"


async def get_one(call: Call) -> Answer:
    """One contact event."""
    event_id = the_id(call)

    async def work(conn: Connection) -> Answer:
        one = f"{_FIELDS} WHERE e.id = %(id)s"
        cursor = await conn.cursor(row_factory=dict_row).execute(one.encode(), {"id": event_id})
        row = await cursor.fetchone()
        if row is None:
            raise Problem("not-found", f"no contact event has the id {event_id}")
        return Answer(200, shown(row))

    return await call.transaction(work)


def _asked(query: Mapping[str, str]) -> dict[str, Any]:
    """The parameters of the query. Raises Problem (422), naming the one that is wrong."""
    asked: dict[str, Any] = {"limit": DEFAULT_LIMIT}
    for name, text in query.items():
        try:
            match name:
                case "contact_id":
                    asked[name] = _id.validate_python(text)
                case "since" | "until":
                    # a plus sign that was not escaped is a space by now
                    asked[name] = _moment.validate_python(text.replace(" ", "+"))
                case "event_type" | "metric":
                    if not 1 <= len(text) <= 100 or "\0" in text:
                        raise ValueError("has to be 1 to 100 characters")
                    asked[name] = text
                case "limit":
                    if not (text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) <= MAX_LIMIT):
                        raise ValueError(f"has to be a whole number from 1 to {MAX_LIMIT}")
                    asked[name] = int(text)
                case "cursor":
                    asked["at"], asked["id"] = _read_cursor(text)
                    asked["cursor"] = text
                case _:
                    raise ValueError("is no parameter of this request")
        except ValidationError as error:
            what = str(error.errors(include_url=False)[0]["msg"]).removeprefix("Value error, ")
            raise _bad_parameter(name, what) from None
        except ValueError as error:
            raise _bad_parameter(name, str(error)) from None
    return asked


def _bad_parameter(name: str, what: str) -> Problem:
    return Problem("invalid-request", f"query parameter {name[:80]}: {what}", errors=[(f"?{name[:80]}", what)])


def _cursor(at: datetime, event_id: UUID) -> str:
    text = f"{at.astimezone(UTC).isoformat(timespec='microseconds')} {event_id}"
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _read_cursor(text: str) -> tuple[datetime, UUID]:
    try:
        plain = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True).decode()
        at, _, event_id = plain.partition(" ")
        return _moment.validate_python(at), _id.validate_python(event_id)
    except (ValueError, binascii.Error):  # ValidationError and UnicodeDecodeError are ValueErrors
        raise ValueError("is no cursor of ours: take `next_cursor` of the page before") from None


_QUERIES = sql.queries("api")
