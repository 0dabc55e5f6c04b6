"""The HTTP side of ingest: `POST /webhooks/<source>/<channel>[/<topic>]`, and GET for a sender's set-up.

What an answer means: 2xx is "durably stored", whatever is thought of it later; 401 a signature that does not fit; 404
an address of nobody's, said before the body is read; 408, 413 a body that came too slowly or is too large; 503 "not
stored, send it again" (Postgres is away, or too much is in flight). Nothing is done before the answer but what `store`
does in its one transaction.

Bounded: a body by its source's `max_body_bytes` (read in pieces, refused at the first byte too many), what is held in
memory by `MAX_HELD_BYTES`, of one peer by `MAX_PEER_BYTES`, stores at once by `max_in_flight`, and rows about refused
deliveries by a bucket for the whole process, so that nobody can fill the table without a secret. Who sends slowly holds
little more than the bytes that came: the place at Postgres is taken once the body is here.

A delivery to a connection that is known costs one statement, shared with others under load: the connection is held in
memory and its version checked in that statement. A secret that was taken back, or a channel that was paused, is so for
the next delivery.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol
from uuid import UUID, uuid4

import psycopg
from psycopg_pool import AsyncConnectionPool
from starlette.datastructures import QueryParams
from starlette.types import Receive, Scope, Send

from afluente.bounds import Bucket, Busy, Memory
from afluente.clock import Clock, SystemClock
from afluente.postgres import AWAY
from afluente.secrets import Keyring
from afluente.telemetry import get_logger
from producers.ingest import store
from producers.ingest.known import Known
from producers.ingest.signature import Check, verify_token
from producers.ingest.sources import Source, registered
from producers.ingest.store import Channel, Incoming, Outcome, Receipt, Unsettled
from producers.ingest.writer import Writer

log = get_logger(__name__)

# Shopify gives up after 5 s in all: the answer must be out before, even if it is "try again".
READ_TIMEOUT_S = 4.0
STORE_TIMEOUT_S = 3.5
MAX_IN_FLIGHT = 256
MAX_HELD_BYTES = 96 * 1024 * 1024
# Behind a proxy that is not named in FORWARDED_ALLOW_IPS all senders are one peer: room for eight of the largest.
MAX_PEER_BYTES = 24 * 1024 * 1024
# As much as the server reads ahead before anybody asks for the body.
MIN_HELD_BYTES = 64 * 1024
REFUSALS_PER_S, REFUSALS_BURST = 5.0, 200.0
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,100}\Z")

Pool = AsyncConnectionPool[psycopg.AsyncConnection[Any]]


class Observer(Protocol):
    """Hears what was logged once it is durable. Tests wait on it; in production nobody listens."""

    def __call__(self, name: str, /, **fields: Any) -> None: ...


def ignore(name: str, /, **fields: Any) -> None:
    """The observer of production."""


class BodyError(Exception):
    """The body cannot be taken. `reason` is one word; `status` the answer."""

    def __init__(self, reason: str, status: int) -> None:
        self.reason = reason
        self.status = status
        super().__init__(reason)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a sender is told: a status and a word."""

    status: int
    text: str
    retry_after_s: int | None = None
    close: bool = False
    """What is left of the body is not read."""

    async def send(self, send: Send) -> None:
        body = self.text.encode()
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(body))]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % self.retry_after_s))
        if self.close:
            headers.append((b"connection", b"close"))
        headers.append((b"x-content-type-options", b"nosniff"))
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class Receiver:
    """Takes deliveries in: an ASGI application, one for each process.

    `pool` connects as afluente_worker, in autocommit, and is opened by its owner.
    """

    def __init__(
        self,
        pool: Pool,
        keyring: Keyring,
        *,
        clock: Clock | None = None,
        observer: Observer = ignore,
        max_in_flight: int = MAX_IN_FLIGHT,
    ) -> None:
        self._pool = pool
        self._clock = clock or SystemClock()
        self._sources = registered()
        self._known = Known(pool, keyring, STORE_TIMEOUT_S)
        self._writer = Writer(pool, STORE_TIMEOUT_S)
        self._observe = observer
        self._memory = Memory()
        self._free = max_in_flight
        self._refusals = Bucket(REFUSALS_PER_S, REFUSALS_BURST)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request whose path begins with /webhooks/."""
        _, _, *words = scope["path"].split("/", 4)
        if len(words) < 2 or not words[1]:
            answer = Answer(404, "not_found\n")
        elif scope["method"] == "POST":
            answer = await self._post(scope, receive, *words)
        elif scope["method"] == "GET" and len(words) == 2:
            answer = await self._set_up(scope, *words)
        else:
            answer = Answer(405, "method_not_allowed\n")
        await answer.send(send)

    async def _post(self, scope: Scope, receive: Receive, name: str, channel: str, topic: str | None = None) -> Answer:
        """One delivery: read, store, answer."""
        source = self._sources.get(name)
        if source is None:
            return Answer(404, "unknown_source\n")
        try:
            peer = scope["client"][0] if scope["client"] else ""
            with self._memory.of(peer, each=MAX_PEER_BYTES, total=MAX_HELD_BYTES, least=MIN_HELD_BYTES) as hold:
                return await self._take(_incoming(scope, source, channel, topic, self._clock.now()), receive, hold)
        except (Busy, Unsettled):
            return Answer(503, "busy\n", retry_after_s=1)
        except AWAY as error:
            # Not stored, or not known to be: the sender tries again, and a repeat is found by its key.
            log.warning("ingest.unavailable", source=source.name, error=type(error).__name__)
            return Answer(503, "unavailable\n", retry_after_s=5)

    async def _take(self, incoming: Incoming, receive: Receive, hold: Callable[[int], None]) -> Answer:
        name, channel_id, now = incoming.source.name, incoming.channel_id, incoming.received_at
        if channel_id is None:
            return await self._unknown(incoming)
        channel = self._known.held(name, channel_id, now)
        if channel is None:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                channel = await self._known.fresh(name, channel_id, now)
        if channel is None:
            return await self._unknown(incoming)
        try:
            incoming.body = await _read_body(incoming.headers, receive, hold, incoming.source.max_body_bytes)
        except BodyError as problem:
            await self._note_refusal(incoming, problem.reason, Outcome.REFUSED, channel)
            return Answer(problem.status, f"{problem.reason}\n", close=True)
        if self._free <= 0:
            raise Busy
        self._free -= 1
        try:
            return await self._store(incoming, channel)
        finally:
            self._free += 1

    async def _store(self, incoming: Incoming, channel: Channel) -> Answer:
        async with asyncio.timeout(STORE_TIMEOUT_S):
            for _ in range(store.TRIES):
                check = store.verify(incoming, channel)
                if not check.ok:
                    # Its secrets may have been replaced since they were read.
                    now = await self._known.fresh(incoming.source.name, channel.id, incoming.received_at)
                    if now is None:
                        return await self._unknown(incoming)
                    channel, check = now, store.verify(incoming, now)
                if not check.ok:
                    return await self._refused(incoming, channel, check)
                opened = store.open_up(incoming, channel)
                judged = store.judge(opened, channel, await self._known.named(opened, channel, incoming.received_at))
                events = await self._writer.write(judged)
                if events is not None:
                    return self._stored(incoming, judged.receipt(events))
                fresh = await self._known.fresh(incoming.source.name, channel.id, incoming.received_at)
                if fresh is None:
                    return await self._unknown(incoming)
                channel = fresh
        raise Unsettled

    def _stored(self, incoming: Incoming, receipt: Receipt) -> Answer:
        self._say(
            "ingest.stored",
            source=incoming.source.name,
            topic=receipt.topic,
            outcome=receipt.outcome.value,
            reason=receipt.reason,
            webhook_event_id=str(receipt.webhook_event_id),
            request_id=incoming.request_id,
            count=receipt.events,
        )
        return Answer(200, f"{receipt.outcome.value}\n")

    async def _unknown(self, incoming: Incoming) -> Answer:
        await self._note_refusal(incoming, "unknown_channel", Outcome.UNKNOWN_CHANNEL)
        return Answer(404, "unknown_channel\n")

    async def _refused(self, incoming: Incoming, channel: Channel, check: Check) -> Answer:
        reason = check.reason or "signature_mismatch"
        await self._note_refusal(incoming, reason, Outcome.REFUSED, channel)
        return Answer(401, f"{reason}\n")

    async def _note_refusal(
        self, incoming: Incoming, reason: str, outcome: Outcome, channel: Channel | None = None
    ) -> None:
        if self._refusals.take(self._clock.monotonic()):
            async with asyncio.timeout(STORE_TIMEOUT_S), self._pool.connection(timeout=STORE_TIMEOUT_S) as conn:
                await store.refuse(conn, incoming, reason, channel)
        self._say(
            "ingest.refused",
            source=incoming.source.name,
            outcome=outcome.value,
            reason=reason,
            request_id=incoming.request_id,
        )

    def _say(self, name: str, **fields: Any) -> None:
        log.info(name, **fields)
        self._observe(name, **fields)

    async def _set_up(self, scope: Scope, name: str, channel_text: str) -> Answer:
        """A sender asks whether the address is ours: the challenge comes back unchanged if the token is."""
        source, channel_id = self._sources.get(name), _uuid(channel_text)
        if source is None or not source.challenged or channel_id is None:
            return Answer(404, "not_found\n")
        query = QueryParams(scope["query_string"])
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                channel = await self._known.fresh(source.name, channel_id, self._clock.now())
        except AWAY:
            return Answer(503, "unavailable\n", retry_after_s=5)
        tokens = channel.secrets[store.VERIFY_TOKEN] if channel else ()
        if query.get("hub.mode") != "subscribe" or not verify_token(query.get("hub.verify_token"), tokens):
            return Answer(403, "verify_token_mismatch\n")
        return Answer(200, query.get("hub.challenge", ""))


def _incoming(scope: Scope, source: Source, channel: str, topic: str | None, now: datetime) -> Incoming:
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    given = headers.get("x-request-id", "")
    return Incoming(
        source=source,
        channel_id=_uuid(channel),
        body=b"",
        headers=headers,
        received_at=now,
        url_topic=topic,
        request_id=given if _REQUEST_ID.match(given) else str(uuid4()),
    )


async def _read_body(
    headers: Mapping[str, str], receive: Receive, hold: Callable[[int], None], max_bytes: int
) -> bytes:
    """The body, as the bytes that came. Reads no further than the bound; `hold` hears how much it is so far."""
    declared = headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and (len(declared) > 15 or int(declared) > max_bytes):
        raise BodyError("body_too_large", 413)
    pieces: list[bytes] = []
    size, more = 0, True
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise BodyError("body_truncated", 400)
                more = message.get("more_body", False)
                if piece := message.get("body", b""):
                    pieces.append(piece)
                    size += len(piece)
                if size > max_bytes:
                    raise BodyError("body_too_large", 413)
                hold(size)
    except TimeoutError:
        raise BodyError("body_too_slow", 408) from None
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _uuid(text: str) -> UUID | None:
    """The id, if it is written as we write it: one channel has one address."""
    try:
        found = UUID(text)
    except ValueError:
        return None
    return found if str(found) == text else None
