"""A steady load through all of it: emit_event, the relay, three workers with an effect each, for minutes at a rate.

Lag is looked at every second from outside, for each worker and partition: how long ago the end for read_committed
readers went beyond what the worker's group has committed. At the end nothing may be missing, nor there twice.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
from confluent_kafka.admin import AdminClient

from afluente import kafka, postgres
from afluente.local.processes import Process
from bench import usage, worker_effects
from bench.errors import BenchError
from bench.report import Result
from bench.rows import ENTITY_KIND, EVENT_TYPE, add_organizations
from bench.servers import Servers, started
from bench.worker_kinds import CallWorker, EffectWorker, NoteWorker
from bench.worker_records import message
from bench.worker_runs import Ours, Work, committed_offsets, end_offsets
from producers import emit
from schemas.topics import Topics

WORKERS = (Ours(EffectWorker, "batch"), Ours(NoteWorker, "single"), Ours(CallWorker, "external"))
WRITERS = 4
PER_TRANSACTION = 5
ORGANIZATIONS = 40
LOOK_EVERY_S = 1.0
SHOW_EVERY_S = 10.0
KEEP_EACH = 10  # of the looks, in the result
ARRIVE_WITHIN_S = 120.0
PACE = 1.1
"""Writers that take longer than this times the minutes do not make the rate, and there is no figure."""


@dataclass(frozen=True)
class Plan:
    """`rate`: events a minute. `max_lag_s`: what is still well."""

    folder: Path
    rate: int = 10_000
    minutes: float = 10.0
    max_lag_s: float = 30.0
    keep: bool = False

    @property
    def transactions(self) -> int:
        """Of each writer."""
        return max(1, round(self.rate * self.minutes / WRITERS / PER_TRANSACTION))

    @property
    def events(self) -> int:
        return self.transactions * WRITERS * PER_TRANSACTION


@dataclass
class LagClock:
    """Seconds of lag of one partition from what is seen of it now and then. No I/O."""

    ends: deque[tuple[float, int]] = field(default_factory=deque)

    def lag_s(self, now: float, end: int, committed: int) -> float:
        """How long ago, at most, the first record that is not committed came. 0 when there is none."""
        self.ends.append((now, end))
        # The last look at which everything there was is committed now is before that record came; keep from it on.
        while len(self.ends) > 1 and self.ends[1][1] <= committed:
            self.ends.popleft()
        return now - self.ends[0][0] if end > committed else 0.0


@dataclass(frozen=True)
class Lag:
    """One look at one worker."""

    worker: str
    at_s: float
    records: int
    seconds: float


def run(plan: Plan, environment: Mapping[str, str], said: Callable[[str], None]) -> Result:
    """The whole load. BenchError when the writers cannot make the rate: then it is no statement about the workers."""
    began = time.monotonic()
    result = Result("load", usage.machine(), usage.versions(), _settings(plan))
    with started(plan.folder, environment, logical=False, keep=plan.keep) as servers, ExitStack() as ending:
        result.versions |= servers.versions()
        url, prefix = servers.database("load"), "load."
        worker_effects.make(url)
        conn = ending.enter_context(psycopg.connect(url, autocommit=True))
        organizations = add_organizations(conn, ORGANIZATIONS)
        ending.enter_context(servers.topics(prefix, [ours.worker for ours in WORKERS]))
        said("starting the relay and three workers")
        processes = _start(servers, url, prefix, ending)
        wrote_s, looks = _under_load(plan, servers, url, prefix, organizations, conn, processes, said)
        if wrote_s > plan.minutes * 60 * PACE + 5:
            raise BenchError(f"the writers took {wrote_s:.0f} s: this machine does not make {plan.rate:,} a minute")
        result.runs["workers"] = [_summary(conn, ours, plan, looks) for ours in WORKERS]
        result.runs["lag"] = [
            {"worker": look.worker, "at_s": round(look.at_s), "records": look.records, "lag_s": round(look.seconds, 1)}
            for number, look in enumerate(looks)
            if number // len(WORKERS) % KEEP_EACH == 0
        ]
    result.figures = figures_of(plan, wrote_s, result.runs["workers"])
    result.took_s = round(time.monotonic() - began, 1)
    return result


def figures_of(plan: Plan, wrote_s: float, workers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The worst of the workers."""
    return {
        "events": plan.events,
        "events_per_minute": round(plan.events / wrote_s * 60),
        **{name: max(worker[name] for worker in workers) for name in ("lag_s", "delay_s_p50", "delay_s_p99")},
        "missing": sum(worker["missing"] for worker in workers),
        "twice": sum(worker["twice"] for worker in workers),
    }


def is_well(plan: Plan, figures: Mapping[str, float]) -> bool:
    return figures["lag_s"] <= plan.max_lag_s and not figures["missing"] and not figures["twice"]


def _work(prefix: str) -> Work:
    return Work(prefix, Topics(prefix).event(EVENT_TYPE), events=0)


def _start(servers: Servers, url: str, prefix: str, ending: ExitStack) -> list[Process]:
    processes = [servers.relay(url, prefix, "load-relay")]
    ending.callback(lambda: [process.kill() for process in processes])
    processes += [ours.start(servers, url, _work(prefix), f"load-{ours.name}", lambda line: None) for ours in WORKERS]
    processes[0].wait_for("relay.ready", timeout=90)
    for process in processes[1:]:
        process.wait_for("worker.ready", timeout=90)
    return processes


def _under_load(
    plan: Plan,
    servers: Servers,
    url: str,
    prefix: str,
    organizations: Sequence[UUID],
    conn: psycopg.Connection[Any],
    processes: Sequence[Process],
    said: Callable[[str], None],
) -> tuple[float, list[Lag]]:
    """Write, look, show; until all effects are there and all offsets committed, or for two minutes more."""
    said(f"{plan.rate:,} events a minute for {plan.minutes:g} minutes: {plan.events:,}")
    every_s = plan.minutes * 60 / plan.transactions
    writers = [Writer(url, organizations[number::WRITERS], plan.transactions, every_s) for number in range(WRITERS)]
    watch = Watch(kafka.admin(servers.settings()), prefix)
    began = time.monotonic()
    for writer in writers:
        writer.start()
    wrote_s = shown = 0.0
    while True:
        time.sleep(LOOK_EVERY_S)
        now = time.monotonic() - began
        lags = watch.look(now)
        if now - shown >= SHOW_EVERY_S:
            shown = now
            written = sum(writer.written for writer in writers)
            behind = ", ".join(f"{lag.worker} {lag.seconds:.1f} s ({lag.records})" for lag in lags)
            said(f"{_clock(now)} of {_clock(plan.minutes * 60)}: {written:,} events, lag {behind}")
        if ended := [process for process in processes if process.returncode is not None]:
            raise BenchError(f"{ended[0]} ended: {ended[0].tail(5)}")
        if any(writer.is_alive() for writer in writers):
            continue
        wrote_s = wrote_s or now
        for writer in writers:
            if writer.failure is not None:
                raise BenchError(f"a writer failed: {writer.failure}")
        complete = worker_effects.written(conn, plan.events * len(WORKERS)) >= plan.events * len(WORKERS)
        if (complete and not any(lag.records for lag in lags)) or now - wrote_s > ARRIVE_WITHIN_S:
            return wrote_s, watch.looks


class Watch:
    """What the workers' groups have committed beside the topic's ends."""

    def __init__(self, admin: AdminClient, prefix: str) -> None:
        self._admin = admin
        self._work = _work(prefix)
        self._clocks: dict[tuple[str, int], LagClock] = {}
        self.looks: list[Lag] = []

    def look(self, now: float) -> list[Lag]:
        """A look at each worker; committed first, so that no record is counted as committed before it is there."""
        committed = {
            ours.name: committed_offsets(self._admin, ours.group(self._work), self._work.topic) for ours in WORKERS
        }
        ends = end_offsets(self._admin, self._work.topic)
        lags = []
        for name, offsets in committed.items():
            records, seconds = 0, 0.0
            for partition, end in ends.items():
                clock = self._clocks.setdefault((name, partition), LagClock())
                records += max(0, end - offsets.get(partition, 0))
                seconds = max(seconds, clock.lag_s(now, end, offsets.get(partition, 0)))
            lags.append(Lag(name, now, records, seconds))
        self.looks += lags
        return lags


class Writer(threading.Thread):
    """Commits its share at an even pace: each transaction has its moment, and being late is made up for."""

    def __init__(self, url: str, organizations: Sequence[UUID], transactions: int, every_s: float) -> None:
        super().__init__(daemon=True)
        self._url, self._organizations = url, organizations
        self._transactions, self._every_s = transactions, every_s
        self.written = 0
        self.failure: Exception | None = None

    def run(self) -> None:
        began = time.monotonic()
        try:
            with postgres.connect(self._url, application_name="afluente bench load") as conn:
                for number in range(self._transactions):
                    time.sleep(max(0.0, began + number * self._every_s - time.monotonic()))
                    organization = self._organizations[number % len(self._organizations)]
                    with conn.transaction(), postgres.act_for_sync(conn, organization):
                        for step in range(PER_TRANSACTION):
                            payload = message(number * PER_TRANSACTION + step)
                            entity = UUID(payload["conversation_id"])
                            emit(conn, EVENT_TYPE, entity_kind=ENTITY_KIND, entity_id=entity, payload=payload)
                    self.written += PER_TRANSACTION
        except Exception as error:
            self.failure = error


def _summary(conn: psycopg.Connection[Any], ours: Ours, plan: Plan, looks: Sequence[Lag]) -> dict[str, Any]:
    lags = [look for look in looks if look.worker == ours.name]
    count, distinct, p50, p99, slowest = conn.execute(_EFFECTS, [ours.worker]).fetchone() or (0, 0, 0, 0, 0)
    (done,) = conn.execute(_DONE, [ours.worker]).fetchone() or (0,)
    return {
        "worker": ours.name,
        "effects": count,
        "missing": plan.events - min(distinct, done),
        "twice": count - distinct,
        "lag_s": round(max(look.seconds for look in lags), 1),
        "lag_records": max(look.records for look in lags),
        "delay_s_p50": round(p50 or 0.0, 3),
        "delay_s_p99": round(p99 or 0.0, 3),
        "delay_s_max": round(slowest or 0.0, 3),
    }


# From the row's own time, within its transaction, to the effect's.
_EFFECTS = """
SELECT count(*), count(DISTINCT event_id),
       percentile_cont(0.5) WITHIN GROUP (ORDER BY extract(epoch FROM created_at - emitted_at))::float8,
       percentile_cont(0.99) WITHIN GROUP (ORDER BY extract(epoch FROM created_at - emitted_at))::float8,
       max(extract(epoch FROM created_at - emitted_at))::float8
  FROM bench_effect WHERE worker = %s
"""
_DONE = "SELECT count(*) FROM event_delivery WHERE worker = %s AND state = 'done'"


def _settings(plan: Plan) -> dict[str, Any]:
    return {
        "rate": plan.rate,
        "minutes": plan.minutes,
        "events": plan.events,
        "max_lag_s": plan.max_lag_s,
        "writers": WRITERS,
        "transactions_of": PER_TRANSACTION,
        "workers": [ours.worker for ours in WORKERS],
        "postgres_durable": True,
    }


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
