"""What of one assigned partition may be committed.

The mark stands behind the last offset, in the order handed out, before which nothing is unfinished. It follows the
offsets that were handed out, never offset + 1 by counting: transactions and compaction leave gaps that no record
fills. No I/O.
"""

from __future__ import annotations

from collections import deque


class PartitionOffsets:
    """Offsets of one partition, from one assignment to its end."""

    __slots__ = ("_finished", "_mark", "_outstanding")

    def __init__(self) -> None:
        self._outstanding: deque[int] = deque()
        self._finished: set[int] = set()
        self._mark: int | None = None

    def hand_out(self, offset: int) -> None:
        """A record was read and goes to be handled. Offsets come in rising order; ValueError when they do not."""
        if (self._outstanding and offset <= self._outstanding[-1]) or (self._mark is not None and offset < self._mark):
            raise ValueError(f"offset {offset} was handed out already")
        self._outstanding.append(offset)

    def finish(self, offset: int) -> None:
        """All that the record asked for is durable. ValueError for an offset that is not out."""
        if offset in self._finished or not self._outstanding or offset < self._outstanding[0]:
            raise ValueError(f"offset {offset} is not outstanding")
        self._finished.add(offset)
        while self._outstanding and self._outstanding[0] in self._finished:
            done = self._outstanding.popleft()
            self._finished.remove(done)
            self._mark = done + 1

    @property
    def committable(self) -> int | None:
        """The offset to commit: where reading would go on. None while the first record is unfinished."""
        return self._mark

    @property
    def idle(self) -> bool:
        """Nothing is out: whatever the consumer has read up to is finished, gaps at the end included."""
        return not self._outstanding

    @property
    def first_unfinished(self) -> int | None:
        return self._outstanding[0] if self._outstanding else None

    def __len__(self) -> int:
        return len(self._outstanding)
