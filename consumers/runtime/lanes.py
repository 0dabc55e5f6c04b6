"""Which delivery runs next: keys side by side, one key's deliveries in order, organizations in turn. No I/O.

A lane is one key of one organization. It is in one of three places: running (what was taken from it is not released
yet), ready (it waits for its turn in its organization's queue) or gone (empty). Organizations take turns, so that one
with a thousand ready lanes gets no more of the next few places than one with a single lane.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeAlias, TypeVar

T = TypeVar("T")

Taken: TypeAlias = tuple[Any, str, list[T]]
"""An organization, a key, and its items in order."""


class _Organization(Generic[T]):
    __slots__ = ("lanes", "ready", "running")

    def __init__(self) -> None:
        self.lanes: dict[str, list[T]] = {}  # most hold one item, and a list is the least that holds more
        self.ready: deque[str] = deque()
        self.running: set[str] = set()


class Lanes(Generic[T]):
    """The deliveries in hand that have not begun, by organization and key. Bounded by who adds (the poll side
    pauses)."""

    def __init__(self, *, organization_limit: int | None = None) -> None:
        """`organization_limit`: so many lanes of one organization run at once, at most."""
        self._organizations: dict[Hashable, _Organization[T]] = {}
        # Organizations with a ready lane, in the order of their turns.
        self._turns: OrderedDict[Hashable, None] = OrderedDict()
        self._limit = organization_limit
        self._waiting = 0
        self._running = 0

    def add(self, organization: Hashable, key: str, item: T) -> None:
        """Put `item` behind all others of its key."""
        org = self._organizations.get(organization)
        if org is None:
            org = self._organizations[organization] = _Organization()
        self._waiting += 1
        lane = org.lanes.get(key)
        if lane is None:
            org.lanes[key] = [item]
        else:
            lane.append(item)
            if len(lane) > 1 or key in org.running:
                return
        org.ready.append(key)
        self._queue(organization, org)

    def take(self, limit: int, *, per_lane: int = 1) -> list[Taken[T]]:
        """Up to `limit` items, at most `per_lane` from each lane, as (organization, key, items in order).

        Every lane named is running until `release`.
        """
        taken: list[Taken[T]] = []
        while limit > 0 and self._turns:
            organization, _ = self._turns.popitem(last=False)
            org = self._organizations[organization]
            key = org.ready.popleft()
            lane = org.lanes[key]
            if len(lane) <= min(limit, per_lane):
                items, org.lanes[key] = lane, []
            else:
                items = lane[: min(limit, per_lane)]
                del lane[: len(items)]
            limit -= len(items)
            self._waiting -= len(items)
            self._running += 1
            org.running.add(key)
            taken.append((organization, key, items))
            self._queue(organization, org)
        return taken

    def release(self, organization: Hashable, key: str, put_back: list[T] | None = None) -> None:
        """What was taken from the lane is over. `put_back` goes to its front again, in order."""
        org = self._organizations[organization]
        lane = org.lanes[key]
        if key not in org.running:
            raise ValueError(f"lane {key!r} is not running")
        org.running.remove(key)
        self._running -= 1
        if put_back:
            lane[:0] = put_back
            self._waiting += len(put_back)
        if lane:
            org.ready.append(key)
        else:
            del org.lanes[key]
        self._queue(organization, org)
        if not org.lanes:
            del self._organizations[organization]

    def discard(self, condition: Callable[[T], bool]) -> list[T]:
        """Drop the items that wait here and fulfil `condition`; returns them."""
        dropped: list[T] = []
        for organization, org in list(self._organizations.items()):
            for key, lane in list(org.lanes.items()):
                kept: list[T] = []
                for item in lane:
                    (dropped if condition(item) else kept).append(item)
                lane[:] = kept
                if not kept and key not in org.running:
                    org.ready.remove(key)
                    del org.lanes[key]
            if not org.ready:
                self._turns.pop(organization, None)
            if not org.lanes:
                del self._organizations[organization]
        self._waiting -= len(dropped)
        return dropped

    def _queue(self, organization: Hashable, org: _Organization[T]) -> None:
        """Give the organization a turn, last in line, if it has something ready and room to run it."""
        if org.ready and (self._limit is None or len(org.running) < self._limit):
            if organization not in self._turns:
                self._turns[organization] = None
        else:
            self._turns.pop(organization, None)

    @property
    def has_ready(self) -> bool:
        return bool(self._turns)

    @property
    def running(self) -> int:
        """Lanes that run now."""
        return self._running

    def __len__(self) -> int:
        """Items that wait."""
        return self._waiting
