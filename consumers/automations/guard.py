"""Whether a chain of causes has to stop: automations that set each other off, or themselves, would never end.

A chain is the events and runs that led to an event, by their causation. It stops when it would get deeper than
MAX_DEPTH, and when it comes back to the same automation for the same contact within WITHIN.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

MAX_DEPTH = 8
WITHIN = timedelta(hours=1)

TOO_DEEP = "chain_too_deep"
CAME_BACK = "chain_came_back"


def stopped(depth: int, earlier: Iterable[datetime], now: datetime) -> str | None:
    """Why a run may not begin; None when it may.

    `depth` is that of the event that would start it: what the run emits is one deeper. `earlier`: when the runs of this
    automation for this contact that are in the event's chain began.
    """
    if depth + 1 > MAX_DEPTH:
        return TOO_DEEP
    if any(now - began < WITHIN for began in earlier):
        return CAME_BACK
    return None
