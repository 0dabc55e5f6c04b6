"""Reading `event_log`: the poll, the pages of a window, and the facts a position is checked against.

What must stay true:
- a chunk is bounded, in rows and in bytes, whatever a window holds, and so is what libpq keeps of it;
- nothing is waited for: a transaction that is open is simply not in the snapshot yet;
- one connection, autocommit: no transaction of ours stays open while Kafka is waited for, so none holds back VACUUM;
- an entry of some organizations passes over the rows of all others at a bounded number of seqs a query;
- plans use the indexes from the first row on. A table without statistics looks small, and a plan made then would be
  kept; so the session has no other way than index scans.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, cast
from uuid import UUID

import psycopg
from psycopg.types.numeric import Int8, Int8BinaryLoader
from psycopg.types.string import ByteaBinaryLoader

import sql
from afluente import postgres
from producers.relay.errors import OnStandby
from producers.relay.position import SLOTS, DatabaseIdentity, Entry, Head, Snapshot, Witness, holds
from schemas import RawRow

# A Kafka transaction costs 2-10 ms whatever is in it, while the next chunk is made ready: larger ones gain nothing, and
# two are in memory.
CHUNK_ROWS = 2_500
CHUNK_BYTES = 8 * 1024 * 1024  # payload and metadata; rows of 272 KiB are allowed, and 2,500 of them are not memory
POLL_ROWS = 50  # the poll's own rows come as one result; 50 of the largest are 14 MB
SCAN_SEQS = 100_000  # of other organizations' rows that one query passes over
FETCH_ROWS = 64  # rows libpq holds at a time while a page is streamed
COUNT_LIMIT = 1_000_000

_SESSION = """
SELECT set_config('enable_seqscan', 'off', false), set_config('enable_bitmapscan', 'off', false),
       set_config('jit', 'off', false), set_config('max_parallel_workers_per_gather', '0', false),
       set_config('plan_cache_mode', 'force_generic_plan', false), set_config('TimeZone', 'UTC', false),
       set_config('statement_timeout', '60s', false), set_config('synchronous_commit', 'on', false),
       set_config('client_encoding', 'UTF8', false)
"""
_UNPREPARED = 10**9  # psycopg prepares what it has seen more often; only the poll is to be prepared

_QUERIES = sql.queries("relay")
# Which organizations an entry covers, put into the queries' WHERE. No index is to be chosen for it.
_SCOPE = "/* scope */"
_OF_SLOTS = (
    "AND get_byte(%(slots)s::bytea, get_byte(uuid_send(e.organization_id), 15)) = 1 "
    "AND (e.organization_id = ANY (%(without)s::uuid[])) IS NOT TRUE"
)
_OF_ONE = "AND (e.organization_id = %(organization)s::uuid) IS TRUE"


@dataclass(frozen=True, slots=True)
class Facts:
    """Where we are connected, and the highest seq ever given out there."""

    identity: DatabaseIdentity
    last_seq: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """`rows` in the order of seq, and the entry that holds once they are published."""

    rows: Sequence[RawRow]
    after: Entry


@dataclass(frozen=True, slots=True)
class Waiting:
    """Committed rows that are not published (`at_least` when the count was cut), and when the oldest was written."""

    rows: int
    at_least: bool
    oldest: datetime | None


@dataclass(frozen=True, slots=True)
class Lane:
    """Who owns a lane, how long it has not renewed its lease, and the Kafka cluster it has published to (if it has)."""

    instance: str | None
    owned_since: datetime | None
    silent_s: float | None
    takeovers: int
    claimed_on: str | None


class Source:
    """One connection to the primary, for one thread at a time: the others wait.

    Any psycopg.Error means: close, make a new Source, check it, go on.
    """

    def __init__(
        self, url: str, *, chunk_rows: int = CHUNK_ROWS, chunk_bytes: int = CHUNK_BYTES, poll_rows: int = POLL_ROWS
    ) -> None:
        self._most_rows, self._most_bytes, self._poll_rows = chunk_rows, chunk_bytes, min(poll_rows, chunk_rows)
        self.share(1)
        self._lock = threading.Lock()
        self._empty_at: Entry | None = None  # where the last poll found nothing
        self._conn = postgres.connect(url, application_name="afluente-relay", autocommit=True)
        try:
            self._conn.prepare_threshold = _UNPREPARED
            # Rows are read in binary form, and nothing else is: texts as their bytes, moments as the number they are.
            self._conn.adapters.register_loader("text", ByteaBinaryLoader)
            self._conn.adapters.register_loader("timestamptz", Int8BinaryLoader)
            self._conn.execute(_SESSION)
            self._since = "-infinity"
        except BaseException:
            self._conn.close()
            raise

    def close(self) -> None:
        self._conn.close()

    def share(self, entries: int) -> None:
        """So many entries are read in turns: together their chunks are to be as large as one."""
        self._chunk_rows = max(1, self._most_rows // entries)
        self._chunk_bytes = self._most_bytes // entries

    def facts(self) -> Facts:
        """Raises OnStandby on one."""
        in_recovery, system, timeline, oid, name, last_seq = self._one("facts")
        if in_recovery:
            raise OnStandby()
        return Facts(DatabaseIdentity(system, timeline, oid, name), last_seq)

    def leave_out_sealed(self, entries: Sequence[Entry]) -> None:
        """Read only the months that one of `entries` may still have rows in. Not doing so costs time, nothing else."""
        xmin, t1 = min(entry.s1.xmin for entry in entries), min(entry.t1 for entry in entries)
        self._since = self._one("unsealed_since", xmin=str(xmin), t1=t1)[0]

    def head(self) -> Head:
        """The present snapshot, and the highest seq it can show."""
        snapshot, top = self._one("head", since=self._since)
        return Head(Snapshot.parse(snapshot), top)

    def chunk(self, entry: Entry, *, rows: int | None = None, head: Head | None = None) -> Chunk:
        """What comes next: up to `rows` (default: the chunk's bound) of the open window, or of a new one that ends at
        `head` (default: at the present).

        A chunk without rows moves only the position. A window has ended when fewer rows come than asked for.
        """
        wanted = min(rows or self._chunk_rows, self._chunk_rows)
        first = min(self._poll_rows, wanted)
        found: list[RawRow] = []
        if entry.window is None:
            if entry.everyone and head is None:
                # An equal snapshot shows the same rows: no transaction has ended since. Only of this connection's own
                # poll, as a crash of Postgres gives ids out again.
                if entry == self._empty_at and self._snapshot() == str(entry.s1):
                    return Chunk([], entry)
                head, found = self._poll(entry, first)
                entry = entry.opened(head)
                if len(found) < first:
                    after = entry.completed()
                    self._empty_at = None if found else after
                    return Chunk(found, after)
            else:
                entry = entry.opened(head or self.head())
                found = self._glance(entry, first)
                if len(found) < first:
                    return Chunk(found, _passed(entry))
            entry = entry.read_to(found[-1].seq)
        size = sum(len(row.payload) + len(row.metadata) for row in found)
        if (asked := wanted - len(found)) > 0 and size < self._chunk_bytes:
            before = len(found)
            with self._lock, closing(self._page(entry, asked)) as page:
                for row in page:
                    found.append(row)
                    size += len(row.payload) + len(row.metadata)
                    if size >= self._chunk_bytes:
                        break
                else:
                    if len(found) - before < asked:
                        return Chunk(found, _passed(entry))
            entry = entry.read_to(found[-1].seq)
        return Chunk(found, entry)

    def waiting(self, entry: Entry) -> Waiting:
        """How far behind `entry` is."""
        found = self.lag(entry)
        count = sum(rows for _, rows, _ in found)
        return Waiting(min(count, COUNT_LIMIT), count >= COUNT_LIMIT, min((at for *_, at in found), default=None))

    def lag(self, entry: Entry, rows: int = COUNT_LIMIT) -> list[tuple[UUID, int, datetime]]:
        """The committed rows that `entry` leaves unpublished, by organization: how many, and when the oldest of them
        was written. Of rows in order and of late ones `rows` are counted at most."""
        last = entry.window.last if entry.window is not None else 0
        query, scope = _scoped("lag", entry)
        with self._lock:
            return self._conn.execute(
                query, {**self._place(entry), **scope, "last": Int8(last), "rows": rows}
            ).fetchall()

    def release_due(self, rows: int = 1_000) -> int:
        """Move deferred events that are due into event_log; returns how many."""
        return cast(int, self._one("release_due", rows=rows)[0])

    def lane(self, name: str) -> Lane | None:
        """The lane's row, if it ever had an owner."""
        with self._lock:
            row = self._conn.execute(_query("lane"), {"name": name}).fetchone()
        return None if row is None else Lane(*row)

    def has(self, witness: Witness) -> bool:
        """Is this row still what it was? True too when its month has left the table, and all that was before it."""
        return cast(bool, self._one("has", seq=Int8(witness.seq), id=witness.id)[0])

    def published_to(self, topic_prefix: str) -> str | None:
        """The Kafka cluster to which some lane of this prefix has published; None when none ever did."""
        return cast(str | None, self._one("published_to", prefix=topic_prefix)[0])

    def owners(self, topic_prefix: str) -> list[str]:
        """The instances that own a lane of this prefix and are alive, or were a few seconds ago."""
        with self._lock:
            return [row[0] for row in self._conn.execute(_query("owners"), {"prefix": topic_prefix})]

    def mark_claimed(self, lane: str, cluster_id: str) -> None:
        with self._lock:
            self._conn.execute(_query("mark_claimed"), {"name": lane, "cluster_id": cluster_id})

    def _poll(self, entry: Entry, rows: int) -> tuple[Head, list[RawRow]]:
        head, found = None, []
        with self._lock:
            cursor = self._conn.cursor(binary=True, row_factory=_row_factory)
            cursor.execute(_query("poll"), {**self._place(entry), "rows": Int8(rows)}, prepare=True)
            for row in cursor:
                if row.seq is None:
                    head = Head(Snapshot.parse(row.event_type.decode()), int(row.entity_kind))
                else:
                    found.append(row)
        assert head is not None
        return head, found

    def _snapshot(self) -> str:
        with self._lock:
            row = self._conn.execute(_query("snapshot"), prepare=True).fetchone()
        assert row is not None
        return cast(str, row[0])

    def _glance(self, entry: Entry, rows: int) -> list[RawRow]:
        """The first rows of a window: few, mostly none, so by a prepared statement."""
        query, place = self._page_query(entry, rows)
        with self._lock:
            return (
                self._conn.cursor(binary=True, row_factory=_row_factory).execute(query, place, prepare=True).fetchall()
            )

    def _page(self, entry: Entry, rows: int) -> Generator[RawRow, None, None]:
        query, place = self._page_query(entry, rows)
        cursor = self._conn.cursor(row_factory=_row_factory)
        yield from cursor.stream(query, place, binary=True, size=FETCH_ROWS)

    def _page_query(self, entry: Entry, rows: int) -> tuple[str, dict[str, Any]]:
        assert entry.window is not None
        window = entry.window
        query, scope = _scoped("tail" if window.last >= entry.t1 else "page", entry)
        place = {**self._place(entry), **scope, "s2": str(window.s2), "t2": Int8(_reach(entry))}
        return query, place | {"last": Int8(window.last), "rows": Int8(rows)}

    def _place(self, entry: Entry) -> dict[str, Any]:
        return {
            "since": self._since,
            "xmax": str(entry.s1.xmax),
            "xip": "{" + ",".join(map(str, entry.s1.xip)) + "}",
            "t1": Int8(entry.t1),
        }

    def _one(self, name: str, **parameters: Any) -> tuple[Any, ...]:
        return self._row(_query(name), parameters)

    def _row(self, query: str, parameters: dict[str, Any]) -> tuple[Any, ...]:
        with self._lock:
            row = self._conn.execute(query, parameters).fetchone()
        assert row is not None
        return row


def seal_months(conn: psycopg.Connection[Any], entry: Entry) -> int:
    """Seal the months that are over and published up to `entry`; returns how many. On a connection of its own: it may
    wait a few seconds for a writer of the month.

    Other entries may be behind: they go on reading a sealed month until they are past its last transaction.
    """
    if entry.window is not None:
        return 0
    row = conn.execute(_query("seal"), {"s1": str(entry.s1), "t1": Int8(entry.t1)}).fetchone()
    assert row is not None
    return cast(int, row[0])


def ensure_partitions(conn: psycopg.Connection[Any]) -> int:
    """Make the months ahead; returns how many were missing."""
    row = conn.execute(_query("ensure_partitions")).fetchone()
    assert row is not None
    return cast(int, row[0])


# As RawRow._make does, without a Python frame.
_make_row = cast(Callable[[Sequence[Any]], RawRow], partial(tuple.__new__, RawRow))


def _row_factory(cursor: psycopg.Cursor[Any]) -> Callable[[Sequence[Any]], RawRow]:
    return _make_row


def _query(name: str) -> str:
    return _QUERIES[name]


def _scoped(name: str, entry: Entry) -> tuple[str, dict[str, Any]]:
    """A query for the organizations that `entry` covers, with the parameters this needs."""
    query = _QUERIES[name]
    if entry.organization is not None:
        return query.replace(_SCOPE, _OF_ONE), {"organization": entry.organization}
    if entry.everyone:
        return query, {}
    mask = bytes(holds(entry.slots, slot) for slot in range(SLOTS))
    return query.replace(_SCOPE, _OF_SLOTS), {"slots": mask, "without": list(entry.without)}


def _reach(entry: Entry) -> int:
    """Up to which seq the next query of an open window looks."""
    assert entry.window is not None
    if entry.everyone:
        return entry.window.t2
    return min(entry.window.t2, max(entry.t1, entry.window.last) + SCAN_SEQS)


def _passed(entry: Entry) -> Entry:
    """After a query that found the last rows within its reach."""
    assert entry.window is not None
    return entry.completed() if (reach := _reach(entry)) == entry.window.t2 else entry.read_to(reach)
