"""What a worker's process holds of each partition, and how much it may hold. No I/O."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from confluent_kafka import OFFSET_BEGINNING

from consumers.runtime.offsets import PartitionOffsets

if TYPE_CHECKING:
    from consumers.runtime.parking import Parked


Key: TypeAlias = bytes
"""A record's key: the organization it is of."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be in hand in one process. Above it partitions are paused, at half of it they go on."""

    records: int = 2000
    bytes: int = 32 * 1024 * 1024
    waiting_records: int = 2000
    """Read ahead of their due time, for each partition of a retry topic."""
    waiting_bytes: int = 8 * 1024 * 1024


@dataclass(slots=True)
class Share:
    """What is in hand of one key."""

    records: int = 0
    bytes: int = 0


@dataclass(slots=True, eq=False)
class Place:
    """One partition from its assignment to its end. The poll thread's, but for `running` and `leaving`, which are the
    loop's."""

    topic: str
    partition: int
    waits: bool
    """A retry topic with a delay: read ahead, with bounds of its own."""
    offsets: PartitionOffsets = field(default_factory=PartitionOffsets)
    alive: bool = True
    paused: bool = False
    committed: int | None = None
    start: int = OFFSET_BEGINNING
    low: int | None = None
    """Where the log began when what was committed had expired: nothing before it can be read any more."""
    records: int = 0
    bytes: int = 0
    last: int = -1
    running: int = 0
    """Deliveries that have begun and are not finished."""
    leaving: bool = False
    """It is being taken away: what runs is waited for, and nothing more begins."""
    loading: bool = False
    """It has just come, and what is parked on it is not known yet: nothing is read of it."""
    shares: dict[Key, Share] = field(default_factory=dict)
    parked: dict[Key, Parked] = field(default_factory=dict)
    unparking: dict[Key, Parked] = field(default_factory=dict)
    """Read again to the end, but not finished."""
    moments: deque[tuple[int, int]] = field(default_factory=deque)
    """(offset, when the broker took it in ms) of about one record a second among those in hand, in order."""

    def took(self, offset: int, key: Key | None, size: int, timestamp_ms: int) -> None:
        """A record is in hand from now on."""
        self.last = offset
        self.offsets.hand_out(offset)
        self.records += 1
        self.bytes += size
        if key is not None:
            share = self.shares.get(key)
            if share is None:
                share = self.shares[key] = Share()
            share.records += 1
            share.bytes += size
        if not self.moments or timestamp_ms - self.moments[-1][1] >= 1000:
            self.moments.append((offset, timestamp_ms))

    def finished(self, offset: int, key: Key | None, size: int) -> None:
        """All that the record asked for is durable."""
        self.offsets.finish(offset)
        self.records -= 1
        self.bytes -= size
        if key is not None:
            share = self.shares[key]
            share.records -= 1
            share.bytes -= size
            if not share.records:
                del self.shares[key]

    def oldest_age_s(self) -> float:
        """Of the first record that is not finished, to the second; 0 without one. From any thread."""
        try:
            return max(0.0, time.time() - self.moments[0][1] / 1000)
        except IndexError:
            return 0.0
