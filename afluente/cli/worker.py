"""`afluente worker`: run workers, and say which there are and how they stand."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated, Any

import typer

from afluente.cli.exits import Exit
from afluente.cli.output import Format, FormatOption, say, show
from afluente.cli.registry import use_registry

app = typer.Typer(help="Run and list workers.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def run(
    names: Annotated[list[str] | None, typer.Argument(help="worker names, or module:Class", metavar="NAME...")] = None,
    all_: Annotated[bool, typer.Option("--all", help="every worker, in this one process")] = False,
) -> None:
    """Handle events until SIGTERM or SIGINT; a second signal ends at once.

    Each worker is one consumer group; run more processes of it to share its partitions. Exit status 0: all that was in
    hand was finished; 1: some of it was handed back, or the worker failed.

    \b
    Examples:
      afluente worker run webhook-dispatch-worker
      afluente worker run --all
    """
    from afluente.settings import WorkerSettings
    from consumers.runtime import process
    from consumers.workers import REGISTRY, load

    chosen = sorted(REGISTRY) if all_ else list(dict.fromkeys(names or ()))
    if not chosen or (all_ and names):
        say("afluente: name the workers to run, or --all")
        say("  try: afluente worker list")
        raise typer.Exit(Exit.USAGE)
    settings = WorkerSettings.read(os.environ)
    use_registry(settings.kafka.topic_prefix)
    workers = [load(name).configure(settings) for name in chosen]
    if not asyncio.run(process.run(workers, settings)):
        raise typer.Exit(Exit.FAILED)


@app.command("list")
def list_(format: FormatOption = Format.text) -> None:
    """Name every worker, what it takes, its living processes and its deliveries that are not finished.

    JSON keys: worker, event_types, kind, ordering, attempts, processes, waiting, claimed, blocked, dead.

    \b
    Examples:
      afluente worker list
      afluente worker list --format json
    """
    from afluente import postgres
    from afluente.settings import PostgresSettings
    from consumers import ExternalWorker
    from consumers.workers import REGISTRY, load

    settings = PostgresSettings.read(os.environ)
    with postgres.connect(settings.dsn, application_name="afluente worker list") as conn:
        counts: dict[str, dict[str, int]] = {}
        for worker, state, count in conn.execute(_STATES):
            counts.setdefault(worker, {})[state] = count
        processes = dict(conn.execute(_PROCESSES).fetchall())
        taken = dict(conn.execute(_EVENT_TYPES).fetchall())
    rows: list[dict[str, Any]] = []
    for name in sorted({*REGISTRY, *counts, *processes}):
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
        row |= {
            "processes": processes.get(name, 0),
            "waiting": states.get("waiting", 0),
            "claimed": states.get("claimed", 0),
            "blocked": states.get("blocked", 0),
            "dead": states.get("dead", 0) + states.get("needs_review", 0),
        }
        rows.append(row)
    if format == Format.text:
        for row in rows:
            row["event_types"] = " ".join(row["event_types"])
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
