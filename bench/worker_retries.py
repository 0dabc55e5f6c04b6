"""A burst of failures that comes back: how late after its due time each delivery runs again, and how evenly.

Due is what the retry record says in its header; the run is its effect's statement, by the server's clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import quantiles
from typing import Any

from afluente import kafka
from bench import usage
from bench.errors import BenchError
from bench.servers import Servers
from bench.worker_effects import check
from bench.worker_runs import STOP_WITHIN_S, Ours, Work, at_work, wait_for_effects
from consumers.runtime.records import DUE_MS, EVENT_ID
from schemas.topics import Topics

EARLY_S = 0.01
"""Due times are whole milliseconds, and two clocks read one after the other."""


@dataclass(frozen=True)
class Retries:
    """One burst. `late_s`: from due to effect. `peak_share`: the most of all that came back within one second;
    `due_peak_share`: the most that were due within one."""

    failures: int
    late_s_p50: float
    late_s_p99: float
    late_s_max: float
    peak_share: float
    due_peak_share: float
    rss_mb: float

    def as_row(self) -> dict[str, Any]:
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(self).items()}


def burst(servers: Servers, ours: Ours, work: Work, delay_s: int, label: str) -> Retries:
    """Let each event of the work fail once, and wait for all. BenchError when one came before it was due, or not."""
    with at_work(servers, ours, work, label) as (process, conn, started):
        started.wait(process, ours.ready_event)
        wait_for_effects(conn, process, work.events)
        rss_mb = usage.peak_rss_mb(process.pid)
        process.terminate(STOP_WITHIN_S)
        check(conn, ours.name, work.events, 0, ours.worker)
        rows = conn.execute(
            "SELECT event_id::text, extract(epoch FROM created_at)::float8 FROM bench_effect"
        ).fetchall()
        due: dict[str, float] = {}
        for record in kafka.read_topic(servers.settings(), Topics(work.prefix).retry(ours.worker, delay_s)):
            headers = dict(kafka.headers_of(record) or ())
            due[(headers[EVENT_ID] or b"").decode()] = int(headers[DUE_MS] or b"0") / 1000
    if missing := [event_id for event_id, _ in rows if event_id not in due]:
        raise BenchError(f"{len(missing)} of {work.events} deliveries have no record in the retry topic of {delay_s} s")
    late = sorted(ran - due[event_id] for event_id, ran in rows)
    if late[0] < -EARLY_S:
        raise BenchError(f"a delivery ran {-late[0]:.3f} s before it was due")
    cuts = quantiles(late, n=100)
    return Retries(
        failures=work.events,
        late_s_p50=cuts[49],
        late_s_p99=cuts[98],
        late_s_max=late[-1],
        peak_share=peak([ran for _, ran in rows]) / work.events,
        due_peak_share=peak(list(due.values())) / work.events,
        rss_mb=rss_mb,
    )


def peak(moments: Sequence[float]) -> int:
    """The most of them within one second."""
    ordered = sorted(moments)
    return max(bisect_left(ordered, moment + 1) - number for number, moment in enumerate(ordered))
