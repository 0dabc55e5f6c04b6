"""Hotmart, Typeform and generic senders over HTTP: what each is told, and what is kept of it."""

import json
from datetime import UTC, datetime, timedelta

from afluente import postgres as connections
from producers.ingest import channels, mapping
from tests.producers.ingest.conftest import SECRET, body_of, generic, hotmart, typeform

HOTMART = body_of({"id": "e-1", "event": "PURCHASE_APPROVED", "hottok": SECRET.decode(), "data": {}})
FORM = body_of({"event_id": "1", "event_type": "form_response", "form_response": {"form_id": "F1", "token": "t1"}})
ORDER = json.dumps(mapping.samples("yampi")["order_paid"], ensure_ascii=False).encode()
CHECKPOINT = body_of(mapping.samples("courier")["delivered"])
TOKEN = mapping.example("courier") | {"verify": {"by": "token"}, "topic": {"header": "X-Topic"}}

# Sender, its settings, a body, how it proves itself; topic and dedupe key as stored.
SENDERS = {
    "hotmart header": ("hotmart", {}, HOTMART, hotmart, "PURCHASE_APPROVED", "event:e-1"),
    "hotmart body": ("hotmart", {}, HOTMART, lambda body, secret: {}, "PURCHASE_APPROVED", "event:e-1"),
    "typeform": ("typeform", {}, FORM, typeform, "form_response", "form_response:F1:t1"),
    "yampi": (
        "generic", {"mapping": mapping.example("yampi")}, ORDER, generic, "order.paid",
        "order.paid:9007199254740995:paid:2026-11-10 09:18:05.000000",
    ),
    "courier": (
        "generic", {"mapping": mapping.example("courier")}, CHECKPOINT, generic, "delivered", "delivered:trk-5",
    ),
    "bearer": (
        "generic", {"mapping": TOKEN}, CHECKPOINT,
        lambda body, secret: {"Authorization": f"Bearer {secret.decode()}", "X-Topic": "delivered"}, "delivered",
        "delivered:trk-5",
    ),
}  # fmt: skip


async def test_each_sender_is_taken_once_and_its_secret_is_not_kept(web, database, channel, rows, emitted, keyring):
    for number, (name, sender) in enumerate(SENDERS.items(), start=1):
        source, settings, body, sign, topic, key = sender
        connection = channel(source, database.organization(name), settings=settings)
        address = f"/webhooks/{source}/{connection}"
        assert await web.post(address, body, sign(body, SECRET)) == (200, "stored")
        assert await web.post(address, body, sign(body, SECRET)) == (200, "duplicate")
        (child,) = (row for row in rows(children=True) if row["channel_id"] == connection)
        assert (child["topic"], child["dedupe_key"], child["source"]) == (topic, key, source)
        assert len(emitted()) == number
        # a stranger is refused, and so is a body that was changed on the way
        if name != "hotmart body":
            assert (await web.post(address, body, sign(body, b"guessed")))[0] == 401
            assert (await web.post(address, body, {}))[0] == (200 if name == "hotmart header" else 401)
        if source != "hotmart" and name != "bearer":
            assert (await web.post(address, body + b" ", sign(body, SECRET)))[0] == 401
        # both secrets hold while one rotates
        with connections.connect(database.url) as conn:
            until = datetime.now(UTC) + timedelta(hours=1)
            channels.rotate(conn, keyring, connection, "signature", b"the next one", until)
        if name != "hotmart body":
            assert await web.post(address, body, sign(body, SECRET)) == (200, "duplicate")
            assert (await web.post(address, body, sign(body, b"the next one")))[0] == 200
    assert SECRET not in b"".join(bytes(row["raw_body"] or b"") for row in rows())
    assert SECRET.decode() not in str([row["headers"] for row in rows()])
    assert all(row["raw_body"] is None for row in rows() if row["verification"] == "failed")


async def test_signed_but_unreadable_is_stored_and_answered_with_success(web, database, channel, rows):
    settings = {"mapping": mapping.example("yampi")}
    for source, sign, own in (("hotmart", hotmart, {}), ("typeform", typeform, {}), ("generic", generic, settings)):
        address = f"/webhooks/{source}/{channel(source, database.organization(source), settings=own)}"
        for body in (b"not JSON", b"[]", b'{"event": {}}', b'{"a":' * 5000):
            assert await web.post(address, body, sign(body, SECRET)) == (200, "stored")
    assert {row["topic"] for row in rows(children=True)} == {"unknown"}


async def test_headers_that_a_mapping_reads_are_kept_and_a_changed_mapping_holds_at_once(web, database, channel, rows):
    connection = channel("generic", database.organization(), settings={"mapping": TOKEN})
    address = f"/webhooks/generic/{connection}"
    bearer = {"Authorization": f"Bearer {SECRET.decode()}", "X-Topic": "delivered", "X-Other": "x"}
    assert (await web.post(address, CHECKPOINT, bearer))[0] == 200
    (child,) = rows(children=True)
    kept = set(child["headers"])
    assert "x-topic" in kept
    assert not kept & {"authorization", "x-other"}
    with connections.connect(database.url) as conn:
        channels.set_mapping(conn, connection, mapping.example("courier"))
    assert (await web.post(address, CHECKPOINT, bearer))[0] == 401
    assert (await web.post(address, CHECKPOINT, generic(CHECKPOINT)))[0] == 200


async def test_generic_sender_may_ask_whether_the_address_is_ours(web, database, channel):
    secrets = {"signature": SECRET, "verify_token": b"our token"}
    settings = {"mapping": mapping.example("courier")}
    address = f"/webhooks/generic/{channel('generic', database.organization(), secrets=secrets, settings=settings)}"
    asked = {"hub.mode": "subscribe", "hub.challenge": "abc 123"}
    assert await web.get(address, **asked, **{"hub.verify_token": "our token"}) == (200, "abc 123")
    assert (await web.get(address, **asked, **{"hub.verify_token": "another"}))[0] == 403
    other = channel("hotmart", database.organization())
    assert (await web.get(f"/webhooks/hotmart/{other}", **asked))[0] == 404
