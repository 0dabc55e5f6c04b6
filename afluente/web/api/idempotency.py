"""A request with an Idempotency-Key happens once: a repeat gets the answer of the first.

The key, a hash of the request and the answer are a row in the transaction of what the request did, so that they are
there if and only if it happened: a process killed between the commit and the answer leaves what the repeat is
answered. A repeat that comes while the first is under way waits for its transaction, for `LOCK_TIMEOUT_MS` at most
(409). A request that was refused has written nothing and left no row: mended, it may come again under its key.

Keys are the organization's, not the API key's: a rotation does not make a repeat a new request.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

import psycopg
from psycopg.types.json import Jsonb

import sql
from afluente.web.api.problems import Problem

LOCK_TIMEOUT_MS: Final = 5_000
MAX_LENGTH: Final = 255

Connection = psycopg.AsyncConnection[Any]


@dataclass(frozen=True)
class Answer:
    """What a request is answered. `content` is JSON; None for no body."""

    status: int
    content: Any
    headers: dict[str, str] = field(default_factory=dict)


def key_of(header: str | None) -> str | None:
    """The key of an Idempotency-Key header, quoted as the draft has it or not. Raises Problem (400)."""
    if header is None:
        return None
    key = header.strip()
    if len(key) >= 2 and key[0] == key[-1] == '"':
        key = key[1:-1]
    if not 1 <= len(key) <= MAX_LENGTH or not all("\x21" <= letter <= "\x7e" for letter in key):
        raise Problem("malformed-header", f"Idempotency-Key has to be 1 to {MAX_LENGTH} printable ASCII characters")
    return key


def hash_of(method: str, path: str, value: Any) -> bytes:
    """What tells a request from another: its address and its JSON, however it is spaced and ordered."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"{method} {path}\n{text}".encode()).digest()


async def once(
    conn: Connection,
    organization_id: UUID,
    key: str | None,
    request_hash: bytes,
    work: Callable[[], Awaitable[Answer]],
) -> Answer:
    """`work`'s answer, or the one that it had before. In a transaction, as the organization's application."""
    if key is None:
        return await work()
    given = {"organization_id": organization_id, "key": key, "request_hash": request_hash}
    while True:
        # Waits for a transaction that holds the key: it commits, and its answer is the one; or not, and ours is.
        cursor = await conn.execute(_QUERIES["claim"], given)
        if await cursor.fetchone() is not None:
            break
        cursor = await conn.execute(_QUERIES["claimed"], given)
        row = await cursor.fetchone()
        if row is None:
            continue  # purged in between
        if bytes(row[0]) != request_hash:
            raise Problem(
                "idempotency-key-reused",
                "this Idempotency-Key came with another request before",
                hint="a key names one request: give this one its own",
            )
        return Answer(row[1], row[2], {"idempotency-replayed": "true"})
    answer = await work()
    await conn.execute(_QUERIES["answered"], given | {"status": answer.status, "answer": Jsonb(answer.content)})
    return answer


_QUERIES = sql.queries("api")
