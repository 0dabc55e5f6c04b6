"""POST to an address that a tenant chose, without becoming the tenant's way into our network.

What must stay true:

* A socket is only ever connected to an address that was judged by ``addresses``: the name is resolved once for each
  call, every answer is judged, one bad answer refuses them all, and the socket factory judges again what it is given.
  Host and SNI stay the name.
* Nothing leads elsewhere: no redirects, no proxies or credentials from the environment, no cookies.
* One deadline covers look-up, connect, TLS, sending, headers and body. A body that drips does not outlive it.
* No more than ``MAX_READ`` bytes of an answer are read, and no more than that come out of its decompression.

A connection serves one call. Reuse would save a handshake, and would cost a false failure each time a receiver closes
an idle connection just as the next delivery is written to it: that cannot be told from a receiver that took the
delivery and died.
"""

import asyncio
import contextlib
import email.utils
import socket
import ssl
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from consumers.outbound.addresses import Network, TargetRefused, parse_target, refusal_of_address

DEADLINE_S = 10.0
MAX_READ = 16 * 1024
SNIPPET_CHARS = 1000
# Calls to one host at a time, and callers that may wait for their turn: one hanging host must not hold every slot of
# a worker.
PER_HOST = 20
# getaddrinfo cannot be cancelled; with threads of its own a name server that hangs holds up look-ups only.
RESOLVER_THREADS = 32

Lookup = Callable[[str, int], Awaitable[Sequence[tuple[socket.AddressFamily, str]]]]


class CallFailed(Exception):
    """No answer was had: the next attempt may fare better. ``kind``: dns, connect, tls, timeout, cut or unreadable.

    The message is ours throughout; nothing that came over the wire is in it.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class HostBusy(Exception):
    """Too many calls to this host are under way already. Nothing was sent: come back a little later, it is nobody's
    failure."""


@dataclass(frozen=True)
class Answer:
    """What the receiver answered. ``snippet``: the start of its body as printable text, for the delivery log."""

    status: int
    snippet: str
    retry_after_s: float | None
    """What a Retry-After header asked for, in seconds from now, or None."""

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300


class OutboundClient:
    """A client for calls to targets of tenants; open it once for a process, with ``async with``."""

    def __init__(
        self,
        *,
        https_only: bool,
        allowed: Sequence[Network] = (),
        deadline_s: float = DEADLINE_S,
        per_host: int = PER_HOST,
        ssl_context: ssl.SSLContext | None = None,
        lookup: Lookup | None = None,
    ) -> None:
        """``allowed``: networks opened by the operator, none unless set. ``ssl_context``: trust other roots than the
        system's."""
        self._https_only = https_only
        self._allowed = tuple(allowed)
        self._deadline_s = deadline_s
        self._per_host = per_host
        self._ssl: ssl.SSLContext | bool = True if ssl_context is None else ssl_context
        self._threads = ThreadPoolExecutor(RESOLVER_THREADS, thread_name_prefix="outbound-dns")
        self._lookup = lookup or self._system_lookup
        self._turns: dict[str, _Turns] = {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "OutboundClient":
        connector = aiohttp.TCPConnector(
            resolver=_CheckingResolver(self._lookup, self._allowed),
            socket_factory=self._checked_socket,
            use_dns_cache=False,
            force_close=True,
            limit=0,
            ssl=self._ssl,
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            auto_decompress=False,
            raise_for_status=False,
            # asyncio.timeout in post() is the one deadline; aiohttp's own would start anew for each phase.
            timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def check(self, url: str) -> None:
        """Raise TargetRefused for a URL that would never be called, without looking anything up: for whoever saves
        one."""
        parse_target(url, https_only=self._https_only, allowed=self._allowed)

    async def post(self, url: str, body: bytes, headers: Mapping[str, str] | Callable[[], Mapping[str, str]]) -> Answer:
        """POST ``body`` once and return what was answered, whatever its status.

        ``headers`` may be a function: it is called when the call's turn has come, so that a signature carries the
        time it is sent. Raises TargetRefused (never to be called), CallFailed (no answer) and HostBusy (not sent).
        """
        target = parse_target(url, https_only=self._https_only, allowed=self._allowed)
        # Built from the judged parts and never parsed again: two parsers that disagree are a way around the first.
        checked = URL.build(
            scheme=target.scheme,
            host=target.host,
            port=target.port,
            path=target.path,
            query_string=target.query,
            encoded=True,
        )
        async with self._turn(target.host):
            return await self._call(checked, body, headers() if callable(headers) else headers)

    async def _call(self, url: URL, body: bytes, headers: Mapping[str, str]) -> Answer:
        assert self._session is not None, "the client is not open"
        deadline = asyncio.get_running_loop().time() + self._deadline_s
        # identity, and no auto_decompress: what decompresses is bounded by us, in _readable.
        asked = {
            "Content-Type": "application/json",
            "User-Agent": "Afluente-Webhooks",
            "Accept-Encoding": "identity",
            **headers,
        }
        try:
            async with asyncio.timeout_at(deadline):
                response = await self._session.post(url, data=body, headers=asked, allow_redirects=False)
        except (aiohttp.ClientError, OSError) as error:
            raise self._translated(error) from None
        try:
            raw = await _start_of_body(response, deadline)
        finally:
            response.close()
        return Answer(
            status=response.status,
            snippet=_readable(raw, response.headers.get("Content-Encoding", "")),
            retry_after_s=retry_after_s(response.headers.get("Retry-After", ""), datetime.now(UTC)),
        )

    @contextlib.asynccontextmanager
    async def _turn(self, host: str) -> AsyncIterator[None]:
        """One of the calls that may be under way to a host; as many again may wait for it, as long as a call may
        last."""
        turns = self._turns.setdefault(host, _Turns(asyncio.Semaphore(self._per_host)))
        if turns.callers >= 2 * self._per_host:
            raise HostBusy(host)
        turns.callers += 1
        try:
            try:
                await asyncio.wait_for(turns.free.acquire(), self._deadline_s)
            except TimeoutError:
                raise HostBusy(host) from None
            try:
                yield
            finally:
                turns.free.release()
        finally:
            turns.callers -= 1
            if not turns.callers:
                self._turns.pop(host, None)

    def _checked_socket(self, address_info: Any) -> socket.socket:
        """The last look: whatever got an address past the resolver, the socket that would connect to it is not made."""
        family, kind, protocol, _, address = address_info
        if refusal_of_address(address[0], self._allowed) is not None:
            raise PermissionError("the address is not public")
        return socket.socket(family=family, type=kind, proto=protocol)

    async def _system_lookup(self, host: str, port: int) -> Sequence[tuple[socket.AddressFamily, str]]:
        answers = await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
        return [(family, str(address[0])) for family, _, _, _, address in answers]

    def _translated(self, error: Exception) -> CallFailed:
        """What a client error means, in words of ours: the library's own carry addresses, and bytes of the answer."""
        match error:
            case TimeoutError():
                return CallFailed("timeout", f"no answer within {self._deadline_s:g} s")
            case aiohttp.ClientConnectorDNSError():
                return CallFailed("dns", "the host name cannot be resolved")
            case aiohttp.ClientConnectorCertificateError():
                reason = getattr(error.certificate_error, "verify_message", "") or "not valid for the host"
                return CallFailed("tls", f"the certificate is not accepted: {reason}")
            case aiohttp.ClientConnectorSSLError():
                return CallFailed("tls", "TLS could not be agreed with the receiver")
            case aiohttp.ClientConnectorError():
                return CallFailed("connect", "the receiver does not accept connections")
            case aiohttp.ServerDisconnectedError() | aiohttp.ClientOSError() | OSError():
                return CallFailed("cut", "the connection was cut before an answer")
            case _:
                return CallFailed("unreadable", "the answer is not readable HTTP")


@dataclass
class _Turns:
    free: asyncio.Semaphore
    callers: int = 0


class _CheckingResolver(AbstractResolver):
    """Looks a name up once and gives its addresses on only if every one of them may be called."""

    def __init__(self, lookup: Lookup, allowed: Sequence[Network]) -> None:
        self._lookup = lookup
        self._allowed = allowed

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        answers = await self._lookup(host, port)
        if not answers:
            raise OSError("the name has no addresses")
        # All or none: a name with one public and one private answer is how a check is talked past.
        for _, address in answers:
            if refusal_of_address(address, self._allowed) is not None:
                raise TargetRefused("the host leads to an address that is not public")
        return [
            ResolveResult(hostname=host, host=address, port=port, family=answered, proto=0, flags=socket.AI_NUMERICHOST)
            for answered, address in answers
        ]

    async def close(self) -> None:
        """Nothing is held open."""


async def _start_of_body(response: aiohttp.ClientResponse, deadline: float) -> bytes:
    """The first ``MAX_READ`` bytes of a body, or what of them came before the deadline (in the loop's time).

    The status has said already whether the delivery was taken, so a body that is cut, drips or never ends is an
    answer with less in its snippet, not a failure that would deliver a second time.
    """
    read = bytearray()
    with contextlib.suppress(aiohttp.ClientError, OSError):
        async with asyncio.timeout_at(deadline):
            while len(read) < MAX_READ and (chunk := await response.content.read(MAX_READ - len(read))):
                read += chunk
    return bytes(read)


def _readable(raw: bytes, encoding: str) -> str:
    """The start of a body as text that can be stored and shown: bounded, without control characters (Postgres takes
    no NUL)."""
    match encoding.strip().lower():
        case "" | "identity":
            plain = raw
        case "gzip" | "x-gzip" | "deflate":
            try:
                # 32: tells gzip from zlib by itself. The second argument bounds what a bomb may become.
                plain = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32).decompress(raw, MAX_READ)
            except zlib.error:
                return ""
        case _:
            return ""
    text = plain.decode("utf-8", "replace")[:SNIPPET_CHARS]
    return "".join(character if character.isprintable() else " " for character in text)


def retry_after_s(value: str, now: datetime) -> float | None:
    """The seconds from ``now`` that a Retry-After header asks for, or None if it asks for nothing readable. Never
    negative."""
    value = value.strip()
    if value.isascii() and value.isdigit() and len(value) < 10:
        return float(value)
    try:
        until = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return None
    if until.tzinfo is None:
        until = until.replace(tzinfo=UTC)
    return max(0.0, (until - now).total_seconds())
