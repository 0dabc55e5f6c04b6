"""`afluente dlq export`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, BinaryIO

import typer

from afluente.cli.dlq.choosing import (
    All,
    Asked,
    Ids,
    Limit,
    Reason,
    connect,
    divided,
    filtered,
    named,
    paced,
    require_some,
    required_reason,
)
from afluente.cli.exits import Exit
from afluente.cli.output import Format, FormatOption, json_line, say, show
from afluente.cli.registry import use_registry
from afluente.cli.who import who

_AT_ONCE = 20  # letters in memory, with records of up to 2 MiB


@filtered
def export(
    asked: Asked,
    ids: Ids = None,
    all_: All = False,
    limit: Limit = 10_000,
    output: Annotated[
        str, typer.Option("--output", "-o", help="a file that is not there yet; - for stdout", metavar="FILE")
    ] = "-",
    reason: Reason = "",
    format: FormatOption = Format.text,
) -> None:
    """Write dead letters whole, a JSON object on each line, for whoever is to find out what is wrong with them.

    They hold personal data: names, phones, messages, as their events do. The file can be read by its owner only; give
    it to nobody who may not see that, and delete it when it has served. Who exported what, and why, is written down.

    Keys of a line: those of `list`, and key_base64, value_base64, headers [[name, base64]] and event, null when the
    bytes are none (or the record is nowhere any more: then value_base64 is null too). What was written is said on
    stderr, with --output FILE also on stdout in --format. Exit status: 3 when nothing matched, 5 when some have no
    record any more, 130 when interrupted. JSON keys: action, applied, count, output, reason, failed [{id, error}],
    interrupted.

    \b
    Examples:
      afluente dlq export --cause c1-0f3a9c2b7d10 --limit 5 --output letters.ndjson --reason "for the crm team"
      afluente dlq export webhook-normalize-worker:0199c0de-0000-7000-8000-000000000000 --reason "bug 812" | jq .event
    """
    from afluente.settings import KafkaSettings
    from consumers import dead_letters

    require_some(ids, asked, all_)
    reason = required_reason(reason)
    settings = KafkaSettings.read(os.environ)
    use_registry(settings.topic_prefix)
    given: dict[str, Any] = {"actor": who(), "reason": reason}
    with connect(autocommit=True) as conn, _opened(output) as file, paced("export", None, None) as pace:
        given["pace"] = pace

        def write(line: dict[str, Any]) -> None:
            file.write(json_line(line))

        if ids or asked.of_relay:
            if ids:
                letters = named(conn, ids, relay=asked.relay, states=dead_letters.STATES)[:limit]
            else:
                wanted = asked.filter(conn, limit, dead_letters.relay.OPEN)
                letters = [*dead_letters.relay.find(conn, settings, wanted, states=wanted.states)]
            of_workers, of_relay = divided(letters)
            parts = [of_workers[start : start + _AT_ONCE] for start in range(0, len(of_workers), _AT_ONCE)]
            outcome = dead_letters.export(conn, settings, parts, write, **given)
            if of_relay:
                outcome.add(dead_letters.relay.export(conn, settings, of_relay, write, **given))
        else:
            every = dead_letters.each(conn, asked.filter(conn, limit), _AT_ONCE)
            outcome = dead_letters.export(conn, settings, every, write, **given)
        file.flush()
        stopped = pace.stop.is_set() and outcome.left > 0
    result = {
        "action": "export",
        "applied": True,
        "count": len(outcome.done),
        "output": output,
        "reason": reason,
        "failed": outcome.failed,
        "interrupted": stopped,
    }
    if output != "-":
        show(result, format)
    limited = " (the limit)" if len(outcome.done) == limit else ""
    say(f"{len(outcome.done):,} dead letters written{limited}; they hold personal data")
    if stopped:
        raise typer.Exit(Exit.INTERRUPTED)
    if not outcome.done:
        say("no dead letter matches")
        raise typer.Exit(Exit.FOUND)
    if outcome.failed:
        raise typer.Exit(Exit.PARTLY)


@contextmanager
def _opened(output: str) -> Iterator[BinaryIO]:
    """The file, gone again when nothing was written to it."""
    if output == "-":
        try:
            with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as file:
                yield file
        except BrokenPipeError:  # whoever read it has had enough
            raise typer.Exit(Exit.FAILED) from None
        return
    try:
        opened = os.fdopen(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"--output {output}: {error}") from None
    try:
        with opened as file:
            yield file
    finally:
        if os.path.getsize(output) == 0:
            os.unlink(output)
