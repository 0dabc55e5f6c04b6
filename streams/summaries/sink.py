"""Writes one fetch into Postgres: summaries, seen events, dead letters and fences in one transaction.

What must stay true:

- Every record of a partition below its fence is counted once, none at or above it is. The fence moves in the
  transaction that counts, and only from where this process left it: a process that was taken for dead finds its
  partitions claimed by another, writes nothing and gets `Fenced`.
- A contact event is counted once however often it was produced (`stream_seen_event`).
- A record that cannot be folded is kept whole with the reason, in the same transaction, and the fence moves on.
- A write can be repeated: when a connection breaks during the commit, the fences say whether it took place.

No Kafka client is imported here, so any loop can drive it: Faust's consumer in production, a bare confluent-kafka loop
in the tests. A sink is used by one thread at a time.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar
from uuid import UUID, uuid4

import orjson
import psycopg

import sql
from afluente import faults, postgres, telemetry
from afluente.errors import Unavailable
from streams.errors import Abandoned, BadHeaders, Fenced, Unfit, Unreadable
from streams.summaries import decode
from streams.summaries.fold import Fact, Increment, Key, fold

# A statement of ours takes milliseconds. What takes longer than this is stuck behind a lock or a dying server, and is
# better begun again; the partitions may have been handed over meanwhile.
STATEMENT_TIMEOUT_MS = 20_000
# A process that is frozen inside a transaction holds the fences' locks. Its successor must not wait for it to wake.
IDLE_TIMEOUT_MS = 10_000
# What says nothing about the rows: the server is away, starting or stopping; a deadlock; a time-out; a lock; a server
# that has become a standby (the next connection may reach the primary).
PASSING = (psycopg.OperationalError, psycopg.InterfaceError, psycopg.errors.ReadOnlySqlTransaction)
BACKOFF_FIRST_S = 0.1
BACKOFF_MOST_S = 5.0
CANCEL_TIMEOUT_S = 2.0
REASON_LENGTH = 1000

_QUERIES = sql.queries("summaries")

T = TypeVar("T")

log = telemetry.get_logger(__name__)


class Partition(NamedTuple):
    """One partition of one topic."""

    topic: str
    partition: int


class Record(Protocol):
    """What is needed of a Kafka record. aiokafka's fit as they are."""

    @property
    def offset(self) -> int: ...
    @property
    def key(self) -> bytes | None: ...
    @property
    def value(self) -> bytes | None: ...
    @property
    def headers(self) -> Sequence[tuple[str, bytes | None]]: ...


class UnreadableHeader(NamedTuple):
    """A header of a record with a name that is not UTF-8, its own or another's: all headers of the record are of this
    class. Bytes of the name that are not UTF-8 are written as \\xff."""

    name: str
    value: bytes | None


class DeadLetter(NamedTuple):
    """A record that cannot be folded, and why."""

    partition: Partition
    record: Record
    error_class: str
    reason: str


@dataclass(slots=True)
class Batch:
    """What a fetch comes down to."""

    facts: list[Fact] = field(default_factory=list)
    dead_letters: list[DeadLetter] = field(default_factory=list)
    fences: dict[Partition, tuple[int, int]] = field(default_factory=dict)  # from, to
    records: int = 0
    without_metric: int = 0


@dataclass(slots=True)
class Written:
    """What one `write` did. records = facts + duplicates + without_metric + dead_letters."""

    records: int = 0
    facts: int = 0
    duplicates: int = 0
    without_metric: int = 0
    dead_letters: int = 0
    below_fence: int = 0

    def add(self, other: Written) -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Sink:
    """Where fetches go. `claim` first, then `write` for each fetch, in the order of the offsets."""

    def __init__(
        self,
        url: str,
        *,
        topic_ids: Mapping[str, str],
        application_name: str = "afluente-stream",
        abandon: threading.Event | None = None,
        sleep: Callable[[float], Any] | None = None,
    ) -> None:
        """`topic_ids`: Kafka's own id of each topic that may be claimed. `abandon`: while it is set, waiting for
        Postgres ends with `Abandoned`. `sleep` waits that many seconds."""
        self._url = url
        self._topic_ids = dict(topic_ids)
        self._application_name = application_name
        self._abandon = abandon or threading.Event()
        self._sleep = sleep or self._abandon.wait
        self._conn: psycopg.Connection[tuple[Any, ...]] | None = None
        self._owner = uuid4()
        self._generation = 0
        self.fences: dict[Partition, int] = {}

    @property
    def owner(self) -> UUID:
        """The name under which this process claims partitions."""
        return self._owner

    @property
    def generation(self) -> int:
        """The generation written to; known after the first claim."""
        return self._generation

    def claim(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """Make these partitions ours, and only these. Returns the offset to go on from for each.

        Unfit when a topic is not the one that was folded so far, but another of the same name.
        """
        wanted = sorted(set(partitions))
        document = _json([{**_partition(name), "topic_id": self._topic_ids[name.topic]} for name in wanted])

        def step(conn: psycopg.Connection[tuple[Any, ...]]) -> dict[Partition, int]:
            with conn.transaction():
                found = conn.execute(_QUERIES["live_generation"]).fetchone()
                if found is None:
                    raise Unfit("no generation of the summaries is live", hint="afluente migrate up")
                self._generation = int(found[0])
                rows = conn.execute(
                    _QUERIES["claim"],
                    {"generation": self._generation, "owner": self._owner, "partitions": document},
                ).fetchall()
                for topic, _, _, topic_id in rows:
                    if topic_id != self._topic_ids[topic]:
                        raise Unfit(
                            f"{topic} was deleted and created anew since it was folded (id {topic_id}, now "
                            f"{self._topic_ids[topic]}): its offsets mean other records",
                            hint="start a new generation of the summaries",
                        )
            return {Partition(topic, partition): next_offset for topic, partition, next_offset, _ in rows}

        # Until the claim holds nothing may be written: whatever was ours before is not ours any more.
        self.fences = {}
        self.fences = self._persist(step) if wanted else {}
        return dict(self.fences)

    def write(
        self, fetch: Mapping[Partition, Sequence[Record]], positions: Mapping[Partition, int] | None = None
    ) -> Written:
        """Fold a fetch: records of claimed partitions in the order of their offsets.

        `positions` are the offsets the reader stands at after the fetch; they may lie beyond the last record, where
        markers of transactions and aborted records are. Fenced: nothing written, end the process. Abandoned: nothing
        written, claim again before the next write.
        """
        batch, below = self._read(fetch, positions or {})
        written = Written(below_fence=below)
        if not batch.fences:
            return written
        try:
            written.add(self._persist(lambda conn: self._apply(conn, batch)))
        except (psycopg.DataError, psycopg.IntegrityError) as error:
            # One record's values are more than the tables take. Find it by halving: everything else is kept.
            log.warning("stream.divided", error=_first_line(error), records=batch.records)
            self._write_divided(fetch, written)
        return written

    def interrupt(self) -> None:
        """Cancel the statement that is running, if one is. The only method for other threads."""
        conn = self._conn
        if conn is not None and not conn.closed:
            with contextlib.suppress(psycopg.Error):
                conn.cancel_safe(timeout=CANCEL_TIMEOUT_S)

    def close(self) -> None:
        """Close the connection. The claims stay, until somebody else claims."""
        if self._conn is not None:
            self._conn.close()
            self._conn = None

    # reading

    def _read(
        self, fetch: Mapping[Partition, Sequence[Record]], positions: Mapping[Partition, int]
    ) -> tuple[Batch, int]:
        batch = Batch()
        below = 0
        for partition in sorted({*fetch, *positions}):
            fence = self.fences.get(partition)
            if fence is None:
                raise Fenced(f"{partition.topic}[{partition.partition}] is not claimed")
            reached = fence
            for record in fetch.get(partition, ()):
                if record.offset < fence:
                    below += 1
                    continue
                reached = record.offset + 1
                batch.records += 1
                try:
                    fact = self._decoded(record)
                except Unreadable as error:
                    cause = type(error.__cause__ or error).__name__
                    batch.dead_letters.append(DeadLetter(partition, record, cause, str(error)))
                    continue
                if fact is None:
                    batch.without_metric += 1
                else:
                    batch.facts.append(fact)
            reached = max(reached, positions.get(partition, 0))
            if reached > fence:
                batch.fences[partition] = (fence, reached)
        return batch, below

    def _decoded(self, record: Record) -> Fact | None:
        if (headers := record.headers) and type(headers[0]) is UnreadableHeader:
            raise BadHeaders("the name of a header is not UTF-8")
        attempt = 0
        while True:
            try:
                return decode.fact(record.value)
            except Unavailable as error:
                # The schema registry is away. That says nothing about the record.
                attempt += 1
                self._wait_out(attempt, error)

    # writing

    def _apply(self, conn: psycopg.Connection[tuple[Any, ...]], batch: Batch) -> Written:
        """One transaction: fences locked and compared, ids noted, increments added, fences moved."""
        parameters: dict[str, Any] = {"generation": self._generation, "owner": self._owner}
        moved = {partition: to for partition, (_, to) in batch.fences.items()}
        with conn.transaction():
            rows = conn.execute(
                _QUERIES["lock_fences"], parameters | {"partitions": _partitions(batch.fences)}
            ).fetchall()
            found = {Partition(topic, partition): next_offset for topic, partition, next_offset in rows}
            if found == moved:
                # The connection broke while this very transaction was being committed, and it was.
                self.fences.update(moved)
                return Written(records=batch.records)
            if found != {partition: fence for partition, (fence, _) in batch.fences.items()}:
                raise Fenced(f"fences are {_shown(found)}, not as this process left them")
            facts = self._unseen(conn, batch.facts)
            row = conn.execute(
                _QUERIES["apply"],
                parameters
                | {
                    "increments": _increments(fold(facts)),
                    "dead_letters": _dead_letters(batch.dead_letters),
                    "fences": _fences(batch.fences),
                },
            ).fetchone()
            if row is None or row[0] != len(batch.fences):
                raise Fenced("a fence was moved by somebody else")
            faults.point("stream.before_commit")
        faults.point("stream.after_commit")
        self.fences.update(moved)
        for letter in batch.dead_letters:
            log.warning(
                "stream.dead",
                topic=letter.partition.topic,
                partition=letter.partition.partition,
                offset=letter.record.offset,
                error=letter.reason,
            )
        return Written(
            records=batch.records,
            facts=len(facts),
            duplicates=len(batch.facts) - len(facts),
            without_metric=batch.without_metric,
            dead_letters=len(batch.dead_letters),
        )

    def _unseen(self, conn: psycopg.Connection[tuple[Any, ...]], facts: list[Fact]) -> list[Fact]:
        """The facts not counted before, each once; from here on they count as seen."""
        if not facts:
            return []
        once: dict[tuple[str, str], Fact] = {}
        for fact in facts:
            once.setdefault((fact.organization_id, fact.contact_event_id), fact)
        row = conn.execute(
            _QUERIES["see"],
            {
                "generation": self._generation,
                "expected": len(once),
                "facts": _json([{"organization_id": o, "contact_event_id": e} for o, e in once]),
            },
        ).fetchone()
        assert row is not None
        if row[0] == len(once):
            return list(once.values())
        fresh = set(row[1] or ())
        return [fact for (organization, event), fact in once.items() if f"{organization}{event}" in fresh]

    def _write_divided(self, fetch: Mapping[Partition, Sequence[Record]], written: Written) -> None:
        """Write record ranges of one partition at a time, halved until the one that cannot be written stands alone."""
        for partition, records in sorted(fetch.items()):
            self._write_range(
                partition, [record for record in records if record.offset >= self.fences[partition]], written
            )

    def _write_range(self, partition: Partition, records: Sequence[Record], written: Written) -> None:
        if not records:
            return
        batch, _ = self._read({partition: records}, {})
        try:
            written.add(self._persist(lambda conn: self._apply(conn, batch)))
        except (psycopg.DataError, psycopg.IntegrityError) as error:
            if len(records) > 1:
                half = len(records) // 2
                self._write_range(partition, records[:half], written)
                self._write_range(partition, records[half:], written)
                return
            letter = DeadLetter(partition, records[0], type(error).__name__, _first_line(error))
            alone = Batch(dead_letters=[letter], fences=batch.fences, records=1)
            written.add(self._persist(lambda conn: self._apply(conn, alone)))

    # Postgres, until it answers

    def _persist(self, step: Callable[[psycopg.Connection[tuple[Any, ...]]], T]) -> T:
        """Run `step` until it goes through: what passes by waiting is waited out."""
        attempt = 0
        while True:
            self._check_abandoned()
            try:
                return step(self._connection())
            except psycopg.Error as error:
                broken = self._conn is not None and self._conn.closed
                if not (broken or isinstance(error, PASSING)):
                    raise
                if broken or isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
                    self.close()
                attempt += 1
                self._wait_out(attempt, error)

    def _wait_out(self, attempt: int, error: Exception) -> None:
        wait_s = min(BACKOFF_MOST_S, BACKOFF_FIRST_S * 2 ** min(attempt - 1, 10)) * random.uniform(0.5, 1)
        log.warning("stream.retrying", attempt=attempt, wait_s=round(wait_s, 2), error=_first_line(error))
        self._sleep(wait_s)
        self._check_abandoned()

    def _check_abandoned(self) -> None:
        if self._abandon.is_set():
            raise Abandoned("the partitions are being handed over")

    def _connection(self) -> psycopg.Connection[tuple[Any, ...]]:
        if self._conn is None or self._conn.closed:
            conn = postgres.connect(self._url, application_name=self._application_name, autocommit=True)
            conn.execute(
                "SELECT set_config('statement_timeout', %s, false),"
                " set_config('idle_in_transaction_session_timeout', %s, false)",
                (str(STATEMENT_TIMEOUT_MS), str(IDLE_TIMEOUT_MS)),
            )
            self._conn = conn
        return self._conn


# parameters


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()


def _partitions(partitions: Iterable[Partition]) -> str:
    return _json([_partition(partition) for partition in partitions])


def _partition(partition: Partition) -> dict[str, Any]:
    return {"topic": partition.topic, "partition": partition.partition}


def _increments(increments: Mapping[Key, Increment]) -> str:
    return _json(
        [
            {
                "organization_id": key.organization_id,
                "contact_id": key.contact_id,
                "metric_name": key.metric_name,
                "event_count": increment.event_count,
                "first_event_at": increment.first_event_at,
                "last_event_at": increment.last_event_at,
                "totals": [
                    # As text: a JSON number would pass through a float.
                    {"currency": currency, "total_value": str(total.value), "value_count": total.count}
                    for currency, total in increment.totals.items()
                ],
            }
            for key, increment in increments.items()
        ]
    )


def _dead_letters(letters: Iterable[DeadLetter]) -> str:
    return _json(
        [
            {
                "topic": letter.partition.topic,
                "partition": letter.partition.partition,
                "record_offset": letter.record.offset,
                "organization_id": decode.organization_of(letter.record.key),
                "record_key": _hex(letter.record.key),
                "record_value": _hex(letter.record.value),
                "record_headers": [[_text(name), _hex(value)] for name, value in letter.record.headers or ()],
                "error_class": letter.error_class[:255],
                "reason": _text(letter.reason)[:REASON_LENGTH],
            }
            for letter in letters
        ]
    )


def _fences(fences: Mapping[Partition, tuple[int, int]]) -> str:
    return _json(
        [
            {"topic": partition.topic, "partition": partition.partition, "expected": fence, "next_offset": reached}
            for partition, (fence, reached) in fences.items()
        ]
    )


def _hex(value: bytes | None) -> str | None:
    return None if value is None else value.hex()


def _text(value: str) -> str:
    """What Postgres can hold as text: no NUL, no lone surrogate."""
    return value.replace("\x00", "\ufffd").encode("utf-8", "replace").decode()


def _shown(fences: Mapping[Partition, int]) -> str:
    return (
        ", ".join(f"{topic}[{partition}]={offset}" for (topic, partition), offset in sorted(fences.items())) or "gone"
    )


def _first_line(error: Exception) -> str:
    return _text(str(error).strip().split("\n", 1)[0]) or type(error).__name__
