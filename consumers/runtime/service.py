"""A worker at work: records in, deliveries decided and run, outcomes recorded, offsets finished.

The path of a record: the poll thread hands it over (`poll`) -> decoded, its targets fixed -> its lane (`lanes`), or the
heap of what is not due (`retry`) -> claimed and handled (here) -> recorded (`deliveries`) -> its retry or dead-letter
record produced (`sender`) -> its offset finished (`poll`).

What must stay true:
- The effect and the delivery's row are one transaction.
- On failure: the attempt and its due time are committed, then the retry record is produced, then the offset is
  finished. The other order would lose the delivery, or run it under an attempt nobody knows of.
- Postgres or Kafka away is nobody's attempt: the same is done again until it works or the process is stopped.
- No record can end the process: what makes the database refuse a batch is looked for in it, and buried.
- A stop or a revoke uses no attempt: what has not begun is dropped, what runs is finished or handed back.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import threading
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from functools import partial
from typing import Any, Literal, TypeAlias
from uuid import UUID, uuid4

import psycopg
from psycopg_pool import AsyncConnectionPool, PoolClosed, PoolTimeout

import schemas
from afluente import faults, kafka
from afluente.clock import Clock
from afluente.postgres import act_for
from afluente.settings import KafkaSettings
from afluente.telemetry import get_logger
from consumers import workers
from consumers.errors import BadWorker, UndecodableRecord
from consumers.runtime import records, retry
from consumers.runtime.context import HandlerContext
from consumers.runtime.deliveries import (
    Blocked,
    BuryAgain,
    Connection,
    Deliveries,
    Duplicate,
    Early,
    Held,
    Item,
    ProduceAgain,
    PutOff,
    Run,
    Verdict,
)
from consumers.runtime.lanes import Lanes
from consumers.runtime.outgoing import Outgoing, RecordRefused, pauses_s
from consumers.runtime.poll import Limits, Place, Poller
from consumers.runtime.records import Record, RetryMark
from consumers.runtime.sender import Sender
from consumers.worker import (
    BatchWorker,
    Delivery,
    ExternalWorker,
    Policy,
    Reject,
    RetryAfter,
    Snooze,
    TransactionalWorker,
    Worker,
)
from schemas import Event
from schemas.topics import Topics

_log = get_logger(__name__)

Observer: TypeAlias = Callable[..., None]
"""Called with an event name and fields at the places tests wait for; does nothing in production."""

UNADDRESSED = "?"
"""The target of a delivery that is dead because none could be found; reprocessed, they are looked for again."""

KEEP_BEYOND = timedelta(seconds=retry.LONGEST_IN_KAFKA_S)
_BATCHES = 2  # transactional batches at once: one in the database, one being decoded and claimed
_PER_LANE = 100  # of one key in one batch, so that one key does not fill it
_GROUP_COMMIT = 500
_KEEPER_S = 1.0
_OLDEST_MONTH = timedelta(days=400)
_NEWEST = timedelta(days=31)
_EVENT_TYPE = re.compile(r"(?=.{3,100}\Z)[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*")
_LONGEST_WAIT_S = 3650 * 86_400.0  # what a stranger's Retry-After may ask for: datetime ends somewhere
_CLOCKS_APART_S = 3600.0
_BREAKS = 3  # a delivery that breaks the connection this often is at fault itself


@dataclass(frozen=True, slots=True)
class Options:
    """What a deployment may want otherwise."""

    group_protocol: Literal["consumer", "classic"] = "consumer"
    drain_s: float = 25.0
    """SIGTERM: so long for what runs; then it is cancelled and handed back."""
    revoke_drain_s: float = 10.0
    takeover_s: float = 300.0
    """A claim whose process was not renewed for so long may be taken over."""
    renew_s: float = 30.0
    held_recheck_s: float = 5.0
    """A delivery that another process holds is looked at again after this."""
    backoff_scale: float = 1.0
    commit_interval_s: float = 0.5
    pool_size: int = 6
    limits: Limits = field(default_factory=Limits)


@dataclass(slots=True)
class Done:
    """The handler returned; `result` is an external call's."""

    result: Any = None


@dataclass(frozen=True, slots=True)
class Unfit:
    """The database takes the delivery in no form: its record is buried like one that is no event."""

    error: BaseException


Outcome: TypeAlias = Verdict | Done | PutOff | Unfit

_FAULTY = (
    psycopg.DataError,
    psycopg.IntegrityError,
    psycopg.errors.ProgramLimitExceeded,
    UnicodeError,
)
"""Raised out of a batch's transaction by what is in one of its deliveries: a value that a column does not hold, or a
constraint that is checked at the commit only."""
_UNFIT = (psycopg.DataError, psycopg.errors.ProgramLimitExceeded, UnicodeError)
"""Those of them that come of the record alone, whatever the handler does."""


class _Separate(Exception):
    """A batch failed: do it again, each delivery by itself."""


@dataclass(slots=True, eq=False)
class _Called:
    """An external call that came back."""

    lane: tuple[Any, str]
    item: Item
    prepared: Any
    result: Any = None
    error: BaseException | None = None
    untold: bool = False
    """Recording it failed at the commit with the worker's own part in it: it is recorded without that."""


class WorkerService:
    """One worker, one consumer group member. `run` until told to stop."""

    def __init__(
        self,
        worker: Worker,
        *,
        kafka_settings: KafkaSettings,
        pool: AsyncConnectionPool[Any],
        clock: Clock,
        random: Callable[[], float],
        options: Options | None = None,
        observer: Observer | None = None,
    ) -> None:
        check(worker)
        self.worker = worker
        self.name = worker.name
        self.policy: Policy = worker.policy
        self.process: UUID = uuid4()
        self._kafka = kafka_settings
        self._topics = Topics(kafka_settings.topic_prefix)
        self._pool = pool
        self._clock = clock
        self._random = random
        self._options = options or Options()
        self._observer = observer or (lambda name, **fields: None)
        self._external = isinstance(worker, ExternalWorker)
        self._many_targets = type(worker).targets is not Worker.targets
        self._deliveries = Deliveries(
            self.name,
            self.process,
            transactional=not self._external,
            ordered=self.policy.ordering == "key",
            takeover_s=self._options.takeover_s,
        )
        self._waiting_topics = {self._topics.retry(self.name, delay) for delay in schemas.topics.RETRY_DELAYS_S}
        self._retry_topics = self._waiting_topics | {self._topics.retry(self.name, "now")}
        # Nothing of ours waits longer in Kafka; a forged time would hold back its partition's offset until then.
        scale = max(1.0, self._options.backoff_scale)
        self._longest_wait_ms = int(
            1000 * (retry.LONGEST_IN_KAFKA_S * (1 + self.policy.jitter) * scale + _CLOCKS_APART_S)
        )
        self._lanes: Lanes[Item] = Lanes(organization_limit=self.policy.organization_concurrency)
        self._due: retry.DueHeap[tuple[Record, RetryMark | None, Item | None]] = retry.DueHeap()
        self._fan_out: list[tuple[Record, Event, RetryMark | None]] = []
        self._target_failures: dict[UUID, int] = defaultdict(int)
        self._called: list[_Called] = []
        self._breaks: dict[tuple[UUID, str], list[BaseException]] = defaultdict(list)
        self._months: set[tuple[int, int]] = set()
        self._reopened: set[date] = set()
        self._months_line: dict[Place, deque[tuple[Record, Event, RetryMark | None]]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._batches = 0
        self._recording = False
        self._revoking: list[tuple[list[Place], threading.Event]] = []
        self._stopping = False
        self._abandoned = False
        self._ready = False

    # Life

    async def run(self, stop: asyncio.Event, stop_now: asyncio.Event | None = None) -> bool:
        """Work until `stop`, then drain; `stop_now` cuts the draining short. True when everything in hand was finished.

        Raises what ended the poll thread, if it ended by itself.
        """
        self._loop = asyncio.get_running_loop()
        self._work = asyncio.Event()
        self._fan_work = asyncio.Event()
        self._record_work = asyncio.Event()
        self._due_work = asyncio.Event()
        self._keep_work = asyncio.Event()
        self._failure: asyncio.Future[None] = self._loop.create_future()
        await asyncio.to_thread(self._require_topics)
        await self._transaction(self._register)
        await self.worker.open()
        self._sender = Sender(
            partial(kafka.producer, self._kafka, message_timeout_ms=30_000, message_max_bytes=4_000_000)
        )
        self._outgoing = Outgoing(self._sender, self._say)
        self._poller = self._make_poller()
        background = [
            asyncio.create_task(body())
            for body in (
                self._dispatch,
                self._fan_out_loop,
                self._record_loop,
                self._due_loop,
                self._keep_loop,
                self._renew_loop,
            )
        ]
        for task in background:
            task.add_done_callback(self._background_ended)
        self._poller.start()
        stopped = self._loop.create_task(stop.wait())
        drained = False
        try:
            ends: list[asyncio.Future[Any]] = [stopped, self._failure]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                self._failure.result()
            drained = await self._drain(stop_now or asyncio.Event())
        finally:
            stopped.cancel()
            self._stopping = self._abandoned = True
            for task in [*background, *self._tasks]:
                task.cancel()
            await asyncio.gather(*background, *self._tasks, return_exceptions=True)
            await self._leave()
        return drained

    def _require_topics(self) -> None:
        """Fail at boot, loudly, when a topic is missing: a consumer would wait for it in silence."""
        client = kafka.admin(self._kafka)
        there = client.list_topics(timeout=kafka.METADATA_TIMEOUT_S).topics
        needed = [*self.source_topics(), *self._topics.retries(self.name), self._topics.dead_letter(self.name)]
        if missing := [topic for topic in needed if topic not in there]:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise BadWorker(
                f"{self.name} needs topics that do not exist: {', '.join(missing[:3])}{more}",
                hint=f"afluente topics apply --worker {workers.spelling(type(self.worker))}",
            )

    def source_topics(self) -> list[str]:
        """The event topics of its types."""
        if "*" in self.worker.event_types:
            return [topic for topic in self._topics.families() if topic != self._topics.family("webhook")]
        return sorted({self._topics.event(event_type) for event_type in self.worker.event_types})

    async def _register(self, conn: Connection) -> None:
        await self._deliveries.register(conn, self.worker.event_types)
        await self._deliveries.renew(conn, socket.gethostname(), os.getpid())

    def _make_poller(self) -> Poller:
        # range: a member gets the same partition numbers of every topic, so a key's retries come to the member of its
        # events, and none is left with quiet retry topics only.
        protocol: dict[str, Any] = {"group_protocol": "consumer", "group_remote_assignor": "range"}
        if self._options.group_protocol == "classic":
            # Its only cooperative assignor balances the number of partitions, whatever their topics: less even.
            protocol = {"group_protocol": "classic", "partition_assignment_strategy": "cooperative-sticky"}
        call = self._loop.call_soon_threadsafe

        def make(**callbacks: Any) -> Any:
            return kafka.consumer(
                self._kafka,
                self.name,
                # A committed offset that is gone must be seen (poll.py); a new group starts at the beginning by itself.
                auto_offset_reset="error",
                fetch_wait_max_ms=50,
                # Small and without the 1 s pause of a full queue: full speed in 50 MB.
                queued_max_messages_kbytes=4096,
                fetch_queue_backoff_ms=5,
                max_poll_interval_ms=60_000,
                **protocol,
                **callbacks,
            )

        return Poller(
            make,
            topics=[*self.source_topics(), self._topics.retry(self.name, "now")],
            waiting_topics=sorted(self._waiting_topics),
            limits=self._options.limits,
            commit_interval_s=self._options.commit_interval_s,
            revoke_drain_s=self._options.revoke_drain_s,
            deliver=lambda batch: _quietly(call, self._intake, batch),
            revoke=lambda places, drained: _quietly(call, self._revoked, places, drained),
            assigned=lambda count: _quietly(call, self._assigned, count),
            failed=lambda error: _quietly(call, self._fail, error),
            worker=self.name,
        )

    def _assigned(self, partitions: int) -> None:
        self._say("worker.assigned", partitions=partitions)
        if not self._ready:
            self._ready = True
            self._say("worker.ready", partitions=partitions, process=str(self.process))

    def _fail(self, error: BaseException) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    def _background_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    async def _drain(self, stop_now: asyncio.Event) -> bool:
        self._say("process.stopping", drain_s=self._options.drain_s)
        self._stopping = True
        self._poller.drain()
        self._drop(lambda record: True)
        cut_short = self._loop.create_task(stop_now.wait())
        deadline = self._loop.time() + self._options.drain_s
        try:
            while self._tasks or self._called or self._recording:
                left = deadline - self._loop.time()
                if left <= 0 or stop_now.is_set():
                    return False
                await asyncio.wait(
                    [cut_short, *self._tasks], timeout=min(left, 0.05), return_when=asyncio.FIRST_COMPLETED
                )
        finally:
            cut_short.cancel()
        return True

    async def _leave(self) -> None:
        """Hand back what was not finished, commit what was, leave the group."""
        try:
            async with asyncio.timeout(5.0), self._pool.connection() as conn:
                if handed_back := await self._deliveries.hand_back(conn):
                    self._say("worker.handed_back", count=handed_back)
                await self._deliveries.forget(conn)
        except (TimeoutError, psycopg.Error, PoolTimeout, PoolClosed) as error:
            # They are taken over when this process is missed.
            self._say("worker.postgres_away", level="warning", error=str(error))
        self._poller.end()
        # The end itself may hang in the client when the broker is away; the process ends anyway.
        await asyncio.to_thread(self._poller.join, 10.0)
        await asyncio.to_thread(self._sender.close, 2.0)
        await self.worker.close()

    # Records in

    def _intake(self, batch: list[Record]) -> None:
        if self._stopping:
            return
        now_ms = records.to_ms(self._clock.now())
        latest_ms = now_ms + self._longest_wait_ms
        for record in batch:
            record.pending = 1
            record.ours = record.topic in self._retry_topics
            mark = None
            if record.headers_unreadable:
                self._spawn(record, self._undecodable(record, "BadHeaders", "the name of a header is not UTF-8"))
                continue
            if record.ours:
                try:
                    mark, record.again = records.read_mark(record), records.read_again(record)
                    if mark is not None and mark.due_ms > latest_ms:
                        raise ValueError(f"header {records.DUE_MS} is further off than any wait in a retry topic")
                except ValueError as error:
                    self._spawn(record, self._undecodable(record, "BadHeaders", str(error)))
                    continue
                # In retry.now everything is due; what its row says otherwise counts, not a header.
                if mark is not None and mark.due_ms > now_ms and record.topic in self._waiting_topics:
                    self._wait_until(mark.due_ms, record, mark, None)
                    continue
            self._admit(record, mark)

    def _admit(self, record: Record, mark: RetryMark | None) -> None:
        if not record.ours:
            # The type is in a header, so that other workers' records need not be decoded.
            event_type = record.header("ce_type")
            if event_type is not None and not self.takes(event_type):
                self._poller.finish(record)
                return
        try:
            event = decode(record)
        except UndecodableRecord as error:
            self._spawn(record, self._undecodable(record, error.error_class, error.message))
            return
        if not record.ours and not self.takes(event.event_type):
            self._poller.finish(record)
            return
        month = (event.created_at.year, event.created_at.month)
        if month not in self._months or record.place in self._months_line:
            if record.place not in self._months_line:
                self._months_line[record.place] = deque()
                self._spawn(None, self._check_months(record.place))
            self._months_line[record.place].append((record, event, mark))
            return
        self._route(record, event, mark)

    def _route(self, record: Record, event: Event, mark: RetryMark | None) -> None:
        if self._many_targets and (mark is None or mark.target == UNADDRESSED):
            self._fan_out.append((record, event, mark))
            self._fan_work.set()
        else:
            self._queue(
                Item(record, event, mark.target if mark else "", self._key(event, mark.target if mark else ""), mark)
            )

    def takes(self, event_type: str) -> bool:
        types = self.worker.event_types
        return event_type in types or ("*" in types and not event_type.startswith("webhook."))

    def _key(self, event: Event, target: str) -> str:
        try:
            return records.cut(str(self.worker.key(event, target)), 500)
        except Exception:
            return str(event.id)  # the handler meets the same event, and its error is what gets recorded

    def _queue(self, item: Item) -> None:
        self._lanes.add(item.event.organization_id, item.key, item)
        self._work.set()

    def _wait_until(self, due_ms: int, record: Record, mark: RetryMark | None, item: Item | None) -> None:
        earliest = self._due.next_due_ms
        self._due.push(due_ms, (record, mark, item))
        if earliest is None or due_ms < earliest:
            self._due_work.set()

    async def _due_loop(self) -> None:
        """Let go what has become due, in the order of due times."""
        while True:
            for record, mark, item in self._due.pop_due(records.to_ms(self._clock.now())):
                if not record.place.alive:
                    continue
                if item is None:
                    self._admit(record, mark)
                else:
                    self._queue(item)
            next_due = self._due.next_due_ms
            wait_s = None if next_due is None else max(0.0, next_due / 1000 - self._clock.now().timestamp())
            self._due_work.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self._due_work.wait()
            except TimeoutError:
                pass

    async def _check_months(self, place: Place) -> None:
        """Deliveries are kept by the month of the event: the month must have its partition.

        What comes after on the same partition waits in line, or a key's later event would overtake an earlier one.
        """
        line = self._months_line[place]
        try:
            while line and place.alive:
                record, event, mark = line.popleft()
                if (refused := await self._make_month(event, record.again > 0)) is None:
                    self._route(record, event, mark)
                else:
                    place.running += 1
                    await self._undecodable(record, *refused)
                    place.running -= 1
                    self._check_revoking()
        finally:
            del self._months_line[place]

    async def _make_month(self, event: Event, again: bool = False) -> tuple[str, str] | None:
        """See that the event's month has its partition; (error class, error) for an event that gets none."""
        now, month = self._clock.now(), event.created_at.date().replace(day=1)
        if (month.year, month.month) in self._months:
            return None
        when = event.created_at.isoformat()
        if event.created_at < now - _OLDEST_MONTH:
            if again:
                await self._reopen_month(month)
                return None
            return "TooOld", f"event of {when}: its month's deliveries are gone; replay it with --again"
        if event.created_at > now + _NEWEST:
            return "InTheFuture", f"event of {when}, which is yet to come"

        async def ensure(conn: Connection) -> None:
            await conn.execute("SELECT afluente.ensure_partitions(%s, %s)", (month, month))

        await self._transaction(ensure)
        self._months.add((month.year, month.month))
        return None

    async def _reopen_month(self, month: date) -> None:
        """For a replay with --again only: what comes from elsewhere of such a month goes on being refused."""
        if month not in self._reopened:

            async def reopen(conn: Connection) -> None:
                await conn.execute("SELECT afluente.reopen_delivery_month(%s)", (month,))

            await self._transaction(reopen)
            self._reopened.add(month)

    # Targets

    async def _fan_out_loop(self) -> None:
        """Fix the targets of events at first sight, many events in one transaction."""
        while True:
            await self._fan_work.wait()
            self._fan_work.clear()
            while self._fan_out and not self._stopping:
                batch, self._fan_out = self._fan_out[:200], self._fan_out[200:]
                batch = [entry for entry in batch if entry[0].place.alive]
                if batch:
                    await self._fix_targets(batch)

    async def _fix_targets(self, batch: list[tuple[Record, Event, RetryMark | None]]) -> None:
        known: dict[int, list[str]] = {}
        fixed: dict[int, list[str]] = {}
        failed: dict[int, BaseException] = {}

        async def fix(conn: Connection) -> None:
            fixed.clear()
            failed.clear()
            known.clear()
            again = {i for i, (record, _, _) in enumerate(batch) if record.again}
            known.update(await self._deliveries.known_targets(conn, [event for _, event, _ in batch], again))
            new = [i for i, entry in enumerate(batch) if not _addressed(known.get(i, ()), entry)]
            for organization_id, group in _by_organization(new, lambda i: batch[i][1]):
                async with act_for(conn, organization_id):
                    for i in group:
                        event = batch[i][1]
                        try:
                            async with _savepoint(conn, separate):
                                targets = await self.worker.targets(event, conn)
                                fixed[i] = list(dict.fromkeys(records.cut(target, 500) for target in targets))
                        except Exception as error:
                            if is_away(error, conn):
                                raise
                            if not separate:
                                raise _Separate from error
                            failed[i] = error
            rows = []
            for i, targets in fixed.items():
                event = batch[i][1]
                rows += [(event, target, self._key(event, target), "claimed") for target in targets]
                if not targets:
                    rows.append((event, "", self._key(event, ""), "skipped"))
            await self._deliveries.fix_targets(conn, rows)

        separate = False
        try:
            try:
                await self._transaction(fix)
            except _Separate:
                separate = True
                await self._transaction(fix)
        except _FAULTY as error:
            self._say_unfit(error, len(batch))
            if len(batch) > 1:
                for entry in batch:
                    await self._fix_targets([entry])
            elif isinstance(error, _UNFIT):
                self._spawn(batch[0][0], self._undecodable(batch[0][0], kind(error), describe(error)))
            else:  # what `targets` wrote fails at the commit
                self._targets_failed(*batch[0], error)
            return
        for i, (record, event, mark) in enumerate(batch):
            if i in failed:
                self._targets_failed(record, event, mark, failed[i])
                continue
            targets = fixed[i] if i in fixed else _addressed(known[i], batch[i])
            if mark is not None or (record.again and UNADDRESSED in known.get(i, ())):
                # A dead letter of "no targets could be found", reprocessed or replayed: that delivery runs as well,
                # and does nothing.
                self._spawn(record, self._close_unaddressed(Item(record, event, UNADDRESSED, UNADDRESSED, mark)))
                record.pending += 1
            if not targets:
                self._finish(record)
                continue
            record.pending += len(targets) - 1
            for target in targets:
                self._queue(Item(record, event, target, self._key(event, target), None, known=True))

    def _targets_failed(self, record: Record, event: Event, mark: RetryMark | None, error: BaseException) -> None:
        """No row exists yet that could count attempts: they are counted here, and the record stays unfinished
        meanwhile."""
        self._target_failures[event.id] += 1
        failures = self._target_failures[event.id]
        if not retry.is_spent(self.policy, failures):
            wait_s = retry.backoff_s(self.policy, failures, self._random, self._options.backoff_scale)
            self._say(
                "worker.targets_failed",
                level="warning",
                event_id=str(event.id),
                attempt=failures,
                error=describe(error),
            )
            self._wait_until(records.to_ms(self._clock.now() + timedelta(seconds=wait_s)), record, mark, None)
            return
        del self._target_failures[event.id]
        item = Item(record, event, UNADDRESSED, UNADDRESSED, mark, attempt=failures)
        self._spawn(
            record, self._dead_without_targets(item, PutOff("dead", failures, None, kind(error), describe(error)))
        )

    async def _dead_without_targets(self, item: Item, outcome: PutOff) -> None:
        async def write(conn: Connection) -> None:
            now = self._clock.now()
            await self._deliveries.claim(conn, [item], now, timedelta(0), KEEP_BEYOND)
            await self._deliveries.put_off(conn, [(item, outcome)], now, locked=True)

        await self._transaction(write)
        await self._settle(item, outcome)

    async def _close_unaddressed(self, item: Item) -> None:
        async def write(conn: Connection) -> None:
            now = self._clock.now()
            [verdict] = await self._deliveries.claim(conn, [item], now, timedelta(0), KEEP_BEYOND)
            if self._external and isinstance(verdict, Run):
                await self._deliveries.finish(conn, [item])

        await self._transaction(write)
        self._finish(item.record)

    # Deliveries run

    async def _dispatch(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            while self._lanes.has_ready and not self._stopping:
                if self._external:
                    free = self.policy.concurrency - self._lanes.running
                    taken = self._lanes.take(min(free, _GROUP_COMMIT)) if free > 0 else []
                elif self._batches < _BATCHES:
                    taken = self._lanes.take(self.policy.batch, per_lane=_PER_LANE)
                else:
                    taken = []
                if not taken:
                    break
                self._begin(taken)

    def _begin(self, taken: list[tuple[Any, str, list[Item]]]) -> None:
        """Start a batch with what was taken; a delivery twice in it (a duplicate record) waits for the next one."""
        items: list[Item] = []
        lanes: list[tuple[Any, str]] = []
        seen: set[tuple[UUID, str]] = set()
        put_back: dict[tuple[Any, str], list[Item]] = defaultdict(list)
        for organization, key, lane_items in taken:
            lanes.append((organization, key))
            for item in lane_items:
                if not item.record.place.alive:
                    continue
                if put_back[organization, key] or item.identity in seen:
                    put_back[organization, key].append(item)
                else:
                    seen.add(item.identity)
                    items.append(item)
        for item in items:
            item.record.place.running += 1
        if self._external:
            self._spawn(None, self._claim_and_call(lanes, items, put_back))
        else:
            self._batches += 1
            self._spawn(None, self._batch(lanes, items, put_back))

    def _release(self, lane: tuple[Any, str], put_back: list[Item] | None = None) -> None:
        self._lanes.release(*lane, put_back)
        self._work.set()

    # Transactional deliveries

    async def _batch(
        self, lanes: list[tuple[Any, str]], items: list[Item], put_back: dict[tuple[Any, str], list[Item]]
    ) -> None:
        """One transaction: claim, effects, records of what failed. Then the lanes go on, and the rest is settled."""
        try:
            outcomes = await self._handle_all(items) if items else []
        finally:
            self._batches -= 1
            if not self._abandoned:
                for lane in lanes:
                    self._release(lane, put_back[lane])
        self._say_delivered([item for item, outcome in zip(items, outcomes, strict=True) if isinstance(outcome, Done)])
        await self._settle_all(list(zip(items, outcomes, strict=True)))

    async def _handle_all(self, items: list[Item]) -> list[Outcome]:
        """In one transaction; if something in it fails all of it, by halves, in their order, until that one stands
        alone."""
        try:
            return await self._handle_together(items)
        except _FAULTY as error:
            self._say_unfit(error, len(items))
            if len(items) == 1:
                return [await self._put_off_alone(items[0], error)]
        middle = len(items) // 2
        return [*await self._handle_all(items[:middle]), *await self._handle_all(items[middle:])]

    async def _put_off_alone(self, item: Item, error: BaseException) -> Outcome:
        """The delivery whose transaction failed as a whole: an attempt, if the delivery itself can be written."""
        outcome: Outcome | None = None

        async def work(conn: Connection) -> None:
            nonlocal outcome
            now = self._clock.now()
            [outcome] = await self._deliveries.claim(conn, [item], now, self.policy.delay, KEEP_BEYOND)
            if not isinstance(outcome, Run):
                return
            outcome = put_off = self._outcome(item, error)
            await self._deliveries.put_off(conn, [(item, put_off)], now, locked=True)
            if self._deliveries.ordered and put_off.state == "dead":
                await self._deliveries.release_keys(conn, [item.key], now)

        try:
            await self._transaction(work)
        except _UNFIT as unfit:
            return Unfit(unfit)
        assert outcome is not None
        return outcome

    async def _handle_together(self, items: list[Item]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        separate = False

        async def work(conn: Connection) -> None:
            outcomes.clear()
            outcomes.extend(await self._handle_in(conn, items, separate))

        while True:
            try:
                await self._transaction(work)
                faults.point("worker.after_commit")
                return outcomes
            except _Separate:
                separate = True

    async def _handle_in(self, conn: Connection, items: list[Item], separate: bool) -> list[Outcome]:
        now = self._clock.now()
        outcomes: list[Outcome] = [*await self._deliveries.claim(conn, items, now, self.policy.delay, KEEP_BEYOND)]
        faults.point("worker.after_claim")
        runs = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, Run)]
        if not runs:
            return outcomes
        for i in runs:
            self._say_taken_over(items[i], outcomes[i])
            outcomes[i] = Done()
        errors: dict[int, BaseException]
        if isinstance(self.worker, BatchWorker):
            errors = await self._handle_batch(conn, self.worker, items, runs, separate)
        else:
            assert isinstance(self.worker, TransactionalWorker)
            errors = await self._handle_each(conn, self.worker, items, runs, separate)
        for i, error in errors.items():
            outcomes[i] = (
                PutOff("blocked", 0, keep=True) if isinstance(error, _Behind) else self._outcome(items[i], error)
            )
        put_off = [(items[i], outcome) for i in errors if isinstance(outcome := outcomes[i], PutOff)]
        if put_off:
            await self._deliveries.put_off(conn, put_off, now, locked=True)
        if self._deliveries.ordered:
            over = [items[i].key for i in runs if not (isinstance(o := outcomes[i], PutOff) and o.state != "dead")]
            if over and await self._deliveries.release_keys(conn, over, now):
                self._keep_work.set()
        return outcomes

    async def _handle_each(
        self, conn: Connection, worker: TransactionalWorker, items: list[Item], runs: list[int], separate: bool
    ) -> dict[int, BaseException]:
        """Run the handlers. Together: the first error fails the transaction. Separate: each within a savepoint."""
        errors: dict[int, BaseException] = {}
        behind: set[str] = set()
        for organization_id, group in _by_organization(runs, lambda i: items[i].event):
            async with act_for(conn, organization_id):
                for i in group:
                    item = items[i]
                    if item.key in behind:
                        errors[i] = _Behind()
                        continue
                    if len(broke := self._breaks.get(item.identity) or []) >= _BREAKS:
                        # The connection broke each time this one ran: it is not the server, it is the delivery.
                        if not separate:
                            raise _Separate
                        errors[i] = broke[-1]
                        del self._breaks[item.identity]
                        continue
                    context = HandlerContext(conn, self._clock, self._deliveries, item.event, item.target)
                    try:
                        async with _savepoint(conn, separate), asyncio.timeout(self.policy.timeout_s):
                            faults.point("worker.in_handler")
                            await worker.handle(self._delivery(item), context)
                    except Exception as error:
                        if is_away(error, conn):
                            self._breaks[item.identity].append(error)
                            raise
                        if not separate:
                            raise _Separate from error
                        errors[i] = error
                        if self._deliveries.ordered and not isinstance(error, Reject):
                            behind.add(item.key)
        return errors

    async def _handle_batch(
        self, conn: Connection, worker: BatchWorker, items: list[Item], runs: list[int], separate: bool
    ) -> dict[int, BaseException]:
        """All at once; after a failure by halves, until the failing delivery stands alone."""
        errors: dict[int, BaseException] = {}
        context = HandlerContext(conn, self._clock, self._deliveries, None)

        async def attempt(part: list[int]) -> None:
            try:
                async with _savepoint(conn, separate), asyncio.timeout(self.policy.timeout_s):
                    faults.point("worker.in_handler")
                    await worker.handle_batch([self._delivery(items[i]) for i in part], context)
            except Exception as error:
                if is_away(error, conn):
                    raise
                if not separate:
                    raise _Separate from error
                if len(part) == 1:
                    errors[part[0]] = error
                    return
                middle = len(part) // 2
                await attempt(part[:middle])
                await attempt(part[middle:])

        await attempt(runs)
        return errors

    # External deliveries

    async def _claim_and_call(
        self, lanes: list[tuple[Any, str]], items: list[Item], put_back: dict[tuple[Any, str], list[Item]]
    ) -> None:
        """Claim many in one transaction, then call each; its lane goes on when its outcome is recorded."""
        assert isinstance(self.worker, ExternalWorker)
        started = False
        prepared: dict[int, Any] = {}
        outcomes: list[Outcome] = []
        try:
            if items:
                outcomes, prepared = await self._claim_all(items)
            started = True
        finally:
            if not self._abandoned:
                called = {id(items[i]) for i in prepared} if started else set()
                busy = {(item.event.organization_id, item.key) for item in items if id(item) in called}
                for lane in lanes:
                    if lane not in busy:
                        self._release(lane, put_back[lane])
        if items:
            faults.point("worker.after_claim")
        for i, value in prepared.items():
            item = items[i]
            self._spawn(None, self._call((item.event.organization_id, item.key), item, value))
        await self._settle_all([(items[i], outcome) for i, outcome in enumerate(outcomes) if i not in prepared])

    async def _claim_all(self, items: list[Item]) -> tuple[list[Outcome], dict[int, Any]]:
        """The outcomes, and by number what was prepared for those that are called now. By halves after a failure of
        all."""
        prepared: dict[int, Any] = {}
        outcomes: list[Outcome] = []
        separate = False

        async def work(conn: Connection) -> None:
            prepared.clear()
            outcomes[:] = await self._claim_in(conn, items, prepared, separate)

        try:
            while True:
                try:
                    await self._transaction(work)
                    return outcomes, prepared
                except _Separate:
                    separate = True
        except _FAULTY as error:
            self._say_unfit(error, len(items))
            if len(items) == 1:
                return [await self._put_off_alone(items[0], error)], {}
        middle = len(items) // 2
        outcomes, prepared = await self._claim_all(items[:middle])
        others, more = await self._claim_all(items[middle:])
        return [*outcomes, *others], prepared | {i + middle: value for i, value in more.items()}

    async def _claim_in(
        self, conn: Connection, items: list[Item], prepared: dict[int, Any], separate: bool
    ) -> list[Outcome]:
        assert isinstance(self.worker, ExternalWorker)
        now = self._clock.now()
        outcomes: list[Outcome] = [*await self._deliveries.claim(conn, items, now, self.policy.delay, KEEP_BEYOND)]
        failed: list[tuple[Item, PutOff]] = []
        runs = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, Run)]
        for i in runs:
            self._say_taken_over(items[i], outcomes[i])
        if type(self.worker).prepare is ExternalWorker.prepare:
            prepared.update(dict.fromkeys(runs))
            return outcomes
        for organization_id, group in _by_organization(runs, lambda i: items[i].event):
            async with act_for(conn, organization_id):
                for i in group:
                    item = items[i]
                    context = HandlerContext(conn, self._clock, self._deliveries, item.event, item.target)
                    try:
                        async with _savepoint(conn, separate), asyncio.timeout(self.policy.timeout_s):
                            prepared[i] = await self.worker.prepare(self._delivery(item), context)
                    except Exception as error:
                        if is_away(error, conn):
                            raise
                        if not separate:
                            raise _Separate from error
                        outcomes[i] = put_off = self._outcome(item, error)
                        failed.append((item, put_off))
        if failed:
            await self._deliveries.put_off(conn, failed, now, locked=True)
            if self._deliveries.ordered:
                await self._deliveries.release_keys(conn, [i.key for i, o in failed if o.state == "dead"], now)
        return outcomes

    async def _call(self, lane: tuple[Any, str], item: Item, prepared: Any) -> None:
        assert isinstance(self.worker, ExternalWorker)
        called = _Called(lane, item, prepared)
        try:
            faults.point("worker.in_handler")
            async with asyncio.timeout(self.policy.timeout_s):
                called.result = await self.worker.call(self._delivery(item), prepared)
        except asyncio.CancelledError as error:
            if self._abandoned:
                raise
            called.error = error  # the call's own doing: without an outcome its lane would stand still
        except Exception as error:
            called.error = error
        self._called.append(called)
        self._record_work.set()

    async def _record_loop(self) -> None:
        """Group commit: whatever came back while the last transaction was under way shares the next one."""
        while True:
            await self._record_work.wait()
            self._record_work.clear()
            while self._called:
                self._recording = True
                batch, self._called = self._called[:_GROUP_COMMIT], self._called[_GROUP_COMMIT:]
                await self._record_all(batch)
                self._recording = False

    async def _record_all(self, batch: list[_Called]) -> None:
        outcomes: list[Outcome] = []
        separate = False

        async def work(conn: Connection) -> None:
            outcomes[:] = await (self._record_separately if separate else self._record_together)(conn, batch)

        while True:
            try:
                await self._transaction(work)
                break
            except _Separate:
                separate = True
            except _FAULTY as error:
                self._say_unfit(error, len(batch))
                if len(batch) > 1:
                    for called in batch:
                        await self._record_all([called])
                    return
                if batch[0].untold:
                    raise
                batch[0].error, batch[0].untold = batch[0].error or error, True
        faults.point("worker.after_commit")
        delivered = []
        for called, outcome in zip(batch, outcomes, strict=True):
            self._release(called.lane)
            if isinstance(outcome, Done):
                delivered.append(called.item)
            self._spawn(None, self._settle_all([(called.item, outcome)]))
        self._say_delivered(delivered)

    async def _record_together(self, conn: Connection, batch: list[_Called]) -> list[Outcome]:
        """The good case, few statements for all: any error of a `record` or `failed` starts over, separately."""
        assert isinstance(self.worker, ExternalWorker)
        now = self._clock.now()
        outcomes: list[Outcome] = [
            Done(called.result) if called.error is None else self._outcome(called.item, called.error)
            for called in batch
        ]
        await self._lock_recorded(conn, batch)
        good = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, Done)]
        bad = [(i, outcome) for i, outcome in enumerate(outcomes) if isinstance(outcome, PutOff)]
        ours: set[int] = set()
        if good:
            ours |= {good[n] for n in await self._deliveries.finish(conn, [batch[i].item for i in good])}
        if bad:
            kept = await self._deliveries.put_off(conn, [(batch[i].item, o) for i, o in bad], now, locked=False)
            ours |= {bad[n][0] for n in kept}
        for i, called in enumerate(batch):
            if i not in ours:
                outcomes[i] = self._superseded(called.item)
        told = [i for i in ours if self._is_told(batch[i], outcomes[i])]
        try:
            for organization_id, group in _by_organization(told, lambda i: batch[i].item.event):
                async with act_for(conn, organization_id):
                    for i in group:
                        await self._tell(conn, batch[i], outcomes[i])
        except Exception as error:
            if is_away(error, conn):
                raise
            raise _Separate from error
        await self._release_recorded(conn, batch, outcomes, now)
        return outcomes

    async def _record_separately(self, conn: Connection, batch: list[_Called]) -> list[Outcome]:
        now = self._clock.now()
        await self._lock_recorded(conn, batch)
        outcomes = [await self._record_one(conn, called, now) for called in batch]
        await self._release_recorded(conn, batch, outcomes, now)
        return outcomes

    async def _record_one(self, conn: Connection, called: _Called, now: datetime) -> Outcome:
        item = called.item
        error = called.error
        if error is None:
            try:
                async with conn.transaction():
                    if not await self._deliveries.finish(conn, [item]):
                        return self._superseded(item)
                    done = Done(called.result)
                    if self._is_told(called, done):
                        async with act_for(conn, item.event.organization_id):
                            await self._tell(conn, called, done)
                return done
            except Exception as failure:
                if is_away(failure, conn):
                    raise
                # The call was made and cannot be recorded: an attempt; the call comes again with the same key.
                error = called.error = failure
        outcome = self._outcome(item, error)
        try:
            async with conn.transaction():
                if not await self._deliveries.put_off(conn, [(item, outcome)], now, locked=False):
                    return self._superseded(item)
                try:
                    if self._is_told(called, outcome):
                        async with act_for(conn, item.event.organization_id):
                            await self._tell(conn, called, outcome)
                except Reject as rejected:
                    # What `failed` wrote before it raised says why the delivery is dead: it stays.
                    outcome = self._outcome(item, rejected)
                    await self._deliveries.put_off(conn, [(item, outcome)], now, locked=True)
            return outcome
        except Exception as failure:
            if is_away(failure, conn):
                raise
            self._say("worker.failed_hook_failed", level="error", **self._fields(item), error=describe(failure))
        if not await self._deliveries.put_off(conn, [(item, outcome)], now, locked=False):
            return self._superseded(item)
        return outcome

    def _is_told(self, called: _Called, outcome: Outcome) -> bool:
        """The worker has a part of its own in the record's transaction. After a snooze not: no attempt was used."""
        kind = type(self.worker)
        assert issubclass(kind, ExternalWorker)
        if called.untold:
            return False
        if isinstance(outcome, Done):
            return kind.record is not ExternalWorker.record
        return kind.failed is not ExternalWorker.failed and not isinstance(called.error, Snooze)

    async def _tell(self, conn: Connection, called: _Called, outcome: Outcome) -> None:
        """The worker's own part of the record's transaction, as the event's organization."""
        worker, item = self.worker, called.item
        assert isinstance(worker, ExternalWorker)
        due = outcome.due if isinstance(outcome, PutOff) else None
        context = HandlerContext(conn, self._clock, self._deliveries, item.event, item.target, next_attempt_at=due)
        async with asyncio.timeout(self.policy.timeout_s):
            if isinstance(outcome, Done):
                await worker.record(self._delivery(item), called.result, context)
            else:
                assert called.error is not None
                await worker.failed(self._delivery(item), called.prepared, called.error, context)

    async def _lock_recorded(self, conn: Connection, batch: list[_Called]) -> None:
        if self._deliveries.ordered:
            await self._deliveries.lock_keys(conn, [called.item.key for called in batch])

    async def _release_recorded(
        self, conn: Connection, batch: list[_Called], outcomes: Sequence[Outcome], now: datetime
    ) -> None:
        if self._deliveries.ordered:
            over = [
                called.item.key
                for called, outcome in zip(batch, outcomes, strict=True)
                if isinstance(outcome, Done) or (isinstance(outcome, PutOff) and outcome.state == "dead")
            ]
            if over and await self._deliveries.release_keys(conn, over, now):
                self._keep_work.set()

    def _superseded(self, item: Item) -> Duplicate:
        """Another process took the delivery over: it is that one's to finish, nothing of this run is kept."""
        self._say("worker.superseded", level="warning", **self._fields(item))
        return Duplicate()

    # Outcomes

    def _outcome(self, item: Item, error: BaseException) -> PutOff:
        """What a failed run means: the one place that decides whether to try again, and when."""
        try:
            return self._judge(item, error)
        except (OverflowError, ValueError, TypeError) as impossible:  # it asked to come back at no moment there is
            return self._judge(item, impossible)

    def _judge(self, item: Item, error: BaseException) -> PutOff:
        now, used = self._clock.now(), item.attempt
        if isinstance(error, Snooze):
            until = error.until
            if not isinstance(until, datetime):
                until = now + (until if isinstance(until, timedelta) else timedelta(seconds=until))
            return self._waiting(used - 1, until, now, None, None)
        if isinstance(error, (Reject, schemas.SchemaError, *self.policy.reject_on)):
            return PutOff("dead", used, None, kind(error), describe(error))
        if retry.is_spent(self.policy, used):
            return PutOff("dead", used, None, kind(error), describe(error))
        if isinstance(error, RetryAfter):
            wait_s = min(max(0.0, error.seconds), _LONGEST_WAIT_S)
            return self._waiting(used, now + timedelta(seconds=wait_s), now, kind(error), describe(error))
        wait_s = retry.backoff_s(self.policy, used, self._random, self._options.backoff_scale)
        # The longest tier with its jitter goes beyond two hours, and still fits its topic.
        due = records.whole_ms(now + timedelta(seconds=wait_s))
        return PutOff("waiting", used, due, kind(error), describe(error))

    def _waiting(
        self, attempts: int, due: datetime, now: datetime, error_class: str | None, error: str | None
    ) -> PutOff:
        due = records.whole_ms(max(due, now))
        return PutOff("waiting", attempts, due, error_class, error, keep=due - now > KEEP_BEYOND)

    async def _settle_all(self, outcomes: list[tuple[Item, Outcome]]) -> None:
        """After the commit: what must be produced is produced, then the records are finished."""
        waiting = []
        for item, outcome in outcomes:
            if isinstance(outcome, (Done, Duplicate, Blocked)) or (isinstance(outcome, PutOff) and outcome.keep):
                self._settled(item)
                if isinstance(outcome, PutOff) and outcome.state == "waiting":
                    self._say_retried(item, outcome)
            else:
                waiting.append(self._settle(item, outcome))
        if waiting:
            results = await asyncio.gather(*waiting, return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result

    async def _settle(self, item: Item, outcome: Outcome) -> None:
        match outcome:
            case Early(due):
                item.record.place.running -= 1
                self._check_revoking()
                self._wait_until(records.to_ms(due), item.record, item.mark, item)
            case Held():
                item.record.place.running -= 1
                self._check_revoking()
                due = self._clock.now() + timedelta(seconds=self._options.held_recheck_s)
                self._wait_until(records.to_ms(due), item.record, item.mark, item)
            case Unfit(error):
                await self._undecodable(item.record, kind(error), describe(error))
                item.record.place.running -= 1
                self._check_revoking()
            case PutOff(state="waiting"):
                self._say_retried(item, outcome)
                assert outcome.due is not None
                await self._produce_retry(
                    item,
                    ProduceAgain(
                        outcome.attempts + 1,
                        item.generation,
                        outcome.due,
                        item.first_failure_at,
                        outcome.error_class,
                        outcome.error,
                    ),
                )
                self._settled(item)
            case ProduceAgain():
                await self._produce_retry(item, outcome)
                self._settled(item)
            case PutOff(state="dead"):
                self._say_dead(item, outcome)
                dead = BuryAgain(
                    outcome.attempts, item.generation, item.first_failure_at, outcome.error_class, outcome.error
                )
                await self._bury(item, dead)
                self._settled(item)
            case BuryAgain():
                await self._bury(item, outcome)
                self._settled(item)
            case _:
                self._settled(item)

    async def _produce_retry(self, item: Item, wait: ProduceAgain) -> None:
        """The retry record: key and value untouched, headers set. Not finished before the broker has it."""
        now = self._clock.now()
        wait_s = (wait.due - now).total_seconds()
        failed_attempts = wait.attempt - 1
        delay: int | Literal["now"] | None
        if wait.error is not None and failed_attempts >= 1 and self._options.backoff_scale != 1.0:
            delay = retry.tier_s(self.policy, failed_attempts)  # scaled down it still goes to its tier's topic
        else:
            delay = self._tier(wait_s, failed_attempts)
        headers = records.marked_headers(
            item.record.headers,
            worker=self.name,
            origin=records.origin_of(item.record),
            event_id=item.event.id,
            target=item.target,
            generation=wait.generation,
            attempt=wait.attempt,
            due=wait.due,
            first_failure=wait.first_failure_at,
            error_class=wait.error_class,
            error=wait.error,
        )
        try:
            await self._outgoing.retry(self._topics.retry(self.name, delay), item.record, headers)
        except RecordRefused as refused:
            await self._dead_for_its_size(item, PutOff("dead", failed_attempts, None, kind(refused), str(refused)))
        faults.point("worker.after_retry_produced")

    async def _dead_for_its_size(self, item: Item, outcome: PutOff) -> None:
        """No retry topic takes its record: it cannot come back, and would hold its partition's offset for ever."""

        async def write(conn: Connection) -> None:
            now = self._clock.now()
            if self._deliveries.ordered:
                await self._deliveries.lock_keys(conn, [item.key])
            await self._deliveries.put_off(conn, [(item, outcome)], now, locked=True)
            if self._deliveries.ordered and await self._deliveries.release_keys(conn, [item.key], now):
                self._keep_work.set()

        await self._transaction(write)
        self._say_dead(item, outcome)
        attempts = outcome.attempts
        await self._bury(
            item, BuryAgain(attempts, item.generation, item.first_failure_at, outcome.error_class, outcome.error)
        )

    def _tier(self, wait_s: float, failed_attempts: int) -> int | Literal["now"]:
        """The tier that this wait was drawn from, if it was; else the shortest topic that is long enough."""
        if failed_attempts >= 1:
            tier = retry.tier_s(self.policy, failed_attempts)
            if tier * 0.5 < wait_s <= tier * (1 + self.policy.jitter) and tier in schemas.topics.RETRY_DELAYS_S:
                return tier
        return retry.topic_delay(wait_s) or schemas.topics.RETRY_DELAYS_S[-1]

    async def _bury(self, item: Item, dead: BuryAgain) -> None:
        """The dead-letter record, and where it is."""
        headers = records.marked_headers(
            item.record.headers,
            worker=self.name,
            origin=records.origin_of(item.record),
            event_id=item.event.id,
            target=item.target,
            generation=dead.generation,
            attempt=dead.attempt,
            first_failure=dead.first_failure_at,
            error_class=dead.error_class,
            error=dead.error,
        )
        topic = self._topics.dead_letter(self.name)
        partition, offset = await self._outgoing.dead_letter(topic, item.record, headers)
        await self._transaction(lambda conn: self._deliveries.buried(conn, item, partition, offset))

    async def _undecodable(self, record: Record, error_class: str, message: str) -> None:
        """Dead letter with its bytes, once; the partition goes on."""
        timestamp = records.moment(record.timestamp_ms)
        known = False

        async def look(conn: Connection) -> None:
            nonlocal known
            known = await self._deliveries.undecodable_known(conn, record, timestamp)

        await self._transaction(look)
        if not known:
            headers = records.marked_headers(
                record.headers,
                worker=self.name,
                origin=records.origin_of(record),
                error_class=error_class,
                error=message,
            )
            dead = await self._outgoing.dead_letter(self._topics.dead_letter(self.name), record, headers)
            await self._transaction(
                lambda conn: self._deliveries.undecodable(conn, record, timestamp, error_class, message, dead)
            )
            self._say(
                "worker.dead",
                level="warning",
                event_id=None,
                topic=record.topic,
                partition=record.partition,
                offset=record.offset,
                error=f"{error_class}: {records.cut(message)}",
            )
        self._finish(record)

    def _settled(self, item: Item) -> None:
        item.record.place.running -= 1
        self._finish(item.record)

    def _finish(self, record: Record) -> None:
        """One delivery of the record is over; with the last one its offset is."""
        record.pending -= 1
        if record.pending == 0:
            self._poller.finish(record)
        self._check_revoking()

    # What is kept in Postgres comes back; claims of the dead are taken over

    async def _keep_loop(self) -> None:
        while True:
            try:
                async with asyncio.timeout(_KEEPER_S):
                    await self._keep_work.wait()
            except TimeoutError:
                pass
            self._keep_work.clear()
            while not self._stopping and await self._produce_due():
                pass

    async def _produce_due(self) -> int:
        """Due deliveries whose bytes are kept go to retry.now; they stay locked until the broker has them."""
        produced = 0

        async def work(conn: Connection) -> None:
            nonlocal produced
            rows = await self._deliveries.due_kept(conn, self._clock.now(), 200)
            produced = len(rows)
            if not rows:
                return
            letters = await asyncio.gather(*(self._produce_kept(row) for row in rows))
            places = [(row[0], row[1], row[2]) for row in rows]
            produced_at = [place for place, letter in zip(places, letters, strict=True) if letter is None]
            await self._deliveries.no_longer_kept(conn, produced_at)
            for place, letter in zip(places, letters, strict=True):
                if letter is not None:
                    await self._deliveries.bury_kept(conn, place, *letter, self._clock.now())

        await self._transaction(work)
        return produced

    async def _produce_kept(self, row: tuple[Any, ...]) -> tuple[str, str, tuple[int, int]] | None:
        """Back to retry.now. What that topic refuses becomes a dead letter: (error class, error, where it is)."""
        (_, event_id, target, _, attempts, generation, due, key, value, kept_headers, first_failure_at, *rest) = row
        error_class, error, origin_topic, origin_partition, origin_offset = rest
        topic = self._topics.retry(self.name, "now")
        record = Record(
            "event_log", 0, 0, 0, bytes(key), bytes(value), records.headers_from_json(kept_headers), ours=True
        )
        origin = records.origin_of(record)
        if origin_topic is not None:
            origin = records.Origin(origin_topic, origin_partition, origin_offset, origin.timestamp_ms)
        marked = partial(
            records.marked_headers,
            record.headers,
            worker=self.name,
            origin=origin,
            event_id=event_id,
            target=target,
            generation=generation,
            first_failure=first_failure_at,
        )
        try:
            headers = marked(attempt=attempts + 1, due=due, error_class=error_class, error=error)
            await self._outgoing.retry(topic, record, headers)
            return None
        except RecordRefused as refused:
            headers = marked(attempt=max(attempts, 1), error_class=kind(refused), error=str(refused))
            dead = await self._outgoing.dead_letter(self._topics.dead_letter(self.name), record, headers)
            return kind(refused), str(refused), dead

    async def _renew_loop(self) -> None:
        """Say that this process lives; take over what those that do not have left."""
        while True:
            await asyncio.sleep(self._options.renew_s)
            await self._transaction(lambda conn: self._deliveries.renew(conn, socket.gethostname(), os.getpid()))
            if self._external:
                await self._transaction(self._reap)

    async def _reap(self, conn: Connection) -> None:
        for row in await self._deliveries.orphaned(conn, 100):
            (
                created_at,
                event_id,
                target,
                claimed_by,
                seq,
                organization_id,
                event_type,
                entity_kind,
                entity_id,
                payload,
                metadata,
            ) = row
            if seq is None:
                continue  # not from event_log: its record comes again to whoever has its partition
            event_row = schemas.Row(
                seq,
                event_id,
                organization_id,
                event_type,
                entity_kind,
                entity_id,
                payload.encode(),
                metadata.encode(),
                created_at,
            )
            try:
                value = schemas.encode(event_row)
            except schemas.SchemaError as error:
                self._say("worker.claim_stuck", level="error", event_id=str(event_id), target=target, error=str(error))
                continue
            await self._deliveries.take_over(
                conn,
                (created_at, event_id, target),
                str(organization_id).encode(),
                value,
                [(name, value) for name, value in schemas.headers(event_row)],
                self._clock.now(),
            )
            self._say(
                "worker.claim_taken_over",
                level="warning",
                event_id=str(event_id),
                target=target,
                process=str(claimed_by),
            )
            self._keep_work.set()

    # Partitions taken away

    def _revoked(self, places: list[Place], drained: threading.Event) -> None:
        if self._abandoned:
            drained.set()
            return
        taken = set(map(id, places))
        self._drop(lambda record: id(record.place) in taken)
        self._revoking.append((places, drained))
        self._check_revoking()

    def _drop(self, condition: Callable[[Record], bool]) -> None:
        """Forget what has not begun; it comes again to whoever has its partition."""
        self._lanes.discard(lambda item: condition(item.record))
        self._due.discard(lambda entry: condition(entry[0]))
        self._fan_out = [entry for entry in self._fan_out if not condition(entry[0])]

    def _check_revoking(self) -> None:
        for entry in list(self._revoking):
            if all(place.running == 0 for place in entry[0]):
                entry[1].set()
                self._revoking.remove(entry)

    # Plumbing

    def _spawn(self, record: Record | None, body: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(body)
        self._tasks.add(task)
        if record is not None:
            record.place.running += 1
        task.add_done_callback(lambda task: self._task_ended(task, record))

    def _task_ended(self, task: asyncio.Task[None], record: Record | None) -> None:
        self._tasks.discard(task)
        if record is not None:
            record.place.running -= 1
            self._check_revoking()
        if not task.cancelled() and (error := task.exception()) is not None and not self._abandoned:
            self._fail(error)

    async def _transaction(self, work: Callable[[Connection], Awaitable[None]]) -> None:
        """Run `work` in a transaction, again for as long as Postgres is away, or ends it for another's sake. Other
        errors are the caller's."""
        for pause_s in pauses_s():
            conn: Connection | None = None
            try:
                async with self._pool.connection() as conn, conn.transaction():
                    await work(conn)
                return
            except (psycopg.Error, PoolTimeout, PoolClosed) as error:
                if not is_away(error, conn):
                    raise
                gave_way = (getattr(error, "sqlstate", None) or "").startswith("40")
                name = "worker.transaction_repeated" if gave_way else "worker.postgres_away"
                self._say(name, level="warning", error=describe(error))
                await asyncio.sleep(pause_s)

    def _delivery(self, item: Item) -> Delivery:
        return Delivery(self.name, item.event, item.target, item.attempt, item.generation)

    # Words

    def _fields(self, item: Item) -> dict[str, Any]:
        return {
            "event_id": str(item.event.id),
            "event_type": item.event.event_type,
            "organization_id": str(item.event.organization_id),
            "target": item.target,
            "attempt": item.attempt,
        }

    def _say(self, name: str, *, level: str = "info", **fields: Any) -> None:
        getattr(_log, level)(name, worker=self.name, **fields)
        self._observer(name, worker=self.name, **fields)

    def _say_unfit(self, error: BaseException, deliveries: int) -> None:
        self._say("worker.unfit", level="warning", deliveries=deliveries, error=f"{kind(error)}: {describe(error)}")

    def _say_delivered(self, items: list[Item]) -> None:
        for item in items:
            self._say("worker.delivered", **self._fields(item))

    def _say_retried(self, item: Item, outcome: PutOff) -> None:
        due = outcome.due.isoformat() if outcome.due else None
        snoozed = outcome.attempts < item.attempt
        self._say(
            "worker.snoozed" if snoozed else "worker.retried",
            **self._fields(item),
            next_attempt_at=due,
            error=outcome.error,
        )

    def _say_dead(self, item: Item, outcome: PutOff) -> None:
        self._say("worker.dead", level="warning", **self._fields(item), error=outcome.error, next_attempt_at=None)

    def _say_taken_over(self, item: Item, outcome: Outcome) -> None:
        if isinstance(outcome, Run) and outcome.taken_over_from is not None:
            process = str(outcome.taken_over_from)
            self._say("worker.claim_taken_over", level="warning", **self._fields(item), process=process)


class _Behind(Exception):
    """An earlier delivery of the same key failed in this batch."""


def check(worker: Worker) -> None:
    """BadWorker for a class that cannot run."""
    name = getattr(worker, "name", None)
    if not isinstance(name, str) or not name.endswith("-worker"):
        raise BadWorker(f"{type(worker).__name__}.name must be kebab-case and end in -worker, not {name!r}")
    if not isinstance(worker, (TransactionalWorker, BatchWorker, ExternalWorker)):
        raise BadWorker(f"{name}: derive from TransactionalWorker, BatchWorker or ExternalWorker")
    for base, method in ((TransactionalWorker, "handle"), (BatchWorker, "handle_batch"), (ExternalWorker, "call")):
        if isinstance(worker, base) and getattr(type(worker), method) is getattr(base, method):
            raise BadWorker(f"{name} has no {method}: every delivery would fail")
    if not worker.event_types:
        raise BadWorker(f"{name} takes no event types")
    if isinstance(worker, BatchWorker) and worker.policy.ordering == "key":
        raise BadWorker(f"{name}: a batch handler cannot have ordering by key; use TransactionalWorker")
    if wrong := set(worker.policy.backoff_s) - set(schemas.topics.RETRY_DELAYS_S):
        raise BadWorker(f"{name}: no retry topic for {sorted(wrong)} s; there are {schemas.topics.RETRY_DELAYS_S}")


def decode(record: Record) -> Event:
    """The event in the record, its payload checked against its type. UndecodableRecord with the reason."""
    if not record.value:
        raise UndecodableRecord("EmptyRecord", "the record has no value")
    try:
        event = schemas.decode(record.value)
        if not _EVENT_TYPE.fullmatch(event.event_type):
            raise UndecodableRecord(
                "BadEnvelope", f"event_type {event.event_type[:100]!r} is not {{entity}}.{{action}}"
            )
        return event
    except UndecodableRecord:
        raise
    except schemas.DecodeError as error:
        raise UndecodableRecord(kind(error), str(error)) from error
    except Exception as error:  # bytes of anyone's making: whatever they provoke, they are no event
        raise UndecodableRecord(kind(error), str(error)) from error


def is_away(error: BaseException, conn: Connection | None) -> bool:
    """Postgres is not there, went away, or ended the transaction for another's sake (class 40: a deadlock): nobody's
    fault here, and nothing was committed."""
    if isinstance(error, (PoolTimeout, PoolClosed)):
        return True
    if isinstance(error, psycopg.OperationalError):
        state = error.sqlstate or ""
        return conn is None or conn.closed or not state or state.startswith(("08", "57P", "53", "40"))
    return isinstance(error, psycopg.InterfaceError) and (conn is None or conn.closed)


def kind(error: BaseException) -> str:
    return type(error).__name__


def describe(error: BaseException) -> str:
    """What people read as the reason, bounded."""
    if isinstance(error, TimeoutError) and not str(error):
        return "the handler ran longer than its timeout"
    return records.cut(str(error) or kind(error))


def _addressed(known: Sequence[str], entry: tuple[Record, Event, RetryMark | None]) -> list[str]:
    """The targets fixed before; for a record that is reprocessed, or replayed with --again, without that of none."""
    record, _, mark = entry
    return [target for target in known if (mark is None and not record.again) or target != UNADDRESSED]


def _by_organization(numbers: list[int], event: Callable[[int], Event]) -> list[tuple[UUID, list[int]]]:
    """The numbers by organization, so that roles change once for each; within one in their order, as keys need it."""
    groups: dict[UUID, list[int]] = {}
    for number in numbers:
        groups.setdefault(event(number).organization_id, []).append(number)
    return list(groups.items())


@asynccontextmanager
async def _savepoint(conn: Connection, wanted: bool) -> AsyncIterator[None]:
    if wanted:
        async with conn.transaction():
            yield
    else:
        yield


def _quietly(call: Callable[..., Any], *arguments: Any) -> None:
    """The loop may be closed already when the poll thread comes with its last word."""
    try:
        call(*arguments)
    except RuntimeError:
        for argument in arguments:
            if isinstance(argument, threading.Event):
                argument.set()
