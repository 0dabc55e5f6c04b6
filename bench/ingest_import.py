"""Contact events from a file by `afluente contact-events import`, beside a COPY of the rows that it made.

The import judges every row, looks its contact up, and writes two rows for it: the fact with its unique names and all
indexes, and its event in the outbox. The COPY has both rows as they are, text that was made before, and only writes
them: the facts and the events at once over two connections, as the import has two, into tables with the same columns,
indexes and checks, but without foreign keys, triggers, partitions and row-level security. Beside that the barest of
all: the facts alone into a table without any index, over one connection.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
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

_CONTACTS = """
INSERT INTO contacts (organization_id, name, source) SELECT %s, 'Pessoa ' || n, 'bench' FROM generate_series(1, %s) n
RETURNING id
"""
# LIKE copies neither foreign keys nor triggers; generated columns are left out, as nothing is copied into them.
_COLUMNS = """
SELECT string_agg(quote_ident(attname), ', ' ORDER BY attnum) FROM pg_attribute
 WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped AND attgenerated = ''
"""
_WRITTEN = """
SELECT (SELECT count(*) FROM contact_events), (SELECT count(DISTINCT external_event_id) FROM contact_events),
       (SELECT count(DISTINCT payload ->> 'contact_event_id') FROM event_log
         WHERE event_type = 'contact_event.recorded')
"""


@dataclass(frozen=True)
class Run:
    """One run of all three. CPU in microseconds for each row: of the import's process, and of Postgres for it and for
    the COPY of both."""

    rows: int
    import_rows_per_s: float
    copy_rows_per_s: float
    bare_copy_rows_per_s: float
    cpu_us: float
    postgres_cpu_us: float
    copy_postgres_cpu_us: float

    def as_row(self) -> dict[str, Any]:
        return {name: round(value) if isinstance(value, float) else value for name, value in asdict(self).items()}


def rounds(servers: Database, rows: int, runs: int, said: Callable[[str], None]) -> list[Run]:
    done = []
    for number in range(1, runs + 1):
        found = measure(servers, rows, f"import_{number}")
        done.append(found)
        said(
            f"import {number}/{runs}: {found.import_rows_per_s:,.0f} rows/s, a COPY {found.copy_rows_per_s:,.0f}, "
            f"bare {found.bare_copy_rows_per_s:,.0f}"
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
            copied = _copies(servers, url, conn, rows)
        return Run(
            rows=rows,
            import_rows_per_s=rows / seconds,
            copy_rows_per_s=rows / copied[0],
            bare_copy_rows_per_s=rows / copied[1],
            cpu_us=cpu_us,
            postgres_cpu_us=postgres_cpu_us,
            copy_postgres_cpu_us=copied[2],
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


def _copies(servers: Database, url: str, conn: psycopg.Connection[Any], rows: int) -> tuple[float, float, float]:
    """Seconds of COPY: of both rows into tables like theirs, and of the facts into one without indexes; and Postgres'
    CPU for each row of the first."""
    facts = Table(servers.folder / f"{conn.info.dbname}.facts", "contact_events", "bench_facts", "INCLUDING ALL")
    events = Table(servers.folder / f"{conn.info.dbname}.events", "event_log", "bench_events", "INCLUDING ALL")
    bare = Table(facts.path, "contact_events", "bench_bare_facts", "EXCLUDING ALL")
    try:
        for table in (facts, events, bare):
            table.make(conn)
        seconds, spent = [], []
        for together in ((facts, events), (bare,)):
            servers.checkpoint()
            with ExitStack() as opened:
                # Closed after the CPU is read: what a server process that has ended had spent is told with a delay.
                connections = [opened.enter_context(psycopg.connect(url)) for _ in together]
                before, began = usage.family_cpu_s(servers.postgres_pid), time.monotonic()
                with ThreadPoolExecutor(len(together)) as threads:
                    for copied in [
                        threads.submit(table.fill, its) for table, its in zip(together, connections, strict=True)
                    ]:
                        copied.result()
                seconds.append(time.monotonic() - began)
                spent.append(usage.family_cpu_s(servers.postgres_pid) - before)
        for table in (facts, events, bare):
            if conn.execute(f"SELECT count(*) FROM {table.name}").fetchone() != (rows,):
                raise BenchError(f"COPY into {table.name} left rows out")
        return seconds[0], seconds[1], spent[0] / rows * 1e6
    finally:
        for path in (facts.path, events.path):
            path.unlink(missing_ok=True)


@dataclass
class Table:
    """A copy of one of our tables: its rows in a file, and an empty table to copy them into."""

    path: Path
    source: str
    name: str
    like: str
    columns: str = ""

    def make(self, conn: psycopg.Connection[Any]) -> None:
        (self.columns,) = conn.execute(_COLUMNS, [self.source]).fetchone() or ("",)
        conn.execute(f"CREATE TABLE {self.name} (LIKE {self.source} {self.like})")
        # No event but those of the facts: the contacts were not made by the import.
        with (
            self.path.open("wb") as file,
            conn.cursor().copy(f"COPY (SELECT {self.columns} FROM {self.source}) TO STDOUT") as copy,
        ):
            for block in copy:
                file.write(block)

    def fill(self, conn: psycopg.Connection[Any]) -> None:
        with (
            self.path.open("rb") as file,
            conn.cursor().copy(f"COPY {self.name} ({self.columns}) FROM STDIN") as copy,
        ):
            while data := file.read(COPY_BYTES):
                copy.write(data)
        conn.commit()
