"""The bench of ingest: which measurements, in which order, and the figures that come out of them.

A figure is the median of its runs; a ratio is the median of the ratios round by round, both sides of a round one after
the other, by turns in which of them begins. What was not run has no figure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from statistics import median

from bench import ingest_import, ingest_normalise, ingest_receiver, ingest_worker, usage
from bench.ingest_receiver import BARE, OURS, Load
from bench.report import Result
from bench.servers import Database, Servers, postgres_alone, started

NORMALISE_TIMES = 200
ALONE_SHARE = 10
"""Over one connection a tenth of the posts: each waits for the one before it."""


class Part(StrEnum):
    receiver = "receiver"
    normalise = "normalise"
    worker = "worker"
    imports = "import"


@dataclass(frozen=True)
class Plan:
    """`posts`: of each receiver run, after a fifth as many to warm up. `deliveries`: for the normalise worker.
    `rows`: contact events to import."""

    folder: Path
    posts: int = 10_000
    connections: int = 32
    deliveries: int = 2_000
    rows: int = 1_000_000
    runs: int = 3
    parts: Sequence[Part] = tuple(Part)
    keep: bool = False


def run(plan: Plan, environment: Mapping[str, str], said: Callable[[str], None]) -> Result:
    """Do all of it on servers of its own. BenchError when one side, ours included, did less than the work."""
    began = time.monotonic()
    result = Result("ingest", usage.machine(), usage.versions(), _settings(plan))
    with ExitStack() as ending:
        servers: Database
        if Part.worker in plan.parts:
            servers = ending.enter_context(started(plan.folder, environment, logical=False, keep=plan.keep))
        else:
            servers = ending.enter_context(postgres_alone(plan.folder, environment, keep=plan.keep))
        result.versions |= servers.versions()
        if Part.receiver in plan.parts:
            _receiver(plan, servers, result, said)
        if Part.normalise in plan.parts:
            _normalise(plan, result, said)
        if isinstance(servers, Servers):
            _worker(plan, servers, result, said)
        if Part.imports in plan.parts:
            _import(plan, servers, result, said)
    result.took_s = round(time.monotonic() - began, 1)
    result.figures = {name: float(f"{value:.4g}") for name, value in result.figures.items()}
    return result


def _receiver(plan: Plan, servers: Database, result: Result, said: Callable[[str], None]) -> None:
    many = Load(plan.posts, max(1, plan.posts // 5), plan.connections)
    one = Load(max(1, plan.posts // ALONE_SHARE), max(1, plan.posts // ALONE_SHARE // 5), 1)
    found = ingest_receiver.rounds(servers, many, plan.runs, "receiver", said)
    alone = ingest_receiver.rounds(servers, one, plan.runs, "receiver_alone", said)
    result.runs["receiver"] = [item.as_row() for item in found]
    result.runs["receiver_alone"] = [item.as_row() for item in alone]
    result.figures |= receiver_figures(found)
    result.figures["receiver_alone_vs_bare"] = _ratio(alone, lambda item: item.per_s)
    result.figures["receiver_alone_p99_ms"] = median(item.p99_ms for item in alone if item.peer == OURS)


def receiver_figures(found: Sequence[ingest_receiver.Run]) -> dict[str, float]:
    """Ours, and ours by the bare endpoint's of the same round."""
    ours = [item for item in found if item.peer == OURS]
    return {
        "receiver_vs_bare": _ratio(found, lambda item: item.per_s),
        "receiver_p99_ms": median(item.p99_ms for item in ours),
        "receiver_per_s": median(item.per_s for item in ours),
        "receiver_p99_vs_bare": _ratio(found, lambda item: item.p99_ms),
        "receiver_cpu_vs_bare": _ratio(found, lambda item: item.cpu_us + item.postgres_cpu_us),
    }


def _ratio(found: Sequence[ingest_receiver.Run], of: Callable[[ingest_receiver.Run], float]) -> float:
    ours, bare = ([item for item in found if item.peer == peer] for peer in (OURS, BARE))
    return median(of(mine) / of(its) for mine, its in zip(ours, bare, strict=True))


def _normalise(plan: Plan, result: Result, said: Callable[[str], None]) -> None:
    found = [ingest_normalise.measure(NORMALISE_TIMES) for _ in range(plan.runs)]
    for item in found:
        said(f"normalise: {item.normalise_per_s:,.0f} payloads/s, json.loads alone {item.json_loads_per_s:,.0f}")
    result.runs["normalise"] = [item.as_row() for item in found]
    result.figures["normalise_per_s"] = median(item.normalise_per_s for item in found)
    result.figures["normalise_vs_json_loads"] = median(item.normalise_per_s / item.json_loads_per_s for item in found)
    if "receiver" in result.runs:
        bare = median(row["per_s"] for row in result.runs["receiver"] if row["peer"] == BARE)
        result.figures["normalise_vs_bare"] = result.figures["normalise_per_s"] / bare


def _worker(plan: Plan, servers: Servers, result: Result, said: Callable[[str], None]) -> None:
    found = [ingest_worker.measure(servers, plan.deliveries, f"worker_{n}", said) for n in range(1, plan.runs + 1)]
    result.runs["worker"] = [item.as_row() for item in found]
    result.figures["normalise_worker_per_s"] = median(item.per_s for item in found)


def _import(plan: Plan, servers: Database, result: Result, said: Callable[[str], None]) -> None:
    found = ingest_import.rounds(servers, plan.rows, plan.runs, said)
    result.runs["import"] = [item.as_row() for item in found]
    result.figures["import_vs_copy"] = median(item.import_rows_per_s / item.copy_rows_per_s for item in found)
    result.figures["import_vs_bare_copy"] = median(item.import_rows_per_s / item.bare_copy_rows_per_s for item in found)
    result.figures["import_rows_per_s"] = median(item.import_rows_per_s for item in found)


def _settings(plan: Plan) -> dict[str, object]:
    return {
        "posts": plan.posts,
        "connections": plan.connections,
        "deliveries": plan.deliveries,
        "import_rows": plan.rows,
        "runs": plan.runs,
        "parts": [part.value for part in plan.parts],
        "postgres_durable": True,
    }
