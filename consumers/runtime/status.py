"""How a worker stands, seen from outside its processes: its group, its lag, its deliveries, its pause.

Reads and disturbs nobody: no group is joined, nothing is committed, each count is bounded. Lag is counted to the end
that a read_committed consumer sees, of the topics whose records are to be handled now (the events' and retry.now): what
waits in a retry topic waits by design, and is counted by its deliveries instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka import ConsumerGroupTopicPartitions as GroupPartitions
from confluent_kafka.admin import AdminClient, OffsetSpec
from psycopg import Connection

import sql
from afluente import kafka
from afluente.settings import KafkaSettings
from consumers.runtime import control
from consumers.runtime.control import Pause
from schemas.topics import Topics

COUNT_ROWS = 100_000
REQUEST_S = 10.0
HEADS_WITHIN_S = 5.0
AGAIN_S = 0.2

_QUERIES = sql.queries("worker_control")
_LEADER_CHANGES = frozenset({KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE})

Place = tuple[str, int]
"""Topic and partition."""


@dataclass(frozen=True, slots=True)
class Process:
    """A living process of a worker; `silent_s`: since its last sign of life."""

    id: UUID
    host: str
    pid: int
    started_at: datetime
    silent_s: float


@dataclass(frozen=True, slots=True)
class Member:
    """A member of the consumer group."""

    id: str
    client_id: str
    host: str
    instance_id: str | None
    partitions: int


@dataclass(frozen=True, slots=True)
class PartitionState:
    """`committed` None: nothing yet. `oldest_at`: when the broker took the first record that is not finished, if there
    is one and it could be read."""

    topic: str
    partition: int
    committed: int | None
    end: int
    lag: int
    member: str | None
    oldest_at: datetime | None


@dataclass(frozen=True, slots=True)
class Deliveries:
    """Those of one state. `oldest`: the oldest of their events. Of waiting ones `due` are, and the next one at
    `next_due`."""

    count: int = 0
    oldest: datetime | None = None
    due: int = 0
    next_due: datetime | None = None


@dataclass(frozen=True, slots=True)
class Parked:
    """The surplus of organizations that was passed over, to be read again at their own pace; `records` about."""

    organizations: int = 0
    records: int = 0
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class OpenBreaker:
    """A destination that is left alone until then; then one call tries it (`probing`: now). `times`: in a row."""

    destination: str
    until: datetime
    times: int
    probing: bool
    error_class: str | None
    error: str | None


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One worker. `rate_per_s` is how many records it finished in `rate_over_s` seconds, `net_per_s` by how much the
    lag fell in them; None when nobody waited to see."""

    worker: str
    at: datetime
    pause: Pause | None
    processes: tuple[Process, ...]
    group_state: str | None
    group_protocol: str | None
    members: tuple[Member, ...]
    partitions: tuple[PartitionState, ...]
    deliveries: dict[str, Deliveries]
    parked: Parked
    rate_over_s: float
    rate_per_s: float | None
    net_per_s: float | None
    breakers: tuple[OpenBreaker, ...] = ()

    @property
    def lag(self) -> int:
        """Records that are not finished: at or after the committed offsets, and the parked ones before them."""
        return sum(partition.lag for partition in self.partitions) + self.parked.records

    @property
    def oldest(self) -> PartitionState | None:
        """The partition whose first unfinished record is the oldest."""
        known = [partition for partition in self.partitions if partition.oldest_at is not None]
        return min(known, key=lambda partition: partition.oldest_at or self.at, default=None)

    @property
    def lag_s(self) -> float | None:
        """For how long the oldest unfinished record has been there; 0.0 without one, None when it could not be read."""
        if not self.lag:
            return 0.0
        oldest = None if self.oldest is None else self.oldest.oldest_at
        known = [at for at in (oldest, self.parked.since) if at is not None]
        return max(0.0, (self.at - min(known)).total_seconds()) if known else None

    @property
    def time_to_clear_s(self) -> float | None:
        """At the net rate of the last moments; None when the lag does not fall, or nobody waited to see."""
        if not self.lag:
            return 0.0
        return self.lag / self.net_per_s if self.net_per_s is not None and self.net_per_s > 0 else None

    @property
    def words(self) -> str:
        """What it does, in a word or two."""
        if self.pause is not None:
            return "paused"
        if not self.members:
            return "not running"
        if not self.lag:
            return "idle"
        return "standing still" if self.rate_per_s == 0 else "working"


def source_topics(topics: Topics, event_types: Iterable[str]) -> list[str]:
    """The event topics of these types."""
    types = set(event_types)
    if "*" in types:
        return [topic for topic in topics.families() if topic != topics.family("webhook")]
    return sorted({topics.event(event_type) for event_type in types})


def look(
    settings: KafkaSettings,
    conn: Connection[Any],
    workers: dict[str, Iterable[str]],
    *,
    over_s: float,
    wait: Callable[[float], object] = time.sleep,
) -> list[WorkerState]:
    """How the workers (name: event types) stand, in their order; looked at twice, `over_s` seconds apart (0: once).

    KafkaException and psycopg.Error when the servers are away.
    """
    topics = Topics(settings.topic_prefix)
    admin = kafka.admin(settings)
    there = admin.list_topics(timeout=kafka.METADATA_TIMEOUT_S).topics
    wanted: dict[str, list[Place]] = {}
    for name, event_types in workers.items():
        names = [*source_topics(topics, event_types), topics.retry(name, "now")]
        wanted[name] = [(topic, p) for topic in names if topic in there for p in there[topic].partitions]
    before = {name: _offsets(admin, settings.group_id(name), places) for name, places in wanted.items()}
    parked_before = parked = _parked(conn)
    began = time.monotonic()
    after, seconds = before, 0.0
    if over_s > 0:
        wait(over_s)
        after = {name: _offsets(admin, settings.group_id(name), places) for name, places in wanted.items()}
        parked = _parked(conn)
        seconds = time.monotonic() - began
    heads = _heads(settings, {place for offsets in after.values() for place in offsets.behind}, after.values())
    pauses = control.paused(conn)
    processes: dict[str, list[Process]] = {}
    for name, *rest in conn.execute(_QUERIES["processes"], {"worker": None}):
        processes.setdefault(name, []).append(Process(*rest))
    breakers: dict[str, list[OpenBreaker]] = {}
    for name, *rest in conn.execute(sql.queries("limits")["open_breakers"]):
        breakers.setdefault(name, []).append(OpenBreaker(*rest))
    states = []
    for name in workers:
        looks = _Looks(
            before[name], after[name], parked_before.get(name, Parked()), parked.get(name, Parked()), seconds
        )
        state = _state(admin, settings, conn, name, looks, heads, pauses.get(name), processes.get(name, []))
        states.append(replace(state, breakers=tuple(breakers.get(name, ()))))
    return states


def _parked(conn: Connection[Any]) -> dict[str, Parked]:
    return {worker: Parked(*rest) for worker, *rest in conn.execute(_QUERIES["parked"])}


@dataclass(frozen=True, slots=True)
class _Offsets:
    """Of each partition what is committed, where the log begins, and where a read_committed reader finds its end."""

    committed: dict[Place, int]
    ends: dict[Place, int]
    begins: dict[Place, int]

    def at(self, place: Place) -> int:
        """Where reading would go on. What expired below the beginning of the log is no lag."""
        return max(self.committed.get(place, 0), self.begins.get(place, 0))

    def lag(self, place: Place) -> int:
        return max(0, self.ends[place] - self.at(place))

    @property
    def behind(self) -> list[Place]:
        return [place for place in self.ends if self.lag(place)]


def _offsets(admin: AdminClient, group: str, places: list[Place]) -> _Offsets:
    committed: dict[Place, int] = {}
    if places:
        asked = GroupPartitions(group, [TopicPartition(*place) for place in places])
        [answer] = admin.list_consumer_group_offsets([asked], request_timeout=REQUEST_S).values()
        try:
            for found in answer.result().topic_partitions or ():
                if found.error is None and found.offset >= 0:
                    committed[found.topic, found.partition] = found.offset
        except KafkaException as error:
            if error.args[0].code() != KafkaError.GROUP_ID_NOT_FOUND:
                raise
    # Committed first: the other way round a lag could be seen that never was.
    return _Offsets(committed, _answered(lambda: ask_ends(admin, places)), _answered(lambda: ask_begins(admin, places)))


Asked = dict[Place, Future[Any]]
"""Futures of what Kafka's admin client answers, with an offset each. They raise KafkaException."""


def ask_ends(admin: AdminClient, places: Iterable[Place]) -> Asked:
    """Where each partition ends for a read_committed reader."""
    return _ask(admin, places, OffsetSpec.latest())  # type: ignore[no-untyped-call]


def ask_begins(admin: AdminClient, places: Iterable[Place]) -> Asked:
    """Where the log of each partition begins now."""
    return _ask(admin, places, OffsetSpec.earliest())  # type: ignore[no-untyped-call]


def _ask(admin: AdminClient, places: Iterable[Place], which: OffsetSpec) -> Asked:
    asked = {TopicPartition(*place): which for place in places}
    if not asked:
        return {}
    answers = admin.list_offsets(asked, isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=REQUEST_S)
    return {(place.topic, place.partition): answer for place, answer in answers.items()}


def _answered(ask: Callable[[], Asked]) -> dict[Place, int]:
    """Asked again while a partition changes its leader: the client has learnt the new one meanwhile."""
    deadline = time.monotonic() + REQUEST_S
    while True:
        try:
            return {place: int(answer.result().offset) for place, answer in ask().items()}
        except KafkaException as error:
            if error.args[0].code() not in _LEADER_CHANGES or time.monotonic() > deadline:
                raise
            time.sleep(AGAIN_S)


def _heads(
    settings: KafkaSettings, places: set[Place], offsets: Iterable[_Offsets]
) -> dict[tuple[Place, int], datetime]:
    """When the broker took the first record at or after these offsets, as far as it can be read in a moment."""
    wanted = {(place, found.at(place)) for found in offsets for place in places & found.ends.keys() if found.lag(place)}
    heads: dict[tuple[Place, int], datetime] = {}
    if not wanted:
        return heads
    reader = kafka.consumer(
        settings, "afluente-worker-status", queued_max_messages_kbytes=1024, fetch_wait_max_ms=20, queued_min_messages=1
    )
    deadline = time.monotonic() + HEADS_WITHIN_S
    try:
        # Workers that read the same topic stand at places of their own in it: one round for each place of a partition.
        while wanted and time.monotonic() < deadline:
            one_each = {place: offset for place, offset in sorted(wanted, reverse=True)}
            wanted -= set(one_each.items())
            reader.assign([TopicPartition(*place, offset) for place, offset in one_each.items()])
            while one_each and (left := deadline - time.monotonic()) > 0:
                record = reader.poll(left)
                if record is None or record.error() is not None:
                    continue
                topic, partition = record.topic(), record.partition()
                kind, timestamp = record.timestamp()
                assert topic is not None
                assert partition is not None
                offset = one_each.pop((topic, partition), None)
                if offset is None or kind == TIMESTAMP_NOT_AVAILABLE:
                    continue
                heads[(topic, partition), offset] = datetime.fromtimestamp(timestamp / 1000, UTC)
                reader.pause([TopicPartition(topic, partition)])
    finally:
        reader.close()
    return heads


@dataclass(frozen=True, slots=True)
class _Looks:
    """One worker, seen twice, `seconds` apart."""

    before: _Offsets
    after: _Offsets
    parked_before: Parked
    parked: Parked
    seconds: float

    @property
    def more_parked(self) -> int:
        return self.parked.records - self.parked_before.records

    @property
    def finished(self) -> int:
        """Records that its committed offsets passed, less those that were only passed over."""
        passed = sum(self.after.at(place) - self.before.at(place) for place in self.after.ends)
        return max(0, passed - self.more_parked)

    @property
    def fell(self) -> int:
        lag = [sum(offsets.lag(place) for place in self.after.ends) for offsets in (self.before, self.after)]
        return lag[0] - lag[1] - self.more_parked


def _state(
    admin: AdminClient,
    settings: KafkaSettings,
    conn: Connection[Any],
    name: str,
    looks: _Looks,
    heads: dict[tuple[Place, int], datetime],
    pause: Pause | None,
    processes: list[Process],
) -> WorkerState:
    state, protocol, members, owners = _group(admin, settings.group_id(name))
    after, seconds = looks.after, looks.seconds
    partitions = tuple(
        PartitionState(
            topic,
            partition,
            after.committed.get((topic, partition)),
            end,
            after.lag((topic, partition)),
            owners.get((topic, partition)),
            heads.get(((topic, partition), after.at((topic, partition)))),
        )
        for (topic, partition), end in sorted(after.ends.items())
    )
    rows = conn.execute(_QUERIES["open_deliveries"], {"worker": name, "rows": COUNT_ROWS})
    return WorkerState(
        name,
        datetime.now(UTC),
        pause,
        tuple(processes),
        state,
        protocol,
        members,
        partitions,
        {row[0]: Deliveries(*row[1:]) for row in rows},
        looks.parked,
        round(seconds, 3),
        looks.finished / seconds if seconds else None,
        looks.fell / seconds if seconds else None,
    )


def _group(admin: AdminClient, group: str) -> tuple[str | None, str | None, tuple[Member, ...], dict[Place, str]]:
    """State, protocol, members, and which member has which partition. A group that is not there has none."""
    try:
        found = admin.describe_consumer_groups([group], request_timeout=REQUEST_S)[group].result()
    except KafkaException as error:
        if error.args[0].code() == KafkaError.GROUP_ID_NOT_FOUND:
            return None, None, (), {}
        raise
    members = []
    owners: dict[Place, str] = {}
    for each in found.members:
        places = each.assignment.topic_partitions if each.assignment is not None else []
        members.append(Member(each.member_id, each.client_id, each.host, each.group_instance_id or None, len(places)))
        owners |= {(place.topic, place.partition): each.member_id for place in places}
    if not members:
        return None, None, (), {}
    return found.state.name.lower(), found.type.name.lower(), tuple(members), owners
