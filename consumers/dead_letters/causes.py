"""Dead letters by cause: thousands of them are a few errors.

A cause is a worker, an event type, an error's class and the part of its text that does not vary
(`afluente.error_pattern`, in Postgres, so that a filter by cause is a condition like the others).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg import Connection

import sql
from consumers.dead_letters.letters import Filter

_QUERIES = sql.queries("dead_letters")


@dataclass(frozen=True, slots=True)
class Cause:
    """`message` is the error's text with what varies cut; `example` the id of one letter."""

    cause: str
    worker: str
    event_type: str | None
    error_class: str | None
    message: str
    letters: int
    organizations: int
    first_seen_at: datetime
    last_seen_at: datetime
    example: str


def causes(conn: Connection[Any], wanted: Filter) -> list[Cause]:
    """Of the letters that match, those of workers, the most frequent first; at most `wanted.limit` causes."""
    rows = conn.execute(_QUERIES["causes"], wanted.parameters | {"undecodable": not wanted.about_events})
    return [Cause(*row) for row in rows]


def named(
    conn: Connection[Any], errors: Sequence[tuple[str, str | None, str | None, str | None]]
) -> list[tuple[str, str]]:
    """For each worker, event type, error class and error: the cause's id and its message."""
    names = ("workers", "types", "classes", "errors")
    columns = {name: [error[number] for error in errors] for number, name in enumerate(names)}
    rows = conn.execute(_QUERIES["causes_of"], columns)
    return [(row[0], row[1]) for row in rows]
