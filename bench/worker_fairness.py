"""How long the event of a small organization waits behind many of another's on the same partition.

From the worker's being ready, the events all there, to the effect (its statement, by the server's clock). The worker is
then stopped: what becomes of the others is measured elsewhere.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any
from uuid import UUID

from bench import usage
from bench.errors import BenchError
from bench.servers import Servers
from bench.worker_runs import LOOK_EVERY_S, STOP_WITHIN_S, Ours, Work, at_work

WITHIN_S = 600.0


@dataclass(frozen=True)
class Behind:
    """One run. `effects_before`: of the other organization, when the small one's was there. Peak memory until then."""

    worker: str
    behind: int
    delay_s: float
    effects_before: int
    rss_mb: float

    def as_row(self) -> dict[str, Any]:
        return {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(self).items()}


def behind(servers: Servers, ours: Ours, work: Work, few: UUID, label: str) -> Behind:
    """BenchError when the event of `few` has no effect within ten minutes, or more than one."""
    with at_work(servers, ours, work, label) as (process, conn, started):
        conn.execute("CREATE INDEX ON bench_effect (organization_id)")
        started.wait(process, ours.ready_event)
        deadline = time.monotonic() + WITHIN_S
        asked = "SELECT id, extract(epoch FROM created_at)::float8 FROM bench_effect WHERE organization_id = %s"
        while not (found := conn.execute(asked, [few]).fetchall()):
            if process.returncode is not None:
                raise BenchError(f"{process} ended before the event of the small organization: {process.tail(5)}")
            if time.monotonic() > deadline:
                raise BenchError(f"{process}: no effect of the small organization within {WITHIN_S:.0f} s")
            time.sleep(LOOK_EVERY_S)
        rss_mb = usage.peak_rss_mb(process.pid)
        (before,) = conn.execute("SELECT count(*) FROM bench_effect WHERE id < %s", [found[0][0]]).fetchone() or (0,)
        process.terminate(STOP_WITHIN_S)
        if len(conn.execute(asked, [few]).fetchall()) != 1:
            raise BenchError(f"{ours.name}: the event of the small organization has more than one effect")
    return Behind(ours.name, work.events - 1, found[0][1] - started.at, before, rss_mb)


def name_of(count: int) -> str:
    """1000000 as 1m, 50000 as 50k, 300 as 300: what a figure is called after."""
    for size, letter in ((1_000_000, "m"), (1_000, "k")):
        if count >= size and count % size == 0:
            return f"{count // size}{letter}"
    return str(count)
