"""What the demo shows at its end: read from the tables and the topics, not from what the processes said."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import psycopg
from confluent_kafka import Message
from psycopg.rows import dict_row

from afluente import kafka
from afluente.settings import KafkaSettings

# An event is dead as soon as one worker has given it up; others may still be at it.
_OPEN = """
SELECT (SELECT count(*) FROM event_log_status WHERE status NOT IN ('done', 'dead'))
     + (SELECT count(*) FROM event_delivery WHERE state IN ('claimed', 'waiting', 'blocked'))
     + (SELECT count(*) FROM automation_runs WHERE finished_at IS NULL)
     + (SELECT count(*) FROM contact_events WHERE metric_name IS NOT NULL)
     - (SELECT COALESCE(sum(event_count), 0) FROM contact_metrics_summary_v)
"""
_SUMMARIES = """
SELECT o.name AS organization, c.name AS contact, s.metric_name AS metric, s.event_count AS count,
       s.total_value AS total, s.last_event_at
  FROM contact_metrics_summary_v s
  JOIN organizations o ON o.id = s.organization_id
  JOIN contacts c ON c.organization_id = s.organization_id AND c.id = s.contact_id
 ORDER BY o.name, c.name, s.metric_name
"""
_DELIVERIES = """
SELECT worker,
       count(*) FILTER (WHERE state = 'done') AS done,
       count(*) FILTER (WHERE state = 'done' AND attempts > 1) AS of_it_after_a_retry,
       count(*) FILTER (WHERE state = 'skipped') AS nobody_asked,
       count(*) FILTER (WHERE state = 'dead') AS dead
  FROM event_delivery GROUP BY worker ORDER BY worker
"""
_DEAD = """
SELECT worker, event_id, target, event_type, attempts, last_error, first_failure_at, finished_at
  FROM event_delivery WHERE state = 'dead' ORDER BY finished_at
"""
# The parts of each POST with what became of them, and the POSTs that have none: repeats, refused and unrouted ones.
_INBOUND = """
SELECT source, status, count(*) AS deliveries, string_agg(DISTINCT reason, ', ' ORDER BY reason) AS reasons
  FROM webhook_events
 WHERE parent_id IS NOT NULL OR status IN ('duplicate', 'refused', 'unrouted')
 GROUP BY source, status ORDER BY source, status
"""

_RUNS = """
SELECT o.name AS organization, a.name AS automation, c.name AS contact, r.state,
       string_agg(s.type || CASE s.state WHEN 'done' THEN '' ELSE ' (' || coalesce(s.reason, s.state) || ')' END, ', '
                  ORDER BY s.step) AS steps
  FROM automation_runs r
  JOIN automations a ON a.organization_id = r.organization_id AND a.id = r.automation_id
  JOIN organizations o ON o.id = r.organization_id
  LEFT JOIN contacts c ON c.organization_id = r.organization_id AND c.id = r.contact_id
  LEFT JOIN automation_step_runs s ON s.organization_id = r.organization_id AND s.run_id = r.id
 GROUP BY o.name, a.name, c.name, r.id ORDER BY o.name, r.started_at
"""


def open_events(conn: psycopg.Connection[Any]) -> int:
    """Committed events that some worker has not finished with, and contact events not in the summaries yet."""
    row = conn.execute(_OPEN).fetchone()
    assert row is not None
    return int(row[0])


def rows(conn: psycopg.Connection[Any], query: str) -> list[dict[str, Any]]:
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(query).fetchall()


def summaries(conn: psycopg.Connection[Any]) -> list[dict[str, Any]]:
    return rows(conn, _SUMMARIES)


def runs(conn: psycopg.Connection[Any]) -> list[dict[str, Any]]:
    return rows(conn, _RUNS)


def deliveries(conn: psycopg.Connection[Any]) -> list[dict[str, Any]]:
    return rows(conn, _DELIVERIES)


def dead_letters(conn: psycopg.Connection[Any]) -> list[dict[str, Any]]:
    return rows(conn, _DEAD)


def inbound(conn: psycopg.Connection[Any]) -> list[dict[str, Any]]:
    return rows(conn, _INBOUND)


@dataclass
class Delays:
    """From the row's own clock (`created_at`, a little before its commit) to a read_committed consumer, in ms."""

    samples: list[float] = field(default_factory=list)

    def percentile(self, share: float) -> float:
        ordered = sorted(self.samples)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


class DelayMeter:
    """A consumer of every event topic, in a thread, from now on. `with DelayMeter(...) as delays:`."""

    def __init__(self, settings: KafkaSettings, topics: list[str]) -> None:
        self.delays = Delays()
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._consumer = kafka.consumer(
            settings,
            f"demo-delay-{time.time_ns()}",
            isolation_level="read_committed",
            fetch_wait_max_ms=5,
            auto_offset_reset="earliest",
        )
        self._consumer.subscribe(topics, on_assign=lambda *_: self._ready.set())
        self._thread = threading.Thread(target=self._run, name="demo-delay", daemon=True)

    def __enter__(self) -> Delays:
        self._thread.start()
        self._ready.wait(15)
        return self.delays

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)
        self._consumer.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            message: Message | None = self._consumer.poll(0.1)
            if message is None or message.error() is not None:
                continue
            headers = dict(kafka.headers_of(message) or ())
            if (time_header := headers.get("ce_time")) is not None:
                at = datetime.fromisoformat(time_header.decode())
                self.delays.samples.append((time.time() - at.timestamp()) * 1000)
