"""The connections that this process has seen lately, with their secrets in clear, so that a delivery asks for none.

What is held may be old, and nobody is told when it changes: whoever uses it has its version checked where it matters
(`store.write`), and asks for a `fresh` one before it refuses anything. Bounded in number and in age.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg
from psycopg_pool import AsyncConnectionPool

from afluente.secrets import Keyring
from producers.ingest import store
from producers.ingest.store import Channel, Opened

MAX_HELD = 2_000
# A channel that nobody posts to any more leaves by this, with its secrets.
MAX_AGE_S = 300.0

Pool = AsyncConnectionPool[psycopg.AsyncConnection[Any]]


class Known:
    """Connections by the sender's name and the id in their address."""

    def __init__(self, pool: Pool, keyring: Keyring, within_s: float) -> None:
        """`within_s`: what to wait for a connection to Postgres."""
        self._pool, self._keyring, self._within_s = pool, keyring, within_s
        self._held: OrderedDict[tuple[str, UUID], tuple[Channel, datetime]] = OrderedDict()

    def held(self, source: str, channel_id: UUID, now: datetime) -> Channel | None:
        """The channel as it is held; None when it is not, is too old, or one of its secrets has ended."""
        key = (source, channel_id)
        found = self._held.get(key)
        if found is None:
            return None
        channel, since = found
        ends = channel.expires_at
        if (ends is not None and ends <= now) or abs((now - since).total_seconds()) > MAX_AGE_S:
            return None
        self._held.move_to_end(key)
        return channel

    async def fresh(self, source: str, channel_id: UUID, now: datetime) -> Channel | None:
        """The channel as it is in Postgres now."""
        key = (source, channel_id)
        async with self._pool.connection(timeout=self._within_s) as conn:
            channel = await store.find_channel(conn, self._keyring, source, channel_id, now)
        if channel is None:
            self._held.pop(key, None)
            return None
        self._held[key] = (channel, now)
        self._held.move_to_end(key)
        if len(self._held) > MAX_HELD:
            self._held.popitem(last=False)
        return channel

    async def named(self, opened: Opened, channel: Channel, now: datetime) -> Mapping[str, Sequence[Channel]]:
        """What the parts of a shared delivery name, as it is in Postgres now: whose a name is can change without any
        connection that we hold changing. Asks nothing when all parts are the channel's own."""
        if not store.names_of_others(opened, channel):
            return {}
        async with self._pool.connection(timeout=self._within_s) as conn:
            return await store.find_named(conn, self._keyring, opened, channel, now)
