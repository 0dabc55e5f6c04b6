"""What a mapping says of one delivery: its values, exact and bounded. Pure.

`Reading` is a delivery being read: the JSON document, the kept headers, the item of `each` if there is one. Texts,
numbers and booleans are values; objects, lists and empty texts are none (lists only where a list is asked for). What a
value is not is None; the one thing raised is `Malformed`, when a mapping and a payload together are too much to read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

from producers.ingest.mapping.model import Condition, Money, Property, Time, Value
from producers.ingest.mapping.paths import MAX_FOUND, Path
from producers.ingest.normalize import moments, money
from producers.ingest.normalize.document import Document, Malformed

MAX_TEXT = 2000
MAX_LIST = 100
# Values looked at in one delivery. An order of a hundred lines takes about two thousand.
MAX_WORK = 100_000

Found = str | int | Decimal | bool

_OFFSET = re.compile(r"([+-])([0-9]{2}):?([0-9]{2})\Z")
_ZONE = re.compile(r"[A-Za-z0-9_+/-]{1,64}\Z")


@dataclass(frozen=True)
class Reading:
    """One delivery, or one item of it."""

    document: Any
    headers: Mapping[str, str]
    item: Any = None
    work: list[int] = field(default_factory=lambda: [0])
    """How many values were looked at, in all items together."""

    def of(self, item: Any) -> Reading:
        """The same delivery, at an item of it."""
        return replace(self, item=item)

    def items(self, path: Path, most: int) -> list[Any]:
        """The items of the list that a path leads to, whether it ends at the list or at its items."""
        found = self._find(path)
        if len(found) == 1 and isinstance(found[0], list):
            found = found[0]
        return found[:most]

    def _find(self, path: Path) -> list[Any]:
        found = path.find(self.document, self.item)
        # What [*] passes over is looked at too, found or not.
        self.work[0] += len(path.steps) + (MAX_FOUND if None in path.steps else len(found))
        if self.work[0] > MAX_WORK:
            raise Malformed("too_much_to_read")
        return found

    def every(self, value: Value | None) -> Iterator[Found]:
        """All that a value may be, the best first."""
        if value is None:
            return
        for found in self._origins(value):
            if value.map is None:
                yield found
            elif (said := as_text(found)) in value.map:
                yield value.map[said]
        if value.default is not None:
            yield value.default

    def _origins(self, value: Value) -> Iterator[Found]:
        if value.path is not None:
            yield from (found for found in self._find(value.path) if _is_value(found))
        elif value.header is not None:
            if said := self.headers.get(value.header, "").strip():
                yield said
        elif value.const is not None:
            yield value.const
        elif value.first is not None:
            for alternative in value.first:
                yield from self.every(alternative)
        elif value.join is not None:
            parts = [as_text(found) for part in value.join if (found := self.one(part)) is not None]
            if joined := value.between.join(part.strip() for part in parts).strip():
                yield joined

    def one(self, value: Value | None) -> Found | None:
        """The value, or None."""
        return next(self.every(value), None)

    def text(self, value: Value | None) -> str | None:
        found = self.one(value)
        return None if found is None else as_text(found)

    def decimal(self, value: Value | None) -> Decimal | None:
        return next((number for found in self.every(value) if (number := _decimal(found)) is not None), None)

    def amount(self, value: Money | None, currency: str) -> Decimal | None:
        """An amount in units of the currency, exact."""
        if value is None:
            return None
        for found in self.every(value):
            if isinstance(found, str) and value.decimal_comma:
                found = found.upper().removeprefix(currency).replace("R$", "").replace("\u00a0", " ")
                found = found.replace(" ", "").replace(".", "").replace(",", ".")
            number = _decimal(found)
            if number is None:
                continue
            if value.unit == "units":
                return money.in_units(number, currency)
            if number == number.to_integral_value():
                return money.from_minor(int(number), currency)
        return None

    def time(self, value: Time | None) -> datetime | None:
        """A time in UTC."""
        if value is None:
            return None
        for found in self.every(value):
            moment = self._moment(found, value)
            if moment is not None:
                return moment
        return None

    def _moment(self, found: Found, value: Time) -> datetime | None:
        if isinstance(found, bool):
            return None
        match value.form:
            case "iso":
                return moments.from_iso(found) if isinstance(found, str) else None
            case "epoch_s":
                return moments.from_epoch_s(found) if isinstance(found, int | str) else None
            case "epoch_ms":
                return moments.from_epoch_ms(found) if isinstance(found, int | str) else None
            case "local":
                return self._local(found, value) if isinstance(found, str) else None

    def _local(self, text: str, value: Time) -> datetime | None:
        try:
            moment = datetime.fromisoformat(text.strip())
            if moment.tzinfo is None:
                moment = moment.replace(tzinfo=_zone(self.text(value.zone_from)) or _zone(value.zone))
            return moments.told(moment.astimezone(UTC))
        except (ValueError, OverflowError):
            return None

    def property(self, value: Property) -> Any:
        """A property as its kind says; None when there is none, or it is of another kind."""
        match value.kind:
            case "text":
                return self.text(value)
            case "number":
                number = self.decimal(value)
                return None if number is None else as_number(number)
            case "amount":
                number = self.decimal(value)
                return None if number is None else money.as_text(number)
            case "boolean":
                return next((found for found in self.every(value) if isinstance(found, bool)), None)
            case "time":
                moment = moments.from_iso(self.text(value))
                return None if moment is None else moment.isoformat()
            case "list":
                if value.path is not None:
                    return [as_text(found) for found in self.items(value.path, MAX_LIST) if _is_value(found)]
                return [as_text(found) for found in self.every(value)]

    def holds(self, conditions: tuple[Condition, ...]) -> bool:
        """Whether all of them hold."""
        return all(self._test(condition) != condition.negate for condition in conditions)

    def _test(self, condition: Condition) -> bool:
        found = self.one(condition.value)
        if condition.exists is not None:
            return (found is not None) == condition.exists
        if found is None:
            return False
        text = as_text(found)
        if condition.equals is not None:
            return text == as_text(condition.equals)
        if condition.one_of is not None:
            return any(text == as_text(one) for one in condition.one_of)
        if condition.starts_with is not None:
            return text.startswith(condition.starts_with)
        number = _decimal(found)
        return number is not None and condition.more_than is not None and number > condition.more_than


def as_text(found: Found) -> str:
    """A value as text: numbers by their own digits, true and false in lower case. At most `MAX_TEXT` characters."""
    if isinstance(found, bool):
        return "true" if found else "false"
    return (format(found, "f") if isinstance(found, Decimal) else str(found))[:MAX_TEXT]


def as_number(number: Decimal) -> int | float:
    return int(number) if number == number.to_integral_value() else float(number)


def _is_value(found: Any) -> bool:
    if isinstance(found, str):
        return bool(found.strip())
    if isinstance(found, Decimal):
        # A number of a million digits is none that anybody means.
        return found.is_finite() and -40 < found.adjusted() < 40
    return isinstance(found, bool) or (isinstance(found, int) and found.bit_length() <= 128)


def _decimal(found: Found) -> Decimal | None:
    return Document({"": found}).decimal("")


def _zone(name: str | None) -> tzinfo | None:
    """A zone by its name or offset."""
    if name is None:
        return None
    if offset := _OFFSET.match(name):
        minutes = int(offset[2]) * 60 + int(offset[3])
        return timezone(timedelta(minutes=minutes if offset[1] == "+" else -minutes)) if minutes < 24 * 60 else None
    if not _ZONE.match(name):
        return None
    try:
        return ZoneInfo(name)
    except (ValueError, OSError, KeyError):
        return None
