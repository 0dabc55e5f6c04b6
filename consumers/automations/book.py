"""Automations as people handle them: written, edited, switched on and off, looked at. For commands and pages.

What must stay true: an edit is a new version, and what runs goes on with its own. Paused: nothing begins, and what
wakes up is held; enabling lets it go on. Disabled: nothing begins, and what waited is cancelled, visibly. Times of a
schedule that pass meanwhile are not made up for. The caller's transaction holds everything; nothing here commits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from psycopg import Connection
from psycopg.errors import UniqueViolation
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

import sql
from afluente.errors import Refused
from afluente.secrets import Keyring
from consumers.automations import naming
from consumers.automations.definition import SIGNING, Definition, read
from consumers.automations.schedules import next_due
from consumers.outbound import signature

Status = Literal["enabled", "paused", "disabled"]

_SQL = sql.queries("automations")


class NoAutomation(Refused):
    """There is none of that id or name."""

    exit_status = 3  # looked, and found nothing


@dataclass(frozen=True)
class Written:
    """What `create` and `edit` did. `signing_secret` is shown once, when one was made; `unset` names the secrets that
    its headers ask for and that are not set."""

    id: UUID
    version: int
    signing_secret: str | None
    unset: tuple[str, ...]


def purpose(automation_id: UUID | str, name: str) -> str:
    """What a secret is sealed for: it does not open as another automation's, or under another name."""
    return f"automation:{UUID(str(automation_id))}:{name}"


def create(conn: Connection[Any], keyring: Keyring | None, organization_id: UUID, source: Mapping[str, Any]) -> Written:
    """Write an automation down, disabled. `keyring` seals the secret that its calls are signed with; without calls it
    may be None. Raises BadDefinition, and Refused for a name that is taken."""
    definition = read(source)
    naming.check(definition)
    try:
        row = conn.execute(_SQL["create"], _columns(definition) | {"organization_id": organization_id}).fetchone()
    except UniqueViolation:
        raise _taken(definition) from None
    assert row is not None
    automation_id: UUID = row[0]
    return _write(conn, keyring, organization_id, automation_id, 1, definition, source)


def edit(
    conn: Connection[Any], keyring: Keyring | None, found: Mapping[str, Any], source: Mapping[str, Any], now: datetime
) -> Written:
    """A new version of an automation (`find`). Its status stays."""
    definition = read(source)
    naming.check(definition)
    which = {"organization_id": found["organization_id"], "automation_id": found["id"]}
    try:
        row = conn.execute(_SQL["edit"], _columns(definition) | which).fetchone()
    except UniqueViolation:
        raise _taken(definition) from None
    assert row is not None
    written = _write(conn, keyring, found["organization_id"], found["id"], row[0], definition, source)
    if found["status"] == "enabled":
        # Other steps at the same times: one that is due and not emitted yet stays due.
        same = source.get("trigger") == found["definition"].get("trigger")
        due = found["next_due_at"] if same else next_due(definition, found["timezone"], now)
        conn.execute(_SQL["set_next_due"], which | {"next_due_at": due})
    return written


def set_status(conn: Connection[Any], found: Mapping[str, Any], status: Status, now: datetime) -> int:
    """Enable, pause or disable; returns how many runs it let go on, or cancelled."""
    which = {"organization_id": found["organization_id"], "automation_id": found["id"]}
    due = next_due(read(found["definition"]), found["timezone"], now) if status == "enabled" else None
    if status == found["status"]:
        due = found["next_due_at"]  # nothing is switched: what is due and not emitted yet stays due
    conn.execute(_SQL["set_status"], which | {"status": status, "next_due_at": due})
    if status == "enabled":
        return len(conn.execute(_SQL["release_held"], which | {"due_at": now.isoformat()}).fetchall())
    if status == "disabled":
        return len(conn.execute(_SQL["cancel_open"], which | {"reason": "automation_disabled", "now": now}).fetchall())
    return 0


def set_secret(conn: Connection[Any], keyring: Keyring, found: Mapping[str, Any], name: str, plain: bytes) -> None:
    """Keep a secret of an automation, sealed, in place of the one of that name."""
    conn.execute(
        _SQL["put_secret"],
        {
            "organization_id": found["organization_id"],
            "automation_id": found["id"],
            "name": name,
            "sealed": keyring.seal(plain, organization_id=found["organization_id"], purpose=purpose(found["id"], name)),
        },
    )


def find(conn: Connection[Any], word: str, organization_id: UUID | None = None) -> dict[str, Any]:
    """The automation that an id or a name means, locked. NoAutomation when there is none; Refused when there are
    several of that name."""
    with conn.cursor(row_factory=dict_row) as cursor:
        rows = cursor.execute(
            _SQL["find"], {"organization_id": organization_id, "id": _as_id(word), "word": word}
        ).fetchall()
    if not rows:
        raise NoAutomation(f"there is no automation {word!r}", hint="afluente automation list")
    if len(rows) > 1:
        raise Refused(f"several organizations have an automation {word!r}", hint="name it by its id, or add --org")
    return rows[0]


def listed(conn: Connection[Any], organization_id: UUID | None = None) -> list[dict[str, Any]]:
    """Every automation, or one organization's."""
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(_SQL["list"], {"organization_id": organization_id}).fetchall()


def runs(
    conn: Connection[Any],
    *,
    automation_id: UUID | None = None,
    organization_id: UUID | None = None,
    state: str | None = None,
    contact_id: UUID | None = None,
    run_id: UUID | None = None,
    limit: int = 50,
) -> list[dict[str, Any]]:
    """Runs, the newest first, each with its steps."""
    with conn.cursor(row_factory=dict_row) as cursor:
        found = cursor.execute(
            _SQL["runs"],
            {
                "automation_id": automation_id,
                "organization_id": organization_id,
                "state": state,
                "contact_id": contact_id,
                "run_id": run_id,
                "limit": limit,
            },
        ).fetchall()
        steps = cursor.execute(_SQL["steps"], {"run_ids": [row["id"] for row in found]}).fetchall()
    for row in found:
        row["steps"] = [
            {name: value for name, value in step.items() if name != "run_id"}
            for step in steps
            if step["run_id"] == row["id"]
        ]
    return found


def _columns(definition: Definition) -> dict[str, Any]:
    metric, event_type = definition.keys
    return {
        "name": definition.name,
        "description": definition.description,
        "trigger_type": definition.trigger.type,
        "trigger_metric": metric,
        "trigger_event_type": event_type,
    }


def _write(
    conn: Connection[Any],
    keyring: Keyring | None,
    organization_id: UUID,
    automation_id: UUID,
    version: int,
    definition: Definition,
    source: Mapping[str, Any],
) -> Written:
    which = {"organization_id": organization_id, "automation_id": automation_id}
    conn.execute(_SQL["add_version"], which | {"version": version, "definition": Jsonb(dict(source))})
    names = {row[0] for row in conn.execute(_SQL["secret_names"], which).fetchall()}
    made = None
    if definition.calls and SIGNING not in names:
        if keyring is None:
            raise Refused(
                "the calls of this automation are signed, and there is no key to seal their secret with",
                hint="set AFLUENTE_SECRETS_KEY",
            )
        made = signature.new_secret()
        set_secret(conn, keyring, {"id": automation_id, "organization_id": organization_id}, SIGNING, made.encode())
    return Written(automation_id, version, made, tuple(sorted(definition.secrets - names)))


def _taken(definition: Definition) -> Refused:
    return Refused(
        f"the organization has an automation {definition.name!r} already",
        hint="afluente automation edit, or another name",
    )


def _as_id(word: str) -> UUID | None:
    try:
        return UUID(word)
    except ValueError:
        return None
