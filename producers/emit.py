"""A typed call of `emit_event` in the caller's own transaction. Needs no Kafka client.

What must stay true:
- The event is committed with the caller's rows, or not at all: nothing here commits, retries or swallows an error.
- What is emitted is what was given: Decimal, UUID and datetime become text without loss; what JSON or Postgres cannot
  hold (NaN, NUL, lone surrogates, naive datetimes) is refused, not bent.
- An event of the catalogue fits its schema before it is written. The relay would set it aside hours later, when nobody
  who knows why is looking.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from typing import Any, Final
from uuid import UUID

import psycopg
from psycopg import AsyncConnection, Connection
from psycopg.rows import scalar_row

import schemas
from producers.errors import EventTypeError, PayloadError, TooLargeError, translate

__all__ = ["MAX_METADATA_BYTES", "MAX_PAYLOAD_BYTES", "Causation", "emit", "emit_async", "metadata_of", "to_json"]

MAX_PAYLOAD_BYTES: Final = 262_144
MAX_METADATA_BYTES: Final = 16_384
MAX_DEPTH: Final = 100  # well below what the JSON parsers of Postgres and Python give up at
MAX_LENGTHS: Final = {"source": 100, "request_id": 255, "trace_id": 255, "actor_id": 255, "idempotency_key": 255}

_EVENT_TYPE = re.compile(r"[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*\Z")
_ENTITY_KIND = re.compile(r"[a-z][a-z0-9_]*\Z")
_SEMVER = re.compile(r"[0-9]+\.[0-9]+\.[0-9]+([-+][0-9A-Za-z.+-]+)?\Z")
_SURROGATE = re.compile("[\ud800-\udfff]")
_NOBODY = UUID(int=0)

_EMIT = """
SELECT afluente.emit_as_allowed(
    %(event_type)s::text, %(entity_kind)s::text, %(entity_id)s::uuid, %(payload)s::jsonb, %(metadata)s::jsonb,
    %(organization_id)s::uuid, %(deliver_at)s::timestamptz)
"""


@dataclass(frozen=True, slots=True)
class Causation:
    """What led to an event: the event whose handling emits it, and the number of such steps: the first is 1; and the
    run of an automation that emits it, where one does."""

    event_id: UUID
    depth: int = 1
    traceparent: str | None = None
    automation_run: UUID | None = None

    @classmethod
    def of(cls, event: schemas.Event) -> Causation:
        """For an event that is emitted while `event` is handled."""
        depth = event.metadata.get("causation_depth", 0)
        return cls(event.id, (depth if isinstance(depth, int) else 0) + 1, event.metadata.get("traceparent"))


def emit(
    conn: Connection[Any],
    event_type: str,
    *,
    entity_kind: str,
    entity_id: UUID | None = None,
    payload: Mapping[str, Any],
    organization_id: UUID | None = None,
    request_id: str | None = None,
    actor_id: str | UUID | None = None,
    source: str | None = None,
    trace_id: str | None = None,
    idempotency_key: str | None = None,
    schema_version: str | None = None,
    causation: Causation | None = None,
    traceparent: str | None = None,
    deliver_at: datetime | None = None,
) -> UUID:
    """Write one event in the connection's transaction and return its id; the caller commits.

    Without `organization_id` it is the session's (`app.organization_id`). With it, workers emit for any organization,
    and applications for their own only. `deliver_at`, in the future, keeps the event until then; `cancel_deferred(id)`
    takes it back. With `idempotency_key`, a second call with the same content returns the first one's id, waiting for
    its transaction when that is still open. `traceparent` (W3C) is the trace's; without it, that of `causation`.

    Raises EmitError and what is below it (`producers.errors`): before anything is sent, where the client can tell.
    """
    parameters = checked(**_given(locals()))
    try:
        with conn.cursor(row_factory=scalar_row) as cursor:
            return _id(cursor.execute(_EMIT, parameters).fetchone())
    except psycopg.Error as error:
        if (typed := translate(error)) is not None:
            raise typed from error
        raise


async def emit_async(
    conn: AsyncConnection[Any],
    event_type: str,
    *,
    entity_kind: str,
    entity_id: UUID | None = None,
    payload: Mapping[str, Any],
    organization_id: UUID | None = None,
    request_id: str | None = None,
    actor_id: str | UUID | None = None,
    source: str | None = None,
    trace_id: str | None = None,
    idempotency_key: str | None = None,
    schema_version: str | None = None,
    causation: Causation | None = None,
    traceparent: str | None = None,
    deliver_at: datetime | None = None,
) -> UUID:
    """`emit` on an asyncio connection."""
    parameters = checked(**_given(locals()))
    try:
        async with conn.cursor(row_factory=scalar_row) as cursor:
            await cursor.execute(_EMIT, parameters)
            return _id(await cursor.fetchone())
    except psycopg.Error as error:
        if (typed := translate(error)) is not None:
            raise typed from error
        raise


def _given(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name != "conn"}


def _id(value: Any) -> UUID:
    assert isinstance(value, UUID)
    return value


def checked(
    *,
    event_type: str,
    entity_kind: str,
    entity_id: UUID | None,
    payload: Mapping[str, Any],
    organization_id: UUID | None,
    request_id: str | None,
    actor_id: str | UUID | None,
    source: str | None,
    trace_id: str | None,
    idempotency_key: str | None,
    schema_version: str | None,
    causation: Causation | None,
    deliver_at: datetime | None,
    traceparent: str | None = None,
) -> dict[str, Any]:
    """Check everything that can be checked here; the event as JSON texts, which are the parameters of the statement."""
    _check_name("event_type", event_type, _EVENT_TYPE, "lead.stage_changed")
    _check_name("entity_kind", entity_kind, _ENTITY_KIND, "lead")
    if deliver_at is not None and deliver_at.utcoffset() is None:
        raise PayloadError("is naive: which moment it names is not known", field="deliver_at", hint=_AWARE)
    payload_text = to_json(payload, "payload")
    _check_size(payload_text, MAX_PAYLOAD_BYTES, "payload")
    metadata_text = to_json(
        _metadata(
            request_id=request_id,
            actor_id=None if actor_id is None else str(actor_id),
            source=source,
            trace_id=trace_id,
            idempotency_key=idempotency_key,
            schema_version=schema_version,
            causation=causation,
            traceparent=traceparent or (causation.traceparent if causation else None),
        ),
        "metadata",
    )
    _check_size(metadata_text, MAX_METADATA_BYTES, "metadata")
    try:
        # What the relay will do with the row; custom types pass through here too.
        schemas.encode(
            schemas.Row(
                0,
                _NOBODY,
                organization_id or _NOBODY,
                event_type,
                entity_kind,
                entity_id,
                payload_text.encode(),
                metadata_text.encode(),
                datetime.now(UTC),
            )
        )
    except schemas.EncodeError as error:
        raise PayloadError(
            error.reason, field=error.field, hint=f"afluente schemas show {event_type}: what its payload is made of"
        ) from error
    return {
        "event_type": event_type,
        "entity_kind": entity_kind,
        "entity_id": entity_id,
        "payload": payload_text,
        "metadata": metadata_text,
        "organization_id": organization_id,
        "deliver_at": deliver_at,
    }


def metadata_of(
    causation: Causation, *, source: str, request_id: str | None = None, trace_id: str | None = None
) -> str:
    """The metadata, as JSON text, of what SQL functions emit: the same that `emit` gives to an event. Raises
    PayloadError."""
    return to_json(
        _metadata(
            causation=causation,
            schema_version=None,
            traceparent=causation.traceparent,
            source=source,
            request_id=request_id,
            trace_id=trace_id,
        ),
        "metadata",
    )


def _metadata(
    *, causation: Causation | None, schema_version: str | None, traceparent: str | None, **texts: str | None
) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for name, text in texts.items():
        if text is None:
            continue
        if not isinstance(text, str):
            raise PayloadError(f"must be text, not {type(text).__name__}", field=f"metadata.{name}")
        if not 1 <= len(text) <= MAX_LENGTHS[name]:
            raise PayloadError(f"has {len(text)} characters; 1 to {MAX_LENGTHS[name]} fit", field=f"metadata.{name}")
        metadata[name] = text
    if schema_version is not None:
        if not isinstance(schema_version, str) or _SEMVER.match(schema_version) is None:
            raise PayloadError(
                f"{schema_version!r} is not a semantic version", field="metadata.schema_version", hint="such as '1.0.0'"
            )
        metadata["schema_version"] = schema_version
    if traceparent is not None:
        metadata["traceparent"] = traceparent
    if causation is not None:
        metadata["causation_id"] = causation.event_id
        metadata["causation_depth"] = causation.depth
        if causation.automation_run is not None:
            metadata["automation_run"] = causation.automation_run
    return metadata


def _check_name(field: str, value: str, pattern: re.Pattern[str], example: str) -> None:
    if not isinstance(value, str) or len(value) > 100 or pattern.match(value) is None:
        shape = "{entity}.{action}" if field == "event_type" else "a word"
        raise EventTypeError(
            f"{field} {value!r} is not {shape} in lower snake case of at most 100 characters",
            hint=f"for example {example!r}",
        )


def _check_size(text: str, limit: int, field: str) -> None:
    size = len(text) if text.isascii() else len(text.encode())
    if size > limit:
        raise TooLargeError(
            f"{field} has {size} bytes of JSON text; the limit is {limit}",
            hint="store the content elsewhere and put its id into the payload",
        )


_AWARE = "give it its offset: datetime.now(UTC), or .replace(tzinfo=ZoneInfo('America/Sao_Paulo'))"


def to_json(value: Any, field: str = "payload") -> str:
    """JSON text of an object, exactly as given. `field` is the name that errors start with.

    Decimal and UUID become text, an aware datetime ISO 8601 with its offset, a date its ISO form, an Enum its value, a
    pydantic model the fields that were set. Raises PayloadError with the place for anything else.
    """
    plain = _plain(value, field, 0)
    if not isinstance(plain, dict):
        raise PayloadError(
            f"must be a JSON object, not {type(value).__name__}", field=field, hint='wrap it: {"items": [...]}'
        )
    try:
        # Separators as Postgres writes jsonb, so that sizes agree.
        return json.dumps(plain, ensure_ascii=False, allow_nan=False)
    except ValueError as error:  # an int of thousands of digits
        raise PayloadError(str(error), field=field) from error


def _plain(value: Any, path: str, depth: int) -> Any:
    """`value` in terms of what JSON has."""
    kind = type(value)
    if kind is str:
        return _checked_text(value, path)
    if value is None or kind is bool or kind is int:
        return value
    if kind is float:
        if not math.isfinite(value):
            raise PayloadError(f"{value} is no JSON number", field=path, hint="leave it out, or send null")
        # Beyond 2**53 the shortest text of a float is another integer than its value, and readers take it for one.
        return int(value) if abs(value) >= 2**53 else value
    if depth > MAX_DEPTH:
        raise PayloadError(f"is nested more than {MAX_DEPTH} levels deep (or contains itself)", field=path[:200])
    if isinstance(value, Mapping):
        plain = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise PayloadError(f"key {key!r} is not text", field=path)
            plain[_checked_text(str(key), f"{path} (a key)")] = _plain(item, f"{path}.{key}", depth + 1)
        return plain
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
    return _plain_object(value, path, depth)


def _plain_object(value: Any, path: str, depth: int) -> Any:
    match value:
        case Enum():  # before str and int: an Enum may be one as well
            return _plain(value.value, path, depth + 1)
        case str():
            return _checked_text(str(value), path)
        case Decimal():
            if not value.is_finite():
                raise PayloadError(f"{value} is no number", field=path, hint="leave it out, or send null")
            return str(value)
        case UUID():
            return str(value)
        case datetime():
            if value.utcoffset() is None:
                raise PayloadError("is a naive datetime: which moment it names is not known", field=path, hint=_AWARE)
            return value.isoformat()
        case date():
            return value.isoformat()
    if callable(dump := getattr(value, "model_dump", None)):
        return _plain(dump(by_alias=True, exclude_unset=True), path, depth + 1)
    if isinstance(value, int | float):
        return _plain(int(value) if isinstance(value, int) else float(value), path, depth)
    raise PayloadError(f"{type(value).__name__} has no JSON form", field=path, hint="convert it first")


def _checked_text(text: str, path: str) -> str:
    if "\x00" in text:
        raise PayloadError("contains NUL (U+0000), which Postgres cannot keep", field=path, hint="remove it")
    if not text.isascii() and _SURROGATE.search(text) is not None:
        raise PayloadError(
            "contains a lone surrogate, half of a character", field=path, hint="decode the bytes with errors='replace'"
        )
    return text
