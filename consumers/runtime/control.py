"""What people tell a worker: to pause, and to resume.

A pause is a row of worker_control, so it holds for every process of the worker, restarts included; ended ones stay as
what was done, by whom and why. The processes look once a second. What must stay true: a process looks before it begins
anything, and while Postgres is away what it saw last holds (nothing can begin then anyway).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg import AsyncConnection, Connection

import sql

LOOK_EVERY_S = 1.0  # a pause is to be obeyed within 2 s
LOOK_WITHIN_S = 5.0
SAY_EVERY_S = 60.0  # that it is still paused

_QUERIES = sql.queries("worker_control")


@dataclass(frozen=True, slots=True)
class Pause:
    """Who paused the worker, when, and why ('' when they did not say)."""

    by: str
    since: datetime
    reason: str


async def look(conn: AsyncConnection[Any], worker: str) -> Pause | None:
    """The pause that is in force for the worker."""
    row = await (await conn.execute(_QUERIES["paused"], {"worker": worker})).fetchone()
    return None if row is None else Pause(*row)


def paused(conn: Connection[Any]) -> dict[str, Pause]:
    """Every worker that is paused."""
    return {worker: Pause(*rest) for worker, *rest in conn.execute(_QUERIES["all_paused"])}


def pause(conn: Connection[Any], worker: str, *, by: str, reason: str) -> tuple[Pause, bool]:
    """Pause the worker: the pause that is in force now, and whether it is this one. An older one stays as it is."""
    parameters = {"worker": worker, "by": by[:255], "reason": reason[:1000]}
    while True:
        if (row := conn.execute(_QUERIES["pause"], parameters).fetchone()) is not None:
            return Pause(*row), True
        if (found := paused(conn).get(worker)) is not None:  # None: ended in between
            return found, False


def resume(conn: Connection[Any], worker: str, *, by: str) -> Pause | None:
    """End the pause and return what it was; None when there was none."""
    row = conn.execute(_QUERIES["resume"], {"worker": worker, "by": by[:255]}).fetchone()
    return None if row is None else Pause(*row)


def known(conn: Connection[Any]) -> set[str]:
    """The workers that have told the database of themselves."""
    return {worker for (worker,) in conn.execute(_QUERIES["known"])}
