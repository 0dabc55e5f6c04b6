"""What of one assigned partition may be committed.

The mark stands behind the last offset, in the order handed out, before which nothing is unfinished. It follows the
offsets that were handed out, never offset + 1 by counting: transactions and compaction leave gaps that no record
fills. No I/O.
"""

from __future__ import annotations

from collections import deque


class PartitionOffsets:
    """Offsets of one partition, from one assignment to its end."""

    __slots__ = ("_finished", "_mark", "_outstanding", "_passed")

    def __init__(self) -> None:
        self._outstanding: deque[int] = deque()
        self._finished: set[int] = set()
        self._mark: int | None = None
        self._passed: dict[int, int] = {}  # after an outstanding offset: the last one passed over before the next

    def hand_out(self, offset: int) -> None:
        """A record was read and goes to be handled. Offsets come in rising order; ValueError when they do not."""
        last = self._outstanding[-1] if self._outstanding else -1
        if offset <= self._passed.get(last, last) or (self._mark is not None and offset < self._mark):
            raise ValueError(f"offset {offset} was handed out already")
        self._outstanding.append(offset)

    def pass_over(self, offset: int) -> None:
        """A record was read that is somebody else's to finish: it holds nothing up. ValueError as for `hand_out`."""
        if self._outstanding:
            last = self._outstanding[-1]
            if offset <= self._passed.get(last, last):
                raise ValueError(f"offset {offset} was handed out already")
            self._passed[last] = offset
        elif self._mark is not None and offset < self._mark:
            raise ValueError(f"offset {offset} was handed out already")
        else:
            self._mark = offset + 1

    def finish(self, offset: int) -> None:
        """All that the record asked for is durable. ValueError for an offset that is not out."""
        if offset in self._finished or not self._outstanding or offset < self._outstanding[0]:
            raise ValueError(f"offset {offset} is not outstanding")
        self._finished.add(offset)
        while self._outstanding and self._outstanding[0] in self._finished:
            done = self._outstanding.popleft()
            self._finished.remove(done)
            self._mark = self._passed.pop(done, done) + 1

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
