"""Time as an argument. Whoever decides by the clock takes a `Clock`, so that a test can set it."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    def now(self) -> datetime:
        """The present moment, timezone-aware, UTC."""
        ...

    def monotonic(self) -> float:
        """Seconds that only go forward; for measuring spans, never for dates."""
        ...


class SystemClock:
    """The clock of the machine."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()
