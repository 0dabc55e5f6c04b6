"""How much a process that serves strangers takes on: bytes at once, in all and of each; so many things a second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


class Busy(Exception):
    """Too much is in flight."""


class Memory:
    """The bytes that requests hold, in all and of each peer: an address, a key."""

    def __init__(self) -> None:
        self._held: Counter[Hashable] = Counter()
        self._total = 0

    @contextmanager
    def of(self, peer: Hashable, *, each: int, total: int, least: int = 0) -> Iterator[Callable[[int], None]]:
        """One request's share, given back at the end. Call with the bytes it holds by now; raises Busy beyond what
        `each` peer and all in `total` may hold. `least`: what a request counts for at least."""
        held = 0

        def hold(size: int) -> None:
            nonlocal held
            more = max(size, least) - held
            if self._held[peer] + more > each or self._total + more > total:
                raise Busy
            self._held[peer] += more
            self._total += more
            held += more

        try:
            hold(0)
            yield hold
        finally:
            self._held[peer] -= held
            self._total -= held
            if self._held[peer] <= 0:
                del self._held[peer]


@dataclass
class Bucket:
    """So many a second, so many at once."""

    rate: float
    burst: float
    level: float = field(init=False)
    at: float | None = None

    def __post_init__(self) -> None:
        self.level = self.burst

    def take(self, now: float) -> bool:
        """Whether there is one, at `now` (monotonic, s); it is taken."""
        if self.at is not None:
            self.level = min(self.burst, self.level + (now - self.at) * self.rate)
        self.at = now
        if self.level < 1:
            return False
        self.level -= 1
        return True
