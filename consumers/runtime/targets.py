"""Whom an event is for: fixed at its first sight, many events in one transaction, a row for each target."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from uuid import UUID

from afluente.postgres import act_for
from consumers.runtime import records, retry
from consumers.runtime.core import FAULTY, UNFIT, Core, Separate, by_organization, is_away, savepoint
from consumers.runtime.deliveries import Connection, Item, PutOff, Run
from consumers.runtime.judging import KEEP_BEYOND, describe, kind
from consumers.runtime.records import Record, RetryMark
from consumers.runtime.settling import Settling
from schemas import Event

UNADDRESSED = "?"
"""The target of a delivery that is dead because none could be found; reprocessed, they are looked for again."""

_AT_ONCE = 200


class Targets:
    """Of workers with targets of their own. `loop` runs as long as the worker."""

    def __init__(self, core: Core, settling: Settling) -> None:
        self._core, self._settling = core, settling
        self._fan_out: list[tuple[Record, Event, RetryMark | None]] = []
        self._fan_work = asyncio.Event()
        self._failures: dict[UUID, int] = defaultdict(int)

    def add(self, record: Record, event: Event, mark: RetryMark | None) -> None:
        self._fan_out.append((record, event, mark))
        self._fan_work.set()

    def wake(self) -> None:
        """What waited for the end of a pause goes on."""
        self._fan_work.set()

    def drop(self, condition: Callable[[Record], bool]) -> None:
        self._fan_out = [entry for entry in self._fan_out if not condition(entry[0])]

    async def loop(self) -> None:
        """Fix the targets of events at first sight, many events in one transaction."""
        while True:
            await self._fan_work.wait()
            self._fan_work.clear()
            while self._fan_out and self._core.may_begin:
                batch, self._fan_out = self._fan_out[:_AT_ONCE], self._fan_out[_AT_ONCE:]
                batch = [entry for entry in batch if entry[0].place.alive]
                if batch:
                    await self._fix(batch)

    async def _fix(self, batch: list[tuple[Record, Event, RetryMark | None]]) -> None:
        known: dict[int, list[str]] = {}
        fixed: dict[int, list[str]] = {}
        failed: dict[int, BaseException] = {}

        async def fix(conn: Connection) -> None:
            fixed.clear()
            failed.clear()
            known.clear()
            again = {i for i, (record, _, _) in enumerate(batch) if record.again}
            known.update(await self._core.deliveries.known_targets(conn, [event for _, event, _ in batch], again))
            new = [i for i, entry in enumerate(batch) if not _addressed(known.get(i, ()), entry)]
            for organization_id, group in by_organization(new, lambda i: batch[i][1]):
                async with act_for(conn, organization_id):
                    for i in group:
                        event = batch[i][1]
                        try:
                            async with savepoint(conn, separate):
                                targets = await self._core.worker.targets(event, conn)
                                fixed[i] = list(dict.fromkeys(records.cut(target, 500) for target in targets))
                        except Exception as error:
                            if is_away(error, conn):
                                raise
                            if not separate:
                                raise Separate from error
                            failed[i] = error
            rows = []
            for i, targets in fixed.items():
                event = batch[i][1]
                rows += [(event, target, self._core.key(event, target), "claimed") for target in targets]
                if not targets:
                    rows.append((event, "", self._core.key(event, ""), "skipped"))
            await self._core.deliveries.fix_targets(conn, rows)

        separate = False
        try:
            try:
                await self._core.transaction(fix)
            except Separate:
                separate = True
                await self._core.transaction(fix)
        except FAULTY as error:
            self._core.say_unfit(error, len(batch))
            if len(batch) > 1:
                for entry in batch:
                    await self._fix([entry])
            elif isinstance(error, UNFIT):
                self._core.spawn(batch[0][0], self._settling.bury_record(batch[0][0], kind(error), describe(error)))
            else:  # what `targets` wrote fails at the commit
                self._failed(*batch[0], error)
            return
        for i, (record, event, mark) in enumerate(batch):
            if i in failed:
                self._failed(record, event, mark, failed[i])
                continue
            targets = fixed[i] if i in fixed else _addressed(known[i], batch[i])
            if mark is not None or (record.again and UNADDRESSED in known.get(i, ())):
                # A dead letter of "no targets could be found", reprocessed or replayed: that delivery runs as well,
                # and does nothing.
                self._core.spawn(record, self._close_unaddressed(Item(record, event, UNADDRESSED, UNADDRESSED, mark)))
                record.pending += 1
            if not targets:
                self._core.finish(record)
                continue
            record.pending += len(targets) - 1
            for target in targets:
                self._core.queue(Item(record, event, target, self._core.key(event, target), None, known=True))

    def _failed(self, record: Record, event: Event, mark: RetryMark | None, error: BaseException) -> None:
        """No row exists yet that could count attempts: they are counted here, and the record stays unfinished
        meanwhile."""
        self._failures[event.id] += 1
        failures = self._failures[event.id]
        if not retry.is_spent(self._core.policy, failures):
            wait_s = retry.backoff_s(self._core.policy, failures, self._core.random, self._core.options.backoff_scale)
            self._core.say(
                "worker.targets_failed",
                level="warning",
                event_id=str(event.id),
                attempt=failures,
                error=describe(error),
            )
            self._core.wait_until(records.to_ms(self._core.clock.now() + timedelta(seconds=wait_s)), record, mark, None)
            return
        del self._failures[event.id]
        item = Item(record, event, UNADDRESSED, UNADDRESSED, mark, attempt=failures)
        self._core.spawn(record, self._bury(item, PutOff("dead", failures, None, kind(error), describe(error))))

    async def _bury(self, item: Item, outcome: PutOff) -> None:
        async def write(conn: Connection) -> None:
            now = self._core.clock.now()
            await self._core.deliveries.claim(conn, [item], now, timedelta(0), KEEP_BEYOND)
            await self._core.deliveries.put_off(conn, [(item, outcome)], now, locked=True)

        await self._core.transaction(write)
        await self._settling.settle(item, outcome)

    async def _close_unaddressed(self, item: Item) -> None:
        async def write(conn: Connection) -> None:
            now = self._core.clock.now()
            [verdict] = await self._core.deliveries.claim(conn, [item], now, timedelta(0), KEEP_BEYOND)
            if self._core.external and isinstance(verdict, Run):
                await self._core.deliveries.finish(conn, [item])

        await self._core.transaction(write)
        self._core.finish(item.record)


def _addressed(known: Sequence[str], entry: tuple[Record, Event, RetryMark | None]) -> list[str]:
    """The targets fixed before; for a record that is reprocessed, or replayed with --again, without that of none."""
    record, _, mark = entry
    return [target for target in known if (mark is None and not record.again) or target != UNADDRESSED]
