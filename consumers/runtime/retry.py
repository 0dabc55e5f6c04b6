"""When the next attempt comes, in which topic a record waits for it, and which of the waiting ones is due. No I/O.

Retry topics are read ahead and run in the order of their due times. Read in log order, a tier would lose its jitter: a
burst of failures would come back as one.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import Generic, Literal, TypeVar

from consumers.worker import Policy
from schemas.topics import RETRY_DELAYS_S

T = TypeVar("T")

LONGEST_IN_KAFKA_S = RETRY_DELAYS_S[-1]
"""A wait beyond this is kept in Postgres: no retry topic keeps its records long enough to be trusted with it."""


def tier_s(policy: Policy, failed_attempts: int) -> int:
    """The wait before jitter after so many failed attempts (1, 2, ...); the last tier repeats."""
    return policy.backoff_s[min(failed_attempts, len(policy.backoff_s)) - 1]


def backoff_s(policy: Policy, failed_attempts: int, random: Callable[[], float], scale: float = 1.0) -> float:
    """Seconds until the next attempt: the tier plus a share of it between 0 and `policy.jitter`. `random` is in [0,
    1)."""
    return tier_s(policy, failed_attempts) * (1 + policy.jitter * random()) * scale


def is_spent(policy: Policy, failed_attempts: int) -> bool:
    """No attempt is left after so many failed ones."""
    return failed_attempts >= policy.attempts


def topic_delay(wait_s: float) -> int | Literal["now"] | None:
    """The retry topic for a wait that no tier named: the shortest that is long enough; None: keep it in Postgres."""
    if wait_s <= 0:
        return "now"
    return next((delay for delay in RETRY_DELAYS_S if wait_s <= delay), None)


class DueHeap(Generic[T]):
    """Waiting things by their due time (ms since the epoch); equal times in the order they came."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, T]] = []
        self._numbers = itertools.count()

    def push(self, due_ms: int, item: T) -> None:
        heapq.heappush(self._heap, (due_ms, next(self._numbers), item))

    def pop_due(self, now_ms: int) -> Iterator[T]:
        """Take out everything due by `now_ms`, earliest first."""
        while self._heap and self._heap[0][0] <= now_ms:
            yield heapq.heappop(self._heap)[2]

    def discard(self, condition: Callable[[T], bool]) -> int:
        """Drop what fulfils `condition`; returns how many."""
        kept = [entry for entry in self._heap if not condition(entry[2])]
        dropped = len(self._heap) - len(kept)
        if dropped:
            heapq.heapify(kept)
            self._heap = kept
        return dropped

    @property
    def next_due_ms(self) -> int | None:
        return self._heap[0][0] if self._heap else None

    def __len__(self) -> int:
        return len(self._heap)
