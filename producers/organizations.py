"""The organization that a person means by an id, a slug or a name. For commands; services know the id."""

from __future__ import annotations

from typing import Any, cast
from uuid import UUID

import psycopg

import sql
from afluente.errors import Refused


class NobodyCalled(Refused):
    """No organization of that id, slug or name."""

    exit_status = 3  # looked, and found nothing

    def __init__(self, word: str, *, may_create: bool) -> None:
        hint = "--create-org makes one of that name" if may_create else "its id, its slug or its whole name"
        super().__init__(f"no organization is called {word!r}", hint=hint)


def as_id(word: str) -> UUID | None:
    """The id that `word` is; None when it is a slug or a name, which only the database knows."""
    try:
        return UUID(word)
    except ValueError:
        return None


def identify(conn: psycopg.Connection[Any], word: str) -> UUID:
    """As `find`, but an id is taken as it is: what is asked about may be an organization that is gone."""
    return as_id(word) or find(conn, word)


def find(conn: psycopg.Connection[Any], word: str, *, create: bool | None = None) -> UUID:
    """Its id. NobodyCalled when there is none (unless `create`), Refused when there are several. `create`: None when
    the command has no such option."""
    queries = sql.queries("organizations")
    rows = conn.execute(queries["named"], {"word": word}).fetchall()
    if len(rows) > 1:
        raise Refused(f"more than one organization is called {word!r}", hint="name it by its id")
    if rows:
        return cast(UUID, rows[0][0])
    if not create:
        raise NobodyCalled(word, may_create=create is not None)
    row = conn.execute(queries["insert"], {"name": word}).fetchone()
    assert row is not None
    return cast(UUID, row[0])
