"""One run of one peer over a filled topic: started as the process it is, watched from outside, its work checked.

Rate = effects after the first fifth / the time they took, by the server's clock (worker_effects.py). CPU is the
process's from its being ready to the last effect, start-up excluded; memory is its peak, start-up included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Protocol

import psycopg
from confluent_kafka import (
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, OffsetSpec

from afluente import kafka
from afluente.local.processes import Line, Process
from bench import usage, worker_effects
from bench.errors import BenchError
from bench.servers import Servers
from bench.worker_records import PARTITIONS
from consumers.worker import Worker

READY_WITHIN_S = 90.0
LOOK_EVERY_S = 0.05
STALLED_AFTER_S = 90.0
STOP_WITHIN_S = 60.0
FORGET_WITHIN_S = 60.0


@dataclass(frozen=True)
class Work:
    """A topic with `events` in it, the last of each partition a control record at most. `bad` of them get no effect."""

    prefix: str
    topic: str
    events: int
    bad: int = 0


class Peer(Protocol):
    """Something that makes effects of events."""

    @property
    def name(self) -> str: ...

    @property
    def ready_event(self) -> str:
        """The log line that says it has its partitions."""
        ...

    @property
    def worker(self) -> str | None:
        """The name of the worker when it is ours, None when it keeps its idempotency rows in bench_inbox."""
        ...

    def group(self, work: Work) -> str: ...

    def start(self, servers: Servers, url: str, work: Work, label: str, heard: Callable[[Line], None]) -> Process: ...


@dataclass(frozen=True)
class Ours:
    """A worker of worker_kinds.py in a process of the workers' own command."""

    kind: type[Worker]
    name: str = "afluente"
    ready_event: str = "worker.ready"

    @property
    def worker(self) -> str:
        return self.kind.name

    def group(self, work: Work) -> str:
        return f"{work.prefix}{self.kind.name}"

    def start(self, servers: Servers, url: str, work: Work, label: str, heard: Callable[[Line], None]) -> Process:
        return servers.worker(f"{self.kind.__module__}:{self.kind.__qualname__}", url, work.prefix, label, heard)


@dataclass(frozen=True)
class Run:
    """One run. `per_s` is steady; `whole_per_s` counts from its being ready to the last effect. CPU and memory are the
    peer's process's, in seconds and MB of 10**6 bytes."""

    peer: str
    events: int
    seconds: float
    per_s: float
    whole_per_s: float
    per_transaction: float
    cpu_s_per_100k: float
    rss_mb: float
    postgres_cpu_s: float
    kafka_cpu_s: float


def as_row(run: Run) -> dict[str, Any]:
    digits = {"seconds": 3, "per_s": 0, "whole_per_s": 0}
    return {
        name: round(value, digits.get(name, 2)) if isinstance(value, float) else value
        for name, value in asdict(run).items()
    }


def measure(servers: Servers, peer: Peer, work: Work, label: str) -> Run:
    """One run in a database of its own. BenchError when it did less, or other, than the work."""
    with at_work(servers, peer, work, label) as (process, conn, started):
        started.wait(process, peer.ready_event)
        wait_for_effects(conn, process, work.events - work.bad)
        after = _spent(servers, process.pid)
        rss_mb = usage.peak_rss_mb(process.pid)
        timing = worker_effects.timing(conn)
        process.terminate(STOP_WITHIN_S)
        worker_effects.check(conn, peer.name, work.events, work.bad, peer.worker)
        _check_offsets(servers, peer, work)
    cpu, postgres, broker = (now - before for now, before in zip(after, started.spent, strict=True))
    seconds = timing.last_at - timing.steady_at
    return Run(
        peer=peer.name,
        events=work.events,
        seconds=seconds,
        per_s=timing.steady_effects / seconds,
        whole_per_s=(work.events - work.bad) / (timing.last_at - started.at),
        per_transaction=timing.per_transaction,
        cpu_s_per_100k=cpu / work.events * 100_000,
        rss_mb=rss_mb,
        postgres_cpu_s=postgres,
        kafka_cpu_s=broker,
    )


def rounds(
    servers: Servers,
    contenders: Sequence[tuple[Peer, Work]],
    part: str,
    runs: int,
    said: Callable[[str], None],
) -> list[Run]:
    """`runs` rounds, in each round every peer once: a machine whose speed drifts is as slow for all of them."""
    done: list[Run] = []
    for number in range(1, runs + 1):
        for peer, work in contenders:
            found = measure(servers, peer, work, f"{part}_{peer.name}_{number}")
            done.append(found)
            said(
                f"{part} {number}/{runs} {found.peer}: {found.per_s:,.0f}/s, {found.cpu_s_per_100k:.2f} s CPU for "
                f"100,000, {found.rss_mb:.0f} MB"
            )
    return done


class Started:
    """When a process was ready, and what everybody had spent by then. `heard` is called in the thread that reads its
    log, so that the moment is the line's and not that of somebody's next look."""

    def __init__(self, servers: Servers, ready_event: str) -> None:
        self._servers, self._ready_event = servers, ready_event
        self.pid = 0
        self.at = 0.0
        self.spent = (0.0, 0.0, 0.0)

    def heard(self, line: Line) -> None:
        if not self.at and line.get("event") == self._ready_event:
            self.at = at(line)
            self.spent = _spent(self._servers, self.pid) if self.pid else self.spent

    def wait(self, process: Process, ready_event: str) -> None:
        process.wait_for(ready_event, timeout=READY_WITHIN_S)
        if not any(self.spent):  # it was ready before anybody knew its pid
            self.spent = _spent(self._servers, process.pid)


@contextmanager
def at_work(
    servers: Servers, peer: Peer, work: Work, label: str
) -> Iterator[tuple[Process, psycopg.Connection[Any], Started]]:
    """A process of the peer in a database of its own, both gone at the end, and with them its group's offsets."""
    label = label.replace("-", "_")
    url = servers.database(label)
    process: Process | None = None
    complete = False
    try:
        worker_effects.make(url)
        servers.checkpoint()
        started = Started(servers, peer.ready_event)
        process = peer.start(servers, url, work, label, started.heard)
        started.pid = process.pid
        with psycopg.connect(url, autocommit=True) as conn:
            yield process, conn, started
        complete = True
    finally:
        if process is not None:
            process.kill()
        servers.drop(label)
        if complete:  # else what went wrong is to be heard, and the servers end anyway
            _forget(kafka.admin(servers.settings()), peer.group(work))


def at(line: Line) -> float:
    """The moment of a log line, seconds since 1970."""
    return datetime.fromisoformat(str(line["timestamp"]).replace("Z", "+00:00")).timestamp()


def end_offsets(admin: AdminClient, topic: str) -> dict[int, int]:
    """Where each partition ends for who reads read_committed."""
    asked = {TopicPartition(topic, number): OffsetSpec.latest() for number in range(PARTITIONS)}  # type: ignore[no-untyped-call]
    futures = admin.list_offsets(asked, isolation_level=IsolationLevel.READ_COMMITTED)
    return {place.partition: future.result(30).offset for place, future in futures.items()}


def committed_offsets(admin: AdminClient, group: str, topic: str) -> dict[int, int]:
    """What the group has committed; 0 where it has nothing."""
    places = [TopicPartition(topic, number) for number in range(PARTITIONS)]
    (future,) = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group, places)]).values()
    return {place.partition: max(place.offset, 0) for place in future.result(30).topic_partitions or ()}


def _check_offsets(servers: Servers, peer: Peer, work: Work) -> None:
    """What was done is committed too: one offset of a control record may be left in each partition, no more."""
    admin = kafka.admin(servers.settings())
    committed = committed_offsets(admin, peer.group(work), work.topic)
    left = {
        partition: end - committed.get(partition, 0)
        for partition, end in end_offsets(admin, work.topic).items()
        if end - committed.get(partition, 0) > 1
    }
    if left:
        raise BenchError(f"{peer.name} stopped with offsets that it has not committed: {left} (partition: records)")


def wait_for_effects(conn: psycopg.Connection[Any], process: Process, wanted: int) -> None:
    """BenchError when the process ends before, or makes none for a while."""
    held, held_since = -1, time.monotonic()
    while (found := worker_effects.written(conn, wanted)) < wanted:
        if process.returncode is not None:
            raise BenchError(f"{process} ended after {found} of {wanted} effects: {process.tail(5)}")
        if found != held:
            held, held_since = found, time.monotonic()
        elif time.monotonic() - held_since > STALLED_AFTER_S:
            raise BenchError(f"{process}: {found} of {wanted} effects, and no more for {STALLED_AFTER_S:.0f} s")
        time.sleep(LOOK_EVERY_S)


def _forget(admin: AdminClient, group: str) -> None:
    """The next run of the same group begins where this one did. Members that did not say goodbye are waited out."""
    deadline = time.monotonic() + FORGET_WITHIN_S
    while True:
        (future,) = admin.delete_consumer_groups([group]).values()
        try:
            future.result(30)
            return
        except KafkaException as error:
            code = error.args[0].code()
            if code == KafkaError.GROUP_ID_NOT_FOUND:
                return
            if code != KafkaError.NON_EMPTY_GROUP or time.monotonic() > deadline:
                raise BenchError(f"group {group} could not be deleted: {error.args[0].str()}") from None
        time.sleep(LOOK_EVERY_S)


def _spent(servers: Servers, pid: int) -> tuple[float, float, float]:
    return (usage.cpu_s(pid), usage.family_cpu_s(servers.postgres_pid), usage.cpu_s(servers.kafka_pid))
