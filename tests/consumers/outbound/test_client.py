"""The client against real sockets: what it connects to, how long it takes, what it does not follow."""

import asyncio
import contextlib
import gzip
import ipaddress
import socket
import ssl
import subprocess
import time
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from afluente.local.services.receiver import Receiver
from consumers.outbound.addresses import TargetRefused
from consumers.outbound.client import MAX_READ, CallFailed, HostBusy, OutboundClient, retry_after_s

LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"),)
PUBLIC = (socket.AF_INET, "1.1.1.1")
LOCAL = (socket.AF_INET, "127.0.0.1")


@pytest.fixture
async def receiver():
    async with Receiver() as receiver:
        yield receiver


@pytest.fixture
async def serve():
    """Starts servers of a few lines, ``connected(reader, writer)``; ends them with every connection they still hold."""
    servers: list[asyncio.Server] = []
    handlers: list[asyncio.Task] = []

    async def start(connected):
        async def handle(reader, writer):
            task = asyncio.current_task()
            assert task is not None
            handlers.append(task)
            try:
                with contextlib.suppress(ConnectionError):
                    await connected(reader, writer)
            finally:
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        servers.append(server)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"

    yield start
    for server in servers:
        server.close()
    for handler in handlers:
        handler.cancel()
    await asyncio.gather(*handlers, return_exceptions=True)


@pytest.fixture
async def answers(serve):
    """Starts a server that answers these bytes to anything."""

    async def start(answer):
        async def connected(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()

        return await serve(connected)

    return start


@pytest.fixture
async def listener(serve):
    """A bare listener that counts who connects: for targets that must never be reached."""
    reached = []

    async def connected(reader, writer):
        reached.append(writer.get_extra_info("peername"))

    url = await serve(connected)
    return SimpleNamespace(url=url, port=int(url.rstrip("/").rpartition(":")[2]), reached=reached)


class LooksUp:
    """A resolver that gives these answers, one list a call and the last one for ever, and counts the calls."""

    def __init__(self, *answers):
        self.rounds = list(answers)
        self.calls = 0

    async def __call__(self, host, port):
        self.calls += 1
        return self.rounds.pop(0) if len(self.rounds) > 1 else self.rounds[0]


async def test_posts_the_bytes_it_was_given(receiver):
    async with OutboundClient(https_only=False, allowed=LOOPBACK) as client:
        answer = await client.post(receiver.url("a"), b'{"a":  1}', {"X-Webhook-Delivery": "d"})
    (call,) = receiver.endpoint("a").received
    assert (answer.status, answer.is_success, answer.snippet) == (200, True, "ok")
    assert call.body == b'{"a":  1}'
    assert call.headers["content-type"] == "application/json"
    assert call.headers["host"] == f"127.0.0.1:{receiver.port}"


async def test_the_switch_for_local_networks_is_off_by_default(listener):
    async with OutboundClient(https_only=False) as client:
        with pytest.raises(TargetRefused):
            await client.post(listener.url, b"", {})
    assert listener.reached == []


async def test_host_header_is_the_name_and_the_socket_goes_to_the_checked_address(receiver):
    lookup = LooksUp([LOCAL])
    async with OutboundClient(https_only=False, allowed=LOOPBACK, lookup=lookup) as client:
        await client.post(f"http://hooks.example.com:{receiver.port}/hooks/a", b"{}", {})
    (call,) = receiver.endpoint("a").received
    assert call.headers["host"] == f"hooks.example.com:{receiver.port}"
    assert lookup.calls == 1


@pytest.mark.parametrize("found", [[LOCAL], [PUBLIC, LOCAL], [LOCAL, PUBLIC], [PUBLIC, (socket.AF_INET6, "::1")]])
async def test_a_name_with_one_bad_answer_is_refused_before_anything_connects(listener, found):
    port = listener.port
    async with OutboundClient(https_only=False, lookup=LooksUp(found)) as client:
        with pytest.raises(TargetRefused) as caught:
            await client.post(f"http://hooks.example.com:{port}/", b"", {})
    assert listener.reached == []
    assert "127.0.0.1" not in str(caught.value)


async def test_rebinding_the_name_is_looked_up_again_for_each_call_and_judged_again(receiver, listener):
    lookup = LooksUp([LOCAL], [(socket.AF_INET, "10.0.0.1")])
    async with OutboundClient(https_only=False, allowed=LOOPBACK, lookup=lookup) as client:
        assert (await client.post(f"http://hooks.example.com:{receiver.port}/hooks/a", b"{}", {})).is_success
        with pytest.raises(TargetRefused):
            await client.post(f"http://hooks.example.com:{receiver.port}/hooks/a", b"{}", {})
    assert lookup.calls == 2


def test_a_socket_to_a_bad_address_is_not_even_made():
    client = OutboundClient(https_only=False)
    with pytest.raises(PermissionError):
        client._checked_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 80)))
    client._checked_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("1.1.1.1", 80))).close()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_answers_not_directions(receiver, listener, status):
    port = listener.port
    receiver.order("a", {"do": "answer", "status": status, "location": f"http://127.0.0.1:{port}/"})
    async with OutboundClient(https_only=False, allowed=LOOPBACK) as client:
        answer = await client.post(receiver.url("a"), b"{}", {})
    assert (answer.status, answer.is_success) == (status, False)
    assert listener.reached == []


async def test_proxies_of_the_environment_are_not_used(receiver, listener, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, listener.url)
    async with OutboundClient(https_only=False, allowed=LOOPBACK) as client:
        assert (await client.post(receiver.url("a"), b"{}", {})).is_success
    assert listener.reached == []


async def test_no_answer_fails_at_the_deadline(receiver):
    receiver.order("a", {"do": "hang"})
    async with OutboundClient(https_only=False, allowed=LOOPBACK, deadline_s=0.3) as client:
        began = time.monotonic()
        with pytest.raises(CallFailed, match=r"within 0\.3 s") as caught:
            await client.post(receiver.url("a"), b"{}", {})
    assert caught.value.kind == "timeout"
    assert 0.3 <= time.monotonic() - began < 2


async def test_a_lookup_that_hangs_counts_against_the_deadline():
    async def lookup(host, port):
        await asyncio.Event().wait()

    async with OutboundClient(https_only=False, deadline_s=0.2, lookup=lookup) as client:
        with pytest.raises(CallFailed) as caught:
            await client.post("http://hooks.example.com/", b"{}", {})
    assert caught.value.kind == "timeout"


async def test_a_dripping_body_does_not_outlive_the_deadline_and_its_status_counts(receiver):
    receiver.order("a", {"do": "drip", "seconds": 0.05})
    async with OutboundClient(https_only=False, allowed=LOOPBACK, deadline_s=0.4) as client:
        began = time.monotonic()
        answer = await client.post(receiver.url("a"), b"{}", {})
    assert time.monotonic() - began < 2
    assert answer.is_success
    assert set(answer.snippet) == {"."}


async def test_headers_that_drip_do_not_outlive_the_deadline(serve):
    async def connected(reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\n")
        while not writer.is_closing():
            writer.write(b"X-A: b\r\n")
            await writer.drain()
            await asyncio.sleep(0.05)

    url = await serve(connected)
    async with OutboundClient(https_only=False, allowed=LOOPBACK, deadline_s=0.3) as client:
        with pytest.raises(CallFailed):
            await client.post(url, b"{}", {})


async def test_a_connection_cut_before_the_answer_is_a_failure(receiver):
    receiver.order("a", {"do": "cut"})
    async with OutboundClient(https_only=False, allowed=LOOPBACK) as client:
        with pytest.raises(CallFailed) as caught:
            await client.post(receiver.url("a"), b"{}", {})
    assert caught.value.kind == "cut"


async def test_a_connection_cut_in_the_body_leaves_the_status(receiver):
    receiver.order("a", {"do": "die"})
    async with OutboundClient(https_only=False, allowed=LOOPBACK) as client:
        answer = await client.post(receiver.url("a"), b"{}", {})
    assert (answer.status, answer.snippet) == (200, "ok")


async def test_nobody_listening_is_a_failure_without_addresses_in_its_text(unused_port):
    async with OutboundClient(https_only=False, allowed=LOOPBACK) as client:
        with pytest.raises(CallFailed) as caught:
            await client.post(f"http://127.0.0.1:{unused_port}/", b"{}", {})
    assert caught.value.kind == "connect"
    assert "127.0.0.1" not in str(caught.value)


async def test_a_name_that_cannot_be_resolved_is_a_failure_that_may_pass():
    async def lookup(host, port):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    async with OutboundClient(https_only=False, lookup=lookup) as client:
        with pytest.raises(CallFailed) as caught:
            await client.post("http://hooks.example.com/", b"{}", {})
    assert caught.value.kind == "dns"


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH_9.6\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000])
async def test_an_answer_that_is_no_http_fails_and_its_bytes_are_not_repeated(answers, answer):
    url = await answers(answer)
    async with OutboundClient(https_only=False, allowed=LOOPBACK) as client:
        with pytest.raises(CallFailed) as caught:
            await client.post(url, b"{}", {})
    assert caught.value.kind == "unreadable"
    assert "SSH" not in str(caught.value)


async def test_only_the_start_of_a_long_body_is_read(answers):
    url = await answers(b"HTTP/1.1 500 No\r\nContent-Length: 100000000\r\n\r\n" + b"x" * 1_000_000)
    async with OutboundClient(https_only=False, allowed=LOOPBACK) as client:
        answer = await client.post(url, b"{}", {})
    assert answer.status == 500
    assert answer.snippet == "x" * 1000


async def test_a_decompression_bomb_stays_small(answers):
    bomb = gzip.compress(b"y" * 50_000_000)
    assert len(bomb) > MAX_READ
    url = await answers(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(bomb) + bomb)
    async with OutboundClient(https_only=False, allowed=LOOPBACK) as client:
        answer = await client.post(url, b"{}", {})
    assert answer.snippet == "y" * 1000


async def test_a_snippet_can_be_stored_as_text(answers):
    url = await answers(b"HTTP/1.1 400 No\r\n\r\na\x00b\nc\xff")
    async with OutboundClient(https_only=False, allowed=LOOPBACK) as client:
        answer = await client.post(url, b"{}", {})
    assert answer.snippet == "a b c\ufffd"


async def test_a_hanging_host_holds_up_nobody_else(receiver):
    receiver.order("slow", then={"do": "hang"})
    async with OutboundClient(https_only=False, allowed=LOOPBACK, deadline_s=5, per_host=2) as client:
        hanging = [asyncio.create_task(client.post(receiver.url("slow"), b"{}", {})) for _ in range(4)]
        await receiver.wait_for_calls("slow", 2)
        with pytest.raises(HostBusy):
            await client.post(receiver.url("slow"), b"{}", {})
        async with Receiver(host="127.0.0.2") as elsewhere:
            assert (await client.post(elsewhere.url("quick"), b"{}", {})).is_success
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)
        assert client._turns == {}
    assert receiver.endpoint("slow").calls == 2


async def test_tls_is_verified_against_the_name(tmp_path):
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-days", "1", "-keyout", key, "-out", certificate, "-subj", "/CN=hooks.example.com"),
            *("-addext", "subjectAltName=DNS:hooks.example.com"),
        ],
        check=True,
        capture_output=True,
    )
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(certificate, key)
    asked = []
    serving.sni_callback = lambda _socket, name, _context: asked.append(name)
    trusting = ssl.create_default_context(cafile=certificate)
    async with Receiver(ssl_context=serving) as receiver:
        url = f"https://hooks.example.com:{receiver.port}/hooks/a"
        async with OutboundClient(
            https_only=True, allowed=LOOPBACK, lookup=LooksUp([LOCAL]), ssl_context=trusting
        ) as client:
            assert (await client.post(url, b"{}", {})).is_success
            with pytest.raises(CallFailed) as caught:
                await client.post(url.replace("hooks.", "other."), b"{}", {})
            assert caught.value.kind == "tls"
            with pytest.raises(TargetRefused):
                await client.post(url.replace("https", "http"), b"{}", {})
        async with OutboundClient(https_only=True, allowed=LOOPBACK, lookup=LooksUp([LOCAL])) as client:
            with pytest.raises(CallFailed) as caught:
                await client.post(url, b"{}", {})
            assert caught.value.kind == "tls"
    assert asked[0] == "hooks.example.com"


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("120", 120.0),
        (" 0 ", 0.0),
        ("Thu, 01 Jan 2026 00:02:00 GMT", 120.0),
        ("Wed, 31 Dec 2025 00:00:00 GMT", 0.0),
        ("", None),
        ("-5", None),
        ("soon", None),
        ("1.5", None),
        ("99999999999999", None),
        ("١٢", None),
    ],
)
def test_retry_after(value, seconds):
    assert retry_after_s(value, datetime(2026, 1, 1, tzinfo=UTC)) == seconds


@pytest.fixture
def unused_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]
