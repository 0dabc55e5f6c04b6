"""The bench of the relay: which measurements, in which order, and the figures that come out of them.

A figure is the median of its runs; a ratio is the median of the ratios round by round, peers alternating within a
round. What was not run has no figure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Any

from bench import debezium, emission, latency, poll, raw, usage
from bench.drain import Drain, Peer, Relay, as_row, drain_all
from bench.report import Result
from bench.rows import ORGANIZATIONS, PER_TRANSACTION, fill
from bench.servers import Servers, started

RATES = (200, 2_000)
CONNECTIONS = (8, 32)
POLL_ROWS = 1_000_000


class Part(StrEnum):
    drain = "drain"
    memory = "memory"
    latency = "latency"
    emission = "emission"
    poll = "poll"


class Against(StrEnum):
    raw = "raw"
    debezium = "debezium"


DEFAULT_PARTS = (Part.drain, Part.latency, Part.emission, Part.poll)


@dataclass(frozen=True)
class Plan:
    """`seconds`: of each latency and emission run. `backlog_rows`: for the part `memory`."""

    folder: Path
    rows: int = 200_000
    runs: int = 3
    parts: Sequence[Part] = DEFAULT_PARTS
    against: Sequence[Against] = ()
    seconds: float = 15.0
    backlog_rows: int = 5_000_000
    keep: bool = False


def run(plan: Plan, environment: Mapping[str, str], said: Callable[[str], None]) -> Result:
    """Do all of it on servers of its own. BenchError when a peer, ours included, did not do the work."""
    peers_of_debezium = debezium.PEERS if Against.debezium in plan.against else ()
    if peers_of_debezium:
        said("fetching Debezium, if it is not there")
        debezium.prepare()
    began = time.monotonic()
    result = Result("relay", usage.machine(), usage.versions(), _settings(plan))
    with started(plan.folder, environment, logical=bool(peers_of_debezium), keep=plan.keep) as servers:
        result.versions |= _server_versions(servers, bool(peers_of_debezium))
        if Part.drain in plan.parts or Against.raw in plan.against:
            _drain(plan, servers, peers_of_debezium, result, said)
        if Part.memory in plan.parts:
            _memory(plan, servers, result, said)
        if Part.latency in plan.parts:
            _latency(plan, servers, result, said)
        if Part.emission in plan.parts:
            _emission(plan, servers, result, said)
        if Part.poll in plan.parts:
            _poll(plan, servers, result, said)
    result.took_s = round(time.monotonic() - began, 1)
    result.figures = {name: float(f"{value:.4g}") for name, value in result.figures.items()}
    return result


def _drain(
    plan: Plan, servers: Servers, peers_of_debezium: Sequence[Peer], result: Result, said: Callable[[str], None]
) -> None:
    url = servers.database("drain")
    if peers_of_debezium:
        debezium.make_slot(url)
    said(f"writing {plan.rows:,} rows")
    rows = fill(url, plan.rows)
    result.settings["payload_bytes"] = round(rows.payload_bytes, 1)
    said("warming the broker up")
    for number in (-1, 0):
        raw.measure(servers, url, rows, number)
        Relay().drain(servers, url, rows, number)
    if Against.raw in plan.against:
        found = [raw.measure(servers, url, rows, number) for number in range(1, plan.runs + 1)]
        result.runs["raw"] = [{name: round(value) for name, value in asdict(item).items()} for item in found]
        result.figures["raw_copy_rows_per_s"] = median(item.copy_rows_per_s for item in found)
        result.figures["raw_produce_rows_per_s"] = median(item.produce_rows_per_s for item in found)
    if Part.drain in plan.parts:
        drains = drain_all([Relay(), *peers_of_debezium], servers, url, rows, plan.runs, said)
        result.runs["drain"] = [as_row(item) for item in drains]
        result.figures |= figures_of(drains)
    if peers_of_debezium:
        debezium.drop_slot(url)


def figures_of(drains: Sequence[Drain]) -> dict[str, float]:
    """The relay's own figures, and its ratios to each peer of the same rounds."""
    ours = [item for item in drains if item.peer == "relay"]
    figures = {
        "rows_per_s": median(item.rows_per_s for item in ours),
        "cpu_us_per_row": median(item.cpu_us_per_row for item in ours),
        "rss_mb": max(item.rss_mb for item in ours),
    }
    for peer in dict.fromkeys(item.peer for item in drains if item.peer != "relay"):
        pairs = list(zip(ours, (item for item in drains if item.peer == peer), strict=True))
        figures[f"drain_vs_{peer}"] = median(mine.rows_per_s / theirs.rows_per_s for mine, theirs in pairs)
        figures[f"cpu_per_row_vs_{peer}"] = median(
            mine.cpu_us_per_row / theirs.cpu_us_per_row for mine, theirs in pairs
        )
        figures[f"rss_mb_{peer}"] = max(theirs.rss_mb for _, theirs in pairs)
    return figures


def _memory(plan: Plan, servers: Servers, result: Result, said: Callable[[str], None]) -> None:
    found: list[dict[str, Any]] = []
    for name, rows, per_transaction in (
        ("one_transaction", 200_000, 200_000),
        ("backlog", plan.backlog_rows, PER_TRANSACTION),
    ):
        said(f"writing {rows:,} rows in transactions of {per_transaction:,}")
        url = servers.database(name)
        drained = Relay().drain(servers, url, fill(url, rows, per_transaction), len(found) + 1_000)
        found.append({"case": name, **as_row(drained)})
        result.figures[f"rss_mb_{name}"] = drained.rss_mb
        said(f"{name}: {drained.rss_mb:.0f} MB, {drained.rows_per_s:,.0f} rows/s")
    result.runs["memory"] = found


def _latency(plan: Plan, servers: Servers, result: Result, said: Callable[[str], None]) -> None:
    steady = latency.measure(servers, RATES, plan.seconds, plan.runs)
    result.runs["latency"] = [_rounded(asdict(item)) for item in steady.delays]
    result.runs["idle"] = [{"cpu_percent": round(value, 2)} for value in steady.idle_cpu_percent]
    for rate in RATES:
        runs = [item for item in steady.delays if item.rate == rate]
        said(f"at {rate}/s: p50/p99 ms {', '.join(f'{item.p50_ms:.1f}/{item.p99_ms:.1f}' for item in runs)}")
        result.figures[f"achieved_per_s_at_{rate}"] = median(item.achieved for item in runs)
        found = [item for item in runs if item.achieved >= rate * latency.ACHIEVED_AT_LEAST]
        if not found:
            said(f"no figures at {rate}/s: this machine's writers did not reach it")
            continue
        result.figures[f"p50_ms_at_{rate}"] = median(item.p50_ms for item in found)
        result.figures[f"p99_ms_at_{rate}"] = median(item.p99_ms for item in found)
    result.figures["idle_cpu_percent"] = median(steady.idle_cpu_percent)


def _emission(plan: Plan, servers: Servers, result: Result, said: Callable[[str], None]) -> None:
    writers = emission.Writers(servers, plan.seconds)
    result.runs["emission_saturated"], result.runs["emission_offered"] = [], []
    with servers.topics("writers."):
        for count in CONNECTIONS:
            saturated = [writers.saturated(count, number) for number in range(plan.runs)]
            ratio = median(item.emit_tps / item.insert_tps for item in saturated)
            most = median(item.emit_tps for item in saturated)
            offered = [writers.offered(count, most) for _ in range(plan.runs)]
            result.runs["emission_saturated"] += [_rounded(asdict(item)) for item in saturated]
            result.runs["emission_offered"] += [_rounded(asdict(item)) for item in offered]
            result.figures[f"emit_vs_insert_{count}"] = ratio
            result.figures[f"emit_relay_on_achieved_{count}"] = median(i.on_tps / i.offered_tps for i in offered)
            result.figures[f"emit_relay_on_p99_vs_off_{count}"] = median(i.on_p99_ms / i.off_p99_ms for i in offered)
            result.figures[f"emit_saturated_on_vs_off_{count}"] = median(i.on_saturated_tps / most for i in offered)
            said(f"{count} connections: emit_event/INSERT {ratio:.2f} at {most:,.0f}/s")


def _poll(plan: Plan, servers: Servers, result: Result, said: Callable[[str], None]) -> None:
    rows = min(POLL_ROWS, plan.rows * 5)
    said(f"writing {rows:,} rows into {poll.PARTITIONS} months")
    found = poll.measure(servers, rows, plan.runs)
    result.runs["poll"] = [{"rows": rows, **_rounded(asdict(item))} for item in found]
    result.figures["empty_poll_ms_36_partitions"] = median(item.sealed_ms for item in found)
    result.figures["empty_poll_ms_36_unsealed"] = median(item.unsealed_ms for item in found)


def _settings(plan: Plan) -> dict[str, Any]:
    return {
        "rows": plan.rows,
        "transactions_of": PER_TRANSACTION,
        "organizations": ORGANIZATIONS,
        "runs": plan.runs,
        "seconds": plan.seconds,
        "parts": [part.value for part in plan.parts],
        "against": [peer.value for peer in plan.against],
        "partitions": 6,
        "postgres_durable": True,
        "wal_level": "logical" if Against.debezium in plan.against else "replica",
    }


def _server_versions(servers: Servers, with_debezium: bool) -> dict[str, str]:
    found = servers.versions()
    if with_debezium:
        found |= {"debezium": debezium.VERSION, "kafka-connect": debezium.CONNECT_VERSION}
    return found


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in values.items()}
