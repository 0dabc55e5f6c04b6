"""Nuvemshop's REST API, for the tests and the demo: serves resources by path, refuses what the real one refuses, fails
to order.

From its public documentation (headers, errors, rate limit) and the sample resources: `GET /v1/<store>/orders/<id>` and
the like want `Authentication: bearer <token>` (that is its name there) and a `User-Agent`; 401 without the one, 400
without the other; 404 for what was deleted; 40 requests at once, then two a second, with the `x-rate-limit-*` headers.

Orders are those of `receiver`: {"do": "answer", "status": 500}, {"do": "slow", "seconds": 15}, {"do": "cut"}, {"do":
"hang"}; each is for the next request, whatever it asks for.

As a process: `python -m afluente.local.services.nuvemshop --port 9001`; resources by `PUT /control/resources` with
{path: resource}, orders by `PUT /control/orders` with a list of them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Self

from aiohttp import web

BUCKET = 40
DRAIN_PER_S = 2.0
MAX_BODY = 16 * 1024 * 1024

Order = dict[str, Any]


class Nuvemshop:
    """The API and its server. `async with Nuvemshop() as shop:` listens on a free port of 127.0.0.1."""

    def __init__(
        self, *, token: str | None = None, host: str = "127.0.0.1", port: int = 0, bucket: int = BUCKET
    ) -> None:
        """`token`: the only one that is let in; None lets any bearer in."""
        self.host, self.port, self._token, self._bucket = host, port, token, bucket
        self.resources: dict[str, dict[str, Any]] = {}
        self.orders: deque[Order] = deque()
        self.requests: list[str] = []
        """Paths asked for, refused ones included."""
        self._level, self._drained_at = 0.0, time.monotonic()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_put("/control/resources", self._serve_these)
        app.router.add_put("/control/orders", self._obey_these)
        app.router.add_get("/v1/{path:.*}", self._get)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, self.port).start()
        if self.port == 0:
            self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _get(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request.path)
        order: Order = self.orders.popleft() if self.orders else {"do": "serve"}
        match order["do"]:
            case "answer":
                return _error(order.get("status", 500), order.get("body", "ordered"))
            case "slow":
                await asyncio.sleep(order["seconds"])
            case "hang":
                await asyncio.Event().wait()
            case "cut":
                if request.transport is not None:
                    request.transport.abort()
                return web.Response()
        return self._answer(request.path, request.headers)

    def _answer(self, path: str, headers: Mapping[str, str]) -> web.Response:
        scheme, _, token = headers.get("Authentication", "").partition(" ")
        if scheme.lower() != "bearer" or not token or self._token not in (None, token):
            return _error(401, "Invalid access token")
        if not headers.get("User-Agent"):
            return _error(400, "Missing User-Agent header")
        if not self._has_room():
            return self._limited(_error(429, "Too Many Requests"))
        if (resource := self.resources.get(path.rstrip("/"))) is None:
            return self._limited(_error(404, "Not Found"))
        return self._limited(web.json_response(resource))

    def _has_room(self) -> bool:
        now = time.monotonic()
        self._level = max(0.0, self._level - (now - self._drained_at) * DRAIN_PER_S)
        self._drained_at = now
        if self._level + 1 > self._bucket:
            return False
        self._level += 1
        return True

    def _limited(self, response: web.Response) -> web.Response:
        response.headers["x-rate-limit-limit"] = str(self._bucket)
        response.headers["x-rate-limit-remaining"] = str(int(self._bucket - self._level))
        response.headers["x-rate-limit-reset"] = str(int(self._level / DRAIN_PER_S * 1000))
        return response

    async def _serve_these(self, request: web.Request) -> web.Response:
        self.resources |= await request.json()
        return web.json_response({"resources": len(self.resources)})

    async def _obey_these(self, request: web.Request) -> web.Response:
        self.orders.extend(await request.json())
        return web.json_response({"orders": len(self.orders)})


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"code": status, "message": message, "description": message}, status=status)


async def _serve(host: str, port: int) -> None:
    async with Nuvemshop(host=host, port=port) as shop:
        print(json.dumps({"event": "nuvemshop.ready", "url": shop.url}), flush=True)
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="Nuvemshop's REST API, as far as the normaliser asks for it.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: a free one, printed on the first line")
    arguments = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(arguments.host, arguments.port))


if __name__ == "__main__":
    main()
