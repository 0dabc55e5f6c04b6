"""A stand-in for the Nuvemshop API: gives orders and customers by their ids, refuses what the real one refuses, and
fails to order.

Shapes: `GET /v1/{store_id}/orders/{id}` and `/customers/{id}` of the public API documentation (TiendaNube/api-docs,
resources/order.md and customer.md). Refused as there: no User-Agent (400), a missing or wrong `Authentication: bearer`
token (401), more than the bucket of 40 that leaks two a second (429 with x-rate-limit headers). The store of a token is
fixed: another store's path is 403.

An order says what the next call does: {"do": "status", "status": 500}, {"do": "slow", "seconds": 3}, {"do": "cut"} (the
connection ends without an answer), {"do": "garbage"} (200 and no JSON).

As a process: `python -m afluente.local.services.nuvemshop`, which says its address in its first line. It is told over
HTTP, by `PUT /v1/control/resources` with {"tokens": {"token": "store_id"}, "resources": {"orders/1001": {...}},
"orders": [...]}, and asked by GET.
"""

import argparse
import asyncio
import contextlib
import json
import time
from collections import deque
from typing import Any

from aiohttp import web

BUCKET = 40
LEAK_PER_S = 2.0

Order = dict[str, Any]


class Nuvemshop:
    """`async with Nuvemshop() as api:` listens on a free port of 127.0.0.1; `api.url` is the base URL of the API."""

    def __init__(self, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.host = host
        self.port = port
        self.tokens: dict[str, str] = {}
        """Access token to store id."""
        self.resources: dict[str, dict[str, Any]] = {}
        """By path within the store: 'orders/1001'."""
        self.orders: deque[Order] = deque()
        self.calls: list[tuple[str, int]] = []
        """Path and status of every call; a cut one has status 0."""
        self.limited = True
        self._level: dict[str, float] = {}
        self._at = time.monotonic()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}/v1"

    def put(self, resource: str, value: dict[str, Any]) -> None:
        """An order or a customer: `put("orders", {"id": 1001, ...})`."""
        self.resources[f"{resource}/{value['id']}"] = value

    async def __aenter__(self) -> "Nuvemshop":
        app = web.Application()
        app.router.add_get("/v1/{store}/{resource}/{id}", self._get)
        app.router.add_put("/v1/control/resources", self._told)
        app.router.add_get("/v1/control/resources", self._asked)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _get(self, request: web.Request) -> web.StreamResponse:
        path = f"{request.match_info['resource']}/{request.match_info['id']}"
        order: Order = self.orders.popleft() if self.orders else {"do": "answer"}
        match order["do"]:
            case "cut":
                self.calls.append((path, 0))
                assert request.transport is not None
                request.transport.close()
                return web.Response()
            case "slow":
                await asyncio.sleep(order["seconds"])
            case "status":
                return self._answer(path, order["status"], {"code": order["status"], "message": "to order"})
            case "garbage":
                self.calls.append((path, 200))
                return web.Response(text="<html>", content_type="application/json")
        return self._judge(request, path)

    def _judge(self, request: web.Request, path: str) -> web.Response:
        if not request.headers.get("User-Agent"):
            return self._answer(path, 400, {"code": 400, "message": "Missing User-Agent"})
        scheme, _, token = request.headers.get("Authentication", "").partition(" ")
        store = self.tokens.get(token)
        if scheme.lower() != "bearer" or store is None:
            return self._answer(
                path, 401, {"code": 401, "message": "Unauthorized", "description": "Invalid access token"}
            )
        if request.match_info["store"] != store:
            return self._answer(path, 403, {"code": 403, "message": "Forbidden"})
        remaining = self._take(store)
        limits = {
            "x-rate-limit-limit": str(BUCKET),
            "x-rate-limit-remaining": str(max(0, remaining)),
            "x-rate-limit-reset": str(int(1000 / LEAK_PER_S) * max(1, BUCKET - max(0, remaining))),
        }
        if remaining < 0:
            return self._answer(path, 429, {"code": 429, "message": "Too Many Requests"}, limits)
        found = self.resources.get(path)
        if found is None:
            return self._answer(path, 404, {"code": 404, "message": "Not Found"}, limits)
        return self._answer(path, 200, found, limits)

    def _take(self, store: str) -> int:
        """How much of the store's bucket is left after one more request; negative: none."""
        now = time.monotonic()
        for name in self._level:
            self._level[name] = max(0.0, self._level[name] - (now - self._at) * LEAK_PER_S)
        self._at = now
        level = self._level.get(store, 0.0)
        if self.limited and level + 1 > BUCKET:
            return -1
        self._level[store] = level + 1
        return int(BUCKET - level - 1)

    def _answer(
        self, path: str, status: int, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> web.Response:
        self.calls.append((path, status))
        return web.json_response(body, status=status, headers=headers)

    async def _told(self, request: web.Request) -> web.Response:
        told = await request.json()
        self.tokens |= told.get("tokens", {})
        self.resources |= told.get("resources", {})
        self.orders.extend(told.get("orders", []))
        return web.json_response({"resources": len(self.resources)})

    async def _asked(self, _: web.Request) -> web.Response:
        return web.json_response({"calls": self.calls})


async def _serve(host: str, port: int) -> None:
    async with Nuvemshop(host=host, port=port) as api:
        ready = {"event": "nuvemshop.ready", "url": api.url, "host": api.host, "port": api.port}
        print(json.dumps(ready), flush=True)
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="A stand-in for the Nuvemshop API that fails to order.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: a free one, printed on the first line")
    given = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(given.host, given.port))


if __name__ == "__main__":
    main()
