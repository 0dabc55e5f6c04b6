"""`afluente worker pause` and `afluente worker resume`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from afluente.cli.output import Format, FormatOption, say, show
from afluente.cli.who import who
from afluente.cli.worker.names import named

REASON_AT_MOST = 500

NameArgument = Annotated[str, typer.Argument(help="a worker's name, or module:Class", metavar="NAME")]


def pause(
    name: NameArgument,
    reason: Annotated[str, typer.Option("--reason", help="why, for whoever finds it paused")] = "",
    format: FormatOption = Format.text,
) -> None:
    """Begin no delivery of this worker until `afluente worker resume`, restarts included.

    Its processes obey within 2 s: what runs is finished and committed, what waits keeps waiting, and they keep their
    partitions. Events go on being published, and wait in Kafka: a pause longer than the retention of their topics
    loses their records, which a replay to the worker brings back. Paused already: exit 0, and that pause stays.

    JSON keys: worker, paused, changed (false: it was paused already), by, since, reason.

    \b
    Examples:
      afluente worker pause whatsapp-send-worker --reason "the provider is down"
      afluente worker pause webhook-dispatch-worker --format json
    """
    from afluente import postgres
    from afluente.settings import PostgresSettings
    from consumers.runtime import control

    if len(reason) > REASON_AT_MOST:
        raise typer.BadParameter(f"a reason has {REASON_AT_MOST} characters at most, not {len(reason)}")
    settings = PostgresSettings.read(os.environ)
    with postgres.connect(settings.dsn, application_name="afluente worker pause") as conn:
        worker = named(name, conn)
        held, changed = control.pause(conn, worker, by=who(), reason=reason)
    show(
        {
            "worker": worker,
            "paused": True,
            "changed": changed,
            "by": held.by,
            "since": held.since,
            "reason": held.reason or None,
        },
        format,
    )
    say(f"next: afluente worker resume {worker}" if changed else "it was paused already")


def resume(name: NameArgument, format: FormatOption = Format.text) -> None:
    """Go on with this worker, from where it stands. Not paused: exit 0, nothing done.

    JSON keys: worker, paused, changed (false: it was not paused), and of the pause that ended by, since, reason.

    \b
    Examples:
      afluente worker resume whatsapp-send-worker
      afluente worker resume webhook-dispatch-worker --format json
    """
    from afluente import postgres
    from afluente.settings import PostgresSettings
    from consumers.runtime import control

    settings = PostgresSettings.read(os.environ)
    with postgres.connect(settings.dsn, application_name="afluente worker resume") as conn:
        worker = named(name, conn)
        ended = control.resume(conn, worker, by=who())
    show(
        {
            "worker": worker,
            "paused": False,
            "changed": ended is not None,
            "by": ended.by if ended else None,
            "since": ended.since if ended else None,
            "reason": ended.reason or None if ended else None,
        },
        format,
    )
    say(f"next: afluente worker status {worker}" if ended else "it was not paused")
