"""What a failed run means: whether to try again, when, and in which topic its record waits. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, TypeAlias

import schemas
from afluente.clock import Clock
from consumers.runtime import records, retry
from consumers.runtime.deliveries import Item, PutOff, Verdict
from consumers.worker import Policy, Reject, RetryAfter, Snooze

KEEP_BEYOND = timedelta(seconds=retry.LONGEST_IN_KAFKA_S)
_LONGEST_WAIT_S = 3650 * 86_400.0  # what a stranger's Retry-After may ask for: datetime ends somewhere


@dataclass(slots=True)
class Done:
    """The handler returned; `result` is an external call's."""

    result: Any = None


@dataclass(frozen=True, slots=True)
class Unfit:
    """The database takes the delivery in no form: its record is buried like one that is no event."""

    error: BaseException


class Behind(Exception):
    """An earlier delivery of the same key failed in this batch."""


Outcome: TypeAlias = Verdict | Done | PutOff | Unfit


class Judge:
    """The one place that decides what becomes of a delivery whose run did not succeed."""

    def __init__(self, policy: Policy, clock: Clock, random: Callable[[], float], backoff_scale: float) -> None:
        self._policy, self._clock, self._random, self._scale = policy, clock, random, backoff_scale

    def outcome(self, item: Item, error: BaseException) -> PutOff:
        """What a failed run means: the one place that decides whether to try again, and when."""
        try:
            return self._judge(item, error)
        except (OverflowError, ValueError, TypeError) as impossible:  # it asked to come back at no moment there is
            return self._judge(item, impossible)

    def _judge(self, item: Item, error: BaseException) -> PutOff:
        now, used = self._clock.now(), item.attempt
        if isinstance(error, Snooze):
            until = error.until
            if not isinstance(until, datetime):
                until = now + (until if isinstance(until, timedelta) else timedelta(seconds=until))
            return self._waiting(used - 1, until, now, None, None)
        if isinstance(error, (Reject, schemas.SchemaError, *self._policy.reject_on)):
            return PutOff("dead", used, None, kind(error), describe(error))
        if retry.is_spent(self._policy, used):
            return PutOff("dead", used, None, kind(error), describe(error))
        if isinstance(error, RetryAfter):
            wait_s = min(max(0.0, error.seconds), _LONGEST_WAIT_S)
            return self._waiting(used, now + timedelta(seconds=wait_s), now, kind(error), describe(error))
        wait_s = retry.backoff_s(self._policy, used, self._random, self._scale)
        # The longest tier with its jitter goes beyond two hours, and still fits its topic.
        due = records.whole_ms(now + timedelta(seconds=wait_s))
        return PutOff("waiting", used, due, kind(error), describe(error))

    def _waiting(
        self, attempts: int, due: datetime, now: datetime, error_class: str | None, error: str | None
    ) -> PutOff:
        due = records.whole_ms(max(due, now))
        return PutOff("waiting", attempts, due, error_class, error, keep=due - now > KEEP_BEYOND)

    def tier(self, wait_s: float, failed_attempts: int) -> int | Literal["now"]:
        """The tier that this wait was drawn from, if it was; else the shortest topic that is long enough."""
        if failed_attempts >= 1:
            tier = retry.tier_s(self._policy, failed_attempts)
            if tier * 0.5 < wait_s <= tier * (1 + self._policy.jitter) and tier in schemas.topics.RETRY_DELAYS_S:
                return tier
        return retry.topic_delay(wait_s) or schemas.topics.RETRY_DELAYS_S[-1]


def kind(error: BaseException) -> str:
    return type(error).__name__


def describe(error: BaseException) -> str:
    """What people read as the reason, bounded."""
    if isinstance(error, TimeoutError) and not str(error):
        return "the handler ran longer than its timeout"
    return records.cut(str(error) or kind(error))
