"""The archive's files: written whole or not at all, and checked before they are read.

A new day is two renames, its manifest the last: a file without one is a cut-off attempt, which the next one replaces.
A changed day is three, so that a reader finds a whole day at every moment:

    1. 29.manifest.json.next     what will hold
    2. 29.ndjson.gz              from here on `next` is the manifest that fits
    3. 29.manifest.json          `next` renamed

Whoever is killed in between leaves a state that readers understand and the next writer settles.
"""

from __future__ import annotations

import fcntl
import gzip
import os
import secrets
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, date, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, cast
from uuid import UUID

from afluente.archive.errors import Altered, Incomplete, MissingDay, Occupied
from afluente.archive.format import TABLE, Contents, Manifest, id_of, row_of
from schemas import Row

COMPRESSION = 6
_BLOCK = 1 << 20
_TIMES = 3  # a day may be rewritten between the reading of its manifest and the opening of its file
_TEMPORARY = ".tmp"


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def days(directory: str | Path) -> list[date]:
    """The days there are files of, in order. Nothing is checked but the names."""
    found = set()
    for path in (Path(directory) / TABLE).glob("[0-9][0-9][0-9][0-9]/[0-9][0-9]/[0-9][0-9].*"):
        if path.name[2:] in (".ndjson.gz", ".manifest.json"):
            with suppress(ValueError):
                found.add(date(int(path.parts[-3]), int(path.parts[-2]), int(path.name[:2])))
    return sorted(found)


def read(directory: str | Path, *, since: datetime | None = None, until: datetime | None = None) -> Iterator[Row]:
    """The archived rows with since <= created_at < until, day by day, within a day by seq; None: no bound.

    A day is checked (its count of bytes and its sha256) before its first row is given out. Raises Altered, Incomplete,
    and MissingDay for a day between two archived ones; days before the first and after the last are no error, `days`
    tells them.
    """
    there = days(directory)
    whole = [there[0] + timedelta(days=n) for n in range((there[-1] - there[0]).days + 1)] if there else []
    if missing := sorted(set(_between(whole, since, until)) - set(there)):
        raise MissingDay(missing[0])
    for day in _between(there, since, until):
        for line in _lines(directory, day):
            row = _row(directory, day, line)
            if (since is None or since <= row.created_at) and (until is None or row.created_at < until):
                yield row


def find(directory: str | Path, ids: Iterable[UUID]) -> Iterator[Row]:
    """The archived rows of these events, as they are found; the caller sees which are not.

    Goes day by day and ends with the last one found. It begins where the ids say that the events were emitted (they are
    uuidv7; a day earlier, for clocks that differ), at the first day when one of them does not say it. Raises like
    `read`, but for days that are not archived.
    """
    left = {str(event_id).encode(): event_id for event_id in ids}
    emitted = [_day_of(event_id) for event_id in left.values()]
    begin = None if None in emitted or not emitted else min(cast("list[date]", emitted)) - timedelta(days=1)
    for day in days(directory):
        if not left:
            return
        if begin is not None and day < begin:
            continue
        with closing(_lines(directory, day)) as lines:
            for line in lines:
                if left.pop(id_of(line), None) is not None:
                    yield _row(directory, day, line)


def read_manifest(directory: str | Path, day: date) -> Manifest | None:
    """What the day holds, without opening its file; None when it is not archived. Raises Altered and Incomplete."""
    folder = _folder(directory, day)
    data = _data(folder, day)
    if not data.exists() and not _manifest(folder, day).exists():
        return None
    if _next(folder, day).exists():
        with _checked(directory, day) as (manifest, _):
            return manifest
    manifest = _load(_manifest(folder, day), day)
    if not data.exists():
        raise Incomplete(data)
    _require_size(data, data.stat().st_size, manifest)
    return manifest


def _between(found: list[date], since: datetime | None, until: datetime | None) -> list[date]:
    first = None if since is None else since.astimezone(UTC).date()
    end = None if until is None else (until.astimezone(UTC) - timedelta(microseconds=1)).date()
    return [day for day in found if (first is None or day >= first) and (end is None or day <= end)]


def _lines(directory: str | Path, day: date) -> Generator[bytes, None, None]:
    with _checked(directory, day) as (manifest, file):
        count = 0
        with gzip.GzipFile(fileobj=file, mode="rb") as lines:
            for line in lines:
                count += 1
                yield line
        if count != manifest.rows:
            raise Altered(_data(_folder(directory, day), day), f"has {count} rows; its manifest says {manifest.rows}")


def _row(directory: str | Path, day: date, line: bytes) -> Row:
    try:
        return row_of(line)
    except ValueError as error:
        raise Altered(_data(_folder(directory, day), day), f"has a line that is none of ours: {error}") from error


@contextmanager
def _checked(directory: str | Path, day: date) -> Iterator[tuple[Manifest, BinaryIO]]:
    """The day's file, open, and the manifest that it fits."""
    folder = _folder(directory, day)
    data = _data(folder, day)
    for attempt in range(1, _TIMES + 1):
        manifest = _load(_manifest(folder, day), day)
        try:
            file = data.open("rb")
        except FileNotFoundError:
            raise Incomplete(data) from None
        with file:
            found = _hash(file)
            if found != manifest.sha256 and (after := _pending(folder, day)) is not None and after.sha256 == found:
                manifest = after
            if found == manifest.sha256:
                file.seek(0)
                yield manifest, file
                return
            size = os.fstat(file.fileno()).st_size
        if attempt == _TIMES:
            _require_size(data, size, manifest)
            raise Altered(data, "was altered: it has the right size, and another sha256 than its manifest says")


def _require_size(path: Path, size: int, manifest: Manifest) -> None:
    if size < manifest.size:
        raise Altered(path, f"is truncated: it has {size} bytes of the {manifest.size} that its manifest says")
    if size > manifest.size:
        raise Altered(path, f"was altered: it has {size} bytes, {size - manifest.size} more than its manifest says")


def _load(path: Path, day: date) -> Manifest:
    try:
        manifest = Manifest.parse(path.read_bytes())
    except FileNotFoundError:
        folder = path.parent
        missing_both = not _data(folder, day).exists()
        raise MissingDay(day) if missing_both else Incomplete(path) from None
    except ValueError as error:
        raise Altered(path, str(error)) from error
    if manifest.day != day:
        raise Altered(path, f"is that of {manifest.day}")
    return manifest


def _pending(folder: Path, day: date) -> Manifest | None:
    try:
        return Manifest.parse(_next(folder, day).read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def _hash(file: BinaryIO) -> str:
    found = sha256()
    while block := file.read(_BLOCK):
        found.update(block)
    return found.hexdigest()


def _day_of(event_id: UUID) -> date | None:
    """When a uuidv7 was made."""
    if (event_id.int >> 76) & 0xF != 7:
        return None
    try:
        return datetime.fromtimestamp((event_id.int >> 80) / 1000, UTC).date()
    except (ValueError, OverflowError, OSError):
        return None


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def write(directory: str | Path, day: date, rows: Iterable[Row]) -> Manifest:
    """Archive `day`: all of its rows, by seq. Returns the manifest that stands afterwards.

    A day that is archived with the same rows is left as it is; Occupied when they are others. NotArchivable for a row
    of another day, or not by seq: nothing is written then. What one writes while another archives the same day, the
    second to finish finds there.
    """
    folder = _folder(directory, day)
    _make(folder, Path(directory))
    with _temporary(folder, day) as (temporary, file):
        manifest = _fill(file, day, rows)
        with _locked(folder):
            _settle(folder, day)
            if _manifest(folder, day).exists():
                standing = _load(_manifest(folder, day), day)
                if not manifest.same_content(standing):
                    raise Occupied(_data(folder, day), f"{standing.rows} rows there, {manifest.rows} to be written")
                with _checked(directory, day):
                    return standing
            _rename(temporary, _data(folder, day))
            _put(folder, _manifest(folder, day), manifest.format())
    return manifest


def rewrite(directory: str | Path, day: date, change: Callable[[Row], Row | None]) -> Manifest:
    """Give every row of an archived day to `change`, and keep what it returns; None leaves the row out.

    For erasure. A reader finds the day as it was or as it is, never in between. Returns the manifest that stands
    afterwards: the same one if nothing changed. Raises MissingDay, Altered, Incomplete; NotArchivable when a changed
    row would not be of this day or in this place.
    """
    folder = _folder(directory, day)
    if not folder.exists():
        raise MissingDay(day)
    with _locked(folder), _temporary(folder, day) as (temporary, file):
        _settle(folder, day)
        with _checked(directory, day) as (standing, _):
            pass
        rows = (_row(directory, day, line) for line in _lines(directory, day))
        manifest = _fill(file, day, (changed for row in rows if (changed := change(row)) is not None))
        if manifest.same_content(standing):
            return standing
        _put(folder, _next(folder, day), manifest.format())
        _rename(temporary, _data(folder, day))
        _rename(_next(folder, day), _manifest(folder, day))
    return manifest


def _fill(file: BinaryIO, day: date, rows: Iterable[Row]) -> Manifest:
    """Write the lines, durably."""
    contents = Contents(day)
    # No name and no time in the header: the same rows are the same bytes.
    with gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=COMPRESSION, mtime=0) as lines:
        for row in rows:
            lines.write(contents.take(row))
    size = file.tell()
    os.fsync(file.fileno())
    file.seek(0)
    return contents.manifest(size, _hash(file))


def _settle(folder: Path, day: date) -> None:
    """Finish or undo what a killed `rewrite` began; under the lock."""
    pending = _next(folder, day)
    if not pending.exists():
        return
    if not _data(folder, day).exists():
        raise Incomplete(_data(folder, day))
    after = _pending(folder, day)
    with _data(folder, day).open("rb") as file:
        done = after is not None and _hash(file) == after.sha256
    if done:
        _rename(pending, _manifest(folder, day))
    else:
        pending.unlink()


@contextmanager
def _temporary(folder: Path, day: date) -> Iterator[tuple[Path, BinaryIO]]:
    """A file of this process in `folder`, gone afterwards unless it was renamed. Those of killed writers go too."""
    for path in folder.glob(f".{day:%d}.*{_TEMPORARY}"):
        with suppress(OSError), path.open("rb") as left:
            fcntl.flock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)  # whoever lives holds it
            path.unlink()
    path = folder / f".{day:%d}.{secrets.token_hex(4)}{_TEMPORARY}"
    try:
        with path.open("xb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield path, file
    finally:
        with suppress(FileNotFoundError):
            path.unlink()


def _put(folder: Path, path: Path, text: bytes) -> None:
    temporary = folder / f".{path.name}.{secrets.token_hex(4)}{_TEMPORARY}"
    try:
        with temporary.open("xb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        _rename(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


def _rename(source: Path, target: Path) -> None:
    os.replace(source, target)
    _sync_folder(target.parent)


def _make(folder: Path, directory: Path) -> None:
    """The folders of a day, and that they exist, made durable."""
    if folder.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    while folder != directory:
        folder = folder.parent
        _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One at a time changes the days of a month."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _folder(directory: str | Path, day: date) -> Path:
    return Path(directory) / TABLE / f"{day.year:04d}" / f"{day.month:02d}"


def _data(folder: Path, day: date) -> Path:
    return folder / f"{day:%d}.ndjson.gz"


def _manifest(folder: Path, day: date) -> Path:
    return folder / f"{day:%d}.manifest.json"


def _next(folder: Path, day: date) -> Path:
    return folder / f"{day:%d}.manifest.json.next"
