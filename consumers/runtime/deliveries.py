"""`event_delivery`: who runs what, decided in the transaction that also holds the effect.

Every function works inside the caller's transaction, as `afluente_worker`, and takes many deliveries at once. What must
stay true: a delivery runs if its row is new, or if its generation is the record's and its attempts one less than the
record's; a row once done, skipped, dead or discarded never runs under the same generation; an outcome is recorded only
under the claim number the run was given; a replay with --again raises the generation once, however often its record
comes; where a person has edited the event, no record runs but the edited one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

import orjson
from psycopg import AsyncConnection, AsyncCursor

import sql
from consumers.runtime import records
from consumers.runtime.records import Record, RetryMark
from schemas import Event

Connection: TypeAlias = AsyncConnection[Any]

_SLOTS = 64
"""Locks for fixing targets: few enough for the server's lock table, many enough that members seldom meet."""


@dataclass(slots=True, eq=False)
class Item:
    """A delivery in hand: the record it came with, and after the claim how it runs."""

    record: Record
    event: Event
    target: str
    key: str
    mark: RetryMark | None
    attempt: int = 1
    generation: int = 0
    claim: int = 0
    first_failure_at: datetime | None = None
    known: bool = False
    """Its row was written when the targets were fixed."""
    # of external deliveries, by `admission`
    unknown: bool = False
    """A call of it may have been made, and what came of it is not known."""
    destination: str | None = None
    probe: int | None = None
    """It tries whether its destination can be called again; the number says which time."""
    window: tuple[float, float] | None = None
    """When its call may begin, from and until, by the event loop's clock; None: at any time."""
    given: float | None = None
    """The moment that its rate gave it in this claim, as one of the last; by the server's clock."""
    back_at: datetime | None = None
    """It waits in memory until then, as its row says."""

    @property
    def place(self) -> dict[str, Any]:
        """Its row's key, for a JSON parameter."""
        return {"event_created_at": self.event.created_at, "event_id": self.event.id_text, "target": self.target}

    @property
    def identity(self) -> tuple[str, str]:
        return self.event.id_text, self.target


class Row(NamedTuple):
    """A row seen before, as `lock_existing` returns it."""

    i: int
    state: str
    attempts: int
    generation: int
    claim: int
    claimed_by: UUID | None
    next_attempt_at: datetime | None
    kept: bool
    buried: bool
    first_failure_at: datetime | None
    owned: bool
    error_class: str | None
    last_error: str | None
    replay: int = 0
    edited: bytes | None = None
    """The sha256 of the value that a person gave it in place of the event's."""


@dataclass(frozen=True, slots=True)
class Run:
    """Handle it now."""

    attempt: int
    generation: int
    first_failure_at: datetime | None = None
    taken_over_from: UUID | None = None
    again: bool = False
    """It was over, and a replay begins it anew."""


@dataclass(frozen=True, slots=True)
class Duplicate:
    """Nothing to do for this record."""


@dataclass(frozen=True, slots=True)
class ProduceAgain:
    """The delivery waits; whether its retry record was produced nobody knows, so it is produced (again)."""

    attempt: int
    generation: int
    due: datetime
    first_failure_at: datetime | None = None
    error_class: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class BuryAgain:
    """The delivery is dead, and its dead-letter record is not known to be in the topic."""

    attempt: int
    generation: int
    first_failure_at: datetime | None = None
    error_class: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Early:
    """It is not due yet."""

    due: datetime


@dataclass(frozen=True, slots=True)
class Held:
    """Another living process has it: look again later."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """An earlier delivery of its key is unfinished; it waits in Postgres behind it."""


def decide(
    row: Row, mark: RetryMark | None, now: datetime, process: UUID, again: int = 0, *, foreign: bool = False
) -> Verdict:
    """What a record means for a delivery that has a row already. `mark` is None for a source record or a replayed
    one; `again` is the number of the replay that wants it once more. What is open runs anyway, and what people have
    to decide, or have closed, is left to them. (Skipped: there was no target, and asked again the worker names one.)
    `foreign`: the record is not the edited one that this delivery is to run."""
    if mark is None and again > row.replay and row.state in ("done", "dead", "skipped"):
        return Run(1, row.generation + 1, again=True)
    if foreign:
        return Duplicate()
    if mark is not None and mark.generation != row.generation:
        # Lower: an older life of the delivery. Higher: a reprocessing whose transaction did not commit.
        return Duplicate()
    following = row.attempts + 1
    match row.state:
        case "waiting":
            assert row.next_attempt_at is not None
            if mark is not None and mark.attempt == following:
                if row.next_attempt_at <= now:
                    return Run(following, row.generation, row.first_failure_at)
                if mark.due_ms == records.to_ms(row.next_attempt_at):
                    return Early(row.next_attempt_at)
            elif mark is not None and mark.attempt != row.attempts:
                return Duplicate()
            # The source record, or the record whose run led to this waiting: a crash may have come between the commit
            # and the produce. A second copy of the retry record is a duplicate like any other.
            if row.kept:
                return Duplicate()
            return ProduceAgain(
                following, row.generation, row.next_attempt_at, row.first_failure_at, row.error_class, row.last_error
            )
        case "claimed":
            if mark is not None and mark.attempt != following:
                return Duplicate()
            if row.claimed_by is not None and row.claimed_by != process and row.owned:
                return Held()
            # In nobody's hands, in a dead process's, or left over in this one's: a lane runs one delivery at a time, so
            # it cannot be running here.
            lost = row.claimed_by if row.claimed_by != process else None
            return Run(following, row.generation, row.first_failure_at, taken_over_from=lost)
        case "dead" | "needs_review" if not row.buried and (mark is None or mark.attempt >= row.attempts):
            return BuryAgain(row.attempts, row.generation, row.first_failure_at, row.error_class, row.last_error)
        case _:
            return Duplicate()


@dataclass(frozen=True, slots=True)
class PutOff:
    """How a run that did not succeed is recorded."""

    state: str
    """waiting, blocked, dead or needs_review"""
    attempts: int
    due: datetime | None = None
    error_class: str | None = None
    error: str | None = None
    keep: bool = False
    """Its bytes wait in Postgres."""

    @property
    def is_over(self) -> bool:
        """It is a dead letter, or for people to review: what waits behind its key goes on."""
        return self.state in ("dead", "needs_review")


Verdict: TypeAlias = Run | Duplicate | ProduceAgain | BuryAgain | Early | Held | Blocked | PutOff
Limit: TypeAlias = Callable[[Connection, Sequence[Item], list[Verdict]], Awaitable[None]]
"""Puts off some of those that are to run: their verdict becomes `PutOff`, or `Early` where they wait in memory."""


class Deliveries:
    """The statements of one worker's process."""

    def __init__(self, worker: str, process: UUID, *, transactional: bool, ordered: bool, takeover_s: float) -> None:
        self.worker = worker
        self.process = process
        self.ordered = ordered
        self._state = "done" if transactional else "claimed"
        self._takeover_s = takeover_s
        self._sql: Mapping[str, str] = sql.queries("deliveries")

    async def claim(
        self,
        conn: Connection,
        items: Sequence[Item],
        now: datetime,
        delay: timedelta,
        keep_beyond: timedelta,
        limit: Limit | None = None,
    ) -> list[Verdict]:
        """Decide for each item (no two of the same delivery) and write it: those to `Run` are taken in this
        transaction.

        `delay` is the policy's; first sights that are not due are made to wait, in Postgres if longer than
        `keep_beyond`. `limit` puts off what may not be called now.
        """
        verdicts: list[Verdict | None] = [None] * len(items)
        if self.ordered:
            await self._execute(conn, "lock_keys", keys=sorted({item.key for item in items}))
        fresh = {i for i, item in enumerate(items) if item.mark is None and not item.known}
        for i in await self._insert(conn, items, fresh, now, delay, keep_beyond):
            # Without a delay the clocks of two machines do not matter.
            if not delay or (due := records.whole_ms(items[i].event.created_at + delay)) <= now:
                verdicts[i] = Run(1, 0)
            else:
                verdicts[i] = Duplicate() if due - now > keep_beyond else ProduceAgain(1, 0, due)
        seen = [i for i, verdict in enumerate(verdicts) if verdict is None]
        in_line: set[int] = set()  # seen before by a run, or by the order of its key
        if seen:
            for row in await self._lock(conn, items, seen):
                item = items[row.i]
                if row.state != "claimed" or row.claim:
                    in_line.add(row.i)
                foreign = row.edited is not None and row.edited != sha256(item.record.value or b"").digest()
                verdicts[row.i] = decide(row, item.mark, now, self.process, item.record.again, foreign=foreign)
                item.claim = row.claim
                if item.back_at is not None and (row.state, row.next_attempt_at) == ("waiting", item.back_at):
                    # it waited here in memory, and nobody touched it meanwhile
                    following = Run(row.attempts + 1, row.generation, row.first_failure_at)
                    verdicts[row.i] = following if item.back_at <= now else Early(item.back_at)
        # Retry records without a row: replayed to this worker, or of a month whose rows are gone.
        missing = {i for i, verdict in enumerate(verdicts) if verdict is None}
        if missing:
            for i in await self._insert(conn, items, missing, now, timedelta(0), keep_beyond):
                verdicts[i] = Run(1, _generation(items[i]))
            for i in missing:
                verdicts[i] = verdicts[i] or Held()  # written by another process in this very moment
        decided = [verdict if verdict is not None else Held() for verdict in verdicts]
        await self._begin_anew(conn, items, decided)
        if delay:
            await self._put_off_known(conn, items, decided, now, delay, keep_beyond)
        if self.ordered:
            await self._block(conn, items, decided, in_line)
        if limit is not None:
            await limit(conn, items, decided)
        await self._take(conn, items, decided, [i for i in seen if isinstance(decided[i], Run)])
        for item, verdict in zip(items, decided, strict=True):
            if isinstance(verdict, Run):
                item.attempt, item.generation = verdict.attempt, verdict.generation
                item.first_failure_at = verdict.first_failure_at
                item.claim = item.claim or 1
        return decided

    async def _insert(
        self,
        conn: Connection,
        items: Sequence[Item],
        which: Iterable[int],
        now: datetime,
        delay: timedelta,
        keep_beyond: timedelta,
    ) -> list[int]:
        parameter = []
        for i in which:
            item, event = items[i], items[i].event
            row = {
                "i": i,
                "event_created_at": event.created_at,
                "event_id": event.id_text,
                "target": item.target,
                "organization_id": event.organization_text,
                "event_type": event.event_type,
                "key": item.key,
                "generation": _generation(item),
                "replay": item.record.again,
            }
            if delay and (due := records.whole_ms(event.created_at + delay)) > now:
                row["due"] = due
                if due - now > keep_beyond:
                    row |= kept(item.record)
            parameter.append(row)
        if not parameter:
            return []
        cursor = await self._execute(
            conn, "insert_fresh", items=_json(parameter), state=self._state, process=self.process
        )
        return [i for (i,) in await cursor.fetchall()]

    async def _lock(self, conn: Connection, items: Sequence[Item], which: Iterable[int]) -> list[Row]:
        parameter = _json([{"i": i, **items[i].place} for i in which])
        cursor = await self._execute(conn, "lock_existing", items=parameter, takeover_s=self._takeover_s)
        return [Row(*row) for row in await cursor.fetchall()]

    async def _begin_anew(self, conn: Connection, items: Sequence[Item], decided: Sequence[Verdict]) -> None:
        """What a replay runs again is first as if it had only been seen: it may be taken, or go behind its key."""
        parameter = [
            {**item.place, "replay": item.record.again}
            for item, verdict in zip(items, decided, strict=True)
            if isinstance(verdict, Run) and verdict.again
        ]
        if parameter:
            await self._execute(conn, "again", items=_json(parameter))

    async def _take(
        self, conn: Connection, items: Sequence[Item], decided: Sequence[Verdict], which: list[int]
    ) -> None:
        parameter = []
        for i in which:
            verdict = decided[i]
            assert isinstance(verdict, Run)
            again = items[i].record.again
            parameter.append({"i": i, **items[i].place, "attempt": verdict.attempt, "replay": again})
        if parameter:
            cursor = await self._execute(conn, "take", items=_json(parameter), state=self._state, process=self.process)
            for i, claim in await cursor.fetchall():
                items[i].claim = claim

    async def _put_off_known(
        self,
        conn: Connection,
        items: Sequence[Item],
        decided: list[Verdict],
        now: datetime,
        delay: timedelta,
        keep_beyond: timedelta,
    ) -> None:
        """A worker that starts late, with targets fixed at first sight: the rows are there, the time is not."""
        for i, item in enumerate(items):
            due = records.whole_ms(item.event.created_at + delay)
            if item.known and item.claim == 0 and isinstance(decided[i], Run) and due > now:
                keep = due - now > keep_beyond
                await self.put_off(conn, [(item, PutOff("waiting", 0, due, keep=keep))], None, locked=True)
                decided[i] = Duplicate() if keep else ProduceAgain(1, 0, due)

    async def _block(
        self, conn: Connection, items: Sequence[Item], decided: list[Verdict], in_line: Collection[int]
    ) -> None:
        """Deliveries that begin for the first time go behind what is unfinished of their key. What has stood in line
        does not go to its end again: it would wait for itself."""
        begin = [
            i
            for i, verdict in enumerate(decided)
            if isinstance(verdict, Run) and verdict.attempt == 1 and (i not in in_line or verdict.again)
        ]
        if not begin:
            return
        cursor = await self._execute(
            conn,
            "keys_taken",
            keys=sorted({items[i].key for i in begin}),
            process=self.process,
            items=_json([items[i].place for i in begin]),
        )
        taken = {key for (key,) in await cursor.fetchall()}
        behind = [i for i in begin if items[i].key in taken]
        if behind:
            await self.put_off(conn, [(items[i], PutOff("blocked", 0, keep=True)) for i in behind], None, locked=True)
            for i in behind:
                decided[i] = Blocked()

    async def put_off(
        self, conn: Connection, outcomes: Sequence[tuple[Item, PutOff]], now: datetime | None, *, locked: bool
    ) -> set[int]:
        """Record runs that did not succeed; returns the numbers of those that were still ours.

        `locked`: the caller's transaction took the rows (transactional); else the claim must still hold.
        """
        parameter = []
        for i, (item, outcome) in enumerate(outcomes):
            origin = records.origin_of(item.record)
            row = {
                "i": i,
                **item.place,
                "state": outcome.state,
                "attempts": outcome.attempts,
                "due": outcome.due,
                "error_class": outcome.error_class,
                "error": outcome.error,
                "failed_at": now,
                "origin_topic": origin.topic,
                "origin_partition": origin.partition,
                "origin_offset": origin.offset,
                "claim": None if locked else item.claim,
            }
            if outcome.keep:
                row |= kept(item.record)
            parameter.append(row)
        cursor = await self._execute(conn, "put_off", items=_json(parameter), process=self.process)
        ours = set()
        for i, first_failure_at in await cursor.fetchall():
            outcomes[i][0].first_failure_at = first_failure_at
            ours.add(i)
        return ours

    async def finish(self, conn: Connection, items: Sequence[Item]) -> set[int]:
        """External deliveries are done; returns the numbers of those whose claim was still ours."""
        parameter = [
            {"i": i, **item.place, "attempt": item.attempt, "claim": item.claim} for i, item in enumerate(items)
        ]
        cursor = await self._execute(conn, "finish", items=_json(parameter), process=self.process)
        return {i for (i,) in await cursor.fetchall()}

    async def release_keys(self, conn: Connection, keys: Iterable[str], now: datetime) -> int:
        """With ordering by key: the next delivery of each key goes on. The caller's transaction finished the one
        before."""
        cursor = await self._execute(conn, "release_keys", keys=sorted(set(keys)), now=now)
        return cursor.rowcount

    async def lock_keys(self, conn: Connection, keys: Iterable[str]) -> None:
        await self._execute(conn, "lock_keys", keys=sorted(set(keys)))

    async def known_targets(
        self, conn: Connection, events: Sequence[Event], again: Collection[int] = ()
    ) -> dict[int, list[str]]:
        """Lock the events' slots, then the targets of those that have some, by the number of the event. `again`: the
        numbers of those that a replay wants once more."""
        slots = sorted({event.id.int % _SLOTS for event in events})
        await self._execute(conn, "lock_events", slots=slots)
        parameter = _json(
            [
                {"i": i, "event_created_at": event.created_at, "event_id": event.id, "again": i in again}
                for i, event in enumerate(events)
            ]
        )
        cursor = await self._execute(conn, "known_targets", items=parameter)
        return {i: list(targets) for i, targets in await cursor.fetchall()}

    async def fix_targets(self, conn: Connection, rows: Sequence[tuple[Event, str, str, str]]) -> None:
        """Write (event, target, key, state) once and for all: `claimed` by nobody, or `skipped`."""
        parameter = [
            {
                "event_created_at": event.created_at,
                "event_id": event.id,
                "target": target,
                "organization_id": event.organization_id,
                "event_type": event.event_type,
                "key": key,
                "state": state,
            }
            for event, target, key, state in rows
        ]
        if parameter:
            await self._execute(conn, "fix_targets", items=_json(parameter))

    async def buried(self, conn: Connection, item: Item, partition: int, offset: int) -> None:
        """Note where the dead-letter record is."""
        await self._execute(conn, "buried", **item.place, partition=partition, offset=offset)

    async def hand_back(self, conn: Connection) -> int:
        cursor = await self._execute(conn, "hand_back", process=self.process)
        return cursor.rowcount

    async def reject_waiting(self, conn: Connection, event: Event, target: str, reason: str) -> int:
        cursor = await self._execute(
            conn,
            "reject_waiting",
            organization_id=event.organization_id,
            target=target,
            event_id=event.id,
            reason=records.cut(reason),
        )
        return cursor.rowcount

    async def due_kept(self, conn: Connection, now: datetime, limit: int) -> list[tuple[Any, ...]]:
        cursor = await self._execute(conn, "due_kept", now=now, limit=limit)
        return await cursor.fetchall()

    async def next_kept(self, conn: Connection) -> datetime | None:
        row = await (await self._execute(conn, "next_kept")).fetchone()
        return row[0] if row else None

    async def no_longer_kept(self, conn: Connection, places: Sequence[tuple[datetime, UUID, str]]) -> None:
        parameter = [{"event_created_at": c, "event_id": e, "target": t} for c, e, t in places]
        await self._execute(conn, "no_longer_kept", items=_json(parameter))

    async def bury_kept(
        self,
        conn: Connection,
        place: tuple[datetime, UUID, str],
        error_class: str,
        error: str,
        dead: tuple[int, int],
        now: datetime,
    ) -> None:
        """What was kept cannot go to a retry topic: it is dead, and its dead letter is there. Its key goes on."""
        created_at, event_id, target = place
        cursor = await self._execute(
            conn,
            "bury_kept",
            event_created_at=created_at,
            event_id=event_id,
            target=target,
            error_class=error_class,
            error=records.cut(error),
            dead_partition=dead[0],
            dead_offset=dead[1],
        )
        if self.ordered:
            await self.release_keys(conn, [key for (key,) in await cursor.fetchall()], now)

    async def orphaned(self, conn: Connection, limit: int) -> list[tuple[Any, ...]]:
        cursor = await self._execute(conn, "orphaned", takeover_s=self._takeover_s, limit=limit)
        return await cursor.fetchall()

    async def take_over(
        self,
        conn: Connection,
        place: tuple[datetime, UUID, str],
        key: bytes,
        value: bytes,
        headers: records.Headers,
        now: datetime,
    ) -> None:
        created_at, event_id, target = place
        await self._execute(
            conn,
            "take_over",
            event_created_at=created_at,
            event_id=event_id,
            target=target,
            kept_key=key,
            kept_value=value,
            kept_headers=orjson.dumps(records.headers_to_json(headers)).decode(),
            now=now,
        )

    async def undecodable_known(self, conn: Connection, record: Record, timestamp: datetime) -> bool:
        cursor = await self._execute(conn, "undecodable_known", **_where(record, timestamp))
        return await cursor.fetchone() is not None

    async def undecodable(
        self, conn: Connection, record: Record, timestamp: datetime, error_class: str, error: str, dead: tuple[int, int]
    ) -> None:
        """Note a record whose bytes are no event, and where its dead-letter record is."""
        await self._execute(
            conn,
            "undecodable",
            **_where(record, timestamp),
            error_class=error_class,
            error=records.cut(error),
            size=len(record.value or b""),
            dead_partition=dead[0],
            dead_offset=dead[1],
        )

    async def register(self, conn: Connection, event_types: Iterable[str]) -> None:
        await self._execute(conn, "register_types", event_types=sorted(event_types))

    async def renew(self, conn: Connection, host: str, pid: int) -> None:
        """This process is alive: its claims hold. Also its first registration."""
        await self._execute(conn, "register_process", process=self.process, host=host, pid=pid)

    async def forget(self, conn: Connection) -> None:
        """The process ends: what it left claimed may be taken at once."""
        await self._execute(conn, "forget_process", process=self.process)
        await self._execute(conn, "forget_dead_processes")

    async def _execute(self, conn: Connection, name: str, **parameters: Any) -> AsyncCursor[Any]:
        return await conn.execute(self._sql[name], {"worker": self.worker, **parameters})


def kept(record: Record) -> dict[str, Any]:
    """A record's bytes as columns of a JSON parameter."""
    return {
        "kept_key": (record.key or b"").hex(),
        "kept_value": (record.value or b"").hex(),
        "kept_headers": records.headers_to_json(records.with_origin(record)),
    }


def _generation(item: Item) -> int:
    return item.mark.generation if item.mark is not None else 0


def _where(record: Record, timestamp: datetime) -> dict[str, Any]:
    return {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": timestamp,
    }


def _json(rows: Sequence[Mapping[str, Any]]) -> str:
    return orjson.dumps(rows).decode()
