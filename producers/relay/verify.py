"""Is what was committed what was published? Rows of `event_log` (or of the archive) against the records in the topics.

What must stay true:
- the relay's position is read first, then the ends of the topics, then the database's snapshot is taken. So a row that
  the position is past has its record before the ends, and a record before the ends has its row in the snapshot: nothing
  that goes on meanwhile looks like a difference, and `until` may be now;
- what cannot be compared (retention has deleted records, a month has left the table) is counted and said, and neither
  called missing nor called equal;
- only reading: no group is joined, nothing is committed, no lock is taken.

A row stands in the topics as one record, or as a dead letter of the relay, or as both once the letter was published
after all. Records without `seq` were produced by services themselves and are counted apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from datetime import date, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import dict_row

import sql
from afluente import kafka, postgres
from afluente.archive import digest
from afluente.errors import Refused
from afluente.kafka.reading import TopicReader, offsets_at, retained, retention
from afluente.settings import KafkaSettings
from producers.relay.cluster import Cluster
from producers.relay.comparing import (
    AT_ONCE,
    Bucket,
    Buckets,
    ById,
    Difference,
    Key,
    Kind,
    Published,
    Seen,
    Source,
    differing,
    portions,
    tally,
)
from producers.relay.errors import OnStandby, PositionRefused
from producers.relay.lanes import read_positions
from producers.relay.position import Position
from producers.relay.sides import CLOCKS_DIFFER, DeadLetter, Limits, NotComparable, Progress, Records, Rows, Window
from schemas.topics import Topics

DIFFERENCES_AT_MOST = 10_000  # looked for; beyond that something is wrong as a whole, and no list of ids says what
LETTERS_NAMED = 1_000

_SQL = sql.queries("relay_verify")


@dataclass(frozen=True, slots=True)
class Hour:
    """One organization's hour: counts and hashes on both sides. `hour`: its beginning. `is_equal`: once the ids were
    looked at, where the hashes differed."""

    organization_id: UUID
    hour: datetime
    rows: int
    records: int
    dead_letters: int
    rows_hash: str
    topic_hash: str
    is_equal: bool


@dataclass(slots=True)
class Result:
    """What was found. `rows`, `records` and `dead_lettered` are of the comparable part; `waiting` are those of the rows
    that the relay has not come to. `is_complete` is False when there are more differences than were looked at."""

    since: datetime
    until: datetime
    organization_id: UUID | None
    rows: int = 0
    records: int = 0
    dead_lettered: int = 0
    reprocessed: int = 0
    waiting: int = 0
    directly_produced: int = 0
    is_complete: bool = True
    differences: list[Difference] = field(default_factory=list)
    dead_letters: list[DeadLetter] = field(default_factory=list)
    not_comparable: list[NotComparable] = field(default_factory=list)
    hours: list[Hour] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        return not self.differences and self.is_complete

    @property
    def not_compared(self) -> int:
        return sum(part.events for part in self.not_comparable)


def verify(
    settings: KafkaSettings,
    dsn: str,
    *,
    since: datetime,
    until: datetime | None = None,
    organization_id: UUID | None = None,
    archived: Path | None = None,
    at_once: int = AT_ONCE,
    progress: Progress = lambda what, done, total: None,
) -> Result:
    """Compare the events with since <= created_at < until (None: now, by Postgres' clock).

    `archived`: the archive's directory, for days whose month has left the table. Reads the topics from `since` to their
    ends once, and once more for each `at_once` events among which there is a difference.

    Raises OnStandby, PositionRefused when the relay's position is of another database, Refused when a topic is missing
    or the window is empty, ArchiveError when a day's file cannot be believed, and Unavailable, KafkaException or
    psycopg.OperationalError when a dependency is away.
    """
    if until is not None and until <= since:
        raise Refused(f"the window ends ({until.isoformat()}) before it begins ({since.isoformat()})")
    topics = Topics(settings.topic_prefix)
    # 1. the position, 2. the topics' ends, 3. the snapshot: the order is the point, see above
    with closing(Cluster(settings, topics)) as cluster:
        partitions = cluster.facts().partitions
        positions = read_positions(cluster, lambda: None)
    admin = kafka.admin(settings)
    names = [*topics.families(), topics.relay_dead_letter]
    held = retained(admin, [(name, number) for name in names for number in range(partitions[name])])
    begin = offsets_at(admin, held, since - CLOCKS_DIFFER)
    starts = {place: what.end if begin[place] is None else begin[place] or 0 for place, what in held.items()}
    ends = {place: what.end for place, what in held.items()}
    with postgres.connect(dsn, application_name="afluente-relay-verify") as conn, TopicReader(settings) as reader:
        conn.isolation_level, conn.read_only = psycopg.IsolationLevel.REPEATABLE_READ, True
        scene = _scene(conn)
        _require_own(positions, scene, settings.topic_prefix)
        window = Window(since, min(until or scene.now, scene.now), organization_id)
        kept = retention(admin, [topics.relay_dead_letter])
        limits = Limits(window, topics, partitions, held, scene.months, scene.now, kept)
        published = Published(entry for position in positions for entry in position.entries)
        rows = Rows(conn, limits, published, archived)
        records = Records(reader, limits, starts, ends, letters_named=LETTERS_NAMED)
        result = Result(window.since, window.until, organization_id)
        _Comparison(rows, records, result, at_once, progress).run()
        result.not_comparable += limits.not_comparable()
        conn.rollback()
    return result


@dataclass(frozen=True, slots=True)
class _Scene:
    now: datetime
    in_recovery: bool
    system_identifier: str
    database_oid: int
    database_name: str
    months: list[date]


def _scene(conn: psycopg.Connection[Any]) -> _Scene:
    conn.execute(_SQL["stay"])
    row = conn.cursor(row_factory=dict_row).execute(_SQL["scene"]).fetchone()
    assert row is not None
    scene = _Scene(**row)
    if scene.in_recovery:
        raise OnStandby()  # rows that it has not received yet would look like records that nobody wrote
    return scene


def _require_own(positions: Iterable[Position], scene: _Scene, prefix: str) -> None:
    """Which rows wait is a matter of transaction ids, which mean nothing in another database."""
    for position in positions:
        database = position.identity.database
        if (database.system_identifier, database.oid) != (scene.system_identifier, scene.database_oid):
            reason = f"it is of the database {database.name} of another server or time; this is {scene.database_name}"
            raise PositionRefused(prefix + position.key, [reason], hint="afluente relay reposition")


class _Comparison:
    """The passes over both sides: sums, then parts of sums where they are too many, then ids."""

    def __init__(self, rows: Rows, records: Records, result: Result, at_once: int, progress: Progress) -> None:
        self._rows, self._records, self._result = rows, records, result
        self._at_once, self._progress = at_once, progress
        self._looked_at: set[Key] = set()

    def run(self) -> None:
        result, hours = self._result, dict[Key, Bucket]()
        self._rows.add_up(hours, self._progress)
        tally(self._records.seen(self._progress), hours, lambda event: event.key)
        result.directly_produced = self._records.directly_produced
        result.dead_letters = self._records.letters
        self._count_equal(hours)
        self._look(differing(hours))
        accused = {(d.organization_id.int, digest.hour_of(d.created_at)) for d in result.differences}
        for key, bucket in sorted(hours.items(), key=lambda item: (item[0][1], item[0][0])):
            is_equal = bucket.is_equal or (key in self._looked_at and key not in accused)
            result.hours.append(_hour(key, bucket, is_equal))
            result.rows += bucket.table[0]
            result.records += bucket.counts[Source.record]

    def _look(self, suspects: Buckets) -> None:
        """Look at the ids where sums differ."""
        result, expired = self._result, 0
        reprocessed: set[UUID] = set()
        for keys in portions(suspects, self._at_once):
            for wanted in self._parts(keys, suspects):
                if len(result.differences) >= DIFFERENCES_AT_MOST:
                    result.is_complete = False
                    break
                ids = ById()
                for event in self._both(keys):
                    if wanted is None or event.key_of_part() in wanted:
                        ids.take(event)
                verdict = ids.judge()
                result.differences += verdict.differences
                result.waiting += verdict.waiting
                result.dead_lettered += verdict.dead_lettered
                reprocessed |= verdict.reprocessed
                expired += verdict.expired
            else:
                self._looked_at |= keys
            if not result.is_complete:
                break
        if expired:
            reason = "not in the topics, and may be among the records that retention has deleted"
            result.not_comparable.append(NotComparable("events", None, expired, reason))
        result.reprocessed = len(reprocessed)
        result.dead_letters = [letter for letter in result.dead_letters if letter.event_id not in reprocessed]
        result.differences = sorted(_joined(result.differences), key=lambda d: (d.created_at, d.event_id.int, d.kind))

    def _parts(self, keys: set[Key], suspects: Buckets) -> Iterator[set[Key] | None]:
        """None when the events of `keys` are few enough; else their parts that differ, in portions that are."""
        if sum(suspects[key].size for key in keys) <= self._at_once:
            yield None
            return
        parts: Buckets = {}
        tally(self._both(keys), parts, Seen.key_of_part)
        self._count_equal(parts)
        yield from portions(differing(parts), self._at_once)

    def _count_equal(self, buckets: Buckets) -> None:
        for bucket in buckets.values():
            if bucket.is_equal:
                self._result.waiting += bucket.waits
                self._result.dead_lettered += bucket.counts[Source.letter]

    def _both(self, keys: set[Key]) -> Iterator[Seen]:
        yield from self._rows.of(keys, self._progress)
        yield from self._records.of(keys, self._progress)


def _joined(differences: Iterable[Difference]) -> Iterator[Difference]:
    """A record that names another organization or hour than its row is missing in one place and too much in another:
    it is one difference."""
    missing = {d.event_id: d for d in differences if d.kind is Kind.missing_in_topic}
    astray = {d.event_id: d for d in differences if d.kind is Kind.only_in_topic and d.event_id in missing}
    for difference in differences:
        if difference.event_id not in astray:
            yield difference
        elif difference.kind is Kind.missing_in_topic:
            other = astray[difference.event_id]
            yield Difference(
                Kind.content_differs,
                difference.event_id,
                difference.organization_id,
                difference.created_at,
                difference.event_type,
                difference.seq,
                f"{other.detail}: organization {other.organization_id}, created {other.created_at.isoformat()}, "
                "is not the row's",
            )


def _hour(key: Key, bucket: Bucket, is_equal: bool) -> Hour:
    (rows, rows_total), (_, topic_total) = bucket.table, bucket.topic
    return Hour(
        UUID(int=key[0]),
        digest.start_of(key[1]),
        rows,
        bucket.counts[Source.record],
        bucket.counts[Source.letter],
        f"{rows_total:032x}",
        f"{topic_total:032x}",
        is_equal,
    )


def summary(result: Result) -> dict[str, Any]:
    """The figures, under the names that the command's JSON has."""
    kinds = Counter(difference.kind for difference in result.differences)
    return {
        "rows": result.rows,
        "records": result.records,
        "dead_lettered": result.dead_lettered,
        "reprocessed": result.reprocessed,
        "waiting": result.waiting,
        "directly_produced": result.directly_produced,
        "not_comparable": result.not_compared,
        **{kind.value: kinds[kind] for kind in Kind},
    }
