"""`afluente worker list`."""

from __future__ import annotations

import os
from typing import Any

from afluente.cli.output import Format, FormatOption, say, show


def list_(format: FormatOption = Format.text) -> None:
    """Name every worker, what it takes, its living processes and its deliveries that are not finished.

    JSON keys: worker, event_types, kind, ordering, attempts, processes, paused {by, since, reason} or null, waiting,
    claimed, blocked, dead.

    \b
    Examples:
      afluente worker list
      afluente worker list --format json
    """
    from afluente import postgres
    from afluente.settings import PostgresSettings
    from consumers import ExternalWorker
    from consumers.runtime import control
    from consumers.workers import REGISTRY, load

    settings = PostgresSettings.read(os.environ)
    with postgres.connect(settings.dsn, application_name="afluente worker list") as conn:
        counts: dict[str, dict[str, int]] = {}
        for worker, state, count in conn.execute(_STATES):
            counts.setdefault(worker, {})[state] = count
        processes = dict(conn.execute(_PROCESSES).fetchall())
        taken = dict(conn.execute(_EVENT_TYPES).fetchall())
        pauses = control.paused(conn)
    rows: list[dict[str, Any]] = []
    for name in sorted({*REGISTRY, *counts, *processes, *pauses}):
        # of a worker of somebody's own there is no more than what it has told the database
        row: dict[str, Any] = {"worker": name, "event_types": taken.get(name, []), "kind": None, "ordering": None}
        row["attempts"] = None
        if name in REGISTRY:
            found = load(name)
            row |= {
                "event_types": sorted(found.event_types),
                "kind": "external" if issubclass(found, ExternalWorker) else "transactional",
                "ordering": found.policy.ordering,
                "attempts": found.policy.attempts,
            }
        states = counts.get(name, {})
        pause = pauses.get(name)
        row |= {
            "processes": processes.get(name, 0),
            "paused": None if pause is None else {"by": pause.by, "since": pause.since, "reason": pause.reason or None},
            "waiting": states.get("waiting", 0),
            "claimed": states.get("claimed", 0),
            "blocked": states.get("blocked", 0),
            "dead": states.get("dead", 0) + states.get("needs_review", 0),
        }
        rows.append(row)
    if format == Format.text:
        for row in rows:
            row["event_types"] = " ".join(row["event_types"])
            row["paused"] = "" if row["paused"] is None else f"by {row['paused']['by']}"
    show(rows, format)
    if any(row["dead"] for row in rows):
        say("next: afluente dlq list")


_STATES = """
SELECT worker, state, count(*) FROM event_delivery
 WHERE state IN ('claimed', 'waiting', 'blocked', 'dead', 'needs_review') GROUP BY worker, state
"""

_EVENT_TYPES = """
SELECT worker, array_agg(event_type ORDER BY event_type) FROM worker_event_types GROUP BY worker
"""

_PROCESSES = """
SELECT worker, count(*) FROM worker_process WHERE renewed_at > clock_timestamp() - interval '5 minutes' GROUP BY worker
"""
