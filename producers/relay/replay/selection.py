"""Which events a replay is about: what a person wrote, as values; and what is kept of it to resume. No I/O.

A replay is made of parts that follow each other: the older events from a topic or the archive, the newer ones from the
table. Each part is fixed when the replay begins (a snapshot and a highest seq, or the topics' ends), so that resumed it
is the same set of events, in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, TypeAlias
from uuid import UUID

from pydantic import TypeAdapter

from producers.relay.errors import PositionError
from producers.relay.position import Entry, Snapshot, Window, one_slot

MAX_POSITION_BYTES = 1_000_000
MAX_OFFSET = 2**63 - 1
MAX_PARTITION = 2**31 - 1
MAX_IDS = 10_000
MAX_FILTERS = 1_000

Cursor: TypeAlias = list[Any]
"""Where a part has come to: [seq], [ids done], [number of the range, next offset], [day, seq]; [] is its beginning."""


@dataclass(frozen=True, slots=True)
class Part:
    """Events from one source. `since` and `until` bound their created_at; `ids`, when there are any, name them.

    table: rows with `first` <= seq <= `last` that `snapshot` shows, those of `entries` only when that position had them
    still to come. topic: `ranges` of (topic, partition, first offset, end). archive: the files in `directory`.
    """

    kind: Literal["table", "topic", "archive"]
    since: datetime | None = None
    until: datetime | None = None
    ids: tuple[UUID, ...] = ()
    first: int = 0
    last: int = 0
    snapshot: str = ""
    entries: str = ""
    """A position, as JSON."""
    ranges: tuple[tuple[str, int, int, int], ...] = ()
    directory: str = ""

    def covers(self, created_at: datetime) -> bool:
        return (self.since is None or created_at >= self.since) and (self.until is None or created_at < self.until)

    def __str__(self) -> str:
        return self.kind if self.until is None or self.ids else f"{self.kind} (before {self.until.isoformat()})"


@dataclass(frozen=True, slots=True)
class Selection:
    """The parts, and the filters that hold for all of them; an empty filter lets everything through."""

    parts: tuple[Part, ...]
    organizations: frozenset[UUID] = frozenset()
    event_types: frozenset[str] = frozenset()

    def takes(self, part: Part, organization_id: UUID, event_type: str, created_at: datetime) -> bool:
        return (
            (not self.organizations or organization_id in self.organizations)
            and (not self.event_types or event_type in self.event_types)
            and part.covers(created_at)
        )

    @property
    def source(self) -> str:
        """In words: where the events come from."""
        return ", then ".join(str(part) for part in self.parts)

    def to_json(self) -> Any:
        return _SELECTION.dump_python(self, mode="json")

    @classmethod
    def from_json(cls, data: Any) -> Selection:
        return _SELECTION.validate_python(data)


_SELECTION: TypeAdapter[Selection] = TypeAdapter(Selection)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a replay has come, with what it did until there. Written together with the records it counts."""

    part: int = 0
    cursor: Cursor = field(default_factory=list)
    read: int = 0
    """Events that were read and selected."""
    sent: int = 0
    """Records."""
    skipped: int = 0
    """Deliveries that were over already, and for which nothing was sent."""
    failed: int = 0
    """Events that could not be made a record, or whose bytes are no event."""
    instance: str = ""
    """The process that wrote it: it tells a rival from a time-out of one's own."""

    def format(self) -> str:
        """As metadata of a consumer group's offset, of which a broker takes 4,096 bytes."""
        return json.dumps([self.instance, self.part, self.cursor, self.read, self.sent, self.skipped, self.failed])

    @classmethod
    def parse(cls, text: str) -> Progress:
        """ValueError when it is something else."""
        try:
            instance, part, cursor, *counts = json.loads(text)
            read, sent, skipped, failed = counts
            numbers = all(isinstance(number, int) for number in (part, *counts))
            if numbers and isinstance(cursor, list) and isinstance(instance, str):
                return cls(part, cursor, read, sent, skipped, failed, instance)
        except (TypeError, ValueError):
            pass
        raise ValueError(f"{text[:100]!r} is not the progress of a replay")

    def counts(self) -> dict[str, int]:
        return {"read": self.read, "sent": self.sent, "skipped": self.skipped, "failed": self.failed}


def parse_offsets(text: str) -> dict[int, int]:
    """`P:N[,P:N]`: the first offset by partition. ValueError says what is wrong."""
    found: dict[int, int] = {}
    for pair in text.split(","):
        partition, colon, offset = pair.strip().partition(":")
        if not colon or not _is_number(partition) or not _is_number(offset):
            raise ValueError(f"{pair.strip()[:80]!r} is not PARTITION:OFFSET, as in 0:1200,1:980")
        if int(partition) > MAX_PARTITION or int(offset) > MAX_OFFSET:
            raise ValueError(f"{pair.strip()[:80]!r} is larger than anything Kafka has")
        if int(partition) in found:
            raise ValueError(f"partition {int(partition)} is there twice")
        found[int(partition)] = int(offset)
    return found


def parse_position(text: str) -> tuple[Entry, ...]:
    """A position as a person has it: `S1/T1`, or JSON with entries in it somewhere, as `relay status --format json`
    prints them and `relay.positions` holds them. ValueError says what is wrong."""
    if len(text.encode("utf-8", "replace")) > MAX_POSITION_BYTES:
        raise ValueError("it is too long for a position")
    try:
        if not text.lstrip().startswith(("{", "[")):
            snapshot, slash, top = text.strip().rpartition("/")
            if not slash or not _is_number(top):
                raise ValueError(f"{text[:80]!r} is neither S1/T1, as in 748:751:748/1200, nor JSON")
            return (Entry(Snapshot.parse(snapshot), _seq(int(top))),)
        entries = tuple(_entry(data) for data in _entries(json.loads(text)))
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON: {error}") from None
    except RecursionError:
        raise ValueError("it is nested too deep for a position") from None
    except PositionError as error:
        raise ValueError(str(error)) from None
    if not entries:
        raise ValueError("there is no s1 with a t1 in it")
    return entries


def is_to_come(entries: Sequence[Entry], tx_id: int, seq: int, organization_id: UUID) -> bool:
    """Had a relay at this position the row still before it? Not one of an organization that the position says nothing
    about."""
    entry = next((entry for entry in entries if entry.covers(organization_id)), None)
    if entry is None or (entry.s1.shows(tx_id) and seq <= entry.t1):
        return False
    window = entry.window
    return window is None or not (window.s2.shows(tx_id) and seq <= window.last)


def _entries(data: Any) -> Iterator[Mapping[str, Any]]:
    """Whatever in `data` has an s1 and a t1."""
    if isinstance(data, Mapping):
        if "s1" in data and "t1" in data:
            yield data
            return
        data = data.values()
    if isinstance(data, Collection) and not isinstance(data, str):
        for item in data:
            yield from _entries(item)


def _entry(data: Mapping[str, Any]) -> Entry:
    window = None
    parts = [data.get(name) for name in ("s2", "t2", "last")]
    if any(part is not None for part in parts):
        s2, t2, last = parts
        window = Window(_snapshot(s2, "s2"), _number(t2, "t2"), _number(last, "last"))
    options: dict[str, Any] = {}
    if (organization := data.get("organization")) is not None:
        options["organization"] = _id(organization)
        options["slots"] = one_slot(options["organization"])
    elif (slots := data.get("slots")) is not None:
        options["slots"] = tuple(_slots(slots))
    if without := data.get("without"):
        if not isinstance(without, list):
            raise ValueError("without is no list of ids")
        options["without"] = frozenset(map(_id, without))
    return Entry(_snapshot(data["s1"], "s1"), _number(data["t1"], "t1"), window, **options)


def _id(value: Any) -> UUID:
    try:
        return UUID(value)
    except (ValueError, TypeError, AttributeError):
        raise ValueError(f"{str(value)[:80]!r} is no organization's id") from None


def _slots(slots: Any) -> Iterable[tuple[int, int]]:
    if not isinstance(slots, list):
        raise ValueError("slots is no list of [first, last]")
    for pair in slots:
        if not (isinstance(pair, list) and len(pair) == 2):
            raise ValueError("slots is no list of [first, last]")
        yield _number(pair[0], "slots"), _number(pair[1], "slots")


def _snapshot(value: Any, name: str) -> Snapshot:
    if not isinstance(value, str):
        raise ValueError(f"{name} is no snapshot")
    return Snapshot.parse(value)


def _number(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} is no number")
    return _seq(value)


def _seq(value: int) -> int:
    if not 0 <= value <= MAX_OFFSET:
        raise ValueError(f"{value} is no seq")
    return value


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 19
