"""The entries of a lane as they are worked on, turn by turn: what each has next, which part, and which become one.

In a turn every entry gives one chunk at most, so an organization whose backlog grows keeps nobody else waiting once it
has an entry of its own. What must stay true:
- windows that open in one turn end at the same place, so that entries which have caught up can become one again;
- the chunks of all entries together are no larger than one entry's alone would be;
- what a turn moved is the position only once it is committed: after an error these entries are thrown away.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from uuid import UUID

from producers.relay.ahead import Ahead
from producers.relay.position import Entry, Head, merged
from producers.relay.records import Record
from producers.relay.source import Source
from schemas import RawRow

OWN_AT_MOST = 8  # organizations of a lane that have entries of their own; each is one more poll
# Of a backlog, before it is said whose it is. A broker far away makes few rows of many seconds: then fewer must do, or
# the others wait for the verdict.
JUDGED_ROWS = 10_000
JUDGED_AFTER_S, JUDGED_ROWS_AT_LEAST = 0.5, 500
LARGE_SHARE = 0.5
APART_AT_LEAST_S = 10.0  # one whose backlog comes and goes is not parted and joined all the time

Place = tuple[tuple[tuple[int, int], ...], UUID | None]


class Shares:
    """Whose backlog it is: counts the rows of an entry that is behind. No I/O."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._counts: Counter[bytes] = Counter()
        self._monotonic, self._since = monotonic, 0.0

    def saw(self, organizations: Iterable[bytes], *, behind: bool) -> UUID | None:
        """Count a chunk's rows; the organization that more than half of the last thousands are of (of the last
        hundreds, when they took long), if there is one."""
        if not behind:
            self._counts.clear()
            return None
        if not self._counts:
            self._since = self._monotonic()
        self._counts.update(organizations)
        total = self._counts.total()
        slow = self._monotonic() - self._since >= JUDGED_AFTER_S
        if total < (JUDGED_ROWS_AT_LEAST if slow else JUDGED_ROWS):
            return None
        ((organization, count),) = self._counts.most_common(1)
        self._counts.clear()
        return UUID(organization.decode()) if count > total * LARGE_SHARE else None


class Turns:
    """For the publishing thread. `make` turns a row into its record, in whichever thread."""

    def __init__(
        self,
        source: Source,
        make: Callable[[RawRow], Record],
        entries: Sequence[Entry],
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source, self._make, self._monotonic = source, make, monotonic
        self._ahead: dict[Place, Ahead] = {}
        self._shares: dict[Place, Shares] = {}
        self._parted_at: dict[UUID, float] = {}
        self.entries: tuple[Entry, ...] = ()
        self._settle(entries)

    @property
    def behind(self) -> bool:
        """Is there more to read at once?"""
        return any(entry.window is not None for entry in self.entries)

    def take(self, *, alone: bool = False) -> list[Record]:
        """The next records of every entry, in an order that keeps each organization's own; `entries` is then the
        position that holds once they are published. `alone`: one record at most."""
        head: Head | None = None
        together: list[Record] = []
        after: list[Entry] = []
        large: list[tuple[int, UUID]] = []
        for entry in self.entries:
            if alone and together:
                after.append(entry)
                continue
            if entry.window is None and len(self.entries) > 1:
                head = head or self._source.head()
            place = _place(entry)
            ahead = self._ahead[place]
            found = ahead.next(entry, rows=1 if alone else None, head=head if entry.window is None else None)
            behind = found.after.window is not None
            organization = self._shares[place].saw((record.key for record in found.records), behind=behind)
            if organization is not None and entry.organization is None:
                large.append((len(after), organization))
            after.append(found.after)
            together = found.records if not together else together + found.records
        for index, organization in large:
            if sum(entry.organization is not None for entry in after) < OWN_AT_MOST:
                after[index], own = after[index].split_off(organization)
                after.append(own)
                self._parted_at[organization] = self._monotonic()
        self._settle(after)
        return together

    def replace(self, entries: Sequence[Entry]) -> None:
        """Go on from these, which say the same of every row that is read ahead."""
        self._settle(entries)

    def close(self) -> None:
        for ahead in self._ahead.values():
            ahead.close()

    def _settle(self, entries: Sequence[Entry]) -> None:
        border = self._monotonic() - APART_AT_LEAST_S
        apart = [
            e for e in entries if e.organization is not None and self._parted_at.get(e.organization, border) > border
        ]
        self.entries = (*merged(entry for entry in entries if entry not in apart), *apart)
        places = {_place(entry) for entry in self.entries}
        for gone in self._ahead.keys() - places:
            self._ahead.pop(gone).close()
            del self._shares[gone]
        for new in places - self._ahead.keys():
            self._ahead[new], self._shares[new] = Ahead(self._source, self._make), Shares(self._monotonic)
        self._source.share(len(self.entries))


def _place(entry: Entry) -> Place:
    return entry.slots, entry.organization
