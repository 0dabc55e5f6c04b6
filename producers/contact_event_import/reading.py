"""Files of contact events: CSV or NDJSON, plain or gzip, from a path or from standard input.

What must stay true: the same bytes give the same rows with the same line numbers, however often they are read; memory
does not grow with the file, nor with one line of it.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, cast

from afluente.errors import Refused
from producers.contact_event_import import rows
from producers.contact_event_import.rows import Rejected

MAX_LINE_BYTES = 1_048_576  # a payload holds 256 KiB; what is longer than this is another kind of file
_CHUNK_BYTES = 1_048_576
_DELIMITERS = (",", ";", "\t", "|")


class Format(StrEnum):
    csv = "csv"
    ndjson = "ndjson"


class Row(NamedTuple):
    """One row: the line it begins on, and what it says or why that cannot be read. `raw` is the row as it stands: the
    bytes of a JSON line, or the cells of a CSV."""

    line: int
    content: dict[str, Any] | Rejected
    raw: bytes | list[str]


class Source:
    """A file to import. As a context manager: what came from standard input is kept until the end."""

    def __init__(self, file: BinaryIO, name: str, format: Format | None = None) -> None:
        self._file = file
        self.name = name
        head = _head(file)
        self._gzip = head.startswith(b"\x1f\x8b")
        self.format = format or self._guess(name)
        self.sha256, self.lines = self._scan()

    @classmethod
    @contextmanager
    def open(cls, path: str, stdin: BinaryIO, format: Format | None = None) -> Iterator[Source]:
        """The file at `path`; `-` is standard input, which is put into a temporary file: it is read more than once."""
        if path == "-":
            with tempfile.TemporaryFile() as file:
                shutil.copyfileobj(stdin, file, _CHUNK_BYTES)
                yield cls(cast(BinaryIO, file), "stdin", format)
            return
        try:
            opened = Path(path).open("rb")  # noqa: SIM115 - closed below; only opening it is the person's mistake
        except OSError as error:
            raise Refused(f"cannot read {path}: {error.strerror}") from None
        with opened:
            yield cls(opened, Path(path).name[:255], format)

    def __iter__(self) -> Iterator[Row]:
        """Every row but the header of a CSV, from the beginning."""
        with self._opened() as file:
            yield from self._csv_rows(file) if self.format is Format.csv else self._json_rows(file)

    def header(self) -> list[str]:
        """The column titles of a CSV, as they stand; Refused when there is a column nobody knows."""
        with self._opened() as file:
            titles: list[str] | None = next(self._reader(file)[0], None)
        if titles is None:
            return []
        try:
            rows.columns(titles)
        except Rejected as error:
            raise Refused(f"{self.name}: {error.reason}") from None
        return titles

    def _guess(self, name: str) -> Format:
        words = name.lower().removesuffix(".gz").rsplit(".", 1)
        if words[-1] in ("ndjson", "jsonl", "json"):
            return Format.ndjson
        if words[-1] in ("csv", "tsv"):
            return Format.csv
        with self._opened() as file:
            return Format.ndjson if file.read(64).lstrip(b"\xef\xbb\xbf \r\n\t").startswith(b"{") else Format.csv

    def _scan(self) -> tuple[bytes, int]:
        """The sha256 of the file as it is, and how many lines it has."""
        digest, lines, last = hashlib.sha256(), 0, b"\n"
        self._file.seek(0)
        while chunk := self._file.read(_CHUNK_BYTES):
            digest.update(chunk)
        with self._opened() as file:
            while chunk := file.read(_CHUNK_BYTES):
                lines += chunk.count(b"\n")
                last = chunk[-1:]
        return digest.digest(), lines + (last != b"\n")

    @contextmanager
    def _opened(self) -> Iterator[IO[bytes]]:
        self._file.seek(0)
        if not self._gzip:
            yield self._file
            return
        with gzip.GzipFile(fileobj=self._file, mode="rb") as file:
            try:
                yield cast(IO[bytes], file)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise Refused(f"{self.name} is cut off or not gzip: {error}") from None

    def _json_rows(self, file: IO[bytes]) -> Iterator[Row]:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                while line and not line.endswith(b"\n"):
                    line = file.readline(_CHUNK_BYTES)
                yield Row(number, Rejected(f"is longer than {MAX_LINE_BYTES} bytes"), b"")
                continue
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not (line := line.strip()):
                continue
            try:
                yield Row(number, rows.parsed(line), line)
            except Rejected as error:
                yield Row(number, error, line)

    def _reader(self, file: IO[bytes]) -> tuple[Any, _Lines]:
        lines = _Lines(file)
        csv.field_size_limit(MAX_LINE_BYTES)
        delimiter = max(_DELIMITERS, key=lines.peek().count)
        return csv.reader(lines, delimiter=delimiter, strict=True), lines

    def _csv_rows(self, file: IO[bytes]) -> Iterator[Row]:
        reader, lines = self._reader(file)
        titles = next(reader, None)
        if titles is None:
            return
        try:
            fields = rows.columns(titles)
        except Rejected as error:
            raise Refused(f"{self.name}: {error.reason}") from None
        while True:
            line = lines.number + 1
            lines.begin_row()
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield Row(line, Rejected(f"not CSV: {error}"), [])
                continue
            if not cells:
                continue
            if lines.unfit is not None:
                yield Row(line, Rejected(lines.unfit), cells)
                continue
            try:
                yield Row(line, rows.row_of(fields, cells), cells)
            except Rejected as error:
                yield Row(line, error, cells)


class _Lines:
    """The lines of a CSV as text, for csv.reader; it says how many were read, and of the newest why they are unfit."""

    def __init__(self, file: IO[bytes]) -> None:
        # Not io.TextIOWrapper: it reads ahead and closes what it is given. What is not UTF-8 is a row's fault, not the
        # file's.
        self._file = file
        self._first: str | None = None
        self._row_length = 0
        self.number = 0
        self.unfit: str | None = None

    def begin_row(self) -> None:
        """What is read from now on is of another row: text in quotes goes over lines, and has its end somewhere."""
        self._row_length, self.unfit = 0, None

    def peek(self) -> str:
        """The first line."""
        self._first = self._file.readline(MAX_LINE_BYTES).decode("utf-8-sig", "surrogateescape")
        return self._first

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line, self._first = self._first, None
        if line is None:
            line = self._file.readline(MAX_LINE_BYTES).decode("utf-8", "surrogateescape")
        if not line:
            raise StopIteration
        # A piece of a line that is too long does not end one.
        self.number += line.endswith("\n") or len(line) < MAX_LINE_BYTES
        self._row_length += len(line)
        if self._row_length > 2 * MAX_LINE_BYTES:
            raise csv.Error("a row, with all lines of its texts in quotes, is longer than a payload may be")
        if (reason := rows.unfit(line)) is not None:
            self.unfit = reason
        return line


def _head(file: BinaryIO) -> bytes:
    file.seek(0)
    return file.read(2)
