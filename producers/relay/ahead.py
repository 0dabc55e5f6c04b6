"""The next chunk of an open window, read and encoded while the present one is on its way to the broker.

What must stay true:
- the source has one user at a time: whoever else wants it calls `settle` first;
- never more than one chunk ahead, so memory is that of two;
- a chunk is used only for the entry it was read from, so what is read ahead decides nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from producers.relay.position import Entry
from producers.relay.records import Record
from producers.relay.source import Source
from schemas import Row

CLOSE_WITHIN_S = 5.0


@dataclass(slots=True)
class Prepared:
    """The records of a chunk, and the entry that holds once they are published."""

    records: list[Record]
    after: Entry


class Ahead:
    """For the publishing thread alone. `make` turns a row into its record, in either thread."""

    def __init__(self, source: Source, make: Callable[[Row], Record]) -> None:
        self._source, self._make = source, make
        self._running: _Preparation | None = None

    def next(self, entry: Entry, *, rows: int | None = None) -> Prepared:
        """What comes after `entry`, up to `rows` (default: the source's bound). Raises what reading raised."""
        found: Prepared | None = None
        if (running := self._running) is not None:
            self._running = None
            running.join()
            if running.entry == entry and rows is None:
                found = running.result()
        found = found or self._prepare(entry, rows)
        if rows is None and found.records and found.after.window is not None:
            self._running = _Preparation(found.after, self._prepare)
            self._running.start()
        return found

    def settle(self) -> None:
        """Wait until nobody is in the source."""
        if self._running is not None:
            self._running.join()

    def close(self) -> None:
        """Forget what was read ahead. A server that does not answer is not waited for without end."""
        if self._running is not None:
            self._running.join(CLOSE_WITHIN_S)

    def _prepare(self, entry: Entry, rows: int | None = None) -> Prepared:
        chunk = self._source.chunk(entry, rows=rows)
        return Prepared([self._make(row) for row in chunk.rows], chunk.after)


class _Preparation(threading.Thread):
    def __init__(self, entry: Entry, prepare: Callable[[Entry], Prepared]) -> None:
        super().__init__(name="relay-ahead", daemon=True)
        self.entry = entry
        self._prepare = prepare
        self._found: Prepared | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._found = self._prepare(self.entry)
        except BaseException as error:
            self._error = error

    def result(self) -> Prepared:
        if self._error is not None:
            raise self._error
        assert self._found is not None
        return self._found
