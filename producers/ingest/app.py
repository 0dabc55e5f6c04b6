"""The HTTP side of ingest: `POST /webhooks/<source>/<channel>[/<topic>]`, and GET for WhatsApp's set-up.

What an answer means: 2xx is "durably stored", whatever is thought of it later; 401 a signature that does not fit; 404
an address of nobody's, said before the body is read; 408, 413 a body that came too slowly or is too large; 503 "not
stored, send it again" (Postgres is away, or too much is in flight). Nothing is done before the answer but what `store`
does in its one transaction.

Bounded: a body by `MAX_BODY_BYTES` (read in pieces, refused at the first byte too many), what is held in memory by
`MAX_HELD_BYTES`, of one peer by `MAX_PEER_BYTES`, stores at once by `max_in_flight`, and rows about refused deliveries
by a bucket for the whole process, so that nobody can fill the table without a secret. Who sends slowly holds little
more than the bytes that came: the place at Postgres is taken once the body is here.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
from producers.ingest.store import Channel, Incoming, Outcome, Receipt

log = get_logger(__name__)

MAX_BODY_BYTES = 3 * 1024 * 1024  # WhatsApp's own bound for one POST
# Shopify gives up after 5 s in all: the answer must be out before, even if it is "try again".
READ_TIMEOUT_S = 4.0
STORE_TIMEOUT_S = 3.5
MAX_IN_FLIGHT = 32
MAX_HELD_BYTES = 96 * 1024 * 1024
# Behind a proxy that is not named in FORWARDED_ALLOW_IPS all senders are one peer: room for eight of the largest.
MAX_PEER_BYTES = 24 * 1024 * 1024
# As much as the server reads ahead before anybody asks for the body.
MIN_HELD_BYTES = 64 * 1024
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


class Busy(Exception):
    """Too much is in flight."""


class Memory:
    """The bytes that requests hold, in all and of each peer address."""

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()

    @contextmanager
    def of(self, peer: str) -> Iterator[Callable[[int], None]]:
        """One request's share, given back at the end. Call with the bytes it holds by now; raises Busy."""
        held = 0

        def hold(size: int) -> None:
            nonlocal held
            more = max(size, MIN_HELD_BYTES) - held
            if self._held[peer] + more > MAX_PEER_BYTES or self._held.total() + more > MAX_HELD_BYTES:
                raise Busy
            self._held[peer] += more
            held += more

        try:
            hold(0)
            yield hold
        finally:
            self._held[peer] -= held
            if self._held[peer] <= 0:
                del self._held[peer]


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
        self._memory = Memory()
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
        try:
            with self._memory.of(request.client.host if request.client else "") as hold:
                return await self._take(request, source, hold)
        except Busy:
            return _answer(503, "busy", retry_after_s=1)
        except (psycopg.OperationalError, PoolTimeout, PoolClosed, TooManyRequests, TimeoutError) as error:
            # Not stored, or not known to be: the sender tries again, and a repeat is found by its key.
            log.warning("ingest.unavailable", source=source.name, error=type(error).__name__)
            return _answer(503, "unavailable", retry_after_s=5)

    async def _take(self, request: Request, source: Source, hold: Callable[[int], None]) -> Response:
        incoming = self._incoming(request, source)
        channel = await self._channel(source, incoming.channel_id)
        if channel is None:
            await self._note_refusal(incoming, "unknown_channel", Outcome.UNKNOWN_CHANNEL)
            return _answer(404, "unknown_channel")
        try:
            body = await _read_body(request, hold)
        except BodyError as problem:
            await self._note_refusal(incoming, problem.reason, Outcome.REFUSED, channel)
            return _answer(problem.status, problem.reason, close=True)
        receipt = await self._store(replace(incoming, body=body))
        return _answer(
            _STATUS[receipt.outcome], receipt.reason if _STATUS[receipt.outcome] >= 400 else receipt.outcome.value
        )

    async def _channel(self, source: Source, channel_id: UUID | None) -> Channel | None:
        if channel_id is None:
            return None
        async with asyncio.timeout(STORE_TIMEOUT_S), self._pool.connection(timeout=STORE_TIMEOUT_S) as conn:
            return await store.find_channel(conn, self._keyring, source.name, channel_id, self._clock.now())

    async def _store(self, incoming: Incoming) -> Receipt:
        if self._free <= 0:
            raise Busy
        self._free -= 1
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S), self._pool.connection(timeout=STORE_TIMEOUT_S) as conn:
                receipt = await store.receive(conn, self._keyring, incoming)
                refused = receipt.outcome in (Outcome.REFUSED, Outcome.UNKNOWN_CHANNEL)
                if refused and not self._refusals.take(self._clock.monotonic()):
                    await conn.rollback()
        finally:
            self._free += 1
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

    async def set_up(self, request: Request) -> Response:
        """WhatsApp asks whether the address is ours: the challenge comes back unchanged if the token is."""
        source = self._sources.get(request.path_params["source"])
        channel_id = _uuid(request.path_params["channel"])
        if source is None or not source.challenged or channel_id is None:
            return _answer(404, "not_found")
        query = request.query_params
        try:
            channel = await self._channel(source, channel_id)
        except (psycopg.OperationalError, PoolTimeout, PoolClosed, TooManyRequests, TimeoutError):
            return _answer(503, "unavailable", retry_after_s=5)
        tokens = channel.secrets[store.VERIFY_TOKEN] if channel else ()
        if query.get("hub.mode") != "subscribe" or not verify_token(query.get("hub.verify_token"), tokens):
            return _answer(403, "verify_token_mismatch")
        return PlainTextResponse(query.get("hub.challenge", ""), headers={"x-content-type-options": "nosniff"})

    def _incoming(self, request: Request, source: Source) -> Incoming:
        headers = {name.lower(): value for name, value in request.headers.items()}
        given = headers.get("x-request-id", "")
        return Incoming(
            source=source,
            channel_id=_uuid(request.path_params["channel"]),
            body=b"",
            headers=headers,
            received_at=self._clock.now(),
            url_topic=request.path_params.get("topic"),
            request_id=given if _REQUEST_ID.match(given) else str(uuid4()),
        )


async def _read_body(request: Request, hold: Callable[[int], None]) -> bytes:
    """The body, as the bytes that came. Reads no further than the bound; `hold` hears how much it is so far."""
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
                hold(len(body))
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
    """The id, if it is written as we write it: one channel has one address."""
    try:
        found = UUID(text)
    except ValueError:
        return None
    return found if str(found) == text else None
