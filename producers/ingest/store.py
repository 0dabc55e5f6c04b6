"""A delivery and its outbox rows, in one transaction: after it the sender may forget, before it nothing happened.

A delivery is first judged and then written. Judging is pure: verify over the raw bytes with the connection's secrets,
route, and say which rows it makes: a parent, a child for each organization that a part belongs to. Writing takes many
judged deliveries in one statement (`receive_webhooks`), which adds one `webhook.received` for each new child. What
fails its signature leaves a row without its body and emits nothing; what belongs to no connection we know leaves a
parent without children.

A connection may be held in memory: each has a version, which the statement compares. What was judged by a connection
that has changed since is not written, and is judged again.

A shared delivery (WhatsApp) may name connections of other organizations. Each of those verifies the bytes with its own
secrets: whoever can sign for one organization cannot write into another.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

import orjson
import psycopg
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

import sql
from afluente.secrets import Keyring, SecretError
from producers import emit_async
from producers.ingest.ids import uuid7
from producers.ingest.signature import Check
from producers.ingest.sources import COMMON_HEADERS, Part, Source, registered
from producers.ingest.sources.whatsapp import ACCOUNT_PREFIX

SIGNATURE = "signature"
VERIFY_TOKEN = "verify_token"
API_TOKEN = "api_token"
MAX_HEADER = 1000
# Connections that change while a delivery is on its way are no reason to give up; that they do so again and again is.
TRIES = 3
# Whose names are one connection's by constraint (channels_whatsapp_number_idx): nobody else need be asked for.
_OWN_NAMES = frozenset({"whatsapp"})

Connection = psycopg.AsyncConnection[Any]


class Outcome(StrEnum):
    """What became of a POST."""

    STORED = "stored"
    DUPLICATE = "duplicate"
    UNROUTED = "unrouted"
    REFUSED = "refused"
    UNKNOWN_CHANNEL = "unknown_channel"


@dataclass(slots=True)
class Incoming:
    """One POST. `headers` are lower-case."""

    source: Source
    channel_id: UUID | None
    """From the address; None when it holds no channel id."""
    body: bytes
    """Empty until it is read."""
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
    version: str
    """Another one as soon as anything of it has changed."""
    expires_at: datetime | None
    """When the first of its secrets ends; None: none does."""

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


@dataclass(frozen=True)
class Opened:
    """A verified delivery as far as it is known whose parts are whose. `incoming` has its source as the connection
    knows it, and its body without secrets; `signed` is the body as it came."""

    incoming: Incoming
    signed: bytes
    parts: Sequence[Part]


@dataclass(frozen=True, slots=True)
class Judged:
    """A delivery ready to be written: the rows as JSON, and the version of each connection that it was judged by."""

    id: UUID
    topic: str
    missing: int
    post: str
    parts: tuple[str, ...]
    body: bytes
    versions: Mapping[UUID, str]

    def receipt(self, events: int) -> Receipt:
        """What became of it, once `events` of its parts were new."""
        if not self.parts:
            return Receipt(Outcome.UNROUTED, self.id, self.topic, "no_connection")
        if not events and not self.missing:
            return Receipt(Outcome.DUPLICATE, self.id, self.topic)
        reason = f"unrouted_parts:{self.missing}" if self.missing else None
        return Receipt(Outcome.STORED, self.id, self.topic, reason, events)


class Unsettled(Exception):
    """The connections changed each time the delivery was about to be written: nothing is stored."""


async def receive(conn: Connection, keyring: Keyring, incoming: Incoming) -> Receipt:
    """Store one POST and everything it leads to. The caller commits: until then nothing happened."""
    for _ in range(TRIES):
        channel = None
        if incoming.channel_id is not None:
            channel = await find_channel(conn, keyring, incoming.source.name, incoming.channel_id, incoming.received_at)
        if channel is None:
            parent_id = await refuse(conn, incoming, "unknown_channel")
            return Receipt(Outcome.UNKNOWN_CHANNEL, parent_id, reason="unknown_channel")
        check = verify(incoming, channel)
        if not check.ok:
            parent_id = await refuse(conn, incoming, check.reason or "signature_mismatch", channel)
            return Receipt(Outcome.REFUSED, parent_id, reason=check.reason)
        opened = open_up(incoming, channel)
        named = await find_named(conn, keyring, opened, channel, incoming.received_at)
        judged = judge(opened, channel, named)
        events = (await write(conn, [judged]))[judged.id]
        if events is not None:
            return judged.receipt(events)
    raise Unsettled


def verify(incoming: Incoming, channel: Channel) -> Check:
    """Whether the bytes are from the sender that this connection is to."""
    source = incoming.source.of(channel.settings)
    return source.verify(incoming.body, incoming.headers, channel.secrets[SIGNATURE], incoming.received_at.timestamp())


def open_up(incoming: Incoming, channel: Channel) -> Opened:
    """The parts of a verified delivery."""
    source = incoming.source.of(channel.settings)
    body = source.without_secrets(incoming.body)
    parts = source.route(body, incoming.headers, incoming.url_topic)
    known = source is incoming.source and body is incoming.body
    return Opened(incoming if known else replace(incoming, source=source, body=body), incoming.body, parts)


def judge(opened: Opened, channel: Channel, named: Mapping[str, Sequence[Channel]]) -> Judged:
    """Which rows it makes; `named` are the connections that `names` of it lead to."""
    incoming, parts = opened.incoming, opened.parts
    routed = _route(incoming.source, parts, channel, named, opened.signed, incoming.headers)
    topics = {part.topic for part in parts}
    topic = topics.pop() if len(topics) == 1 else "mixed"
    organization_id = _owner(routed, len(parts))
    versions = {channel.id: channel.version} | {owner.id: owner.version for _, owner in routed}
    post_id = uuid7()
    post = {
        "id": post_id,
        "organization_id": organization_id,
        "channel_id": channel.id,
        "channels": list(versions),
        "source": incoming.source.name,
        "topic": topic,
        "missing": len(parts) - len(routed),
        "headers": _kept(incoming),
        "request_id": incoming.request_id,
        "received_at": incoming.received_at,
    }
    children = [
        {
            "id": uuid7(),
            "post_id": post_id,
            "organization_id": owner.organization_id,
            "channel_id": owner.id,
            "topic": part.topic,
            "dedupe_key": f"{part.dedupe_key}:{post_id}" if part.repeatable else part.dedupe_key,
            "subject": part.subject,
            "summary": dict(part.summary),
            # The bytes are kept once: a child that is the whole of its organization's POST reads them there.
            "body": b64encode(part.body).decode() if part.body is not None else None if organization_id else "",
        }
        for part, owner in routed
    ]
    return Judged(
        post_id, topic, len(parts) - len(routed), _json(post), tuple(map(_json, children)), incoming.body, versions
    )


async def write(conn: Connection, deliveries: Sequence[Judged]) -> dict[UUID, int | None]:
    """All of these in one statement, or none of them if it fails. By their ids how many events each led to; None for
    one of which nothing was stored, as a connection it was judged by has changed."""
    # Pairs, as two of them may have been judged by two versions of one connection.
    versions = {pair for delivery in deliveries for pair in delivery.versions.items()}
    parameters = {
        "posts": f"[{','.join([delivery.post for delivery in deliveries])}]",
        "bodies": [delivery.body for delivery in deliveries],
        "parts": f"[{','.join([part for delivery in deliveries for part in delivery.parts])}]",
        "channel_ids": [channel for channel, _ in versions],
        "versions": [version for _, version in versions],
    }
    found = dict(await (await conn.execute(_query("receive"), parameters)).fetchall())
    return {delivery.id: found.get(delivery.id) for delivery in deliveries}


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
    named = await find_named(conn, keyring, Opened(incoming, body, parts), channel, now)
    routed = _route(source, parts, channel, named, body, headers)
    organization_id = _owner(routed, len(parts))
    events = await _write_children(conn, webhook_event_id, incoming, routed, organization_id)
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


def _route(
    source: Source,
    parts: Sequence[Part],
    channel: Channel,
    named: Mapping[str, Sequence[Channel]],
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
    checked: dict[UUID, Check] = {}
    routed = []
    for part in parts:
        # A shape that names nobody: whoever's address it was posted to has signed for it.
        owners = (channel,) if _is_own(source, part, channel) else named.get(part.external_id or "", ())
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


def _is_own(source: Source, part: Part, channel: Channel) -> bool:
    """Whether the part is the channel's without asking whose the name is."""
    return part.external_id is None or (source.name in _OWN_NAMES and part.external_id == channel.external_id)


def _owner(routed: Sequence[tuple[Part, Channel]], parts: int) -> UUID | None:
    """Whose the whole POST is: one organization's own, if all of it is; else nobody's."""
    owners = {channel.organization_id for _, channel in routed}
    return owners.pop() if len(owners) == 1 and len(routed) == parts else None


async def find_named(
    conn: Connection, keyring: Keyring, opened: Opened, channel: Channel, now: datetime
) -> Mapping[str, Sequence[Channel]]:
    """The connections that the parts name, where they are not the channel's own. Asks nothing when all are."""
    names = names_of_others(opened, channel)
    if not names:
        return {}
    accounts = [name.removeprefix(ACCOUNT_PREFIX) for name in names if name.startswith(ACCOUNT_PREFIX)]
    found: dict[str, list[Channel]] = defaultdict(list)
    parameters = {
        "source": opened.incoming.source.name,
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


def names_of_others(opened: Opened, channel: Channel) -> list[str]:
    """What the parts of a shared delivery call the connections that they belong to, but for the channel's own name."""
    source = opened.incoming.source
    if not source.shared:
        return []
    # What cannot be printed (a NUL, half a surrogate pair) is nobody's name, and nothing to ask Postgres for.
    return [
        part.external_id
        for part in opened.parts
        if part.external_id is not None and part.external_id.isprintable() and not _is_own(source, part, channel)
    ]


async def _write_children(
    conn: Connection,
    parent_id: UUID,
    incoming: Incoming,
    routed: Sequence[tuple[Part, Channel]],
    organization_id: UUID | None,
) -> int:
    """The children that are not there yet, each with its event; how many."""
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
    return events


async def _settle(
    conn: Connection, parent_id: UUID, status: str, reason: str | None, organization_id: UUID | None
) -> None:
    parameters = {"id": parent_id, "status": status, "reason": reason, "organization_id": organization_id}
    await conn.execute(_query("settle_parent"), parameters)


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
    if text.isascii() and text.isprintable():
        return text
    return "".join(letter if " " <= letter <= "~" else "?" for letter in text)


def _json(row: Mapping[str, Any]) -> str:
    return orjson.dumps(row).decode()


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
                first["id"],
                first["organization_id"],
                first["external_id"],
                first["status"],
                first["settings"],
                secrets,
                first["version"],
                min((row["valid_until"] for row in found if row["valid_until"] is not None), default=None),
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
