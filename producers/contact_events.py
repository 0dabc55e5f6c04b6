"""Typed calls of `record_contact_event` and `emit_metric_event`, in the caller's own transaction and organization.

What must stay true:
- The fact is committed with the caller's rows, or not at all, and `contact_event.recorded` with it.
- One fact is one row with both columns: a contact event type and a metric that name the same facts are both set.
- What the database would refuse, and what would not fit its schema on the way to Kafka, is refused before anything is
  sent: the transaction is as it was.

The checks and the statements are here once; the two forms of each call differ in how they wait for Postgres.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final, Literal, TypedDict, Unpack, cast
from uuid import UUID

import psycopg
from psycopg import AsyncConnection, Connection
from psycopg.rows import scalar_row

from afluente import telemetry
from producers.emit import Causation, checked, to_json
from producers.errors import PayloadError, translate
from schemas.contact_events import contact_event_type_of, metric_of, unknown_type
from schemas.events.base import Payload

__all__ = [
    "emit_metric_event",
    "emit_metric_event_async",
    "record_contact_event",
    "record_contact_event_async",
]

SourceType = Literal["EXTERNAL", "INTERNAL", "DIRECT"]

SOURCE_TYPES: Final = ("EXTERNAL", "INTERNAL", "DIRECT")
MAX_LENGTHS: Final = {
    "source": 100,
    "event_type": 100,
    "metric_name": 100,
    "object_id": 255,
    "object_id_ref": 255,
    "entity_type": 100,
    "entity_id": 255,
    "external_event_id": 255,
    "unique_event_id": 500,
}
# Whoever has no name yet: the record's ids are made by the database, and have this form.
_PLACEHOLDER = str(UUID(int=0))
_CURRENCY = re.compile(r"[A-Z]{3}\Z")

_RECORD = """
SELECT record_contact_event(
    contact_id => %(contact_id)s::uuid, event_type => %(event_type)s::text, metric_name => %(metric_name)s::text,
    source => %(source)s::text, source_type => %(source_type)s::text, external_event_id => %(external_event_id)s::text,
    unique_event_id => %(unique_event_id)s::text, object_id => %(object_id)s::text,
    object_id_ref => %(object_id_ref)s::text, entity_type => %(entity_type)s::text, entity_id => %(entity_id)s::text,
    value => %(value)s::numeric, currency => %(currency)s::text, occurred_at => %(occurred_at)s::timestamptz,
    received_at => %(received_at)s::timestamptz, properties => %(properties)s::jsonb,
    raw_payload => %(raw_payload)s::jsonb, integration_id => %(integration_id)s::uuid,
    webhook_event_id => %(webhook_event_id)s::uuid, organization_id => %(organization_id)s::uuid,
    metadata => %(metadata)s::jsonb)
"""

log = telemetry.get_logger(__name__)


class Context(TypedDict, total=False):
    """Where a call comes from: goes into the metadata of contact_event.recorded."""

    request_id: str | None
    actor_id: str | UUID | None
    trace_id: str | None
    causation: Causation | None


class Fact(Context, total=False):
    """What `record_contact_event` takes besides the contact and the source. All may be left out, but one of event_type
    and metric_name.

    external_event_id is the fact's name at its source, `<fact>:<source id>`: a fact with a name is recorded once.
    value is an amount in currency (BRL when left out). Without occurred_at it happened now. organization_id, if given,
    must be the session's.
    """

    event_type: str | None
    metric_name: str | None
    properties: Mapping[str, Any] | Payload
    source_type: SourceType
    external_event_id: str | None
    unique_event_id: str | None
    object_id: str | None
    object_id_ref: str | None
    entity_type: str | None
    entity_id: str | None
    value: Decimal | int | None
    currency: str | None
    occurred_at: datetime | None
    received_at: datetime | None
    raw_payload: Mapping[str, Any] | None
    integration_id: UUID | None
    webhook_event_id: UUID | None
    organization_id: UUID | None


class MetricFact(Context, total=False):
    """What `emit_metric_event` takes besides the contact, the metric and the source: the metrics seed's parameters.

    source_id names the fact at its source (`received:wamid.X`): the same one is recorded once. Without it two calls are
    two facts.
    """

    properties: Mapping[str, Any] | Payload
    value: Decimal | int | None
    currency: str
    source_id: str | None
    integration_id: UUID | None
    entity_type: str | None
    entity_id: str | None
    occurred_at: datetime | None
    source_type: SourceType
    organization_id: UUID | None


def record_contact_event(
    conn: Connection[Any], contact_id: UUID | None, *, source: str, **fact: Unpack[Fact]
) -> UUID | None:
    """Record one fact about a contact of the session's organization; the caller commits.

    Returns the id of its row: the new one's, or of the one that has this name already (nothing is emitted then). None,
    with a warning in the log, when there is no contact. A contact that was merged stands for the one it went into.

    Raises EmitError and what is below it: ContactUnknownError for a contact that is not the organization's,
    PayloadError for properties that do not fit the contact event type.
    """
    parameters = _parameters(contact_id, source, fact)
    if parameters is None:
        return None
    try:
        with conn.cursor(row_factory=scalar_row) as cursor:
            return _id(cursor.execute(_RECORD, parameters).fetchone())
    except psycopg.Error as error:
        if (typed := translate(error)) is not None:
            raise typed from error
        raise


async def record_contact_event_async(
    conn: AsyncConnection[Any], contact_id: UUID | None, *, source: str, **fact: Unpack[Fact]
) -> UUID | None:
    """`record_contact_event` on an asyncio connection."""
    parameters = _parameters(contact_id, source, fact)
    if parameters is None:
        return None
    try:
        async with conn.cursor(row_factory=scalar_row) as cursor:
            await cursor.execute(_RECORD, parameters)
            return _id(await cursor.fetchone())
    except psycopg.Error as error:
        if (typed := translate(error)) is not None:
            raise typed from error
        raise


def emit_metric_event(
    conn: Connection[Any], contact_id: UUID | None, metric_name: str, *, source: str, **fact: Unpack[MetricFact]
) -> UUID | None:
    """`record_contact_event` by a metric: the metrics seed's emitEvent.

    The metric is made when the organization has none of that name. Properties of a metric that has a contact event type
    ("Order Paid") are those of the type.
    """
    return record_contact_event(conn, contact_id, source=source, **_by_metric(metric_name, fact))


async def emit_metric_event_async(
    conn: AsyncConnection[Any], contact_id: UUID | None, metric_name: str, *, source: str, **fact: Unpack[MetricFact]
) -> UUID | None:
    """`emit_metric_event` on an asyncio connection."""
    return await record_contact_event_async(conn, contact_id, source=source, **_by_metric(metric_name, fact))


def _by_metric(metric_name: str, fact: MetricFact) -> Fact:
    given: dict[str, Any] = {"source_type": "INTERNAL", **fact, "metric_name": metric_name}
    given["external_event_id"] = given.pop("source_id", None)
    return cast(Fact, given)


def _parameters(contact_id: UUID | None, source: str, fact: Fact) -> dict[str, Any] | None:
    """The parameters of the statement, checked; None when there is no contact."""
    given: dict[str, Any] = {**fact}
    unknown = given.keys() - (Fact.__required_keys__ | Fact.__optional_keys__)
    if unknown:
        raise TypeError(f"a contact event has no {', '.join(sorted(unknown))}")
    event_type, metric_name = given.get("event_type"), given.get("metric_name")
    if contact_id is None:
        # As the database says it: such a fact is nobody's, and not recorded.
        log.warning("contact_event.without_contact", event_type=event_type, metric=metric_name, source=source)
        return None
    if event_type is None and metric_name is None:
        raise PayloadError("a contact event has a contact event type, a metric, or both", field="event_type")
    if (wrong := unknown_type(event_type)) is not None:
        raise PayloadError(wrong, field="event_type")
    given["event_type"] = contact_event_type_of(metric_name or "") if event_type is None else event_type
    given["metric_name"] = metric_of(event_type or "") if metric_name is None else metric_name
    given["source"] = source
    given.setdefault("source_type", "INTERNAL")
    check(given)
    if given.get("value") is not None:
        given.setdefault("currency", "BRL")
    now = datetime.now(UTC)
    properties = to_json(given.get("properties") or {}, "properties")
    parameters = checked(
        event_type="contact_event.recorded",
        entity_kind="contact",
        entity_id=contact_id,
        payload={
            "contact_event_id": _PLACEHOLDER,
            "contact_id": contact_id,
            "contact_event_type": given["event_type"],
            "category": None,
            **{name: given.get(name) for name in MAX_LENGTHS if name != "event_type"},
            "source_type": given["source_type"],
            "value": None if given.get("value") is None else str(given["value"]),
            "currency": given.get("currency"),
            "occurred_at": given.get("occurred_at") or now,
            "received_at": given.get("received_at") or now,
            "properties": given.get("properties") or {},
        },
        organization_id=None,
        request_id=given.get("request_id"),
        actor_id=given.get("actor_id"),
        source=source,
        trace_id=given.get("trace_id"),
        idempotency_key=None,
        schema_version=None,
        causation=given.get("causation"),
        deliver_at=None,
    )
    raw = given.get("raw_payload")
    names = (*MAX_LENGTHS, "source_type", "value", "currency", "occurred_at", "received_at")
    ids = ("integration_id", "webhook_event_id", "organization_id")
    return {
        **{name: given.get(name) for name in (*names, *ids)},
        "contact_id": contact_id,
        "properties": properties,
        "raw_payload": None if raw is None else to_json(raw, "raw_payload"),
        "metadata": parameters["metadata"],
    }


def check(given: Mapping[str, Any]) -> None:
    """Refuse what the table would: lengths, the source type, the currency, values without a finite amount."""
    for name, most in MAX_LENGTHS.items():
        text = given.get(name)
        if text is None:
            if name == "source":
                raise PayloadError("is missing", field=name, hint="who says so, such as shopify or crm")
            continue
        if not isinstance(text, str):
            raise PayloadError(f"must be text, not {type(text).__name__}", field=name)
        if not 1 <= len(text) <= most:
            raise PayloadError(f"has {len(text)} characters; 1 to {most} fit", field=name)
    if given.get("source_type") not in (None, *SOURCE_TYPES):
        raise PayloadError(
            f"must be one of {', '.join(SOURCE_TYPES)}, not {given['source_type']!r}", field="source_type"
        )
    if (currency := given.get("currency")) is not None and not _CURRENCY.match(currency):
        raise PayloadError(f"{currency!r} is not a currency such as BRL", field="currency")
    value = given.get("value")
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, Decimal | int):
        raise PayloadError(
            f"must be a Decimal, not {type(value).__name__}", field="value", hint="Decimal('297.90'), never a float"
        )
    if isinstance(value, Decimal) and not value.is_finite():
        raise PayloadError(f"{value} is no amount", field="value")


def _id(value: Any) -> UUID | None:
    assert value is None or isinstance(value, UUID)
    return value
