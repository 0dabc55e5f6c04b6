"""Times of the senders: each field has one form, known by the field and never guessed by size. All become UTC."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

# Clocks of senders run ahead a little; what lies further in the future is no time of a fact.
FUTURE_TOLERANCE = timedelta(days=1)
_EARLIEST = datetime(1990, 1, 1, tzinfo=UTC)
_HOUR = timedelta(hours=1)
_WIDEST_ZONE = timedelta(hours=15)
_CLOCKS_APART = timedelta(minutes=5)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def told(moment: datetime) -> datetime | None:
    """The moment, unless it is one that stands for none: 0001-01-01, 9999-12-31. Not every reader holds those."""
    return moment if 1900 <= moment.year <= 2200 else None


def from_iso(text: str | None) -> datetime | None:
    """ISO 8601 with an offset, with or without its colon, or Z. A time without an offset is no time."""
    if not text:
        return None
    try:
        moment = datetime.fromisoformat(text.strip())
        return told(moment.astimezone(UTC)) if moment.tzinfo is not None else None
    except (ValueError, OverflowError):  # the first and the last day of the calendar have no UTC in some zones
        return None


def from_epoch_s(value: Any) -> datetime | None:
    """Whole seconds since 1970, as a number or as digits; None for anything else."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    try:
        return told(_EPOCH + timedelta(seconds=value))
    except OverflowError:
        return None


def from_epoch_ms(value: Any) -> datetime | None:
    """Whole milliseconds since 1970, as a number or as digits; None for anything else."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    try:
        # By whole microseconds: through a float the last digit would be a guess.
        return told(_EPOCH + timedelta(milliseconds=value))
    except OverflowError:
        return None


def from_epoch_long_s(value: Any) -> datetime | None:
    """Seconds since 1970 in any of the forms of a 64-bit number: whole, with a fraction, text, `{low, high}`."""
    if isinstance(value, dict):
        low, high = value.get("low"), value.get("high")
        if type(low) is not int or type(high) is not int:
            return None
        value = (high << 32) + (low & 0xFFFFFFFF)
    if isinstance(value, Decimal):
        # Its size is looked at, not computed with: 1e999999999 is beyond any result.
        return from_epoch_ms(int(value * 1000)) if value.is_finite() and value.adjusted() < 12 else None
    return from_epoch_s(value)


def from_local_marked_utc(text: str | None, received_at: datetime) -> datetime | None:
    """ISO text in the sender's local time that says Z all the same, told by when it came: the whole hours between are
    its zone. What came more than 15 hours apart is taken as it says."""
    moment = from_iso(text)
    if moment is None:
        return None
    apart = received_at - moment
    if abs(apart) > _WIDEST_ZONE:
        return moment
    # Its clock may be a little ahead of ours; it never sends what has not happened yet.
    return moment + (apart + _CLOCKS_APART) // _HOUR * _HOUR


def occurred(moment: datetime | None, received_at: datetime) -> datetime:
    """When a fact happened: what the sender says, or when it came if that is missing, far ahead or absurdly old."""
    if moment is None or moment > received_at + FUTURE_TOLERANCE or moment < _EARLIEST:
        return received_at
    return moment
