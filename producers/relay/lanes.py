"""How many lanes there are, and the change to another number of them.

A layout is a numbered division of the 256 hash slots among lanes. A change is a sequence of Kafka transactions, each of
which may be the last before a crash; whoever comes next, a relay or the command, does the rest:

    1. each old lane, lane 0 first: fence its owner, read its position, write it back `closing`
    2. each new lane, lane 0 last: fence, and unless it has a position, write its first: the parts of all old entries
       that are of its slots, as they stand, open windows included

What must stay true:
- an old lane that is closing publishes nothing more: its owner was fenced, and whoever reads `closing` stops;
- a new lane has its first position only when all old lanes are closing, so it is the same whoever writes it;
- the newest record of partition 0 names the layout: its lane 0 is the first to close and the last to be made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from afluente import faults, postgres
from afluente.clock import Clock
from afluente.errors import Refused
from afluente.settings import KafkaSettings
from afluente.telemetry import get_logger
from producers.relay.cluster import Cluster, ClusterFacts, Heartbeat
from producers.relay.errors import PositionError, PositionRefused
from producers.relay.position import (
    LANES_AT_MOST,
    LAYOUT,
    Closing,
    Identity,
    Position,
    lane_key,
    lane_slots,
    merged,
)
from producers.relay.publish import Session
from producers.relay.source import Source
from schemas.topics import Topics

LOCK_EVERY_S = 0.1

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Layout:
    number: int = LAYOUT
    lanes: int = 1


def current_layout(cluster: Cluster, heartbeat: Heartbeat) -> Layout:
    """The present layout, or the one that a change is leaving. Waits for no transaction."""
    newest = cluster.peek_layout(heartbeat)
    return Layout() if newest is None else Layout(newest.layout, newest.lanes)


def read_positions(cluster: Cluster, heartbeat: Heartbeat) -> list[Position]:
    """The committed positions of all lanes of the present layout; empty when nothing was ever published."""
    layout = current_layout(cluster, heartbeat)
    found = (cluster.read_position(lane, lane_key(layout.number, lane), heartbeat) for lane in range(layout.lanes))
    return [position for position in found if position is not None]


def divided(old: Sequence[Position], lanes: int) -> list[Position]:
    """The first positions of `lanes` lanes, from those of all lanes of the layout before. No I/O."""
    if {position.lane for position in old} != set(range(old[0].lanes)):
        raise PositionError(f"of {old[0].lanes} lanes, only {len(old)} have a position")
    entries = [entry for position in old for entry in position.entries]
    return [
        replace(
            old[0],
            entries=merged(part for entry in entries if (part := entry.within(lane_slots(lane, lanes))) is not None),
            number=1,
            published=sum(position.published for position in old) if lane == 0 else 0,
            dead_lettered=sum(position.dead_lettered for position in old) if lane == 0 else 0,
            layout=old[0].layout + 1,
            lane=lane,
            lanes=lanes,
            closing=None,
        )
        for lane in range(lanes)
    ]


def first_position(topics: Topics, source: Source, identity: Identity) -> Position:
    """Of a relay that has never published: the whole table is before it. PositionRefused when one has."""
    if (cluster := source.published_to(topics.prefix)) is not None:
        raise PositionRefused(
            topics.prefix + lane_key(LAYOUT, 0),
            [f"there is none in {topics.positions}, but cluster {cluster} was published to"],
        )
    return Position(identity=identity)


def settle_lanes(
    settings: KafkaSettings,
    postgres_url: str,
    lanes: int | None,
    *,
    instance: str,
    clock: Clock,
    heartbeat: Heartbeat,
    under_load: bool = False,
) -> Layout:
    """The present layout; when it has not so many `lanes` (None: as many as there are), it is changed first.

    Refused when relays own lanes, unless `under_load`: two that were told different numbers would change it for ever.
    """
    topics = Topics(settings.topic_prefix)
    cluster = Cluster(settings, topics)
    try:
        facts = cluster.facts()
        layout = current_layout(cluster, heartbeat)
        if lanes is None or lanes == layout.lanes:
            return layout
        source = Source(postgres_url)
        try:
            if (owners := source.owners(topics.prefix)) and not under_load:
                raise Refused(
                    f"{', '.join(owners)} run {layout.lanes} lane{'s' * (layout.lanes != 1)}, not {lanes}",
                    hint=f"`afluente relay lanes {lanes}` changes it under them; or stop them first",
                )
            identity = Identity(source.facts().identity, facts.identity)
            change = LaneChange(settings, cluster, postgres_url, instance=instance, clock=clock, heartbeat=heartbeat)
            return change.begin(lanes, identity, lambda: first_position(topics, source, identity))
        finally:
            source.close()
    finally:
        cluster.close()


class LaneChange:
    """Begins a change and completes one. Any error: do it again, from the start of `complete`."""

    def __init__(
        self,
        settings: KafkaSettings,
        cluster: Cluster,
        postgres_url: str,
        *,
        instance: str,
        clock: Clock,
        heartbeat: Heartbeat,
    ) -> None:
        self._settings, self._cluster, self._postgres_url = settings, cluster, postgres_url
        self._instance, self._clock, self._heartbeat = instance, clock, heartbeat
        self._topics = Topics(settings.topic_prefix)

    def begin(self, lanes: int, identity: Identity, first: Callable[[], Position]) -> Layout:
        """Go over to so many `lanes`; the layout that holds then. `first` makes the position of a relay that has never
        published. Raises Refused, and PositionRefused when the positions are not of `identity`."""
        if not 1 <= lanes <= LANES_AT_MOST:
            raise Refused(f"{lanes} lanes cannot be: there are 1 to {LANES_AT_MOST}")
        with self._alone():
            facts = self._cluster.facts()
            layout = current_layout(self._cluster, self._heartbeat)
            for lane in range(layout.lanes):
                seen = self._cluster.peek_position(lane, lane_key(layout.number, lane), self._heartbeat)
                if seen is not None and (reasons := seen.identity.differences(identity)):
                    raise PositionRefused(self._settings.topic_prefix + seen.key, reasons)
            layout = self._complete(facts, layout.number) or layout
            if layout.lanes == lanes:
                return layout
            with self._fenced(facts, layout.number, 0) as (session, position):
                closing = replace(position or first(), closing=Closing(layout.number + 1, lanes))
                self._write(session, closing)
            faults.point("lanes.begun")
            done = self._complete(facts, layout.number)
            if done is None:
                raise PositionError(f"lane 0 of layout {layout.number} did not stay closing")
            return done

    def complete(self, layout: int) -> Layout | None:
        """Finish the change that leaves this layout, if there is one: the layout that holds then."""
        with self._alone():
            return self._complete(self._cluster.facts(), layout)

    def _complete(self, facts: ClusterFacts, number: int) -> Layout | None:
        """Every step looks what is there first, and does only what is missing."""
        with self._fenced(facts, number, 0) as (_, lane_0):
            if lane_0 is None or lane_0.closing is None:
                return None
        closing, old = lane_0.closing, [lane_0]
        for lane in range(1, lane_0.lanes):
            with self._fenced(facts, number, lane) as (session, position):
                if position is None:
                    raise PositionError(f"lane {lane} of layout {number} has no position")
                if position.closing is None:
                    position = self._write(session, replace(position, closing=closing))
                    faults.point("lanes.closed")
                old.append(position)
        for new in reversed(divided(old, closing.lanes)):
            with self._fenced(facts, new.layout, new.lane) as (session, position):
                if position is None:
                    self._write(session, new)
                    faults.point("lanes.made")
        _log.info("relay.lanes_changed", layout=closing.layout, lanes=closing.lanes, before=lane_0.lanes)
        return Layout(closing.layout, closing.lanes)

    def _write(self, session: Session, position: Position) -> Position:
        position = replace(position, number=position.number + 1, instance=self._instance, written_at=self._clock.now())
        session.publish((), position)
        return position

    @contextmanager
    def _fenced(self, facts: ClusterFacts, layout: int, lane: int) -> Iterator[tuple[Session, Position | None]]:
        """A session as the lane's owner, with its committed position as it is after that."""
        key = lane_key(layout, lane)
        with fence(self._settings, self._topics, facts, key, self._heartbeat) as session:
            yield session, self._cluster.read_position(lane, key, self._heartbeat)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Two that change lanes at once would only fence each other; Postgres makes them take turns."""
        key = f"afluente.relay_lanes:{self._settings.topic_prefix}"
        with postgres.connect(self._postgres_url, application_name="afluente-relay-lanes", autocommit=True) as conn:
            while True:
                row = conn.execute("SELECT pg_try_advisory_lock(hashtext(%s))", [key]).fetchone()
                if row is not None and row[0]:
                    break
                self._heartbeat()
                time.sleep(LOCK_EVERY_S)
            yield


@contextmanager
def fence(
    settings: KafkaSettings, topics: Topics, facts: ClusterFacts, key: str, heartbeat: Heartbeat
) -> Iterator[Session]:
    """A session under a lane's transactional id: whoever had it can commit nothing more."""
    session = Session(settings, topics, facts, settings.topic_prefix + key, heartbeat)
    try:
        session.init()
        yield session
    finally:
        session.discard()
