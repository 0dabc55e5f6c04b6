"""The HTTP server around the application. Says `web.ready` once it accepts connections, with the address."""

from __future__ import annotations

import signal
import socket
from types import FrameType
from typing import Any

import uvicorn

from afluente.telemetry import get_logger

log = get_logger(__name__)

KEEP_ALIVE_S = 30
STOP_WITHIN_S = 10
MAX_CONNECTIONS = 1000


class Server(uvicorn.Server):
    """uvicorn, which says so when it is ready. A stop signal finishes what is in flight and is a clean end."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # The inherited one raises the signal again at the end: a stop that was asked for would look like a kill.
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            log.info("web.ready", url=f"http://{host}:{port}", host=host, port=port)


def serve(app: Any, host: str, port: int) -> None:
    """Serve until SIGTERM or SIGINT. Port 0 takes a free one; `web.ready` says which."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=STOP_WITHIN_S,
        limit_concurrency=MAX_CONNECTIONS,
    )
    Server(config).run()
