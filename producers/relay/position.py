"""How far the relay has read `event_log`: the position, its text form, and the windows it defines. No I/O.

A position is not a sequence number, because transactions commit in another order than their rows got their `seq`. An
entry `(s1, t1)` says: every row visible in the Postgres snapshot s1 with seq <= t1 is published. While the next window
is being published in chunks it is `(s1, t1, s2, t2, last)`, and the window is the fixed set, in the order of seq,

    last < seq <= t2  AND  visible in s2  AND  (NOT visible in s1 OR seq > t1)

What must stay true:
- the set never changes while the window is open. After a crash of Postgres the ids of unflushed, aborted transactions
  are given out again; a row of such an id has a seq above every seq that was ever visible, hence above t2;
- t is a seq that was visible when its snapshot was taken, never an estimate, and never falls;
- one transaction's rows are in one window, and a row written by someone who could see another row comes after it.

A position is a list of entries, each for some organizations: those of its hash slots, or one that writes so much that
the others would wait behind it. Together the entries of all lanes cover every organization once. An entry can be
divided at any moment, an open window included, because a row belongs to one organization: the parts go on as they
stand. Two entries become one when they stand at the same place (`merged`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple
from uuid import UUID

from producers.relay.errors import PositionError

FORMAT = 2
OLDER_FORMATS = frozenset({1})  # read as well: one lane, one entry
SLOTS = 256  # the last byte of the organization's UUID
Slots = tuple[tuple[int, int], ...]  # disjoint inclusive ranges, ascending
ALL_SLOTS: Slots = ((0, SLOTS - 1),)
LAYOUT = 1  # the first; each change of lanes makes the next
LANES_AT_MOST = 64  # partitions of relay.positions


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A `pg_snapshot`: transactions below xmin and those below xmax that are not in xip had ended when it was taken."""

    xmin: int
    xmax: int
    xip: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        """Read Postgres's own text form, `xmin:xmax:id,id`. Raises PositionError."""
        parts = text.split(":")
        if len(parts) != 3 or not all(_is_number(x) for x in (*parts[:2], *(parts[2].split(",") if parts[2] else ()))):
            raise PositionError(f"{text[:80]!r} is not a snapshot (xmin:xmax:id,id)")
        xmin, xmax = int(parts[0]), int(parts[1])
        xip = tuple(int(x) for x in parts[2].split(",")) if parts[2] else ()
        if not 0 < xmin <= xmax or any(not xmin <= x < xmax for x in xip) or list(xip) != sorted(set(xip)):
            raise PositionError(f"{text[:80]!r} is not a snapshot: ids out of order or out of range")
        return cls(xmin, xmax, xip)

    def __str__(self) -> str:
        return f"{self.xmin}:{self.xmax}:{','.join(map(str, self.xip))}"

    def shows(self, tx_id: int) -> bool:
        """What `pg_visible_in_snapshot(tx_id, snapshot)` answers."""
        return tx_id < self.xmin or (tx_id < self.xmax and tx_id not in self.xip)


NOTHING = Snapshot(1, 1)  # shows no transaction: their ids begin at 3


@dataclass(frozen=True, slots=True)
class Head:
    """What one statement saw: its snapshot, and the highest seq in the table, whoever's row it was."""

    snapshot: Snapshot
    top: int


@dataclass(frozen=True, slots=True)
class Window:
    """The open window's upper end, and the seq up to which it is published."""

    s2: Snapshot
    t2: int
    last: int


def slot_of(organization_id: UUID) -> int:
    return organization_id.bytes[-1]


@dataclass(frozen=True, slots=True)
class Entry:
    """The position of some organizations: of those whose slot is in `slots`, but for those in `without`; or, when
    `organization` is set, of that one alone (`slots` is then its slot).

    `reprocessed`: every request to publish a dead letter again up to this id has been answered, for these
    organizations.
    """

    s1: Snapshot = NOTHING
    t1: int = 0
    window: Window | None = None
    slots: Slots = ALL_SLOTS
    organization: UUID | None = None
    without: frozenset[UUID] = frozenset()
    reprocessed: int = 0

    def __post_init__(self) -> None:
        low = -1
        for first, last in self.slots:
            if not low < first <= last < SLOTS:
                raise PositionError(f"hash slots {self.slots} overlap, descend, or leave 0-{SLOTS - 1}")
            low = last
        if not self.slots:
            raise PositionError("an entry without hash slots is nobody's")
        if self.organization is not None and (self.slots != one_slot(self.organization) or self.without):
            raise PositionError(f"an organization's entry has its slot and nothing else, not {self.slots}")
        if any(not holds(self.slots, slot_of(organization)) for organization in self.without):
            raise PositionError("an entry leaves out an organization that is of other slots")
        if self.t1 < 0 or self.reprocessed < 0:
            raise PositionError(f"t1 is {self.t1}, reprocessed {self.reprocessed}: neither is ever negative")
        # The snapshots are not compared: after a crash of Postgres s2 may well be under s1 (ids come again).
        if self.window is not None and not (self.t1 <= self.window.t2 and 0 <= self.window.last <= self.window.t2):
            raise PositionError(f"t1={self.t1}, t2={self.window.t2}, last={self.window.last}: t2 must be the highest")

    @property
    def everyone(self) -> bool:
        """Is it the entry of all organizations?"""
        return self.slots == ALL_SLOTS and self.organization is None and not self.without

    def covers(self, organization_id: UUID) -> bool:
        """Is it this organization's entry?"""
        if self.organization is not None:
            return self.organization == organization_id
        return holds(self.slots, slot_of(organization_id)) and organization_id not in self.without

    def opened(self, head: Head) -> Entry:
        """The window from here to what `head` saw, with nothing of it published yet."""
        if self.window is not None:
            raise PositionError("a window is open already: publish it to its end first")
        return replace(self, window=Window(head.snapshot, max(self.t1, head.top), 0))

    def read_to(self, seq: int) -> Entry:
        """The open window, published up to and including `seq`."""
        window = self._open_window()
        if not window.last < seq <= window.t2:
            raise PositionError(f"seq {seq} is not after {window.last} in a window that ends at {window.t2}")
        return replace(self, window=replace(window, last=seq))

    def completed(self) -> Entry:
        """The position after the open window: everything visible in s2 up to t2 is published."""
        window = self._open_window()
        return replace(self, s1=window.s2, t1=window.t2, window=None)

    def contains(self, tx_id: int, seq: int) -> bool:
        """Is this row in what is left of the open window? The definition; source.py asks Postgres the same."""
        window = self._open_window()
        return window.last < seq <= window.t2 and window.s2.shows(tx_id) and (not self.s1.shows(tx_id) or seq > self.t1)

    def split_off(self, organization: UUID) -> tuple[Entry, Entry]:
        """This entry without `organization`, and that organization's own, both as it stands."""
        if self.organization is not None or not self.covers(organization):
            raise PositionError(f"organization {organization} is not among those of this entry")
        own = replace(self, slots=one_slot(organization), organization=organization, without=frozenset())
        return replace(self, without=self.without | {organization}), own

    def within(self, slots: Slots) -> Entry | None:
        """The part of this entry that is of `slots`, as it stands; None when there is none."""
        if not (common := common_slots(self.slots, slots)):
            return None
        without = frozenset(x for x in self.without if holds(common, slot_of(x)))
        return replace(self, slots=common, without=without)

    @property
    def top(self) -> int:
        """The highest seq this position relies on: Postgres's sequence can never be under it."""
        return self.t1 if self.window is None else self.window.t2

    def _open_window(self) -> Window:
        if self.window is None:
            raise PositionError("no window is open")
        return self.window


def merged(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """The same position in as few entries as may be: those that stand at one place, with no window open, become one.

    An organization's own entry goes back to the one that leaves it out.
    """
    places: dict[tuple[Snapshot, int, int], Entry] = {}
    others: list[Entry] = []
    settled = sorted(entries, key=lambda e: (e.organization is not None, e.slots))
    for entry in settled:
        place = (entry.s1, entry.t1, entry.reprocessed)
        found = places.get(place)
        if entry.window is not None:
            others.append(entry)
        elif entry.organization is None:
            if found is None:
                places[place] = entry
            else:
                slots = joined_slots(found.slots, entry.slots)
                places[place] = replace(found, slots=slots, without=found.without | entry.without)
        elif found is not None and entry.organization in found.without:
            places[place] = replace(found, without=found.without - {entry.organization})
        else:
            others.append(entry)
    return tuple(
        sorted((*places.values(), *others), key=lambda e: (e.organization is not None, e.slots, str(e.organization)))
    )


def lane_slots(lane: int, lanes: int) -> Slots:
    """The slots that `lane` of so many owns: an equal share, to within one."""
    if not 0 <= lane < lanes <= LANES_AT_MOST:
        raise PositionError(f"there is no lane {lane} of {lanes}: there can be 1 to {LANES_AT_MOST}, counted from 0")
    return ((SLOTS * lane // lanes, SLOTS * (lane + 1) // lanes - 1),)


def one_slot(organization: UUID) -> Slots:
    return ((slot_of(organization), slot_of(organization)),)


def holds(slots: Slots, slot: int) -> bool:
    return any(first <= slot <= last for first, last in slots)


def common_slots(left: Slots, right: Slots) -> Slots:
    """What is in both."""
    both = ((max(a, c), min(b, d)) for a, b in left for c, d in right)
    return tuple(sorted((first, last) for first, last in both if first <= last))


def joined_slots(left: Slots, right: Slots) -> Slots:
    """What is in either, in the fewest ranges. They must have nothing in common."""
    ranges: list[tuple[int, int]] = []
    for first, last in sorted((*left, *right)):
        if ranges and ranges[-1][1] + 1 == first:
            ranges[-1] = (ranges[-1][0], last)
        else:
            ranges.append((first, last))
    return tuple(ranges)


@dataclass(frozen=True, slots=True)
class DatabaseIdentity:
    """Which database a position belongs to. `oid` decides; `name` is for people, since a rename is harmless."""

    system_identifier: str
    timeline: int
    oid: int
    name: str


@dataclass(frozen=True, slots=True)
class KafkaIdentity:
    """Which cluster a position belongs to, and the ids of its topics (a topic made anew has a new one)."""

    cluster_id: str
    topic_ids: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Identity:
    """The two places that a position joins. It means nothing anywhere else."""

    database: DatabaseIdentity
    kafka: KafkaIdentity

    def differences(self, now: Identity) -> list[str]:
        """Why a position of this identity must not be used where `now` is; empty if it may. Words for people."""
        was, found = self.database, now.database
        found_out: list[str] = []
        if was.system_identifier != found.system_identifier:
            found_out.append(
                f"the Postgres cluster is another one (system identifier {found.system_identifier}, "
                f"the position's is {was.system_identifier}): a dump restored elsewhere, or pg_upgrade"
            )
        elif was.timeline != found.timeline:
            found_out.append(
                f"Postgres is on timeline {found.timeline}, the position is of timeline {was.timeline}: "
                "a failover or a point-in-time restore, which may have lost transactions that were published"
            )
        if was.oid != found.oid:
            found_out.append(
                f"the database is another one ({found.name}, oid {found.oid}; "
                f"the position's is {was.name}, oid {was.oid})"
            )
        if self.kafka.cluster_id != now.kafka.cluster_id:
            found_out.append(
                f"the Kafka cluster is another one ({now.kafka.cluster_id}, the position's is {self.kafka.cluster_id})"
            )
        for topic, topic_id in self.kafka.topic_ids.items():
            if topic not in now.kafka.topic_ids:
                found_out.append(f"topic {topic} is gone")
            elif now.kafka.topic_ids[topic] != topic_id:
                found_out.append(f"topic {topic} was deleted and made anew since")
        return found_out


class Witness(NamedTuple):
    """A row that was published: the id that `seq` has."""

    seq: int
    id: str


@dataclass(frozen=True, slots=True)
class Closing:
    """This lane publishes nothing more: its entries, as they stand, belong to `lanes` lanes of the next `layout`."""

    layout: int
    lanes: int


@dataclass(frozen=True, slots=True)
class Position:
    """One lane's record in `relay.positions`: its entries, whose they are, and the running counts.

    `number` counts the lane's transactions: a lower one than was confirmed means that Kafka took a commit back.
    `instance` is the process that wrote it, which is how a fenced relay tells a rival from a time-out of its own.
    `witness` is the published row with the highest seq. When the table has it no longer, the database was put back to
    an earlier state, though its sequence may have passed t1 again by now.
    """

    identity: Identity
    entries: tuple[Entry, ...] = (Entry(),)
    number: int = 0
    instance: str = ""
    published: int = 0
    dead_lettered: int = 0
    written_at: datetime = field(default_factory=lambda: datetime(1970, 1, 1, tzinfo=UTC))
    layout: int = LAYOUT
    lane: int = 0
    lanes: int = 1
    closing: Closing | None = None
    witness: Witness | None = None

    def __post_init__(self) -> None:
        slots = lane_slots(self.lane, self.lanes)
        covered: Slots = ()
        own = {entry.organization for entry in self.entries if entry.organization is not None}
        for entry in self.entries:
            if entry.organization is None:
                if common_slots(covered, entry.slots):
                    raise PositionError("two entries of one position have a hash slot in common")
                covered = joined_slots(covered, entry.slots)
        if covered != slots:
            raise PositionError(f"the entries of lane {self.lane} of {self.lanes} are of slots {covered}, not {slots}")
        left_out = [x for entry in self.entries for x in entry.without]
        if sorted(left_out) != sorted(own) or len(own) != sum(e.organization is not None for e in self.entries):
            raise PositionError("an organization has an entry of its own exactly when one other leaves it out")

    @property
    def key(self) -> str:
        return lane_key(self.layout, self.lane)

    def next(
        self,
        entries: Iterable[Entry],
        *,
        instance: str,
        at: datetime,
        published: int,
        dead: int,
        witness: Witness | None = None,
    ) -> Position:
        """The position to write with the next chunk: `published` and `dead` are the rows this chunk adds, `witness` the
        one with the highest seq."""
        if self.witness is not None and (witness is None or witness.seq < self.witness.seq):
            witness = self.witness
        return replace(
            self,
            entries=tuple(entries),
            number=self.number + 1,
            instance=instance,
            written_at=at,
            published=self.published + published,
            dead_lettered=self.dead_lettered + dead,
            witness=witness,
        )

    def format(self) -> bytes:
        """The record's value: JSON, keys sorted, so that equal positions are equal bytes."""
        database, kafka = self.identity.database, self.identity.kafka
        return json.dumps(
            {
                "format": FORMAT,
                "layout": self.layout,
                "lane": self.lane,
                "lanes": self.lanes,
                "closing": None if self.closing is None else [self.closing.layout, self.closing.lanes],
                "witness": self.witness,
                "number": self.number,
                "instance": self.instance,
                "written_at": self.written_at.isoformat(),
                "published": self.published,
                "dead_lettered": self.dead_lettered,
                "database": {
                    "system_identifier": database.system_identifier,
                    "timeline": database.timeline,
                    "oid": database.oid,
                    "name": database.name,
                },
                "kafka": {"cluster_id": kafka.cluster_id, "topic_ids": dict(kafka.topic_ids)},
                "entries": [_entry_to_json(entry) for entry in self.entries],
            },
            sort_keys=True,
            separators=(",", ":"),
        ).encode()

    @classmethod
    def parse(cls, value: bytes) -> Position:
        """Read a record's value. Raises PositionError, naming what is wrong: a position is never guessed at."""
        try:
            data = json.loads(value)
            if not isinstance(data, dict):
                raise PositionError("a position is a JSON object")
            if data.get("format") != FORMAT and data.get("format") not in OLDER_FORMATS:
                raise PositionError(
                    f"the position has format {data.get('format')!r}, this relay knows {FORMAT}: run the newer version"
                )
            database, kafka = data["database"], data["kafka"]
            return cls(
                identity=Identity(
                    DatabaseIdentity(
                        str(database["system_identifier"]),
                        int(database["timeline"]),
                        int(database["oid"]),
                        str(database["name"]),
                    ),
                    KafkaIdentity(str(kafka["cluster_id"]), {str(k): str(v) for k, v in kafka["topic_ids"].items()}),
                ),
                entries=tuple(_entry_from_json(entry) for entry in data["entries"]),
                number=int(data["number"]),
                instance=str(data["instance"]),
                published=int(data["published"]),
                dead_lettered=int(data["dead_lettered"]),
                written_at=datetime.fromisoformat(data["written_at"]),
                layout=int(data["layout"]),
                lane=int(data["lane"]),
                lanes=int(data.get("lanes", 1)),
                closing=Closing(*map(int, data["closing"])) if data.get("closing") else None,
                witness=Witness(int(data["witness"][0]), str(data["witness"][1])) if data.get("witness") else None,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PositionError(f"the position cannot be read: {type(error).__name__}: {error}") from error


def lane_key(layout: int, lane: int) -> str:
    """The key of a lane's records in `relay.positions`, and (after the topic prefix) its transactional.id."""
    return f"relay-{layout}-{lane}"


def _entry_to_json(entry: Entry) -> dict[str, Any]:
    data: dict[str, Any] = {"slots": [list(pair) for pair in entry.slots], "s1": str(entry.s1), "t1": entry.t1}
    if entry.window is not None:
        data |= {"s2": str(entry.window.s2), "t2": entry.window.t2, "last": entry.window.last}
    if entry.organization is not None:
        data["organization"] = str(entry.organization)
    if entry.without:
        data["without"] = sorted(map(str, entry.without))
    if entry.reprocessed:
        data["reprocessed"] = entry.reprocessed
    return data


def _entry_from_json(data: Mapping[str, Any]) -> Entry:
    parts = [name for name in ("s2", "t2", "last") if name in data]
    if parts and len(parts) != 3:
        raise PositionError(f"an entry has {', '.join(parts)} only: an open window has s2, t2 and last")
    window = Window(Snapshot.parse(data["s2"]), int(data["t2"]), int(data["last"])) if parts else None
    slots = tuple((int(first), int(last)) for first, last in data["slots"])
    return Entry(
        Snapshot.parse(data["s1"]),
        int(data["t1"]),
        window,
        slots,
        UUID(data["organization"]) if "organization" in data else None,
        frozenset(map(UUID, data.get("without", ()))),
        int(data.get("reprocessed", 0)),
    )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
