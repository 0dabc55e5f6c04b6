"""An import: the rows of a file, judged here, recorded in Postgres by a few connections side by side.

What must stay true:
- A batch (so many rows of the file, counted from its beginning) is recorded in one transaction with its line in
  contact_event_import_batch. Killed anywhere, the next run of the same bytes leaves out exactly what is committed.
- A row without a name of its own is named by the file's content and its line, so that no run records it twice.
- Everything happens as `afluente_app` of the organization: row-level security holds, whatever the file names.
- Memory is bounded by batches, not by the file.

One thread reads and judges; each lane writes one batch at a time. They meet in a queue that holds no more than the
lanes can take.
"""

from __future__ import annotations

import csv
import json
import os
import queue
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from uuid import UUID
from zoneinfo import ZoneInfo

import psycopg
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

import sql
from afluente import faults, postgres
from afluente.errors import Refused
from producers.contact_event_import.reading import Format, Row, Source
from producers.contact_event_import.rows import FIELDS, Judge, Rejected

BATCH_ROWS = 5_000
LANES = 2
_TRIES = 5  # of a batch that another one's locks stood in the way of

_SQL = sql.queries("contact_event_import")

# Typed as the function wants them: COPY does the reading of texts. Of this session only, empty after each transaction.
_STAGING = "CREATE TEMPORARY TABLE contact_event_staging OF afluente.contact_event_item ON COMMIT DELETE ROWS"

_COPY = f"COPY contact_event_staging ({', '.join(FIELDS)}) FROM STDIN"

_QUOTED = re.compile(r'(?<=: )".*"')

_REASONS = {
    "unknown_contact": "no contact of the organization has this contact_id, phone, email or contact_external_id",
    "no_contact": "names no contact: contact_id, phone, email or contact_external_id",
    "no_type": "neither event_type nor metric",
    "bad_time": "occurred_at does not lie between the years 1 and 9999",
    "too_large": "properties are too large (256 KiB) or too deep (200 levels)",
}


@dataclass(frozen=True)
class Options:
    """What an import is told. `dry_run`: everything but the commits."""

    source: str | None = None
    timezone: str | None = None
    """Of times without an offset; the organization's when left out."""
    country: str = "BR"
    """Where phones without a country code are dialled."""
    create_contacts: bool = False
    again: bool = False
    dry_run: bool = False
    lanes: int = LANES
    batch_rows: int = BATCH_ROWS
    actor: str = "import"
    automations: bool = False
    """The facts may start automations, as if each had just happened. Old ones seldom should."""


@dataclass
class Result:
    """What came of it. rows read = recorded + duplicates + failed, those of earlier runs of the same file included."""

    import_id: UUID | None
    recorded: int = 0
    duplicates: int = 0
    failed: int = 0
    contacts_created: int = 0
    batches_before: int = 0
    """Batches that an earlier run had committed."""
    finished_before: bool = False
    """The whole file was recorded before: nothing was done."""
    interrupted: bool = False
    errors: list[tuple[int, str]] = field(default_factory=list)
    """Line and reason of the first ones."""


@dataclass(frozen=True)
class _Batch:
    number: int
    last_line: int
    items: list[tuple[Any, ...]]
    lines: list[int]
    """The line of the item that is called n."""
    errors: list[tuple[int, str]]


def run(
    url: str,
    organization_id: UUID,
    source: Source,
    options: Options,
    *,
    progress: Callable[[int], None] = lambda line: None,
    max_errors: int = 20,
    interrupt: threading.Event | None = None,
) -> Result:
    """Import a file. `progress` is told the lines that are through, from this thread.

    `interrupt`, when it is set, ends it after the batches under way: the result says so. psycopg.OperationalError when
    Postgres goes away; run it again.
    """
    if source.format is Format.csv:
        source.header()  # a column nobody knows is a reason not to begin
    with postgres.connect(url, application_name="afluente import") as conn:
        begun = _begin(conn, organization_id, source, options)
        if begun.result.finished_before:
            return begun.result
        lanes = [_Lane(url, organization_id, begun, options) for _ in range(options.lanes)]
        work: queue.Queue[_Batch | None] = queue.Queue(maxsize=len(lanes))
        done: queue.SimpleQueue[_Counts] = queue.SimpleQueue()
        stop, interrupt = threading.Event(), interrupt or threading.Event()
        threads = [
            threading.Thread(target=lane.run, args=(work, done, stop), name=f"import lane {n}", daemon=True)
            for n, lane in enumerate(lanes)
        ]
        for thread in threads:
            thread.start()
        counts = _Tally(progress, max_errors)
        try:
            for batch in _batches(source, begun, options):
                while not (stop.is_set() or interrupt.is_set()) and not _put(work, batch):
                    counts.take(done)
                if interrupt.is_set():
                    begun.result.interrupted = True
                    stop.set()  # what is queued is left; what a lane has in hand is finished
                if stop.is_set():
                    break
            _end_lanes(work, threads, lambda: counts.take(done))
        except BaseException:
            stop.set()
            _end_lanes(work, threads, lambda: None)
            raise
        counts.take(done)
        for lane in lanes:
            if lane.error is not None:
                raise lane.error
        return _end(conn, organization_id, begun, counts, options, max_errors)


def imports(conn: psycopg.Connection[Any], organization_id: UUID, limit: int) -> list[dict[str, Any]]:
    """The organization's imports, newest first, finished or not."""
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(_SQL["list"], {"organization_id": organization_id, "limit": limit}).fetchall()


def write_rejected(
    conn: psycopg.Connection[Any], result: Result, organization_id: UUID, source: Source, path: Path
) -> int:
    """Write the rejected rows, each with its line and the reason: a file to mend and import. Returns how many."""
    parameters = {"organization_id": organization_id, "import_id": result.import_id}
    with (
        conn.transaction(),
        postgres.act_for_sync(conn, organization_id),
        conn.cursor("rejected") as cursor,
        # Names and phones of people: nobody else's to read.
        open(path, "w", encoding="utf-8", newline="", opener=_private) as file,
    ):
        cursor.itersize = 1_000
        cursor.execute(_SQL["errors"], parameters)
        write, count = _writer(file, source), 0
        rejected: Iterator[tuple[int, str]] = iter(cursor)
        wanted = next(rejected, None)
        for row in source:
            if wanted is None:
                break
            if row.line == wanted[0]:
                write(row, *wanted)
                count += 1
                wanted = next(rejected, None)
    return count


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _writer(file: IO[str], source: Source) -> Callable[[Row, int, str], None]:
    if source.format is Format.csv:
        out = csv.writer(file, lineterminator="\n")
        titles = source.header()
        out.writerow([*titles, "_line", "_reason"])

        def cells(row: Row, line: int, reason: str) -> None:
            raw = [str(cell).encode("utf-8", "replace").decode() for cell in row.raw]
            out.writerow([*raw, *[""] * (len(titles) - len(raw)), line, reason])

        return cells

    def text(row: Row, line: int, reason: str) -> None:
        content = row.content
        if isinstance(content, Rejected):
            assert isinstance(row.raw, bytes)
            content = {"_text": row.raw.decode("utf-8", "replace")}
        said = {**content, "_line": line, "_reason": reason}
        file.write(json.dumps(said, ensure_ascii=False).encode("utf-8", "replace").decode() + "\n")

    return text


@dataclass(frozen=True)
class _Begun:
    result: Result
    batch_rows: int
    done: frozenset[int]
    judge: Judge


def _begin(conn: psycopg.Connection[Any], organization_id: UUID, source: Source, options: Options) -> _Begun:
    """The import of these bytes, begun now or before, and what of it is through."""
    with conn.transaction(force_rollback=options.dry_run), postgres.act_for_sync(conn, organization_id):
        row = conn.execute("SELECT timezone FROM organizations WHERE id = %s", [organization_id]).fetchone()
        if row is None:
            raise Refused(f"there is no organization {organization_id}")
        try:
            zone = ZoneInfo(options.timezone or row[0])
        except (KeyError, ValueError):
            raise Refused(f"there is no time zone {options.timezone or row[0]!r}") from None
        parameters = {
            "organization_id": organization_id,
            "file_name": source.name,
            "file_sha256": source.sha256,
            "batch_rows": options.batch_rows,
            "options": Jsonb({"source": options.source, "create_contacts": options.create_contacts}),
            "started_by": options.actor[:255],
        }
        import_id, batch_rows, began, told, finished_at = conn.execute(_SQL["begin"], parameters).fetchone()  # type: ignore[misc]
        if told["source"] not in (None, options.source):
            # Facts without a name of their own are named by file, line and source.
            raise Refused(
                f"this file was imported, or begun, at {began:%Y-%m-%d %H:%M} with --source {told['source']}: "
                "with another one its facts would count twice",
                hint="give the same --source",
            )
        if options.again:
            conn.execute(_SQL["restart"], parameters)
            import_id, batch_rows, _, _, finished_at = conn.execute(_SQL["begin"], parameters).fetchone()  # type: ignore[misc]
        parameters = {"organization_id": organization_id, "import_id": import_id}
        done = frozenset(number for (number,) in conn.execute(_SQL["batches"], parameters))
    result = Result(import_id, batches_before=len(done), finished_before=finished_at is not None)
    if result.finished_before:
        with conn.transaction(), postgres.act_for_sync(conn, organization_id):
            _totals(conn, organization_id, result)
    name = f"imported:{source.sha256.hex()[:16]}:"
    judge = Judge(
        source=options.source, timezone=zone, country=options.country, name_of_row=lambda line: f"{name}{line}"
    )
    return _Begun(result, batch_rows, done, judge)


def _batches(source: Source, begun: _Begun, options: Options) -> Iterator[_Batch]:
    """The batches that are not through, judged."""
    number, place = 0, 0
    items: list[tuple[Any, ...]] = []
    lines: list[int] = []
    errors: list[tuple[int, str]] = []
    wanted = 0 not in begun.done
    item, line = begun.judge.item, 0
    for line, content, _ in source:
        if wanted:
            try:
                if isinstance(content, Rejected):
                    raise content
                items.append(item(place, line, content))
            except Rejected as error:
                errors.append((line, error.reason))
            lines.append(line)
        place += 1
        if place == begun.batch_rows:
            if wanted:
                yield _Batch(number, line, items, lines, errors)
            number, place, items, lines, errors = number + 1, 0, [], [], []
            wanted = number not in begun.done
    if place and wanted:
        yield _Batch(number, line, items, lines, errors)


@dataclass(frozen=True)
class _Counts:
    """What one batch brought."""

    last_line: int
    recorded: int = 0
    duplicates: int = 0
    contacts_created: int = 0
    errors: Sequence[tuple[int, str]] = ()


class _Tally:
    """The sum of what this run's batches brought, and the first of the errors."""

    def __init__(self, progress: Callable[[int], None], max_errors: int) -> None:
        self._progress = progress
        self._max_errors = max_errors
        self._line = 0
        self.recorded = self.duplicates = self.failed = self.contacts_created = 0
        self.errors: list[tuple[int, str]] = []

    def take(self, done: queue.SimpleQueue[_Counts]) -> None:
        while not done.empty():
            counts = done.get()
            self.recorded += counts.recorded
            self.duplicates += counts.duplicates
            self.failed += len(counts.errors)
            self.contacts_created += counts.contacts_created
            self.errors = sorted([*self.errors, *counts.errors])[: self._max_errors]
            self._line = max(self._line, counts.last_line)
            self._progress(self._line)


class _Lane:
    """One connection that writes one batch after the other."""

    def __init__(self, url: str, organization_id: UUID, begun: _Begun, options: Options) -> None:
        self._url = url
        self._organization_id = organization_id
        self._import_id = begun.result.import_id
        self._options = options
        self.error: BaseException | None = None

    def run(self, work: queue.Queue[_Batch | None], done: queue.SimpleQueue[_Counts], stop: threading.Event) -> None:
        try:
            with postgres.connect(self._url, application_name="afluente import") as conn:
                with conn.transaction(), postgres.act_for_sync(conn, self._organization_id):
                    conn.execute(_STAGING)
                while (batch := work.get()) is not None:
                    if not stop.is_set():
                        done.put(self._write(conn, batch))
        except BaseException as error:
            self.error = error
            stop.set()

    def _write(self, conn: psycopg.Connection[Any], batch: _Batch) -> _Counts:
        for last_try in [False] * (_TRIES - 1) + [True]:
            try:
                with conn.transaction(force_rollback=self._options.dry_run):
                    with postgres.act_for_sync(conn, self._organization_id):
                        counts = self._record(conn, batch)
                    faults.point("import.before_commit")
                faults.point("import.after_commit")
                return counts
            except (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure):
                if last_try:
                    raise
        raise AssertionError("unreachable")

    @property
    def _metadata(self) -> dict[str, str]:
        told = {} if self._options.automations else {"automations": "no"}
        return {"source": "import", "actor_id": self._options.actor[:255], **told}

    def _record(self, conn: psycopg.Connection[Any], batch: _Batch) -> _Counts:
        """One batch, in the transaction that also says that it is through."""
        parameters = {"organization_id": self._organization_id, "import_id": self._import_id, "batch": batch.number}
        if not self._options.dry_run:
            claimed = conn.execute(_SQL["claim"], {**parameters, "last_line": batch.last_line}).fetchone()
            if claimed is None:  # another run of the same file was quicker
                return _Counts(batch.last_line)
        recorded = duplicates = created = 0
        errors = list(batch.errors)
        for part in self._parts(conn, batch.items):
            recorded, duplicates, created = recorded + part[0], duplicates + part[1], created + part[2]
            errors += [(batch.lines[n], _REASONS.get(reason, reason)) for n, reason in part[3]]
        errors.sort()
        if not self._options.dry_run:
            conn.execute(
                _SQL["count"],
                {
                    **parameters,
                    "recorded": recorded,
                    "duplicates": duplicates,
                    "rejected": len(errors),
                    "contacts_created": created,
                    "errors": Jsonb(errors),
                },
            )
        return _Counts(batch.last_line, recorded, duplicates, created, errors)

    def _parts(
        self, conn: psycopg.Connection[Any], items: list[tuple[Any, ...]]
    ) -> Iterator[tuple[int, int, int, list[tuple[int, str]]]]:
        """Record items: all at once, and when Postgres cannot take one of them, by halves until it stands alone."""
        if not items:
            return
        try:
            with conn.transaction(), conn.cursor() as cursor:
                with cursor.copy(_COPY) as copy:
                    for item in items:
                        copy.write_row(item)
                row = cursor.execute(
                    _SQL["record"],
                    {
                        "first": items[0][0],
                        "last": items[-1][0],
                        "create_contacts": self._options.create_contacts,
                        "metadata": Jsonb(self._metadata),
                    },
                ).fetchone()
            assert row is not None
            duplicates, created, rejected = row
            yield len(items) - duplicates - len(rejected), duplicates, created, rejected
        except (psycopg.DataError, psycopg.IntegrityError) as error:
            if len(items) == 1:
                # Without the value that it quotes: reasons are kept, personal data is not.
                reason = _QUOTED.sub('"..."', error.diag.message_primary or type(error).__name__)
                yield 0, 0, 0, [(items[0][0], reason)]
                return
            half = len(items) // 2
            yield from self._parts(conn, items[:half])
            yield from self._parts(conn, items[half:])


def _put(work: queue.Queue[_Batch | None], batch: _Batch | None) -> bool:
    try:
        work.put(batch, timeout=0.1)
    except queue.Full:
        return False
    return True


def _end_lanes(
    work: queue.Queue[_Batch | None], threads: Sequence[threading.Thread], meanwhile: Callable[[], None]
) -> None:
    """Wait until the lanes have done what is queued, and have ended."""
    told = 0
    while alive := [thread for thread in threads if thread.is_alive()]:
        if told < len(threads):
            told += _put(work, None)
        else:
            alive[0].join(0.1)
        meanwhile()


def _end(
    conn: psycopg.Connection[Any],
    organization_id: UUID,
    begun: _Begun,
    counts: _Tally,
    options: Options,
    max_errors: int,
) -> Result:
    result = begun.result
    if options.dry_run:
        result.import_id = None
        result.recorded, result.duplicates, result.failed = counts.recorded, counts.duplicates, counts.failed
        result.contacts_created, result.errors = counts.contacts_created, counts.errors
        return result
    with conn.transaction(), postgres.act_for_sync(conn, organization_id):
        parameters = {"organization_id": organization_id, "import_id": result.import_id}
        if not result.interrupted:
            conn.execute(_SQL["finish"], {**parameters, "actor": options.actor[:255]})
        _totals(conn, organization_id, result)
        result.errors = conn.execute(
            f"{_SQL['errors']} LIMIT %(limit)s", {**parameters, "limit": max_errors}
        ).fetchall()
    return result


def _totals(conn: psycopg.Connection[Any], organization_id: UUID, result: Result) -> None:
    row = conn.execute(_SQL["totals"], {"organization_id": organization_id, "import_id": result.import_id}).fetchone()
    assert row is not None
    result.recorded, result.duplicates, result.failed, result.contacts_created, _ = row
