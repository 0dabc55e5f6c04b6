"""`afluente dlq`: dead letters, found by cause, tried again, edited, closed, given out."""

from __future__ import annotations

import typer

from afluente.cli.dlq.choosing import parse_time
from afluente.cli.dlq.editing import edit
from afluente.cli.dlq.exporting import export
from afluente.cli.dlq.giving import discard, retry
from afluente.cli.dlq.reading import causes, list_, show_

__all__ = ["app", "parse_time"]

app = typer.Typer(help="Find, retry, edit, discard, export dead letters.", no_args_is_help=True, rich_markup_mode=None)

app.command("list")(list_)
app.command()(causes)
app.command("show")(show_)
app.command()(retry)
app.command()(edit)
app.command()(discard)
app.command()(export)
