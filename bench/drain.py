"""Draining a backlog: the same rows by one peer after the other, each as the processes it really runs as.

Rate = rows / (the broker's time of the last record - the start of streaming). The start is what the peer's own log
says, so that neither an interpreter's nor a JVM's boot counts. CPU is that of the same span.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from confluent_kafka import IsolationLevel, TopicPartition
from confluent_kafka.admin import OffsetSpec

from afluente import kafka
from afluente.local.processes import Process
from afluente.settings import KafkaSettings
from bench import check, usage
from bench.errors import BenchError
from bench.rows import EVENT_TYPE, Rows
from bench.servers import Servers

LOOK_EVERY_S = 0.05
SETTLED_AFTER_S = 1.5
DRAIN_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Drain:
    """One run of one peer. CPU in seconds of the streaming span; memory at its peak, start-up included."""

    peer: str
    rows: int
    seconds: float
    rows_per_s: float
    cpu_us_per_row: float
    rss_mb: float
    postgres_cpu_s: float
    kafka_cpu_s: float
    value_bytes: float


class Peer(Protocol):
    """Something that moves rows from event_log to a topic. `drain` makes and removes what it needs."""

    @property
    def name(self) -> str: ...

    def drain(self, servers: Servers, url: str, rows: Rows, run: int) -> Drain: ...


class Relay:
    """`afluente relay run`, with a lane of its own: nothing is published yet, so it begins with the first row."""

    name = "relay"

    def drain(self, servers: Servers, url: str, rows: Rows, run: int) -> Drain:
        prefix = f"drain{run}."
        with servers.topics(prefix) as topics:
            watch = Watch(servers, topics.event(EVENT_TYPE), rows.count)
            process = servers.relay(url, prefix, f"relay-{run}")
            try:
                ready = process.wait_for("relay.ready", timeout=60)
                watch.begin(process.pid)
                watch.until_done(process)
                begun_at = datetime.fromisoformat(ready["timestamp"].replace("Z", "+00:00")).timestamp()
                return watch.result(self.name, begun_at, url, rows, check.RELAY, servers.settings(prefix))
            finally:
                process.terminate()


class Watch:
    """Follows a topic from outside until nothing is added to it any more, with what everybody has spent by then."""

    def __init__(self, servers: Servers, topic: str, rows: int) -> None:
        self._servers, self._topic, self._rows = servers, topic, rows
        self._admin = kafka.admin(servers.settings(), log_level=0)
        self._places = [TopicPartition(topic, number) for number in range(6)]
        self._pid = 0
        self._before = self._after = (0.0, 0.0, 0.0)
        self._rss_mb = 0.0

    def begin(self, pid: int) -> None:
        """The process `pid` begins to stream now. Safe to call from another thread."""
        self._pid = pid
        self._before = self._spent()

    def until_done(self, process: Process) -> None:
        """Return once all rows are in the topic and it has not grown for a while."""
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        held, held_since = -1, time.monotonic()
        while held < self._rows or time.monotonic() - held_since < SETTLED_AFTER_S:
            now = time.monotonic()
            if process.returncode is not None:
                raise BenchError(f"{process} ended after {held} of {self._rows} rows: {process.tail(5)}")
            if now > deadline:
                raise BenchError(f"{process}: {held} of {self._rows} rows after {DRAIN_TIMEOUT_S:.0f} s")
            if (found := self._records()) != held:
                held, held_since, self._after = found, now, self._spent()
            time.sleep(LOOK_EVERY_S)
        self._rss_mb = usage.peak_rss_mb(self._pid)

    def result(
        self, peer: str, begun_at: float, url: str, rows: Rows, form: check.Form, settings: KafkaSettings
    ) -> Drain:
        """Check the topic and make the figures. BenchError when it is not what it has to be."""
        output = check.check(peer, settings, self._topic, url, rows, form)
        seconds = output.last_at - begun_at
        cpu, postgres, broker = (after - before for after, before in zip(self._after, self._before, strict=True))
        return Drain(
            peer,
            rows.count,
            seconds,
            rows.count / seconds,
            cpu / rows.count * 1e6,
            self._rss_mb,
            postgres,
            broker,
            output.value_bytes,
        )

    def _records(self) -> int:
        # Control records have offsets too, so this is at least the number of records.
        asked = {place: OffsetSpec.latest() for place in self._places}  # type: ignore[no-untyped-call]
        futures = self._admin.list_offsets(asked, isolation_level=IsolationLevel.READ_COMMITTED)
        return sum(future.result(10).offset for future in futures.values())

    def _spent(self) -> tuple[float, float, float]:
        return (
            usage.cpu_s(self._pid),
            usage.family_cpu_s(self._servers.postgres_pid),
            usage.cpu_s(self._servers.kafka_pid),
        )


def drain_all(
    peers: Sequence[Peer], servers: Servers, url: str, rows: Rows, runs: int, said: Callable[[str], None]
) -> list[Drain]:
    """`runs` rounds, in each round every peer once: a machine whose speed drifts is as slow for all of them."""
    done: list[Drain] = []
    for run in range(1, runs + 1):
        for peer in peers:
            found = peer.drain(servers, url, rows, run)
            done.append(found)
            said(
                f"drain {run}/{runs} {found.peer}: {found.rows_per_s:,.0f} rows/s, {found.cpu_us_per_row:.1f} us CPU a "
                f"row, {found.rss_mb:.0f} MB"
            )
    return done


def as_row(found: Drain) -> dict[str, Any]:
    return {
        "peer": found.peer,
        "rows": found.rows,
        "seconds": round(found.seconds, 3),
        "rows_per_s": round(found.rows_per_s),
        "cpu_us_per_row": round(found.cpu_us_per_row, 2),
        "rss_mb": round(found.rss_mb, 1),
        "postgres_cpu_s": round(found.postgres_cpu_s, 2),
        "kafka_cpu_s": round(found.kafka_cpu_s, 2),
        "value_bytes": round(found.value_bytes, 1),
    }
