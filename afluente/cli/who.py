"""The person who gives a command: who it is, for what is written down about it, and whether they mean it."""

from __future__ import annotations

import getpass
import os
import sys

import typer

from afluente.cli.exits import Exit
from afluente.cli.output import say


def who() -> str:
    """The login of the machine."""
    try:
        return getpass.getuser()
    except OSError:
        return f"uid {os.getuid()}"


def is_interactive() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def agree(question: str, yes: bool, *, typed: str | None = None) -> None:
    """Ask, unless `yes`. Nobody there to answer: exit 2, nothing done. `typed`: what has to be typed to agree."""
    if yes:
        return
    if not is_interactive():
        say(f"{question} Nobody is there to answer: add --yes, or --dry-run to see it")
        raise typer.Exit(Exit.USAGE)
    if typed is not None:
        agreed = typer.prompt(f"{question} Type {typed} to confirm", default="", err=True) == typed
    else:
        agreed = typer.confirm(question, err=True)
    if not agreed:
        say("nothing done")
        raise typer.Exit(Exit.FAILED)
