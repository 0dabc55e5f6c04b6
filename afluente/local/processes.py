"""The real commands as processes of their own, with their log lines as the signal to wait for.

The demo runs the pipeline with it and the tests run what they kill with it. A process must be started with
LOG_FORMAT=json: lines that are not JSON are kept as text. It writes to a file, not to a pipe, so that a process may
outlive whoever started it.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from afluente.local.errors import LocalError
from afluente.local.process import Ticket

STOP_WITHIN_S = 15.0
LOOK_EVERY_S = 0.01
COMMAND = Path(sys.executable).with_name("afluente")

Line = dict[str, Any]
"""A parsed log line; what is not JSON is {"event": None, "text": line}."""


class NotSeen(AssertionError, LocalError):
    """What was waited for did not come. A test fails by it; a command says it and ends."""


class Process:
    """A running command. A thread follows what it says (stdout and stderr as one); `wait_for` waits on that thread.

    `heard`, when given, is called with each line from that thread: it must be quick and must not raise.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        env: Mapping[str, str],
        log_path: Path,
        heard: Callable[[Line], None] | None = None,
    ) -> None:
        self.command = [str(part) for part in command]
        self.log_path = log_path
        self.lines: list[Line] = []
        self._heard = heard
        self._changed = threading.Condition()
        self._ended = False
        with open(log_path, "wb") as log:
            self._popen = subprocess.Popen(
                self.command,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        return self._popen.poll()

    @property
    def log(self) -> str:
        """Everything it has said, as text."""
        return self.log_path.read_text(errors="replace")

    def events(self, name: str) -> list[Line]:
        """The log lines with that event name so far."""
        with self._changed:
            return [line for line in self.lines if line.get("event") == name]

    def wait_for(self, name: str, timeout: float = 30.0, count: int = 1, **fields: Any) -> Line:
        """Wait until the event `name` with these fields was logged `count` times since the start; returns the last one.

        NotSeen with the end of the log when the process ends or the time is up before that.
        """

        def matching() -> Line | None:
            found = [
                line
                for line in self.lines
                if line.get("event") == name and all(line.get(key) == value for key, value in fields.items())
            ]
            return found[count - 1] if len(found) >= count else None

        line: Line = self._wait(matching, timeout, f"{name} {fields}")
        return line

    def wait_for_total(self, name: str, field: str, total: float, timeout: float = 30.0) -> None:
        """Wait until the numbers in `field` of the events `name` add up to `total` or more."""
        self._wait(
            lambda: sum(line.get(field) or 0 for line in self.lines if line.get("event") == name) >= total,
            timeout,
            f"{name} with {field} adding up to {total}",
        )

    def wait(self, timeout: float = 60.0) -> int:
        """Wait for its end; returns the exit status (negative: the signal)."""
        try:
            status = self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise NotSeen(f"{self} did not end within {timeout} s\n{self.tail()}") from None
        self._reader.join(5)
        return status

    def terminate(self, timeout: float = STOP_WITHIN_S) -> int:
        """SIGTERM, and the exit status once it has ended."""
        self.signal(signal.SIGTERM)
        return self.wait(timeout)

    def kill(self) -> int:
        """kill -9, returned once it is dead."""
        self.signal(signal.SIGKILL)
        return self.wait()

    def signal(self, number: int) -> None:
        if self.returncode is None:
            self._popen.send_signal(number)

    def ticket(self) -> Ticket:
        """What finds it again after whoever started it has ended."""
        return Ticket(self.pid, psutil.Process(self.pid).create_time())

    def tail(self, lines: int = 40) -> str:
        """The end of its log."""
        return "\n".join(self.log.splitlines()[-lines:])

    def __repr__(self) -> str:
        return f"{' '.join(self.command)} (pid {self.pid})"

    def _wait(self, condition: Callable[[], Any], timeout: float, what: str) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._ended, timeout)
            if not (found := condition()):
                ended = f"ended with {self._popen.poll()}" if self._ended else f"{timeout} s are over"
                raise NotSeen(f"{self}: {ended} without {what}\n{self.tail()}")
            return found

    def _read(self) -> None:
        with open(self.log_path, "rb") as log:
            rest = b""
            ended = False
            while not ended:
                # asked before the read: what it said last is read in the turn after its end
                ended = self._popen.poll() is not None
                *whole, rest = (rest + log.read()).split(b"\n")
                for raw in whole if not ended or not rest else [*whole, rest]:
                    self._take(raw)
                if not ended and not whole:
                    time.sleep(LOOK_EVERY_S)
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _take(self, raw: bytes) -> None:
        try:
            line = json.loads(raw)
        except ValueError:
            line = None
        if not isinstance(line, dict):
            line = {"event": None, "text": raw.decode(errors="replace")}
        with self._changed:
            self.lines.append(line)
            self._changed.notify_all()
        if self._heard is not None:
            self._heard(line)


def stop_all(processes: Sequence[Process]) -> None:
    """SIGTERM to all that run, at once; kill -9 to those that take longer than STOP_WITHIN_S."""
    running = [process for process in processes if process.returncode is None]
    for process in running:
        process.signal(signal.SIGCONT)
        process.signal(signal.SIGTERM)
    for process in running:
        try:
            process.wait(STOP_WITHIN_S)
        except NotSeen:
            process.kill()
