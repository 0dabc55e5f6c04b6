"""What a poll costs that finds nothing: 36 months of published rows, none of them sealed."""

from __future__ import annotations

import time

import psycopg

from bench.errors import BenchError
from bench.rows import add_organizations
from bench.servers import Servers
from producers.relay.position import Entry
from producers.relay.source import Source

PARTITIONS = 36
POLLS = 1_000

_MONTHS = """
SELECT afluente.ensure_partitions((current_date + interval '3 months')::date,
                                  (current_date - interval '32 months')::date)
"""
_FILL = """
INSERT INTO event_log (organization_id, event_type, entity_kind, created_at)
SELECT %s, 'probe.counted', 'probe', clock_timestamp() - make_interval(days => n %% 950)
  FROM generate_series(1, %s) n
"""


def measure(servers: Servers, rows: int, runs: int) -> list[float]:
    """Milliseconds of an empty poll, as its caller sees it: the median of 1,000, for each run."""
    url = servers.database("months")
    with psycopg.connect(url, autocommit=True) as conn:
        (organization,) = add_organizations(conn, 1)
        conn.execute(_MONTHS)
        count = conn.execute("SELECT count(*) FROM pg_inherits WHERE inhparent = 'event_log'::regclass").fetchone()
        if count != (PARTITIONS,):
            raise BenchError(f"event_log has {count} partitions, not {PARTITIONS}")
        conn.execute("SET synchronous_commit = off")
        conn.execute(_FILL, [organization, rows])
        conn.execute("VACUUM ANALYZE event_log")
        conn.execute("CHECKPOINT")
    source = Source(url)
    try:
        entry, found = Entry(), 0
        while True:
            chunk = source.chunk(entry)
            entry, found = chunk.after, found + len(chunk.rows)
            if not chunk.rows and entry.window is None:
                break
        if found != rows:
            raise BenchError(f"the source gave {found} of {rows} rows")
        medians = []
        for _ in range(runs):
            times = []
            for _ in range(POLLS):
                began = time.perf_counter()
                entry = source.chunk(entry).after
                times.append(time.perf_counter() - began)
            medians.append(sorted(times)[POLLS // 2] * 1000)
        return medians
    finally:
        source.close()
