"""`afluente dlq retry` and `discard`."""

from __future__ import annotations

import os
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from afluente.cli.dlq.choosing import (
    All,
    Asked,
    DryRun,
    Ids,
    Limit,
    Rate,
    Reason,
    Yes,
    agree,
    choose,
    connect,
    divided,
    filtered,
    organizations_of,
    paced,
)
from afluente.cli.exits import Exit
from afluente.cli.output import Format, FormatOption, say, show
from afluente.cli.registry import use_registry
from afluente.cli.who import is_interactive, who

if TYPE_CHECKING:
    from afluente.cli.dlq.choosing import AnyLetter
    from consumers.dead_letters import Answer, Outcome, Pace

Probe = Annotated[bool, typer.Option("--probe", help="try one, wait for its outcome, go on only if it succeeded")]
ProbeTimeout = Annotated[
    float, typer.Option("--probe-timeout", min=0.1, max=3600, help="seconds to wait for the outcome of the probe")
]


@filtered
def retry(
    asked: Asked,
    ids: Ids = None,
    all_: All = False,
    limit: Limit = 10_000,
    probe: Probe = False,
    probe_timeout: ProbeTimeout = 60.0,
    rate: Rate = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    reason: Reason = "",
    format: FormatOption = Format.text,
) -> None:
    """Give dead letters to the worker and target that failed, and to no one else; attempts count from 1 again.

    SIGINT and SIGTERM end it between two batches. The same command again goes on with the rest: what is given is no
    longer dead. With filters, deliveries that need review are left out, unless --state needs_review names them.
    Those of the relay are published again, once, with today's code and limits: by the relay, within a second when it
    runs. A row that fails again is a dead letter again.

    Exit status: 3 when nothing matched; 5 when some could not be given (see `failed`); 130 when interrupted. Of the
    probe: 1 when it failed, 75 when there was no outcome in time (does the worker run?); the rest stays dead. JSON
    keys: action, applied, count, organizations, workers, reason, ids, failed [{id, error}], left, interrupted, probe
    {id, outcome (delivered, failed, unknown), attempts, error, waited_s} or null.

    \b
    Examples:
      afluente dlq retry --worker webhook-dispatch-worker --since 2h --dry-run
      afluente dlq retry --cause c1-0f3a9c2b7d10 --probe --rate 50 --reason "receiver is back" --yes
      afluente dlq retry --relay --event-type lead.created --reason "schema mended"
    """
    from afluente.settings import KafkaSettings

    settings = KafkaSettings.read(os.environ)
    use_registry(settings.topic_prefix)
    with connect(autocommit=True) as conn:
        letters = choose(conn, ids, asked, all_, limit, leave_reviews=True)
        if probe:
            _require_one_worker(letters)
        outcome, answer, stopped = None, None, False
        if not dry_run:
            reason = agree("retry", letters, yes, reason)
            with paced("retry", len(letters), rate) as pace:
                outcome, answer = _retry(conn, settings, letters, pace, probe, probe_timeout, yes, reason)
                stopped = pace.stop.is_set()
    report("retry", letters, outcome, reason, format, answer, stopped)


def _retry(
    conn: Any,
    settings: Any,
    letters: list[AnyLetter],
    pace: Pace,
    probe: bool,
    timeout_s: float,
    yes: bool,
    reason: str,
) -> tuple[Outcome, Answer | None]:
    from consumers import dead_letters

    of_workers, of_relay = divided(letters)
    outcome, answer = dead_letters.Outcome(), None
    if probe:
        first, of_workers = of_workers[0], of_workers[1:]
        now = datetime.now(UTC)
        say(f"trying {first.id}")
        outcome, answer = dead_letters.probe(
            conn, settings, first, actor=who(), reason=reason, now=now, timeout_s=timeout_s, stop=pace.stop
        )
        say(f"{answer.outcome} after {answer.waited_s} s" + (f": {answer.error}" if answer.error else ""))
        if answer.outcome != "delivered" or pace.stop.is_set() or not _go_on(len(of_workers), yes):
            outcome.left += len(of_workers)
            return outcome, answer
    now = datetime.now(UTC)
    outcome.add(dead_letters.reprocess(conn, settings, of_workers, actor=who(), reason=reason, now=now, pace=pace))
    outcome.add(dead_letters.relay.retry(conn, settings, of_relay, actor=who(), reason=reason, pace=pace))
    return outcome, answer


def _require_one_worker(letters: list[AnyLetter]) -> None:
    of_workers, of_relay = divided(letters)
    if of_relay:
        raise typer.BadParameter("--probe is for letters of workers: the relay answers each within a second")
    if len(workers := sorted({letter.worker for letter in of_workers})) > 1:
        raise typer.BadParameter(
            f"--probe tries one letter for all, and these are of {len(workers)} workers: choose one by --worker"
        )


def _go_on(rest: int, yes: bool) -> bool:
    return yes or not rest or not is_interactive() or typer.confirm(f"retry the other {rest:,}?", err=True)


@filtered
def discard(
    asked: Asked,
    ids: Ids = None,
    all_: All = False,
    limit: Limit = 10_000,
    dry_run: DryRun = False,
    yes: Yes = False,
    reason: Reason = "",
    format: FormatOption = Format.text,
) -> None:
    """Close dead letters for good: they are not tried again. More than one: the worker's name is asked for.

    Exit status and JSON keys as for `retry`.

    \b
    Examples:
      afluente dlq discard webhook-normalize-worker:0199c0de-0000-7000-8000-000000000000 --reason "test data"
      afluente dlq discard --worker webhook-dispatch-worker --until 30d --yes --reason "too old to matter"
    """
    from afluente.settings import KafkaSettings
    from consumers import dead_letters

    with connect(autocommit=True) as conn:
        letters = choose(conn, ids, asked, all_, limit, leave_reviews=True)
        outcome, stopped = None, False
        if not dry_run:
            reason = agree("discard", letters, yes, reason)
            of_workers, of_relay = divided(letters)
            with paced("discard", len(letters), None) as pace:
                outcome = dead_letters.discard(conn, of_workers, actor=who(), reason=reason, pace=pace)
                if of_relay:
                    settings = KafkaSettings.read(os.environ)
                    noted = dead_letters.relay.discard(conn, settings, of_relay, actor=who(), reason=reason, pace=pace)
                    outcome.add(noted)
                stopped = pace.stop.is_set()
    report("discard", letters, outcome, reason, format, None, stopped)


def report(
    action: str,
    letters: list[AnyLetter],
    outcome: Outcome | None,
    reason: str,
    format: Format,
    answer: Answer | None,
    stopped: bool,
) -> None:
    """Show what was done, and leave with the exit status that says it."""
    result = {
        "action": action,
        "applied": outcome is not None,
        "count": len(outcome.done) if outcome else len(letters),
        "organizations": organizations_of(letters),
        "workers": sorted({letter.worker for letter in letters}),
        "reason": reason,
        "ids": outcome.done if outcome else [letter.id for letter in letters],
        "failed": outcome.failed if outcome else [],
        "left": outcome.left if outcome else 0,
        "interrupted": stopped and bool(outcome and outcome.left),
        "probe": asdict(answer) if answer else None,
    }
    show(result, format)
    if outcome is None:
        say("this was a dry run: nothing was done")
        return
    if outcome.left:
        say(f"{len(outcome.done):,} done, {outcome.left:,} left as they were; the same command again goes on with them")
    if result["interrupted"]:
        raise typer.Exit(Exit.INTERRUPTED)
    if answer is not None and answer.outcome != "delivered":
        raise typer.Exit(Exit.FAILED if answer.outcome == "failed" else Exit.TRY_AGAIN)
    if outcome.failed:
        raise typer.Exit(Exit.PARTLY if outcome.done else Exit.FAILED)
    if action == "retry":
        say("next: afluente dlq list" + " --relay" * (result["workers"] == ["relay"]))
