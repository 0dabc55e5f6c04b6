"""A subscriber's webhook endpoint, for the tests and the demo: checks signatures as a stranger would, and fails to
order.

It follows the receiver's guide of our outgoing webhooks and Standard Webhooks 1.0.0, and shares no code with what
signs: a mistake there must not be repeated here. Every path ``/hooks/<name>`` is an endpoint of its own with its
secrets, its orders and its record.

An order says what to do with the next call; when none is left, ``then`` says it for all that follow (answer 200
unless told).

    {"do": "answer", "status": 429, "retry_after": "5", "body": "..."}    also redirects: {"do": "answer", "status":
    302, "location": "..."} {"do": "slow", "seconds": 15}        takes the delivery, then answers 200 that late {"do":
    "drip", "seconds": 0.5}       answers 200 at once and a byte of body in each such interval, for ever {"do": "cut"}
    the connection ends before anything is taken {"do": "die"}                        takes the delivery, begins an
    answer of 200, and is gone in the middle of it {"do": "hang"}                       never answers

As a process: ``python -m afluente.local.services.receiver --port 9000``; the endpoints are then told over HTTP, by
``PUT /control/<name>`` with ``{"secrets": [...], "orders": [...], "then": {...}}`` and asked by ``GET
/control/<name>``.
"""

import argparse
import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import ssl
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web

WINDOW_S = 300
MAX_BODY = 1024 * 1024

Order = dict[str, Any]
ANSWER_OK: Order = {"do": "answer", "status": 200}


@dataclass(frozen=True)
class Received:
    """One call: whether its signatures held, and what it carried. ``refused`` says what was wrong with it, or is
    None."""

    name: str
    headers: dict[str, str]
    body: bytes
    refused: str | None

    @property
    def delivery_id(self) -> str:
        return self.headers.get("x-webhook-delivery", "")

    @property
    def attempt(self) -> int:
        return int(self.headers.get("x-webhook-attempt", "0"))

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Endpoint:
    secrets: list[str] = field(default_factory=list)
    """As shown to the subscriber; any of them may have signed. None: signatures are not checked."""
    orders: deque[Order] = field(default_factory=deque)
    then: Order = field(default_factory=lambda: dict(ANSWER_OK))
    received: list[Received] = field(default_factory=list)
    """What was taken, refused ones included. A call that was cut is not in it."""
    calls: int = 0

    @property
    def taken(self) -> list[Received]:
        return [call for call in self.received if call.refused is None]


class Receiver:
    """The endpoints and their server. ``async with Receiver() as receiver:`` listens on a free port of 127.0.0.1."""

    def __init__(self, *, host: str = "127.0.0.1", port: int = 0, ssl_context: ssl.SSLContext | None = None) -> None:
        self.host = host
        self.port = port
        self._ssl = ssl_context
        self._endpoints: dict[str, Endpoint] = {}
        self._changed = asyncio.Condition()
        self._runner: web.AppRunner | None = None

    def endpoint(self, name: str) -> Endpoint:
        return self._endpoints.setdefault(name, Endpoint())

    def url(self, name: str) -> str:
        return f"{'http' if self._ssl is None else 'https'}://{self.host}:{self.port}/hooks/{name}"

    def order(self, name: str, *orders: Order, then: Order | None = None) -> Endpoint:
        """What ``name`` does with its next calls, and ``then`` with all after them."""
        endpoint = self.endpoint(name)
        endpoint.orders.extend(orders)
        if then is not None:
            endpoint.then = then
        return endpoint

    async def wait_for_calls(self, name: str, calls: int, timeout_s: float = 20) -> Endpoint:
        """Until that many calls came, cut ones included. TimeoutError if they do not."""
        endpoint = self.endpoint(name)
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(lambda: endpoint.calls >= calls)
        return endpoint

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_post("/hooks/{name}", self._hook)
        app.router.add_put("/control/{name}", self._told)
        app.router.add_get("/control/{name}", self._asked)
        # A hanging call must not hold up the end of a test.
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port, ssl_context=self._ssl)
        await site.start()
        if self.port == 0:
            self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _hook(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        endpoint = self.endpoint(name)
        order = endpoint.orders.popleft() if endpoint.orders else endpoint.then
        body = await request.read()
        headers = {key.lower(): value for key, value in request.headers.items()}
        refused = refusal(headers, body, endpoint.secrets, time.time()) if endpoint.secrets else None
        async with self._changed:
            endpoint.calls += 1
            if order["do"] != "cut":
                endpoint.received.append(Received(name, headers, body, refused))
            self._changed.notify_all()
        if refused is not None:
            return web.json_response({"error": refused}, status=401)
        return await self._carry_out(request, order)

    async def _carry_out(self, request: web.Request, order: Order) -> web.StreamResponse:
        match order["do"]:
            case "answer":
                headers = {
                    header: str(order[key])
                    for key, header in (("retry_after", "Retry-After"), ("location", "Location"))
                    if key in order
                }
                return web.Response(status=order.get("status", 200), text=order.get("body", "ok"), headers=headers)
            case "slow":
                await asyncio.sleep(order["seconds"])
                return web.Response(text="ok")
            case "hang":
                await asyncio.Event().wait()
            case "drip":
                response = web.StreamResponse()
                await response.prepare(request)
                with contextlib.suppress(ConnectionError):
                    while True:
                        await response.write(b".")
                        await asyncio.sleep(order.get("seconds", 0.5))
                return response
            case "die":
                response = web.StreamResponse(headers={"Content-Length": "1000"})
                await response.prepare(request)
                await response.write(b"ok")
                if request.transport is not None:
                    request.transport.close()
                return response
            case "cut":
                if request.transport is not None:
                    request.transport.abort()
            case unknown:
                raise web.HTTPBadRequest(text=f"no such order: {unknown}")
        return web.Response()

    async def _told(self, request: web.Request) -> web.Response:
        told = await request.json()
        endpoint = self.endpoint(request.match_info["name"])
        if "secrets" in told:
            endpoint.secrets = list(told["secrets"])
        endpoint.orders.extend(told.get("orders", ()))
        endpoint.then = told.get("then", endpoint.then)
        return web.json_response({"url": self.url(request.match_info["name"])})

    async def _asked(self, request: web.Request) -> web.Response:
        endpoint = self.endpoint(request.match_info["name"])
        return web.json_response(
            {
                "calls": endpoint.calls,
                "received": [
                    {
                        "delivery_id": call.delivery_id,
                        "attempt": call.attempt,
                        "event": call.headers.get("x-webhook-event"),
                        "refused": call.refused,
                        "body": call.body.decode("utf-8", "replace"),
                    }
                    for call in endpoint.received
                ],
            }
        )


def refusal(headers: dict[str, str], body: bytes, secrets: Sequence[str], now: float) -> str | None:
    """What a careful receiver holds against a delivery, or None. Header names in lower case; both signatures must
    hold."""
    ours = [part.partition("=") for part in headers.get("x-webhook-signature", "").split(",")]
    stated = next((value for key, _, value in ours if key == "t"), "")
    if not stated.isdigit() or headers.get("webhook-timestamp") != stated:
        return "no timestamp"
    if abs(now - int(stated)) > WINDOW_S:
        return "too old or from the future"
    delivery = headers.get("x-webhook-delivery", "")
    if not delivery or headers.get("webhook-id") != delivery:
        return "no delivery id"
    signed = f"{stated}.{delivery}.".encode() + body
    digests = [value for key, _, value in ours if key == "v1"]
    if not _any_equal(digests, [hmac.new(s.encode(), signed, hashlib.sha256).hexdigest() for s in secrets]):
        return "X-Webhook-Signature does not match"
    signed = f"{delivery}.{stated}.".encode() + body
    keys = [base64.b64decode(s.removeprefix("whsec_")) for s in secrets]
    digests = [
        part.removeprefix("v1,") for part in headers.get("webhook-signature", "").split() if part.startswith("v1,")
    ]
    if not _any_equal(digests, [base64.b64encode(hmac.new(k, signed, hashlib.sha256).digest()).decode() for k in keys]):
        return "webhook-signature does not match"
    return None


def _any_equal(given: Sequence[str], expected: Sequence[str]) -> bool:
    # Every pair is compared, so that the time taken says nothing about which one matched.
    return any([hmac.compare_digest(one.encode(), other.encode()) for one in given for other in expected])


async def _serve(host: str, port: int) -> None:
    async with Receiver(host=host, port=port) as receiver:
        print(json.dumps({"event": "receiver.ready", "host": receiver.host, "port": receiver.port}), flush=True)
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="A webhook receiver that verifies signatures and fails to order.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: a free one, printed on the first line")
    arguments = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(arguments.host, arguments.port))


if __name__ == "__main__":
    main()
