"""From contact events to what they add to the summaries. Pure: no clock, no I/O, no order.

What must stay true: the increments of a set of facts are the same however the facts are ordered and cut into batches,
because each part (count, least time, greatest time, exact decimal sum) is commutative and associative. Whether a fact
was counted before is not decided here: give each one once.

A value without a currency counts as reais, which is the seed's default.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Context, Decimal, DivisionByZero, Inexact, InvalidOperation, Overflow
from typing import NamedTuple

DEFAULT_CURRENCY = "BRL"

# Sums are exact or an error, never rounded: a value has at most 41 digits on either side of the point (decode), and 200
# leave room for more additions than there will ever be.
EXACT = Context(prec=200, traps=[Inexact, Overflow, InvalidOperation, DivisionByZero])


class Fact(NamedTuple):
    """One contact event that has a metric. Ids are UUIDs as lower-case text: objects would cost more than the
    folding."""

    organization_id: str
    contact_event_id: str
    contact_id: str
    metric_name: str
    occurred_at: datetime
    value: Decimal | None
    currency: str | None


class Key(NamedTuple):
    """Whose summary. Sorts in the order of the table's primary key."""

    organization_id: str
    contact_id: str
    metric_name: str


@dataclass(slots=True)
class Total:
    """The sum of the values in one currency, and how many they were."""

    value: Decimal
    count: int


@dataclass(slots=True)
class Increment:
    """What a set of facts adds to one summary."""

    event_count: int
    first_event_at: datetime
    last_event_at: datetime
    totals: dict[str, Total] = field(default_factory=dict)

    def add(self, other: Increment) -> None:
        """Take in another increment of the same key."""
        self.event_count += other.event_count
        self.first_event_at = min(self.first_event_at, other.first_event_at)
        self.last_event_at = max(self.last_event_at, other.last_event_at)
        for currency, total in other.totals.items():
            self._add_value(currency, total.value, total.count)

    def add_fact(self, fact: Fact) -> None:
        """Take in one more fact of the same key."""
        self.event_count += 1
        if fact.occurred_at < self.first_event_at:
            self.first_event_at = fact.occurred_at
        if fact.occurred_at > self.last_event_at:
            self.last_event_at = fact.occurred_at
        if fact.value is not None:
            self._add_value(fact.currency or DEFAULT_CURRENCY, fact.value, 1)

    def _add_value(self, currency: str, value: Decimal, count: int) -> None:
        total = self.totals.get(currency)
        if total is None:
            self.totals[currency] = Total(value, count)
        else:
            total.value = EXACT.add(total.value, value)
            total.count += count


def fold(facts: Iterable[Fact]) -> dict[Key, Increment]:
    """The increments of these facts, each given once."""
    increments: dict[Key, Increment] = {}
    for fact in facts:
        key = Key(fact.organization_id, fact.contact_id, fact.metric_name)
        increment = increments.get(key)
        if increment is None:
            increment = increments[key] = Increment(0, fact.occurred_at, fact.occurred_at)
        increment.add_fact(fact)
    return increments


def merge(into: dict[Key, Increment], other: dict[Key, Increment]) -> None:
    """Add the increments of `other` to `into`."""
    for key, increment in other.items():
        if (present := into.get(key)) is not None:
            present.add(increment)
        else:
            copy = Increment(0, increment.first_event_at, increment.last_event_at)
            copy.add(increment)
            into[key] = copy
