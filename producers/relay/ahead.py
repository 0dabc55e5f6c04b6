"""The next chunks of an open window, made ready while the present one is on its way to the broker.

Three at a time: one is published, the one after is encoded, the one after that is read. What must stay true:
- never more chunks than these, so memory is that of three;
- a chunk is used only for the entry it was read from, so what is read ahead decides nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from producers.relay.position import Entry, Head
from producers.relay.records import Record
from producers.relay.source import Chunk, Source
from schemas import RawRow

CLOSE_WITHIN_S = 5.0

Found = TypeVar("Found")


@dataclass(slots=True)
class Prepared:
    """The records of a chunk, and the entry that holds once they are published."""

    records: list[Record]
    after: Entry


class Ahead:
    """For the publishing thread alone. `make` turns a row into its record, in whichever thread."""

    def __init__(self, source: Source, make: Callable[[RawRow], Record]) -> None:
        self._source, self._make = source, make
        self._encoding: _Task[Prepared] | None = None
        self._reading: _Task[Chunk] | None = None  # touched by the encoding thread while there is one

    def next(self, entry: Entry, *, rows: int | None = None, head: Head | None = None) -> Prepared:
        """What comes after `entry`, up to `rows` (default: the source's bound); a new window ends at `head` when it is
        given. Raises what reading raised."""
        task, self._encoding = self._encoding, None
        if task is not None:
            task.join()
        if rows is not None or task is None or task.entry != entry:
            if self._reading is not None:
                self._reading.join()
                self._reading = None
            found = self._prepare(entry, rows, head)
        else:
            found = task.result()
        if rows is None and found.after.window is not None:
            self._encoding = _Task(found.after, self._prepare)
            self._encoding.start()
        return found

    def close(self) -> None:
        """Forget what was read ahead. A server that does not answer is not waited for without end."""
        if self._encoding is not None:
            self._encoding.join(CLOSE_WITHIN_S)
        if self._reading is not None:  # asked only now: the encoding thread may have begun to read
            self._reading.join(CLOSE_WITHIN_S)

    def _prepare(self, entry: Entry, rows: int | None = None, head: Head | None = None) -> Prepared:
        task, self._reading = self._reading, None
        if task is not None:
            task.join()
        if task is not None and task.entry == entry:
            chunk = task.result()
        else:
            chunk = self._source.chunk(entry, rows=rows, head=head)
        if rows is None and chunk.after.window is not None:
            self._reading = _Task(chunk.after, self._source.chunk)
            self._reading.start()
        return Prepared([self._make(row) for row in chunk.rows], chunk.after)


class _Task(threading.Thread, Generic[Found]):
    """`do(entry)` in a thread; `join`, then `result`."""

    def __init__(self, entry: Entry, do: Callable[[Entry], Found]) -> None:
        super().__init__(name="relay-ahead", daemon=True)
        self.entry = entry
        self._do = do
        self._found: Found | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._found = self._do(self.entry)
        except BaseException as error:
            self._error = error

    def result(self) -> Found:
        if self._error is not None:
            raise self._error
        assert self._found is not None
        return self._found
