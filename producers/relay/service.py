"""One lane's relay: stands by, owns the lane, reads, publishes, and begins anew after whatever goes wrong.

What must stay true:
- a round (one Kafka session with one Postgres connection) begins with the position read from Kafka and claimed, and
  ends with the first error of either side. What was in memory ends with it; only who we are and what we had confirmed
  is kept, to tell a rival from a time-out and to notice a commit that the broker took back;
- nothing is published before identity, undecided transactions and the sequence were checked;
- a stop is obeyed within 10 s, whatever is being waited for;
- a lane that is closing publishes nothing: the change of lanes is completed, and the lane ends (LanesChanged).

A fenced session looks the same whether the broker timed our transaction out or a rival started. The claim tells: each
session's first transaction is the unchanged position with this instance's id. The last to have claimed never ends
itself, so of any number of rivals one lives.
"""

from __future__ import annotations

import math
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from operator import attrgetter
from os import getpid
from typing import NoReturn

import psycopg

from afluente import faults, postgres
from afluente.clock import Clock, SystemClock
from afluente.errors import Refused
from afluente.settings import KafkaSettings
from afluente.telemetry import get_logger, heartbeat, metrics
from producers.relay import reprocess
from producers.relay import source as reading
from producers.relay.cluster import REQUEST_TIMEOUT_S, Cluster, ClusterFacts
from producers.relay.control import Watch
from producers.relay.errors import (
    LanesChanged,
    PositionError,
    PositionRefused,
    SessionLost,
    Superseded,
    UndecidedError,
)
from producers.relay.lanes import LaneChange, Layout, current_layout, first_position
from producers.relay.lease import Lease
from producers.relay.numbers import Numbers
from producers.relay.position import LAYOUT, Entry, Identity, Position, Witness, lane_key
from producers.relay.publish import FENCED, REFUSED_RECORD, Report, Session, code_of
from producers.relay.records import Record, record_of
from producers.relay.source import Source
from producers.relay.turns import Turns
from schemas.topics import Topics

PAUSE_MIN_S, PAUSE_MAX_S, PAUSE_GROWTH = 0.001, 0.05, 1.25
# A Kafka transaction costs some 2 ms of CPU, the broker's included, whatever is in it. When many rows come, let
# more of them come into each: what the relay takes then, the writers lack.
GATHER_PER_ROW_S, GATHER_MAX_S = 0.000_25, 0.006
# A poll is slow while an open transaction has many rows at the end of the table: then poll less, not all the time.
POLL_SHARE, SLOW_PAUSE_MAX_S = 4, 0.5
PAUSED_LOOK_S = 0.1
IDLE_POSITION_EVERY_S = 5.0  # an old position makes the next start look through more ids
DEFERRED_EVERY_S = 0.2
REPORT_EVERY_S = 1.0
ROUND_PAUSE_MIN_S, ROUND_PAUSE_MAX_S = 0.05, 1.0
STOP_GRACE_S = 5.0  # for the chunk in hand; the position makes it safe to give it up
WATCH_EVERY_S = 10.0
MAINTENANCE_EVERY_S = 300.0
PARTITIONS_EVERY_S = 24 * 3600.0

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Options:
    """`chunk_rows`, `chunk_bytes`: bounds of one Kafka transaction. `log_records`: one log line for each record.
    `numbers`: keep those that take a question to Postgres, for somebody who asks for metrics."""

    take_over: bool = False
    log_records: bool = False
    chunk_rows: int = reading.CHUNK_ROWS
    chunk_bytes: int = reading.CHUNK_BYTES
    numbers: bool = False


def instance_name() -> str:
    """Who we are, in positions and leases: never the same twice."""
    return f"{socket.gethostname()}-{getpid()}-{secrets.token_hex(3)}"


class Relay:
    """One lane's relay, in whichever layout there is when `run` begins.

    `run` until `stop`; raises what a person must decide (Superseded, PositionRefused, ...), and LanesChanged when the
    layout is over: then a new Relay is to be made for a lane of the new one, if it has this lane.
    """

    def __init__(
        self,
        kafka_settings: KafkaSettings,
        postgres_url: str,
        options: Options | None = None,
        *,
        clock: Clock | None = None,
        lane: int = 0,
        lanes: int | None = None,
    ) -> None:
        """`lanes`: how many somebody has counted and looks after; with another number of them, `run` begins nothing."""
        self._kafka_settings, self._postgres_url = kafka_settings, postgres_url
        self._options, self._clock, self._lane = options or Options(), clock or SystemClock(), lane
        self._lanes = lanes
        self._topics = Topics(kafka_settings.topic_prefix)
        self.instance = instance_name()
        self._use(Layout())
        self._watch = Watch(postgres_url, kafka_settings.topic_prefix)
        self._stop = threading.Event()
        self._stopped_at: float | None = None
        # What outlives a round.
        self._claimed = False
        self._confirmed = 0  # number of our last transaction that Kafka confirmed
        self._fenced = False
        self._sending: Sequence[Record] = ()  # rows whose transaction is under way
        self._one_by_one = 0  # so many rows go out each in a transaction of its own
        self._refused: dict[int, str] = {}  # seq -> why the broker does not take this row, even alone

    def stop(self) -> None:
        """End soon. May be called from a signal handler or another thread."""
        self._stopped_at = self._stopped_at or time.monotonic()
        self._stop.set()

    def run(self) -> None:
        """Stand by, then publish until stopped."""
        cluster = Cluster(self._kafka_settings, self._topics)
        try:
            layout = self._find_layout(cluster)
            if layout is None:
                return
            if self._lanes not in (None, layout.lanes):
                raise LanesChanged(layout.number, layout.lanes)
            if self._lane >= layout.lanes:
                raise Refused(
                    f"there is no lane {self._lane}: the relay has {layout.lanes}, counted from 0",
                    hint="afluente relay lanes N",
                )
            if layout != self._layout:
                self._use(layout)
            self._watch.start()
            if self._lease.acquire(self._stop, take_over=self._options.take_over):
                self._rounds(cluster)
        finally:
            self._watch.stop()
            cluster.close()
            self._lease.release()
            self._tally.report()
            _log.info("relay.stopped", lane=self._name, instance=self.instance)

    def _use(self, layout: Layout) -> None:
        self._layout = layout
        self._key = lane_key(layout.number, self._lane)
        self._name = self._kafka_settings.topic_prefix + self._key  # transactional ids have no prefix of their own
        self._lease = Lease(self._postgres_url, self._name, self.instance)
        self._tally = _Tally(self._name)

    def _find_layout(self, cluster: Cluster) -> Layout | None:
        """None when stopped first: Kafka may be away for long."""
        while not self._stop.is_set():
            heartbeat.beat()
            try:
                cluster.facts()  # says which topic is missing, and what to do
                return current_layout(cluster, heartbeat.beat)
            except (PositionError, Refused):
                raise
            except Exception as error:
                _log.warning("relay.kafka_away", error=_words(error), again_in_s=ROUND_PAUSE_MAX_S)
                self._stop.wait(ROUND_PAUSE_MAX_S)
        return None

    def _rounds(self, cluster: Cluster) -> None:
        numbers = Numbers(self._postgres_url, self._name) if self._options.numbers else None
        background = _Background(self._postgres_url, cluster, numbers)
        pause = ROUND_PAUSE_MIN_S
        try:
            while not self._stop.is_set():
                heartbeat.beat()
                confirmed = self._confirmed
                try:
                    self._round(cluster, background)
                except (Superseded, LanesChanged, PositionRefused, UndecidedError, PositionError, Refused):
                    raise
                except psycopg.ProgrammingError:
                    raise  # a missing table or right: trying again does not mend it
                except Exception as error:
                    if postgres.refuses_login(error):
                        raise
                    # Not only KafkaException: a Future's TimeoutError, and a SystemError out of a callback, were seen.
                    if self._stop.is_set():
                        return
                    self._learn_from(error)
                    pause = ROUND_PAUSE_MIN_S if self._confirmed > confirmed else min(pause * 2, ROUND_PAUSE_MAX_S)
                    metrics.labels("afluente_relay_session_losses_total", lane=self._name).inc()
                    _log.warning("relay.session_lost", lane=self._name, error=_words(error), again_in_s=pause)
                    self._stop.wait(pause)
        finally:
            background.stop()

    def _round(self, cluster: Cluster, background: _Background) -> None:
        """One session: 1. where are we, 2. fence, 3. all decided?, 4. position, 5. ours?, 6. claim, 7. publish."""
        self._heartbeat()
        session: Session | None = None
        turns: Turns | None = None
        source = Source(self._postgres_url, chunk_rows=self._options.chunk_rows, chunk_bytes=self._options.chunk_bytes)
        try:
            # 1
            facts, identity = cluster.facts(), source.facts().identity
            # 2. But look first: one sent to the wrong place fences nobody, and a rival that fenced us is to live.
            if not self._claimed:
                seen = cluster.peek_position(self._lane, self._key, self._heartbeat)
                self._require_here(seen, Identity(identity, facts.identity))
            elif self._fenced:
                self._require_ours(self._read_position(cluster))
            session = Session(
                self._kafka_settings,
                self._topics,
                facts,
                self._name,
                self._heartbeat,
                report=self._log_records if self._options.log_records else None,
            )
            session.init()
            faults.point("relay.in_init")
            # 3, 4
            cluster.require_decided(facts.partitions, self._heartbeat)
            found = self._read_position(cluster)
            if found is None or found.closing is not None:
                self._end_if_lanes_change(cluster, found)
            # 5
            if self._claimed:
                self._require_ours(found)
            # Asked now: the one we fenced may have published rows that were not yet written at step 1.
            position = self._usable(found, facts, source)
            # 6
            position = self._commit(session, position, position.entries, ())
            self._claimed, self._fenced = True, False
            source.mark_claimed(self._name, facts.identity.cluster_id)
            _log.info(
                "relay.ready",
                lane=self._name,
                instance=self.instance,
                number=position.number,
                entries=len(position.entries),
                window_open=any(entry.window is not None for entry in position.entries),
                t1=min(entry.t1 for entry in position.entries),
            )
            self._note_answers(position.entries)
            # 7
            background.begin(facts)
            source.leave_out_sealed(position.entries)
            turns = Turns(
                source,
                lambda row: record_of(row, self._topics, facts.limits, facts.partitions, self._refused),
                position.entries,
            )
            self._publish(session, source, turns, position, background, facts)
        finally:
            if session is not None:
                session.discard()
            if turns is not None:
                turns.close()
            source.close()

    def _publish(
        self,
        session: Session,
        source: Source,
        turns: Turns,
        position: Position,
        background: _Background,
        facts: ClusterFacts,
    ) -> None:
        written_at = deferred_at = time.monotonic()
        pause = PAUSE_MIN_S
        while not self._stop.is_set():
            self._heartbeat()
            session.idle()
            if (now := time.monotonic()) - deferred_at >= DEFERRED_EVERY_S:
                source.release_due()
                deferred_at = now
            if background.attend(turns.entries):
                source.leave_out_sealed(turns.entries)

            if self._watch.halted:
                # Lease, claim and months go on; so the lane stays ours, and is known to be alive.
                self._stop.wait(PAUSED_LOOK_S)
                continue

            began, before = time.monotonic(), position
            position = self._publish_again(session, turns, position, facts)
            position = self._publish_next(session, turns, position)
            if position is not before:
                written_at, took = time.monotonic(), 0.0
                rows = position.published - before.published
                pause = max(PAUSE_MIN_S, min(rows * GATHER_PER_ROW_S, GATHER_MAX_S))
            else:
                took = time.monotonic() - began
                pause = min(pause * PAUSE_GROWTH, PAUSE_MAX_S)
                # What is empty needs no record: the position in memory has moved over nothing.
                if turns.entries != position.entries and time.monotonic() - written_at >= IDLE_POSITION_EVERY_S:
                    position = self._commit(session, position, turns.entries, ())
                    written_at = time.monotonic()
            self._tally.report_every(REPORT_EVERY_S)
            if not turns.behind:
                self._stop.wait(max(pause, min(took * POLL_SHARE, SLOW_PAUSE_MAX_S)))

    def _publish_next(self, session: Session, turns: Turns, position: Position) -> Position:
        """Publish what is next, if there is something. On its own, so that its rows go before others come."""
        records = turns.take(alone=self._one_by_one > 0)
        if not records:
            return position
        faults.point("relay.after_read")
        return self._commit(session, position, turns.entries, records)

    def _publish_again(self, session: Session, turns: Turns, position: Position, facts: ClusterFacts) -> Position:
        """Answer the requests to publish a dead letter again that these entries have not passed."""
        requested = self._watch.requested
        if all(entry.reprocessed >= requested for entry in turns.entries):
            return position
        with closing(postgres.connect(self._postgres_url, application_name="afluente-relay", autocommit=True)) as conn:
            most = 1 if self._one_by_one else reprocess.AT_ONCE
            prefix = self._kafka_settings.topic_prefix
            batch = reprocess.next_batch(conn, prefix, turns.entries, requested, rows=most)
            records = batch.records(self._topics, facts.limits, facts.partitions, self._refused)
            turns.replace(batch.after)
            if records:
                position = self._commit(session, position, turns.entries, records, again=True)
            faults.point("relay.reprocessed")
            reprocess.note(conn, batch, records)
        return position

    def _note_answers(self, entries: Sequence[Entry]) -> None:
        if any(entry.reprocessed for entry in entries):
            with closing(
                postgres.connect(self._postgres_url, application_name="afluente-relay", autocommit=True)
            ) as conn:
                reprocess.note_unnoted(conn, self._kafka_settings.topic_prefix, entries)

    def _commit(
        self,
        session: Session,
        position: Position,
        entries: Sequence[Entry],
        records: Sequence[Record],
        *,
        again: bool = False,
    ) -> Position:
        """Commit `records` with the position after them, and return that position. `again`: of rows the position has
        passed, which the table may have dropped."""
        dead = [record for record in records if record.dead]
        position = position.next(
            entries,
            instance=self.instance,
            at=self._clock.now(),
            published=len(records) - len(dead),
            dead=len(dead),
            witness=None if again else _highest(records, one_entry=len(entries) == 1),
        )
        self._sending = records
        session.publish(records, position)
        self._sending = ()
        self._confirmed = position.number
        self._one_by_one = max(0, self._one_by_one - len(records))
        self._tally.add(records)
        if dead:
            metrics.labels("afluente_relay_dead_lettered_total").inc(len(dead))
        for record in dead:
            self._refused.pop(record.row.seq, None)
            _log_dead_letter(record)
        return position

    def _read_position(self, cluster: Cluster) -> Position | None:
        return cluster.read_position(self._lane, self._key, self._heartbeat)

    def _require_ours(self, found: Position | None) -> None:
        if found is not None and found.instance != self.instance and found.closing is None:
            raise Superseded(self._name, found.instance)

    def _require_here(self, found: Position | None, now: Identity) -> None:
        if found is not None and (reasons := found.identity.differences(now)):
            self._refuse(*reasons)

    def _refuse(self, *reasons: str) -> NoReturn:
        raise PositionRefused(self._name, reasons)

    def _end_if_lanes_change(self, cluster: Cluster, found: Position | None) -> None:
        """Complete a change of lanes that left this lane closing, or not yet made: then raises LanesChanged."""
        layout = current_layout(cluster, self._heartbeat) if found is not None else self._layout
        if found is None and layout.number == LAYOUT:
            return
        if found is None or layout.number == found.layout:
            change = LaneChange(
                self._kafka_settings,
                cluster,
                self._postgres_url,
                instance=self.instance,
                clock=self._clock,
                heartbeat=self._heartbeat,
            )
            done = change.complete(self._layout.number if found is not None else layout.number - 1)
            if done is None:
                return
            layout = done
        raise LanesChanged(layout.number, layout.lanes)

    def _usable(self, found: Position | None, facts: ClusterFacts, source: Source) -> Position:
        """The position to go on from. PositionRefused when it does not belong here, or is gone."""
        database = source.facts()
        now = Identity(database.identity, facts.identity)
        if found is None:
            if self._confirmed or self._layout != Layout():
                self._refuse(f"it is gone from {self._topics.positions}")
            return first_position(self._topics, source, now)
        if (found.layout, found.lane, found.lanes) != (self._layout.number, self._lane, self._layout.lanes):
            raise PositionError(f"{self._name} holds the position of lane {found.lane} of layout {found.layout}")
        self._require_here(found, now)
        if (top := max(entry.top for entry in found.entries)) > database.last_seq:
            self._refuse(
                f"the sequence of event_log stands at {database.last_seq}, but rows up to {top} were seen: "
                "the database was put back to an earlier state"
            )
        if found.witness is not None and not source.has(found.witness):
            self._refuse(
                f"event {found.witness.id} was published as number {found.witness.seq} and is not in event_log: "
                "the database was put back to an earlier state"
            )
        if found.instance == self.instance and found.number < self._confirmed:
            # All is decided (step 3), so rows and position went together, and will be published again.
            _log.error("relay.commit_taken_back", lane=self._name, confirmed=self._confirmed, found=found.number)
        return replace(found, identity=now)

    def _learn_from(self, error: Exception) -> None:
        """What the next round must know of how this one ended."""
        code = code_of(error)
        self._fenced = self._fenced or code in FENCED
        if code in REFUSED_RECORD and self._sending:
            if len(self._sending) == 1:
                row = self._sending[0].row
                self._refused[row.seq] = f"the broker refuses its record: {_words(error)}"
            # The innocent ones of a chunk fail with the culprit. One to a transaction, only it will.
            self._one_by_one = len(self._sending)
        self._sending = ()

    def _heartbeat(self) -> None:
        if self._stopped_at is not None and time.monotonic() - self._stopped_at > STOP_GRACE_S:
            raise SessionLost("stopped before the work in hand was done")
        self._lease.renew()
        heartbeat.beat()

    def _log_records(self, reports: Sequence[Report]) -> None:
        for record, partition, offset in reports:
            if record.dead:
                continue  # said as relay.dead_lettered
            _log.info(
                "relay.published",
                topic=record.topic,
                partition=partition,
                offset=offset,
                event_id=str(record.row.id),
                event_type=record.row.event_type,
                organization_id=str(record.row.organization_id),
            )


class _Tally:
    """Counts what was published, and says so in the log at most every so often."""

    def __init__(self, lane: str) -> None:
        self._lane = lane
        self._counts: Counter[str] = Counter()
        self._reported_at = 0.0

    def add(self, records: Sequence[Record]) -> None:
        counts = Counter(record.topic for record in records)
        self._counts += counts
        for topic, count in counts.items():
            metrics.labels("afluente_relay_published_total", topic=topic).inc(count)

    def report_every(self, seconds: float) -> None:
        if self._counts and time.monotonic() - self._reported_at >= seconds:
            self.report()

    def report(self) -> None:
        if self._counts:
            _log.info("relay.published", lane=self._lane, count=self._counts.total(), topics=dict(self._counts))
            self._counts.clear()
            self._reported_at = time.monotonic()


class _Background:
    """A thread for what may take long: it looks whether the cluster is still the one that the session began with, makes
    the months ahead, seals those that are over (both may wait for a lock), and counts when `numbers` are kept."""

    def __init__(self, postgres_url: str, cluster: Cluster, numbers: Numbers | None) -> None:
        self._url, self._cluster, self._numbers = postgres_url, cluster, numbers
        self._moved_at = time.monotonic()
        self._expected: ClusterFacts | None = None
        self._entries: Sequence[Entry] = ()
        self._maintained = threading.Event()
        self._changed: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relay-background", daemon=True)

    def begin(self, facts: ClusterFacts) -> None:
        """A session begins with these facts."""
        self._expected, self._changed = facts, None
        if self._numbers is not None:
            self._numbers.owned()
        if not self._thread.is_alive() and not self._stop.is_set():
            self._thread.start()

    def attend(self, entries: Sequence[Entry]) -> bool:
        """Note the position; True when it is time to look which months are sealed. SessionLost: the cluster changed."""
        if self._entries is not entries:
            self._entries, self._moved_at = entries, time.monotonic()
        if self._changed is not None:
            raise SessionLost(f"the cluster is no longer as it was: {self._changed}")
        if self._maintained.is_set():
            self._maintained.clear()
            return True
        return False

    def stop(self) -> None:
        """End the thread, which may be inside a call of the cluster: close that only afterwards."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(REQUEST_TIMEOUT_S)

    def _run(self) -> None:
        maintained_at = partitions_at = -math.inf
        while not self._stop.is_set():
            now = time.monotonic()
            if now - maintained_at >= MAINTENANCE_EVERY_S:
                maintained_at = now
                if self._maintain(partitions=now - partitions_at >= PARTITIONS_EVERY_S):
                    partitions_at = now
            self._count()
            self._stop.wait(WATCH_EVERY_S)
            self._watch()

    def _watch(self) -> None:
        expected = self._expected
        if expected is None or self._stop.is_set():
            return
        try:
            if self._cluster.facts() != expected and self._expected is expected:
                self._changed = "topics or their settings"
        except Refused as error:
            self._changed = str(error)
        except Exception as error:
            # Away: the session finds out by itself.
            _log.debug("relay.watch_failed", error=_words(error))

    def _count(self) -> None:
        if self._numbers is not None and self._entries and not self._stop.is_set():
            try:
                self._numbers.show(self._entries, time.monotonic() - self._moved_at)
            except Exception as error:  # whatever it is: this thread also watches the cluster and makes months
                _log.debug("relay.watch_failed", error=_words(error))

    def _maintain(self, *, partitions: bool) -> bool:
        """True when it went well."""
        try:
            with postgres.connect(self._url, application_name="afluente-relay-months", autocommit=True) as conn:
                if partitions and (made := reading.ensure_partitions(conn)):
                    _log.info("relay.partitions_made", count=made)
                settled = next((entry for entry in self._entries if entry.window is None), None)
                if settled is not None and (sealed := reading.seal_months(conn, settled)):
                    _log.info("relay.months_sealed", count=sealed)
            self._maintained.set()
        except psycopg.Error as error:
            _log.warning("relay.maintenance_failed", error=_words(error))
            return False
        return True


def _highest(records: Sequence[Record], *, one_entry: bool) -> Witness | None:
    """The record's row that has the highest seq: of one entry's records the last one has."""
    if not records:
        return None
    highest = records[-1] if one_entry else max(records, key=attrgetter("seq"))
    return Witness(highest.seq, str(highest.row.id))


def _log_dead_letter(record: Record) -> None:
    headers = dict(record.headers)
    _log.warning(
        "relay.dead_lettered",
        event_id=str(record.row.id),
        organization_id=str(record.row.organization_id),
        event_type=record.row.event_type,
        seq=record.row.seq,
        error_class=headers["x-error-class"].decode(),
        reason=headers["x-error-message"].decode(),
    )


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()}"
