"""One request on its way: what an operation is given, and the transaction in which it does what it does.

What must stay true: whatever an operation reads or writes, it does as afluente_app of the key's organization; row-level
security is what keeps tenants apart, not the operation. Nothing is answered that is not committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import psycopg
from psycopg_pool import AsyncConnectionPool

import sql
from afluente import faults
from afluente.web.api import idempotency
from afluente.web.api.idempotency import Answer
from afluente.web.api.keys import Key

STATEMENT_TIMEOUT_MS: Final = 8_000
TRANSACTION_TIMEOUT_S: Final = 10.0
CONNECTION_WITHIN_S: Final = 3.0
MAX_TRIES: Final = 3

Connection = psycopg.AsyncConnection[Any]
Pool = AsyncConnectionPool[Connection]
Work = Callable[[Connection], Awaitable[Answer]]


@dataclass(frozen=True)
class Call:
    """A request whose key is valid, may do this, and is within its rate. `body` is the parsed JSON, None without one;
    `charge` takes further tokens of the key's."""

    key: Key
    method: str
    path: str
    request_id: str
    pool: Pool
    charge: Callable[[int], None]
    traceparent: str | None = None
    idempotency_key: str | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    body: Any = None

    @property
    def trace_id(self) -> str | None:
        return None if self.traceparent is None else self.traceparent.split("-")[1]

    @property
    def actor_id(self) -> str:
        return f"api_key:{self.key.id}"

    async def once(self, work: Work) -> Answer:
        """`work` in a transaction of its own, once for the request's idempotency key."""
        request_hash = idempotency.hash_of(self.method, self.path, self.body) if self.idempotency_key else b""

        async def in_transaction(conn: Connection) -> Answer:
            return await idempotency.once(
                conn, self.key.organization_id, self.idempotency_key, request_hash, lambda: work(conn)
            )

        for attempt in range(1, MAX_TRIES + 1):
            try:
                answer = await self.transaction(in_transaction)
                break
            except (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure):
                # Postgres ended it for another's sake; nothing of it was written.
                if attempt == MAX_TRIES:
                    raise
        faults.point("api.committed")
        return answer

    async def transaction(self, work: Work) -> Answer:
        """`work` as the organization's application. Committed when this returns."""
        given = {
            "organization_id": str(self.key.organization_id),
            "lock_timeout": f"{idempotency.LOCK_TIMEOUT_MS}ms",
            "statement_timeout": f"{STATEMENT_TIMEOUT_MS}ms",
        }
        async with (
            asyncio.timeout(TRANSACTION_TIMEOUT_S),
            self.pool.connection(timeout=CONNECTION_WITHIN_S) as conn,
            conn.transaction(),
        ):
            await conn.execute(_ACT, given)
            return await work(conn)


_ACT = sql.queries("api")["act"]
