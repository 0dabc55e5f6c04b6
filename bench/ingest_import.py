"""Contact events from a file by `afluente contact-events import`, beside a bare COPY of the rows that it made.

The import judges every row, looks its contact up, writes it with its unique names and eleven indexes, and an event into
the outbox for each. The COPY streams the same rows, from the same client and in the same number of transactions, one
after the other: into a table of the same columns with no index, constraint, trigger or row-level security, and into one
with the same indexes and checks. Neither has an outbox.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg

from bench import usage
from bench.errors import BenchError
from bench.rows import add_organizations
from bench.servers import Database

CONTACTS = 20_000
IMPORT_WITHIN_S = 3600.0
COPY_BYTES = 256 * 1024
PLAIN, INDEXED = "bench_copy", "bench_copy_indexed"

_CONTACTS = """
INSERT INTO contacts (organization_id, name, source) SELECT %s, 'Pessoa ' || n, 'bench' FROM generate_series(1, %s) n
RETURNING id
"""
# LIKE copies neither foreign keys nor triggers; the generated column is left out, as nothing is copied into one.
_TABLES = (
    f"CREATE TABLE {PLAIN} (LIKE contact_events EXCLUDING ALL)",
    f"CREATE TABLE {INDEXED} (LIKE contact_events INCLUDING ALL)",
)
_COLUMNS = """
SELECT string_agg(quote_ident(attname), ', ' ORDER BY attnum) FROM pg_attribute
 WHERE attrelid = 'contact_events'::regclass AND attnum > 0 AND NOT attisdropped AND attgenerated = ''
"""
_WRITTEN = """
SELECT (SELECT count(*) FROM contact_events), (SELECT count(DISTINCT external_event_id) FROM contact_events),
       (SELECT count(DISTINCT payload ->> 'contact_event_id') FROM event_log
         WHERE event_type = 'contact_event.recorded')
"""


@dataclass(frozen=True)
class Run:
    """One run of all three. CPU of the import in microseconds for each row."""

    rows: int
    import_rows_per_s: float
    copy_rows_per_s: float
    copy_indexed_rows_per_s: float
    cpu_us: float
    postgres_cpu_us: float

    def as_row(self) -> dict[str, Any]:
        return {name: round(value) if isinstance(value, float) else value for name, value in asdict(self).items()}


def rounds(servers: Database, rows: int, runs: int, said: Callable[[str], None]) -> list[Run]:
    done = []
    for number in range(1, runs + 1):
        found = measure(servers, rows, f"import_{number}")
        done.append(found)
        said(
            f"import {number}/{runs}: {found.import_rows_per_s:,.0f} rows/s, COPY {found.copy_rows_per_s:,.0f}, with "
            f"indexes {found.copy_indexed_rows_per_s:,.0f}"
        )
    return done


def measure(servers: Database, rows: int, label: str) -> Run:
    """One run. BenchError when a row or its event is missing."""
    url = servers.database(label)
    path = servers.folder / f"{label}.ndjson"
    try:
        with psycopg.connect(url, autocommit=True) as conn:
            organization = add_organizations(conn, 1)[0]
            contacts = [row[0] for row in conn.execute(_CONTACTS, [organization, CONTACTS]).fetchall()]
            _write_file(path, contacts, rows)
            conn.execute("VACUUM ANALYZE contacts")
            servers.checkpoint()
            seconds, cpu_us, postgres_cpu_us = _import(servers, url, organization, path, rows, label)
            written = conn.execute(_WRITTEN).fetchone()
            if written != (rows, rows, rows):
                raise BenchError(f"the import of {rows} rows wrote (rows, distinct, events) {written}")
            copied = _copy(servers, conn, rows, path.with_suffix(".copy"))
        return Run(
            rows=rows,
            import_rows_per_s=rows / seconds,
            copy_rows_per_s=rows / copied[PLAIN],
            copy_indexed_rows_per_s=rows / copied[INDEXED],
            cpu_us=cpu_us,
            postgres_cpu_us=postgres_cpu_us,
        )
    finally:
        servers.drop(label)
        path.unlink(missing_ok=True)


def _write_file(path: Path, contacts: list[UUID], rows: int) -> None:
    """Purchases and messages of these contacts over a year, each with a name of its own."""
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    with path.open("w") as file:
        for number in range(rows):
            row: dict[str, Any] = {
                "contact_id": str(contacts[number * 7 % len(contacts)]),
                "source": "bench",
                "occurred_at": (begin + timedelta(seconds=number * 30 % 31_536_000)).isoformat(),
            }
            if number % 2:
                row |= {"metric": "Message Received", "external_event_id": f"received:{number}"}
            else:
                row |= {
                    "event_type": "purchase_completed",
                    "external_event_id": f"order_paid:{number}",
                    "value": "297.90",
                    "currency": "BRL",
                    "properties": {"productId": "p-1", "productName": "Vestido azul", "amount": "297.90"},
                }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _import(
    servers: Database, url: str, organization: UUID, path: Path, rows: int, label: str
) -> tuple[float, float, float]:
    """Seconds of the whole command, start-up included, and CPU of it and of Postgres for each row."""
    before, own = usage.family_cpu_s(servers.postgres_pid), _ended_cpu_s()
    began = time.monotonic()
    words = ["contact-events", "import", str(path), "--org", str(organization), "--format", "json"]
    process = servers.process(words, url, label, {})
    try:
        status = process.wait(IMPORT_WITHIN_S)
    finally:
        process.kill()
    seconds = time.monotonic() - began
    if status != 0:
        raise BenchError(f"the import ended with {status}: {process.tail(5)}")
    after = usage.family_cpu_s(servers.postgres_pid)
    return seconds, (_ended_cpu_s() - own) / rows * 1e6, (after - before) / rows * 1e6


def _ended_cpu_s() -> float:
    """Of all processes that were started here and have ended."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def _copy(servers: Database, conn: psycopg.Connection[Any], rows: int, path: Path) -> dict[str, float]:
    """Seconds of the COPY of the same rows into each table."""
    (columns,) = conn.execute(_COLUMNS).fetchone() or ("",)
    seconds = {}
    try:
        with path.open("wb") as file, conn.cursor().copy(f"COPY contact_events ({columns}) TO STDOUT") as copy:
            for block in copy:
                file.write(block)
        for table, statement in zip((PLAIN, INDEXED), _TABLES, strict=True):
            conn.execute(statement)
            servers.checkpoint()
            began = time.monotonic()
            with path.open("rb") as file, conn.cursor().copy(f"COPY {table} ({columns}) FROM STDIN") as copy:
                while data := file.read(COPY_BYTES):
                    copy.write(data)
            seconds[table] = time.monotonic() - began
            if conn.execute(f"SELECT count(*) FROM {table}").fetchone() != (rows,):
                raise BenchError(f"COPY into {table} left rows out")
    finally:
        path.unlink(missing_ok=True)
    return seconds
