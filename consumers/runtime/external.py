"""Deliveries that call the world outside: claimed and committed, called outside any transaction, recorded.

What must stay true: the claim is committed before the call; an outcome is recorded only while the claim is ours, in one
transaction with the worker's own part of it; a lane goes on when its outcome is recorded; a call begins within its
`window`, or not at all. Calls that came back while the last transaction was under way share the next one. What comes
between the claim's verdict and the call, rates and breakers, is `admission`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import schemas
from afluente import faults
from afluente.postgres import act_for
from consumers.runtime.admission import RATE_LIMITED, Admission, Told
from consumers.runtime.context import HandlerContext
from consumers.runtime.core import FAULTY, Core, Separate, by_organization, is_away, savepoint
from consumers.runtime.deliveries import Connection, Duplicate, Item, PutOff, Run
from consumers.runtime.judging import KEEP_BEYOND, Done, Outcome, describe, kind
from consumers.runtime.lanes import Taken
from consumers.runtime.settling import Settling
from consumers.worker import ExternalWorker, NotMade, Reject, Snooze, Unknown

_GROUP_COMMIT = 500


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
    undecided: bool = False
    """`lookup` says that it cannot be told."""


class _Late(Snooze):
    """The moment that the call was given has passed: it is not made."""

    def __init__(self) -> None:
        super().__init__(0)


class External:
    """`begin` what `take` gave; `loop` records what came back, as long as the worker lives."""

    def __init__(self, core: Core, settling: Settling) -> None:
        self._core, self._settling = core, settling
        self._admission = Admission(core)
        self._told = Told()
        self._in_batches = type(core.worker).record_all is not ExternalWorker.record_all  # type: ignore[attr-defined]
        self._called: list[_Called] = []
        self._recording = False
        self._record_work = asyncio.Event()

    @property
    def busy(self) -> bool:
        """There are outcomes that are not recorded."""
        return bool(self._called) or self._recording

    def take(self) -> list[Taken[Item]]:
        """What may begin now."""
        free = self._core.policy.concurrency - self._core.lanes.running
        return self._core.lanes.take(min(free, _GROUP_COMMIT)) if free > 0 else []

    def begin(
        self, lanes: list[tuple[Any, str]], items: list[Item], put_back: dict[tuple[Any, str], list[Item]]
    ) -> None:
        """Claim and call these; a lane goes on when its outcome is recorded."""
        self._core.spawn(None, self._run(lanes, items, put_back))

    async def _run(
        self, lanes: list[tuple[Any, str]], items: list[Item], put_back: dict[tuple[Any, str], list[Item]]
    ) -> None:
        """Claim many in one transaction, then call each; its lane goes on when its outcome is recorded."""
        assert isinstance(self._core.worker, ExternalWorker)
        started = False
        prepared: dict[int, Any] = {}
        outcomes: list[Outcome] = []
        try:
            if items:
                outcomes, prepared = await self._claim_all(items)
            started = True
        finally:
            if not self._core.abandoned:
                called = {id(items[i]) for i in prepared} if started else set()
                busy = {(item.event.organization_text, item.key) for item in items if id(item) in called}
                for lane in lanes:
                    if lane not in busy:
                        self._core.release(lane, put_back.get(lane))
        if items:
            faults.point("worker.after_claim")
        for i, value in prepared.items():
            item = items[i]
            self._core.spawn(None, self._call((item.event.organization_text, item.key), item, value))
        await self._settling.settle_all(
            [(items[i], outcome) for i, outcome in enumerate(outcomes) if i not in prepared]
        )

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
                    await self._core.transaction(work)
                    return outcomes, prepared
                except Separate:
                    separate = True
        except FAULTY as error:
            self._core.say_unfit(error, len(items))
            if len(items) == 1:
                return [await self._core.put_off_alone(items[0], error)], {}
        middle = len(items) // 2
        outcomes, prepared = await self._claim_all(items[:middle])
        others, more = await self._claim_all(items[middle:])
        return [*outcomes, *others], prepared | {i + middle: value for i, value in more.items()}

    async def _claim_in(
        self, conn: Connection, items: list[Item], prepared: dict[int, Any], separate: bool
    ) -> list[Outcome]:
        assert isinstance(self._core.worker, ExternalWorker)
        now = self._core.clock.now()
        limit = self._admission.admit if self._admission.is_wanted else None
        outcomes: list[Outcome] = [
            *await self._core.deliveries.claim(conn, items, now, self._core.policy.delay, KEEP_BEYOND, limit)
        ]
        if self._core.deliveries.ordered:
            over = [i.key for i, o in zip(items, outcomes, strict=True) if isinstance(o, PutOff) and o.is_over]
            if over:
                await self._core.deliveries.release_keys(conn, over, now)
        failed: list[tuple[Item, PutOff]] = []
        runs = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, Run)]
        for i in runs:
            self._core.say_taken_over(items[i], outcomes[i])
        if type(self._core.worker).prepare is ExternalWorker.prepare:
            prepared.update(dict.fromkeys(runs))
            return outcomes
        for organization_id, group in by_organization(runs, lambda i: items[i].event):
            async with act_for(conn, organization_id):
                for i in group:
                    item = items[i]
                    context = HandlerContext(conn, self._core.clock, self._core.deliveries, item.event, item.target)
                    try:
                        async with savepoint(conn, separate), asyncio.timeout(self._core.policy.timeout_s):
                            prepared[i] = await self._core.worker.prepare(self._core.delivery(item), context)
                    except Exception as error:
                        if is_away(error, conn):
                            raise
                        if not separate:
                            raise Separate from error
                        outcomes[i] = put_off = self._judged(item, error)
                        failed.append((item, put_off))
        if failed:
            await self._core.deliveries.put_off(conn, failed, now, locked=True)
            if self._core.deliveries.ordered:
                await self._core.deliveries.release_keys(conn, [i.key for i, o in failed if o.is_over], now)
            # no call: it says nothing about the destination, and what was the probe makes room for another
            await self._admission.came_back(conn, [(item, o, None) for item, o in failed], Told())
        await self._admission.prepared(conn, [items[i] for i in prepared])
        return outcomes

    async def _call(self, lane: tuple[Any, str], item: Item, prepared: Any) -> None:
        assert isinstance(self._core.worker, ExternalWorker)
        called = _Called(lane, item, prepared)
        began = time.perf_counter()
        try:
            await self._look_up_or_call(self._core.worker, called)
        except asyncio.CancelledError as error:
            if self._core.abandoned:
                raise
            called.error = error  # the call's own doing: without an outcome its lane would stand still
        except Exception as error:
            called.error = error
        self._core.figures.runs += 1
        self._core.figures.handler_s.add(time.perf_counter() - began)
        self._called.append(called)
        self._record_work.set()

    async def _look_up_or_call(self, worker: ExternalWorker, called: _Called) -> None:
        """One run. Where a call may have been made, and is not to be made blindly, `lookup` says what became of it."""
        item, timeout_s = called.item, self._core.policy.timeout_s
        delivery = self._core.delivery(item)
        if item.unknown:
            try:
                async with asyncio.timeout(timeout_s):
                    called.result = await worker.lookup(delivery, called.prepared)
                return
            except NotMade:
                item.unknown = False
            except Unknown:
                called.undecided = True
                raise
        await self._moment(item)
        try:
            async with asyncio.timeout(timeout_s) as limit:
                faults.point("worker.in_handler")
                called.result = await worker.call(delivery, called.prepared)
                faults.point("worker.after_call")
        except (Exception, asyncio.CancelledError) as error:
            cut = limit.expired() or isinstance(error, (Unknown, asyncio.CancelledError))
            item.unknown = cut and worker.resend != "safe"
            raise

    async def _moment(self, item: Item) -> None:
        """Until the call may begin. What came too late for its moment waits for another in its place, if that is near:
        put off it would be claimed again, and perhaps be late again."""
        while item.window is not None:
            begin, end = item.window
            if (wait_s := begin - self._core.loop.time()) > 0:
                await asyncio.sleep(wait_s)
            if self._core.loop.time() <= end:
                return
            if not await self._admission.another(item):
                raise _Late

    def _judged(self, item: Item, error: BaseException, undecided: bool = False) -> PutOff:
        """What a failed run means; where a call may have been made that must not be made again, people decide."""
        outcome = self._core.judge.outcome(item, error)
        if isinstance(error, _Late):
            return replace(outcome, error_class=RATE_LIMITED)
        worker = self._core.worker
        assert isinstance(worker, ExternalWorker)
        final = isinstance(error, (Reject, schemas.SchemaError, *self._core.policy.reject_on))
        if item.unknown and (undecided or worker.resend == "never" or (outcome.state == "dead" and not final)):
            return PutOff("needs_review", item.attempt, None, kind(error), describe(error))
        return outcome

    async def loop(self) -> None:
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
                await self._core.transaction(work)
                break
            except Separate:
                separate = True
            except FAULTY as error:
                self._core.say_unfit(error, len(batch))
                if len(batch) > 1:
                    for called in batch:
                        await self._record_all([called])
                    return
                if batch[0].untold:
                    raise
                if batch[0].error is None:
                    batch[0].item.unknown = self._is_delicate
                batch[0].error, batch[0].untold = batch[0].error or error, True
        faults.point("worker.after_commit")
        for name, words in self._told.words:
            self._core.say(name, level="warning", **words)
        self._told.words.clear()
        for called in batch:
            self._core.release(called.lane)
        delivered = [called.item for called, outcome in zip(batch, outcomes, strict=True) if isinstance(outcome, Done)]
        self._core.say_delivered(delivered)
        self._core.settled_all(delivered)
        for called, outcome in zip(batch, outcomes, strict=True):
            if not isinstance(outcome, Done):
                self._core.spawn(None, self._settling.settle_all([(called.item, outcome)]))

    async def _record_together(self, conn: Connection, batch: list[_Called]) -> list[Outcome]:
        """The good case, few statements for all: any error of a `record` or `failed` starts over, separately."""
        assert isinstance(self._core.worker, ExternalWorker)
        now = self._core.clock.now()
        outcomes: list[Outcome] = [
            Done(called.result) if called.error is None else self._judged(called.item, called.error, called.undecided)
            for called in batch
        ]
        await self._lock_recorded(conn, batch)
        good = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, Done)]
        bad = [(i, outcome) for i, outcome in enumerate(outcomes) if isinstance(outcome, PutOff)]
        ours: set[int] = set()
        if good:
            ours |= {good[n] for n in await self._core.deliveries.finish(conn, [batch[i].item for i in good])}
        if bad:
            kept = await self._core.deliveries.put_off(conn, [(batch[i].item, o) for i, o in bad], now, locked=False)
            ours |= {bad[n][0] for n in kept}
        for i, called in enumerate(batch):
            if i not in ours:
                outcomes[i] = self._superseded(called.item)
        told = [i for i in ours if self._is_told(batch[i], outcomes[i])]
        try:
            # Nobody waits for the answer to a statement that gives none: they go out together.
            async with conn.pipeline():
                if self._in_batches and (done := [i for i in told if isinstance(outcomes[i], Done)]):
                    await self._tell_all(conn, [batch[i] for i in done])
                    told = [i for i in told if not isinstance(outcomes[i], Done)]
                for organization_id, group in by_organization(told, lambda i: batch[i].item.event):
                    async with act_for(conn, organization_id):
                        for i in group:
                            await self._tell(conn, batch[i], outcomes[i])
        except Exception as error:
            if is_away(error, conn):
                raise
            raise Separate from error
        await self._recorded(conn, batch, outcomes, now)
        return outcomes

    async def _record_separately(self, conn: Connection, batch: list[_Called]) -> list[Outcome]:
        now = self._core.clock.now()
        await self._lock_recorded(conn, batch)
        outcomes = [await self._record_one(conn, called, now) for called in batch]
        await self._recorded(conn, batch, outcomes, now)
        return outcomes

    async def _record_one(self, conn: Connection, called: _Called, now: datetime) -> Outcome:
        item = called.item
        error = called.error
        if error is None:
            try:
                async with conn.transaction():
                    if not await self._core.deliveries.finish(conn, [item]):
                        return self._superseded(item)
                    done = Done(called.result)
                    if self._is_told(called, done):
                        if self._in_batches:
                            await self._tell_all(conn, [called])
                        else:
                            async with act_for(conn, item.event.organization_id):
                                await self._tell(conn, called, done)
                return done
            except Exception as failure:
                if is_away(failure, conn):
                    raise
                # The call was made and cannot be recorded: an attempt; the call comes again with the same key.
                error = called.error = failure
                item.unknown = self._is_delicate
        outcome = self._judged(item, error, called.undecided)
        try:
            async with conn.transaction():
                if not await self._core.deliveries.put_off(conn, [(item, outcome)], now, locked=False):
                    return self._superseded(item)
                try:
                    if self._is_told(called, outcome):
                        async with act_for(conn, item.event.organization_id):
                            await self._tell(conn, called, outcome)
                except Reject as rejected:
                    # What `failed` wrote before it raised says why the delivery is dead: it stays.
                    outcome = self._core.judge.outcome(item, rejected)
                    await self._core.deliveries.put_off(conn, [(item, outcome)], now, locked=True)
            return outcome
        except Exception as failure:
            if is_away(failure, conn):
                raise
            self._core.say(
                "worker.failed_hook_failed", level="error", **self._core.fields(item), error=describe(failure)
            )
        if not await self._core.deliveries.put_off(conn, [(item, outcome)], now, locked=False):
            return self._superseded(item)
        return outcome

    def _is_told(self, called: _Called, outcome: Outcome) -> bool:
        """The worker has a part of its own in the record's transaction. After a snooze not: no attempt was used."""
        kind = type(self._core.worker)
        assert issubclass(kind, ExternalWorker)
        if called.untold:
            return False
        if isinstance(outcome, Done):
            return self._in_batches or kind.record is not ExternalWorker.record
        return kind.failed is not ExternalWorker.failed and not isinstance(called.error, Snooze)

    async def _tell(self, conn: Connection, called: _Called, outcome: Outcome) -> None:
        """The worker's own part of the record's transaction, as the event's organization."""
        worker, item = self._core.worker, called.item
        assert isinstance(worker, ExternalWorker)
        due = outcome.due if isinstance(outcome, PutOff) else None
        context = HandlerContext(
            conn, self._core.clock, self._core.deliveries, item.event, item.target, next_attempt_at=due
        )
        async with asyncio.timeout(self._core.policy.timeout_s):
            if isinstance(outcome, Done):
                await worker.record(self._core.delivery(item), called.result, context)
            else:
                assert called.error is not None
                await worker.failed(self._core.delivery(item), called.prepared, called.error, context)

    async def _tell_all(self, conn: Connection, done: list[_Called]) -> None:
        """Its part of many, as the worker."""
        worker = self._core.worker
        assert isinstance(worker, ExternalWorker)
        context = HandlerContext(conn, self._core.clock, self._core.deliveries, None)
        async with asyncio.timeout(self._core.policy.timeout_s):
            await worker.record_all([(self._core.delivery(called.item), called.result) for called in done], context)

    async def _lock_recorded(self, conn: Connection, batch: list[_Called]) -> None:
        if self._core.deliveries.ordered:
            await self._core.deliveries.lock_keys(conn, [called.item.key for called in batch])

    @property
    def _is_delicate(self) -> bool:
        worker = self._core.worker
        return isinstance(worker, ExternalWorker) and worker.resend != "safe"

    async def _recorded(
        self, conn: Connection, batch: list[_Called], outcomes: Sequence[Outcome], now: datetime
    ) -> None:
        """The rest of the record's transaction: what depends on these deliveries, and on how their calls went."""
        calls = list(zip(batch, outcomes, strict=True))
        await self._admission.note_unknown(conn, [c.item for c, o in calls if isinstance(o, PutOff) and not o.is_over])
        await self._admission.came_back(
            conn, [(c.item, o, c.error) for c, o in calls if isinstance(o, (Done, PutOff))], self._told
        )
        if self._core.deliveries.ordered:
            over = [
                called.item.key
                for called, outcome in calls
                if isinstance(outcome, Done) or (isinstance(outcome, PutOff) and outcome.is_over)
            ]
            if over and await self._core.deliveries.release_keys(conn, over, now):
                self._core.keep_work.set()

    def _superseded(self, item: Item) -> Duplicate:
        """Another process took the delivery over: it is that one's to finish, nothing of this run is kept."""
        self._core.say("worker.superseded", level="warning", **self._core.fields(item))
        return Duplicate()
