"""Ids that are made before Postgres is asked: uuidv7, as its own function makes them, in order within this process."""

from __future__ import annotations

import os
import time
from uuid import UUID

_VERSION_AND_VARIANT = (7 << 76) | (2 << 62)
_last = 0


def uuid7() -> UUID:
    """48 bits of milliseconds, 12 bits of the fraction of one, 62 random bits; always after the one before."""
    global _last
    nanoseconds = time.time_ns()
    milliseconds, rest = divmod(nanoseconds, 1_000_000)
    # A clock that stands still or steps back does not: the fraction counts on.
    _last = max((milliseconds << 12) | (rest * 4096 // 1_000_000), _last + 1)
    random = int.from_bytes(os.urandom(8)) >> 2
    return UUID(int=((_last >> 12) << 80) | _VERSION_AND_VARIANT | ((_last & 0xFFF) << 64) | random)
