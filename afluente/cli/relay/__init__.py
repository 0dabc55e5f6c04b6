"""`afluente relay`: each command in a module of its own."""

from __future__ import annotations

import typer

from afluente.cli.relay.lanes import lanes
from afluente.cli.relay.pause import pause, resume
from afluente.cli.relay.repair import repair
from afluente.cli.relay.replay import replay
from afluente.cli.relay.reposition import reposition
from afluente.cli.relay.run import run
from afluente.cli.relay.status import status
from afluente.cli.relay.verify import verify

app = typer.Typer(help="Publish committed events to Kafka.", no_args_is_help=True, rich_markup_mode=None)

app.command()(run)
app.command()(lanes)
app.command()(status)
app.command()(replay)
app.command()(verify)
app.command()(pause)
app.command()(resume)
app.command()(repair)
app.command()(reposition)
