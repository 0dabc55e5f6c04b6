"""From a record to its deliveries: decoded, its month there, its targets known, then its lane or the heap of what is
not due.

What must stay true: no record can end the process, whatever is in it; what comes after an event whose month is being
made waits behind it; what has not begun when its partition is taken away is dropped.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from datetime import date, timedelta

import schemas
from consumers.errors import UndecodableRecord
from consumers.runtime import records, retry
from consumers.runtime.core import Core
from consumers.runtime.deliveries import Connection, Item
from consumers.runtime.judging import kind
from consumers.runtime.places import Place
from consumers.runtime.records import Record, RetryMark
from consumers.runtime.settling import Settling
from consumers.runtime.targets import UNADDRESSED, Targets
from consumers.worker import Worker
from schemas import Event, published

_OLDEST_MONTH = timedelta(days=400)
_NEWEST = timedelta(days=31)
_CLOCKS_APART_S = 3600.0
_EVENT_TYPE = re.compile(r"(?=.{3,100}\Z)[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*")


class Intake:
    """For the event loop. `take` gets what the poll thread read."""

    def __init__(self, core: Core, targets: Targets, settling: Settling) -> None:
        self._core, self._targets, self._settling = core, targets, settling
        self._many_targets = type(core.worker).targets is not Worker.targets
        self._waiting_topics = {core.topics.retry(core.name, delay) for delay in schemas.topics.RETRY_DELAYS_S}
        self._retry_topics = self._waiting_topics | {core.topics.retry(core.name, "now")}
        # Nothing of ours waits longer in Kafka; a forged time would hold back its partition's offset until then.
        scale = max(1.0, core.options.backoff_scale)
        self._longest_wait_ms = int(
            1000 * (retry.LONGEST_IN_KAFKA_S * (1 + core.policy.jitter) * scale + _CLOCKS_APART_S)
        )
        self._of_others = frozenset(t.encode() for t in published.event_types() if not self.takes(t))
        # What `targets` or a key of the worker's own may look at.
        self._reads_at_once = self._many_targets or type(core.worker).key is not Worker.key
        self._months: set[tuple[int, int]] = set()
        self._reopened: set[date] = set()
        self._months_line: dict[Place, deque[tuple[Record, Event, RetryMark | None]]] = {}

    def take(self, batch: list[Record]) -> None:
        if self._core.stopping:
            return
        self._core.figures.records += len(batch)
        now_ms = records.to_ms(self._core.clock.now())
        latest_ms = now_ms + self._longest_wait_ms
        for record in batch:
            record.pending = 1
            record.ours = record.topic in self._retry_topics
            mark = None
            if record.ours:
                try:
                    if not record.headers and record.headers_unreadable:
                        raise ValueError("the name of a header is not UTF-8")
                    mark, record.again = records.read_mark(record), records.read_again(record)
                    if mark is not None and mark.due_ms > latest_ms:
                        raise ValueError(f"header {records.DUE_MS} is further off than any wait in a retry topic")
                except ValueError as error:
                    self._core.spawn(record, self._settling.bury_record(record, "BadHeaders", str(error)))
                    continue
                # In retry.now everything is due; what its row says otherwise counts, not a header.
                if mark is not None and record.topic in self._waiting_topics:
                    if mark.due_ms > now_ms:
                        self._core.wait_until(mark.due_ms, record, mark, None)
                        continue
                    self._core.figures.lateness_s.add((now_ms - mark.due_ms) / 1000)
            self.admit(record, mark)

    def admit(self, record: Record, mark: RetryMark | None) -> None:
        # Of what others take no more is read than its type.
        if not record.ours and schemas.type_of(record.value) in self._of_others:
            self._core.poller.finish(record)
            return
        try:
            event = decode(record)
            if self._reads_at_once:
                event.read()
        except UndecodableRecord as error:
            self._core.spawn(record, self._settling.bury_record(record, error.error_class, error.message))
            return
        except schemas.DecodeError as error:
            self._core.spawn(record, self._settling.bury_record(record, kind(error), str(error)))
            return
        if not record.ours and not self.takes(event.event_type):
            self._core.poller.finish(record)
            return
        month = (event.created_at.year, event.created_at.month)
        if month not in self._months or record.place in self._months_line:
            if record.place not in self._months_line:
                self._months_line[record.place] = deque()
                self._core.spawn(None, self._check_months(record.place))
            self._months_line[record.place].append((record, event, mark))
            return
        self.route(record, event, mark)

    def route(self, record: Record, event: Event, mark: RetryMark | None) -> None:
        if self._many_targets and (mark is None or mark.target == UNADDRESSED):
            self._targets.add(record, event, mark)
        else:
            self._core.queue(
                Item(
                    record, event, mark.target if mark else "", self._core.key(event, mark.target if mark else ""), mark
                )
            )

    def takes(self, event_type: str) -> bool:
        types = self._core.worker.event_types
        return event_type in types or ("*" in types and not event_type.startswith("webhook."))

    async def due_loop(self) -> None:
        """Let go what has become due, in the order of due times."""
        while True:
            now_ms = records.to_ms(self._core.clock.now())
            if (first_ms := self._core.due.next_due_ms) is not None and first_ms <= now_ms:
                self._core.figures.lateness_s.add((now_ms - first_ms) / 1000)
            for record, mark, item in self._core.due.pop_due(now_ms):
                if not record.place.alive:
                    continue
                if item is None:
                    self.admit(record, mark)
                else:
                    self._core.queue(item)
            next_due = self._core.due.next_due_ms
            wait_s = None if next_due is None else max(0.0, next_due / 1000 - self._core.clock.now().timestamp())
            self._core.due_work.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self._core.due_work.wait()
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
                    self.route(record, event, mark)
                else:
                    place.running += 1
                    await self._settling.bury_record(record, *refused)
                    place.running -= 1
                    self._core.check_revoking()
        finally:
            del self._months_line[place]

    async def _make_month(self, event: Event, again: bool = False) -> tuple[str, str] | None:
        """See that the event's month has its partition; (error class, error) for an event that gets none."""
        now, month = self._core.clock.now(), event.created_at.date().replace(day=1)
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

        await self._core.transaction(ensure)
        self._months.add((month.year, month.month))
        return None

    async def _reopen_month(self, month: date) -> None:
        """For a replay with --again only: what comes from elsewhere of such a month goes on being refused."""
        if month not in self._reopened:

            async def reopen(conn: Connection) -> None:
                await conn.execute("SELECT afluente.reopen_delivery_month(%s)", (month,))

            await self._core.transaction(reopen)
            self._reopened.add(month)


def decode(record: Record) -> Event:
    """The event in the record, its payload left for later. UndecodableRecord with the reason."""
    if not record.value:
        raise UndecodableRecord("EmptyRecord", "the record has no value")
    try:
        event = schemas.read(record.value)
        if event.event_type not in published.event_types() and not _EVENT_TYPE.fullmatch(event.event_type):
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
