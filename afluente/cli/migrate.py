"""`afluente migrate`: the database's schema, up, down and status. Runs as the login of DATABASE_URL,
which owns the tables.

Keys of the JSON: status gives `migration, state, applied_at`; up and down give `migration, done`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from afluente.cli.exits import Exit
from afluente.cli.output import Format, FormatOption, say, show

app = typer.Typer(help="Bring the database to its schema, or back.", no_args_is_help=True, rich_markup_mode=None)

DryRunOption = Annotated[bool, typer.Option("--dry-run", help="show what would be done, do nothing")]


@app.command()
def up(
    to: Annotated[int | None, typer.Option("--to", metavar="N", help="stop after the migration of this number")] = None,
    show_sql: Annotated[bool, typer.Option("--show-sql", help="print the SQL that is pending, do nothing")] = False,
    dry_run: DryRunOption = False,
    format: FormatOption = Format.text,
) -> None:
    """Apply the pending migrations, then all functions. Safe to run at any time, from many places at once.

    Exit 3 when an applied file was edited since: nothing is changed then.

    \b
    Examples:
      afluente migrate up
      afluente migrate up --show-sql
    """
    import sql
    from sql import migrate

    with _connect() as conn:
        if show_sql or dry_run:
            pending = {s.version for s in migrate.status(conn) if s.state in ("pending", "unfinished")}
            chosen = [m for m in sql.migrations() if m.version in pending and (to is None or m.version <= to)]
            if show_sql:
                for migration in chosen:
                    typer.echo(f"-- {migration.label}\n{migration.up}")
            else:
                show([{"migration": m.label, "done": False} for m in chosen], format)
            say(f"nothing was done; {len(chosen)} migrations are pending")
            return
        done = migrate.up(conn, to)
        show([{"migration": label, "done": True} for label in done], format)
        say(f"{len(done)} migrations applied" if done else "up to date")


@app.command()
def down(
    steps: Annotated[int, typer.Argument(metavar="N", min=1, help="how many migrations, newest first")] = 1,
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
    dry_run: DryRunOption = False,
    format: FormatOption = Format.text,
) -> None:
    """Take the newest N migrations back, with the data in their tables.

    \b
    Examples:
      afluente migrate down --dry-run
      afluente migrate down 2 --yes
    """
    from sql import migrate

    with _connect() as conn:
        applied = [s.label for s in migrate.status(conn) if s.state != "pending"][::-1][:steps]
        if not applied:
            say("nothing is applied")
            raise typer.Exit(Exit.FOUND)
        if dry_run:
            show([{"migration": label, "done": False} for label in applied], format)
            say(f"dry run: nothing was done; {len(applied)} migrations would be taken back")
            return
        question = f"take back {', '.join(applied)} on {conn.info.dbname} at {conn.info.host}, with their data?"
        if not yes:
            if not sys.stdin.isatty():
                say(f"would {question.rstrip('?')}: add --yes")
                raise typer.Exit(Exit.USAGE)
            if not typer.confirm(question, err=True):
                raise typer.Exit(Exit.USAGE)
        done = migrate.down(conn, steps)
        show([{"migration": label, "done": True} for label in done], format)
        say(f"{len(done)} migrations taken back")


@app.command()
def status(format: FormatOption = Format.text) -> None:
    """List the migrations and whether they are applied. Exit 3 when something is pending, edited or unknown here.

    \b
    Examples:
      afluente migrate status
      afluente migrate status --format json
    """
    from sql import migrate

    with _connect() as conn:
        states = migrate.status(conn)
    show([{"migration": s.label, "state": s.state, "applied_at": s.applied_at} for s in states], format)
    left = [s for s in states if s.state != "applied"]
    if left:
        say(f"{len(left)} are not as they should be; next: afluente migrate up")
        raise typer.Exit(Exit.FOUND)
    say(f"all {len(states)} migrations are applied")


@app.command()
def new(name: Annotated[str, typer.Argument(help="lower snake case, such as contact_notes")]) -> None:
    """Write the two empty files of the next migration into the source tree.

    \b
    Examples:
      afluente migrate new contact_notes
    """
    from pathlib import Path

    import sql

    if re.fullmatch(r"[a-z][a-z0-9_]*", name) is None:
        raise typer.BadParameter("lower snake case, such as contact_notes", param_hint="NAME")
    folder = Path(sql.__path__[0]) / "migrations"
    number = max((m.version for m in sql.migrations()), default=0) + 1
    label = f"{number:04d}_{name}"
    up_text = "-- What was wrong or missing before, and for whom.\n"
    for path, text in (
        (folder / f"{label}.up.sql", up_text),
        (folder / f"{label}.down.sql", "-- Takes back what the up file did.\n"),
    ):
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
        typer.echo(str(path))
    say("tables with tenant data call tenancy.protect in the same file; next: afluente migrate up")


@contextmanager
def _connect() -> Iterator[Any]:
    from afluente import postgres
    from afluente.settings import MigrateSettings

    settings = MigrateSettings.read(os.environ)
    with postgres.connect(
        settings.postgres.dsn, role=None, application_name="afluente migrate", autocommit=True
    ) as conn:
        yield conn
