"""`afluente relay reposition`."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from afluente.cli.exits import Exit
from afluente.cli.output import Format, FormatOption, say, show

if TYPE_CHECKING:
    from producers.relay.reposition import Outcome


def reposition(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do it; without, only say what would be done")] = False,
    list_: Annotated[
        Path | None, typer.Option("--list", metavar="FILE", help="write what is published and no longer in the table")
    ] = None,
    since: Annotated[
        str | None, typer.Option("--since", help="rows from before count as published: ISO time, 2h, 3d, yesterday")
    ] = None,
    pg_upgrade: Annotated[
        bool, typer.Option("--pg-upgrade", help="after pg_upgrade: only the identity has changed")
    ] = False,
    although_none_match: Annotated[
        bool, typer.Option("--although-none-match", help="even if the topics hold no row of this table")
    ] = False,
    format: FormatOption = Format.text,
) -> None:
    """Find the place to go on from, after a restore, a failover, or with topics made anew.

    Reads what the topics hold, compares it with event_log, and makes the relay go on exactly where the two differ. Stop
    every relay of this installation first; writers may go on. Without --yes nothing is changed: exit status 3 when
    there is something to mend, 0 when there is not.

    JSON keys: applied, cases, reasons, rows, published, to_publish, assumed_published, lost, deferred_published,
    records, restamped, layout, lanes, since. --list writes a JSON line for each event that was published and is no
    longer in the table: event_id, organization_id, event_type, seq, topic, partition, offset, time.

    \b
    Examples:
      afluente relay reposition --list lost.ndjson
      afluente relay reposition --yes
      afluente relay reposition --pg-upgrade --yes
    """
    from afluente import kafka
    from afluente.cli.dlq import parse_time
    from afluente.settings import RelaySettings
    from producers.relay.reposition import Options, Reposition

    settings = RelaySettings.read(os.environ)
    border = parse_time(since, datetime.now(UTC))
    # The admin client is silent: of a Kafka that is away there is one sentence, not the client's hundred lines.
    kafka.admin(settings.kafka).list_topics(timeout=kafka.METADATA_TIMEOUT_S)
    options = Options(
        apply=yes,
        since=border,
        lost_file=list_,
        pg_upgrade=pg_upgrade,
        although_none_match=although_none_match,
    )
    outcome = Reposition(settings.kafka, settings.postgres.dsn, options, tell=_tell).run()
    show(_data(outcome, border), format)
    _explain(outcome, list_, border)
    if not outcome.applied and _is_to_mend(outcome):
        raise typer.Exit(Exit.FOUND)


def _is_to_mend(outcome: Outcome) -> bool:
    counts = outcome.comparison
    if outcome.diagnosis.cases == ("never-published",):
        return counts is not None and counts.records > 0
    return bool(outcome.diagnosis.cases) or (counts is not None and counts.lost > 0)


def _tell(read: int, total: int) -> None:
    say(f"{read:,} of {total:,} records read")


def _data(outcome: Outcome, since: datetime | None) -> dict[str, Any]:
    counts, diagnosis = outcome.comparison, outcome.diagnosis
    return {
        "applied": outcome.applied,
        "cases": list(diagnosis.cases),
        "reasons": list(diagnosis.reasons),
        "rows": counts and counts.rows,
        "published": counts and counts.published,
        "to_publish": counts and counts.to_publish,
        "assumed_published": counts and counts.assumed,
        "lost": counts and counts.lost,
        "deferred_published": counts and counts.deferred,
        "records": counts and counts.records,
        "restamped": outcome.settled,
        "layout": outcome.layout,
        "lanes": outcome.lanes,
        "since": since,
    }


def _explain(outcome: Outcome, listed: Path | None, since: datetime | None) -> None:
    counts, reasons = outcome.comparison, outcome.diagnosis.reasons
    say("; ".join(reasons) if reasons else "the positions belong here")
    if counts is not None:
        say(
            f"of {counts.rows:,} rows, {counts.published:,} are on the topics and {counts.to_publish:,} "
            f"{'will be' if outcome.applied else 'would be'} published"
        )
        if counts.assumed:
            why = "are older than --since" if since else "are older than what their topics still hold"
            say(f"{counts.assumed:,} are not on the topics and count as published, since they {why}")
        if counts.lost:
            where = f": see {listed}" if listed else "; --list FILE names them"
            say(f"{counts.lost:,} events are published and no longer in the table{where}")
        if counts.deferred:
            say(f"{counts.deferred:,} published events wait to be released a second time: they count as published")
        if counts.records and not counts.published:
            say("not one record is of a row that is here: is it the right database, and the right topic prefix?")
    if outcome.applied:
        say("next: afluente relay run")
    elif _is_to_mend(outcome):
        if counts is not None and "other-postgres" in outcome.diagnosis.cases:
            say("if it was pg_upgrade: afluente relay reposition --pg-upgrade")
        say("nothing was done; to do it: the same with --yes")
