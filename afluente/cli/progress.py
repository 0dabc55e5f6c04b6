"""How far a long command is, on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from afluente.cli.output import say

_SAY_EVERY_S = 5.0


@contextmanager
def bar(words: str, total: int | None, *, lines: bool = False) -> Iterator[Callable[[int], None]]:
    """Called with how many are done: a bar when somebody sees it; with `lines` a line now and then when nobody does."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(words, total=total)
            yield lambda count: progress.update(task, completed=count)
        return
    said_at = time.monotonic()

    def advance(count: int) -> None:
        nonlocal said_at
        if lines and time.monotonic() - said_at >= _SAY_EVERY_S:
            say(f"{words}: {count:,}" + (f" of {total:,}" if total is not None else ""))
            said_at = time.monotonic()

    yield advance
