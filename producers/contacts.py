"""Contacts as people ask for them: found, shown with everything that is theirs, merged.

Each function runs in the caller's transaction, as whoever the session is: commands act for one organization.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import dict_row

import sql
from afluente.errors import Refused
from producers.errors import translate
from producers.ingest.normalize.facts import email_identity, phone_identity

_CONTACTS = sql.queries("contacts")
_EVENTS = sql.queries("contact_events")


class NoContact(Refused):
    """No contact of the organization has this id."""

    exit_status = 3  # looked, and found nothing

    def __init__(self, contact_id: UUID) -> None:
        super().__init__(f"the organization has no contact {contact_id}", hint="afluente contact list")


def found(
    conn: psycopg.Connection[Any],
    organization_id: UUID,
    *,
    search: str | None = None,
    tag: str | None = None,
    before: UUID | None = None,
    limit: int = 50,
) -> list[dict[str, Any]]:
    """Contacts, newest first. `search`: part of a name, or a whole phone, e-mail or id, as people write them."""
    forms = {search or ""}
    for identity in (phone_identity(search), email_identity(search)):
        if identity is not None:
            forms.add(identity.value)
    return _rows(
        conn,
        _CONTACTS["list"],
        organization_id=organization_id,
        search=search,
        values=list(forms),
        tag=tag,
        before=before,
        limit=limit,
    )


def shown(conn: psycopg.Connection[Any], organization_id: UUID, contact_id: UUID) -> dict[str, Any]:
    """A contact by any of its ids: its own facts, identities, tags, ids and summaries. NoContact when there is none."""
    rows = _rows(conn, _CONTACTS["show"], organization_id=organization_id, contact_id=contact_id)
    if not rows:
        raise NoContact(contact_id)
    contact = rows[0]
    stays, *merged = contact.pop("ids")
    given = {"organization_id": organization_id, "contact_id": stays}
    return {
        **contact,
        "merged_ids": merged,
        "identities": _rows(conn, _CONTACTS["identities"], **given),
        "tags": [row["name"] for row in _rows(conn, _CONTACTS["tags"], **given)],
        "metrics": _rows(conn, _CONTACTS["metrics"], **given),
    }


def merge(conn: psycopg.Connection[Any], gone: UUID, stays: UUID, *, actor: str, reason: str) -> dict[str, Any]:
    """Say that two contacts are one person (`merge_contacts`). Refused, ContactUnknownError."""
    try:
        (row,) = _rows(
            conn, _CONTACTS["merge"], from_contact_id=gone, into_contact_id=stays, actor_id=actor, reason=reason
        )
    except psycopg.Error as error:
        if (typed := translate(error)) is not None:
            raise typed from error
        raise
    return row


def events(
    conn: psycopg.Connection[Any],
    organization_id: UUID,
    *,
    limit: int,
    contact_id: UUID | None = None,
    before: tuple[Any, UUID] | None = None,
    **conditions: Any,
) -> list[dict[str, Any]]:
    """Contact events, newest first. Conditions: event_type, metric_name, source, category, since, until. `before`:
    occurred_at and id of the last one seen."""
    return _rows(
        conn,
        _EVENTS["list"],
        organization_id=organization_id,
        contact_id=contact_id,
        limit=limit,
        before_at=None if before is None else before[0],
        before_id=None if before is None else before[1],
        **_conditions(conditions),
    )


def counts(
    conn: psycopg.Connection[Any],
    organization_id: UUID,
    *,
    by: str | None,
    limit: int,
    contact_id: UUID | None = None,
    **conditions: Any,
) -> list[dict[str, Any]]:
    """How many contact events there are, by type, metric, source, contact or day (None: all together), most first."""
    return _rows(
        conn,
        _EVENTS["count"],
        organization_id=organization_id,
        contact_id=contact_id,
        by=by,
        limit=limit,
        **_conditions(conditions),
    )


def _conditions(given: dict[str, Any]) -> dict[str, Any]:
    names = ("event_type", "metric_name", "source", "category", "since", "until")
    if unknown := given.keys() - set(names):
        raise TypeError(f"contact events are not asked for by {', '.join(sorted(unknown))}")
    return {name: given.get(name) for name in names}


def _rows(conn: psycopg.Connection[Any], query: str, **parameters: Any) -> list[dict[str, Any]]:
    with conn.cursor(row_factory=dict_row) as cursor:
        # Never prepared: what is not asked for is planned away.
        return cursor.execute(query, parameters, prepare=False).fetchall()
