"""Times of people: spans, local times and cron expressions, in a time zone, as moments in UTC.

A local time that the clocks leave out (they are put forward) is the moment it would have been by the clocks of before;
one that comes twice is the first of the two. So each local minute of a schedule comes once, on any day.
"""

from __future__ import annotations

import calendar
import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

MAX_WAIT = timedelta(days=366)
MAX_CRON = 500
# What a moment may lie within: no zone turns one of these into one that no calendar has.
_FIRST, _LAST = datetime(1970, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)

_SPAN = re.compile(r"(?:(\d{1,4})d)?(?:(\d{1,5})h)?(?:(\d{1,6})m)?(?:(\d{1,8})s)?\Z")
_TIME = re.compile(r"([01]\d|2[0-3]):([0-5]\d)\Z")

# A day that a schedule never meets (30 February) is looked for so far ahead; leap days come every 8 years at worst.
_DAYS_AHEAD = 366 * 8 + 1

_MONTHS = {name.lower(): number for number, name in enumerate(calendar.month_abbr) if name}
_WEEKDAYS = {name: number for number, name in enumerate(("sun", "mon", "tue", "wed", "thu", "fri", "sat"))}
_MACROS = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
}


class BadTime(ValueError):
    """Not a time, a span, a zone or a schedule; the message says what one looks like."""


def zone(name: str) -> ZoneInfo:
    """A time zone by its IANA name. BadTime when there is none of that name."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise BadTime(f"{name!r} is no time zone such as America/Sao_Paulo") from None


def zone_or_utc(name: str) -> ZoneInfo:
    """The zone of an organization, whose name nobody checked; UTC when there is none of that name."""
    try:
        return zone(name)
    except BadTime:
        return ZoneInfo("UTC")


def span(text: str) -> timedelta:
    """'30m', '2h', '1d12h', '90s'. BadTime for anything else, nothing at all, or more than a year."""
    found = _SPAN.match(text)
    if not text or found is None:
        raise BadTime(f"{text!r} is no span such as 30m, 2h, 3d or 1d12h")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    length = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    if not timedelta(0) < length <= MAX_WAIT:
        raise BadTime(f"{text!r} is not between a second and {MAX_WAIT.days} days")
    return length


def check_until(text: str) -> None:
    """Raise BadTime unless `until` can read it."""
    until(text, datetime(2026, 1, 1, tzinfo=UTC), ZoneInfo("UTC"))


def until(text: str, now: datetime, tz: ZoneInfo) -> datetime:
    """The moment that '09:00' (the next one), '2026-12-24T09:00' (in the zone) or one with an offset names."""
    if found := _TIME.match(text):
        wanted = time(int(found[1]), int(found[2]))
        local = now.astimezone(tz).date()
        for day in (local, local + timedelta(days=1), local + timedelta(days=2)):
            if (moment := _moment(datetime.combine(day, wanted), tz)) > now:
                return moment
    try:
        named = datetime.fromisoformat(text)
    except ValueError:
        raise BadTime(f"{text!r} is no time such as 09:00, 2026-12-24T09:00 or 2026-12-24T09:00-03:00") from None
    if len(text) < len("2026-12-24T09:00"):
        raise BadTime(f"{text!r} lacks its time of day, such as 2026-12-24T09:00")
    moment = named if named.tzinfo is not None else named.replace(tzinfo=tz, fold=0)
    if not _FIRST <= moment < _LAST:
        raise BadTime(f"{text!r} is not between {_FIRST.year} and {_LAST.year}")
    return moment.astimezone(UTC)


def _moment(local: datetime, tz: ZoneInfo) -> datetime:
    return local.replace(tzinfo=tz, fold=0).astimezone(UTC)


@dataclass(frozen=True)
class Cron:
    """A schedule of five fields: minute, hour, day of the month, month, day of the week (0 or 7 is Sunday)."""

    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    either_day: bool
    """Both kinds of day are named: then one of them is enough, as every cron has it."""

    @classmethod
    def parse(cls, text: str) -> Cron:
        """BadTime, which names the field, for what is no schedule."""
        if len(text) > MAX_CRON:
            raise BadTime(f"a schedule has at most {MAX_CRON} characters")
        fields = _MACROS.get(text.strip().lower(), text).split()
        if len(fields) != 5:
            raise BadTime(
                f"{text!r} has {len(fields)} fields, not 5: minute hour day-of-month month day-of-week, "
                "such as '0 9 * * mon-fri'"
            )
        minute, hour, day, month, weekday = fields
        return cls(
            _field(minute, "minute", 0, 59),
            _field(hour, "hour", 0, 23),
            _field(day, "day of the month", 1, 31),
            _field(month, "month", 1, 12, _MONTHS),
            frozenset(number % 7 for number in _field(weekday, "day of the week", 0, 7, _WEEKDAYS)),
            either_day=not day.startswith("*") and not weekday.startswith("*"),
        )

    def after(self, moment: datetime, tz: ZoneInfo) -> datetime | None:
        """The first moment of the schedule later than `moment`; None when there is none for years."""
        day = moment.astimezone(tz).date()
        for _ in range(_DAYS_AHEAD):
            if self._falls_on(day) and (later := [at for at in self._moments(day, tz) if at > moment]):
                return min(later)
            if day == date.max:
                break
            day += timedelta(days=1)
        return None

    def _falls_on(self, day: date) -> bool:
        if day.month not in self.months:
            return False
        by_month, by_week = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return (by_month or by_week) if self.either_day else (by_month and by_week)

    def _moments(self, day: date, tz: ZoneInfo) -> list[datetime]:
        return [
            _moment(datetime.combine(day, time(hour, minute)), tz) for hour in self.hours for minute in self.minutes
        ]


def _field(text: str, name: str, least: int, most: int, words: dict[str, int] | None = None) -> frozenset[int]:
    found: set[int] = set()
    for part in text.lower().split(","):
        span_text, slash, step_text = part.partition("/")
        first_text, dash, last_text = span_text.partition("-")
        if span_text == "*":
            first, last = least, most
        else:
            first = _number(first_text, text, name, words)
            last = _number(last_text, text, name, words) if dash else (most if slash else first)
        if slash and (not step_text.isascii() or not step_text.isdigit() or int(step_text) < 1):
            raise BadTime(f"{name} {text!r}: the step after '/' is a number from 1")
        if not least <= first <= last <= most:
            raise BadTime(f"{name} {text!r} is not within {least} to {most}")
        found.update(range(first, last + 1, int(step_text) if slash else 1))
    return frozenset(found)


def _number(text: str, whole: str, name: str, words: dict[str, int] | None) -> int:
    if words and text in words:
        return words[text]
    if not text.isascii() or not text.isdigit() or len(text) > 3:
        raise BadTime(f"{name} {whole!r} is not a number, a range such as 1-5, a list such as 1,15, or */10")
    return int(text)
