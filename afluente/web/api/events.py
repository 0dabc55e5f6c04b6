"""Events: emitted by POST, read back with what became of them by GET, taken back before their time by DELETE.

The rules are emit_event's: what it refuses is refused here, with its reason. Beyond that nothing that tells of a row of
ours (`producers.owned`): nobody here writes the row, and some of it would set workers to work (`message.queued`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

import orjson
from psycopg.rows import dict_row

import sql
from afluente.web.api import batch
from afluente.web.api.call import Call, Connection
from afluente.web.api.idempotency import Answer
from afluente.web.api.problems import Problem, refused
from afluente.web.api.requests import EventBatch, EventIn
from producers import Causation, EmitError
from producers.emit import checked
from producers.owned import table_of

SOURCE: Final = "api"
# A row is written after its id was made; clocks of replicas of the past aside, by the same clock.
_SLACK: Final = timedelta(minutes=10)

Prepared = Mapping[str, Any]


async def post(call: Call) -> Answer:
    """Emit one event, or a batch."""
    if isinstance(call.body, dict) and "events" in call.body:
        return await _post_batch(call, batch.model(EventBatch, call.body))
    item = prepare(call, batch.one(call.body, "events"), call.idempotency_key)

    async def work(conn: Connection) -> Answer:
        (event_id,) = await _emit(conn, [item])
        new = item["keyed"] is False or event_id in await _new(conn, [event_id])
        return Answer(201 if new else 200, {"id": str(event_id), "status": "accepted" if new else "duplicate"})

    answer = await call.once(work)
    return Answer(answer.status, answer.content, answer.headers | {"location": f"/v1/events/{answer.content['id']}"})


async def _post_batch(call: Call, given: EventBatch) -> Answer:
    call.charge(len(given.events) - 1)
    items = batch.prepared(given.events, lambda value: prepare(call, value, None))
    keyed = any(not isinstance(item, Problem) and item["keyed"] for item in items)

    async def work(conn: Connection) -> Answer:
        outcomes = await batch.written(conn, items, _emit, all_or_nothing=given.all_or_nothing)
        ids = [outcome for outcome in outcomes if isinstance(outcome, UUID)]
        return batch.answer(outcomes, await _new(conn, ids) if keyed else ids)

    return await call.once(work)


def prepare(call: Call, value: Any, request_key: str | None) -> Prepared:
    """An event as the parameters of its statement. Raises Problem (422)."""
    given = batch.model(EventIn, value)
    if (table := table_of(given.event_type)) is not None:
        raise Problem(
            "event-type-refused",
            f"{given.event_type} tells of a row of {table}, and is emitted by the transaction that writes it",
            hint="record a contact event: POST /v1/contact-events" if table == "contact_events" else None,
        )
    key = given.idempotency_key or request_key
    caused_by = given.caused_by
    try:
        parameters = checked(
            event_type=given.event_type,
            entity_kind=given.entity_kind,
            entity_id=given.entity_id,
            payload=given.payload,
            organization_id=None,
            request_id=call.request_id,
            actor_id=given.actor_id or call.actor_id,
            source=given.source or SOURCE,
            trace_id=call.trace_id,
            idempotency_key=key,
            schema_version=given.schema_version,
            causation=None if caused_by is None else Causation(caused_by.event_id, caused_by.depth),
            traceparent=call.traceparent,
            deliver_at=given.deliver_at,
        )
    except EmitError as error:
        raise refused(error) from None
    return parameters | {"keyed": key is not None}


async def _emit(conn: Connection, items: Sequence[Prepared]) -> list[UUID]:
    columns = ("event_type", "entity_kind", "entity_id", "payload", "metadata", "deliver_at")
    given = {column: [item[column] for item in items] for column in columns}
    cursor = await conn.execute(_QUERIES["emit"], given)
    return [row[0] for row in await cursor.fetchall()]


async def _new(conn: Connection, ids: Sequence[UUID]) -> set[UUID]:
    """Those of `ids` that this transaction wrote."""
    cursor = await conn.execute(_QUERIES["emitted_here"], {"ids": list(ids)})
    return {row[0] for row in await cursor.fetchall()} & set(ids)


async def get(call: Call) -> Answer:
    """One event, its status, and its deliveries."""
    event_id = the_id(call)

    async def work(conn: Connection) -> Answer:
        found = await _one(conn, "event", {"id": event_id, "since": _made_at(event_id) - _SLACK})
        if found is None:
            found = await _one(conn, "deferred", {"id": event_id})
            if found is None:
                raise _no_event(event_id)
            return Answer(200, shown(found) | {"status": "scheduled", "attempts": 0, "deliveries": []})
        cursor = await conn.cursor(row_factory=dict_row).execute(
            _QUERIES["deliveries"], {"id": event_id, "created_at": found["created_at"]}
        )
        deliveries = [shown(row) for row in await cursor.fetchall()]
        return Answer(200, shown(found) | {"deliveries": deliveries})

    return await call.transaction(work)


async def delete(call: Call) -> Answer:
    """Take back an event whose time has not come."""
    event_id = the_id(call)

    async def work(conn: Connection) -> Answer:
        cursor = await conn.execute(_QUERIES["cancel"], {"id": event_id})
        row = await cursor.fetchone()
        if row is None or row[0] is not True:
            raise Problem(
                "not-found", f"no event {event_id} waits for its time", hint="what is emitted cannot be taken back"
            )
        return Answer(204, None)

    return await call.transaction(work)


def the_id(call: Call) -> UUID:
    """The id in the path. Raises Problem (404)."""
    text = call.parameters["id"]
    try:
        found = UUID(text)
    except ValueError:
        raise Problem("not-found", "what stands in the path is no id") from None
    if str(found) != text.lower():
        raise Problem("not-found", "what stands in the path is no id")
    return found


def _no_event(event_id: UUID) -> Problem:
    return Problem("not-found", f"no event has the id {event_id}")


async def _one(conn: Connection, query: str, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    cursor = await conn.cursor(row_factory=dict_row).execute(_QUERIES[query], parameters)
    return await cursor.fetchone()


def _made_at(event_id: UUID) -> datetime:
    """When an id of ours was made, so that older months are not searched; for other ids the beginning of time."""
    if event_id.version != 7:
        return datetime(1970, 1, 2, tzinfo=UTC)
    milliseconds = min(event_id.int >> 80, 4_102_444_800_000)
    return max(datetime.fromtimestamp(milliseconds / 1000, UTC), datetime(1970, 1, 2, tzinfo=UTC))


def shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as JSON: ids and decimals as text, times in UTC, what is JSON already as Postgres wrote it."""
    return {name: _value(name, value) for name, value in row.items()}


def _value(name: str, value: Any) -> Any:
    if name in ("payload", "metadata", "properties"):
        return orjson.Fragment(value)
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    return value


_QUERIES = sql.queries("api")
