"""WAHA and Evolution over HTTP: what proves the sender, what is kept of a body, and what a gateway is told."""

import asyncio
import json

import pytest

from afluente import postgres as connections
from afluente.web.app import build
from producers.ingest import channels
from tests.producers.ingest.conftest import SECRET, body_of, evolution, jwt, running, waha

KEY = "5A1D-F00D-GATEWAY-KEY"
MESSAGE = {
    "event": "messages.upsert",
    "instance": "loja",
    "data": {
        "key": {"remoteJid": "5511900010001@s.whatsapp.net", "fromMe": False, "id": "AB12"},
        "message": {"conversation": "Olá, tudo bem? \N{WAVING HAND SIGN}"},
        "messageTimestamp": 1_746_132_673,
    },
    "apikey": KEY,
}
EVENT = {
    "id": "evt_1",
    "timestamp": 1_741_249_702_485,
    "event": "message",
    "session": "loja",
    "payload": {"body": "oi"},
}


@pytest.fixture
def gateway(database, channel):
    return channel("evolution", database.organization(), external_id="loja")


async def test_body_is_kept_byte_for_byte_but_for_the_gateways_key(web, gateway, rows, caplog, capfd, database):
    body = json.dumps(MESSAGE, indent=2).encode()
    assert await web.post(f"/webhooks/evolution/{gateway}", body, evolution(body)) == (200, "stored")
    parent, child = rows()
    assert bytes(parent["raw_body"]) == body.replace(KEY.encode(), b"removed")
    assert (child["topic"], child["source"]) == ("messages.upsert", "evolution")
    kept = database.execute("SELECT count(*) FROM webhook_events w WHERE w::text LIKE %s", [f"%{KEY}%"])
    assert kept == [(0,)]
    said = "".join(capfd.readouterr()) + caplog.text
    for secret in (KEY, SECRET.decode()):
        assert secret not in said
        assert secret not in repr(parent)


@pytest.mark.parametrize(
    ("headers", "answer"),
    [
        ({"X-Webhook-Secret": SECRET.decode()}, (200, "stored")),
        ({"Authorization": f"Bearer {SECRET.decode()}"}, (200, "stored")),
        ({"Authorization": "Bearer " + jwt()}, (200, "stored")),
        # the last tries of a delivery carry the token of the first
        ({"Authorization": "Bearer " + jwt(exp=1)}, (401, "token_too_old")),
        ({"Authorization": "Bearer " + jwt(b"another")}, (401, "token_mismatch")),
        ({"Authorization": "Bearer " + jwt(algorithm="none")}, (401, "algorithm_unknown")),
        ({"Authorization": "Basic eA=="}, (401, "token_missing")),
        ({"X-Webhook-Secret": "another"}, (401, "token_mismatch")),
        # a wrong secret is not made good by a token beside it
        ({"X-Webhook-Secret": "another", "Authorization": "Bearer " + jwt()}, (401, "token_mismatch")),
        # its own key proves nothing
        ({"apikey": KEY}, (401, "token_missing")),
        ({}, (401, "token_missing")),
    ],
)
async def test_what_proves_evolution(web, gateway, headers, answer):
    assert await web.post(f"/webhooks/evolution/{gateway}", body_of(MESSAGE), headers) == answer


async def test_both_secrets_pass_while_one_rotates(web, database, gateway, keyring):
    from datetime import UTC, datetime, timedelta

    with connections.connect(database.url) as conn:
        channels.rotate(conn, keyring, gateway, "signature", b"new one", datetime.now(UTC) + timedelta(hours=1))
    for number, secret in enumerate((SECRET, b"new one")):
        body = body_of(MESSAGE | {"number": number})
        assert await web.post(f"/webhooks/evolution/{gateway}", body, evolution(body, secret)) == (200, "stored")
        assert (await web.post(f"/webhooks/evolution/{gateway}", body, {"Authorization": f"Bearer {jwt(secret)}"}))[
            0
        ] == 200


@pytest.mark.parametrize(
    ("path", "event"), [("", "MESSAGES_UPSERT"), ("/messages-upsert", None), ("", "messages.upsert")]
)
async def test_name_of_the_event_stands_in_the_body_or_in_the_path(web, gateway, rows, path, event):
    body = body_of({name: value for name, value in (MESSAGE | {"event": event}).items() if value is not None})
    assert await web.post(f"/webhooks/evolution/{gateway}{path}", body, evolution(body)) == (200, "stored")
    assert rows(children=True)[0]["topic"] == "messages.upsert"


async def test_same_delivery_again_is_a_repeat_and_another_instance_is_not_ours(web, gateway, rows):
    body = body_of(MESSAGE)
    path = f"/webhooks/evolution/{gateway}"
    assert [(await web.post(path, body, evolution(body)))[1] for _ in range(2)] == ["stored", "duplicate"]
    other = body_of(MESSAGE | {"instance": "outra"})
    assert await web.post(path, other, evolution(other)) == (200, "unrouted")
    assert len(rows(children=True)) == 1


async def test_a_gateway_that_gives_up_on_404_is_not_told_so_while_postgres_is_away(database, door, keyring, gateway):
    """401 and 404 end Evolution's tries for good: 503 is what it is told as long as nobody can say."""
    body = body_of(MESSAGE)
    async with running(build(door.url, keyring)) as web:
        await door.shut()
        nobodys = "0b0b0b0b-0000-4000-8000-000000000000"
        posts = [web.post(f"/webhooks/evolution/{to}", body, {"X-Webhook-Secret": "x"}) for to in (gateway, nobodys)]
        assert [status for status, _ in await asyncio.gather(*posts)] == [503, 503]
        await door.open()
        async with asyncio.timeout(15):  # it tries again, as the gateway does
            while (await web.post(f"/webhooks/evolution/{gateway}", body, evolution(body)))[0] == 503:
                pass
        assert (await web.post(f"/webhooks/evolution/{gateway}", body, evolution(body)))[0] == 200


async def test_media_in_the_body_leaves_its_digest(web, gateway, rows):
    media = "QUJD" * 1_250_000
    body = body_of(MESSAGE | {"data": {"message": {"imageMessage": {"caption": "c"}, "base64": media}}})
    assert await web.post(f"/webhooks/evolution/{gateway}", body, evolution(body)) == (200, "stored")
    kept = bytes(rows(children=False)[0]["raw_body"])
    assert len(kept) < 1000
    assert b'"base64": "removed:5000000:sha256:' in kept


async def test_waha_is_signed_with_sha512_and_named_by_its_event(web, database, channel, rows):
    connection = channel("waha", database.organization(), external_id="loja")
    path, body = f"/webhooks/waha/{connection}", body_of(EVENT)
    assert await web.post(path, body, waha(body)) == (200, "stored")
    assert await web.post(path, body, waha(body, **{"X-Webhook-Request-Id": "again"})) == (200, "duplicate")
    (child,) = rows(children=True)
    assert (child["topic"], child["dedupe_key"]) == ("message", "message:evt_1")
    assert (await web.post(path, body, waha(body, b"another")))[0] == 401
    assert await web.post(path, body, waha(body) | {"X-Webhook-Hmac-Algorithm": "md5"}) == (401, "algorithm_unknown")
    assert await web.post(path, body, waha(body, **{"X-Webhook-Timestamp": "1"})) == (401, "timestamp_too_old")
    other = body_of(EVENT | {"session": "outra"})
    assert await web.post(path, other, waha(other)) == (200, "unrouted")
