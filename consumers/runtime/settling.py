"""After the commit: what must be produced is produced, then the record is finished.

What must stay true: on failure the attempt and its due time are committed, then the retry record is produced, then the
offset is finished. The other order would lose the delivery, or run it under an attempt nobody knows of.
"""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import Literal

from afluente import faults
from consumers.runtime import records, retry
from consumers.runtime.core import Core
from consumers.runtime.deliveries import (
    Blocked,
    BuryAgain,
    Connection,
    Duplicate,
    Early,
    Held,
    Item,
    ProduceAgain,
    PutOff,
)
from consumers.runtime.judging import Done, Outcome, Unfit, describe, kind
from consumers.runtime.outgoing import RecordRefused
from consumers.runtime.records import Record


class Settling:
    """What becomes of deliveries after their transaction, and of records that are no events."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def settle_all(self, outcomes: list[tuple[Item, Outcome]]) -> None:
        """After the commit: what must be produced is produced, then the records are finished."""
        self._core.settled_all(item for item, outcome in outcomes if type(outcome) is Done)
        waiting = []
        for item, outcome in outcomes:
            if type(outcome) is Done:
                continue
            if isinstance(outcome, (Duplicate, Blocked)) or (isinstance(outcome, PutOff) and outcome.keep):
                self._core.settled(item)
                if isinstance(outcome, PutOff) and outcome.state == "waiting":
                    self._core.say_retried(item, outcome)
                elif isinstance(outcome, Duplicate):
                    self._core.figures.duplicates += 1
            else:
                waiting.append(self.settle(item, outcome))
        if waiting:
            results = await asyncio.gather(*waiting, return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result

    async def settle(self, item: Item, outcome: Outcome) -> None:
        match outcome:
            case Early(due):
                item.record.place.running -= 1
                self._core.check_revoking()
                self._core.wait_until(records.to_ms(due), item.record, item.mark, item)
            case Held():
                item.record.place.running -= 1
                self._core.check_revoking()
                due = self._core.clock.now() + timedelta(seconds=self._core.options.held_recheck_s)
                self._core.wait_until(records.to_ms(due), item.record, item.mark, item)
            case Unfit(error):
                await self.bury_record(item.record, kind(error), describe(error))
                item.record.place.running -= 1
                self._core.check_revoking()
            case PutOff(state="waiting"):
                self._core.say_retried(item, outcome)
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
                self._core.settled(item)
            case ProduceAgain():
                await self._produce_retry(item, outcome)
                self._core.settled(item)
            case PutOff(state="dead" | "needs_review"):
                self._core.say_dead(item, outcome)
                dead = BuryAgain(
                    outcome.attempts, item.generation, item.first_failure_at, outcome.error_class, outcome.error
                )
                await self._bury(item, dead)
                self._core.settled(item)
            case BuryAgain():
                await self._bury(item, outcome)
                self._core.settled(item)
            case _:
                self._core.settled(item)

    async def _produce_retry(self, item: Item, wait: ProduceAgain) -> None:
        """The retry record: key and value untouched, headers set. Not finished before the broker has it."""
        now = self._core.clock.now()
        wait_s = (wait.due - now).total_seconds()
        failed_attempts = wait.attempt - 1
        delay: int | Literal["now"] | None
        if wait.error is not None and failed_attempts >= 1 and self._core.options.backoff_scale != 1.0:
            delay = retry.tier_s(self._core.policy, failed_attempts)  # scaled down it still goes to its tier's topic
        else:
            delay = self._core.judge.tier(wait_s, failed_attempts)
        headers = self._headers(item, wait, due=wait.due)
        try:
            await self._core.outgoing.retry(self._core.topics.retry(self._core.name, delay), item.record, headers)
        except RecordRefused as refused:
            await self._dead_for_its_size(item, PutOff("dead", failed_attempts, None, kind(refused), str(refused)))
        faults.point("worker.after_retry_produced")

    async def _dead_for_its_size(self, item: Item, outcome: PutOff) -> None:
        """No retry topic takes its record: it cannot come back, and would hold its partition's offset for ever."""

        async def write(conn: Connection) -> None:
            now = self._core.clock.now()
            if self._core.deliveries.ordered:
                await self._core.deliveries.lock_keys(conn, [item.key])
            await self._core.deliveries.put_off(conn, [(item, outcome)], now, locked=True)
            if self._core.deliveries.ordered and await self._core.deliveries.release_keys(conn, [item.key], now):
                self._core.keep_work.set()

        await self._core.transaction(write)
        self._core.say_dead(item, outcome)
        attempts = outcome.attempts
        await self._bury(
            item, BuryAgain(attempts, item.generation, item.first_failure_at, outcome.error_class, outcome.error)
        )

    async def _bury(self, item: Item, dead: BuryAgain) -> None:
        """The dead-letter record, and where it is."""
        headers = self._headers(item, dead)
        topic = self._core.topics.dead_letter(self._core.name)
        partition, offset = await self._core.outgoing.dead_letter(topic, item.record, headers)
        await self._core.transaction(lambda conn: self._core.deliveries.buried(conn, item, partition, offset))

    def _headers(self, item: Item, of: ProduceAgain | BuryAgain, due: datetime | None = None) -> records.Headers:
        return records.marked_headers(
            item.record.headers,
            worker=self._core.name,
            origin=records.origin_of(item.record),
            event_id=item.event.id,
            target=item.target,
            generation=of.generation,
            attempt=of.attempt,
            due=due,
            first_failure=of.first_failure_at,
            error_class=of.error_class,
            error=of.error,
        )

    async def bury_record(self, record: Record, error_class: str, message: str) -> None:
        """Dead letter with its bytes, once; the partition goes on."""
        timestamp = records.moment(record.timestamp_ms)
        known = False

        async def look(conn: Connection) -> None:
            nonlocal known
            known = await self._core.deliveries.undecodable_known(conn, record, timestamp)

        await self._core.transaction(look)
        if not known:
            headers = records.marked_headers(
                record.headers,
                worker=self._core.name,
                origin=records.origin_of(record),
                error_class=error_class,
                error=message,
            )
            dead = await self._core.outgoing.dead_letter(
                self._core.topics.dead_letter(self._core.name), record, headers
            )
            await self._core.transaction(
                lambda conn: self._core.deliveries.undecodable(conn, record, timestamp, error_class, message, dead)
            )
            self._core.figures.dead += 1
            self._core.say(
                "worker.dead",
                level="warning",
                event_id=None,
                topic=record.topic,
                partition=record.partition,
                offset=record.offset,
                error=f"{error_class}: {records.cut(message)}",
            )
        self._core.finish(record)
