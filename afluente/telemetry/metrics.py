"""Numbers of this process, in one table, for Prometheus to scrape.

Keep the child that `labels` returns: looking it up costs more than adding to it. Labels are bounded: topics, lanes, and
of organizations at most ORGANIZATIONS at a time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

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

# The workers' numbers are counted by themselves and asked for when Prometheus asks: at 40,000 deliveries a second an
# addition is all that there is time for. The same shape; `worker` is the first label of each.
COLLECTED: dict[str, tuple[tuple[str, ...], str]] = {
    "afluente_event_log_consumed_total": (("worker", "event_type"), "deliveries done"),
    "afluente_event_log_fail_rate": (("worker",), "share of the last five minutes' runs that failed, 0 to 1"),
    "afluente_event_log_dlq_size": (("worker", "event_type"), "open dead letters, counted up to 100,000"),
    "afluente_worker_records_total": (("worker",), "records read"),
    "afluente_worker_outcomes_total": (
        ("worker", "outcome"),
        "of deliveries: done, retried, snoozed, put_off (for a rate or a breaker), dead, or duplicate (known, "
        "and nothing to do)",
    ),
    "afluente_worker_handler_seconds": (("worker",), "of a handler's run; in a batch each one's share"),
    "afluente_worker_due_lateness_seconds": (("worker",), "how long after its due time a retry was taken up"),
    "afluente_worker_revoke_wait_seconds": (("worker",), "how long a rebalance waited for what runs"),
    "afluente_worker_lag_records": (
        ("worker", "topic", "partition"),
        "to the end that a read_committed reader sees, of the partitions this process has",
    ),
    "afluente_event_log_lag_seconds": (("worker", "topic", "partition"), "age of the oldest unfinished record"),
    "afluente_worker_in_hand_records": (("worker", "due"), "read and not finished: due now, or ahead of their time"),
    "afluente_worker_in_hand_bytes": (("worker", "due"), "the same in bytes"),
    "afluente_worker_partitions": (("worker", "state"), "assigned; and of them held, as too much is in hand; stalled"),
    "afluente_worker_lanes_running": (("worker",), "keys with a delivery at work"),
    "afluente_worker_ready_deliveries": (("worker",), "deliveries in memory that may begin"),
    "afluente_worker_deliveries": (
        ("worker", "state"),
        "in Postgres, of all processes: claimed, waiting, due, blocked; counted up to 100,000",
    ),
    "afluente_worker_parked_organizations": (("worker",), "whose surplus was passed over, to be read again"),
    "afluente_worker_parked_records": (("worker",), "of theirs, about; of the partitions this process has"),
    "afluente_worker_open_breakers": (("worker",), "destinations that are left alone, of all processes"),
    "afluente_worker_paused": (("worker",), "1: paused by `afluente worker pause`"),
    "afluente_worker_poll_age_seconds": (("worker",), "since the poll loop last turned"),
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


class Histogram:
    """How often values were at most so large. Cheap to add to, and for one thread."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, how many were at most that), as Prometheus wants them."""
        found, below = [], 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            below += count
            found.append((bound, float(below)))
        return found


Sample: TypeAlias = tuple[str, tuple[str, ...], float | Histogram]
"""A name of COLLECTED, its labels' values in the table's order, the value."""


class _Asked(Collector):
    def __init__(self, source: Callable[[], Iterable[Sample]]) -> None:
        self._source = source

    def describe(self) -> list[Metric]:
        return []  # or the registry would ask for the numbers to learn their names

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Any] = {}
        for name, values, value in self._source():
            family = families.get(name)
            if family is None:
                given, meaning = COLLECTED[name]
                kind: Any = GaugeMetricFamily
                if isinstance(value, Histogram):
                    kind = HistogramMetricFamily
                elif name.endswith("_total"):
                    kind = CounterMetricFamily
                family = families[name] = kind(name, meaning, labels=given)
            if isinstance(value, Histogram):
                family.add_metric(values, value.buckets(), value.total)
            else:
                family.add_metric(values, value)
        yield from families.values()


def ask(source: Callable[[], Iterable[Sample]]) -> Callable[[], None]:
    """Call `source` at each scrape, from the thread of the server. Returns what ends that."""
    asked = _Asked(source)
    _registry.register(asked)
    return lambda: _registry.unregister(asked)


def exposition() -> bytes:
    """All numbers in the Prometheus text format."""
    return generate_latest(_registry)


Page: TypeAlias = Callable[[], tuple[str, bytes]]
"""Answers a GET: status line ("200 OK") and a JSON body."""


def serve(address: str, port: int, pages: Mapping[str, Page] | None = None) -> int:
    """Answer Prometheus on `http://address:port/metrics` from threads of its own; returns the port (0: any free one).
    `pages` (path: page) are answered beside it.

    OSError when the port is taken.
    """
    server, _ = start_http_server(port, address, registry=_registry)
    numbers: Any = server.get_app()

    def app(environment: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        page = (pages or {}).get(environment["PATH_INFO"])
        if page is None:
            return numbers(environment, start_response)
        status, body = page()
        start_response(status, [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]

    server.set_app(app)
    return int(server.server_port)
