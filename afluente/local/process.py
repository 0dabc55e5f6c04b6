"""Servers as processes that outlive the one that started them, found again by a ticket on disk.

A ticket is a pid with the time its process began, so that a pid given out again to somebody else is never taken for
ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from afluente.local.errors import LocalError

# create_time is computed from the time of boot, which moves a little when the clock is set.
SAME_PROCESS_WITHIN_S = 10.0
POLL_S = 0.02


@dataclass(frozen=True)
class Ticket:
    pid: int
    created: float

    @classmethod
    def load(cls, path: Path) -> Ticket | None:
        try:
            return cls(**json.loads(path.read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def save(self, path: Path) -> None:
        write_private(path, json.dumps(asdict(self)))

    def process(self) -> psutil.Process | None:
        """The process while it runs, None once it has ended."""
        with contextlib.suppress(ChildProcessError, OSError):
            os.waitpid(self.pid, os.WNOHANG)  # if it is a child of ours: do not keep it as a zombie
        try:
            process = psutil.Process(self.pid)
            # A JVM's first thread may be dead while others still hold the sockets: only the last one makes it gone.
            if process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1:
                return None
            return process if abs(process.create_time() - self.created) < SAME_PROCESS_WITHIN_S else None
        except psutil.Error:
            return None

    @property
    def alive(self) -> bool:
        return self.process() is not None


class Deadline:
    """A span that runs from now; `pause` is the short wait between two looks."""

    def __init__(self, span_s: float) -> None:
        self._end = time.monotonic() + span_s

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._end

    def pause(self) -> None:
        time.sleep(POLL_S)


def spawn(
    command: Sequence[str | Path],
    log_path: Path,
    *,
    user: str | int | None = None,
    group: str | int | None = None,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Ticket:
    """Start a daemon in a session of its own, its output appended to `log_path`."""
    with open(log_path, "ab") as log:
        popen = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=env,
            user=user,
            group=group,
            extra_groups=[] if user is not None else None,
            start_new_session=True,
        )
    try:
        created = psutil.Process(popen.pid).create_time()
    except psutil.Error:
        created = 0.0  # it has ended already; whoever waits for it finds out
    popen.returncode = 0  # nobody waits for a daemon, and Popen should not complain that nobody did
    return Ticket(popen.pid, created)


def wait_until(ready: Callable[[], bool], ticket: Ticket, timeout_s: float, what: str, log_path: Path) -> None:
    """Poll until `ready`. LocalError with the end of the log when the process dies or the time is up before that."""
    deadline = Deadline(timeout_s)
    while not ready():
        if not ticket.alive:
            raise LocalError(f"{what} ended while starting: {last_words(log_path)}", log=log_path)
        if deadline.is_over:
            raise LocalError(f"{what} did not answer within {timeout_s:.0f} s: {last_words(log_path)}", log=log_path)
        deadline.pause()


def end(ticket: Ticket | None, first_signal: signal.Signals, timeout_s: float) -> bool:
    """Send `first_signal`, then SIGKILL after `timeout_s`. True unless it took SIGKILL."""
    if ticket is None or (process := ticket.process()) is None:
        return True
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(first_signal)
    if _gone(ticket, timeout_s):
        return True
    kill(ticket)
    return False


def kill(ticket: Ticket | None) -> None:
    """SIGKILL to the process and to all it started, and back when they are gone."""
    if ticket is None or (process := ticket.process()) is None:
        return
    family = [process]
    with contextlib.suppress(psutil.Error):
        family += process.children(recursive=True)
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    _gone(ticket, 10.0)
    psutil.wait_procs(family[1:], timeout=10.0)


def _gone(ticket: Ticket, timeout_s: float) -> bool:
    deadline = Deadline(timeout_s)
    while ticket.alive:
        if deadline.is_over:
            return False
        deadline.pause()
    return True


def last_words(log_path: Path, lines: int = 3) -> str:
    """The last lines of a log, in one."""
    try:
        text = log_path.read_text(errors="replace").strip()
    except OSError:
        return "it said nothing"
    return " | ".join(text.splitlines()[-lines:]) or "it said nothing"


def free_ports(count: int, preferred: Sequence[int] = ()) -> list[int]:
    """`count` TCP ports of 127.0.0.1 that are free now: the preferred ones when all of them are, else any."""
    if len(preferred) == count and all(_is_free(port) for port in preferred):
        return list(preferred)
    # Not from the range that outgoing connections take theirs from: a server must find its port free on its return.
    ports: list[int] = []
    for port in random.SystemRandom().sample(range(15000, 32000), 2000):
        if _is_free(port):
            ports.append(port)
            if len(ports) == count:
                return ports
    raise LocalError("no free TCP port between 15000 and 32000 on 127.0.0.1")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # a port in TIME_WAIT of our own last run is free for a server
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def answers(host: str, port: int, timeout_s: float = 0.5) -> bool:
    """Whether something accepts TCP connections there."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s):
            return True
    except OSError:
        return False


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner reads, whole or not at all."""
    temporary = path.with_name(path.name + ".new")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(text)
    os.replace(temporary, path)
