"""`afluente contact-events`: the facts about contacts, and facts from files.

Keys of the JSON: list `id, occurred_at, event_type, metric_name, category, value, currency, source, source_type,
contact_id, external_event_id, unique_event_id, entity_type, entity_id, object_id, object_id_ref, properties,
received_at`; count `what, events, totals, first_at, last_at`; imports `id, file_name, started_at, finished_at,
started_by, last_line, recorded, duplicates, failed, contacts_created`; import `applied, import_id, file, sha256, rows,
recorded, duplicates, failed, contacts_created, errors [{line, reason}], rejected_file, seconds`.
"""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

import typer

from afluente.cli.contact import Organization, acting
from afluente.cli.exits import Exit
from afluente.cli.output import Format, FormatOption, say, show

app = typer.Typer(help="List, count and import contact events.", no_args_is_help=True)

ContactOption = Annotated[
    UUID | None, typer.Option("--contact", help="only of this contact, and of all merged into it")
]
EventType = Annotated[str | None, typer.Option("--type", help="contact event type, such as purchase_completed")]
Metric = Annotated[str | None, typer.Option("--metric", help="metric, such as 'Order Paid'")]
SourceOption = Annotated[str | None, typer.Option("--source", help="only from this source, such as shopify")]
Since = Annotated[str | None, typer.Option("--since", help="happened since: ISO time, 2h, 30d, yesterday")]
Until = Annotated[str | None, typer.Option("--until", help="happened before")]


class By(StrEnum):
    type = "type"
    metric = "metric"
    source = "source"
    contact = "contact"
    day = "day"


class InputFormat(StrEnum):
    csv = "csv"
    ndjson = "ndjson"


@app.command("list")
def list_(
    organization: Organization,
    contact: ContactOption = None,
    event_type: EventType = None,
    metric: Metric = None,
    source: SourceOption = None,
    since: Since = None,
    until: Until = None,
    limit: Annotated[int, typer.Option(help="at most so many, newest first", min=1, max=100_000)] = 50,
    format: FormatOption = Format.text,
) -> None:
    """Show contact events, newest first. Exit 3 when there is none.

    \b
    Examples:
      afluente contact-events list --org "Loja Azul" --type purchase_completed --since 30d
      afluente contact-events list --org "Loja Azul" --contact 0199b2a4-... --format jsonl --limit 1000
    """
    from producers import contacts

    with acting(organization, "contact-events list") as (conn, organization_id):
        rows = contacts.events(
            conn, organization_id, limit=limit, **_conditions(contact, event_type, metric, source, since, until)
        )
    show(rows, format, ["occurred_at", "event_type", "metric_name", "value", "currency", "source", "contact_id", "id"])
    if not rows:
        say("no contact event of that kind")
        raise typer.Exit(Exit.FOUND)


@app.command()
def count(
    organization: Organization,
    by: Annotated[By | None, typer.Option("--by", help="one line for each; left out: all together")] = None,
    contact: ContactOption = None,
    event_type: EventType = None,
    metric: Metric = None,
    source: SourceOption = None,
    since: Since = None,
    until: Until = None,
    limit: Annotated[int, typer.Option(help="at most so many lines, the largest first", min=1, max=100_000)] = 100,
    format: FormatOption = Format.text,
) -> None:
    """Count contact events, and add up their values in each currency. Days are the organization's.

    \b
    Examples:
      afluente contact-events count --org "Loja Azul" --by metric --since 7d
      afluente contact-events count --org "Loja Azul" --metric "Order Paid" --by day --since 30d --format csv
    """
    from producers import contacts

    with acting(organization, "contact-events count") as (conn, organization_id):
        rows = contacts.counts(
            conn,
            organization_id,
            by=by.value if by else None,
            limit=limit,
            **_conditions(contact, event_type, metric, source, since, until),
        )
    show(rows, format, ["what", "events", "totals", "first_at", "last_at"])


@app.command()
def imports(
    organization: Organization,
    limit: Annotated[int, typer.Option(help="at most so many, newest first", min=1, max=1_000)] = 20,
    format: FormatOption = Format.text,
) -> None:
    """Show the imports and how far they are. Exit 3 when there is none.

    \b
    Example:
      afluente contact-events imports --org "Loja Azul"
    """
    from producers import contact_event_import as importing

    with acting(organization, "contact-events imports") as (conn, organization_id):
        rows = importing.imports(conn, organization_id, limit)
    show(rows, format, ["started_at", "finished_at", "file_name", "last_line", "recorded", "duplicates", "failed"])
    if not rows:
        say("nothing was imported")
        raise typer.Exit(Exit.FOUND)
    if any(row["finished_at"] is None for row in rows):
        say("one that is not finished: give the same `contact-events import` command again, it goes on")


@app.command("import")
def import_(
    file: Annotated[str, typer.Argument(metavar="FILE", help="CSV or NDJSON, also as .gz; - is standard input")],
    organization: Organization,
    source: Annotated[str | None, typer.Option("--source", help="source of rows that do not name theirs")] = None,
    create_contacts: Annotated[
        bool, typer.Option("--create-contacts", help="make contacts of people whom nobody knows yet")
    ] = False,
    input_format: Annotated[
        InputFormat | None, typer.Option("--input-format", help="left out: by the file's name or its first bytes")
    ] = None,
    timezone: Annotated[
        str | None, typer.Option(help="of times without an offset; left out: the organization's")
    ] = None,
    country: Annotated[str, typer.Option(help="where phones without a country code are dialled")] = "BR",
    rejected: Annotated[
        Path | None, typer.Option("--rejected", help="where rejected rows go; left out: FILE.rejected.csv or .ndjson")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="read a file that was imported before; nothing of it is recorded twice")
    ] = False,
    automations: Annotated[
        bool, typer.Option("--automations", help="the facts may start automations, as if they had just happened")
    ] = False,
    lanes: Annotated[int, typer.Option(help="connections that write side by side", min=1, max=32)] = 2,
    batch_rows: Annotated[
        int,
        typer.Option(
            "--batch-rows", help="rows of one transaction; of a file begun before: as then", min=1, max=20_000
        ),
    ] = 5_000,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="judge and look up everything, record nothing")] = False,
    format: FormatOption = Format.text,
) -> None:
    """Record facts from a file: each is one contact event with its event on the bus.

    The contact is named by contact_id, phone, email or contact_external_id (an id at contact_source, else at source). A
    fact with external_event_id (its name at its source, `order_paid:1001`) is recorded once, whoever brings it; a row
    without one is named by the file's content and its line, so the same file never counts twice. Ended by Ctrl-C, a
    kill or a server that went away: run the same command again, it goes on where it was. Automations are not started by
    what is imported, unless --automations says so.

    Exit 5 when some rows were rejected (the rejected file has them with line and reason; mend it and import it), 1 when
    all were, 3 when the file was imported before.

    \b
    Example: facts.csv
      phone,event_type,metric,external_event_id,value,occurred_at,properties.productName
      11 98765-4321,purchase_completed,,order_paid:1001,297.90,2026-11-20T10:00:00-03:00,Café 500 g
      +55 62 98003-0003,,Loyalty Earned,loyalty:77,,2026-11-21 09:30,
    \b
      afluente contact-events import facts.csv --org "Loja Azul" --source erp --create-contacts --dry-run
      afluente contact-events import facts.csv --org "Loja Azul" --source erp --create-contacts
      zcat facts.ndjson.gz | afluente contact-events import - --org "Loja Azul" --source erp
    """
    import threading
    import time

    from afluente import postgres
    from afluente.cli.progress import bar
    from afluente.cli.who import who
    from afluente.settings import MigrateSettings
    from afluente.signals import stopped_by_signals
    from producers import contact_event_import as importing
    from producers import organizations

    settings = MigrateSettings.read(os.environ)
    dsn = settings.postgres.dsn
    with postgres.connect(dsn, application_name="afluente import") as conn:
        organization_id = organizations.find(conn, organization)
    options = importing.Options(
        source=source,
        timezone=timezone,
        country=country,
        create_contacts=create_contacts,
        again=again,
        dry_run=dry_run,
        lanes=lanes,
        batch_rows=batch_rows,
        actor=who(),
        automations=automations,
    )
    wanted = importing.Format(input_format.value) if input_format else None
    with importing.Source.open(file, sys.stdin.buffer, wanted) as opened:
        begun = time.monotonic()
        interrupt = threading.Event()
        with bar("lines", opened.lines, lines=True) as advance, stopped_by_signals(interrupt.set):
            result = importing.run(dsn, organization_id, opened, options, progress=advance, interrupt=interrupt)
        seconds = time.monotonic() - begun
        written = None
        if result.failed and not dry_run and not result.interrupted and not result.finished_before:
            written = rejected or Path(f"{'stdin' if file == '-' else file}.rejected.{opened.format.value}")
            with postgres.connect(dsn, application_name="afluente import") as conn:
                importing.write_rejected(conn, result, organization_id, opened, written)
    rows = result.recorded + result.duplicates + result.failed
    row: dict[str, Any] = {
        "applied": not dry_run,
        "import_id": result.import_id,
        "file": opened.name,
        "sha256": opened.sha256.hex(),
        "rows": rows,
        "recorded": result.recorded,
        "duplicates": result.duplicates,
        "failed": result.failed,
        "contacts_created": result.contacts_created,
        "errors": [{"line": line, "reason": reason} for line, reason in result.errors],
        "rejected_file": None if written is None else str(written),
        "seconds": round(seconds, 3),
    }
    columns = [name for name in row if name not in ("errors", "sha256") and row[name] is not None]
    show(row, format, columns if format in (Format.text, Format.csv) else None)
    _explain(result, opened.name, written, dry_run)


def _explain(result: Any, name: str, written: Path | None, dry_run: bool) -> None:
    if result.finished_before:
        say(f"{name} was imported before: nothing done (--again reads it once more)")
        raise typer.Exit(Exit.FOUND)
    for line, reason in result.errors:
        say(f"  line {line}: {reason}")
    if result.failed > len(result.errors) > 0:
        say(f"  ... and {result.failed - len(result.errors):,} more")
    if result.interrupted:
        say("interrupted: what is recorded stays, and the same command goes on from there")
        raise typer.Exit(Exit.INTERRUPTED)
    if result.batches_before and not dry_run:
        say("went on where an earlier run had ended")
    if dry_run:
        say("this was a dry run: nothing was recorded")
    if result.failed:
        if written is not None:
            say(f"rejected rows are in {written}: mend it and import it")
        raise typer.Exit(Exit.PARTLY if result.recorded or result.duplicates else Exit.FAILED)


def _conditions(
    contact: UUID | None,
    event_type: str | None,
    metric: str | None,
    source: str | None,
    since: str | None,
    until: str | None,
) -> dict[str, Any]:
    from datetime import UTC, datetime

    from afluente.cli.dlq import parse_time

    now = datetime.now(UTC)
    return {
        "contact_id": contact,
        "event_type": event_type,
        "metric_name": metric,
        "source": source,
        "since": parse_time(since, now),
        "until": parse_time(until, now),
    }
