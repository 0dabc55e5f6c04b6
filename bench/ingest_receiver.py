"""One run of one endpoint: a process of its own, the load generator in another, every row counted at the end.

Each run has a database of its own. CPU is the endpoint's process's and Postgres', from the end of the warm-up to the
last answer.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psycopg

from afluente.local.processes import Line, Process
from afluente.secrets import Keyring
from bench import usage
from bench.errors import BenchError
from bench.ingest_posts import Address, connect, requests
from bench.peers import bare_fastapi
from bench.servers import Database

READY_WITHIN_S = 60.0
LOAD_WITHIN_S = 600.0
OURS, BARE = "afluente", "bare"

# What must be there when every post was new and taken: a parent and a child of each, and an event of each child.
_STORED = """
SELECT count(*) FILTER (WHERE parent_id IS NULL AND status = 'routed' AND raw_body IS NOT NULL),
       count(*) FILTER (WHERE parent_id IS NOT NULL AND status = 'received'),
       (SELECT count(DISTINCT entity_id) FROM event_log WHERE event_type = 'webhook.received'),
       (SELECT count(*) FROM event_log)
  FROM webhook_events
"""
_BARE_STORED = "SELECT count(*), count(DISTINCT raw_body) FROM bench_bare"


@dataclass(frozen=True)
class Load:
    """`posts` timed ones after `warm_up` others, over `connections`."""

    posts: int
    warm_up: int
    connections: int


@dataclass(frozen=True)
class Run:
    """One run. CPU in microseconds for each post."""

    peer: str
    connections: int
    posts: int
    seconds: float
    per_s: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    cpu_us: float
    postgres_cpu_us: float
    rss_mb: float

    def as_row(self) -> dict[str, Any]:
        digits = {"seconds": 3, "per_s": 0, "cpu_us": 0, "postgres_cpu_us": 0, "rss_mb": 1}
        return {
            name: round(value, digits.get(name, 2)) if isinstance(value, float) else value
            for name, value in asdict(self).items()
        }


def rounds(servers: Database, load: Load, runs: int, label: str, said: Callable[[str], None]) -> list[Run]:
    """`runs` rounds, in each both, by turns in which of them begins."""
    done = []
    for number in range(1, runs + 1):
        for peer in (OURS, BARE) if number % 2 else (BARE, OURS):
            found = measure(servers, peer, load, f"{label}_{peer}_{number}")
            done.append(found)
            said(
                f"{label} {number}/{runs} {peer}: {found.per_s:,.0f}/s, p99 {found.p99_ms:.1f} ms, "
                f"{found.cpu_us:.0f} + {found.postgres_cpu_us:.0f} us CPU a post"
            )
    return done


def measure(servers: Database, peer: str, load: Load, label: str) -> Run:
    """One run. BenchError when one post was not taken, or a row is missing."""
    url = servers.database(label)
    try:
        key = Keyring.generate()
        addresses = connect(url, Keyring.parse(key))
        with psycopg.connect(url, autocommit=True) as conn:
            conn.execute(bare_fastapi.TABLE)
        servers.checkpoint()
        endpoint = _start(servers, peer, url, key, label)
        try:
            ready = endpoint.wait_for("web.ready", timeout=READY_WITHIN_S)
            run = _under_load(servers, peer, endpoint, ready, addresses, load, label)
        finally:
            endpoint.terminate()
        check(url, peer, load)
        return run
    finally:
        servers.drop(label)


def _start(servers: Database, peer: str, url: str, key: str, label: str) -> Process:
    if peer == OURS:
        more = {"AFLUENTE_SECRETS_KEY": key}
        return servers.process(["web", "run", "--only", "ingest", "--port", "0"], url, label, more)
    environment = {**servers.environment, "PEER_DATABASE_URL": url, "PYTHONUNBUFFERED": "1"}
    return Process([sys.executable, "-m", "bench.peers.bare_fastapi"], environment, servers.folder / f"{label}.log")


def _under_load(
    servers: Database,
    peer: str,
    endpoint: Process,
    ready: Line,
    addresses: Sequence[Address],
    load: Load,
    label: str,
) -> Run:
    path = servers.folder / f"{label}.requests"
    path.write_bytes(pickle.dumps(requests(addresses, load.warm_up + load.posts)))
    spent: list[tuple[float, float]] = []

    def heard(line: Line) -> None:
        if line.get("event") in ("load.warm", "load.done"):
            spent.append((usage.cpu_s(endpoint.pid), usage.family_cpu_s(servers.postgres_pid)))

    words = [str(ready["host"]), str(ready["port"]), str(path), str(load.connections), str(load.warm_up)]
    generator = Process(
        [sys.executable, "-m", "bench.ingest_load", *words],
        {**servers.environment, "PYTHONUNBUFFERED": "1"},
        servers.folder / f"{label}.load.log",
        heard,
    )
    try:
        done = generator.wait_for("load.done", timeout=LOAD_WITHIN_S)
    finally:
        generator.terminate()
        path.unlink()
    if done["statuses"] != {"200": load.posts + load.warm_up} or done["lost"] or done["answered"] != load.posts:
        raise BenchError(f"{peer} did not take every post: {done['statuses']}, {done['lost']} connections lost")
    cpu, postgres = (after - before for before, after in zip(*spent, strict=True))
    return Run(
        peer=peer,
        connections=load.connections,
        posts=load.posts,
        seconds=done["seconds"],
        per_s=load.posts / done["seconds"],
        p50_ms=done["p50_ms"],
        p99_ms=done["p99_ms"],
        max_ms=done["max_ms"],
        cpu_us=cpu / load.posts * 1e6,
        postgres_cpu_us=postgres / load.posts * 1e6,
        rss_mb=usage.peak_rss_mb(endpoint.pid),
    )


def check(url: str, peer: str, load: Load) -> None:
    posts = load.posts + load.warm_up
    with psycopg.connect(url) as conn:
        found = conn.execute(_STORED if peer == OURS else _BARE_STORED).fetchone() or ()
    if set(found) != {posts}:
        raise BenchError(f"{peer} answered {posts} posts with 200 and stored {found}")
