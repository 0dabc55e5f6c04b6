"""The steps that put every lane where the topics and the table say it is.

    1. hold the lanes' leases: a relay under a restarter stands by meanwhile; one that lives makes us refuse
    2. fence every lane that is known: what was cut off or stopped can publish nothing more
    3. wait until every transaction is decided, read the positions and what the topics hold
    4. compare with event_log, and restamp: one transaction of Postgres
    5. write the positions
    6. let the sequence pass what the topics hold

What must stay true: a crash between any two of them is harmless, and running it again ends right. Up to 5 no relay
accepts the positions (they do not belong here), and nothing is published, so the topics still say the same. That is why
the sequence is last: with it above the old positions' top, a relay would accept them.
A dry run does 1, 3 and 4, and takes 4 back.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from os import getpid
from pathlib import Path

import psycopg

from afluente import faults
from afluente.clock import Clock, SystemClock
from afluente.errors import Refused
from afluente.settings import KafkaSettings
from afluente.telemetry import get_logger
from producers.relay.cluster import Cluster, ClusterFacts
from producers.relay.lanes import fence, read_positions
from producers.relay.lease import Lease
from producers.relay.position import Identity, Position, lane_key
from producers.relay.reposition.case import (
    Case,
    Diagnosis,
    diagnose,
    is_whole,
    layout_of,
    positions_at,
    positions_here,
    published_at_most,
)
from producers.relay.reposition.content import Content, Found
from producers.relay.reposition.table import ADVANCE_AT_MOST, Comparison, Table, is_conflict
from producers.relay.source import Source
from schemas.topics import Topics

OWNED_FOR_S = 12.0  # a killed relay's lease lasts 8 s; one under a restarter has it for a moment now and then
RENEW_EVERY_S = 1.0
TRIES = 5
NEWEST = 500  # offsets of each partition that pg_upgrade's check looks at
TELL_EVERY_S = 2.0

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Options:
    """`apply`: do it. `since`: rows from before it count as published. `lost_file`: where to list what is lost.
    `although_none_match`: the topics hold other events than the table, and that is right."""

    apply: bool = False
    since: datetime | None = None
    lost_file: Path | None = None
    pg_upgrade: bool = False
    although_none_match: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was found, and with `applied` done. `settled`: published rows that got another transaction id; `comparison`
    is None after --pg-upgrade, which compares only the newest records."""

    applied: bool
    diagnosis: Diagnosis
    comparison: Comparison | None
    settled: int
    layout: int | None
    lanes: int | None


class Reposition:
    """One run. Raises Refused when a relay lives, when the sides do not match, or on a standby; Unavailable when
    Kafka is."""

    def __init__(
        self,
        kafka_settings: KafkaSettings,
        postgres_url: str,
        options: Options | None = None,
        *,
        clock: Clock | None = None,
        tell: Callable[[int, int], None] | None = None,
    ) -> None:
        """`tell` is called every few seconds with the records read and those there are."""
        self._settings, self._url, self._options = kafka_settings, postgres_url, options or Options()
        self._clock, self._tell = clock or SystemClock(), tell
        self._topics = Topics(kafka_settings.topic_prefix)
        self._instance = f"reposition-{socket.gethostname()}-{getpid()}-{secrets.token_hex(3)}"

    def run(self) -> Outcome:
        topic_names = [*self._topics.families(), self._topics.relay_dead_letter]
        with (
            closing(Cluster(self._settings, self._topics)) as cluster,
            closing(Source(self._url)) as source,
            closing(Table(self._url, topic_names, self._topics.relay_dead_letter)) as table,
        ):
            facts = cluster.facts()
            source.facts()  # not on a standby
            lanes = self._lanes(table.lanes(), read_positions(cluster, _nothing))
            with _held(self._url, [self._settings.topic_prefix + lane for lane in lanes], self._instance) as check:
                if self._options.apply:
                    for lane in lanes:
                        with fence(self._settings, self._topics, facts, lane, check):
                            pass
                cluster.require_decided(facts.partitions, check)
                positions = read_positions(cluster, check)
                mending = _Mending(self, cluster, facts, source, table, positions, check)
                published_to = source.published_to(self._settings.topic_prefix)
                return mending.upgraded(published_to) if self._options.pg_upgrade else mending.mended(published_to)

    def _lanes(self, names: Iterable[str], positions: Sequence[Position]) -> list[str]:
        """The keys of all lanes that somebody may still believe to own."""
        prefix = self._settings.topic_prefix
        present = max((position.layout for position in positions), default=0)
        keys = {lane_key(position.layout, lane) for position in positions for lane in range(position.lanes)}
        for position in positions:
            if position.closing is not None:
                keys |= {lane_key(position.closing.layout, lane) for lane in range(position.closing.lanes)}
        for name in names:
            if (layout := layout_of(name, prefix)) is not None and layout >= present:
                keys.add(name.removeprefix(prefix))
        return sorted(keys)


class _Mending:
    """Steps 3 to 6, with what they need at hand."""

    def __init__(
        self,
        run: Reposition,
        cluster: Cluster,
        facts: ClusterFacts,
        source: Source,
        table: Table,
        positions: Sequence[Position],
        check: Callable[[], None],
    ) -> None:
        self._settings, self._topics, self._options = run._settings, run._topics, run._options
        self._clock, self._instance, self._tell = run._clock, run._instance, run._tell
        self._cluster, self._facts, self._table, self._check = cluster, facts, table, check
        self._database, self._has, self._positions = source.facts(), source.has, positions
        self._now = Identity(self._database.identity, facts.identity)

    def mended(self, published_to: str | None) -> Outcome:
        """The general case: the topics say what was published."""
        options, diagnosis = self._options, self._diagnose(published_to)
        content = Content(self._settings, self._topics, self._facts.partitions, since=options.since)
        self._table.take(self._told(content))
        for attempt in range(1, TRIES + 1):
            try:
                return self._compare_and_mend(content, diagnosis)
            except psycopg.Error as error:
                if not is_conflict(error) or attempt == TRIES:
                    raise
                _log.info("relay.reposition_again", attempt=attempt, error=str(error).strip())
        raise AssertionError("unreachable")

    def _compare_and_mend(self, content: Content, diagnosis: Diagnosis) -> Outcome:
        options = self._options
        if options.apply and (released := self._table.release_published()):
            _log.info("relay.deferred_settled", count=released)
        anew = not is_whole(self._positions) and Case.NEVER_PUBLISHED not in diagnosis.cases
        with self._table.compared(
            content.border, since=options.since, published_at_most=published_at_most(self._positions)
        ) as comparison:
            if options.lost_file is not None:
                with options.lost_file.open("w", encoding="utf-8") as file:
                    self._table.list_lost(file)
            if not options.apply:
                return self._outcome(diagnosis, comparison)
            self._require_sense(comparison)
            settled = self._table.restamp(self._settings.topic_prefix, ask_again=anew)
            self._check()
            faults.point("reposition.before_commit")
        faults.point("reposition.after_commit")
        target = self._write(positions_at(comparison.place, self._positions, self._now, self._known_layouts()))
        faults.point("reposition.before_sequence")
        self._table.advance_sequence(comparison.highest_seq)
        _log.info(
            "relay.repositioned",
            cases=[str(case) for case in diagnosis.cases],
            to_publish=comparison.to_publish,
            assumed_published=comparison.assumed,
            lost=comparison.lost,
            settled=settled,
        )
        return self._outcome(diagnosis, comparison, settled, target)

    def upgraded(self, published_to: str | None) -> Outcome:
        """After pg_upgrade, which keeps rows, transaction ids and the sequence: all but the identity holds."""
        diagnosis = self._diagnose(published_to)
        if diagnosis.cases != (Case.OTHER_POSTGRES,):
            raise Refused(
                f"this is not what pg_upgrade leaves: {'; '.join(diagnosis.reasons) or 'the positions belong here'}",
                hint="run it without --pg-upgrade, which shows what it would do",
            )
        entries = [entry for position in self._positions for entry in position.entries]
        snapshots = [entry.s1 for entry in entries] + [e.window.s2 for e in entries if e.window is not None]
        reasons = []
        if (needed := max(snapshot.xmax for snapshot in snapshots)) > (next_id := self._table.next_transaction()):
            reasons.append(f"the next transaction id is {next_id}, and the position has seen {needed - 1}")
        content = Content(self._settings, self._topics, self._facts.partitions, newest=NEWEST)
        self._table.take(self._told(content))
        top = max(entry.top for entry in entries)
        if absent := self._table.absent(top):
            reasons.append(f"{absent} of the newest events on the topics are not in the table")
        if reasons:
            raise Refused(
                f"this is not what pg_upgrade leaves: {'; '.join(reasons)}",
                hint="a restored dump is repositioned without --pg-upgrade",
            )
        if not self._options.apply:
            return self._outcome(diagnosis, None)
        target = self._write(positions_here(self._positions, self._now, lambda entry: entry))
        _log.info("relay.repositioned", cases=[str(case) for case in diagnosis.cases], pg_upgrade=True)
        return self._outcome(diagnosis, None, 0, target)

    def _diagnose(self, published_to: str | None) -> Diagnosis:
        return diagnose(self._positions, self._now, self._database.last_seq, published_to, self._has)

    def _require_sense(self, comparison: Comparison) -> None:
        if comparison.records and not comparison.published and not self._options.although_none_match:
            raise Refused(
                f"the topics hold {comparison.records} records, and not one is of a row that is here: "
                f"is {self._database.identity.name} the right database, and the topic prefix its own?",
                hint="if they are: --although-none-match",
            )
        if comparison.highest_seq - self._database.last_seq > ADVANCE_AT_MOST:
            raise Refused(
                f"a record on the topics has seq {comparison.highest_seq}, and the sequence of event_log stands at "
                f"{self._database.last_seq}: that is no record of this relay's",
                hint="--list FILE shows where it is",
            )

    def _known_layouts(self) -> list[int]:
        prefix = self._settings.topic_prefix
        return [number for name in self._table.lanes() if (number := layout_of(name, prefix)) is not None]

    def _write(self, targets: Sequence[Position]) -> Position:
        """Write each for its lane, fenced again, as the first fence may be long ago; the last one makes them hold."""
        before = {position.key: position for position in self._positions}
        for target in targets:
            position = target.next(target.entries, instance=self._instance, at=self._clock.now(), published=0, dead=0)
            with fence(self._settings, self._topics, self._facts, target.key, self._check) as session:
                found = self._cluster.read_position(target.lane, target.key, self._check)
                if target.key in before and found != before[target.key]:
                    raise Refused(f"{target.key} was written meanwhile by {found and found.instance}: run it again")
                session.publish((), position)
            faults.point("reposition.lane_written")
        return targets[-1]

    def _told(self, content: Content) -> Iterator[Found]:
        told_at = time.monotonic()
        for found in content.read(self._check):
            yield found
            if self._tell is not None and time.monotonic() - told_at >= TELL_EVERY_S:
                self._tell(content.passed, content.total)
                told_at = time.monotonic()

    def _outcome(
        self, diagnosis: Diagnosis, comparison: Comparison | None, settled: int = 0, target: Position | None = None
    ) -> Outcome:
        return Outcome(
            applied=target is not None,
            diagnosis=diagnosis,
            comparison=comparison,
            settled=settled,
            layout=None if target is None else target.layout,
            lanes=None if target is None else target.lanes,
        )


@contextmanager
def _held(url: str, names: Sequence[str], instance: str) -> Iterator[Callable[[], None]]:
    """Hold these lanes' leases, renewed by a thread, since what is done meanwhile may take minutes in one statement.
    Gives a function that raises when one was taken from us. Refused when a relay owns one."""
    leases = [Lease(url, name, instance) for name in names]
    stop, failed = threading.Event(), []

    def renew() -> None:
        while not stop.wait(RENEW_EVERY_S):
            for lease in leases:
                try:
                    lease.renew()
                except Exception as error:
                    failed.append(error)
                    return

    def check() -> None:
        if failed:
            raise failed[0]

    thread = threading.Thread(target=renew, name="reposition-leases", daemon=True)
    try:
        for name, lease in zip(names, leases, strict=True):
            _acquire(url, name, lease)
        thread.start()
        yield check
    finally:
        stop.set()
        if thread.is_alive():
            thread.join()
        for lease in leases:
            lease.release()


def _acquire(url: str, name: str, lease: Lease) -> None:
    over = threading.Event()
    patience = threading.Timer(OWNED_FOR_S, over.set)
    patience.start()
    try:
        if not lease.acquire(over):
            with closing(Source(url)) as source:
                lane = source.lane(name)
            raise Refused(
                f"{name} is owned by {lane.instance if lane is not None else 'a relay'}, which lives",
                hint="stop every relay of this installation, then run it again",
            )
    finally:
        patience.cancel()


def _nothing() -> None:
    pass
