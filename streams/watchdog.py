"""Ends the process when it has work and does none.

A thread, not a coroutine: what it guards against is an event loop that no longer turns, or waits for something that
never comes. Ending is safe, because the fences in Postgres say where to go on; whoever runs the process starts it
again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from afluente import telemetry
from afluente.clock import Clock, SystemClock

STUCK = 71
PATIENCE_S = 60.0
LOOK_EVERY_S = 1.0

log = telemetry.get_logger(__name__)


class Watchdog:
    """Looks at two numbers: how much is waiting, and a count that rises with every step made."""

    def __init__(
        self,
        *,
        waiting: Callable[[], int],
        progress: Callable[[], int],
        exit: Callable[[int, str], Any],
        patience_s: float = PATIENCE_S,
        clock: Clock | None = None,
    ) -> None:
        self._waiting = waiting
        self._progress = progress
        self._exit = exit
        self._patience_s = patience_s
        self._clock = clock or SystemClock()
        self._seen = progress()
        self._since = self._clock.monotonic()
        self._ended = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        self._ended.set()

    def look(self) -> None:
        """Compare with the last look. Ends the process after `patience_s` of work waiting and no step made."""
        now = self._clock.monotonic()
        progress = self._progress()
        if progress != self._seen or (waiting := self._waiting()) == 0:
            self._seen, self._since = progress, now
            return
        idle_s = now - self._since
        if idle_s >= self._patience_s:
            log.error("stream.stuck", waiting=waiting, idle_s=round(idle_s, 1))
            self._exit(STUCK, f"{waiting} records waiting and no progress for {idle_s:.0f} s")

    def _run(self) -> None:
        while not self._ended.wait(LOOK_EVERY_S):
            try:
                self.look()
            except Exception as error:
                # The numbers belong to other threads, which may be changing them right now: look again.
                log.debug("stream.look_failed", error=f"{type(error).__name__}: {error}")
