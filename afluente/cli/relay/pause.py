"""`afluente relay pause` and `afluente relay resume`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from afluente.cli.output import Format, FormatOption, say, show
from afluente.cli.who import who

REASON_AT_MOST = 500


def pause(
    reason: Annotated[str, typer.Option("--reason", help="why, for whoever finds it paused")] = "",
    format: FormatOption = Format.text,
) -> None:
    """Publish nothing more until `afluente relay resume`, restarts included.

    Running relays obey within 2 s, at the end of the chunk in hand; they keep their lanes, and a relay started
    meanwhile waits. Nothing is lost: events go on being committed and wait in event_log. Paused already: exit 0, and
    that pause stays as it is.

    JSON keys: paused, changed (false: it was paused already), by, since, reason.

    \b
    Examples:
      afluente relay pause --reason "broker upgrade"
      afluente relay pause --format json
    """
    from afluente import postgres
    from afluente.settings import RelaySettings
    from producers.relay import control

    if len(reason) > REASON_AT_MOST:
        raise typer.BadParameter(f"a reason has {REASON_AT_MOST} characters at most, not {len(reason)}")
    settings = RelaySettings.read(os.environ)
    with postgres.connect(settings.postgres.dsn, application_name="afluente relay pause") as conn:
        held, changed = control.pause(conn, settings.kafka.topic_prefix, by=who(), reason=reason)
    show(
        {"paused": True, "changed": changed, "by": held.by, "since": held.since, "reason": held.reason or None}, format
    )
    say("next: afluente relay resume" if changed else "it was paused already")


def resume(format: FormatOption = Format.text) -> None:
    """Publish again, from where the relay stands. Not paused: exit 0, nothing done.

    JSON keys: paused, changed (false: it was not paused), and of the pause that ended by, since, reason.

    \b
    Examples:
      afluente relay resume
      afluente relay resume --format json
    """
    from afluente import postgres
    from afluente.settings import RelaySettings
    from producers.relay import control

    settings = RelaySettings.read(os.environ)
    with postgres.connect(settings.postgres.dsn, application_name="afluente relay resume") as conn:
        ended = control.resume(conn, settings.kafka.topic_prefix, by=who())
    show(
        {
            "paused": False,
            "changed": ended is not None,
            "by": ended.by if ended else None,
            "since": ended.since if ended else None,
            "reason": ended.reason or None if ended else None,
        },
        format,
    )
    say("next: afluente relay status" if ended else "it was not paused")
