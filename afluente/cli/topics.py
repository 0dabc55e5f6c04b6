"""`afluente topics`: the declared topics beside those of a cluster.

Keys of the JSON: plan and apply give `topic, kind, setting, declared, found, applied, note` for each difference; list
gives `topic, partitions, replication, retention, cleanup`; show adds `exists`, `settings` and `records` for each
partition.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

import typer

from afluente.cli.exits import Exit
from afluente.cli.output import Format, FormatOption, say, show
from schemas.topics import TopicSpec, declared

app = typer.Typer(help="The topics that must exist: one declaration, compared with a cluster.", no_args_is_help=True)

WorkerOption = Annotated[
    list[str] | None,
    typer.Option(
        "--worker", help="only this worker's topics beside the common ones: its name, or module:Class; may be repeated"
    ),
]

_COLUMNS = ["topic", "kind", "setting", "declared", "found", "note"]


@app.command()
def plan(worker: WorkerOption = None, format: FormatOption = Format.text) -> None:
    """Show what differs between the declaration and the cluster. Exit 3 when something does.

    \b
    Examples:
      afluente topics plan
      afluente topics plan --format json
    """
    from afluente.kafka import topics_apply

    settings, specs = _read(worker)
    differences = topics_apply.plan(_admin(settings), specs, _is_ours(settings.kafka.topic_prefix))
    changes = [d for d in differences if d.is_change]
    show([asdict(d) for d in differences], format, _COLUMNS)
    if changes:
        say(f"{len(changes)} differences on {len({d.topic for d in changes})} topics; next: afluente topics apply")
        raise typer.Exit(Exit.FOUND)
    say(f"all {len(specs)} topics are as declared")


@app.command()
def apply(
    worker: WorkerOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show what would be done, do nothing")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="change settings of existing topics without asking")] = False,
    format: FormatOption = Format.text,
) -> None:
    """Create missing topics and correct settings. Deletes nothing and leaves partition counts alone.

    Exit 0 when the cluster is as declared afterwards, 5 when something is left (its note says why).

    \b
    Examples:
      afluente topics apply
      afluente topics apply --dry-run --format json
    """
    from afluente.kafka import topics_apply

    settings, specs = _read(worker)
    admin = _admin(settings)
    differences = topics_apply.plan(admin, specs, _is_ours(settings.kafka.topic_prefix))
    changes = [d for d in differences if d.is_change]
    altered = sorted({d.topic for d in changes if d.kind is topics_apply.Kind.setting})
    if altered and not (yes or dry_run):
        if not sys.stdin.isatty():
            say(f"would change settings of {len(altered)} existing topics ({', '.join(altered[:3])} ...): add --yes")
            raise typer.Exit(Exit.USAGE)
        if not typer.confirm(f"change settings of {len(altered)} existing topics?", err=True):
            raise typer.Exit(Exit.USAGE)
    if dry_run:
        show([asdict(d) for d in changes], format, _COLUMNS)
        say(f"dry run: nothing was done; {len(changes)} differences")
        return
    outcome = topics_apply.apply(admin, specs, changes)
    show([asdict(d) for d in outcome], format, [*_COLUMNS[:-1], "applied", "note"])
    left = [d for d in outcome if not d.applied]
    say(f"{len(outcome) - len(left)} differences mended, {len(left)} left; {len(specs)} topics are declared")
    if left:
        raise typer.Exit(Exit.PARTLY)


@app.command(name="list")
def list_(worker: WorkerOption = None, format: FormatOption = Format.text) -> None:
    """List the declared topics; asks no cluster.

    \b
    Examples:
      afluente topics list
      afluente topics list --worker webhook-dispatch-worker --format csv
    """
    _, specs = _read(worker)
    show([_row(spec) for spec in specs], format)


@app.command(name="show")
def show_(
    topic: Annotated[str, typer.Argument(help="full name, or the name without the prefix")],
    format: FormatOption = Format.text,
) -> None:
    """Show one topic as declared and as the cluster has it, with the records of each partition.

    \b
    Examples:
      afluente topics show events.lead
      afluente topics show relay.positions --format json
    """
    from afluente.kafka import topics_apply

    settings, specs = _read(None)
    prefix = settings.kafka.topic_prefix
    spec = next((s for s in specs if topic in (s.name, s.name.removeprefix(prefix))), None)
    if spec is None:
        say(f"{topic} is not a declared topic; next: afluente topics list")
        raise typer.Exit(Exit.FOUND)
    admin = _admin(settings)
    differences = topics_apply.plan(admin, [spec], lambda _: False)
    exists = not any(d.kind is topics_apply.Kind.missing for d in differences)
    show(
        {
            **_row(spec),
            "exists": exists,
            "settings": spec.config,
            "differences": [asdict(d) for d in differences if exists],
            "records": topics_apply.record_counts(admin, spec.name) if exists else {},
        },
        format,
    )
    if differences:
        raise typer.Exit(Exit.FOUND)


def _read(workers: list[str] | None) -> tuple[Any, list[TopicSpec]]:
    from afluente.settings import TopicsSettings
    from consumers.workers import REGISTRY, load

    settings = TopicsSettings.read(os.environ)
    names = [load(worker).name for worker in workers or REGISTRY]
    return settings, declared(settings.environment.environment.value, names, settings.kafka.topic_prefix)


def _admin(settings: Any) -> Any:
    from afluente import kafka

    return kafka.admin(settings.kafka)


def _is_ours(prefix: str) -> Callable[[str], bool]:
    """Whether a topic looks like one of ours, so that those of removed workers are pointed out and others are not."""
    of_a_worker = r"[a-z-]+-worker\.(retry\.\w+|parked|dead-letter)"
    ours = re.compile(rf"{re.escape(prefix)}(events\.[a-z-]+|relay\.(positions|dead-letter)|{of_a_worker})")
    return lambda name: ours.fullmatch(name) is not None


def _row(spec: TopicSpec) -> dict[str, Any]:
    retention = spec.config.get("retention.ms")
    return {
        "topic": spec.name,
        "partitions": spec.partitions,
        "replication": spec.replication,
        "retention": "for ever, compacted" if retention is None else f"{int(retention) // 86_400_000} d",
        "cleanup": spec.config["cleanup.policy"],
    }
