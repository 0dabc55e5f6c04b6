"""A worker at work: records in, deliveries decided and run, outcomes recorded, offsets finished.

The path of a record: the poll thread hands it over (`poll`) -> decoded, its targets fixed (`intake`, `targets`) -> its
lane (`lanes`), or the heap of what is not due (`retry`) -> claimed, handled and recorded in one transaction
(`transactional`) or around a call (`external`), by the statements of `deliveries` -> its retry or dead-letter record
produced (`settling`) -> its offset finished (`poll`). Here: its life, from joining the group to leaving it.

What must stay true:
- Postgres or Kafka away is nobody's attempt: the same is done again until it works or the process is stopped.
- A stop or a revoke uses no attempt: what has not begun is dropped, what runs is finished or handed back.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import psycopg
from psycopg_pool import AsyncConnectionPool, PoolClosed, PoolTimeout

import schemas
from afluente import faults, kafka
from afluente.clock import Clock
from afluente.settings import KafkaSettings
from afluente.telemetry.metrics import Sample
from consumers import workers
from consumers.errors import BadWorker
from consumers.runtime.core import Core, Observer, Options
from consumers.runtime.deliveries import Item
from consumers.runtime.external import External
from consumers.runtime.health import Signs
from consumers.runtime.intake import Intake
from consumers.runtime.judging import kind
from consumers.runtime.keeping import Keeping
from consumers.runtime.lanes import Taken
from consumers.runtime.marks import Marks
from consumers.runtime.outgoing import Outgoing
from consumers.runtime.periodic import Periodic
from consumers.runtime.places import Place
from consumers.runtime.poll import Poller
from consumers.runtime.records import Record
from consumers.runtime.sender import Sender
from consumers.runtime.settling import Settling
from consumers.runtime.targets import Targets
from consumers.runtime.transactional import Transactional
from consumers.runtime.watching import Watching
from consumers.worker import BatchWorker, ExternalWorker, TransactionalWorker, Worker
from schemas.topics import Topics

__all__ = ["Observer", "Options", "WorkerService", "check"]

_LEAVE_S = 2.0  # to commit and leave the group, when draining took all its time


_CANCEL_AGAIN_S = 2.0


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
        self._kafka = kafka_settings
        self._core = Core(
            worker,
            topics=Topics(kafka_settings.topic_prefix),
            pool=pool,
            clock=clock,
            random=random,
            options=options or Options(),
            observer=observer,
        )
        self._settling = Settling(self._core)
        self._targets = Targets(self._core, self._settling)
        self._marks = Marks(self._core)
        self._intake = Intake(self._core, self._targets, self._settling)
        self._handling: Transactional | External = (External if self._core.external else Transactional)(
            self._core, self._settling
        )
        self._keeping = Keeping(self._core, self._resumed)
        self._periodic = Periodic(self._core)
        self._watching = Watching(self._core, kafka_settings, self._joined)
        self._poller: Poller | None = None
        self._leave_until = 0.0

    async def run(self, stop: asyncio.Event, stop_now: asyncio.Event | None = None) -> bool:
        """Work until `stop`, then drain; `stop_now` cuts the draining short. True when everything in hand was finished.

        Raises what ended the poll thread, if it ended by itself.
        """
        self._core.start()
        if not await self._prepared(stop):
            return True
        self._sender = Sender(
            partial(kafka.producer, self._kafka, message_timeout_ms=30_000, message_max_bytes=4_000_000)
        )
        self._core.outgoing = Outgoing(self._sender, self._core.say)
        self._core.poller = self._poller = self._make_poller()
        background = [
            asyncio.create_task(body())
            for body in (
                self._dispatch,
                self._targets.loop,
                self._handling.loop,
                self._intake.due_loop,
                self._marks.loop,
                self._keeping.loop,
                self._keeping.look_loop,
                self._keeping.renew_loop,
                self._periodic.loop,
                self._watching.loop,
            )
        ]
        for task in background:
            task.add_done_callback(self._background_ended)
        self._core.poller.start()
        stopped = self._core.loop.create_task(stop.wait())
        drained = False
        try:
            ends: list[asyncio.Future[Any]] = [stopped, self._core.failure]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._core.failure.done():
                self._core.failure.result()
            drained = await self._drain(stop_now or asyncio.Event())
        finally:
            stopped.cancel()
            self._core.stopping = self._core.abandoned = True
            await _end([*background, *self._core.tasks])
            await self._leave()
        return drained

    async def _prepared(self, stop: asyncio.Event) -> bool:
        """All that comes before the first record. False when it was stopped first: a server may be away for long."""
        preparing = self._core.loop.create_task(self._prepare())
        stopped = self._core.loop.create_task(stop.wait())
        try:
            await asyncio.wait([preparing, stopped], return_when=asyncio.FIRST_COMPLETED)
            if preparing.done():
                preparing.result()
                return True
            return False
        finally:
            preparing.cancel()
            stopped.cancel()
            await asyncio.gather(preparing, stopped, return_exceptions=True)

    async def _prepare(self) -> None:
        await asyncio.to_thread(self._require_topics)
        await self._core.transaction(self._keeping.register)
        await self.worker.open()

    # Asked from any thread.

    def signs(self) -> Signs:
        """How it is, for whoever asks whether the process lives."""
        core, poller = self._core, self._poller
        return Signs(
            worker=core.name,
            began=poller is not None and not core.abandoned,
            poll_age_s=0.0 if poller is None else time.monotonic() - poller.turned_at,
            partitions=0 if poller is None else len(poller.places),
            ready=self._core.ready,
            stopping=core.stopping,
            paused=core.paused,
            stalled=self._watching.stalled,
        )

    def samples(self) -> Iterator[Sample]:
        """Its numbers."""
        yield from self._core.figures.samples(self._core.name)
        if self._poller is not None:
            yield from self._watching.samples()

    # Its life.

    def _resumed(self) -> None:
        self._core.work.set()
        self._core.keep_work.set()
        self._targets.wake()

    def _require_topics(self) -> None:
        """Fail at boot, loudly, when a topic is missing: a consumer would wait for it in silence."""
        client = kafka.admin(self._kafka)
        there = client.list_topics(timeout=kafka.METADATA_TIMEOUT_S).topics
        needed = [
            *self.source_topics(),
            *self._core.topics.retries(self._core.name),
            self._core.topics.dead_letter(self._core.name),
        ]
        if missing := [topic for topic in needed if topic not in there]:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise BadWorker(
                f"{self._core.name} needs topics that do not exist: {', '.join(missing[:3])}{more}",
                hint=f"afluente topics apply --worker {workers.spelling(type(self.worker))}",
            )

    def source_topics(self) -> list[str]:
        """The event topics of its types."""
        if "*" in self.worker.event_types:
            return [topic for topic in self._core.topics.families() if topic != self._core.topics.family("webhook")]
        return sorted({self._core.topics.event(event_type) for event_type in self.worker.event_types})

    def _make_poller(self) -> Poller:
        # range: a member gets the same partition numbers of every topic, so a key's retries come to the member of its
        # events, and none is left with quiet retry topics only.
        protocol: dict[str, Any] = {"group_protocol": "consumer", "group_remote_assignor": "range"}
        if self._core.options.group_protocol == "classic":
            # Its only cooperative assignor balances the number of partitions, whatever their topics: less even.
            protocol = {"group_protocol": "classic", "partition_assignment_strategy": "cooperative-sticky"}
        call = self._core.loop.call_soon_threadsafe

        make_reader = partial(
            kafka.consumer,
            self._kafka,
            self._core.name,
            # A committed offset that is gone must be seen (poll.py); a new group starts at the beginning by itself.
            auto_offset_reset="error",
            fetch_wait_max_ms=50,
            # Small and without the 1 s pause of a full queue: full speed in 50 MB.
            queued_max_messages_kbytes=1024,
            fetch_message_max_bytes=262_144,  # of each partition at once; a larger record comes all the same
            fetch_queue_backoff_ms=5,
        )
        return Poller(
            partial(
                make_reader,
                max_poll_interval_ms=60_000,
                client_id=f"{socket.gethostname()}.{os.getpid()}",  # whose it is, to whoever looks at the group
                **({"group_instance_id": instance} if (instance := self._core.options.group_instance_id) else {}),
                **protocol,
            ),
            make_reader=make_reader,
            marks=self._marks,
            may_park=lambda: self._core.paused is None,
            topics=[*self.source_topics(), self._core.topics.retry(self._core.name, "now")],
            waiting_topics=sorted(self._intake._waiting_topics),
            limits=self._core.options.limits,
            commit_interval_s=self._core.options.commit_interval_s,
            revoke_drain_s=self._core.options.revoke_drain_s,
            deliver=lambda batch: _quietly(call, self._intake.take, batch),
            revoke=lambda places, drained: _quietly(call, self._revoked, places, drained),
            assigned=lambda count: _quietly(call, self._assigned, count),
            failed=lambda error: _quietly(call, self._core.fail, error),
            waited=self._core.figures.revoke_wait_s.add,
            worker=self._core.name,
        )

    def _assigned(self, partitions: int) -> None:
        self._core.say("worker.assigned", partitions=partitions)
        self._joined(partitions)

    def _joined(self, partitions: int = 0) -> None:
        if not self._core.ready:
            self._core.ready = True
            self._core.say("worker.ready", partitions=partitions, process=str(self._core.process))

    def _background_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._core.fail(error)

    async def _drain(self, stop_now: asyncio.Event) -> bool:
        self._core.say("process.stopping", drain_s=self._core.options.drain_s)
        self._core.stopping = True
        self._core.poller.drain()
        self._drop(lambda record: True)
        cut_short = self._core.loop.create_task(stop_now.wait())
        self._leave_until = deadline = self._core.loop.time() + self._core.options.drain_s
        try:
            while self._core.tasks or self._handling.busy:
                left = deadline - self._core.loop.time()
                if left <= 0 or stop_now.is_set():
                    return False
                await asyncio.wait(
                    [cut_short, *self._core.tasks], timeout=min(left, 0.05), return_when=asyncio.FIRST_COMPLETED
                )
        finally:
            cut_short.cancel()
        return True

    async def _leave(self) -> None:
        """Hand back what was not finished, commit what was, leave the group."""
        self._keeping.say_done(last=True)
        try:
            async with asyncio.timeout(5.0), self._core.connection() as conn:
                if handed_back := await self._core.deliveries.hand_back(conn):
                    self._core.say("worker.handed_back", count=handed_back)
                await self._core.deliveries.forget(conn)
        except (TimeoutError, psycopg.Error, PoolTimeout, PoolClosed) as error:
            # They are taken over when this process is missed.
            self._core.say("worker.postgres_away", level="warning", error=str(error))
        self._core.poller.end()
        # The end itself may hang in the client when the broker is away; the process ends anyway, and soon.
        left = self._leave_until - self._core.loop.time()
        await asyncio.to_thread(self._core.poller.join, min(max(_LEAVE_S, left), 10.0))
        await asyncio.to_thread(self._sender.close, 2.0)
        await self.worker.close()

    async def _dispatch(self) -> None:
        while True:
            await self._core.work.wait()
            self._core.work.clear()
            while self._core.lanes.has_ready and self._core.may_begin and (taken := self._handling.take()):
                self._begin(taken)

    def _begin(self, taken: list[Taken[Item]]) -> None:
        """Start a batch with what was taken; a delivery twice in it (a duplicate record) waits for the next one."""
        items: list[Item] = []
        lanes: list[tuple[Any, str]] = []
        seen: set[tuple[str, str]] = set()
        put_back: dict[tuple[Any, str], list[Item]] = {}
        for organization, key, lane_items in taken:
            lane = (organization, key)
            lanes.append(lane)
            for item in lane_items:
                if not item.record.place.alive or item.record.place.leaving:
                    continue
                if lane in put_back or (identity := item.identity) in seen:
                    put_back.setdefault(lane, []).append(item)
                    continue
                try:
                    item.event.read()
                except schemas.DecodeError as error:
                    self._core.spawn(item.record, self._settling.bury_record(item.record, kind(error), str(error)))
                    continue
                seen.add(identity)
                items.append(item)
                item.record.place.running += 1
        faults.point("worker.before_claim")
        self._handling.begin(lanes, items, put_back)

    def _revoked(self, places: list[Place], drained: threading.Event) -> None:
        if self._core.abandoned:
            drained.set()
            return
        for place in places:
            # Some of its records are on their way to their lanes: begun now they would overtake those dropped here.
            place.leaving = True
        self._drop(lambda record: record.place.leaving)
        self._core.revoking.append((places, drained))
        self._core.check_revoking()

    def _drop(self, condition: Callable[[Record], bool]) -> None:
        """Forget what has not begun; it comes again to whoever has its partition."""
        self._core.lanes.discard(lambda item: condition(item.record))
        self._core.due.discard(lambda entry: condition(entry[0]))
        self._targets.drop(condition)


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
    if isinstance(worker, ExternalWorker):
        if worker.resend == "lookup" and type(worker).lookup is ExternalWorker.lookup:
            raise BadWorker(f'{name} has no lookup: with resend = "lookup" it says what became of a call')
    elif worker.policy.rate or worker.policy.breaker:
        raise BadWorker(f"{name}: rates and breakers are for calls; use ExternalWorker")
    if not worker.event_types:
        raise BadWorker(f"{name} takes no event types")
    if isinstance(worker, BatchWorker) and worker.policy.ordering == "key":
        raise BadWorker(f"{name}: a batch handler cannot have ordering by key; use TransactionalWorker")
    if wrong := set(worker.policy.backoff_s) - set(schemas.topics.RETRY_DELAYS_S):
        raise BadWorker(f"{name}: no retry topic for {sorted(wrong)} s; there are {schemas.topics.RETRY_DELAYS_S}")


async def _end(tasks: list[asyncio.Task[Any]]) -> None:
    """Cancel them until they are over. Once is not enough: what comes at the same moment (a connection of the pool, by
    Python's `wait_for`) is returned in place of the cancellation, and the task goes on as if nothing had been said."""
    ending: Collection[asyncio.Task[Any]] = tasks
    while ending:
        for task in ending:
            task.cancel()
        _, ending = await asyncio.wait(ending, timeout=_CANCEL_AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)


def _quietly(call: Callable[..., Any], *arguments: Any) -> None:
    """The loop may be closed already when the poll thread comes with its last word."""
    try:
        call(*arguments)
    except RuntimeError:
        for argument in arguments:
            if isinstance(argument, threading.Event):
                argument.set()
