"""What an event is to a comparison: a hash that is the same of its row, of its record and of its line in the archive.
No I/O.

The hash is over what all three hold: id, organization, type, entity, payload, metadata, created_at. Hashes are added up
modulo 2**128, so that the sum of many says whether they are the same events, in whatever order they come.

JSON is hashed in one canonical form, because the three spell it differently: keys sorted, no spaces, a number without a
fraction as a whole number (1.0 is 1, 1e3 is 1000). Whole numbers keep all their digits; fractions are compared as
doubles, which is how records carry them.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from typing import Any
from uuid import UUID

import orjson

from schemas import Event, Row

FIELDS = ("organization_id", "event_type", "entity_kind", "entity_id", "created_at", "payload", "metadata")
MODULUS = 1 << 128

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_HOUR = timedelta(hours=1)
_MICROSECOND = timedelta(microseconds=1)
_DIGITS_AT_MOST = 4_000  # of a number that Python makes an int of; jsonb holds longer ones
_LONG_DIGITS = re.compile(rb"\d{19}")  # orjson makes a float of a whole number beyond 64 bits
# A float without a fraction as orjson writes it: 1.0, 1e16, 1.5e300. What looks like one inside a text does no harm.
_MAYBE_WHOLE = re.compile(rb"(?:^|[:,\[])-?\d+(?:\.0(?:[,\]}]|$)|(?:\.\d+)?[eE])")


def of_row(row: Row) -> int:
    """The hash of a row of `event_log`, or of the archive."""
    return combine(row.id, row_parts(row))


def of_event(event: Event) -> int:
    """The hash of a decoded record."""
    return combine(event.id, event_parts(event))


def combine(event_id: UUID, parts: tuple[bytes, ...]) -> int:
    """The hash of an event from its id and its parts."""
    lengths = b"".join(len(part).to_bytes(4, "big") for part in parts)
    return int.from_bytes(blake2b(b"".join((event_id.bytes, lengths, *parts)), digest_size=16).digest(), "big")


def row_parts(row: Row) -> tuple[bytes, ...]:
    """What is compared besides the id, in the order of FIELDS."""
    return (*_envelope(row), _canonical_text(row.payload), _canonical_text(row.metadata))


def event_parts(event: Event) -> tuple[bytes, ...]:
    """The same of a decoded record."""
    return (*_envelope(event), canonical(event.payload), canonical(event.metadata))


def hour_of(moment: datetime) -> int:
    """Whole hours since 1970 in UTC."""
    return (moment - _EPOCH) // _HOUR


def start_of(hour: int) -> datetime:
    return _EPOCH + hour * _HOUR


def canonical(value: Any) -> bytes:
    """The one spelling of a JSON value."""
    try:
        text = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
        if _MAYBE_WHOLE.search(text) is None:
            return text
    except TypeError:
        pass  # a whole number beyond 64 bits
    value = _whole(value)
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()


def loads(text: bytes | str) -> Any:
    """JSON from its text, whole numbers with all their digits. ValueError or RecursionError when it cannot be read."""
    data = text if isinstance(text, bytes) else text.encode()
    if _LONG_DIGITS.search(data) is None:
        return orjson.loads(data)
    return json.loads(data, parse_int=_parse_int, parse_float=_parse_float)


def _envelope(event: Row | Event) -> tuple[bytes, ...]:
    return (
        event.organization_id.bytes,
        event.event_type.encode(),
        event.entity_kind.encode(),
        b"" if event.entity_id is None else event.entity_id.bytes,
        str((event.created_at - _EPOCH) // _MICROSECOND).encode(),
    )


def _canonical_text(text: bytes) -> bytes:
    try:
        return canonical(loads(text))
    except (ValueError, RecursionError):
        return b"\0" + text  # nested deeper than can be read: such a row is a dead letter, which keeps the text


def _whole(value: Any) -> Any:
    kind = type(value)
    if kind is float:
        return int(value) if value.is_integer() else value
    if kind is dict:
        return {key: _whole(inner) for key, inner in value.items()}
    if kind is list:
        return [_whole(inner) for inner in value]
    return value


# A NUL cannot be in jsonb, so what begins with one is no text of anybody's.


def _parse_int(digits: str) -> int | str:
    return int(digits) if len(digits) <= _DIGITS_AT_MOST else "\0" + digits


def _parse_float(digits: str) -> float | str:
    number = float(digits)
    return number if abs(number) != float("inf") else "\0" + digits
