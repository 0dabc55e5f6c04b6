"""A delivery and its outbox rows, in one transaction: after it the sender may forget, before it nothing happened.

Steps of `receive`: find the connection by the address; verify over the raw bytes; route; write the parent row, a
child row for each organization that a part belongs to, and one `webhook.received` for each new child. What fails its
signature leaves a row without its body and emits nothing; what belongs to no connection we know leaves a parent
without children.

A shared delivery (WhatsApp) may name connections of other organizations. Each of those verifies the bytes with its own
secrets: whoever can sign for one organization cannot write into another.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

import sql
from afluente.secrets import Keyring, SecretError
from producers import emit_async
from producers.ingest.signature import Check
from producers.ingest.sources import COMMON_HEADERS, Part, Source, registered
from producers.ingest.sources.whatsapp import ACCOUNT_PREFIX

SIGNATURE = "signature"
VERIFY_TOKEN = "verify_token"
API_TOKEN = "api_token"
MAX_HEADER = 1000

Connection = psycopg.AsyncConnection[Any]


class Outcome(StrEnum):
    """What became of a POST."""

    STORED = "stored"
    DUPLICATE = "duplicate"
    UNROUTED = "unrouted"
    REFUSED = "refused"
    UNKNOWN_CHANNEL = "unknown_channel"


@dataclass(frozen=True)
class Incoming:
    """One POST. `headers` are lower-case."""

    source: Source
    channel_id: UUID | None
    """From the address; None when it holds no channel id."""
    body: bytes
    headers: Mapping[str, str]
    received_at: datetime
    url_topic: str | None = None
    request_id: str | None = None


@dataclass(frozen=True)
class Receipt:
    """`webhook_event_id` is the parent row's; `events` counts the `webhook.received` emitted."""

    outcome: Outcome
    webhook_event_id: UUID | None
    topic: str | None = None
    reason: str | None = None
    events: int = 0


@dataclass(frozen=True)
class Channel:
    """A connection and its secrets in clear. Never logged."""

    id: UUID
    organization_id: UUID
    external_id: str | None
    status: str
    settings: Mapping[str, Any]
    secrets: Mapping[str, tuple[bytes, ...]]

    def __repr__(self) -> str:
        return f"Channel({self.id})"


def seal_purpose(purpose: str) -> str:
    """What a channel's secret is sealed for: it does not open as anything else."""
    return f"channel:{purpose}"


async def find_channel(
    conn: Connection, keyring: Keyring, source: str, channel_id: UUID, now: datetime
) -> Channel | None:
    """The connection of an address, with its secrets that are valid now."""
    rows = await _rows(conn, "channel", {"channel_id": channel_id, "source": source, "now": now})
    return next(iter(_channels(rows, keyring)), None)


async def receive(conn: Connection, keyring: Keyring, incoming: Incoming) -> Receipt:
    """Store one POST and everything it leads to. The caller commits: until then nothing happened."""
    source, body = incoming.source, incoming.body
    channel = None
    if incoming.channel_id is not None:
        channel = await find_channel(conn, keyring, source.name, incoming.channel_id, incoming.received_at)
    if channel is None:
        parent_id = await refuse(conn, incoming, "unknown_channel")
        return Receipt(Outcome.UNKNOWN_CHANNEL, parent_id, reason="unknown_channel")

    source = source.of(channel.settings)
    check = source.verify(body, incoming.headers, channel.secrets[SIGNATURE], incoming.received_at.timestamp())
    if not check.ok:
        parent_id = await refuse(conn, incoming, check.reason or "signature_mismatch", channel)
        return Receipt(Outcome.REFUSED, parent_id, reason=check.reason)

    incoming = replace(incoming, source=source, body=source.without_secrets(body))
    parts = source.route(incoming.body, incoming.headers, incoming.url_topic)
    topics = {part.topic for part in parts}
    topic = topics.pop() if len(topics) == 1 else "mixed"
    parent_id = await _insert_parent(conn, incoming, channel, topic)
    routed = await _route(conn, keyring, source, parts, channel, incoming.received_at, body, incoming.headers)
    organization_id, events = await _write_children(conn, parent_id, incoming, routed, len(parts))
    missing = len(parts) - len(routed)
    if not routed:
        outcome, status, reason = Outcome.UNROUTED, "unrouted", "no_connection"
    elif events == 0 and not missing:
        outcome, status, reason = Outcome.DUPLICATE, "duplicate", None
    else:
        outcome, status, reason = Outcome.STORED, "routed", f"unrouted_parts:{missing}" if missing else None
    await _settle(conn, parent_id, status, reason, organization_id, keep_body=outcome is not Outcome.DUPLICATE)
    return Receipt(outcome, parent_id, topic, reason, events)


async def refuse(conn: Connection, incoming: Incoming, reason: str, channel: Channel | None = None) -> UUID:
    """Store that a POST was refused, and why: its hash and length, never its body. Returns the row's id."""
    refusal_id: UUID = await _insert(
        conn,
        "insert_parent",
        {
            "organization_id": channel.organization_id if channel else None,
            "channel_id": channel.id if channel else None,
            "source": incoming.source.name,
            "topic": None,
            "verification": "failed",
            "reason": reason,
            "status": "refused",
            "summary": Jsonb({}),
            "headers": Jsonb({}),
            "raw_body": None,
            "body_sha256": hashlib.sha256(incoming.body).digest(),
            "body_bytes": _declared_bytes(incoming),
            "received_at": incoming.received_at,
        },
    )
    return refusal_id


class NotReplayable(Exception):
    """The delivery cannot go through again; the message says why."""


async def replay(conn: Connection, keyring: Keyring, webhook_event_id: UUID, now: datetime) -> int:
    """Let a stored delivery go through again; returns how many `webhook.received` were emitted.

    A child: its own organization's worker takes it once more (what it recorded before is found again, not doubled). A
    parent: the children it lacks are made, as for a connection that was set up after the delivery came.
    """
    row = next(iter(await _rows(conn, "stored", {"id": webhook_event_id})), None)
    if row is None:
        raise NotReplayable(f"no delivery has the id {webhook_event_id}")
    if row["parent_id"] is not None:
        await conn.execute(_query("again"), {"id": webhook_event_id})
        await _emit(conn, row["organization_id"], webhook_event_id, row["source"], row["topic"], None)
        return 1
    if row["verification"] != "verified" or row["raw_body"] is None:
        raise NotReplayable(f"{webhook_event_id} is {row['status']} ({row['reason']}): its body is not kept")
    source = registered()[row["source"]]
    channel = await find_channel(conn, keyring, source.name, row["channel_id"], now)
    if channel is None:
        raise NotReplayable(f"the channel {row['channel_id']} is gone")
    source = source.of(channel.settings)
    body, headers = bytes(row["raw_body"]), row["headers"]
    incoming = Incoming(source, channel.id, body, headers, row["received_at"], url_topic=headers.get(":topic"))
    parts = source.route(body, headers, incoming.url_topic)
    routed = await _route(conn, keyring, source, parts, channel, now, body, headers)
    organization_id, events = await _write_children(conn, webhook_event_id, incoming, routed, len(parts))
    if events:
        # Nothing is taken back: what had children before keeps its organization, and always its bytes.
        missing = len(parts) - len(routed)
        await _settle(
            conn,
            webhook_event_id,
            "routed",
            f"unrouted_parts:{missing}" if missing else None,
            row["organization_id"] or organization_id,
        )
    return events


async def _route(
    conn: Connection,
    keyring: Keyring,
    source: Source,
    parts: Sequence[Part],
    channel: Channel,
    now: datetime,
    body: bytes,
    headers: Mapping[str, str],
) -> list[tuple[Part, Channel]]:
    """Each part with the connection it belongs to; parts of none are left out."""
    if not source.shared:
        return [
            (part, channel)
            for part in parts
            if channel.status != "paused"
            and (
                part.external_id is None
                or (channel.external_id or part.external_id).lower() == part.external_id.lower()
            )
        ]
    named = await _named(conn, keyring, source, parts, now)
    checked: dict[UUID, Check] = {}
    routed = []
    for part in parts:
        if part.external_id is None:
            # A shape that names nobody: whoever's address it was posted to has signed for it.
            owners: Iterable[Channel] = (channel,)
        else:
            owners = named.get(part.external_id, ())
        for owner in owners:
            if owner.id not in checked:
                checked[owner.id] = (
                    Check(True)
                    if owner.id == channel.id
                    else source.verify_again(body, headers, owner.secrets[SIGNATURE])
                )
            if checked[owner.id].ok and owner.status != "paused":
                routed.append((part, owner))
                break
    return routed


async def _named(
    conn: Connection, keyring: Keyring, source: Source, parts: Sequence[Part], now: datetime
) -> Mapping[str, list[Channel]]:
    # What cannot be printed (a NUL, half a surrogate pair) is nobody's name, and nothing to ask Postgres for.
    names = [part.external_id for part in parts if part.external_id is not None and part.external_id.isprintable()]
    accounts = [name.removeprefix(ACCOUNT_PREFIX) for name in names if name.startswith(ACCOUNT_PREFIX)]
    found: dict[str, list[Channel]] = defaultdict(list)
    parameters = {
        "source": source.name,
        "external_ids": [name for name in names if not name.startswith(ACCOUNT_PREFIX)],
        "account_ids": accounts,
        "now": now,
    }
    for channel in _channels(await _rows(conn, "channels_named", parameters), keyring):
        if channel.external_id is not None:
            found[channel.external_id].append(channel)
        account = channel.settings.get("account_id")
        if isinstance(account, str):
            found[ACCOUNT_PREFIX + account].append(channel)
    # A number is one connection's, by constraint. An account that two organizations name is neither's to read.
    return {name: owners for name, owners in found.items() if len({owner.organization_id for owner in owners}) == 1}


async def _write_children(
    conn: Connection, parent_id: UUID, incoming: Incoming, routed: Sequence[tuple[Part, Channel]], parts: int
) -> tuple[UUID | None, int]:
    """The children that are not there yet, each with its event. Returns whose the whole POST is, and how many."""
    owners = {channel.organization_id for _, channel in routed}
    # The POST is one organization's own only if all of it is; then its child need not repeat the bytes.
    organization_id = owners.pop() if len(owners) == 1 and len(routed) == parts else None
    events = 0
    for part, channel in routed:
        whole = part.body is None
        bytes_of_part = incoming.body if part.body is None else part.body
        dedupe_key = f"{part.dedupe_key}:{parent_id}" if part.repeatable else part.dedupe_key
        child_id = await _insert(
            conn,
            "insert_child",
            {
                "parent_id": parent_id,
                "organization_id": channel.organization_id,
                "channel_id": channel.id,
                "source": incoming.source.name,
                "topic": part.topic,
                "dedupe_key": dedupe_key,
                "subject": part.subject,
                "summary": Jsonb(dict(part.summary)),
                "headers": Jsonb(_kept(incoming)),
                "raw_body": None if whole and organization_id is not None else bytes_of_part,
                "body_sha256": hashlib.sha256(bytes_of_part).digest(),
                "body_bytes": len(bytes_of_part),
                "received_at": incoming.received_at,
            },
        )
        if child_id is None:
            continue
        await _emit(conn, channel.organization_id, child_id, incoming.source.name, part.topic, incoming.request_id)
        events += 1

    return organization_id, events


async def _settle(
    conn: Connection,
    parent_id: UUID,
    status: str,
    reason: str | None,
    organization_id: UUID | None,
    *,
    keep_body: bool = True,
) -> None:
    parameters = {
        "id": parent_id,
        "status": status,
        "reason": reason,
        "organization_id": organization_id,
        "keep_body": keep_body,
    }
    await conn.execute(_query("settle_parent"), parameters)


async def _insert_parent(conn: Connection, incoming: Incoming, channel: Channel, topic: str) -> UUID:
    parent_id: UUID = await _insert(
        conn,
        "insert_parent",
        {
            "organization_id": None,
            "channel_id": channel.id,
            "source": incoming.source.name,
            "topic": topic,
            "verification": "verified",
            "reason": None,
            "status": "routed",
            "summary": Jsonb({}),
            "headers": Jsonb(_kept(incoming)),
            "raw_body": incoming.body,
            "body_sha256": hashlib.sha256(incoming.body).digest(),
            "body_bytes": len(incoming.body),
            "received_at": incoming.received_at,
        },
    )
    return parent_id


async def _emit(
    conn: Connection, organization_id: UUID, child_id: UUID, source: str, topic: str | None, request_id: str | None
) -> None:
    await emit_async(
        conn,
        "webhook.received",
        entity_kind="webhook_event",
        entity_id=child_id,
        payload={"webhook_event_id": str(child_id), "source": source, "topic": topic},
        organization_id=organization_id,
        request_id=request_id,
        source="ingest",
    )


def _kept(incoming: Incoming) -> dict[str, str]:
    """The headers that are stored; ':topic' is the one that stood in the URL."""
    wanted = COMMON_HEADERS | incoming.source.kept_headers
    kept = {name: value for name, value in incoming.headers.items() if name in wanted}
    if incoming.url_topic:
        kept[":topic"] = incoming.url_topic
    return {name: _printable(value[:MAX_HEADER]) for name, value in kept.items()}


def _printable(text: str) -> str:
    """With '?' for all but printable ASCII: Postgres takes no NUL, and people look at these."""
    return "".join(letter if " " <= letter <= "~" else "?" for letter in text)


def _declared_bytes(incoming: Incoming) -> int:
    """How long the body was, or said to be when it was not read."""
    declared = incoming.headers.get("content-length", "")
    return max(
        len(incoming.body), int(declared) if declared.isascii() and declared.isdigit() and len(declared) < 16 else 0
    )


def _channels(rows: Iterable[Mapping[str, Any]], keyring: Keyring) -> list[Channel]:
    """Rows of channel and secret as channels. A secret that does not open is left out: a check against it fails."""
    grouped: dict[UUID, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        grouped[row["id"]].append(row)
    channels = []
    for found in grouped.values():
        secrets: dict[str, tuple[bytes, ...]] = {SIGNATURE: (), VERIFY_TOKEN: (), API_TOKEN: ()}
        for row in found:
            if row["sealed"] is None:
                continue
            try:
                plain = keyring.open(
                    row["sealed"], organization_id=row["organization_id"], purpose=seal_purpose(row["purpose"])
                )
            except SecretError:
                continue
            if plain:
                secrets[row["purpose"]] += (plain,)
        first = found[0]
        channels.append(
            Channel(
                first["id"], first["organization_id"], first["external_id"], first["status"], first["settings"], secrets
            )
        )
    return channels


async def _insert(conn: Connection, name: str, parameters: Mapping[str, Any]) -> Any:
    row = await (await conn.execute(_query(name), parameters)).fetchone()
    return None if row is None else row[0]


async def _rows(conn: Connection, name: str, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    async with conn.cursor(row_factory=dict_row) as cursor:
        await cursor.execute(_query(name), parameters)
        return await cursor.fetchall()


def _query(name: str) -> str:
    return sql.queries("webhook_events")[name]
