"""`afluente relay lanes`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from afluente.cli.output import Format, FormatOption, show


def lanes(
    number: Annotated[
        int | None, typer.Argument(min=1, max=64, help="how many there are to be", show_default=False)
    ] = None,
    format: FormatOption = Format.text,
) -> None:
    """Show how many lanes the relay has, or change it while relays run.

    Organizations are divided among lanes by the last byte of their id. A change hands every lane's position over as it
    stands: nothing is lost and nothing is published twice, whatever is killed meanwhile; give the command again to
    complete one that was interrupted. Relays started without --lanes go over by themselves.

    JSON keys: layout, lanes.

    \b
    Examples:
      afluente relay lanes
      afluente relay lanes 4
    """
    from afluente.clock import SystemClock
    from afluente.settings import RelaySettings
    from producers.relay.lanes import settle_lanes
    from producers.relay.service import instance_name

    settings = RelaySettings.read(os.environ)
    layout = settle_lanes(
        settings.kafka,
        settings.postgres.dsn,
        number,
        instance=instance_name(),
        clock=SystemClock(),
        heartbeat=lambda: None,
        under_load=True,
    )
    show({"layout": layout.number, "lanes": layout.lanes}, format)
