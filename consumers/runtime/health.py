"""Is this process alive, and is it ready: what a supervisor asks over HTTP, answered from a thread of its own.

Alive means that the loops turn and that records move, not that Kafka or Postgres answers: an outage of theirs would
restart every process, and mend nothing. Ready means that each worker has had its partitions. The answer is JSON and
says why not.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from afluente.telemetry.metrics import Page
from consumers.runtime.control import Pause


@dataclass(frozen=True, slots=True)
class Signs:
    """Of one worker in this process."""

    worker: str
    began: bool
    """Its poll thread was started."""
    poll_age_s: float
    """Since the poll loop turned; while a rebalance or the end of the process holds it, that is no illness."""
    partitions: int
    ready: bool
    """It has had its first assignment."""
    stopping: bool
    paused: Pause | None
    stalled: tuple[str, ...]
    """What is behind and does not move, in words."""


class Health:
    """`beat` runs in the process's event loop; `pages` are what a server of metrics answers besides."""

    def __init__(self, signs: Sequence[Callable[[], Signs]], *, stalled_s: float) -> None:
        """`stalled_s`: a loop that has not turned for so long is dead."""
        self._signs = signs
        self._stalled_s = stalled_s
        self._turned_at = time.monotonic()

    async def beat(self) -> None:
        while True:
            self._turned_at = time.monotonic()
            await asyncio.sleep(min(1.0, self._stalled_s / 4))

    @property
    def pages(self) -> Mapping[str, Page]:
        return {"/livez": self._page(self.illness), "/readyz": self._page(self.hindrance)}

    def illness(self, signs: Sequence[Signs]) -> list[str]:
        """Why this process should be ended and started again; empty: alive."""
        found = []
        if (age := time.monotonic() - self._turned_at) > self._stalled_s:
            found.append(f"the event loop has not turned for {age:.0f} s: a handler blocks it")
        for each in signs:
            if each.began and each.poll_age_s > self._stalled_s:
                found.append(f"{each.worker}: the poll loop has not turned for {each.poll_age_s:.0f} s")
            found += [f"{each.worker}: {words}" for words in each.stalled]
        return found

    def hindrance(self, signs: Sequence[Signs]) -> list[str]:
        """Why it does not handle events now; empty: ready."""
        found = []
        for each in signs:
            if each.stopping:
                found.append(f"{each.worker}: it is stopping")
            elif not each.ready:
                found.append(f"{each.worker}: it has no partitions yet")
        return found

    def _page(self, why_not: Callable[[Sequence[Signs]], list[str]]) -> Page:
        def page() -> tuple[str, bytes]:
            signs = [each() for each in self._signs]
            problems = why_not(signs)
            body = {
                "ok": not problems,
                "problems": problems,
                "workers": {each.worker: _plain(each) for each in signs},
            }
            return "503 Service Unavailable" if problems else "200 OK", json.dumps(body).encode() + b"\n"

        return page


def _plain(signs: Signs) -> dict[str, Any]:
    pause = signs.paused
    return {
        **{key: value for key, value in asdict(signs).items() if key in ("partitions", "ready", "stopping", "stalled")},
        "poll_age_s": round(signs.poll_age_s, 1),
        "paused": None if pause is None else {"by": pause.by, "since": pause.since.isoformat(), "reason": pause.reason},
    }
