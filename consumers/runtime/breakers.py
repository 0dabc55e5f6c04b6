"""Whether a destination may be called: closed, open for a while, then one probe. No I/O.

What must stay true: a breaker opens after so many failures in a row; while it is open nothing is called but, once its
time is over, one probe at a time; the probe's success closes it, its failure opens it again for twice as long. What
comes of calls that had begun before it opened changes nothing. Its state is a row in Postgres (`admission`), and `now`
the server's clock, so that all members see the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Literal, TypeAlias
from uuid import UUID

from consumers.worker import Breaker, Reject, Snooze

PROBE_MARGIN_S = 5.0
"""Beyond the call's timeout: then the probe is lost with its process, and another one goes."""


@dataclass(frozen=True, slots=True)
class State:
    """A row of worker_breaker."""

    failures: int = 0
    """In a row, while closed."""
    opened_count: int = 0
    """In a row, without a success between: says how long it is open, and which probe is its own."""
    open_until: datetime | None = None
    """None: closed."""
    probe_by: UUID | None = None
    probe_until: datetime | None = None
    error_class: str | None = None
    error: str | None = None


CLOSED = State()


@dataclass(frozen=True, slots=True)
class Probe:
    """Call it, and tell by this number that it was the probe."""

    number: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Do not call it. Look again then."""

    until: datetime


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one call."""

    result: Literal["success", "failure", "neither"]
    probe: int | None = None
    error_class: str | None = None
    error: str | None = None


Admission: TypeAlias = Probe | Wait | None
"""None: call it."""


def open_s(breaker: Breaker, opened_count: int) -> float:
    """How long it stays open, for the first, second, ... time in a row."""
    return min(breaker.max_open_s, breaker.open_s * 2.0 ** min(opened_count - 1, 30))


def admit(breaker: Breaker, state: State, process: UUID, timeout_s: float, now: datetime) -> tuple[State, Admission]:
    """May this delivery be called now?"""
    if state.open_until is None:
        return state, None
    if now < state.open_until:
        return state, Wait(state.open_until)
    if state.probe_until is not None and now < state.probe_until:
        # The probe is under way: look again soon, it seldom takes as long as it may.
        return state, Wait(min(state.probe_until, now + timedelta(seconds=breaker.open_s / 6)))
    lost = now + timedelta(seconds=timeout_s + PROBE_MARGIN_S)
    return replace(state, probe_by=process, probe_until=lost), Probe(state.opened_count)


def counts(breaker: Breaker, error: BaseException, final: tuple[type[BaseException], ...] = ()) -> bool:
    """An error that says something about the destination. `final`: the policy's `reject_on`."""
    return isinstance(error, breaker.errors) and not isinstance(error, (Reject, Snooze, *final))


def after(breaker: Breaker, state: State, outcomes: Sequence[Outcome], now: datetime) -> State:
    """The state after these calls came back, in their order."""
    for outcome in outcomes:
        if state.open_until is not None:
            if outcome.probe != state.opened_count:
                continue  # it had begun before, or was given up for lost
            if outcome.result == "success":
                state = CLOSED
            elif outcome.result == "failure":
                state = _open(breaker, state, state.opened_count + 1, outcome, now)
            else:
                state = replace(state, probe_by=None, probe_until=None)
        elif outcome.result == "success":
            state = CLOSED
        elif outcome.result == "failure":
            failures = state.failures + 1
            state = replace(state, failures=failures, error_class=outcome.error_class, error=outcome.error)
            if failures >= breaker.failures:
                state = _open(breaker, state, 1, outcome, now)
    return state


def _open(breaker: Breaker, state: State, opened_count: int, outcome: Outcome, now: datetime) -> State:
    return State(
        failures=state.failures,
        opened_count=opened_count,
        open_until=now + timedelta(seconds=open_s(breaker, opened_count)),
        error_class=outcome.error_class,
        error=outcome.error,
    )
