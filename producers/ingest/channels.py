"""Connections to senders: made, listed, their secrets sealed and rotated. Takes a connection; its owner commits."""

from __future__ import annotations

import secrets as random
from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

import sql
from afluente.errors import Refused
from afluente.secrets import Keyring
from producers.ingest import mapping
from producers.ingest.sources import generic, registered
from producers.ingest.store import SIGNATURE, seal_purpose

Connection = psycopg.Connection[Any]

GENERIC = "generic"


def add(
    conn: Connection,
    keyring: Keyring,
    *,
    organization_id: UUID,
    source: str,
    secrets: Mapping[str, bytes],
    external_id: str | None = None,
    name: str | None = None,
    mode: str = "live",
    settings: Mapping[str, Any] | None = None,
) -> UUID:
    """Make a connection; `secrets` is purpose to plain secret. Refused for an unknown sender, one already there, or
    settings that are wrong.

    A generic one is known by the name in its mapping: facts are recorded under it, so an organization has it once.
    """
    known = registered()
    if source not in known:
        raise Refused(f"no sender is called {source!r}", hint=f"one of {', '.join(sorted(known))}")
    known[source].check_settings(settings or {})
    if SIGNATURE in secrets:
        known[source].check_secret(settings or {}, secrets[SIGNATURE])
    if settings and source == GENERIC:
        own = settings[mapping.SETTING]["source"]
        if external_id not in (None, own):
            raise Refused(f"a generic connection is called as in its mapping: {own}, not {external_id}")
        external_id = own
    try:
        row = conn.execute(
            _query("insert"),
            {
                "organization_id": organization_id,
                "kind": known[source].kind,
                "source": source,
                "external_id": external_id,
                "name": name,
                "mode": mode,
                "settings": Jsonb(dict(settings or {})),
            },
        ).fetchone()
    except psycopg.errors.UniqueViolation:
        raise _taken(source, external_id) from None
    assert row is not None
    channel_id: UUID = row[0]
    for purpose, plain in secrets.items():
        put_secret(conn, keyring, organization_id, channel_id, purpose, plain)
    return channel_id


def put_secret(
    conn: Connection,
    keyring: Keyring,
    organization_id: UUID,
    channel_id: UUID,
    purpose: str,
    plain: bytes,
    slot: int = 1,
) -> None:
    if not plain:
        raise Refused(f"the {purpose} secret is empty")
    sealed = keyring.seal(plain, organization_id=organization_id, purpose=seal_purpose(purpose))
    conn.execute(
        _query("put_secret"),
        {
            "organization_id": organization_id,
            "channel_id": channel_id,
            "purpose": purpose,
            "slot": slot,
            "sealed": sealed,
        },
    )


def new_secret(source: str, settings: Mapping[str, Any]) -> str:
    """A secret for a connection whose sender takes ours, as it can use it."""
    return generic.new_secret(settings) if source == GENERIC else f"whsec_{random.token_urlsafe(32)}"


def new_secret_of(conn: Connection, channel_id: UUID) -> str:
    """The same for a connection that is there."""
    row = _one(conn, channel_id)
    return new_secret(row[2], row[3])


def rotate(
    conn: Connection, keyring: Keyring, channel_id: UUID, purpose: str, plain: bytes, old_valid_until: datetime
) -> None:
    """Put a new secret beside the newest one, which stays valid until then. The one before that is gone."""
    row = _one(conn, channel_id)
    if purpose == SIGNATURE:
        registered()[row[2]].check_secret(row[3], plain)
    slots = [found[0] for found in conn.execute(_query("secrets"), {"channel_id": channel_id, "purpose": purpose})]
    newest = slots[-1] if slots else None
    if newest is not None:
        conn.execute(
            _query("end_secret"),
            {"channel_id": channel_id, "purpose": purpose, "slot": newest, "valid_until": old_valid_until},
        )
    put_secret(conn, keyring, row[1], channel_id, purpose, plain, slot=2 if newest == 1 else 1)


def change(
    conn: Connection, channel_id: UUID, *, external_id: str | None, name: str | None, status: str | None
) -> dict[str, Any]:
    """Give a connection another id at its sender, another name, or pause it; returns its row. What it could not take
    before can be replayed then. Refused for a generic one's id, which is in its mapping, and for one that is taken."""
    source = _one(conn, channel_id)[2]
    if external_id is not None and source == GENERIC:
        raise Refused("a generic connection is called as in its mapping", hint="facts are recorded under that name")
    if external_id is not None and source == "shopify":
        external_id = external_id.lower()
    given = {"channel_id": channel_id, "external_id": external_id, "name": name, "status": status}
    try:
        with conn.cursor(row_factory=dict_row) as cursor:
            row = cursor.execute(_query("change"), given).fetchone()
    except psycopg.errors.UniqueViolation:
        raise _taken(source, external_id) from None
    assert row is not None
    return row


def set_mapping(conn: Connection, channel_id: UUID, given: Mapping[str, Any]) -> str:
    """Put another mapping in the place of a generic connection's; returns its sender's name. Replay what it lacked.

    Refused for one that is wrong, and for one of another name: the facts recorded so far have this one.
    """
    checked = mapping.read(given)
    row = conn.execute(_query("settings"), {"channel_id": channel_id}).fetchone()
    if row is None:
        raise Refused(f"no connection has the id {channel_id}", hint="`afluente channel list` shows the connections")
    source, external_id = row
    if source != GENERIC:
        raise Refused(f"{channel_id} is a connection to {source}: only a generic one has a mapping")
    if checked.source != external_id:
        raise Refused(
            f"the mapping calls its sender {checked.source!r}, the connection {external_id!r}",
            hint="facts are recorded under that name: keep it, or make another connection",
        )
    conn.execute(_query("set_settings"), {"channel_id": channel_id, "settings": Jsonb({mapping.SETTING: given})})
    return checked.source


def mapping_of(conn: Connection, channel_id: UUID) -> dict[str, Any]:
    """The mapping of a generic connection, as it was given."""
    row = conn.execute(_query("mapping"), {"channel_id": channel_id}).fetchone()
    if row is None or row[0] is None:
        raise Refused(f"{channel_id} is no generic connection", hint="`afluente channel list` shows the connections")
    found: dict[str, Any] = row[0]
    return found


def listed(conn: Connection, organization_id: UUID | None = None) -> list[dict[str, Any]]:
    """All connections, or those of one organization, as rows for people."""
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(_query("list"), {"organization_id": organization_id}).fetchall()


def _taken(source: str, external_id: str | None) -> Refused:
    hint = "`afluente channel list` shows the connections"
    if source == GENERIC:
        hint += "; a second one of the kind needs a name of its own (--as)"
    return Refused(f"{source} {external_id} is connected already", hint=hint)


def _one(conn: Connection, channel_id: UUID) -> tuple[Any, ...]:
    """id, organization, sender and settings of a connection."""
    row: tuple[Any, ...] | None = conn.execute(_query("one"), {"channel_id": channel_id}).fetchone()
    if row is None:
        raise Refused(f"no connection has the id {channel_id}", hint="`afluente channel list` shows the connections")
    return row


def _query(name: str) -> str:
    return sql.queries("channels")[name]
