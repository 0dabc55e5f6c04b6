"""`afluente relay verify`."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from afluente.cli.exits import Exit
from afluente.cli.output import Format, FormatOption, say, show
from afluente.cli.registry import use_registry

if TYPE_CHECKING:
    from producers.relay.verify import Result

PROGRESS_EVERY_S = 0.5
_HOUR_COLUMNS = ("organization_id", "hour", "rows", "records", "dead_letters", "rows_hash", "topic_hash", "result")


def verify(
    since: Annotated[str, typer.Option("--since", help="events created since: ISO time, 2h, 3d, yesterday")] = "24h",
    until: Annotated[
        str | None, typer.Option("--until", help="and before: the same. Default: now, by Postgres' clock")
    ] = None,
    org: Annotated[str | None, typer.Option("--org", help="only of this organization: its id, slug or name")] = None,
    archived: Annotated[
        Path | None,
        typer.Option("--archive", help="the archive's directory, for months that have left the table", file_okay=False),
    ] = None,
    hours: Annotated[
        bool, typer.Option("--hours", help="show every organization and hour, not only those that differ")
    ] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, help="name at most so many events")] = 100,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="no progress")] = False,
    format: FormatOption = Format.text,
) -> None:
    """Compare what is committed to event_log with what is on the topics. Exit status 3 when they differ.

    Counts and hashes of each organization's hour are compared, and where they differ the events are named: missing in
    the topic, only in the topic, twice in it, or with another content. May run beside everything: rows that the relay
    has not come to are counted as waiting, and the end may be now. Dead letters of the relay count as published. What
    retention has deleted cannot be compared, and is said.

    JSON keys: ok, complete, since, until, organization_id, rows, records, dead_lettered, reprocessed, waiting,
    directly_produced, not_comparable, missing_in_topic, only_in_topic, twice_in_topic, content_differs, differences
    [{kind, event_id, organization_id, created_at, event_type, seq, detail}], dead_letters [{event_id, organization_id,
    created_at, reason}], not_compared [{what, before, events, reason}], hours [{organization_id, hour, rows, records,
    dead_letters, rows_hash, topic_hash, is_equal}]. csv and jsonl show the hours.

    \b
    Examples:
      afluente relay verify --since yesterday
      afluente relay verify --since 2026-08-01T00:00Z --until 2026-09-01T00:00Z --archive /var/lib/afluente/archive
      afluente relay verify --since 2h --org "Loja Azul" --hours --format json
    """
    from afluente import postgres
    from afluente.cli.dlq import parse_time
    from afluente.settings import RelaySettings
    from producers import organizations
    from producers.relay import verify as verification

    settings = RelaySettings.read(os.environ)
    use_registry(settings.kafka.topic_prefix)
    now = datetime.now(UTC)
    begin, end = parse_time(since, now), parse_time(until, now)
    assert begin is not None
    organization_id = None
    if org is not None and (organization_id := organizations.as_id(org)) is None:
        with postgres.connect(settings.postgres.dsn, application_name="afluente-relay-verify") as conn:
            organization_id = organizations.find(conn, org)
    progress = _Progress(not quiet)
    result = verification.verify(
        settings.kafka,
        settings.postgres.dsn,
        since=begin,
        until=end,
        organization_id=organization_id,
        archived=archived,
        progress=progress,
    )
    progress.end()
    _show(result, verification.summary(result), hours, limit, format)
    raise typer.Exit(_say(result, limit))


def _show(result: Result, figures: dict[str, Any], all_hours: bool, limit: int, format: Format) -> None:
    hours = [hour for hour in result.hours if all_hours or not hour.is_equal]
    differences = [asdict(difference) for difference in result.differences[:limit]]
    if format == Format.json:
        show(
            {
                "ok": result.is_equal,
                "complete": result.is_complete,
                "since": result.since,
                "until": result.until,
                "organization_id": result.organization_id,
                **figures,
                "differences": differences,
                "dead_letters": result.dead_letters[:limit],
                "not_compared": result.not_comparable,
                "hours": hours,
            },
            format,
        )
        return
    rows = [{**asdict(hour), "result": "equal" if hour.is_equal else "differs"} for hour in hours]
    if format != Format.text:
        show(rows, format, _HOUR_COLUMNS)
        return
    show({name.replace("_", " "): figure for name, figure in figures.items()}, format)
    if rows:
        print()
        for row in rows:  # the sums tell machines something; people see whether they are the same
            row["rows_hash"], row["topic_hash"] = row["rows_hash"][:8], row["topic_hash"][:8]
        show(rows, format, _HOUR_COLUMNS)
    if differences:
        print()
        show(differences, format, ["kind", "event_id", "event_type", "created_at", "detail"])
    if result.dead_letters:
        print()
        letters = [{"dead_letter": letter.event_id, "reason": letter.reason} for letter in result.dead_letters[:limit]]
        show(letters, format)


def _say(result: Result, limit: int) -> Exit:
    """The verdict in words; returns the exit status that says the same."""
    for part in result.not_comparable:
        before = f" before {part.before.isoformat(timespec='seconds')}" if part.before is not None else ""
        say(f"not comparable: {part.what}{before}, {part.events} events: {part.reason}")
    if result.waiting:
        say(f"{result.waiting} rows wait for the relay: afluente relay status")
    if result.dead_lettered:
        say(f"{result.dead_lettered} rows are dead letters of the relay: afluente dlq list --relay")
    compared = result.rows + result.records + result.dead_lettered
    if not result.is_equal:
        more = "" if result.is_complete else " at least; what lies beyond was not looked at"
        named = f", the first {limit} are named" if len(result.differences) > limit else ""
        say(f"{len(result.differences)} differences{more}{named}; next: afluente relay status, afluente doctor")
        return Exit.FOUND
    if not compared and result.not_compared:
        say("nothing of this window can be compared")
        return Exit.FOUND
    if not compared:
        say("there are no events in this window")
        return Exit.DONE
    say("equal" if not result.not_compared else "equal, as far as it can be compared")
    return Exit.DONE


class _Progress:
    """What is being read, on stderr: one line that changes on a terminal, nothing elsewhere."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted and sys.stderr.isatty()
        self._next = time.monotonic() + PROGRESS_EVERY_S
        self._shown = False

    def __call__(self, what: str, done: int, total: int | None) -> None:
        if self._wanted and time.monotonic() >= self._next:
            self._next = time.monotonic() + PROGRESS_EVERY_S
            of = f" of {total:,}" if total is not None else ""
            print(f"\r\033[Kreading {what}: {done:,}{of}", end="", file=sys.stderr, flush=True)
            self._shown = True

    def end(self) -> None:
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
