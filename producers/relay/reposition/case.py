"""What has happened to a position, a database and a cluster that do not fit together. No I/O.

The cases are words for a person; what is done about them is the same for all (but for pg_upgrade): the topics' own
content says what was published.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from producers.relay.errors import PositionError
from producers.relay.position import (
    LAYOUT,
    Entry,
    Identity,
    Position,
    Snapshot,
    Witness,
    lane_slots,
    merged,
)

LISTED_AT_MOST = 5_000  # ids in a position, each ten bytes in every entry


class Case(StrEnum):
    """What a person would call it. Several can hold at once."""

    NEVER_PUBLISHED = "never-published"  # no position, and none is missed
    POSITIONS_LOST = "positions-lost"  # this database was published from, and a lane has no position
    OTHER_POSTGRES = "other-postgres"  # another system identifier: a dump restored elsewhere, or pg_upgrade
    OTHER_DATABASE = "other-database"  # another database of the same server
    FAILOVER = "failover-or-restore"  # another timeline
    EARLIER_STATE = "earlier-state"  # rows that were published are gone, or the sequence is under them
    OTHER_KAFKA = "other-kafka"  # another cluster
    TOPICS_REMADE = "topics-remade"  # same cluster, another topic id


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The cases, and for each a sentence with the names and numbers. Neither: the positions belong here."""

    cases: tuple[Case, ...]
    reasons: tuple[str, ...]


def diagnose(
    positions: Sequence[Position],
    now: Identity,
    last_seq: int,
    published_to: str | None,
    has: Callable[[Witness], bool],
) -> Diagnosis:
    """`last_seq`: where the sequence of event_log stands. `published_to`: the Kafka cluster that Postgres remembers.
    `has`: does event_log have this row?"""
    if positions and not is_whole(positions):
        reason = f"of {positions[0].lanes} lanes, only {len(positions)} have a position"
        return Diagnosis((Case.POSITIONS_LOST,), (reason,))
    if not positions:
        if published_to is None:
            return Diagnosis((Case.NEVER_PUBLISHED,), ("nothing was ever published from this database",))
        reason = f"there is no position, but this database was published to Kafka cluster {published_to}"
        if published_to == now.kafka.cluster_id:
            return Diagnosis((Case.POSITIONS_LOST,), (reason,))
        return Diagnosis((Case.OTHER_KAFKA,), (f"{reason}, and this is cluster {now.kafka.cluster_id}",))
    cases: list[Case] = []
    reasons: dict[str, None] = {}
    for position in positions:
        was = position.identity
        reasons |= dict.fromkeys(was.differences(now))
        if was.database.system_identifier != now.database.system_identifier:
            cases.append(Case.OTHER_POSTGRES)
        else:
            cases += [Case.FAILOVER] * (was.database.timeline != now.database.timeline)
            cases += [Case.OTHER_DATABASE] * (was.database.oid != now.database.oid)
        if was.kafka.cluster_id != now.kafka.cluster_id:
            cases.append(Case.OTHER_KAFKA)
        elif any(now.kafka.topic_ids.get(topic) != topic_id for topic, topic_id in was.kafka.topic_ids.items()):
            cases.append(Case.TOPICS_REMADE)
    if (top := max(entry.top for position in positions for entry in position.entries)) > last_seq:
        cases.append(Case.EARLIER_STATE)
        reasons[f"the sequence of event_log stands at {last_seq}, but rows up to {top} were seen"] = None
    gone = {p.witness for p in positions if p.witness is not None and not has(p.witness)}
    if gone:
        cases.append(Case.EARLIER_STATE)
        reasons |= dict.fromkeys(f"event {w.id} was published as number {w.seq} and is not in event_log" for w in gone)
    return Diagnosis(tuple(dict.fromkeys(cases)), tuple(reasons))


def is_whole(positions: Sequence[Position]) -> bool:
    """Has every lane of the layout its position?"""
    return bool(positions) and {position.lane for position in positions} == set(range(positions[0].lanes))


def published_at_most(positions: Sequence[Position]) -> int | None:
    """No row with a higher seq was ever published; None when that is not known."""
    if not is_whole(positions):
        return None
    return max(
        max(entry.t1, entry.window.last if entry.window is not None else 0)
        for position in positions
        for entry in position.entries
    )


def with_running(s1: Snapshot, own: int) -> Snapshot:
    """s1 with `own`, an id given out later, and those given out in between listed as running: it shows the same.

    The relay walks along the rows of a transaction that is listed, in the order of seq, however many they are; of the
    rows of all later ones it sorts out the next for each chunk anew.
    """
    if own < s1.xmax:
        raise PositionError(f"transaction {own} began before its own snapshot {s1}")
    if own - s1.xmax > LISTED_AT_MOST:
        return s1
    xip = (*s1.xip, *range(s1.xmax, own + 1))
    return Snapshot(xip[0], own + 1, xip)


@dataclass(frozen=True, slots=True)
class Place:
    """Where every lane is to go on from: all that s1 shows up to t1 is published. `reprocess_top`: the highest request
    to publish a dead letter again that there is. `witness`: the row that has t1."""

    s1: Snapshot
    t1: int
    reprocess_top: int
    witness: Witness | None = None

    def moved(self, entry: Entry) -> Entry:
        # Requests made after the moment that the database was put back to are gone; their numbers come again.
        answered = min(entry.reprocessed, self.reprocess_top)
        return replace(entry, s1=self.s1, t1=self.t1, window=None, reprocessed=answered)


def positions_at(place: Place, old: Sequence[Position], now: Identity, known_layouts: Iterable[int]) -> list[Position]:
    """The positions to write when all lanes are to stand at `place`; the one that makes them hold (lane 0's) is last.

    The lanes stay as they are. Where one has no position (they are lost), one lane of a new layout takes all.
    """
    if not is_whole(old):
        # Above anything known, so that whoever still runs under an old layout's id writes what nobody reads.
        layout = max((LAYOUT - 1, *known_layouts, *(position.layout for position in old))) + 1
        entry = Entry(place.s1, place.t1, reprocessed=place.reprocess_top)
        return [Position(now, (entry,), layout=layout, witness=place.witness)]
    return [replace(position, witness=place.witness) for position in positions_here(old, now, place.moved)]


def positions_here(old: Sequence[Position], now: Identity, moved: Callable[[Entry], Entry]) -> list[Position]:
    """The positions of all lanes, which have theirs, as belonging here, with each entry `moved`; lane 0's last.

    Where a change of lanes was under way, its end is made at once, in a layout that nobody has written of: of the
    layout it was going to there may be positions already, which do not belong here.
    """
    closing = next((position.closing for position in old if position.closing is not None), None)
    entries = [moved(entry) for position in old for entry in position.entries]
    if closing is None:
        here = [replace(p, identity=now, entries=merged(map(moved, p.entries))) for p in old]
    else:
        here = [
            replace(
                old[0],
                identity=now,
                entries=merged(
                    part for entry in entries if (part := entry.within(lane_slots(lane, closing.lanes))) is not None
                ),
                published=sum(p.published for p in old) if lane == 0 else 0,
                dead_lettered=sum(p.dead_lettered for p in old) if lane == 0 else 0,
                layout=closing.layout + 1,
                lane=lane,
                lanes=closing.lanes,
                closing=None,
            )
            for lane in range(closing.lanes)
        ]
    return sorted(here, key=lambda position: -position.lane)


def layout_of(lane_name: str, topic_prefix: str) -> int | None:
    """The layout's number in a lane's name as Postgres has it; None for a lane of another installation."""
    match = re.fullmatch(re.escape(topic_prefix) + r"relay-(\d{1,9})-\d{1,2}", lane_name)
    return None if match is None else int(match[1])
