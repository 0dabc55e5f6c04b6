"""The REST API over a database of the module's own: every test has organizations of its own in it."""

import asyncio
import io
import json
import socket
import threading
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from afluente import postgres as connections
from afluente.web.api import keys
from afluente.web.app import Part, build
from afluente.web.server import server_of
from tests.fixtures.postgres import clone
from tests.fixtures.signals import Signals
from tests.producers.ingest.conftest import Door

ALL = tuple(keys.SCOPES)


@pytest.fixture(scope="module")
def database(postgres, template):
    with clone(postgres, template) as database:
        yield database


@pytest.fixture
def organization(database):
    return database.organization("Mine")


@pytest.fixture
def make_key(database):
    """Make a key: `make_key(organization, rate_per_s=...)` returns `keys.Made`."""

    def make(organization, scopes=ALL, **given):
        with connections.connect(database.url) as conn:
            wanted = {"organization_id": organization, "name": "test", "scopes": scopes, "actor": "test", **given}
            return keys.create(conn, **wanted)

    return make


@pytest.fixture
def key(make_key, organization):
    """The text of a key of `organization`, which may everything."""
    return make_key(organization).text


@dataclass
class Answer:
    status: int
    headers: Any
    content: Any

    @property
    def problem(self):
        """The slug of the problem; fails when it is not a whole one."""
        assert self.headers["content-type"] == "application/problem+json"
        assert self.content["status"] == self.status
        assert {"type", "title", "detail", "request_id"} <= self.content.keys()
        return self.content["type"].removeprefix("/v1/docs#problem-")


@dataclass
class Client:
    """Calls the API with one key."""

    url: str
    session: aiohttp.ClientSession
    key: str | None = None

    def of(self, key):
        return Client(self.url, self.session, key)

    async def __call__(self, method, path, value=None, body=None, **headers):
        given = {name.replace("_", "-"): text for name, text in headers.items()}
        if self.key is not None:
            given.setdefault("authorization", f"Bearer {self.key}")
        if value is not None:
            body = json.dumps(value).encode()
        if isinstance(body, bytes):
            body = io.BytesIO(body)
        if body is not None:
            given.setdefault("content-type", "application/json")
        async with self.session.request(method, self.url + path, data=body, headers=given) as response:
            data = await response.read()
            is_json = "json" in response.headers.get("content-type", "")
            return Answer(response.status, response.headers, json.loads(data) if data and is_json else data)

    async def post(self, path, value, **headers):
        return await self("POST", path, value, **headers)

    async def get(self, path, **headers):
        return await self("GET", path, **headers)


@pytest.fixture(scope="module")
def heard():
    """What the API of the module says."""
    return Signals()


@pytest.fixture(scope="module")
def address(database, heard):
    """The URL of an API in a thread of this process, for all tests of a file."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = server_of(build(database.url, None, parts={Part.API}, observer=heard))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join()
    listener.close()


@pytest.fixture
async def api(address, key):
    """A client of that API, with `key`."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(20)) as session:
        yield Client(address, session, key)


@pytest.fixture
async def door(database):
    """A way to the module's database that can be shut."""
    parts = urlsplit(database.url)
    door = Door(parts.hostname, parts.port)
    await door.open()
    login = parts.netloc.rpartition("@")[0]
    door.url = f"{parts.scheme}://{login}@127.0.0.1:{door.port}{parts.path}"
    yield door
    await door.shut()


@pytest.fixture
def events_of(database):
    """The events of an organization as dicts, in order."""

    def read(organization, event_type=None):
        from psycopg.rows import dict_row

        with connections.connect(database.url) as conn:
            rows = conn.cursor(row_factory=dict_row).execute(
                "SELECT * FROM event_log WHERE organization_id = %s ORDER BY seq", [organization]
            )
            return [row for row in rows.fetchall() if event_type in (None, row["event_type"])]

    return read


def event(**given):
    return {"event_type": "loyalty.earned", "entity_kind": "loyalty", "payload": {"points": 5}} | given


def fact(**given):
    found = {"event_type": "purchase_completed", "source": "pos", "value": "297.90", "properties": {"productId": "p"}}
    return found | {"contact": {"phone": "+5511987654321"}} | given
