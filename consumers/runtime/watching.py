"""How far this process is behind, and whether what is behind moves: looked at every few seconds beside the work.

What must stay true: nothing here is waited for by the work. Kafka is asked by a client of its own in another thread,
never by the poll thread; when it or Postgres is away the numbers stay, and nobody is called ill for it.

A partition has stalled when records are there to be handled, and for so long nothing of it was read, finished or
committed though nothing explains that: no pause, no retry that waits for its time, no limit, no handler within its
timeout, no Postgres that is away. One of a retry topic has stalled when it is not read ahead. What is parked is read
in turns, so it is judged as one.

A member that gets no partition hears nothing of its group (KIP-848): the group is asked whether it has joined.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psycopg
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from psycopg_pool import PoolClosed, PoolTimeout

import sql
from afluente import kafka
from afluente.settings import KafkaSettings
from afluente.telemetry.metrics import Sample
from consumers.runtime import status
from consumers.runtime.core import Core
from consumers.runtime.judging import describe, kind
from consumers.runtime.parking import in_hand
from consumers.runtime.places import Place

_QUERIES = sql.queries("worker_control")


@dataclass(slots=True)
class _Seen:
    """A partition as it was when it last moved."""

    progress: tuple[int | None, ...]
    since_s: float
    lag: int = 0
    stalled: bool = False


class Watching:
    """`loop` runs as long as the worker; `stalled` and `samples` may be asked from any thread."""

    def __init__(self, core: Core, kafka_settings: KafkaSettings, joined: Callable[[], None]) -> None:
        self._core = core
        self._kafka = kafka_settings
        self._joined = joined
        self._admin: AdminClient | None = None
        self._seen: dict[Place, _Seen] = {}
        self._surplus: _Seen | None = None
        self._deliveries: dict[str, int] = {}
        self._dead: dict[str, int] = {}
        self._breakers = 0

    async def loop(self) -> None:
        while True:
            await asyncio.sleep(self._core.options.watch_every_s)
            try:
                await self.look()
            except Exception as error:  # whatever it is, the worker works on without these numbers
                self._core.say("worker.watch_failed", level="warning", error=f"{kind(error)}: {describe(error)}")

    async def look(self) -> None:
        places = self._core.poller.places
        if not self._core.ready:
            await self._ask_whether_joined()
        try:
            ends, begins = await self._ask_kafka(places)
        except KafkaException:
            # Not to be told now: what stands still meanwhile is no fault of this process.
            self._seen.clear()
            self._surplus = None
        else:
            self._judge(places, ends, begins, time.monotonic())
            self._judge_surplus(places, time.monotonic())
        try:
            async with asyncio.timeout(10.0), self._core.connection() as conn:
                parameters = {"worker": self._core.name, "rows": status.COUNT_ROWS}
                rows = await (await conn.execute(_QUERIES["open_deliveries"], parameters)).fetchall()
                dead = await (await conn.execute(_QUERIES["dead_by_type"], parameters)).fetchall()
                [self._breakers] = await (await conn.execute(_QUERIES["open_breakers"], parameters)).fetchone() or (0,)
        except (TimeoutError, psycopg.Error, PoolTimeout, PoolClosed):
            return
        counts = {state: (count, due) for state, count, _, due, _ in rows}
        self._deliveries = {state: counts.get(state, (0, 0))[0] for state in ("claimed", "waiting", "blocked")}
        self._deliveries["due"] = counts.get("waiting", (0, 0))[1]
        self._dead = dict.fromkeys(self._dead, 0) | dict(dead)

    async def _ask_kafka(self, places: list[Place]) -> tuple[dict[status.Place, int], dict[status.Place, int]]:
        """Where the partitions end, and where those begin that have no committed offset yet."""
        # Futures of the client's own thread. A thread of ours that waits for them would keep a process with a stop
        # signal from ending while the broker is away.
        ends = status.ask_ends(self._client(), [(place.topic, place.partition) for place in places])
        fresh = [(place.topic, place.partition) for place in places if place.committed is None]
        begins = status.ask_begins(self._client(), fresh)
        answers = await asyncio.gather(*(asyncio.wrap_future(future) for future in [*ends.values(), *begins.values()]))
        offsets = [int(answer.offset) for answer in answers]
        return dict(zip(ends, offsets, strict=False)), dict(zip(begins, offsets[len(ends) :], strict=True))

    def _client(self) -> AdminClient:
        if self._admin is None:
            self._admin = kafka.admin(self._kafka)
        return self._admin

    async def _ask_whether_joined(self) -> None:
        group, member_id = self._kafka.group_id(self._core.name), self._core.poller.member_id
        [asked] = self._client().describe_consumer_groups([group]).values()
        try:
            members = (await asyncio.wrap_future(asked)).members
        except KafkaException:
            return  # the first member is not there yet; the next look asks again
        if member_id and any(member.member_id == member_id for member in members):
            self._joined()

    def _judge(
        self, places: list[Place], ends: dict[status.Place, int], begins: dict[status.Place, int], now_s: float
    ) -> None:
        seen: dict[Place, _Seen] = {}
        for place in places:
            name = (place.topic, place.partition)
            if not place.alive or name not in ends:
                continue
            progress: tuple[int | None, ...] = (place.last,)
            at = place.committed if place.committed is not None else begins.get(name, 0)
            if place.waits:
                at = max(at, place.last + 1)  # what was read waits for its time
            else:
                runs = self._core.figures.runs if place.running else 0
                progress = (place.last, place.committed, place.records, runs)
            known = self._seen.get(place)
            if known is None or known.progress != progress or self._is_explained(place):
                known = _Seen(progress, now_s)
            known.lag = max(0, ends[name] - at)
            if not known.lag:
                known.since_s = now_s
            still_s = now_s - known.since_s
            limit_s = self._core.options.stalled_s + (self._core.policy.timeout_s if place.running else 0.0)
            stalled = still_s > limit_s
            if stalled and not known.stalled:
                self._core.say(
                    "worker.stalled",
                    level="error",
                    topic=place.topic,
                    partition=place.partition,
                    lag=known.lag,
                    seconds=round(still_s, 1),
                    in_hand=place.records,
                    running=place.running,
                )
            known.stalled = stalled
            seen[place] = known
        self._seen = seen

    def _judge_surplus(self, places: list[Place], now_s: float) -> None:
        """What is parked and can be read again: whoever's turn it is, something of it must move."""
        core = self._core
        parked = [each for place in places for each in list(place.parked.values())]
        lag = sum(max(0, each.main.last + 1 - each.at) for each in parked if each.marked)
        running = sum(each.running for each in parked)
        progress: tuple[int | None, ...] = tuple(number for each in parked for number in (each.at, each.mark))
        if running:
            progress += (core.figures.runs,)
        known = self._surplus
        # What of it is in hand waits for its time or its limit; or others have all that may be in hand.
        waits = any(each.records for each in parked) and not running and not core.lanes.has_ready
        waits = waits or sum(place.records for place in places if not place.waits) >= core.options.limits.records
        explained = core.paused is not None or core.stopping or core.postgres_away or waits
        if known is None or not lag or known.progress != progress or explained:
            known = _Seen(progress, now_s)
        known.lag = lag
        still_s = now_s - known.since_s
        stalled = still_s > core.options.stalled_s + (core.policy.timeout_s if running else 0.0)
        if stalled and not known.stalled:
            core.say(
                "worker.stalled", level="error", parked=len(parked), lag=lag, seconds=round(still_s, 1), running=running
            )
        known.stalled = stalled
        self._surplus = known

    def _is_explained(self, place: Place) -> bool:
        """Is there a reason for it to stand still now?"""
        core = self._core
        if core.paused is not None or core.stopping or core.postgres_away:
            return True
        if place.waits or not place.records:
            return place.paused  # others have all that may be in hand: what they do with it is judged with them
        if place.running:
            return False
        # All of it waits. That is right for what is not due, or not allowed yet; not for what could begin.
        return not (core.lanes.has_ready and core.lanes.running == 0)

    @property
    def stalled(self) -> tuple[str, ...]:
        now_s = time.monotonic()
        found = tuple(
            f"{place.topic}[{place.partition}] is {seen.lag} records behind and has not moved for "
            f"{now_s - seen.since_s:.0f} s ({place.records} in hand, {place.running} running)"
            for place, seen in list(self._seen.items())
            if seen.stalled and place.alive
        )
        if (surplus := self._surplus) is not None and surplus.stalled:
            still_s = now_s - surplus.since_s
            found += (f"of what is parked about {surplus.lag} records are not read, for {still_s:.0f} s",)
        return found

    def samples(self) -> Iterator[Sample]:
        core, worker, now_s = self._core, self._core.name, time.monotonic()
        places = core.poller.places
        for place in places:
            seen = self._seen.get(place)
            if seen is not None and not place.waits:
                labels = (worker, place.topic, str(place.partition))
                yield "afluente_worker_lag_records", labels, seen.lag
                # Of what is not read yet, at least for how long it has not been read.
                age_s = place.oldest_age_s() if place.records else now_s - seen.since_s if seen.lag else 0.0
                yield "afluente_event_log_lag_seconds", labels, age_s
        for due, among in (("now", False), ("ahead", True)):
            of = [place for place in in_hand(places) if place.waits is among]
            yield "afluente_worker_in_hand_records", (worker, due), sum(place.records for place in of)
            yield "afluente_worker_in_hand_bytes", (worker, due), sum(place.bytes for place in of)
        states = {
            "assigned": len(places),
            "held": sum(place.paused for place in places),
            "stalled": sum(seen.stalled for seen in list(self._seen.values())),
        }
        for state, count in states.items():
            yield "afluente_worker_partitions", (worker, state), count
        yield "afluente_worker_lanes_running", (worker,), core.lanes.running
        yield "afluente_worker_ready_deliveries", (worker,), len(core.lanes)
        for state, count in self._deliveries.items():
            yield "afluente_worker_deliveries", (worker, state), count
        parked = [parked for place in places for parked in list(place.parked.values())]
        yield "afluente_worker_parked_organizations", (worker,), len({each.key for each in parked})
        yield "afluente_worker_parked_records", (worker,), sum(each.passed_over for each in parked)
        yield "afluente_worker_open_breakers", (worker,), self._breakers
        for event_type, count in self._dead.items():
            yield "afluente_event_log_dlq_size", (worker, event_type), count
        yield "afluente_worker_paused", (worker,), core.paused is not None
        yield "afluente_worker_poll_age_seconds", (worker,), now_s - core.poller.turned_at
