"""Numbers of this process, in one table, for Prometheus to scrape.

Keep the child that `labels` returns: looking it up costs more than adding to it. Labels are bounded: topics, lanes, and
of organizations at most ORGANIZATIONS at a time.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest, start_http_server

ORGANIZATIONS = 10  # of a metric labelled with organizations: those with the highest values

# name: (labels, meaning). A name that ends in _total counts up; any other is a value of now.
METRICS: dict[str, tuple[tuple[str, ...], str]] = {
    "afluente_relay_published_total": (("topic",), "records committed to Kafka"),
    "afluente_relay_dead_lettered_total": (
        (),
        "rows that could not be published as they are; when one fails again, again",
    ),
    "afluente_relay_reprocessed_total": (("outcome",), "dead letters taken up again: published, dead or gone"),
    "afluente_relay_session_losses_total": (("lane",), "Kafka or Postgres failed and the lane began anew"),
    "afluente_relay_owned": (("lane",), "1: this process owns the lane"),
    "afluente_relay_takeovers": (("lane",), "how often the lane was taken from an owner, counted in Postgres"),
    "afluente_relay_paused": ((), "1: paused by `afluente relay pause`"),
    "afluente_relay_lag_rows": (("lane",), "committed rows that are not published, counted up to 100,000"),
    "afluente_relay_lag_seconds": (("lane",), "for how long the oldest of them has waited"),
    "afluente_relay_organization_lag_rows": (("organization",), "the same by organization: those with the most"),
    "afluente_relay_position_age_seconds": (("lane",), "since the lane's position last moved, in Kafka or in memory"),
    "afluente_relay_window_seqs": (("lane",), "sequence numbers to the end of the open window: at most so many rows"),
    "afluente_relay_organizations_split_off": (("lane",), "organizations with an entry of their own in the position"),
    "afluente_relay_organization_split_off": (("organization",), "1: it writes more than its share"),
    "afluente_relay_oldest_transaction_seconds": (
        (),
        "age of the oldest open transaction that writes, prepared or not",
    ),
    "afluente_stream_folded_total": ((), "contact events folded into summaries"),
    "afluente_stream_dead_letters_total": ((), "records that could not be folded, and were kept"),
}

_registry = CollectorRegistry()
_counters = {
    name: Counter(name, meaning, given, registry=_registry)
    for name, (given, meaning) in METRICS.items()
    if name.endswith("_total")
}
_gauges = {
    name: Gauge(name, meaning, given, registry=_registry)
    for name, (given, meaning) in METRICS.items()
    if name not in _counters
}


def labels(name: str, **given: str) -> Counter:
    """The counter `name` under these labels. KeyError for a name, ValueError for a label, that is not in the table."""
    return _counters[name].labels(**given) if given else _counters[name]


def gauge(name: str, **given: str) -> Gauge:
    """The gauge `name` under these labels; errors as those of `labels`."""
    return _gauges[name].labels(**given) if given else _gauges[name]


def show_highest(name: str, values: Mapping[str, float]) -> None:
    """Set a gauge labelled with organizations to the ORGANIZATIONS highest of `values`, and forget all others."""
    gauge, (label,) = _gauges[name], METRICS[name][0]
    highest = dict(sorted(values.items(), key=lambda item: (-item[1], item[0]))[:ORGANIZATIONS])
    for metric in gauge.collect():
        for sample in metric.samples:
            if sample.labels[label] not in highest:
                gauge.remove(sample.labels[label])
    for organization, value in highest.items():
        gauge.labels(organization).set(value)


def forget(name: str) -> None:
    """Forget every value of a labelled gauge."""
    _gauges[name].clear()


def exposition() -> bytes:
    """All numbers in the Prometheus text format."""
    return generate_latest(_registry)


def serve(address: str, port: int) -> int:
    """Answer Prometheus on `http://address:port/metrics` from a thread of its own; returns the port (0: any free one).

    OSError when the port is taken.
    """
    server, _ = start_http_server(port, address, registry=_registry)
    return int(server.server_port)
