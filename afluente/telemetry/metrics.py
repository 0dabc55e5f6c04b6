"""Counters of this process, in one table, for Prometheus to scrape.

Keep the child that `labels` returns: looking it up costs more than adding to it.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, generate_latest

# name: (labels, meaning)
METRICS: dict[str, tuple[tuple[str, ...], str]] = {
    "afluente_relay_published_total": (("topic",), "records committed to Kafka"),
    "afluente_stream_folded_total": ((), "contact events folded into summaries"),
    "afluente_stream_dead_letters_total": ((), "records that could not be folded, and were kept"),
}

_registry = CollectorRegistry()
_counters = {name: Counter(name, meaning, given, registry=_registry) for name, (given, meaning) in METRICS.items()}


def labels(name: str, **given: str) -> Counter:
    """The counter `name` under these labels. KeyError for a name, ValueError for a label, that is not in the table."""
    return _counters[name].labels(**given) if given else _counters[name]


def exposition() -> bytes:
    """All numbers in the Prometheus text format."""
    return generate_latest(_registry)
