"""What an external worker's deliveries have to pass between the claim's verdict and the call: the rate, the breaker of
their destination, and the question whether the call was made already. And what calls say about their destination.

Works inside the transactions of the claim and of the record; the decisions are `rates` and `breakers`, their state is
in Postgres, and the clock the server's. What must stay true: what may not be called now is written as `waiting` in the
claim's transaction, with no attempt used (so what comes after it with the same key waits behind it); a delivery whose
call may have been made is never called again where the worker says that this is not safe.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import orjson

import sql
from consumers.runtime import breakers, rates, records
from consumers.runtime.breakers import Probe, State, Wait
from consumers.runtime.core import LIMITED, Core
from consumers.runtime.deliveries import Connection, Early, Item, PutOff, Run, Verdict
from consumers.runtime.judging import KEEP_BEYOND, Done, Outcome, describe, kind
from consumers.worker import ExternalWorker

RATE_LIMITED, CIRCUIT_OPEN = LIMITED
UNKNOWN = "Unknown"
_FORGET_EVERY_S = 3600.0


@dataclass(slots=True)
class _Marks:
    """What the row of a delivery says, and is to say."""

    waited: bool = False
    moment: float | None = None
    unknown: bool = False
    written: tuple[float | None, bool] = (None, False)


@dataclass(frozen=True, slots=True)
class _Time:
    """The server's time, and where it lies on the event loop's clock: between when it was asked and when it answered.
    From both sides, so that no call is early and none is late unseen."""

    server_s: float
    asked_at: float
    answered_at: float

    def window(self, moment: float, slack_s: float) -> tuple[float, float]:
        wait_s = moment - self.server_s
        return self.answered_at + wait_s, self.asked_at + wait_s + slack_s


@dataclass(slots=True)
class Told:
    """What changed for destinations, to be said after the commit."""

    words: list[tuple[str, dict[str, Any]]] = field(default_factory=list)


class Admission:
    def __init__(self, core: Core) -> None:
        assert isinstance(core.worker, ExternalWorker)
        self._core = core
        self._worker = core.worker
        self._rate, self._breaker = core.policy.rate, core.policy.breaker
        self._sql: Mapping[str, str] = sql.queries("limits")
        self._forget_at = 0.0
        self.is_wanted = bool(self._rate or self._breaker or self._worker.resend != "safe")

    async def admit(self, conn: Connection, items: Sequence[Item], decided: list[Verdict]) -> None:
        """Of those that are to run, put off those that may not be called now; the others know when, and how."""
        runs = [i for i, verdict in enumerate(decided) if isinstance(verdict, Run)]
        if not runs:
            return
        for i in runs:
            verdict, item = decided[i], items[i]
            assert isinstance(verdict, Run)
            item.attempt, item.generation = verdict.attempt, verdict.generation
            item.first_failure_at = verdict.first_failure_at
            item.destination, item.probe, item.window, item.given, item.back_at = None, None, None, None, None
        marks = await self._read_marks(conn, items, decided, runs)
        put_off: dict[int, PutOff] = {}
        for i in runs:
            items[i].unknown = marks[i].unknown
            if marks[i].unknown and self._worker.resend == "never":
                reason = "its call may have been made, and what came of it is not known"
                put_off[i] = PutOff("needs_review", items[i].attempt, None, UNKNOWN, reason)
        if self._breaker is not None:
            await self._ask_breakers(conn, items, [i for i in runs if i not in put_off], put_off)
        if self._rate is not None:
            await self._ask_buckets(conn, items, [i for i in runs if i not in put_off], marks, put_off)
        if put_off:
            now = self._core.clock.now()
            await self._core.deliveries.put_off(conn, [(items[i], o) for i, o in put_off.items()], now, locked=True)
        await self._write_marks(conn, [(items[i], marks[i]) for i in runs])
        for i, outcome in put_off.items():
            back_at = items[i].back_at
            decided[i] = outcome if back_at is None else Early(back_at)

    async def _read_marks(
        self, conn: Connection, items: Sequence[Item], decided: Sequence[Verdict], runs: list[int]
    ) -> dict[int, _Marks]:
        marks = {i: _Marks() for i in runs}
        # a row of this transaction, or one that only names a target, says nothing
        if seen := [{"i": i, **items[i].place} for i in runs if items[i].claim > 0]:
            cursor = await self._execute(conn, "read_marks", items=_json(seen))
            for i, waited, moment, marked, begun in await cursor.fetchall():
                verdict = decided[i]
                assert isinstance(verdict, Run)
                anew = verdict.again
                unknown = self._worker.resend != "safe" and not anew and (marked or begun)
                # what another process had begun does not go to the end of the line either
                was_here = not anew and (waited or marked or begun)
                marks[i] = _Marks(was_here, None if anew else moment, unknown, (moment, marked))
        return marks

    async def _write_marks(self, conn: Connection, which: Iterable[tuple[Item, _Marks]]) -> None:
        rows = [
            {**item.place, "moment": marks.moment, "unknown": marks.unknown}
            for item, marks in which
            if (marks.moment, marks.unknown) != marks.written
        ]
        if rows:
            await self._execute(conn, "write_marks", items=_json(rows))

    # Rates

    async def _ask_buckets(
        self,
        conn: Connection,
        items: Sequence[Item],
        asking: list[int],
        marks: Mapping[int, _Marks],
        put_off: dict[int, PutOff],
    ) -> None:
        rate = self._rate
        assert rate is not None
        by_bucket: dict[tuple[UUID, str], list[int]] = defaultdict(list)
        for i in asking:
            by_bucket[self._bucket(items[i])].append(i)
        if not by_bucket:
            return
        rows, now = await self._lock_buckets(conn, by_bucket)
        answers: dict[int, rates.Answer] = {}
        moved = []
        for organization_id, bucket, next_at, booked_at in rows:
            # those that have their moment first, then those that waited, in the order they came
            asked = sorted(
                by_bucket[organization_id, bucket],
                key=lambda i: (marks[i].moment is None, not marks[i].waited, marks[i].moment or 0.0),
            )
            before = rates.Bucket(next_at, booked_at)
            after, told = rates.answer(rate, before, [rates.Ask(marks[i].waited, marks[i].moment) for i in asked], now)
            answers.update(zip(asked, told, strict=True))
            if after != before:
                moved.append(_moved((organization_id, bucket), next_at=after.next_at, booked_at=after.booked_at))
            if all(answer.moment - now <= rates.HOLD_S for answer in told if answer.given):
                for i, answer in zip(asked, told, strict=True):
                    items[i].given = answer.moment if answer.given and answer.moment != marks[i].moment else None
        if moved:
            await self._execute(conn, "move_buckets", buckets=_json(moved))
        time = await self._server_time(conn)
        here = self._core.clock.now()
        for i, told_i in answers.items():
            item, wait_s = items[i], told_i.moment - time.server_s
            marks[i].moment = None
            if told_i.given and wait_s <= rates.HOLD_S:
                item.window = time.window(told_i.moment, rates.slack_s(rate))
                continue
            if told_i.given:
                marks[i].moment = told_i.moment
            near = wait_s <= rates.NEAR_S
            early_s = rates.LEAD_S if told_i.given and not near else 0.0
            due = records.whole_ms(here + timedelta(seconds=max(0.0, wait_s - early_s)))
            keep = due - here > timedelta(seconds=rates.KEEP_BEYOND_S)
            put_off[i] = PutOff("waiting", item.attempt - 1, due, RATE_LIMITED, keep=keep)
            if near:
                item.back_at = due
        if time.answered_at >= self._forget_at:
            self._forget_at = time.answered_at + _FORGET_EVERY_S
            await self._execute(conn, "forget_idle_buckets")

    def _bucket(self, item: Item) -> tuple[UUID, str]:
        return item.event.organization_id, item.key if self._rate is not None and self._rate.by == "key" else ""

    async def _lock_buckets(
        self, conn: Connection, which: Iterable[tuple[UUID, str]]
    ) -> tuple[list[tuple[UUID, str, float, float]], float]:
        """(organization, bucket, next_at, booked_at) of each, and the time."""
        cursor = await self._execute(conn, "lock_buckets", buckets=_json([_moved(bucket) for bucket in which]))
        rows = await cursor.fetchall()
        return [row[:4] for row in rows], max(row[4] for row in rows)

    async def _server_time(self, conn: Connection) -> _Time:
        asked_at = self._core.loop.time()
        [server_s] = await (await self._execute(conn, "server_time")).fetchone()
        return _Time(server_s, asked_at, self._core.loop.time())

    async def prepared(self, conn: Connection, items: Iterable[Item]) -> None:
        """At the end of the claim's transaction: what the worker did in it took time, and the moments of these calls
        are moved by as much. Nobody was given another since: the buckets are still locked."""
        by_bucket: dict[tuple[UUID, str], list[tuple[Item, float]]] = defaultdict(list)
        for item in items:
            if item.given is not None:
                by_bucket[self._bucket(item)].append((item, item.given))
        if self._rate is None or not by_bucket:
            return
        slack_s, time = rates.slack_s(self._rate), await self._server_time(conn)
        late_s = {bucket: time.server_s - min(moment for _, moment in given) for bucket, given in by_bucket.items()}
        late_s = {bucket: seconds for bucket, seconds in late_s.items() if seconds > slack_s / 4}
        if late_s:
            moved = [_moved(bucket, seconds=seconds) for bucket, seconds in late_s.items()]
            await self._execute(conn, "delay_buckets", buckets=_json(moved))
        for bucket, seconds in late_s.items():
            for item, moment in by_bucket[bucket]:
                item.window = time.window(moment + seconds, slack_s)

    async def another(self, item: Item) -> bool:
        """Its moment has passed before its call: another one soon, if there is one; else it is put off."""
        rate = self._rate
        assert rate is not None
        item.window = None
        bucket = self._bucket(item)

        async def work(conn: Connection) -> None:
            [(_, _, next_at, booked_at)], now = await self._lock_buckets(conn, [bucket])
            after, [told] = rates.answer(rate, rates.Bucket(next_at, booked_at), [rates.Ask(waited=True)], now)
            if told.moment - now <= rates.NEAR_S:
                moved = _moved(bucket, next_at=after.next_at, booked_at=after.booked_at)
                await self._execute(conn, "move_buckets", buckets=_json([moved]))
                item.window = (await self._server_time(conn)).window(told.moment, rates.slack_s(rate))

        await self._core.transaction(work)
        return item.window is not None

    # Breakers

    async def _ask_breakers(
        self, conn: Connection, items: Sequence[Item], asking: list[int], put_off: dict[int, PutOff]
    ) -> None:
        breaker = self._breaker
        assert breaker is not None
        for i in asking:
            items[i].destination = self._destination(items[i])
        names = sorted({name for i in asking if (name := items[i].destination) is not None})
        if not names:
            return
        states: dict[str, State] = {}
        rows = await (await self._execute(conn, "lock_open_breakers", destinations=names)).fetchall()
        for destination, *columns, _ in rows:
            states[destination] = State(*columns)
        if not rows:
            return
        now: datetime = max(row[-1] for row in rows)
        before, here = dict(states), self._core.clock.now()
        for i in asking:
            item = items[i]
            if item.destination not in states:
                continue
            states[item.destination], admission = breakers.admit(
                breaker, states[item.destination], self._core.process, self._core.policy.timeout_s, now
            )
            if isinstance(admission, Probe):
                item.probe = admission.number
            elif isinstance(admission, Wait):
                # not all at once when it is over: all but one would be put off again
                wait_s = (admission.until - now).total_seconds()
                spread_s = breaker.open_s * self._core.policy.jitter * self._core.random()
                due = records.whole_ms(here + timedelta(seconds=wait_s + spread_s))
                keep = due - here > KEEP_BEYOND
                put_off[i] = PutOff("waiting", item.attempt - 1, due, CIRCUIT_OPEN, keep=keep)
        await self._write_breakers(conn, before, states)

    def _destination(self, item: Item) -> str | None:
        try:
            name = self._worker.destination(item.event, item.target)
        except Exception:
            return None  # the handler meets the same event, and its error is what gets recorded
        return None if name is None else records.cut(str(name), 500)

    async def came_back(
        self, conn: Connection, calls: Iterable[tuple[Item, Outcome, BaseException | None]], told: Told
    ) -> None:
        """In the record's transaction: what these calls say about their destinations. `told` gets what changed."""
        told.words.clear()
        breaker = self._breaker
        if breaker is None:
            return
        outcomes: dict[str, list[breakers.Outcome]] = defaultdict(list)
        failed: set[str] = set()
        for item, outcome, error in calls:
            if item.destination is None:
                continue
            if isinstance(outcome, Done):
                outcomes[item.destination].append(breakers.Outcome("success", item.probe))
            elif error is not None and breakers.counts(breaker, error, self._core.policy.reject_on):
                failed.add(item.destination)
                bad = breakers.Outcome("failure", item.probe, kind(error), describe(error))
                outcomes[item.destination].append(bad)
            else:
                outcomes[item.destination].append(breakers.Outcome("neither", item.probe))
        if not outcomes:
            return
        rows = await (
            await self._execute(conn, "lock_breakers", failed=sorted(failed), others=sorted(set(outcomes) - failed))
        ).fetchall()
        before = {destination: State(*columns) for destination, *columns, _ in rows}
        states = {
            row[0]: breakers.after(breaker, before[row[0]], outcomes[row[0]], row[-1].astimezone(UTC)) for row in rows
        }
        await self._write_breakers(conn, before, states)
        for destination, state in states.items():
            was = before[destination]
            if state.open_until is not None and state.opened_count > was.opened_count:
                until = state.open_until.isoformat()
                words = {"destination": destination, "until": until, "error": state.error, "times": state.opened_count}
                told.words.append(("worker.circuit_opened", words))
            elif state.open_until is None and was.open_until is not None:
                told.words.append(("worker.circuit_closed", {"destination": destination}))

    async def _write_breakers(self, conn: Connection, before: Mapping[str, State], states: Mapping[str, State]) -> None:
        rows = [
            {
                "destination": destination,
                "failures": state.failures,
                "opened_count": state.opened_count,
                "open_until": state.open_until,
                "probe_by": state.probe_by,
                "probe_until": state.probe_until,
                "error_class": state.error_class,
                "error": state.error,
            }
            for destination, state in states.items()
            if state != before[destination]
        ]
        if rows:
            await self._execute(conn, "write_breakers", breakers=_json(rows))

    # Calls of which nobody knows what came

    async def note_unknown(self, conn: Connection, which: Sequence[Item]) -> None:
        """In the record's transaction: of these it is not known, or known now, whether their call was made."""
        if self._worker.resend != "safe" and which:
            rows = [{**item.place, "moment": None, "unknown": item.unknown} for item in which]
            await self._execute(conn, "write_marks", items=_json(rows))

    async def _execute(self, conn: Connection, name: str, **parameters: Any) -> Any:
        return await conn.execute(self._sql[name], {"worker": self._core.name, **parameters})


def _moved(bucket: tuple[UUID, str], **more: float) -> dict[str, Any]:
    return {"organization_id": bucket[0], "bucket": bucket[1], **more}


def _json(rows: Sequence[Mapping[str, Any]]) -> str:
    return orjson.dumps(rows).decode()
