"""`afluente relay repair`."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from afluente.cli.exits import Exit
from afluente.cli.output import Format, FormatOption, say, show

COLUMNS = [
    "topic",
    "partition",
    "start_offset",
    "producer_id",
    "epoch",
    "age_s",
    "transactional_id",
    "state",
    "outcome",
    "applied",
]


def repair(
    yes: Annotated[bool, typer.Option("--yes", help="do it; without this it is only shown")] = False,
    any_producer: Annotated[
        bool, typer.Option("--any-producer", help="also end what hangs and is no relay's: it is aborted")
    ] = False,
    older_than: Annotated[
        float | None,
        typer.Option(
            "--older-than",
            metavar="SECONDS",
            min=0,
            help="the age from which a transaction may be called hanging, in place of its timeout + 10 s",
        ),
    ] = None,
    format: FormatOption = Format.text,
) -> None:
    """Find transactions that a broker left undecided for ever, and end them.

    Readers of committed records stop at such a transaction, and the relay refuses to start. Brokers of 4.3.0 to 4.4.0
    leave one when they crash right after a commit. It is ended as it was in those of its partitions that know; if none
    does, it is aborted, and its rows are published again. What its coordinator is still going to end is left to it.

    Without --yes nothing is changed. Exit status 3: something is undecided (with --yes: and was left); 0: nothing is.
    Stop every relay first. When it is cut short, run it again.

    JSON: one object for each partition of a transaction, in the order of the repair, with topic, partition,
    start_offset, producer_id, epoch, age_s, transactional_id (null when nobody knows it any more), state (hanging,
    young: too young to tell, under way: its coordinator ends it, foreign: hanging and no relay's), outcome (abort or
    commit, null when it is not for us to end), applied.

    \b
    Examples:
      afluente relay repair
      afluente relay repair --yes
      afluente relay repair --format json
    """
    from afluente import postgres
    from afluente.settings import RelaySettings
    from producers.relay import repair as repairing
    from producers.relay.repair import State, Undecided

    settings = RelaySettings.read(os.environ)
    prefix = settings.kafka.topic_prefix
    told = False

    def waiting(seconds: float) -> None:
        nonlocal told
        if not told:
            say(f"a transaction is too young to tell: waiting {seconds:.0f} s")
        told = True

    def progress(item: Undecided, left: int) -> None:
        say(f"{'committed' if item.commit else 'aborted'} in {item.place} from offset {item.start_offset}, {left} left")

    with postgres.connect(settings.postgres.dsn, application_name="afluente-relay-repair", autocommit=True) as conn:
        if yes:
            repairing.require_no_owner(conn, prefix)
            found = repairing.repair(
                settings.kafka,
                lambda: repairing.require_no_owner(conn, prefix),
                any_producer=any_producer,
                older_than_s=older_than,
                progress=progress,
                waiting=waiting,
            )
        else:
            found = repairing.find(settings.kafka, any_producer=any_producer, older_than_s=older_than)
            for owner in repairing.living_owners(conn, prefix) if found else ():
                say(f"{owner.lane} is owned by {owner.instance}: stop it before --yes")
    show([_row(item) for item in found], format, COLUMNS)
    sys.stdout.flush()
    ended = [item for item in found if item.applied]
    left = [item for item in found if not item.applied and item.state is not State.under_way]
    if ended:
        say(f"{len(ended)} ended; start the relay, and then: afluente relay verify")
    if not left:
        say("nothing is undecided" if not ended else "nothing else is undecided")
        return
    if foreign := [item for item in left if item.state is State.foreign]:
        say(f"{len(foreign)} of other producers: ask their owners, or --any-producer")
    if len(left) > len(foreign) and not yes:
        say(f"{len(left) - len(foreign)} to end; nothing changed. Stop every relay, then: afluente relay repair --yes")
    raise typer.Exit(Exit.FOUND)


def _row(item: Any) -> dict[str, Any]:
    return {
        "topic": item.place.topic,
        "partition": item.place.partition,
        "start_offset": item.start_offset,
        "producer_id": item.producer.producer_id,
        "epoch": item.producer.epoch,
        "age_s": round(item.age_s, 1),
        "transactional_id": item.transactional_id,
        "state": item.state,
        "outcome": _outcome(item),
        "applied": item.applied,
    }


def _outcome(item: Any) -> str | None:
    from producers.relay.repair import State

    if item.state is not State.hanging:
        return None
    return "commit" if item.commit else "abort"
