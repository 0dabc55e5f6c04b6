"""Named places where a test may kill this process, and the count of how often each was passed.

The command line arms them from two variables, read once at start:

    AFLUENTE_FAULT      "name:n[:KILL|STOP|raise]", several separated by commas. At the n-th pass of `name` the process
                        sends itself SIGKILL (the default) or SIGSTOP, or raises `FaultInjected`. n = 0 only counts.
    AFLUENTE_FAULT_LOG  a file; each pass of an armed name appends "name pass pid action". A test that finds no line
                        proved nothing, so it fails.

In production nothing is armed and `point` is one dictionary look-up.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass

ACTIONS = ("KILL", "STOP", "raise")


class FaultInjected(Exception):
    """Raised by a point that was armed with `raise`. Deliberately not an AfluenteError: nothing may expect it."""


@dataclass
class _Armed:
    at: int
    action: str
    passed: int = 0


_armed: dict[str, _Armed] = {}
_log_path: str | None = None
_lock = threading.Lock()


def arm(text: str, log_path: str | None = None) -> None:
    """Arm the points named in `text` (syntax above), replacing what was armed. ValueError when it cannot be read."""
    global _log_path
    armed: dict[str, _Armed] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, rest = part.partition(":")
        count, _, action = rest.partition(":")
        action = action or "KILL"
        if not name or not count.isdigit() or action not in ACTIONS:
            raise ValueError(f"{part!r} is not name:n or name:n:action with action one of {', '.join(ACTIONS)}")
        armed[name] = _Armed(int(count), action)
    _armed.clear()
    _armed.update(armed)
    _log_path = log_path


def arm_from(environment: Mapping[str, str]) -> None:
    """Arm from AFLUENTE_FAULT and AFLUENTE_FAULT_LOG. Called by the command line and nowhere else."""
    if text := environment.get("AFLUENTE_FAULT"):
        arm(text, environment.get("AFLUENTE_FAULT_LOG"))


def disarm() -> None:
    _armed.clear()


def point(name: str) -> None:
    """A place where the process may be made to die. Does nothing unless armed."""
    if (armed := _armed.get(name)) is not None:
        _pass(name, armed)


def _pass(name: str, armed: _Armed) -> None:
    with _lock:
        armed.passed += 1
        strikes = armed.passed == armed.at
        # The line is in the kernel's hands before the signal is sent: SIGKILL cannot take it back.
        if _log_path:
            line = f"{name} {armed.passed} {os.getpid()} {armed.action if strikes else 'passed'}\n"
            fd = os.open(_log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(fd, line.encode())
            finally:
                os.close(fd)
    if not strikes:
        return
    if armed.action == "raise":
        raise FaultInjected(name)
    os.kill(os.getpid(), signal.SIGKILL if armed.action == "KILL" else signal.SIGSTOP)
