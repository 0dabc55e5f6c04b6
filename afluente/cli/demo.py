"""`afluente demo`: the main job, played through on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from afluente.cli.exits import Exit
from afluente.cli.output import say

app = typer.Typer()


@app.command()
def demo(
    keep: Annotated[bool, typer.Option("--keep", help="leave everything running, and print the addresses")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="end what a kept demo left running, play nothing")] = False,
    state_dir: Annotated[
        Path, typer.Option("--state-dir", help="its data, logs and addresses; begun afresh each time")
    ] = Path(".afluente/demo"),
) -> None:
    """Play webhooks of nine senders through the whole pipeline, with a failure on purpose, and reconcile the end.

    Kafka and Postgres are found or started as by `afluente up`. Waits between attempts are scaled down. The exit status
    is that of `afluente verify`: 0 when everything adds up, 3 when not.

    \b
    Examples:
      afluente demo
      afluente demo --keep     then: source .afluente/demo/env; afluente dlq list; afluente demo --stop
    """
    from afluente.local import demo as story

    if stop:
        if not story.stop(state_dir):
            say("no demo is running")
            raise typer.Exit(Exit.FOUND)
        say("stopped")
        return
    raise typer.Exit(story.play(story.Options(state_dir, keep)))
