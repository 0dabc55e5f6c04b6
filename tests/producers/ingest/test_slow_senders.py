"""Senders that take their time, many at once: whoever delivers meanwhile is answered as if they were not there."""

import asyncio
import contextlib
import resource

import aiohttp
import pytest

from afluente.web import server
from producers.ingest import app as ingest
from tests.producers.ingest.conftest import SECRET, Web, body_of, shopify

ORDER = body_of({"id": 1001})
NOBODY = "00000000-0000-4000-8000-000000000000"
HALF_A_HEAD = b"POST /webhooks/shopify/x HTTP/1.1\r\nHost: x\r\nX-A: "


def delivery(event):
    return shopify(ORDER, **{"X-Shopify-Topic": "orders/create", "X-Shopify-Event-Id": event})


async def closed(writers):
    for writer in writers:
        writer.close()
    await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)


@pytest.fixture
async def slowly(web):
    """Open a connection, `slowly(sent, ...)`; it goes on dripping `drip` until the test ends."""
    dripping, writers = [], []

    async def drip_on(writer, drip):
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(drip)
                await writer.drain()
                await asyncio.sleep(0.1)  # how slow the sender is: nothing waits for it

    async def slowly(sent, drip=b"", host="127.0.0.1", **given):
        reader, writer = await asyncio.open_connection(*web.address, local_addr=(host, 0), **given)
        writer.write(sent)
        await writer.drain()
        writers.append(writer)
        if drip:
            dripping.append(asyncio.create_task(drip_on(writer, drip)))
        return reader, writer

    yield slowly
    for task in dripping:
        task.cancel()
    await asyncio.gather(*dripping, return_exceptions=True)
    await closed(writers)


def head(channel, length=1000, expect="Expect: 100-continue\r\n"):
    """A delivery's head. The answer to `Expect` says that the receiver is reading the body."""
    return f"POST /webhooks/shopify/{channel} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n{expect}\r\n".encode()


async def is_read(reader):
    assert b" 100 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)


async def until_closed(reader):
    """Everything that still came, once the connection is closed."""
    with contextlib.suppress(ConnectionError):
        return await asyncio.wait_for(reader.read(), 30)
    return b""


async def test_forty_dripping_bodies_keep_nobody_out(web, database, channel, slowly):
    connection = channel("shopify", database.organization())
    slow = [await slowly(head(connection), b"a") for _ in range(40)]
    await asyncio.gather(*(is_read(reader) for reader, _ in slow))
    async with asyncio.timeout(1):
        assert await web.post(f"/webhooks/shopify/{connection}", ORDER, delivery("a")) == (200, "stored")
    assert not any(reader.at_eof() for reader, _ in slow)
    async with asyncio.timeout(ingest.READ_TIMEOUT_S + 5):
        answers = await asyncio.gather(*(reader.readline() for reader, _ in slow))
    assert all(b" 408 " in answer for answer in answers)


async def test_unknown_channel_is_told_before_its_body_is_read(web, monkeypatch, slowly, signals):
    monkeypatch.setattr(server, "HEAD_WITHIN_S", 1.0)
    slow = [await slowly(head(NOBODY, expect=""), b"a") for _ in range(40)]
    answers = await asyncio.gather(*(reader.readline() for reader, _ in slow))
    assert all(b" 404 " in answer for answer in answers)
    await asyncio.gather(*(until_closed(reader) for reader, _ in slow))
    await signals.of("ingest.refused", count=40, outcome="unknown_channel")


async def test_peer_that_holds_its_share_keeps_no_other_out(web, database, channel, monkeypatch, slowly, signals):
    monkeypatch.setattr(ingest, "MAX_PEER_BYTES", 4 * ingest.MIN_HELD_BYTES)
    connection = channel("shopify", database.organization())
    path = f"/webhooks/shopify/{connection}"
    slow = [await slowly(head(connection), host="127.0.0.2") for _ in range(4)]
    await asyncio.gather(*(is_read(reader) for reader, _ in slow))
    reader, _ = await slowly(head(connection), host="127.0.0.2")
    assert b" 503 " in await reader.readline()
    assert (await web.post(path, ORDER, delivery("a")))[0] == 200
    # one large body is bytes as they come, not requests
    large = b"x" * (5 * ingest.MIN_HELD_BYTES)
    assert await web.post(path, large, shopify(large)) == (503, "busy")
    await closed([writer for _, writer in slow])
    await signals.of("ingest.refused", count=4, reason="body_truncated")
    reader, _ = await slowly(head(connection), host="127.0.0.2")
    await is_read(reader)


@pytest.mark.parametrize(
    ("sent", "drip"),
    [
        (b"", b""),
        (HALF_A_HEAD, b""),
        (HALF_A_HEAD, b"a"),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n", HALF_A_HEAD),
        (b"POST /webhooks/nobody/x HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n", b"a"),
    ],
    ids=["nothing", "half", "dripping", "second", "answered"],
)
async def test_connection_that_owes_a_request_is_closed(web, monkeypatch, slowly, sent, drip):
    monkeypatch.setattr(server, "HEAD_WITHIN_S", 0.5)
    idle, writer = await slowly(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b" 200 " in await idle.readline()
    reader, _ = await slowly(sent, drip)
    await until_closed(reader)
    # one that owes nothing is not
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert b" 200 " in await until_closed(idle)


async def test_sender_that_takes_no_answer_is_cut_off(web, database, channel, monkeypatch, slowly):
    monkeypatch.setattr(server, "HEAD_WITHIN_S", 0.5)
    secrets = {"signature": SECRET, "verify_token": b"token"}
    connection = channel("whatsapp", database.organization(), external_id="1", secrets=secrets)
    asked = f"/webhooks/whatsapp/{connection}?hub.mode=subscribe&hub.verify_token=token&hub.challenge={'x' * 12_000}"
    reader, writer = await slowly(b"", limit=1024)
    writer.write(f"GET {asked} HTTP/1.1\r\nHost: x\r\n\r\n".encode() * 1000)
    assert b" 200 " in await reader.readline()
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(writer.drain(), 30)


async def test_what_follows_a_body_is_bounded(web, database, channel, monkeypatch, slowly):
    monkeypatch.setattr(server, "HEAD_WITHIN_S", 60)
    monkeypatch.setattr(ingest, "READ_TIMEOUT_S", 60)
    chunked = "POST /webhooks/shopify/%s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n"
    for connection in (NOBODY, channel("shopify", database.organization())):
        for after in (b"X: y\r\n", b"y"):
            reader, writer = await slowly((chunked % connection).encode())
            writer.write(b"X: " + after * (8 * server.MAX_HEAD_BYTES // len(after)))
            await until_closed(reader)


@pytest.fixture
def many_files():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], min(4096, before[1])), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_thousand_half_heads_keep_nobody_out_and_are_closed(many_files, processes, key, database, channel):
    connection = channel("shopify", database.organization())
    process = processes.start("web", "run", "--port", "0", env={"AFLUENTE_SECRETS_KEY": key})
    url = (await asyncio.to_thread(process.wait_for, "web.ready"))["url"]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(20)) as session:
        web = Web(url, session)
        path = f"/webhooks/shopify/{connection}"
        slow = []
        for _ in range(server.MAX_CONNECTIONS + 5):
            reader, writer = await asyncio.open_connection(*web.address)
            writer.write(HALF_A_HEAD)
            slow.append((reader, writer))
        # a new one gets the place of the oldest that still owes its head
        assert await web.post(path, ORDER, delivery("a")) == (200, "stored")
        await asyncio.gather(*(until_closed(reader) for reader, _ in slow))
        await closed([writer for _, writer in slow])
        assert await web.post(path, ORDER, delivery("b")) == (200, "stored")
