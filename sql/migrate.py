"""The migration runner: up, down, status, on a connection that its caller opened and will close.

What must stay true, whoever runs it and however often it is killed:
- One run at a time in a database (an advisory lock); a second run waits, then finds nothing to do.
- A file and its row in the history are committed together, or not at all. A `-- no-transaction` file holds one
  statement; its row is written before as unfinished and completed after, and an unfinished one is run again.
- An applied file that was edited since stops the run before anything is changed (`EditedMigrationError`).
- `functions/` follow the migration they need, and are all applied again at the end of every run.
"""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg import Connection

from sql import Migration, functions, migrations

__all__ = [
    "EditedMigrationError",
    "LockTimeoutError",
    "MigrationError",
    "MigrationState",
    "UnknownMigrationError",
    "UnsupportedServerError",
    "down",
    "status",
    "up",
]

_LOCK_KEY = 0x41464C55  # "AFLU". Advisory locks belong to one database, so databases migrate side by side.
_LOCK_POLL_INTERVAL_S = 0.1
_LOCK_TIMEOUT_S = 300.0
_STATEMENT_LOCK_TIMEOUT = "10s"  # an ALTER TABLE that queues longer than this would hold up everybody behind it
_MINIMUM_SERVER = 180000  # uuidv7() and identity columns on partitioned tables

_HISTORY = """
CREATE SCHEMA IF NOT EXISTS migration;
CREATE TABLE IF NOT EXISTS migration.history (
    version     integer PRIMARY KEY,
    name        text NOT NULL,
    checksum    text NOT NULL,
    applied_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    duration_ms integer,
    finished    boolean NOT NULL
);
REVOKE ALL ON SCHEMA migration FROM PUBLIC;
"""


class MigrationError(Exception):
    """Base of what the runner raises by itself; errors of a migration's own SQL come through as psycopg.Error.

    MigrationError
    ├── EditedMigrationError      an applied file is not what was applied
    ├── UnknownMigrationError     the database has a migration this code does not know
    ├── LockTimeoutError          another run holds the lock
    └── UnsupportedServerError    the server is too old
    """


class EditedMigrationError(MigrationError):
    """An applied migration was edited. Put the file back as it was, and write the change as a new migration."""

    def __init__(self, labels: list[str]) -> None:
        self.labels = labels
        super().__init__(f"edited after being applied: {', '.join(labels)}. {self.__doc__}")


class UnknownMigrationError(MigrationError):
    """The database is ahead of this code: run the `down` with the version that brought the migration."""

    def __init__(self, label: str) -> None:
        self.label = label
        super().__init__(f"{label} is applied, but its files are not here. {self.__doc__}")


class LockTimeoutError(MigrationError):
    """Another migration run holds the lock; see pg_stat_activity for who it is."""


class UnsupportedServerError(MigrationError):
    """Afluente needs PostgreSQL 18 or newer."""


@dataclass(frozen=True, slots=True)
class MigrationState:
    """One line of `status`: `state` is pending, applied, edited, unfinished or unknown (no file here)."""

    version: int
    label: str
    state: str
    applied_at: datetime | None


@dataclass(frozen=True, slots=True)
class _Applied:
    version: int
    name: str
    checksum: str
    applied_at: datetime
    finished: bool

    @property
    def label(self) -> str:
        return f"{self.version:04d}_{self.name}"


def up(conn: Connection[Any], to: int | None = None) -> list[str]:
    """Apply what is pending, up to and with the number `to` (default: all); returns the labels applied.

    `conn` must not be in a transaction; it is put in autocommit for the run, and back. Safe to run at any time and
    from many places at once. Raises EditedMigrationError before anything is changed.
    """
    done = []
    with _run(conn):
        applied = _read_history(conn)
        _refuse_edited(applied)
        for migration in migrations():
            if to is not None and migration.version > to:
                break
            before = applied.get(migration.version)
            if before is None or not before.finished:
                _apply(conn, migration)
                done.append(migration.label)
        _apply_functions(conn)
    return done


def down(conn: Connection[Any], steps: int = 1) -> list[str]:
    """Take the newest `steps` migrations back, newest first; returns their labels.

    At nothing, the history goes too. Raises UnknownMigrationError when the newest one's files are not here.
    """
    known = {migration.version: migration for migration in migrations()}
    done = []
    with _run(conn):
        applied = _read_history(conn)
        for version in sorted(applied, reverse=True)[:steps]:
            migration = known.get(version)
            if migration is None:
                raise UnknownMigrationError(applied[version].label)
            _take_back(conn, migration)
            done.append(migration.label)
        if not _read_history(conn):
            _execute(conn, "DROP SCHEMA migration CASCADE")
        else:
            _apply_functions(conn)
    return done


def status(conn: Connection[Any]) -> list[MigrationState]:
    """Every migration known to this code or to the database, by number. Changes nothing, takes no lock."""
    with conn.transaction():
        row = conn.execute("SELECT to_regclass('migration.history')").fetchone()
        applied = _read_history(conn) if row is not None and row[0] is not None else {}
    known = {migration.version: migration for migration in migrations()}
    states = []
    for version in sorted(known.keys() | applied.keys()):
        record, migration = applied.get(version), known.get(version)
        if record is None:
            states.append(MigrationState(version, known[version].label, "pending", None))
            continue
        if migration is None:
            state = "unknown"
        elif not record.finished:
            state = "unfinished"
        else:
            state = "applied" if record.checksum == migration.checksum else "edited"
        states.append(MigrationState(version, record.label, state, record.applied_at))
    return states


@contextmanager
def _run(conn: Connection[Any]) -> Iterator[None]:
    """The session of one run: autocommit, its settings, the lock, the history table; put back at the end."""
    if conn.info.server_version < _MINIMUM_SERVER:
        raise UnsupportedServerError(f"this server is {conn.info.server_version}. {UnsupportedServerError.__doc__}")
    autocommit = conn.autocommit
    conn.autocommit = True
    try:
        _take_lock(conn)
        _execute(conn, f"SET lock_timeout = '{_STATEMENT_LOCK_TIMEOUT}'")
        # A killed client's statement ends by itself instead of holding the lock for as long as it runs.
        _execute(conn, "SET client_connection_check_interval = '2s'")
        _execute(conn, "SET client_min_messages = 'warning'")
        # Not the default "$user", public: a login named afluente would make its tables in our schema of that name.
        _execute(conn, "SET search_path = public")
        _execute(conn, _HISTORY)
        yield
    finally:
        if not conn.closed:
            for setting in ("lock_timeout", "client_connection_check_interval", "client_min_messages", "search_path"):
                _execute(conn, f"RESET {setting}")
            conn.execute("SELECT pg_advisory_unlock(%s)", [_LOCK_KEY])
            conn.autocommit = autocommit


def _take_lock(conn: Connection[Any]) -> None:
    # Polled, not waited for: a session that waits inside pg_advisory_lock holds a snapshot, and a CREATE INDEX
    # CONCURRENTLY of the run before it waits for that snapshot: a deadlock that leaves an INVALID index.
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        row = conn.execute("SELECT pg_try_advisory_lock(%s)", [_LOCK_KEY]).fetchone()
        if row is not None and row[0]:
            return
        if time.monotonic() > deadline:
            raise LockTimeoutError(f"waited {_LOCK_TIMEOUT_S:.0f} s. {LockTimeoutError.__doc__}")
        time.sleep(_LOCK_POLL_INTERVAL_S)


def _read_history(conn: Connection[Any]) -> dict[int, _Applied]:
    rows = conn.execute(
        "SELECT version, name, checksum, applied_at, finished FROM migration.history ORDER BY version"
    ).fetchall()
    return {row[0]: _Applied(*row) for row in rows}


def _refuse_edited(applied: dict[int, _Applied]) -> None:
    edited = [
        migration.label
        for migration in migrations()
        if (record := applied.get(migration.version)) is not None
        and record.finished
        and record.checksum != migration.checksum
    ]
    if edited:
        raise EditedMigrationError(edited)


def _apply(conn: Connection[Any], migration: Migration) -> None:
    started = time.monotonic()
    if migration.in_transaction:
        with conn.transaction():
            _execute(conn, migration.up)
            _apply_functions(conn, needs=migration.version)
            _record(conn, migration, finished=True, started=started)
        return
    _record(conn, migration, finished=False, started=started)
    _drop_invalid_indexes(conn, migration.up)
    _execute(conn, migration.up)
    _apply_functions(conn, needs=migration.version)
    _record(conn, migration, finished=True, started=started)


def _take_back(conn: Connection[Any], migration: Migration) -> None:
    if migration.down_in_transaction:
        with conn.transaction():
            _execute(conn, migration.down)
            conn.execute("DELETE FROM migration.history WHERE version = %s", [migration.version])
        return
    _execute(conn, migration.down)
    conn.execute("DELETE FROM migration.history WHERE version = %s", [migration.version])


def _record(conn: Connection[Any], migration: Migration, *, finished: bool, started: float) -> None:
    conn.execute(
        """
        INSERT INTO migration.history (version, name, checksum, duration_ms, finished)
        VALUES (%(version)s, %(name)s, %(checksum)s, %(duration_ms)s, %(finished)s)
        ON CONFLICT (version) DO UPDATE
            SET name = excluded.name, checksum = excluded.checksum, applied_at = clock_timestamp(),
                duration_ms = excluded.duration_ms, finished = excluded.finished
        """,
        {
            "version": migration.version,
            "name": migration.name,
            "checksum": migration.checksum,
            "duration_ms": int((time.monotonic() - started) * 1000),
            "finished": finished,
        },
    )


def _drop_invalid_indexes(conn: Connection[Any], statement: str) -> None:
    """What a killed CREATE INDEX CONCURRENTLY left: IF NOT EXISTS would take it for the index."""
    rows = conn.execute(
        "SELECT c.relname, c.oid::regclass::text FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid"
        " WHERE NOT i.indisvalid AND c.relkind = 'i'"
    ).fetchall()
    for name, qualified in rows:
        if re.search(rf"\b{re.escape(name)}\b", statement):
            _execute(conn, f"DROP INDEX CONCURRENTLY {qualified}")


def _apply_functions(conn: Connection[Any], needs: int | None = None) -> None:
    """Apply the functions of one migration (inside its transaction), or of all that are applied."""
    applied = _read_history(conn).keys()
    chosen = [
        function
        for function in functions()
        if (function.needs in applied if needs is None else function.needs == needs)
    ]
    if not chosen:
        return
    with conn.transaction():
        # Bodies are checked when they run: a body of today may name a column that a later migration adds.
        _execute(conn, "SET LOCAL check_function_bodies = off")
        for function in chosen:
            _execute(conn, function.text)


def _execute(conn: Connection[Any], statement: str) -> None:
    # Without parameters psycopg sends the text whole, so dollar-quoted bodies need no splitter. Our own files and
    # constants are the only text that comes here.
    conn.execute(statement.encode(), prepare=False)
