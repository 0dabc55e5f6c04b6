"""Several lanes on one machine: a process for each, started and watched by `afluente relay run`.

What must stay true: a lane's process ends when its supervisor does, however that ends (its standard input is a pipe
from there); a lane that is killed is started again; what a lane refuses ends them all, with its exit status.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from afluente.telemetry import get_logger, heartbeat

LOOK_EVERY_S = 0.1
STOP_WITHIN_S = 12.0  # each ends itself within 10
RESTART_AFTER_S = 1.0
RESTARTS_AT_MOST = 5
RESTARTS_WITHIN_S = 60.0
FRESH_S = 3 * heartbeat.EVERY_S

_log = get_logger(__name__)


class Lanes:
    """Processes `afluente relay run --lane I`, for I from 0 to `lanes` - 1."""

    def __init__(self, lanes: int, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._arguments, self._environment = list(arguments), dict(environment)
        self._lanes = lanes
        self._beats = self._environment.get("AFLUENTE_HEARTBEAT_FILE")
        self._restarts: list[float] = []
        self._processes = {lane: self._start(lane) for lane in range(lanes)}

    def watch(self, stop: threading.Event) -> int:
        """Keep them running until `stop`, or until one ends by itself: the exit status of that one, else 0."""
        try:
            while not stop.wait(LOOK_EVERY_S):
                for lane, process in self._processes.items():
                    if (status := process.poll()) is None:
                        continue
                    if status >= 0 or not self._may_restart():
                        _log.warning("relay.lane_ended", lane=lane, status=status)
                        return status if status >= 0 else 1
                    _log.warning("relay.lane_killed", lane=lane, signal=-status, again_in_s=RESTART_AFTER_S)
                    stop.wait(RESTART_AFTER_S)
                    self._processes[lane] = self._start(lane)
                    break
                if self._all_alive():
                    heartbeat.beat()
            return 0
        finally:
            self._stop()

    def _start(self, lane: int) -> subprocess.Popen[bytes]:
        environment = dict(self._environment)
        if self._beats:
            environment["AFLUENTE_HEARTBEAT_FILE"] = f"{self._beats}.{lane}"
        if listen := environment.get("AFLUENTE_METRICS"):
            host, _, port = listen.rpartition(":")
            environment["AFLUENTE_METRICS"] = f"{host}:{int(port) + 1 + lane if int(port) else 0}"
        command = [sys.executable, "-m", "afluente", "relay", "run", "--lane", str(lane)]
        # Each looks for the layout itself, and ends if it is of another number by then: we would not run all of it.
        command += ["--supervised", str(self._lanes)]
        return subprocess.Popen([*command, *self._arguments], env=environment, stdin=subprocess.PIPE)

    def _may_restart(self) -> bool:
        now = time.monotonic()
        self._restarts = [at for at in self._restarts if now - at < RESTARTS_WITHIN_S] + [now]
        return len(self._restarts) <= RESTARTS_AT_MOST

    def _all_alive(self) -> bool:
        """Whether every lane's loop has turned lately: else this process does not say that it is alive."""
        if not self._beats:
            return False
        beats = [Path(f"{self._beats}.{lane}") for lane in self._processes]
        return all(beat.exists() and time.time() - beat.stat().st_mtime < FRESH_S for beat in beats)

    def _stop(self) -> None:
        for process in self._processes.values():
            if process.stdin is not None:
                process.stdin.close()  # the end of its input is what tells it to stop
        deadline = time.monotonic() + STOP_WITHIN_S
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def stop_with_supervisor(stop: Callable[[], None]) -> None:
    """Call `stop` when the process that started this one is gone, or asks for it."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        stop()

    threading.Thread(target=wait, name="supervisor", daemon=True).start()
