"""How much a key may do: a token bucket of its own, in Postgres, that every web process takes from in slices.

A token is one event written, or one request that reads. `rate` tokens come in a second, at most `burst` are kept. A
request is let in while there is a token; what else it carries is charged to the key afterwards, so that a batch may
take the level below zero and the next request waits until that is paid for: no batch within the limits of a request is
too large for a key, and over any time no key does more than its burst, its rate, and one batch.

A process takes SLICE_S worth of tokens at once and gives them out from memory, so that the bucket costs a few short
statements a second for each key in use, and none for a key that is refused. What is left of a slice after KEPT_S goes
back. Processes that all hold a slice let in at most that much too early.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from afluente.clock import Clock
from afluente.web.api.keys import Key
from afluente.web.api.problems import Problem

SLICE_S: Final = 0.2
KEPT_S: Final = 1.0
MAX_KEYS: Final = 10_000


@dataclass(frozen=True)
class Slice:
    """`granted` tokens for this process, and the level that is left in the bucket."""

    granted: int
    level: float


class Take(Protocol):
    """Takes up to `wanted` tokens of a key's bucket, after `spent` (which may be below zero: given back)."""

    def __call__(self, key: Key, spent: float, wanted: int, /) -> Awaitable[Slice]: ...


@dataclass
class _Share:
    """What this process has of a key's tokens."""

    level: float = 0.0
    left_in_bucket: float = 0.0
    taken_at: float = -math.inf
    empty_until: float = -math.inf
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True)
class Standing:
    """What a key has left, for the answer's headers."""

    burst: int
    rate_per_s: float
    remaining: int

    def headers(self) -> dict[str, str]:
        """By draft-ietf-httpapi-ratelimit-headers: the quota is the burst, its window the time to fill it."""
        window = max(1, math.ceil(self.burst / self.rate_per_s))
        full_in = max(1, math.ceil((self.burst - self.remaining) / self.rate_per_s))
        return {
            "ratelimit-policy": f'"key";q={self.burst};w={window}',
            "ratelimit": f'"key";r={self.remaining};t={full_in}',
        }


class Limiter:
    """The buckets as this process sees them."""

    def __init__(self, take: Take, clock: Clock, slice_s: Callable[[], float] = lambda: SLICE_S) -> None:
        self._take = take
        self._clock = clock
        self._slice_s = slice_s
        self._shares: OrderedDict[Key, _Share] = OrderedDict()

    async def admit(self, key: Key) -> None:
        """Take one token. Raises Problem (429), with the seconds until there is one."""
        share = self._share(key)
        if not self._from_memory(share):
            async with share.lock:  # one statement for all that arrive meanwhile
                if not self._from_memory(share):
                    await self._fill(key, share)
        share.level -= 1

    def charge(self, key: Key, tokens: int) -> None:
        """Charge for what a request carries beyond its first token."""
        self._share(key).level -= min(tokens, key.burst)

    def standing(self, key: Key) -> Standing:
        share = self._share(key)
        remaining = max(0, math.floor(share.level + share.left_in_bucket))
        return Standing(key.burst, key.rate_per_s, min(remaining, key.burst))

    def _from_memory(self, share: _Share) -> bool:
        return share.level >= 1 and self._clock.monotonic() - share.taken_at < KEPT_S

    async def _fill(self, key: Key, share: _Share) -> None:
        now = self._clock.monotonic()
        if now < share.empty_until:
            raise self._used_up(key, share, share.empty_until - now)
        wanted = max(1, min(key.burst, math.floor(key.rate_per_s * self._slice_s())))
        spent, share.level = -share.level, 0.0
        try:
            taken = await self._take(key, spent, wanted)
        except BaseException:
            share.level -= spent
            raise
        # What was given out or charged while the answer came is in `level`.
        share.level += taken.granted
        share.left_in_bucket = taken.level
        share.taken_at = now
        if share.level < 1:
            wait_s = (1 - taken.level - share.level) / key.rate_per_s
            share.empty_until = now + wait_s
            raise self._used_up(key, share, wait_s)

    def _used_up(self, key: Key, share: _Share, wait_s: float) -> Problem:
        seconds = max(1, math.ceil(wait_s))
        return Problem(
            "rate-limited",
            f"the key's rate of {key.rate_per_s:g} a second, with bursts of {key.burst}, is used up",
            hint=f"wait {seconds} s; `afluente api-key limit` gives the key another rate",
            headers={"retry-after": str(seconds), **Standing(key.burst, key.rate_per_s, 0).headers()},
        )

    def _share(self, key: Key) -> _Share:
        share = self._shares.get(key)
        if share is None:
            share = self._shares[key] = _Share()
            while len(self._shares) > MAX_KEYS:
                self._shares.popitem(last=False)
        else:
            self._shares.move_to_end(key)
        return share
