"""Counters and gauges of this process, in the Prometheus text format and without a library of their own.

Keep the child that `labels` returns: looking it up costs more than adding to it. Names and labels are in `METRICS`.
"""

from __future__ import annotations

import threading

# name: (kind, labels, meaning)
METRICS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "afluente_relay_published_total": ("counter", ("topic",), "records committed to Kafka"),
    "afluente_worker_deliveries_total": ("counter", ("worker", "outcome"), "deliveries by outcome"),
    "afluente_stream_folded_total": ("counter", (), "contact events folded into summaries"),
    "afluente_stream_dead_letters_total": ("counter", (), "records that could not be folded, and were kept"),
    "afluente_ingest_received_total": ("counter", ("source", "outcome"), "inbound webhooks by outcome"),
}


class Value:
    """One number, safe to change from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        with self._lock:
            self.value += amount

    def set(self, value: float) -> None:
        with self._lock:
            self.value = value


_values: dict[str, dict[tuple[str, ...], Value]] = {name: {} for name in METRICS}
_lock = threading.Lock()


def labels(name: str, **given: str) -> Value:
    """The number of metric `name` under these labels. KeyError for a name or label that is not in the table."""
    _, wanted, _ = METRICS[name]
    if set(given) != set(wanted):
        raise KeyError(f"{name} has labels {wanted}, not {tuple(given)}")
    key = tuple(given[label] for label in wanted)
    with _lock:
        return _values[name].setdefault(key, Value())


def exposition() -> str:
    """All numbers in the Prometheus text format."""
    lines = []
    for name, (kind, wanted, meaning) in METRICS.items():
        lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
        with _lock:
            items = list(_values[name].items())
        for key, value in items:
            pairs = ",".join(f'{label}="{_escaped(text)}"' for label, text in zip(wanted, key, strict=True))
            lines.append(f"{name}{{{pairs}}} {value.value:g}" if pairs else f"{name} {value.value:g}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
