"""API keys: their form, who they are, and making, rotating and revoking them.

A key is `afl_<10>_<38>`: the first two parts are its prefix, which is shown and stored, the last is the secret with six
characters of checksum, by which a mistyped key (and a scanner for leaked ones) is told without asking anybody. Stored
is the SHA-256 of the whole: 190 random bits need no slow hash. A key is found by its prefix, and its hash compared in
constant time.

What must stay true:
- The secret is shown once and kept nowhere.
- A key acts for its own organization only, and what it may is in its row: whoever has found it acts under that row's
  organization, as afluente_app.
- What is said about a revoked or expired key is said to who has the whole key. Everybody else has an unknown one.
- While a key is rotated two are valid, never three.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import zlib
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

import psycopg
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

import sql
from afluente.bounds import Bucket
from afluente.clock import Clock
from afluente.errors import Refused
from afluente.postgres import act_for_sync
from afluente.web.api.problems import Problem

MARK: Final = "afl"
PREFIX_LENGTH: Final = 10
SECRET_LENGTH: Final = 32
CHECKSUM_LENGTH: Final = 6
# From the next request after this, in every process, a revoked key is no key.
REMEMBERED_S: Final = 2.0
MAX_REMEMBERED: Final = 10_000
# Prefixes that were never a key's, looked up: so many a second, so many at once. Whoever makes keys up keeps nobody
# else from Postgres.
STRANGERS_PER_S, STRANGERS_AT_ONCE = 20.0, 200.0

SCOPES: Final[Mapping[str, str]] = {
    "events:write": "emit events",
    "events:read": "read events and what became of them",
    "contact-events:write": "record contact events, and make the contacts they are about",
    "contact-events:read": "read contact events",
}
# A token is one event or contact event written, or one request that reads.
DEFAULT_RATE_PER_S: Final = 100.0
DEFAULT_BURST: Final = 1000

_LETTERS: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_OPERATOR: Final = "afluente_admin"


# ---------------------------------------------------------------------------------------------------------------------
# The form


def generate() -> str:
    """A new key."""
    random = "".join(secrets.choice(_LETTERS) for _ in range(PREFIX_LENGTH + SECRET_LENGTH))
    whole = f"{MARK}_{random[:PREFIX_LENGTH]}_{random[PREFIX_LENGTH:]}"
    return whole + _checksum(whole)


def prefix_of(text: str) -> str | None:
    """The prefix of a key that is written as a key is, checksum included; None for anything else."""
    parts = text.split("_")
    if (
        len(parts) != 3
        or parts[0] != MARK
        or len(parts[1]) != PREFIX_LENGTH
        or len(parts[2]) != SECRET_LENGTH + CHECKSUM_LENGTH
        or not (text.isascii() and parts[1].isalnum() and parts[2].isalnum())
        or not hmac.compare_digest(text[-CHECKSUM_LENGTH:], _checksum(text[:-CHECKSUM_LENGTH]))
    ):
        return None
    return f"{MARK}_{parts[1]}"


def hash_of(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _checksum(text: str) -> str:
    number, letters = zlib.crc32(text.encode()), ""
    for _ in range(CHECKSUM_LENGTH):
        number, rest = divmod(number, len(_LETTERS))
        letters = _LETTERS[rest] + letters
    return letters


# ---------------------------------------------------------------------------------------------------------------------
# Who asks


@dataclass(frozen=True)
class Key:
    """A valid key."""

    id: UUID
    organization_id: UUID
    prefix: str
    scopes: frozenset[str]
    rate_per_s: float
    burst: int


@dataclass(frozen=True)
class _Row:
    key: Key
    key_hash: bytes
    expires_at: datetime | None
    revoked_at: datetime | None


class Authenticator:
    """Says whose key a request carries. Remembers rows for REMEMBERED_S, unknown prefixes too, so that a key in use
    costs one look-up in that time; only what the secret's hash equals is believed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._remembered: OrderedDict[str, tuple[float, _Row | None]] = OrderedDict()
        self._strangers = Bucket(STRANGERS_PER_S, STRANGERS_AT_ONCE)

    def remembered(self, prefix: str) -> tuple[bool, _Row | None]:
        """Whether the prefix was looked up a moment ago, and its row. Raises Problem (503) for one too many that has to
        be looked up."""
        found = self._remembered.get(prefix)
        now = self._clock.monotonic()
        if found is not None and now - found[0] < REMEMBERED_S:
            return True, found[1]
        if (found is None or found[1] is None) and not self._strangers.take(now):
            raise Problem("unavailable", "too many unknown keys are being asked for", headers={"retry-after": "1"})
        return False, None

    async def look_up(self, conn: psycopg.AsyncConnection[Any], prefix: str) -> _Row | None:
        """A prefix's row, read as afluente_worker: whose it is, is what the row says."""
        # Before the statement: what is committed after it counts as not seen.
        at = self._clock.monotonic()
        cursor = await conn.cursor(row_factory=dict_row).execute(_QUERIES["by_prefix"], {"prefix": prefix})
        found = await cursor.fetchone()
        row = None if found is None else _row(found)
        self._remembered[prefix] = (at, row)
        self._remembered.move_to_end(prefix)
        while len(self._remembered) > MAX_REMEMBERED:
            self._remembered.popitem(last=False)
        return row

    def judge(self, text: str, row: _Row | None) -> Key:
        """The key whose secret `text` is. Raises Problem (401)."""
        given = hash_of(text)
        if not hmac.compare_digest(given, row.key_hash if row else bytes(32)) or row is None:
            raise unauthorized("the API key is unknown")
        if row.revoked_at is not None:
            raise unauthorized("the API key was revoked")
        if row.expires_at is not None and row.expires_at <= self._clock.now():
            raise unauthorized("the API key has expired")
        return row.key


def bearer(header: str | None) -> tuple[str, str]:
    """The key of an Authorization header, and its prefix. Raises Problem (401)."""
    if not header:
        raise unauthorized("there is no Authorization header", challenge="")
    scheme, _, text = header.partition(" ")
    if scheme.lower() != "bearer":
        raise unauthorized("the Authorization header is not `Bearer` and an API key", challenge="")
    prefix = prefix_of(text := text.strip())
    if prefix is None:
        raise unauthorized("what follows `Bearer` is not written as an API key is")
    return text, prefix


def unauthorized(detail: str, challenge: str = ', error="invalid_token"') -> Problem:
    return Problem(
        "unauthorized",
        detail,
        hint="`afluente api-key create` makes a key; send it as `Authorization: Bearer afl_...`",
        headers={"www-authenticate": f'Bearer realm="afluente"{challenge}'},
    )


def require(key: Key, scope: str | None) -> None:
    """Raises Problem (403) when the key lacks the scope."""
    if scope is not None and scope not in key.scopes:
        raise Problem(
            "forbidden",
            f"the key lacks the scope {scope}",
            headers={"www-authenticate": f'Bearer realm="afluente", error="insufficient_scope", scope="{scope}"'},
        )


def _row(row: Mapping[str, Any]) -> _Row:
    return _Row(
        Key(
            row["id"],
            row["organization_id"],
            row["prefix"],
            frozenset(row["scopes"]),
            DEFAULT_RATE_PER_S if row["rate_per_s"] is None else float(row["rate_per_s"]),
            row["rate_burst"] or DEFAULT_BURST,
        ),
        bytes(row["key_hash"]),
        row["expires_at"],
        row["revoked_at"],
    )


# ---------------------------------------------------------------------------------------------------------------------
# Making, rotating, revoking: for the command line and pages. `conn` connects as afluente_worker; the caller commits.

Connection = psycopg.Connection[Any]


class UnknownKey(Refused):
    """No key of that id or prefix."""

    exit_status = 3

    def __init__(self, word: str) -> None:
        super().__init__(f"no API key has the id or prefix {word!r}", hint="afluente api-key list")


class EndedKey(Refused):
    """The key is revoked or expired already."""

    exit_status = 3


@dataclass(frozen=True)
class Made:
    """A new key. `text` is the key itself: shown once."""

    id: UUID
    organization_id: UUID
    prefix: str
    text: str


def check_scopes(scopes: Collection[str]) -> list[str]:
    """Sorted, without repetitions. Refused for none, or one that does not exist."""
    if unknown := sorted(set(scopes) - SCOPES.keys()):
        raise Refused(f"there is no scope {', '.join(unknown)}", hint=f"one of {', '.join(SCOPES)}")
    if not scopes:
        raise Refused("a key without a scope may do nothing", hint=f"one of {', '.join(SCOPES)}")
    return sorted(set(scopes))


def create(
    conn: Connection,
    *,
    organization_id: UUID,
    name: str,
    scopes: Sequence[str],
    expires_at: datetime | None = None,
    rate_per_s: Decimal | None = None,
    rate_burst: int | None = None,
    actor: str,
) -> Made:
    """Make a key. Refused for an unknown scope, a name that is none, a limit out of bounds."""
    granted = check_scopes(scopes)
    if not 1 <= len(name) <= 100:
        raise Refused("a key's name has 1 to 100 characters")
    _check_limits(rate_per_s, rate_burst)
    with act_for_sync(conn, organization_id, role=_OPERATOR):
        made = _insert(
            conn,
            organization_id,
            {
                "name": name,
                "scopes": granted,
                "expires_at": expires_at,
                "rate_per_s": rate_per_s,
                "rate_burst": rate_burst,
                "rotated_from": None,
            },
        )
        _audit(conn, organization_id, "api_key.created", made.id, actor, {"prefix": made.prefix, "scopes": granted})
    return made


def rotate(conn: Connection, word: str, *, now: datetime, overlap: timedelta, actor: str) -> tuple[Made, datetime]:
    """A new key of the same name, scopes, limits and lifetime, and the end of the old one. The key that the old one had
    taken the place of, if it is still valid, ends at once."""
    row = _find(conn, word)
    _require_valid(row, now)
    successor = conn.execute(_QUERIES["successor"], {**row, "now": now}).fetchone()
    if successor is not None:
        raise EndedKey(f"{row['prefix']} was rotated: {successor[0]} takes its place", hint="rotate that one")
    organization_id, ends_at, lifetime = row["organization_id"], now + overlap, None
    if row["expires_at"] is not None:
        ends_at = min(ends_at, row["expires_at"])
        lifetime = row["expires_at"] - row["created_at"]
    with act_for_sync(conn, organization_id, role=_OPERATOR):
        wanted = ("name", "scopes", "rate_per_s", "rate_burst")
        expires_at = None if lifetime is None else now + lifetime
        made = _insert(
            conn,
            organization_id,
            {name: row[name] for name in wanted} | {"expires_at": expires_at, "rotated_from": row["id"]},
        )
        conn.execute(_QUERIES["end_at"], {"id": row["id"], "ends_at": ends_at})
        predecessor = row["rotated_from"]
        if predecessor is not None:
            conn.execute(_QUERIES["revoke"], {"id": predecessor, "now": now})
        details = {"prefix": made.prefix, "old": row["prefix"], "old_valid_until": ends_at.isoformat()}
        _audit(conn, organization_id, "api_key.rotated", made.id, actor, details)
    return made, ends_at


def limit(
    conn: Connection, word: str, *, rate_per_s: Decimal | None, rate_burst: int | None, now: datetime, actor: str
) -> dict[str, Any]:
    """Give a valid key other limits; None is the default. Within REMEMBERED_S every process goes by them."""
    _check_limits(rate_per_s, rate_burst)
    row = _find(conn, word)
    _require_valid(row, now)
    given = {"rate_per_s": rate_per_s, "rate_burst": rate_burst}
    with act_for_sync(conn, row["organization_id"], role=_OPERATOR):
        conn.execute(_QUERIES["limit"], {"id": row["id"], **given})
        details = {"prefix": row["prefix"], "rate_per_s": rate_per_s and str(rate_per_s), "rate_burst": rate_burst}
        _audit(conn, row["organization_id"], "api_key.limited", row["id"], actor, details)
    return {"id": row["id"], "prefix": row["prefix"], **given}


def revoke(conn: Connection, word: str, *, now: datetime, reason: str, actor: str) -> dict[str, Any]:
    """End a key at once: within REMEMBERED_S no process takes it."""
    row = _find(conn, word)
    if row["revoked_at"] is not None:
        raise EndedKey(f"{row['prefix']} was revoked at {row['revoked_at'].isoformat()}")
    with act_for_sync(conn, row["organization_id"], role=_OPERATOR):
        conn.execute(_QUERIES["revoke"], {"id": row["id"], "now": now})
        details = {"prefix": row["prefix"], "reason": reason}
        _audit(conn, row["organization_id"], "api_key.revoked", row["id"], actor, details)
    return {"id": row["id"], "prefix": row["prefix"], "revoked_at": now}


def listed(conn: Connection, organization_id: UUID | None, now: datetime) -> list[dict[str, Any]]:
    """The keys of an organization, or of all, newest first. Never a hash."""
    rows = conn.cursor(row_factory=dict_row).execute(
        _QUERIES["listed"], {"organization_id": organization_id, "now": now}
    )
    return rows.fetchall()


def _check_limits(rate_per_s: Decimal | None, rate_burst: int | None) -> None:
    if rate_per_s is not None and not Decimal("0.001") <= rate_per_s <= 100_000:
        raise Refused("a rate is 0.001 to 100000 a second")
    if rate_burst is not None and not 1 <= rate_burst <= 1_000_000:
        raise Refused("a burst is 1 to 1000000")


def _insert(conn: Connection, organization_id: UUID, columns: Mapping[str, Any]) -> Made:
    text = generate()
    prefix = prefix_of(text)
    assert prefix is not None
    given = {"organization_id": organization_id, "prefix": prefix, "key_hash": hash_of(text), **columns}
    row = conn.execute(_QUERIES["insert"], given).fetchone()
    assert row is not None
    return Made(row[0], organization_id, prefix, text)


def _find(conn: Connection, word: str) -> dict[str, Any]:
    """A key by its id, its prefix, or the whole of it. Locked."""
    prefix = prefix_of(word) or word
    key_id: UUID | None
    try:
        key_id = UUID(word)
    except ValueError:
        key_id = None
    rows = conn.cursor(row_factory=dict_row).execute(_QUERIES["find"], {"id": key_id, "prefix": prefix})
    row = rows.fetchone()
    if row is None:
        raise UnknownKey(prefix)
    return row


def _require_valid(row: Mapping[str, Any], now: datetime) -> None:
    if row["revoked_at"] is not None:
        raise EndedKey(f"{row['prefix']} is revoked", hint="afluente api-key create")
    if row["expires_at"] is not None and row["expires_at"] <= now:
        raise EndedKey(f"{row['prefix']} has expired", hint="afluente api-key create")


def _audit(
    conn: Connection, organization_id: UUID, action: str, key_id: UUID, actor: str, details: Mapping[str, Any]
) -> None:
    given = {
        "organization_id": organization_id,
        "action": action,
        "actor_id": actor[:255],
        "entity_id": str(key_id),
        "details": Jsonb(dict(details)),
    }
    conn.execute(_QUERIES["audit"], given)


_QUERIES = sql.queries("api_keys")
