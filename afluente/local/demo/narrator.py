"""What the processes say, as one line a person can read: what came in, went out, was done, failed, died, was folded.

Knows nothing of the servers: lines go in as they were logged, text comes out.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, TextIO

Line = dict[str, Any]

COLOURS = {"in": 36, "out": 34, "done": 32, "retry": 33, "dead": 31, "fold": 35, "stack": 2, "warn": 33}


class Narrator:
    """Prints the lines of several processes in the order they were said. Safe to call from several threads."""

    def __init__(self, organizations: Mapping[str, str], stream: TextIO = sys.stdout) -> None:
        self.organizations = dict(organizations)
        self._stream = stream
        self._colour = stream.isatty()
        self._lock = threading.Lock()
        self._last: tuple[str, str] | None = None
        self._repeats = 0
        self._types: dict[str, str] = {}  # event id -> event type, from what the relay published
        self._targets: dict[str, str] = {}

    def name_target(self, target: str, name: str) -> None:
        """What to call a subscription in the lines about its deliveries."""
        self._targets[target] = name

    def heard(self, line: Line) -> None:
        """One logged line of any process."""
        event = line.get("event")
        if event == "relay.published" and "event_id" in line:
            self._types[line["event_id"]] = line["event_type"]
        if (said := self.sentence(line)) is not None:
            self.say(*said)

    def say(self, kind: str, text: str) -> None:
        """One line. The same line again and again is said once, and then how often."""
        with self._lock:
            if kind and (kind, text) == self._last:
                self._repeats += 1
                return
            self._tell_repeats()
            self._last = (kind, text)
            self._print(kind, text)

    def title(self, text: str) -> None:
        with self._lock:
            self._tell_repeats()
            self._last = None
            print(f"\n\x1b[1m{text}\x1b[0m" if self._colour else f"\n{text}", file=self._stream, flush=True)

    def _tell_repeats(self) -> None:
        if self._last is not None and self._repeats:
            self._print(self._last[0], f"... and {self._repeats} more of it")
        self._repeats = 0

    def _print(self, kind: str, text: str) -> None:
        label = f"{kind:<6}"
        if self._colour and kind in COLOURS:
            label = f"\x1b[{COLOURS[kind]}m{label}\x1b[0m"
        print(f"  {label} {text}", file=self._stream, flush=True)

    def target(self, target: str) -> str:
        return self._targets.get(target, target)

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows under a name; says so when there are none."""
        self.say("", f"{name}:" if rows else f"{name}: none")
        if not rows:
            return
        names = list(rows[0])
        cells = [[_cell(row[column]) for column in names] for row in rows]
        widths = [max(len(column), *(len(line[i]) for line in cells)) for i, column in enumerate(names)]
        for line in [[column.replace("_", " ") for column in names], *cells]:
            self.say(
                "", "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
            )

    def block(self, text: str) -> None:
        """What a command printed, as it stands."""
        for line in text.splitlines():
            self.say("", line)

    def sentence(self, line: Line) -> tuple[str, str] | None:
        """(kind, text) of a logged line, None for what the story does not need."""
        worker = str(line.get("worker", "")).removesuffix("-worker")
        what = self._types.get(str(line.get("event_id")), str(line.get("event_type") or line.get("event_id") or ""))
        target = self._targets.get(str(line.get("target")), "")
        to = f" -> {target}" if target else ""
        match line.get("event"):
            case "relay.published" if "offset" in line:
                place = f"{line['topic']}[{line['partition']}]@{line['offset']}"
                who = self.organizations.get(str(line.get("organization_id")), "?")
                return "out", f"{place:<32} {line['event_type']:<28} {who}"
            case "relay.dead_lettered":
                return "dead", f"relay: {what} cannot be published: {line.get('reason')}"
            case "worker.delivered" if target or worker != "webhook-dispatch":
                attempt = line.get("attempt", 1)
                again = f", attempt {attempt}" if isinstance(attempt, int) and attempt > 1 else ""
                return "done", f"{worker:<18} {what}{to}{again}"
            case "worker.retried":
                return "retry", f"{worker:<18} {what}{to}: attempt {line.get('attempt')} failed, {_reason(line)}"
            case "worker.dead":
                return "dead", f"{worker:<18} {what}{to}: after {line.get('attempt')} attempts, {_reason(line)}"
            case "stream.committed" if line.get("count"):
                twice = f", {line['duplicates']} seen before" if line.get("duplicates") else ""
                return "fold", f"{line['facts']} contact events folded into the summaries{twice}"
            case "relay.session_lost" | "worker.postgres_away" | "worker.kafka_away" | "process.failed":
                return "warn", f"{line['event']}: {_reason(line)}"
        return None


def _reason(line: Line) -> str:
    text = str(line.get("error") or line.get("reason") or "").splitlines()
    return (text[0] if text else "no reason given")[:110]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, datetime):
        return value.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    return str(value).splitlines()[0][:80] if str(value) else ""
