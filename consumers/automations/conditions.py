"""Conditions over what is known of an event and its contact: whom an automation is for.

    {"field": "event.value", "op": "gte", "value": 100}      a test; `op` is one of OPERATORS
    {"all": [...]}  {"any": [...]}  {"not": {...}}           of other conditions

A field is a path into the facts: `contact.tags`, `event.properties.items.0.sku`; a list on the way stands for each of
its items (`event.properties.items.sku`), and one of them is enough.

What must stay true: judging never fails, whatever the facts are. A field that is not there, or is null, is unknown, and
every test of it is false, the negative ones too (`ne`, `not_in`, `not_contains`); only `exists: false` is true. `not`
turns round what is inside: `{"not": {"field": "x", "op": "eq", ...}}` is true when x is unknown.

Numbers are compared as numbers, also when one side is text of digits ("297.90" is 297.9); moments (ISO 8601 with an
offset) as moments; text exactly by eq, ne and in, without regard to case by contains, starts_with and ends_with.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

MAX_DEPTH = 10
MAX_TESTS = 100

_NEGATIONS = {"ne": "eq", "not_in": "in", "not_contains": "contains"}
OPERATORS = (
    "eq",
    "ne",
    "gt",
    "gte",
    "lt",
    "lte",
    "in",
    "not_in",
    "contains",
    "not_contains",
    "starts_with",
    "ends_with",
    "exists",
)
_PATH = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[^.\s]{1,100}){0,20}\Z")
_DECIMAL = re.compile(r"[+-]?[0-9]{1,40}(\.[0-9]{1,40})?\Z")


class BadCondition(ValueError):
    """Not a condition; the message names the place."""


@dataclass(frozen=True)
class Test:
    """One question about one field."""

    field: str
    op: str
    value: Any


@dataclass(frozen=True)
class Several:
    """Conditions taken together: all of them, or any one."""

    word: str
    parts: tuple[Condition, ...]


@dataclass(frozen=True)
class Not:
    """The opposite of a condition."""

    part: Condition


Condition = Test | Several | Not


@dataclass(frozen=True)
class Judged:
    """A condition and whether it holds, for people: `text` says what was asked, `found` what was there."""

    holds: bool
    text: str
    found: tuple[Any, ...] = ()
    parts: tuple[Judged, ...] = ()

    def shown(self) -> dict[str, Any]:
        """As JSON."""
        shown: dict[str, Any] = {"holds": self.holds, "condition": self.text}
        if self.parts:
            shown["parts"] = [part.shown() for part in self.parts]
        else:
            shown["found"] = list(self.found)
        return shown


def parse(raw: Any) -> Condition:
    """The condition that JSON describes. Raises BadCondition, which names the place, for anything else."""
    counted = [0]
    return _parse(raw, "", 1, counted)


def _parse(raw: Any, place: str, depth: int, counted: list[int]) -> Condition:
    where = place or "the condition"
    if not isinstance(raw, Mapping):
        raise BadCondition(f"{where} must be an object such as {_EXAMPLE}")
    if depth > MAX_DEPTH:
        raise BadCondition(f"{where} is nested deeper than {MAX_DEPTH} levels")
    for word in ("all", "any"):
        if word in raw:
            if len(raw) > 1:
                raise BadCondition(f"{where} has {', '.join(sorted(set(raw) - {word}))} beside {word!r}: keep one")
            parts = raw[word]
            if not isinstance(parts, Sequence) or isinstance(parts, str) or not parts:
                raise BadCondition(f"{_below(place, word)} must be a list of at least one condition")
            return Several(
                word,
                tuple(_parse(part, _below(place, f"{word}[{i}]"), depth + 1, counted) for i, part in enumerate(parts)),
            )
    if "not" in raw:
        if len(raw) > 1:
            raise BadCondition(f"{where} has {', '.join(sorted(set(raw) - {'not'}))} beside 'not': keep one")
        return Not(_parse(raw["not"], _below(place, "not"), depth + 1, counted))
    counted[0] += 1
    if counted[0] > MAX_TESTS:
        raise BadCondition(f"there are more than {MAX_TESTS} tests")
    return _parse_test(raw, where)


def _parse_test(raw: Mapping[str, Any], where: str) -> Test:
    if unknown := sorted(str(name) for name in set(raw) - {"field", "op", "value"}):
        raise BadCondition(f"{where} has {', '.join(unknown)}, which no condition has: write {_EXAMPLE}")
    field, op = raw.get("field"), raw.get("op")
    if not isinstance(field, str) or not _PATH.match(field):
        raise BadCondition(f"{where} needs a field such as 'event.value' or 'contact.tags', not {field!r}")
    if op not in OPERATORS:
        raise BadCondition(f"{where} needs an op, one of {', '.join(OPERATORS)}, not {op!r}")
    value = raw.get("value", True if op == "exists" else None)
    if op == "exists" and not isinstance(value, bool):
        raise BadCondition(f"{where}: the value of exists is true or false")
    if op in ("in", "not_in") and (not isinstance(value, list) or not value):
        raise BadCondition(f"{where}: the value of {op} is a list of at least one")
    if value is None:
        raise BadCondition(f"{where} needs a value; whether a field is there at all is asked by exists")
    if op in ("gt", "gte", "lt", "lte") and _number(value) is None and _moment(value) is None:
        raise BadCondition(f"{where}: {op} compares numbers, or moments with an offset, not {value!r}")
    if op in ("starts_with", "ends_with") and not isinstance(value, str):
        raise BadCondition(f"{where}: the value of {op} is text")
    return Test(field, str(op), value)


def holds(condition: Condition | None, facts: Mapping[str, Any]) -> bool:
    """Whether it holds; no condition always does. Never raises."""
    match condition:
        case None:
            return True
        case Test():
            return _holds(condition, values(facts, condition.field))
        case Not():
            return not holds(condition.part, facts)
        case Several(word="all"):
            return all(holds(part, facts) for part in condition.parts)
        case Several():
            return any(holds(part, facts) for part in condition.parts)


def judge(condition: Condition, facts: Mapping[str, Any]) -> Judged:
    """`holds`, with the truth of every part of it."""
    match condition:
        case Test():
            found = tuple(values(facts, condition.field))
            return Judged(_holds(condition, found), f"{condition.field} {condition.op} {condition.value!r}", found)
        case Not():
            part = judge(condition.part, facts)
            return Judged(not part.holds, "not", parts=(part,))
        case Several():
            parts = tuple(judge(part, facts) for part in condition.parts)
            together = all if condition.word == "all" else any
            return Judged(together(part.holds for part in parts), condition.word, parts=parts)


def values(facts: Any, path: str) -> list[Any]:
    """What is at a path, lists on the way taken item by item; nothing for what is not there or null."""
    found: list[Any] = [facts]
    for name in path.split("."):
        below: list[Any] = []
        for each in found:
            if isinstance(each, Mapping):
                if name in each:
                    below.append(each[name])
            elif isinstance(each, list | tuple):
                if name.isascii() and name.isdigit() and len(name) < 10:
                    below += each[int(name) : int(name) + 1]
                else:
                    below += [item[name] for item in each if isinstance(item, Mapping) and name in item]
        found = below
    return [each for each in found if each is not None]


def _holds(test: Test, found: Sequence[Any]) -> bool:
    if test.op == "exists":
        return bool(found) is test.value
    if (positive := _NEGATIONS.get(test.op)) is not None:
        return bool(found) and not any(_is(positive, each, test.value) for each in found)
    return any(_is(test.op, each, test.value) for each in found)


def _is(op: str, found: Any, value: Any) -> bool:
    match op:
        case "eq":
            return _equal(found, value)
        case "in":
            return any(_equal(found, each) for each in value)
        case "gt" | "gte" | "lt" | "lte":
            return _ordered(op, found, value)
        case "contains":
            if isinstance(found, str):
                return isinstance(value, str) and value.casefold() in found.casefold()
            return isinstance(found, list | tuple) and any(_equal(each, value) for each in found)
        case "starts_with":
            return isinstance(found, str) and found.casefold().startswith(value.casefold())
        case "ends_with":
            return isinstance(found, str) and found.casefold().endswith(value.casefold())
    return False


def _equal(found: Any, value: Any) -> bool:
    if isinstance(found, bool) or isinstance(value, bool):
        return found is value
    if isinstance(found, str) and isinstance(value, str):
        return found == value
    one, other = _number(found), _number(value)
    if one is not None and other is not None:
        return one == other
    return type(found) is type(value) and bool(found == value)


def _ordered(op: str, found: Any, value: Any) -> bool:
    one: Any = _number(found)
    other: Any = _number(value)
    if one is None or other is None:
        one, other = _moment(found), _moment(value)
    if one is None or other is None:
        return False
    return bool({"gt": one > other, "gte": one >= other, "lt": one < other, "lte": one <= other}[op])


def _number(value: Any) -> Decimal | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, Decimal):
        return value if value.is_finite() else None
    if isinstance(value, int):
        return Decimal(value)
    if isinstance(value, float):
        return Decimal(repr(value)) if math.isfinite(value) else None
    if isinstance(value, str) and _DECIMAL.match(value):
        return Decimal(value)
    return None


def _moment(value: Any) -> datetime | None:
    if isinstance(value, str) and 16 <= len(value) <= 40:
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            return None
    if isinstance(value, datetime) and value.utcoffset() is not None:
        try:
            return value.astimezone(UTC)
        except (OverflowError, ValueError):
            return None
    return None


def _below(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


_EXAMPLE = '{"field": "event.value", "op": "gte", "value": 100}'
