"""The HTTP side of ingest: `POST /webhooks/<source>/<channel>[/<topic>]`, and GET for WhatsApp's set-up.

What an answer means: 2xx is "durably stored", whatever is thought of it later; 401 a signature that does not fit; 404
an address of nobody's; 408, 413 a body that came too slowly or is too large; 503 "not stored, send it again"
(Postgres is away, or too much is in flight). Nothing is done before the answer but what `store` does in its one
transaction.

Bounded: a body by `MAX_BODY_BYTES` (read in pieces, refused at the first byte too many), what is in flight by
`max_in_flight`, and rows about refused deliveries by a bucket for the whole process, so that nobody can fill the table
without a secret.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import UUID, uuid4

import psycopg
from psycopg_pool import AsyncConnectionPool, PoolClosed, PoolTimeout, TooManyRequests
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from afluente.clock import Clock, SystemClock
from afluente.secrets import Keyring
from afluente.telemetry import get_logger
from producers.ingest import store
from producers.ingest.signature import verify_token
from producers.ingest.sources import Source, registered
from producers.ingest.store import Incoming, Outcome, Receipt

log = get_logger(__name__)

MAX_BODY_BYTES = 3 * 1024 * 1024  # WhatsApp's own bound for one POST
READ_TIMEOUT_S = 10.0
# Shopify gives up after 5 s in all: the answer must be out before, even if it is "try again".
STORE_TIMEOUT_S = 3.5
MAX_IN_FLIGHT = 32
REFUSALS_PER_S, REFUSALS_BURST = 5.0, 200.0
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,100}\Z")

_STATUS = {
    Outcome.STORED: 200,
    Outcome.DUPLICATE: 200,
    Outcome.UNROUTED: 200,
    Outcome.REFUSED: 401,
    Outcome.UNKNOWN_CHANNEL: 404,
}

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


@dataclass
class Bucket:
    """So many a second, so many at once."""

    rate: float
    burst: float
    level: float = field(init=False)
    at: float | None = None

    def __post_init__(self) -> None:
        self.level = self.burst

    def take(self, now: float) -> bool:
        if self.at is not None:
            self.level = min(self.burst, self.level + (now - self.at) * self.rate)
        self.at = now
        if self.level < 1:
            return False
        self.level -= 1
        return True


class Receiver:
    """Takes deliveries in. One for each process; `pool` connects as afluente_worker and is opened by its owner."""

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
        self._keyring = keyring
        self._clock = clock or SystemClock()
        self._sources = registered()
        self._observe = observer
        self._free = max_in_flight
        self._refusals = Bucket(REFUSALS_PER_S, REFUSALS_BURST)

    def routes(self) -> list[Route]:
        return [
            Route("/webhooks/{source}/{channel}", self.post, methods=["POST"]),
            Route("/webhooks/{source}/{channel}", self.set_up, methods=["GET"]),
            Route("/webhooks/{source}/{channel}/{topic:path}", self.post, methods=["POST"]),
        ]

    async def post(self, request: Request) -> Response:
        """One delivery: read, store, answer."""
        source = self._sources.get(request.path_params["source"])
        if source is None:
            return _answer(404, "unknown_source")
        if self._free <= 0:
            return _answer(503, "busy", retry_after_s=1)
        self._free -= 1
        try:
            return await self._take(request, source)
        except (psycopg.OperationalError, PoolTimeout, PoolClosed, TooManyRequests, TimeoutError) as error:
            # Not stored, or not known to be: the sender tries again, and a repeat is found by its key.
            log.warning("ingest.unavailable", source=source.name, error=type(error).__name__)
            return _answer(503, "unavailable", retry_after_s=5)
        finally:
            self._free += 1

    async def _take(self, request: Request, source: Source) -> Response:
        incoming = self._incoming(request, source, b"")
        try:
            incoming = self._incoming(request, source, await _read_body(request))
        except BodyError as problem:
            await self._note_refusal(incoming, problem.reason)
            return _answer(problem.status, problem.reason, close=True)
        async with asyncio.timeout(STORE_TIMEOUT_S):
            receipt = await self._store(incoming)
        return _answer(
            _STATUS[receipt.outcome], receipt.reason if _STATUS[receipt.outcome] >= 400 else receipt.outcome.value
        )

    async def _store(self, incoming: Incoming) -> Receipt:
        async with self._pool.connection(timeout=STORE_TIMEOUT_S) as conn:
            receipt = await store.receive(conn, self._keyring, incoming)
            refused = receipt.outcome in (Outcome.REFUSED, Outcome.UNKNOWN_CHANNEL)
            if refused and not self._refusals.take(self._clock.monotonic()):
                await conn.rollback()
        self._say(
            "ingest.refused" if refused else "ingest.stored",
            source=incoming.source.name,
            topic=receipt.topic,
            outcome=receipt.outcome.value,
            reason=receipt.reason,
            webhook_event_id=str(receipt.webhook_event_id),
            request_id=incoming.request_id,
            count=receipt.events,
        )
        return receipt

    async def _note_refusal(self, incoming: Incoming, reason: str) -> None:
        if self._refusals.take(self._clock.monotonic()):
            await self._store_refusal(incoming, reason)
        self._say(
            "ingest.refused",
            source=incoming.source.name,
            outcome=Outcome.REFUSED.value,
            reason=reason,
            request_id=incoming.request_id,
        )

    async def _store_refusal(self, incoming: Incoming, reason: str) -> None:
        async with asyncio.timeout(STORE_TIMEOUT_S), self._pool.connection(timeout=STORE_TIMEOUT_S) as conn:
            channel = None
            if incoming.channel_id is not None:
                channel = await store.find_channel(
                    conn, self._keyring, incoming.source.name, incoming.channel_id, incoming.received_at
                )
            await store.refuse(conn, incoming, reason, channel)

    def _say(self, name: str, **fields: Any) -> None:
        log.info(name, **fields)
        self._observe(name, **fields)

    async def set_up(self, request: Request) -> Response:
        """WhatsApp asks whether the address is ours: the challenge comes back unchanged if the token is."""
        source = self._sources.get(request.path_params["source"])
        channel_id = _uuid(request.path_params["channel"])
        if source is None or not source.shared or channel_id is None:
            return _answer(404, "not_found")
        query = request.query_params
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S), self._pool.connection(timeout=STORE_TIMEOUT_S) as conn:
                channel = await store.find_channel(conn, self._keyring, source.name, channel_id, self._clock.now())
        except (psycopg.OperationalError, PoolTimeout, PoolClosed, TooManyRequests, TimeoutError):
            return _answer(503, "unavailable", retry_after_s=5)
        tokens = channel.secrets[store.VERIFY_TOKEN] if channel else ()
        if query.get("hub.mode") != "subscribe" or not verify_token(query.get("hub.verify_token"), tokens):
            return _answer(403, "verify_token_mismatch")
        return PlainTextResponse(query.get("hub.challenge", ""), headers={"x-content-type-options": "nosniff"})

    def _incoming(self, request: Request, source: Source, body: bytes) -> Incoming:
        headers = {name.lower(): value for name, value in request.headers.items()}
        given = headers.get("x-request-id", "")
        return Incoming(
            source=source,
            channel_id=_uuid(request.path_params["channel"]),
            body=body,
            headers=headers,
            received_at=self._clock.now(),
            url_topic=request.path_params.get("topic"),
            request_id=given if _REQUEST_ID.match(given) else str(uuid4()),
        )


async def _read_body(request: Request) -> bytes:
    """The body, as the bytes that came. Reads no further than the bound."""
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and (len(declared) > 15 or int(declared) > MAX_BODY_BYTES):
        raise BodyError("body_too_large", 413)
    body = bytearray()
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            async for piece in request.stream():
                body += piece
                if len(body) > MAX_BODY_BYTES:
                    raise BodyError("body_too_large", 413)
    except ClientDisconnect:
        raise BodyError("body_truncated", 400) from None
    except TimeoutError:
        raise BodyError("body_too_slow", 408) from None
    return bytes(body)


def _answer(status: int, word: str | None, *, retry_after_s: int | None = None, close: bool = False) -> Response:
    headers = {}
    if retry_after_s is not None:
        headers["retry-after"] = str(retry_after_s)
    if close:
        # What is left of the body is not read.
        headers["connection"] = "close"
    return PlainTextResponse(f"{word or ''}\n", status, headers)


def _uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None
