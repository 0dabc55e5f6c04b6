"""What the parts of a worker's service share: its transactions, its tasks, what is in hand, and its words.

What must stay true:
- Postgres away is nobody's attempt: the same transaction is done again until it works or the process is stopped.
- A record's offset is finished when all its deliveries are.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from uuid import UUID, uuid4

import psycopg
from psycopg_pool import AsyncConnectionPool, PoolClosed, PoolTimeout

from afluente.clock import Clock
from afluente.telemetry import get_logger
from consumers.runtime import records, retry
from consumers.runtime.control import Pause
from consumers.runtime.deliveries import Connection, Deliveries, Item, PutOff, Run
from consumers.runtime.figures import Figures
from consumers.runtime.judging import KEEP_BEYOND, Judge, Outcome, Unfit, describe, kind
from consumers.runtime.lanes import Lanes
from consumers.runtime.outgoing import Outgoing, pauses_s
from consumers.runtime.places import Limits, Place
from consumers.runtime.records import Record, RetryMark
from consumers.worker import Delivery, ExternalWorker, Policy, Worker
from schemas import Event
from schemas.topics import Topics

if TYPE_CHECKING:
    from consumers.runtime.poll import Poller

_log = get_logger("consumers.runtime.service")

Observer: TypeAlias = Callable[..., None]
"""Called with an event name and fields at the places tests wait for; does nothing in production."""

FAULTY = (
    psycopg.DataError,
    psycopg.IntegrityError,
    psycopg.errors.ProgramLimitExceeded,
    UnicodeError,
)
"""Raised out of a batch's transaction by what is in one of its deliveries: a value that a column does not hold, or a
constraint that is checked at the commit only."""
UNFIT = (psycopg.DataError, psycopg.errors.ProgramLimitExceeded, UnicodeError)
"""Those of them that come of the record alone, whatever the handler does."""


LIMITED = ("RateLimited", "CircuitOpen")
"""The error class of what was put off without a failure of its own: for its rate, for its destination's breaker."""


class Separate(Exception):
    """A batch failed: do it again, each delivery by itself."""


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
    group_instance_id: str | None = None
    """Static membership."""
    stalled_s: float = 60.0
    """What is behind and has not moved for so long is said to have stalled."""
    watch_every_s: float = 10.0
    """How often Kafka and Postgres are asked how far it is behind."""
    log_records: bool = False
    """A log line for each delivery that is done, instead of one for many."""


class Core:
    """One worker's, in one process. `start` in its event loop before anything else."""

    loop: asyncio.AbstractEventLoop
    failure: asyncio.Future[None]
    """Its exception ends the worker."""
    poller: Poller
    outgoing: Outgoing

    def __init__(
        self,
        worker: Worker,
        *,
        topics: Topics,
        pool: AsyncConnectionPool[Any],
        clock: Clock,
        random: Callable[[], float],
        options: Options,
        observer: Observer | None,
    ) -> None:
        self.worker = worker
        self.name = worker.name
        self.policy: Policy = worker.policy
        self.process: UUID = uuid4()
        self.ready = False
        """It has been given its partitions, or is a member that there are none left for."""
        self.topics = topics
        self.clock = clock
        self.random = random
        self.options = options
        self.external = isinstance(worker, ExternalWorker)
        self.deliveries = Deliveries(
            self.name,
            self.process,
            transactional=not self.external,
            ordered=self.policy.ordering == "key",
            takeover_s=options.takeover_s,
        )
        self.judge = Judge(self.policy, clock, random, options.backoff_scale)
        self.lanes: Lanes[Item] = Lanes(organization_limit=self.policy.organization_concurrency)
        self.due: retry.DueHeap[tuple[Record, RetryMark | None, Item | None]] = retry.DueHeap()
        self.tasks: set[asyncio.Task[Any]] = set()
        self.revoking: list[tuple[list[Place], threading.Event]] = []
        self.figures = Figures()
        self.paused: Pause | None = None
        """Nothing is begun, what is in hand waits."""
        self.postgres_away = False
        self.stopping = False
        """Nothing more is begun."""
        self.abandoned = False
        """What runs is cancelled and handed back."""
        self.work, self.due_work, self.keep_work = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._pool = pool
        self._observer = observer or (lambda name, **fields: None)
        self._is_observed = observer is not None
        self._usual_key = type(worker).key is Worker.key

    def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.failure = self.loop.create_future()
        # At full speed a line for each delivery, or only the words for it, would be most of the work.
        self.says_each = self.options.log_records or _log.is_enabled_for(logging.DEBUG)

    @property
    def may_begin(self) -> bool:
        return self.paused is None and not self.stopping

    def call_soon(self, call: Callable[[], object]) -> None:
        """From any thread. The loop may be closed when one comes with its last word."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(call)

    def say_soon(self, name: str, **fields: Any) -> None:
        """`say` for other threads."""
        self.call_soon(lambda: self.say(name, **fields))

    def connection(self) -> AbstractAsyncContextManager[Connection]:
        return self._pool.connection()

    def fail(self, error: BaseException) -> None:
        if not self.failure.done():
            self.failure.set_exception(error)

    def key(self, event: Event, target: str) -> str:
        if self._usual_key:
            return event.entity_text or event.id_text
        try:
            return records.cut(str(self.worker.key(event, target)), 500)
        except Exception:
            return str(event.id)  # the handler meets the same event, and its error is what gets recorded

    def queue(self, item: Item) -> None:
        if not self.lanes.has_ready:
            self.work.set()
        self.lanes.add(item.event.organization_text, item.key, item)

    def wait_until(self, due_ms: int, record: Record, mark: RetryMark | None, item: Item | None) -> None:
        earliest = self.due.next_due_ms
        self.due.push(due_ms, (record, mark, item))
        if earliest is None or due_ms < earliest:
            self.due_work.set()

    def release(self, lane: tuple[Any, str], put_back: list[Item] | None = None) -> None:
        self.lanes.release(*lane, put_back)
        self.work.set()

    def release_all(self, lanes: list[tuple[Any, str]], put_back: dict[tuple[Any, str], list[Item]]) -> None:
        release = self.lanes.release
        for lane in lanes:
            release(*lane, put_back.get(lane) if put_back else None)
        self.work.set()

    async def put_off_alone(self, item: Item, error: BaseException) -> Outcome:
        """The delivery whose transaction failed as a whole: an attempt, if the delivery itself can be written."""
        outcome: Outcome | None = None

        async def work(conn: Connection) -> None:
            nonlocal outcome
            now = self.clock.now()
            [outcome] = await self.deliveries.claim(conn, [item], now, self.policy.delay, KEEP_BEYOND)
            if not isinstance(outcome, Run):
                return
            outcome = put_off = self.judge.outcome(item, error)
            await self.deliveries.put_off(conn, [(item, put_off)], now, locked=True)
            if self.deliveries.ordered and put_off.is_over:
                await self.deliveries.release_keys(conn, [item.key], now)

        try:
            await self.transaction(work)
        except UNFIT as unfit:
            return Unfit(unfit)
        assert outcome is not None
        return outcome

    def settled(self, item: Item) -> None:
        item.record.place.running -= 1
        self.finish(item.record)

    def settled_all(self, items: Iterable[Item]) -> None:
        for item in items:
            record = item.record
            record.place.running -= 1
            record.pending -= 1
            if record.pending == 0:
                self.poller.finish(record)
        self.check_revoking()

    def finish(self, record: Record) -> None:
        """One delivery of the record is over; with the last one its offset is."""
        record.pending -= 1
        if record.pending == 0:
            self.poller.finish(record)
        self.check_revoking()

    def check_revoking(self) -> None:
        for entry in list(self.revoking):
            if all(place.running == 0 for place in entry[0]):
                entry[1].set()
                self.revoking.remove(entry)

    def spawn(self, record: Record | None, body: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(body)
        self.tasks.add(task)
        if record is not None:
            record.place.running += 1
        task.add_done_callback(lambda task: self._task_ended(task, record))

    def _task_ended(self, task: asyncio.Task[None], record: Record | None) -> None:
        self.tasks.discard(task)
        if record is not None:
            record.place.running -= 1
            self.check_revoking()
        if not task.cancelled() and (error := task.exception()) is not None and not self.abandoned:
            self.fail(error)

    async def transaction(self, work: Callable[[Connection], Awaitable[None]]) -> None:
        """Run `work` in a transaction, again for as long as Postgres is away, or ends it for another's sake. Other
        errors are the caller's."""
        for pause_s in pauses_s():
            conn: Connection | None = None
            try:
                async with self._pool.connection() as conn, conn.transaction():
                    await work(conn)
                self.postgres_away = False
                return
            except (psycopg.Error, PoolTimeout, PoolClosed) as error:
                if not is_away(error, conn):
                    raise
                gave_way = (getattr(error, "sqlstate", None) or "").startswith("40")
                self.postgres_away = not gave_way
                name = "worker.transaction_repeated" if gave_way else "worker.postgres_away"
                self.say(name, level="warning", error=describe(error))
                await asyncio.sleep(pause_s)

    def delivery(self, item: Item) -> Delivery:
        return Delivery(self.name, item.event, item.target, item.attempt, item.generation)

    def fields(self, item: Item) -> dict[str, Any]:
        return {
            "event_id": str(item.event.id),
            "event_type": item.event.event_type,
            "organization_id": str(item.event.organization_id),
            "target": item.target,
            "attempt": item.attempt,
        }

    def say(self, name: str, *, level: str = "info", **fields: Any) -> None:
        getattr(_log, level)(name, worker=self.name, **fields)
        self._observer(name, worker=self.name, **fields)

    def say_unfit(self, error: BaseException, deliveries: int) -> None:
        self.say("worker.unfit", level="warning", deliveries=deliveries, error=f"{kind(error)}: {describe(error)}")

    def report(self, name: str, **fields: Any) -> None:
        """A line about many at once: for the log only."""
        _log.info(name, worker=self.name, **fields)

    def say_delivered(self, items: list[Item]) -> None:
        if not items:
            return
        self.figures.add_done(item.event.event_type for item in items)
        if self.says_each or self._is_observed:
            level = "info" if self.options.log_records else "debug"
            for item in items:
                self.say("worker.delivered", level=level, **self.fields(item))

    def say_retried(self, item: Item, outcome: PutOff) -> None:
        due = outcome.due.isoformat() if outcome.due else None
        snoozed = outcome.attempts < item.attempt
        limited = outcome.error_class in LIMITED
        if limited:
            self.figures.put_off += 1
        elif snoozed:
            self.figures.snoozed += 1
        else:
            self.figures.retried += 1
        self.say(
            "worker.put_off" if limited else "worker.snoozed" if snoozed else "worker.retried",
            level="debug" if limited else "info",
            **self.fields(item),
            next_attempt_at=due,
            error=outcome.error_class if limited else outcome.error,
        )

    def say_dead(self, item: Item, outcome: PutOff) -> None:
        self.figures.dead += 1
        name = "worker.dead" if outcome.state == "dead" else "worker.needs_review"
        self.say(name, level="warning", **self.fields(item), error=outcome.error, next_attempt_at=None)

    def say_taken_over(self, item: Item, outcome: Outcome) -> None:
        if isinstance(outcome, Run) and outcome.taken_over_from is not None:
            process = str(outcome.taken_over_from)
            self.say("worker.claim_taken_over", level="warning", **self.fields(item), process=process)


def is_away(error: BaseException, conn: Connection | None) -> bool:
    """Postgres is not there, went away, or ended the transaction for another's sake (class 40: a deadlock; or this
    process stood still in it): nobody's fault here, and nothing was committed."""
    if isinstance(error, (PoolTimeout, PoolClosed, psycopg.errors.IdleInTransactionSessionTimeout)):
        return True
    if isinstance(error, psycopg.errors.PipelineAborted):
        return False  # a statement before it failed, and says why
    if isinstance(error, psycopg.OperationalError):
        state = error.sqlstate or ""
        return conn is None or conn.closed or not state or state.startswith(("08", "57P", "53", "40"))
    return isinstance(error, psycopg.InterfaceError) and (conn is None or conn.closed)


def by_organization(numbers: list[int], event: Callable[[int], Event]) -> list[tuple[UUID, list[int]]]:
    """The numbers by organization, so that roles change once for each; within one in their order, as keys need it."""
    groups: dict[str, list[int]] = {}
    for number in numbers:
        groups.setdefault(event(number).organization_text, []).append(number)
    return [(event(group[0]).organization_id, group) for group in groups.values()]


@asynccontextmanager
async def savepoint(conn: Connection, wanted: bool) -> AsyncIterator[None]:
    if wanted:
        async with conn.transaction():
            yield
    else:
        yield
