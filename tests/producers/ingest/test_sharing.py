"""Deliveries that share a transaction, and connections that are held in memory: nobody notices either."""

import asyncio
import contextlib
from datetime import UTC, datetime, timedelta

import pytest

from afluente import postgres as connections
from afluente.web import server
from producers.ingest import channels
from tests.producers.ingest.conftest import body_of, shopify

ORDER = body_of({"id": 1001})


def order(event, topic="orders/create", **given):
    return shopify(ORDER, **{"X-Shopify-Topic": topic, "X-Shopify-Event-Id": event}, **given)


class Shop:
    """A Shopify channel of an organization of its own, and its sender."""

    def __init__(self, web, organization, channel):
        self.web, self.organization, self.channel = web, organization, channel

    async def __call__(self, event, topic="orders/create", **given):
        """POST one delivery; gives status and word."""
        return await self.web.post(f"/webhooks/shopify/{self.channel}", ORDER, order(event, topic, **given))


@pytest.fixture
def post(web, database, channel):
    organization = database.organization()
    return Shop(web, organization, channel("shopify", organization))


async def test_many_at_once_share_transactions(post, database, emitted):
    assert await post("first") == (200, "stored")
    answers = await asyncio.gather(*(post(str(number)) for number in range(40)))
    assert answers == [(200, "stored")] * 40
    ((transactions,),) = database.execute("SELECT count(DISTINCT xmin::text) FROM webhook_events")
    assert transactions < 30
    assert len({payload["webhook_event_id"] for _, _, payload in emitted()}) == 41


async def test_what_cannot_be_stored_fails_alone(post, database, rows, emitted):
    database.execute(
        "ALTER TABLE webhook_events ADD CONSTRAINT refuse CHECK (topic IS DISTINCT FROM 'orders/bad') NOT VALID"
    )
    topics = ["orders/bad" if number % 8 == 3 else "orders/create" for number in range(32)]
    answers = await asyncio.gather(*(post(str(number), topic) for number, topic in enumerate(topics)))
    assert [status for status, _ in answers] == [500 if topic == "orders/bad" else 200 for topic in topics]
    assert len(rows(children=True)) == len(rows(children=False)) == len(emitted()) == 28


async def test_who_meets_a_lock_waits_alone(post, database, rows):
    assert await post("first") == (200, "stored")
    (parent,) = rows(children=False)
    with connections.connect(database.url) as conn:
        # somebody is about to store the delivery 'held', and does not say yet whether it will
        conn.execute(
            """
            INSERT INTO webhook_events
                   (parent_id, organization_id, channel_id, source, verification, dedupe_key, status)
            VALUES (%s, %s, %s, 'shopify', 'verified', 'orders/create:held', 'received')
            """,
            [parent["id"], post.organization, post.channel],
        )
        held = asyncio.create_task(post("held"))
        answers = await asyncio.gather(*(post(str(number)) for number in range(8)))
        assert answers == [(200, "stored")] * 8
        assert not held.done()
        conn.rollback()
    assert await held == (200, "stored")


async def test_connection_that_changes_is_seen_by_the_next_delivery(post, database, keyring, rows):
    assert await post("a", secret=b"whsec_test") == (200, "stored")
    with connections.connect(database.url) as conn:
        ended = datetime.now(UTC) - timedelta(seconds=1)
        channels.rotate(conn, keyring, post.channel, "signature", b"new", ended)
    assert await post("b") == (401, "signature_mismatch")
    assert await post("c", secret=b"new") == (200, "stored")
    for status, word in (("paused", "unrouted"), ("active", "stored")):
        database.execute("UPDATE channels SET status = %s", [status])
        assert await post(status, secret=b"new") == (200, word)
    database.execute("DELETE FROM channel_secrets")
    assert await post("d", secret=b"new") == (401, "secret_unset")
    assert [row["dedupe_key"] for row in rows(children=True)] == [
        f"orders/create:{event}" for event in ("a", "c", "active")
    ]


async def test_secret_that_ends_is_not_valid_a_moment_later(web, post, database, keyring):
    with connections.connect(database.url) as conn:
        channels.rotate(conn, keyring, post.channel, "signature", b"new", datetime.now(UTC) + timedelta(seconds=1))
    assert await post("a") == (200, "stored")
    async with asyncio.timeout(20):
        number = 0
        while (await post(str(number := number + 1)))[0] == 200:
            pass
    assert await post("b", secret=b"new") == (200, "stored")


async def test_channel_that_is_gone_is_unknown(web, database, channel, keyring, rows):
    connection = channel("shopify", database.organization())
    path = f"/webhooks/shopify/{connection}"
    # refused, so that no row keeps the channel from being deleted
    assert (await web.post(path, ORDER, shopify(ORDER, b"wrong")))[0] == 401
    database.execute("DELETE FROM webhook_events")
    database.execute("DELETE FROM channel_secrets")
    database.execute("DELETE FROM channels")
    assert await web.post(path, ORDER, order("a")) == (404, "unknown_channel")


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * (server.MAX_HEAD_BYTES + 300_000),
        b"POST /webhooks/shopify/x HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n"
        + b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * (server.MAX_AHEAD + 10),
    ],
    ids=["a head without end", "too many ahead"],
)
async def test_what_the_parser_keeps_is_bounded(web, monkeypatch, sent):
    monkeypatch.setattr(server, "HEAD_WITHIN_S", 60.0)
    reader, writer = await asyncio.open_connection(*web.address)
    writer.write(sent)
    # the answer may be lost, as the rest is not read
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(20):
            assert b" 400 " in await reader.read()
    writer.close()


async def test_request_that_asks_for_http2_is_taken_as_it_is(web, post, rows):
    """As Java's client sends every one over http://: the body comes with it, and the connection stays."""
    reader, writer = await asyncio.open_connection(*web.address)
    for event in ("a", "b"):
        lines = [
            f"POST /webhooks/shopify/{post.channel} HTTP/1.1",
            "Host: x",
            "Connection: Upgrade, HTTP2-Settings",
            "Upgrade: h2c",
            "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA",
            f"Content-Length: {len(ORDER)}",
            *(f"{name}: {value}" for name, value in order(event).items()),
        ]
        writer.write("\r\n".join([*lines, "", ""]).encode() + ORDER[:5])
        await writer.drain()
        writer.write(ORDER[5:])
        async with asyncio.timeout(20):
            assert (await reader.readuntil(b"stored\n")).startswith(b"HTTP/1.1 200 ")
    writer.close()
    assert [row["dedupe_key"] for row in rows(children=True)] == ["orders/create:a", "orders/create:b"]


async def test_tunnel_is_refused(web):
    reader, writer = await asyncio.open_connection(*web.address)
    writer.write(b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:443\r\n\r\n")
    async with asyncio.timeout(20):
        assert b" 400 " in await reader.readline()
    writer.close()
