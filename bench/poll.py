"""What a poll costs that finds nothing, beside 36 months: with those that are over sealed, as a relay leaves them that
has published them, and with none sealed, as it finds them when it begins."""

from __future__ import annotations

import time
from dataclasses import dataclass

import psycopg

from afluente import postgres as connections
from bench.errors import BenchError
from bench.rows import add_organizations
from bench.servers import Servers
from producers.relay.position import Entry
from producers.relay.source import Source, seal_months

PARTITIONS, MONTHS_OVER = 36, 32
SEAL_WITHIN_S = 60.0
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


@dataclass(frozen=True)
class Poll:
    """Milliseconds of an empty poll, as its caller sees it: medians of 1,000."""

    sealed_ms: float
    unsealed_ms: float


def measure(servers: Servers, rows: int, runs: int) -> list[Poll]:
    """One for each run."""
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
        entry, found = _read_all(source, Entry())
        if found != rows:
            raise BenchError(f"the source gave {found} of {rows} rows")
        unsealed = [_median_ms(source, url, entry) for _ in range(runs)]
        _seal(source, url, entry)
        source.leave_out_sealed([entry])
        return [Poll(_median_ms(source, url, entry), before) for before in unsealed]
    finally:
        source.close()


def _read_all(source: Source, entry: Entry) -> tuple[Entry, int]:
    found = 0
    while True:
        chunk = source.chunk(entry)
        entry, found = chunk.after, found + len(chunk.rows)
        if not chunk.rows and entry.window is None:
            return entry, found


def _seal(source: Source, url: str, entry: Entry) -> None:
    """Seal all months that are over. It takes a position past the moment at which it was asked for first."""
    deadline, sealed = time.monotonic() + SEAL_WITHIN_S, 0
    with connections.connect(url, application_name="bench", autocommit=True) as conn:
        while sealed < MONTHS_OVER:
            entry, _ = _read_all(source, entry)
            sealed += seal_months(conn, entry)
            if time.monotonic() > deadline:
                raise BenchError(f"{sealed} of {MONTHS_OVER} months could be sealed")


def _median_ms(source: Source, url: str, entry: Entry) -> float:
    times = []
    with psycopg.connect(url, autocommit=True) as conn:
        for _ in range(POLLS):
            conn.execute("SELECT pg_current_xact_id()")  # something has ended, else the source need not look
            began = time.perf_counter()
            entry = source.chunk(entry).after
            times.append(time.perf_counter() - began)
    return sorted(times)[POLLS // 2] * 1000
