"""The HTTP server around the application. Says `web.ready` once it accepts connections, with the address.

A connection costs its sender nothing, so none of them may keep others out: see `Protocol`.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from types import FrameType
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from afluente.errors import Refused
from afluente.telemetry import get_logger

log = get_logger(__name__)

KEEP_ALIVE_S = 30
HEAD_WITHIN_S = 5.0
STOP_WITHIN_S = 10
MAX_CONNECTIONS = 1000
# The head of one request and what may follow its body, give or take what is read at once; and requests that a
# connection may send ahead.
MAX_HEAD_BYTES = 64 * 1024
MAX_AHEAD = 100


class Protocol(HttpToolsProtocol):
    """uvicorn's, which waits for no sender for ever. Its own one timer is stopped by every byte that comes.

    HEAD_WITHIN_S is what a sender has for the head of a request, for the rest of a body that was answered unread, and
    for taking an answer off our hands. A body that the application reads is the application's to time. Where
    MAX_CONNECTIONS are open, a new one gets the place of the one that has been without a request for longest.

    The parser keeps a head of any length, what follows the last piece of a body, and all requests that come at once:
    all of it is bounded here. Fields after a body are nobody's, and none of them becomes a header.
    """

    _deadline: asyncio.TimerHandle | None = None
    _waiting_since = 0.0
    _in_head = False
    _kept_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= MAX_CONNECTIONS - 1:
            self._make_room()
        super().connection_made(transport)
        self._waiting_since = self.loop.time()
        self._watch()

    def data_received(self, data: bytes) -> None:
        self._kept_bytes += len(data)
        self._unset_keepalive_if_required()
        self._feed(data)
        if self._kept_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("Invalid HTTP request received.")
        self._watch()

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as asked:
            if self.parser.get_method() == b"CONNECT":
                self.send_400_response("Invalid HTTP request received.")
            else:
                self._without_upgrade(data[asked.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _without_upgrade(self, rest: bytes) -> None:
        """The request as if it had not asked for another protocol: the parser takes it to have no body then, and Java's
        client asks for HTTP/2 with every request that is not encrypted."""
        lines = [self.parser.get_method(), b" ", self.url, b" HTTP/1.1\r\n"]
        for name, value in self.headers:
            if name not in (b"upgrade", b"connection"):
                lines += [name, b": ", value, b"\r\n"]
        lines.append(b"\r\n")
        self.parser = httptools.HttpRequestParser(self)
        self._feed(b"".join(lines))
        self._feed(rest)

    def on_message_begin(self) -> None:
        # What came together with the end of the one before is not told apart: so much more may it be.
        self._in_head, self._kept_bytes = True, 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._kept_bytes = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self.parser.should_upgrade():
            return  # it begins again: _without_upgrade
        if len(self.pipeline) >= MAX_AHEAD:
            raise ValueError(f"more than {MAX_AHEAD} requests ahead")  # the parser takes it for an error of the sender
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self._waiting_since = self.loop.time()
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._deadline is not None:
            self._deadline.cancel()

    def is_waiting(self) -> bool:
        """Whether the sender is the one to do something, and no application counts on this connection."""
        return self.flow.write_paused or self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        # uvicorn's own timer runs: answered, and not a byte came since
        idle = self.timeout_keep_alive_task is not None
        if idle or not self.is_waiting():
            if self._deadline is not None:
                self._deadline.cancel()
            self._deadline = None
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_WITHIN_S, self.transport.abort)

    def _make_room(self) -> None:
        waiting = [
            other
            for other in self.connections
            if isinstance(other, Protocol) and other.is_waiting() and not other.transport.is_closing()
        ]
        if waiting:
            oldest = min(waiting, key=lambda other: other._waiting_since)
            oldest.transport.abort()
            # Not when it is told so, which may be after the new one's request: that one would be one too many.
            self.connections.discard(oldest)


class Server(uvicorn.Server):
    """uvicorn, which says so when it is ready. A stop signal finishes what is in flight and is a clean end."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # The inherited one raises the signal again at the end: a stop that was asked for would look like a kill.
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit as ended:
            # the inherited one logs it and exits with a status of its own
            if isinstance(problem := ended.__context__, OSError):
                where = f"{self.config.host}:{self.config.port}"
                raise Refused(
                    f"cannot listen on {where}: {str(problem.strerror).rpartition(': ')[2]}",
                    hint="--host and --port name another place",
                ) from None
            raise
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            log.info("web.ready", url=f"http://{host}:{port}", host=host, port=port)


def serve(app: Any, host: str, port: int) -> None:
    """Serve until SIGTERM or SIGINT. Port 0 takes a free one; `web.ready` says which."""
    server_of(app, host, port).run()


def server_of(app: Any, host: str = "127.0.0.1", port: int = 0) -> Server:
    """The server that `serve` runs, for those that have an event loop of their own."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=Protocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=STOP_WITHIN_S,
        limit_concurrency=MAX_CONNECTIONS,
    )
    return Server(config)
