"""A bench's result as Markdown: figures beside what is to be reached, the machine, and every run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

# What is to be reached: (at least, None) or (None, at most).
TARGETS: dict[str, tuple[float | None, float | None]] = {
    "drain_vs_debezium": (4.0, None),
    "drain_vs_debezium_tuned": (3.0, None),
    "drain_vs_debezium_eos": (4.0, None),
    "cpu_per_row_vs_debezium": (None, 0.25),
    "rss_mb": (None, 120.0),
    "rss_mb_one_transaction": (None, 120.0),
    "rss_mb_backlog": (None, 120.0),
    "p50_ms_at_200": (None, 5.0),
    "p99_ms_at_200": (None, 20.0),
    "p50_ms_at_2000": (None, 10.0),
    "p99_ms_at_2000": (None, 50.0),
    "idle_cpu_percent": (None, 3.0),
    "empty_poll_ms_36_partitions": (None, 0.5),
    **{f"emit_vs_insert_{count}": (0.85, None) for count in (8, 32)},
    **{f"emit_relay_on_achieved_{count}": (0.95, None) for count in (8, 32)},
    **{f"emit_relay_on_p99_vs_off_{count}": (None, 1.5) for count in (8, 32)},
}
WORKER_TARGETS: dict[str, tuple[float | None, float | None]] = {
    "transactional_per_s": (40_000, None),
    "transactional_vs_spring": (1.2, None),
    "transactional_vs_faststream": (20.0, None),
    "external_per_s": (9_000, None),
    "external_cpu_vs_parallel_consumer": (None, 1 / 3),
    "bad_record_batch_cost": (None, 2.0),
    "rss_mb": (None, 100.0),
    "rss_mb_100kb": (None, 150.0),
    "small_tenant_delay_s_50k": (None, 1.0),
    "small_tenant_delay_s_1m": (None, 15.0),
    "retry_late_s_max": (None, 1.0),
    "retry_peak_share": (None, 0.15),
}
LOAD_TARGETS: dict[str, tuple[float | None, float | None]] = {"lag_s": (None, 30.0), "missing": (None, 0.0)}
INGEST_TARGETS: dict[str, tuple[float | None, float | None]] = {
    name: (0.7, None) for name in ("receiver_vs_bare", "normalise_vs_bare", "import_vs_copy")
}
_TARGETS = {"relay": TARGETS, "worker": WORKER_TARGETS, "load": LOAD_TARGETS, "ingest": INGEST_TARGETS}


@dataclass
class Result:
    """What `--format json` prints: `figures` is flat, `runs` has every run by its part."""

    bench: str
    machine: dict[str, Any]
    versions: dict[str, str]
    settings: dict[str, Any]
    figures: dict[str, float] = field(default_factory=dict)
    runs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    began_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    took_s: float = 0.0


def judged(figures: Mapping[str, float], bench: str = "relay") -> list[dict[str, Any]]:
    """Each figure with its target and whether it is reached (None: it has no target)."""
    rows = []
    for name, value in figures.items():
        least, most = _TARGETS[bench].get(name, (None, None))
        target = f">= {least:g}" if least is not None else f"<= {most:g}" if most is not None else ""
        reached = None if not target else value >= least if least is not None else value <= (most or 0)
        rows.append({"figure": name, "value": value, "target": target, "reached": reached})
    return rows


def markdown(result: Result) -> str:
    """The whole result."""
    facts = [
        {"what": name, "value": value}
        for part in (result.machine, result.versions, result.settings)
        for name, value in part.items()
    ]
    parts = [f"# afluente bench {result.bench}, {result.began_at:%Y-%m-%d %H:%M} UTC, {result.took_s:.0f} s\n"]
    parts.append(_table(judged(result.figures, result.bench)))
    parts.append("## Machine, versions, settings\n\n" + _table(facts))
    parts += [f"## Runs: {name}\n\n{_table(rows)}" for name, rows in result.runs.items()]
    return "\n".join(parts)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([_cell(row[name]) for name in names] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    return (
        ", ".join(map(str, value))
        if isinstance(value, list)
        else f"{value:,}"
        if isinstance(value, int)
        else str(value)
    )
