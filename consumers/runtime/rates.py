"""When a call may be made under a rate: at most `count` in any `per_s` seconds, whoever makes them. No I/O.

A bucket is two moments, kept in Postgres under a row lock (`admission`), in seconds since the epoch by the server's
clock, so that members need not agree on the time:
- `next_at` paces the calls (GCRA): each call that is given its moment moves it one spacing on;
- `booked_at` is the end of the line: who comes new finds a place behind those that wait, and comes back at its moment.

A place in the line is when to come back; the moment of the call is given then. So a member that was down for an hour
does not let all of that hour's calls go at once, and they do not go to the end of the line either.

What must stay true: a call is made at its moment or up to `slack_s` later, else it is given another moment; and then no
window of `per_s` seconds has more than `count` calls, the burst included. Of any count + 1 calls the last one's moment
is at least count + 1 - burst spacings after the first one's, which is `per_s` + `slack_s`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from consumers.worker import Rate
from schemas.topics import RETRY_DELAYS_S

HOLD_S = 0.05
"""A call whose moment is so near waits for it in its place: shorter than putting it off takes."""
NEAR_S = 5.0
"""Up to so far away a delivery waits in memory; beyond it durably."""
KEEP_BEYOND_S = float(RETRY_DELAYS_S[0])
"""Beyond it in Postgres: a retry topic is read ahead so far and no further, and one organization's line would fill it
before another's retries."""
LEAD_S = 1.0
"""One that has its moment and waits durably is back this long before it: it is not to miss it."""
LONGEST_SLACK_S = 1.0


def slack_s(rate: Rate) -> float:
    """How late after its moment a call may begin: the commit before it, and what the event loop is busy with."""
    return min(LONGEST_SLACK_S, rate.per_s / 10)


def spacing_s(rate: Rate) -> float:
    """Between two calls of a busy bucket."""
    return (rate.per_s + slack_s(rate)) / (rate.count + 1 - rate.burst)


@dataclass(frozen=True, slots=True)
class Bucket:
    next_at: float = 0.0
    booked_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Ask:
    """One delivery that wants to be called."""

    waited: bool = False
    """It has been here before: it was put off, or its attempt failed. It does not go to the end of the line."""
    moment: float | None = None
    """What it was given then for its call."""


@dataclass(frozen=True, slots=True)
class Answer:
    moment: float
    """Call then, if `given`; else come back then and ask again."""
    given: bool


def answer(rate: Rate, bucket: Bucket, asks: Sequence[Ask], now: float) -> tuple[Bucket, list[Answer]]:
    """The moments of `asks`, in the order that they are served: those that were here before come first."""
    spacing, tolerance = spacing_s(rate), (rate.burst - 1) * spacing_s(rate)
    next_at, booked_at = bucket.next_at, bucket.booked_at
    answers: list[Answer] = []
    for ask in asks:
        if ask.moment is not None and now <= ask.moment + slack_s(rate):
            answers.append(Answer(ask.moment, given=True))
        elif not ask.waited and booked_at - tolerance > now:
            answers.append(Answer(booked_at - tolerance, given=False))
            booked_at += spacing
        else:
            answers.append(Answer(max(next_at - tolerance, now), given=True))
            next_at = max(next_at, now) + spacing
            booked_at = max(booked_at, next_at)
    return Bucket(next_at, booked_at), answers
