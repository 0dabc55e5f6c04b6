"""From a commit to a read_committed consumer, at a steady rate, and what an idle relay costs.

Both ends stamp with this machine's clock: the writer when COMMIT has returned, the consumer when it has the record.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psycopg

from afluente import kafka, postgres
from afluente.settings import KafkaSettings
from bench import usage
from bench.errors import BenchError
from bench.rows import BODY, ENTITY_KIND, EVENT_TYPE, add_organizations
from bench.servers import Servers

PER_WRITER = 500  # transactions a second that one connection is asked for
WARM_UP_S = 2.0
IDLE_S = 10.0
ARRIVE_WITHIN_S = 30.0
ACHIEVED_AT_LEAST = 0.95  # of the rate; else the delays are those of another rate, and no figure is made of them


@dataclass(frozen=True)
class Delays:
    """One run at one rate. Milliseconds; `achieved` is the rate that the writers really made."""

    rate: int
    achieved: float
    samples: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    relay_cpu_percent: float


@dataclass(frozen=True)
class Steady:
    """All runs, and the CPU of an idle relay and its Postgres in percent of a core."""

    delays: list[Delays]
    idle_cpu_percent: list[float]


def measure(servers: Servers, rates: Sequence[int], seconds: float, runs: int) -> Steady:
    """In each run: idle, then each rate for `seconds`. BenchError when an event does not arrive, or arrives twice."""
    url, prefix = servers.database("steady"), "steady."
    with psycopg.connect(url, autocommit=True) as conn:
        add_organizations(conn)
    steady = Steady([], [])
    with servers.topics(prefix) as topics:
        process = servers.relay(url, prefix, "relay-steady")
        try:
            process.wait_for("relay.ready", timeout=60)
            for run in range(runs):
                steady.idle_cpu_percent.append(_idle(servers, process.pid))
                for rate in rates:
                    arrivals = Arrivals(servers.settings(prefix), topics.event(EVENT_TYPE), f"bench-{run}-{rate}")
                    steady.delays.append(_at_rate(servers, url, rate, seconds, arrivals, process.pid))
        finally:
            process.terminate()
    return steady


def _idle(servers: Servers, pid: int) -> float:
    before, began = usage.cpu_s(pid) + usage.family_cpu_s(servers.postgres_pid), time.monotonic()
    time.sleep(IDLE_S)
    spent = usage.cpu_s(pid) + usage.family_cpu_s(servers.postgres_pid) - before
    return 100 * spent / (time.monotonic() - began)


def _at_rate(servers: Servers, url: str, rate: int, seconds: float, arrivals: Arrivals, pid: int) -> Delays:
    stamps = servers.folder / "commits.jsonl"
    arrivals.start()
    arrivals.ready.wait(30)
    spent, began = usage.cpu_s(pid), time.monotonic()
    command = [sys.executable, "-m", "bench.latency", str(rate), str(seconds + WARM_UP_S), str(stamps)]
    done = subprocess.run(command, input=url, capture_output=True, text=True, env=dict(servers.environment))
    spent, took = usage.cpu_s(pid) - spent, time.monotonic() - began
    if done.returncode != 0:
        raise BenchError(f"the writers at {rate}/s failed: {done.stderr.strip()[-500:]}")
    commits = {event_id: at for event_id, at in map(json.loads, stamps.read_text().splitlines())}
    arrivals.wait_for(len(commits))
    arrivals.end()
    missing = commits.keys() - arrivals.at.keys()
    if missing or arrivals.records != len(commits):
        raise BenchError(f"{rate}/s: {len(commits)} commits, {arrivals.records} records, {len(missing)} missing")
    first = min(commits.values())
    counted = sorted((arrivals.at[i] - at) * 1000 for i, at in commits.items() if at - first >= WARM_UP_S)
    achieved = len(counted) / (max(commits.values()) - first - WARM_UP_S)
    return Delays(
        rate,
        achieved,
        len(counted),
        counted[len(counted) // 2],
        counted[int(len(counted) * 0.99)],
        counted[-1],
        100 * spent / took,
    )


class Arrivals(threading.Thread):
    """A consumer that notes when it had each event."""

    def __init__(self, settings: KafkaSettings, topic: str, group: str) -> None:
        super().__init__(daemon=True)
        self.at: dict[str, float] = {}
        self.records = 0
        self.ready = threading.Event()
        self._end = threading.Event()
        self._wanted = sys.maxsize
        self._complete = threading.Event()
        self._consumer = kafka.consumer(
            settings, group, fetch_wait_max_ms=5, auto_offset_reset="latest", enable_partition_eof=True
        )
        # Ready when the end of each partition was seen: from then on nothing is missed.
        self._unread = set(range(6))
        self._consumer.subscribe([topic])

    def run(self) -> None:
        while not self._end.is_set():
            for record in self._consumer.consume(200, 0.005):
                if record.error() is None:
                    self.records += 1
                    self.at[dict(record.headers() or [])["ce_id"].decode()] = time.time()  # type: ignore[union-attr]
                elif self._unread:
                    self._unread.discard(record.partition() or 0)
                    if not self._unread:
                        self.ready.set()
            if self.records >= self._wanted:
                self._complete.set()

    def wait_for(self, records: int) -> None:
        self._wanted = records
        self._complete.wait(ARRIVE_WITHIN_S)

    def end(self) -> None:
        self._end.set()
        self.join(10)
        self._consumer.close()


def write(url: str, rate: int, seconds: float, stamps: Path) -> None:
    """Commit single-row transactions at an even pace, and leave [event id, seconds since 1970] of each in `stamps`."""
    count = max(1, -(-rate // PER_WRITER))
    found: list[list[tuple[str, float]]] = [[] for _ in range(count)]
    begin = time.monotonic() + 0.5
    threads = [
        threading.Thread(target=_write, args=(url, begin + n / rate, count / rate, begin + seconds, found[n]))
        for n in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stamps.write_text("".join(json.dumps(pair) + "\n" for pairs in found for pair in pairs))


def _write(url: str, next_at: float, every_s: float, until: float, found: list[tuple[str, float]]) -> None:
    payload = json.dumps(
        {
            "direction": "in",
            "conversation_id": "0193f2a0-2222-7000-8000-000000000002",
            "contact_id": "0193f2a0-3333-7000-8000-000000000003",
            "body": BODY,
            "waha_message_id": "false_5519910000000@c.us_3EB0",
            "message_id": "0193f2a0-4444-7000-8000-000000000004",
        }
    )
    with postgres.connect(url, application_name="bench-writer", autocommit=True) as conn:
        organizations = [row[0] for row in conn.execute("SELECT id FROM organizations").fetchall()]
        while next_at < until:
            if (wait := next_at - time.monotonic()) > 0:
                time.sleep(wait)
            organization = organizations[len(found) % len(organizations)]
            row = conn.execute(
                "SELECT emit_event_for(%s, %s, %s, %s, %s, '{}')::text",
                [organization, EVENT_TYPE, ENTITY_KIND, organization, payload],
            ).fetchone()
            at = time.time()
            assert row is not None
            found.append((row[0], at))
            next_at += every_s


if __name__ == "__main__":
    write(sys.stdin.read(), int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3]))
