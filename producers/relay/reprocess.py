"""Dead letters of the relay, published again on request: made anew from their rows, with today's code and limits.

A request is a row of afluente.relay_reprocess, whose ids become visible in their order. Each entry of the position
holds the highest id that is answered for its organizations, and moves past a request in the Kafka transaction that
publishes its record. So each is answered exactly once, whoever is killed when; that Postgres is told the answer is for
people.

A row that fails again becomes a dead letter again, with today's reason. One that event_log has dropped is made from the
copy in its dead letter; without one, nothing is published, and the answer says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC
from typing import Any

import orjson
import psycopg

import sql
from afluente.telemetry import get_logger, metrics
from producers.relay.position import Entry
from producers.relay.records import Record, record_of
from schemas import Row
from schemas.topics import Topics

AT_ONCE = 50  # rows of 272 KiB are allowed
LOOK_AHEAD = 1_000  # requests looked through for those of this lane

_log = get_logger(__name__)
_QUERIES = sql.queries("relay_control")


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests by id, with the row that each is about (None: gone), and the entries once they are answered."""

    rows: Mapping[int, Row | None]
    after: tuple[Entry, ...]

    def records(
        self,
        topics: Topics,
        limits: Mapping[str, int],
        partitions: Mapping[str, int],
        refused: Mapping[int, str] | None = None,
    ) -> list[Record]:
        """What is to be published, as `record_of` makes it of any row."""
        return [record_of(row, topics, limits, partitions, refused) for row in self.rows.values() if row is not None]


def next_batch(
    conn: psycopg.Connection[Any], topic_prefix: str, entries: Sequence[Entry], upto: int, *, rows: int = AT_ONCE
) -> Batch:
    """The next requests, up to the id `upto`, for the organizations of `entries`; at most `rows`.

    `upto` is an id that was seen: every request below it is committed or will never be.
    """
    parameters = {
        "prefix": topic_prefix,
        "after": min(entry.reprocessed for entry in entries),
        "upto": upto,
        "rows": LOOK_AHEAD,
    }
    ours: list[int] = []
    reached = 0
    requests = conn.execute(_QUERIES["requests"], parameters).fetchall()
    for id, organization_id in requests:
        if any(entry.reprocessed < id and entry.covers(organization_id) for entry in entries):
            if len(ours) == rows:
                break
            ours.append(id)
        reached = id
    else:
        if len(requests) < LOOK_AHEAD:
            reached = upto
    after = tuple(replace(entry, reprocessed=max(entry.reprocessed, reached)) for entry in entries)
    found: dict[int, Row | None] = {}
    if ours:
        cursor = conn.cursor(binary=True)
        for id, *columns in cursor.execute(_QUERIES["requested_rows"], {"ids": ours}):
            found[id] = None if columns[0] is None else Row(*columns[:-1], columns[-1].astimezone(UTC))  # type: ignore[call-arg]
    return Batch(found, after)


def note(conn: psycopg.Connection[Any], batch: Batch, records: Sequence[Record]) -> None:
    """Write down what became of each request, once its transaction is committed in Kafka."""
    dead = {record.row.id: dict(record.headers) for record in records if record.dead}
    answers: list[dict[str, Any]] = []
    for id, row in batch.rows.items():
        if row is None:
            outcome = "its row is neither in event_log nor in the dead letter"
            answers.append({"id": id, "state": "gone", "outcome": outcome})
        elif (headers := dead.get(row.id)) is not None:
            words = f"{headers['x-error-class'].decode()}: {headers['x-error-message'].decode()}"
            answers.append({"id": id, "state": "dead", "outcome": words})
        else:
            answers.append({"id": id, "state": "published", "outcome": None})
    counts = Counter(answer["state"] for answer in answers)
    for outcome, count in counts.items():
        metrics.labels("afluente_relay_reprocessed_total", outcome=outcome).inc(count)
    if answers:
        _log.info("relay.reprocessed", count=len(answers), **counts)
    _write(conn, answers)


def note_unnoted(conn: psycopg.Connection[Any], topic_prefix: str, entries: Sequence[Entry]) -> None:
    """Write down that requests are answered whose answer could not be noted: as what, the dead letters tell."""
    upto = max(entry.reprocessed for entry in entries)
    if upto:
        found = conn.execute(_QUERIES["unnoted"], {"prefix": topic_prefix, "upto": upto}).fetchall()
        answered = [
            {"id": id, "state": "answered", "outcome": None}
            for id, organization_id in found
            if any(id <= entry.reprocessed and entry.covers(organization_id) for entry in entries)
        ]
        _write(conn, answered)


def _write(conn: psycopg.Connection[Any], answers: Sequence[dict[str, Any]]) -> None:
    if answers:
        conn.execute(_QUERIES["note_answers"], {"answers": orjson.dumps(answers).decode()})
