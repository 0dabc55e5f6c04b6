"""A receiver over the test's own database, a sender that signs like the real ones, and a door in front of Postgres."""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import io
import json
import socket
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from afluente import postgres as connections
from afluente.secrets import Keyring
from afluente.web.app import build
from afluente.web.server import server_of
from producers.ingest import channels

SECRET = b"whsec_test"


@pytest.fixture
def key():
    """The key of `keyring` as a process is given it."""
    return Keyring.generate()


@pytest.fixture
def keyring(key):
    return Keyring.parse(key)


@pytest.fixture
def channel(database, keyring):
    """Make a connection: `channel("shopify", organization, external_id="a.myshopify.com")` returns its id."""

    def make(source, organization, secret=SECRET, secrets=None, **given):
        with connections.connect(database.url) as conn:
            return channels.add(
                conn,
                keyring,
                organization_id=organization,
                source=source,
                secrets=secrets or {"signature": secret},
                **given,
            )

    return make


def shopify(body, secret=SECRET, **headers):
    digest = base64.b64encode(hmac.new(secret, body, hashlib.sha256).digest()).decode()
    return {"X-Shopify-Hmac-Sha256": digest} | headers


def nuvemshop(body, secret=SECRET, **headers):
    return {"x-linkedstore-hmac-sha256": hmac.new(secret, body, hashlib.sha256).hexdigest()} | headers


def whatsapp(body, secret=SECRET, **headers):
    return {"X-Hub-Signature-256": f"sha256={hmac.new(secret, body, hashlib.sha256).hexdigest()}"} | headers


def hotmart(body, secret=SECRET, **headers):
    return {"X-Hotmart-Hottok": secret.decode()} | headers


def typeform(body, secret=SECRET, **headers):
    digest = base64.b64encode(hmac.new(secret, body, hashlib.sha256).digest()).decode()
    return {"Typeform-Signature": f"sha256={digest}"} | headers


def generic(body, secret=SECRET, **headers):
    """Signed as the shipped mappings want it: a connection looks at its own headers only."""
    at = str(int(time.time()))
    yampi = base64.b64encode(hmac.new(secret, body, hashlib.sha256).digest()).decode()
    courier = hmac.new(secret, f"{at}.".encode() + body, hashlib.sha256).hexdigest()
    own = {"X-Yampi-Hmac-SHA256": yampi, "X-Signature": f"sha256={courier}", "X-Timestamp": at}
    return own | headers


def stripe(body, secret=SECRET, at=None, **headers):
    at = int(time.time()) if at is None else at
    digest = hmac.new(secret, f"{at}.".encode() + body, hashlib.sha256).hexdigest()
    return {"Stripe-Signature": f"t={at},v1={digest}"} | headers


def waha(body, secret=SECRET, **headers):
    digest = hmac.new(secret, body, hashlib.sha512).hexdigest()
    return {"X-Webhook-Hmac": digest, "X-Webhook-Hmac-Algorithm": "sha512"} | headers


def evolution(body, secret=SECRET, **headers):
    return {"X-Webhook-Secret": secret.decode()} | headers


def jwt(secret=SECRET, algorithm="HS256", **claims):
    """A token as Evolution makes it: for ten minutes."""
    now = int(time.time())
    parts = [{"alg": algorithm, "typ": "JWT"}, {"iat": now, "exp": now + 600, "app": "evolution"} | claims]
    signed = b".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in parts)
    digest = base64.urlsafe_b64encode(hmac.new(secret, signed, hashlib.sha256).digest()).rstrip(b"=")
    return f"{signed.decode()}.{digest.decode()}"


@dataclass
class Web:
    """A running receiver. `post` returns status and text."""

    url: str
    session: aiohttp.ClientSession

    async def post(self, path, body, headers):
        data = io.BytesIO(body) if isinstance(body, bytes) else body
        async with self.session.post(self.url + path, data=data, headers=headers) as response:
            return response.status, (await response.text()).strip()

    async def get(self, path, **query):
        async with self.session.get(self.url + path, params=query) as response:
            return response.status, await response.text()

    @property
    def address(self):
        parts = urlsplit(self.url)
        return parts.hostname, parts.port


@contextlib.asynccontextmanager
async def running(app):
    """Serve `app` on a free port. The socket listens before the server is up, so nobody has to wait."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = server_of(app)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(20)) as session:
            yield Web(f"http://127.0.0.1:{listener.getsockname()[1]}", session)
    finally:
        server.should_exit = True
        await task
        listener.close()


@pytest.fixture
async def web(database, keyring, signals):
    async with running(build(database.url, keyring, observer=signals)) as web:
        yield web


class Door:
    """A way to Postgres that can be shut: every connection through it breaks, and new ones are refused."""

    def __init__(self, host, port):
        self.url = ""
        self._target = host, port
        self._server: Any = None
        self._port = 0
        self._writers = set()
        self._tasks = set()

    async def open(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def shut(self):
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        if self._tasks:
            await asyncio.wait(self._tasks)

    @property
    def port(self):
        return self._port

    async def _serve(self, reader, writer):
        self._tasks.add(asyncio.current_task())
        with contextlib.suppress(OSError):
            inner_reader, inner_writer = await asyncio.open_connection(*self._target)
            self._writers |= {writer, inner_writer}
            await asyncio.gather(self._copy(reader, inner_writer), self._copy(inner_reader, writer))
            self._writers -= {writer, inner_writer}
        self._tasks.discard(asyncio.current_task())

    async def _copy(self, reader, writer):
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()


@pytest.fixture
async def door(database):
    """A `Door` to the test's database, open; `door.url` goes through it."""
    parts = urlsplit(database.url)
    door = Door(parts.hostname, parts.port)
    await door.open()
    login = parts.netloc.rpartition("@")[0]
    door.url = f"{parts.scheme}://{login}@127.0.0.1:{door.port}{parts.path}"
    yield door
    await door.shut()


@pytest.fixture
def rows(database):
    """All deliveries as dicts, oldest first: `rows()`; `rows(children=True)` those of organizations."""

    def read(children=None):
        where = {None: "true", True: "parent_id IS NOT NULL", False: "parent_id IS NULL"}[children]
        with connections.connect(database.url) as conn:
            from psycopg.rows import dict_row

            return (
                conn.cursor(row_factory=dict_row)
                .execute(f"SELECT * FROM webhook_events WHERE {where} ORDER BY id")
                .fetchall()
            )

    return read


@pytest.fixture
def emitted(database):
    """Emitted events as (organization_id, event_type, payload), in order."""

    def read():
        return database.execute("SELECT organization_id, event_type, payload FROM event_log ORDER BY seq")

    return read


def body_of(value):
    return json.dumps(value).encode()
