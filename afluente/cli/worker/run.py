"""`afluente worker run`."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated

import typer

from afluente import memory
from afluente.cli.exits import Exit
from afluente.cli.output import say
from afluente.cli.registry import use_registry


def run(
    names: Annotated[list[str] | None, typer.Argument(help="worker names, or module:Class", metavar="NAME...")] = None,
    all_: Annotated[bool, typer.Option("--all", help="every worker, in this one process")] = False,
    log_records: Annotated[
        bool, typer.Option("--log-records", help="a log line for each delivery that is done")
    ] = False,
) -> None:
    """Handle events until SIGTERM or SIGINT; a second signal ends at once.

    Each worker is one consumer group; run more processes of it to share its partitions. When one worker of a process
    fails, the others are drained and the process ends. Exit status 0: all that was in hand was finished; 1: some of it
    was handed back, or a worker failed.

    With AFLUENTE_METRICS=address:port it answers GET /metrics (for Prometheus), /livez (200 while its loops turn and
    its records move) and /readyz (200 once it has its partitions); what is wrong is said in their JSON.

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
    memory.use_few_heaps()
    settings = WorkerSettings.read(os.environ)
    use_registry(settings.kafka.topic_prefix)
    workers = [load(name).configure(settings) for name in chosen]
    if not asyncio.run(process.run(workers, settings, log_records=log_records)):
        raise typer.Exit(Exit.FAILED)
