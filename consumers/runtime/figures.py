"""What a worker counts while it works. The event loop adds, the metrics server's threads read.

Additions only, on whole batches where there are any: at full speed a label looked up for each delivery would be a tenth
of the time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator

from afluente.telemetry.metrics import Histogram, Sample

SAY_EVERY_S = 5.0
WINDOW_S = 300.0
EVENT_TYPES = 200  # so many labels at most; further types are counted as `other`

_HANDLER_S = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_LATENESS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
_REVOKE_S = (0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0)


class Figures:
    """One worker's, in one process."""

    def __init__(self) -> None:
        self.records = 0
        self.done: Counter[str] = Counter()
        """By event type."""
        self.retried = self.snoozed = self.put_off = self.dead = self.duplicates = 0
        self.runs = 0
        """Runs of a handler, whatever became of them."""
        self.handler_s = Histogram(_HANDLER_S)
        self.lateness_s = Histogram(_LATENESS_S)
        self.revoke_wait_s = Histogram(_REVOKE_S)
        self._window: deque[tuple[float, int, int]] = deque()
        self._said = (0, 0, 0.0)
        self._said_at: float | None = None

    def add_done(self, event_types: Iterable[str]) -> None:
        self.done.update(event_types)
        if len(self.done) > EVENT_TYPES + 1:
            for event_type, _ in self.done.most_common()[EVENT_TYPES:]:
                if event_type != "other":
                    self.done["other"] += self.done.pop(event_type)

    @property
    def done_count(self) -> int:
        return self.done.total()

    @property
    def failed(self) -> int:
        return self.retried + self.dead

    def turn(self, now_s: float) -> None:
        """Remember how it stands, for the rate of the last minutes. Called about once a second."""
        self._window.append((now_s, self.done_count, self.failed))
        while self._window[0][0] < now_s - WINDOW_S:
            self._window.popleft()

    @property
    def fail_rate(self) -> float:
        """Of the last WINDOW_S seconds; 0 when nothing ran."""
        window = list(self._window)
        if not window:
            return 0.0
        done, failed = self.done_count - window[0][1], self.failed - window[0][2]
        return failed / (done + failed) if done + failed else 0.0

    def said(self, now_s: float, *, last: bool = False) -> dict[str, float] | None:
        """What was done since this was asked last, when it is time to say so (`last`: it is) and there is something."""
        if self._said_at is not None and now_s - self._said_at < SAY_EVERY_S and not last:
            return None
        standing = (self.done_count, self.failed, self.handler_s.total)
        done, failed, seconds = (now - before for now, before in zip(standing, self._said, strict=True))
        if not done and not failed:
            return None
        self._said, self._said_at = standing, now_s
        return {"count": int(done), "failed": int(failed), "handler_seconds": round(seconds, 3)}

    def samples(self, worker: str) -> Iterator[Sample]:
        for event_type, count in list(self.done.items()):
            yield "afluente_event_log_consumed_total", (worker, event_type), count
        yield "afluente_event_log_fail_rate", (worker,), self.fail_rate
        yield "afluente_worker_records_total", (worker,), self.records
        outcomes = {
            "done": self.done_count,
            "retried": self.retried,
            "snoozed": self.snoozed,
            "put_off": self.put_off,
            "dead": self.dead,
            "duplicate": self.duplicates,
        }
        for outcome, count in outcomes.items():
            yield "afluente_worker_outcomes_total", (worker, outcome), count
        yield "afluente_worker_handler_seconds", (worker,), self.handler_s
        yield "afluente_worker_due_lateness_seconds", (worker,), self.lateness_s
        yield "afluente_worker_revoke_wait_seconds", (worker,), self.revoke_wait_s
