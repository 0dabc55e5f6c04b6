"""`afluente worker`: each command in a module of its own."""

from __future__ import annotations

import typer

from afluente.cli.worker.list import list_
from afluente.cli.worker.pause import pause, resume
from afluente.cli.worker.run import run
from afluente.cli.worker.status import status

app = typer.Typer(help="Run, list and pause workers.", no_args_is_help=True, rich_markup_mode=None)

app.command()(run)
app.command("list")(list_)
app.command()(status)
app.command()(pause)
app.command()(resume)
