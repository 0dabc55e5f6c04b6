"""From a Kafka record to a fact, or to the reason why it is none.

What must stay true: whatever the bytes, the answer is a fact, None, or `Unreadable`; and what a fact holds, the tables
take. Events without a metric give None: summaries are by metric.
"""

from __future__ import annotations

import re
from datetime import datetime
from decimal import Decimal, InvalidOperation
from typing import Any
from uuid import UUID

from schemas.codec import decode_record
from schemas.errors import DecodeError
from streams.errors import Unreadable
from streams.summaries.fold import Fact

EVENT_TYPE = "contact_event.recorded"
METRIC_LENGTH = 255
CURRENCY_LENGTH = 16
# Postgres holds more, the wire (schemas.codec) no more than 38 digits on either side of the point.
MAX_EXPONENT = 40

_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.ASCII)


def fact(value: bytes | None) -> Fact | None:
    """The fact in a record of events.contact-event, None if it has no metric. Raises Unreadable."""
    if value is None:
        raise Unreadable("the record has no value")
    try:
        event_type, record = decode_record(value)
    except DecodeError as error:
        raise Unreadable(str(error)) from error
    if event_type != EVENT_TYPE:
        raise Unreadable(f"{event_type!r} is not {EVENT_TYPE}")
    try:
        payload = record["payload"]
        metric_name = payload["metric_name"]
        if metric_name is None:
            return None
        return Fact(
            _uuid(str(record["organization_id"]), "organization_id"),
            _uuid(payload["contact_event_id"], "contact_event_id"),
            _uuid(payload["contact_id"], "contact_id"),
            _text(metric_name, "metric_name", METRIC_LENGTH),
            _moment(payload["occurred_at"]),
            None if payload["value"] is None else _amount(payload["value"]),
            None if payload["currency"] is None else _text(payload["currency"], "currency", CURRENCY_LENGTH),
        )
    except (KeyError, TypeError, AttributeError) as error:
        # A schema of somebody else's, under a type of ours.
        raise Unreadable(f"not the fields of a contact event: {type(error).__name__}: {error}") from error


def organization_of(key: bytes | None) -> str | None:
    """The organization that a record's key names, if it is a UUID. For records that cannot be read."""
    try:
        return str(UUID((key or b"").decode("ascii")))
    except ValueError:
        return None


def _uuid(value: str, name: str) -> str:
    if _UUID.fullmatch(value):
        return value
    try:
        return str(UUID(value))
    except ValueError:
        raise Unreadable(f"{name} {value[:50]!r} is not a UUID") from None


def _text(value: str, name: str, most: int) -> str:
    if not 0 < len(value) <= most:
        raise Unreadable(f"{name} has {len(value)} characters; 1 to {most} are allowed")
    if "\0" in value:
        raise Unreadable(f"{name} has a NUL character")
    return value


def _moment(value: Any) -> datetime:
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise Unreadable(f"occurred_at {value!r} is not a moment with a time zone")
    return value


def _amount(value: str) -> Decimal:
    try:
        amount = Decimal(value)
    except InvalidOperation:
        raise Unreadable(f"value {value[:50]!r} is not a decimal") from None
    if not amount.is_finite() or amount.adjusted() > MAX_EXPONENT or int(amount.as_tuple().exponent) < -MAX_EXPONENT:
        raise Unreadable(f"value {value[:50]!r} is not finite, or has too many digits")
    return amount
