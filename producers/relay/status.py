"""How the relay stands: each lane's owner, position, lag and rate; what is open beneath it; what a person should know.

Reads and disturbs nobody: no lock, no transaction is waited for, and each count is bounded. What must stay true: it
says what is so. The relay waits for no transaction; so of an open one it says how many rows only its commit will show
(at most so many: numbers given out since it began that no visible row has), and what else it keeps from happening.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any
from uuid import UUID

import psycopg
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

import sql
from afluente import kafka, postgres
from afluente.errors import NotAllowed, Unavailable
from afluente.settings import KafkaSettings
from afluente.telemetry import get_logger
from producers.relay import control
from producers.relay.cluster import REQUEST_TIMEOUT_S, Cluster
from producers.relay.control import Pause
from producers.relay.lanes import Layout, current_layout
from producers.relay.position import Entry, Identity, Position, lane_key, lane_slots
from producers.relay.source import COUNT_LIMIT, Source, Waiting
from schemas.topics import Topics

RATE_OVER_S = 60.0
LOOK_BACK = 512  # records of relay.positions, divided among the lanes: a rate needs the positions of the last minute
READ_WITHIN_S = 10.0
ORGANIZATIONS = 10  # the most behind are named
TRANSACTIONS = 10  # the oldest are named
SCAN_ROWS = 100_000  # back from the newest, for what an open transaction hides

SILENT_S = 8.0
STILL_S = 30.0
BEHIND_S = 60.0
OLD_TRANSACTION_S, VERY_OLD_TRANSACTION_S = 300.0, 3600.0
MONTHS_AHEAD = timedelta(days=31)

_log = get_logger(__name__)
_QUERIES = sql.queries("relay_control")


@dataclass(frozen=True, slots=True)
class EntryState:
    """An entry of a position, and the committed rows it leaves unpublished, by organization: how many, since when."""

    entry: Entry
    waiting: Waiting
    organizations: dict[UUID, tuple[int, datetime]]


@dataclass(frozen=True, slots=True)
class LaneState:
    """One lane. `owner` None: nobody's. `position` None: never published; its entry is then what it would begin with.

    `rows_per_s`: published during the last `rate_over_s` seconds; None when nothing tells it.
    """

    number: int
    name: str
    owner: str | None
    owner_since: datetime | None
    owner_silent_s: float | None
    takeovers: int
    position: Position | None
    entries: tuple[EntryState, ...]
    rows_per_s: float | None
    rate_over_s: float

    @property
    def waiting(self) -> Waiting:
        return total(entry.waiting for entry in self.entries)

    @property
    def alive(self) -> bool:
        return self.owner is not None and (self.owner_silent_s or 0.0) <= SILENT_S


@dataclass(frozen=True, slots=True)
class Transaction:
    """An open transaction with an id, of any database of the server. What a login may not see of it is None.

    `rows_at_most`: rows that only its commit will show, 0 when it has not written to event_log. `at_least` when it
    began before all that was looked through. `rows_meanwhile`: committed since it began, and published or about to be:
    they do not wait for it. `months_held`: months that cannot be sealed before it ends. `ids_behind`: transactions
    begun since.
    """

    tx_id: int
    pid: int | None
    gid: str | None
    database: str | None
    user: str | None
    application: str | None
    state: str | None
    since: datetime | None
    age_s: float | None
    writes_events: bool
    rows_at_most: int
    at_least: bool
    rows_meanwhile: int
    months_held: int
    ids_behind: int


class Severity(StrEnum):
    note = "note"
    warning = "warning"
    problem = "problem"


@dataclass(frozen=True, slots=True)
class Remark:
    """What a person should know, and what to do about it."""

    kind: str
    severity: Severity
    found: str
    fix: str


@dataclass(frozen=True, slots=True)
class State:
    """The relay of one topic prefix. `undecided`: places (topic, partition, offset) with a transaction that nobody will
    end.
    `refusals`: why a relay that starts now would publish nothing, in words."""

    layout: int
    lanes: tuple[LaneState, ...]
    pause: Pause | None
    transactions: tuple[Transaction, ...]
    undecided: tuple[tuple[str, int, int], ...]
    refusals: tuple[str, ...]
    at: datetime

    @property
    def waiting(self) -> Waiting:
        return total(lane.waiting for lane in self.lanes)

    @property
    def lag_s(self) -> float:
        """For how long the oldest of the committed rows that are not published has waited; 0.0 when there is none."""
        oldest = self.waiting.oldest
        return 0.0 if oldest is None else max(0.0, (self.at - oldest).total_seconds())

    @property
    def blocker(self) -> Transaction | None:
        """The oldest open transaction that hides rows; when none does, the oldest of all."""
        return next((t for t in self.transactions if t.writes_events), next(iter(self.transactions), None))

    @property
    def position(self) -> Position | None:
        """That of the first lane."""
        return self.lanes[0].position

    @property
    def published(self) -> int:
        return sum(lane.position.published for lane in self.lanes if lane.position is not None)

    @property
    def dead_lettered(self) -> int:
        return sum(lane.position.dead_lettered for lane in self.lanes if lane.position is not None)

    @property
    def takeovers(self) -> int:
        return sum(lane.takeovers for lane in self.lanes)

    @property
    def rows_per_s(self) -> float | None:
        known = [lane.rows_per_s for lane in self.lanes if lane.rows_per_s is not None]
        return sum(known) if known else None

    @property
    def organizations(self) -> list[tuple[UUID, int, datetime]]:
        """The organizations with the most waiting rows: id, rows, the oldest of them."""
        rows: Counter[UUID] = Counter()
        oldest: dict[UUID, datetime] = {}
        for lane in self.lanes:
            for entry in lane.entries:
                for organization, (count, since) in entry.organizations.items():
                    rows[organization] += count
                    oldest[organization] = min(since, oldest.get(organization, since))
        return [(organization, count, oldest[organization]) for organization, count in rows.most_common(ORGANIZATIONS)]

    @property
    def words(self) -> str:
        """What it does, in a word or two."""
        if self.refusals:
            return "refused"
        if self.undecided:
            return "undecided"
        if not any(lane.alive for lane in self.lanes):
            return "not running"
        if self.pause is not None:
            return "paused"
        if not all(lane.alive for lane in self.lanes):
            return "partly running"
        return "standing still" if any(_is_still(lane, self.at) for lane in self.lanes) else "running"


def total(waiting: Iterable[Waiting]) -> Waiting:
    rows, at_least, oldest = 0, False, None
    for each in waiting:
        rows, at_least = rows + each.rows, at_least or each.at_least
        oldest = min(filter(None, (oldest, each.oldest)), default=None)
    return Waiting(rows, at_least, oldest)


def look(kafka_settings: KafkaSettings, postgres_url: str) -> State:
    """Read the relay's state. A position may be a few seconds older than its owner's own.

    KafkaException, TimeoutError or Unavailable: Kafka is away. Refused: a topic is missing. psycopg.OperationalError:
    Postgres is away. OnStandby: the URL names a standby.
    """
    topics = Topics(kafka_settings.topic_prefix)
    cluster = Cluster(kafka_settings, topics)
    try:
        facts = cluster.facts()
        undecided = _undecided(kafka_settings, cluster, facts.partitions)
        layout = current_layout(cluster, _nothing)
        histories = _read_histories(kafka_settings, topics, layout)
    finally:
        cluster.close()
    with (
        closing(Source(postgres_url)) as source,
        closing(postgres.connect(postgres_url, application_name="afluente-relay-status", autocommit=True)) as conn,
    ):
        database = source.facts()
        rows = {name: row for name, *row in conn.execute(_QUERIES["lanes"]).fetchall()}
        lanes = []
        for number in range(layout.lanes):
            name = kafka_settings.topic_prefix + lane_key(layout.number, number)
            lanes.append(_lane(source, name, number, layout, rows.get(name), histories[number]))
        refusals: list[str] = []
        for lane in lanes:
            refusals += _refusals(
                lane,
                Identity(database.identity, facts.identity),
                database.last_seq,
                source.published_to(kafka_settings.topic_prefix),
                source,
            )
        return State(
            layout=layout.number,
            lanes=tuple(lanes),
            pause=control.paused(conn, kafka_settings.topic_prefix),
            transactions=open_transactions(conn),
            undecided=undecided,
            refusals=tuple(dict.fromkeys(refusals)),
            at=datetime.now(UTC),
        )


def entry_state(source: Source, entry: Entry, rows: int, unseen_at: datetime | None) -> EntryState:
    """What `entry` leaves unpublished, counted up to `rows`. `unseen_at`: when its position was written, or held.

    Postgres keeps no commit times. A row waits since it was written, or since the position was that did not show it,
    if that is later: so rows that a transaction of an hour commits now do not count as an hour late.
    """
    bound = unseen_at if entry.window is None else None
    organizations = {
        organization: (count, max(filter(None, (oldest, bound))))
        for organization, count, oldest in source.lag(entry, rows)
    }
    count = sum(count for count, _ in organizations.values())
    oldest = min((oldest for _, oldest in organizations.values()), default=None)
    return EntryState(entry, Waiting(min(count, rows), count >= rows, oldest), organizations)


def open_transactions(conn: psycopg.Connection[Any]) -> tuple[Transaction, ...]:
    """The oldest open transactions of the server, those that hide rows before those that do not if not all fit."""
    found = conn.execute(_QUERIES["open_transactions"]).fetchall()
    found = sorted(found, key=lambda row: not row[-1])[:TRANSACTIONS]  # stable: by age within
    now = conn.execute("SELECT clock_timestamp(), pg_snapshot_xmax(pg_current_snapshot())::text::bigint").fetchone()
    assert now is not None
    transactions = []
    for tx_id, pid, gid, database, user, application, state, since, writes in sorted(found):
        unseen, reached, meanwhile = 0, True, 0
        began = since
        if writes and (gid is not None or since is None):
            # `since` is when it was prepared, and its rows are older; or nobody may say.
            (began,) = _one(conn, "begun_before", tx_id=str(tx_id))
            began = min(filter(None, (began, since)), default=datetime.min.replace(tzinfo=UTC))
        if writes:
            unseen, reached, meanwhile = _one(conn, "unseen_since", started_at=began, rows=SCAN_ROWS)
        (months,) = _one(conn, "months_held", xmin=str(tx_id))
        transactions.append(
            Transaction(
                tx_id=tx_id,
                pid=pid,
                gid=gid,
                database=database,
                user=user,
                application=application or None,
                state=state,
                since=since,
                age_s=None if since is None else max(0.0, (now[0] - since).total_seconds()),
                writes_events=writes,
                rows_at_most=max(0, unseen),
                at_least=not reached,
                rows_meanwhile=meanwhile,
                months_held=months,
                ids_behind=max(0, now[1] - tx_id),
            )
        )
    return tuple(transactions)


def oldest_transaction_s(conn: psycopg.Connection[Any]) -> float:
    """Age of the oldest open transaction that has an id; 0.0 when there is none, or none whose age may be seen."""
    began = [row[7] for row in conn.execute(_QUERIES["open_transactions"]).fetchall() if row[7] is not None]
    return max(0.0, (datetime.now(UTC) - min(began)).total_seconds()) if began else 0.0


def remarks(state: State) -> Iterator[Remark]:
    """What a person should know of `state`, the worst first."""
    waiting = state.waiting
    rows = f"{waiting.rows:,}{' or more' * waiting.at_least} row{'s' * (waiting.rows != 1)} wait"
    rows = rows if waiting.rows != 1 else rows + "s"
    if state.refusals:
        yield Remark(
            "relay.position",
            Severity.problem,
            f"a relay publishes nothing here: {'; '.join(state.refusals)} ({rows})",
            "afluente relay reposition",
        )
    if state.undecided:
        topic, partition, offset = state.undecided[0]
        yield Remark(
            "relay.transactions",
            Severity.problem,
            f"a transaction that nobody will end in {len(state.undecided)} "
            f"partition{'s' * (len(state.undecided) > 1)}, {topic}[{partition}] from offset {offset} for one: "
            "readers of committed records stop there",
            "stop every relay, then: afluente relay repair",
        )
    yield from _of_lanes(state, rows)
    if state.pause is not None:
        why = f": {state.pause.reason}" if state.pause.reason else ""
        yield Remark(
            "relay.paused",
            Severity.warning,
            f"paused by {state.pause.by} since {_moment(state.pause.since)}{why}; {rows}",
            "afluente relay resume",
        )
    for transaction in state.transactions:
        yield from _of_transaction(transaction)


def _of_lanes(state: State, rows: str) -> Iterator[Remark]:
    begun = any(lane.position is not None or lane.owner is not None for lane in state.lanes)
    idle = [lane.name for lane in state.lanes if lane.owner is None]
    if idle and (begun or state.waiting.rows):
        yield Remark(
            "relay.running",
            Severity.problem if state.waiting.rows else Severity.warning,
            f"not running: nobody owns {', '.join(idle[:3])}{', ...' * (len(idle) > 3)}; {rows}",
            "afluente relay run",
        )
    elif idle:
        yield Remark("relay.running", Severity.note, "no relay has run yet, and nothing waits", "afluente relay run")
    for lane in state.lanes:
        if lane.owner is not None and not lane.alive:
            yield Remark(
                "relay.running",
                Severity.problem,
                f"{lane.name}: its owner {lane.owner} is silent for {lane.owner_silent_s:.0f} s",
                "end that process if it hangs; another `afluente relay run` takes over by itself",
            )
        elif state.pause is None and not state.undecided and not state.refusals and _is_still(lane, state.at):
            assert lane.position is not None
            yield Remark(
                "relay.moving",
                Severity.problem,
                f"{lane.name} stands still: {lane.waiting.rows:,} rows wait, and its position is of "
                f"{_moment(lane.position.written_at)}",
                f"look into the log of {lane.owner}: Kafka or Postgres may be out of its reach (relay.session_lost)",
            )
    if state.lag_s > BEHIND_S and state.pause is None and not idle and not state.refusals and not state.undecided:
        rate = state.rows_per_s or 0.0
        clear = f", {state.waiting.rows / rate:,.0f} s to clear if nothing comes in" if rate else ""
        who = state.organizations[0]
        yield Remark(
            "relay.behind",
            Severity.warning,
            f"{state.lag_s:.0f} s behind: {rows}, {rate:,.0f} a second go out{clear}; "
            f"{who[1]:,} are of organization {who[0]}",
            "afluente relay lanes N spreads the organizations over more lanes",
        )


def _of_transaction(transaction: Transaction) -> Iterator[Remark]:
    if (transaction.age_s or 0.0) < OLD_TRANSACTION_S:
        return
    hides = "it has written no event"
    if transaction.writes_events:
        bound = "at least" if transaction.at_least else "at most"
        hides = f"it has written events, {bound} {transaction.rows_at_most:,}, which nobody sees before it commits"
    months = transaction.months_held
    held = f"; {months} month{'s' * (months > 1)} cannot be sealed" if months else ""
    where = f"database {transaction.database}, {transaction.user}"
    harm = transaction.writes_events or months or (transaction.age_s or 0.0) > VERY_OLD_TRANSACTION_S
    severity = Severity.warning if harm else Severity.note
    if transaction.gid is not None:
        quoted = transaction.gid.replace("'", "''")
        yield Remark(
            "relay.prepared_transaction",
            severity,
            f"prepared transaction {transaction.gid!r} ({where}) is forgotten, it seems: prepared "
            f"{_moment(transaction.since)}; {hides}{held}. The relay does not wait for it",
            f"connected to {transaction.database}: COMMIT PREPARED '{quoted}' or ROLLBACK PREPARED '{quoted}'; "
            "whoever prepared it knows which",
        )
    else:
        application = f", {transaction.application}" if transaction.application else ""
        yield Remark(
            "relay.open_transaction",
            severity,
            f"pid {transaction.pid} ({where}{application}; {transaction.state}) has a transaction open since "
            f"{_moment(transaction.since)}; {hides}{held}. The relay does not wait for it",
            f"end it where it was begun, or SELECT pg_terminate_backend({transaction.pid}): its writes are then undone",
        )


def _is_still(lane: LaneState, at: datetime) -> bool:
    """Rows wait and the position does not move."""
    position, oldest = lane.position, lane.waiting.oldest
    if not lane.alive or position is None or oldest is None:
        return False
    since = max(position.written_at, oldest, lane.owner_since or oldest)
    return (at - since).total_seconds() > STILL_S


def _moment(at: datetime | None) -> str:
    return "some time ago" if at is None else f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z"


def _lane(
    source: Source, name: str, number: int, layout: Layout, row: list[Any] | None, history: _History
) -> LaneState:
    position = history.newest
    entries = position.entries if position is not None else (Entry(slots=lane_slots(number, layout.lanes)),)
    source.leave_out_sealed(entries)
    instance, since, silent_s, takeovers, _ = row or [None, None, None, 0, None]
    rate, over_s = history.rate(datetime.now(UTC))
    return LaneState(
        number=number,
        name=name,
        owner=instance,
        owner_since=since if instance is not None else None,
        owner_silent_s=silent_s if instance is not None else None,
        takeovers=takeovers,
        position=position,
        entries=tuple(
            entry_state(source, entry, COUNT_LIMIT, None if position is None else position.written_at)
            for entry in entries
        ),
        rows_per_s=rate,
        rate_over_s=over_s,
    )


def _refusals(lane: LaneState, now: Identity, last_seq: int, published_to: str | None, source: Source) -> Iterator[str]:
    """Why a relay would publish nothing from this position, as service.py decides it."""
    if lane.position is None:
        if published_to is not None:
            yield f"{lane.name} has no position, but cluster {published_to} has been published to"
        return
    yield from lane.position.identity.differences(now)
    if (top := max(entry.top for entry in lane.position.entries)) > last_seq:
        yield (
            f"the sequence of event_log stands at {last_seq}, but rows up to {top} were seen: "
            "the database was put back to an earlier state"
        )
    elif (witness := lane.position.witness) is not None and not source.has(witness):
        yield (
            f"event {witness.id} was published as number {witness.seq} and is not in event_log: "
            "the database was put back to an earlier state"
        )


def _one(conn: psycopg.Connection[Any], name: str, **parameters: Any) -> tuple[Any, ...]:
    row = conn.execute(_QUERIES[name], parameters).fetchone()
    assert row is not None
    return tuple(row)


@dataclass(slots=True)
class _History:
    """A lane's newest position, an older one to compare it with, and when that was written (broker's clock)."""

    newest: Position | None = None
    before: tuple[datetime, int] | None = None

    def rate(self, now: datetime) -> tuple[float | None, float]:
        """Rows a second, and over how many seconds."""
        if self.newest is None or (now - self.newest.written_at).total_seconds() > RATE_OVER_S:
            return (None if self.newest is None else 0.0), RATE_OVER_S
        if self.before is None:
            return None, 0.0
        at, published = self.before
        over_s = min(RATE_OVER_S, max(0.001, (now - at).total_seconds()))
        return max(0, self.newest.published - published) / over_s, over_s


def _read_histories(settings: KafkaSettings, topics: Topics, layout: Layout) -> list[_History]:
    """What is committed at the end of each lane's partition. Waits for no transaction: one that is open hides what
    comes after its beginning, for all readers."""
    consumer = kafka.consumer(settings, "relay-status", enable_partition_eof=True, fetch_wait_max_ms=10)
    try:
        keys = [lane_key(layout.number, lane).encode() for lane in range(layout.lanes)]
        found = _read_ends(consumer, topics.positions, keys, max(16, LOOK_BACK // layout.lanes))
        for lane, records in enumerate(found):
            if not records:  # another layout's, or compaction's, or nothing
                (found[lane],) = _read_ends(consumer, topics.positions, [keys[lane]], None, lane)
    finally:
        consumer.close()
    histories = []
    border = time.time() - RATE_OVER_S
    for records in found:
        history = _History()
        if records:
            history.newest = Position.parse(records[-1][1])
            older = [record for record in records[:-1] if record[0] <= border][-1:] or records[:-1][:1]
            if older:
                before = Position.parse(older[0][1])
                history.before = datetime.fromtimestamp(older[0][0], UTC), before.published
        histories.append(history)
    return histories


def _read_ends(
    consumer: Consumer, topic: str, keys: list[bytes], back: int | None, first: int = 0
) -> list[list[tuple[float, bytes]]]:
    """For each key, which is its partition's from `first` on: (time, value) of its records among the last `back` (None:
    all)."""
    found: list[list[tuple[float, bytes]]] = [[] for _ in keys]
    places = []
    for partition in range(first, first + len(keys)):
        low, high = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=REQUEST_TIMEOUT_S)
        places.append(TopicPartition(topic, partition, low if back is None else max(low, high - back)))
    consumer.assign(places)
    unread = {place.partition for place in places}
    deadline = time.monotonic() + READ_WITHIN_S
    while unread:
        if time.monotonic() > deadline:
            raise Unavailable(f"{topic} cannot be read to its end in {READ_WITHIN_S:.0f} s")
        for record in consumer.consume(500, 0.2):
            error = record.error()
            if error is None:
                partition = record.partition() or 0
                if record.key() == keys[partition - first] and (value := record.value()) is not None:
                    found[partition - first].append((record.timestamp()[1] / 1000, value))
            elif error.code() == KafkaError._PARTITION_EOF:
                unread.discard(record.partition() or 0)
            elif not error.retriable():
                raise KafkaException(error)
    return found


def _undecided(
    settings: KafkaSettings, cluster: Cluster, partitions: Mapping[str, int]
) -> tuple[tuple[str, int, int], ...]:
    """Where a transaction is open that nobody will end. The exact question is asked only when some are open at all."""
    if not cluster.has_open_transactions(partitions):
        return ()
    from producers.relay import repair  # brings aiokafka with it, which a running relay has no use for

    hanging = (repair.State.hanging, repair.State.foreign)
    try:
        return tuple((*item.place, item.start_offset) for item in repair.find(settings) if item.state in hanging)
    except (NotAllowed, Unavailable) as error:
        # The rest is worth knowing all the same; `relay repair` and doctor say why this is not known.
        _log.debug("relay.watch_failed", error=str(error))
        return ()


def _nothing() -> None:
    """No lease to renew."""
