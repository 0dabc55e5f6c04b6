"""The receiver over HTTP, on a real Postgres: what is stored, what is emitted, and what the sender is told."""

import asyncio
import contextlib
import json
from datetime import UTC, datetime, timedelta

import aiohttp
import pytest

from afluente import postgres as connections
from afluente.web.app import build
from producers.ingest import app as ingest
from producers.ingest import channels, sources, store
from producers.ingest.sources import registered
from tests.producers.ingest.conftest import SECRET, body_of, nuvemshop, running, shopify, stripe, whatsapp

ORDER = body_of({"id": 1001, "name": "Conceição"})


def order_headers(body=ORDER, topic="orders/create", event="evt-1", secret=SECRET):
    return shopify(body, secret, **{"X-Shopify-Topic": topic, "X-Shopify-Event-Id": event})


async def test_delivery_is_stored_with_its_event_before_the_answer(web, database, channel, rows, emitted):
    organization = database.organization()
    connection = channel("shopify", organization)
    status, text = await web.post(f"/webhooks/shopify/{connection}", ORDER, order_headers())
    assert (status, text) == (200, "stored")
    parent, child = rows()
    assert parent["parent_id"] is None
    assert parent["status"] == "routed"
    assert bytes(parent["raw_body"]) == ORDER
    assert parent["organization_id"] == organization
    assert parent["verification"] == "verified"
    assert child["parent_id"] == parent["id"]
    assert child["status"] == "received"
    assert child["topic"] == "orders/create"
    # the bytes are kept once
    assert child["raw_body"] is None
    assert child["dedupe_key"] == "orders/create:evt-1"
    assert emitted() == [
        (
            organization,
            "webhook.received",
            {"webhook_event_id": str(child["id"]), "source": "shopify", "topic": "orders/create"},
        )
    ]


async def test_same_delivery_twice_is_one_child_and_one_event(web, database, channel, rows, emitted):
    connection = channel("shopify", database.organization())
    answers = [await web.post(f"/webhooks/shopify/{connection}", ORDER, order_headers()) for _ in range(3)]
    assert answers == [(200, "stored"), (200, "duplicate"), (200, "duplicate")]
    assert len(rows(children=True)) == len(emitted()) == 1
    repeats = [row for row in rows() if row["status"] == "duplicate"]
    assert [row["raw_body"] for row in repeats] == [None, None]
    assert {bytes(row["body_sha256"]) for row in repeats} == {bytes(rows()[0]["body_sha256"])}


async def test_same_delivery_at_once_is_one_child_and_one_event(web, database, channel, rows, emitted):
    connection = channel("shopify", database.organization())
    answers = await asyncio.gather(
        *(web.post(f"/webhooks/shopify/{connection}", ORDER, order_headers()) for _ in range(12))
    )
    assert sorted(answers) == [(200, "duplicate")] * 11 + [(200, "stored")]
    assert len(rows(children=True)) == len(emitted()) == 1


async def test_same_body_under_another_topic_is_another_delivery(web, database, channel, emitted):
    connection = channel("shopify", database.organization())
    for topic in ("orders/create", "orders/paid"):
        assert await web.post(f"/webhooks/shopify/{connection}", ORDER, order_headers(topic=topic)) == (200, "stored")
    assert [payload["topic"] for _, _, payload in emitted()] == ["orders/create", "orders/paid"]


async def test_two_organizations_with_the_same_order_are_two_deliveries(web, database, channel, emitted):
    organizations = [database.organization("A"), database.organization("B")]
    for organization in organizations:
        connection = channel("shopify", organization)
        assert await web.post(f"/webhooks/shopify/{connection}", ORDER, order_headers()) == (200, "stored")
    assert [row[0] for row in emitted()] == organizations


async def test_bad_signature_leaves_reason_and_hash_but_no_body_and_no_event(web, database, channel, rows, emitted):
    organization = database.organization()
    connection = channel("shopify", organization)
    status, text = await web.post(f"/webhooks/shopify/{connection}", ORDER, order_headers(secret=b"not ours"))
    assert (status, text) == (401, "signature_mismatch")
    (row,) = rows()
    assert row["status"] == "refused"
    assert row["verification"] == "failed"
    assert row["reason"] == "signature_mismatch"
    assert row["raw_body"] is None
    assert row["headers"] == {}
    assert row["body_bytes"] == len(ORDER)
    assert len(row["body_sha256"]) == 32
    assert row["organization_id"] == organization
    assert emitted() == []


async def test_missing_signature_is_refused(web, database, channel):
    connection = channel("shopify", database.organization())
    assert await web.post(f"/webhooks/shopify/{connection}", ORDER, {}) == (401, "signature_missing")


async def test_secret_of_another_organization_does_not_sign(web, database, channel):
    ours = channel("shopify", database.organization("A"))
    channel("shopify", database.organization("B"), secret=b"theirs")
    assert (await web.post(f"/webhooks/shopify/{ours}", ORDER, order_headers(secret=b"theirs")))[0] == 401


@pytest.mark.parametrize(
    "path", ["/webhooks/shopify/not-an-id", f"/webhooks/shopify/{'0' * 8}-0000-4000-8000-{'0' * 12}"]
)
async def test_unknown_channel_is_told_so(web, path, rows):
    assert await web.post(path, ORDER, order_headers()) == (404, "unknown_channel")
    assert [row["reason"] for row in rows()] == ["unknown_channel"]


@pytest.mark.parametrize("written", ["{{{}}}", "urn:uuid:{}", "{}%00", "{}\u0660"])
async def test_channel_has_one_address(web, database, channel, written):
    connection = channel("shopify", database.organization())
    path = f"/webhooks/shopify/{written.format(connection)}"
    assert await web.post(path, ORDER, order_headers()) == (404, "unknown_channel")
    for other in (connection.hex, str(connection).upper()):
        assert await web.post(f"/webhooks/shopify/{other}", ORDER, order_headers()) == (404, "unknown_channel")


@pytest.mark.parametrize("topic", ["a%00b", "%01%7F", "%FF%FE", "a%E2%80%A8b", "%F0%9F%98%80", "t" * 3000])
async def test_topic_in_the_url_may_be_anything(web, database, channel, rows, topic):
    connection = channel("shopify", database.organization())
    assert await web.post(f"/webhooks/shopify/{connection}/{topic}", ORDER, order_headers()) == (200, "stored")
    kept = rows(children=True)[0]["headers"][":topic"]
    assert kept.isprintable()
    assert len(kept) <= store.MAX_HEADER


@pytest.mark.parametrize(
    "name",
    ["X-Shopify-Topic", "X-Shopify-Event-Id", "X-Shopify-Shop-Domain", "X-Request-Id", "User-Agent", "Traceparent"],
)
async def test_header_may_be_anything(web, database, channel, rows, name):
    connection = channel("shopify", database.organization())
    signature = order_headers()["X-Shopify-Hmac-Sha256"].encode()
    # control characters are no header's, to any parser; the rest is kept as people may see it
    for value, status in ((b"a\t\xe9\xff\x80b", b"200"), (b"a\0b", b"400"), (b"a\x01b", b"400"), (b"a\x7fb", b"400")):
        reader, writer = await asyncio.open_connection(*web.address)
        lines = [
            f"POST /webhooks/shopify/{connection} HTTP/1.1".encode(),
            b"Host: x",
            b"Content-Length: %d" % len(ORDER),
            b"X-Shopify-Hmac-Sha256: " + signature,
            name.encode() + b": " + value,
        ]
        writer.write(b"\r\n".join(lines) + b"\r\n\r\n" + ORDER)
        assert status in await reader.readline()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    assert rows(children=True)[0]["headers"][name.lower()] == "a????b"


@pytest.mark.parametrize("odd", ["\0", "a\0b", "\ud800", "\x1b"])
async def test_text_that_postgres_does_not_take_may_stand_in_a_signed_body(web, database, channel, rows, odd):
    organization = database.organization()
    sent = [
        ("whatsapp", whatsapp, {"entry": [change(odd, odd, field=odd, account=odd)]}),
        ("whatsapp", whatsapp, {"entry": [change(None, field=odd, account=odd)]}),
        ("nuvemshop", nuvemshop, {"store_id": odd, "event": "order/paid", "id": odd}),
        ("nuvemshop", nuvemshop, {"event": odd, "id": odd}),
        ("nuvemshop", nuvemshop, {"event": "order/paid", "id": odd}),
        ("stripe", stripe, {"id": odd, "type": odd, "account": odd}),
    ]
    for number, (source, sign, value) in enumerate(sent):
        connection = channel(source, organization, external_id=f"x-{number}")
        body = body_of(value)
        status, _ = await web.post(f"/webhooks/{source}/{connection}", body, sign(body))
        assert status == 200
    assert [bytes(row["raw_body"]) for row in rows(children=False)] == [body_of(value) for _, _, value in sent]


def test_no_depth_of_nesting_is_too_much_for_routing():
    routed = [source.route for source in registered().values()]
    for depth in (*range(900, 1010), 100_000):
        body = b'{"entry":[{"id":"1","changes":[{"field":"x","value":' + b"[" * depth + b"]" * depth + b"}]}]}"
        for route in routed:
            assert len(route(body, {}, None)) == 1


async def test_unknown_source_is_not_found(web):
    assert (await web.post("/webhooks/nobody/x", ORDER, {}))[0] == 404


async def test_channel_of_another_sender_is_unknown(web, database, channel):
    connection = channel("shopify", database.organization())
    assert (await web.post(f"/webhooks/stripe/{connection}", ORDER, stripe(ORDER)))[0] == 404


async def test_both_secrets_pass_while_one_rotates(web, database, channel, keyring):
    connection = channel("shopify", database.organization(), secret=b"old")
    with connections.connect(database.url) as conn:
        channels.rotate(conn, keyring, connection, "signature", b"new", datetime.now(UTC) + timedelta(hours=1))
    path = f"/webhooks/shopify/{connection}"
    assert (await web.post(path, ORDER, order_headers(event="a", secret=b"old")))[0] == 200
    assert (await web.post(path, ORDER, order_headers(event="b", secret=b"new")))[0] == 200
    # a second rotation: the first secret is gone, and there are never three
    with connections.connect(database.url) as conn:
        channels.rotate(conn, keyring, connection, "signature", b"newer", datetime.now(UTC) + timedelta(hours=1))
    assert (await web.post(path, ORDER, order_headers(event="c", secret=b"old")))[0] == 401
    assert (await web.post(path, ORDER, order_headers(event="d", secret=b"new")))[0] == 200
    assert (await web.post(path, ORDER, order_headers(event="e", secret=b"newer")))[0] == 200
    assert database.execute("SELECT count(*) FROM channel_secrets") == [(2,)]


async def test_secret_whose_time_is_over_does_not_sign(web, database, channel, keyring):
    connection = channel("shopify", database.organization(), secret=b"old")
    with connections.connect(database.url) as conn:
        channels.rotate(conn, keyring, connection, "signature", b"new", datetime.now(UTC) - timedelta(seconds=1))
    path = f"/webhooks/shopify/{connection}"
    assert (await web.post(path, ORDER, order_headers(secret=b"old")))[0] == 401
    assert (await web.post(path, ORDER, order_headers(secret=b"new")))[0] == 200


async def test_secrets_are_stored_sealed_and_never_seen_by_applications(database, channel):
    organization = database.organization()
    channel("shopify", organization, secret=b"plain secret")
    assert b"plain secret" not in str(database.execute("SELECT sealed FROM channel_secrets")).encode()
    conn = database.connect(role="afluente_app")
    conn.execute("SELECT set_config('app.organization_id', %s, false)", [str(organization)])
    with pytest.raises(Exception, match="permission denied"):
        conn.execute("SELECT sealed FROM channel_secrets")


@pytest.mark.parametrize("body", [b"not json", b'{"id": 1001, "na', b"[1]", b"\x00\xff", b""])
async def test_body_that_is_signed_well_but_unreadable_is_stored_and_answered_2xx(web, database, channel, rows, body):
    organization = database.organization()
    for source, sign in (("shopify", shopify), ("nuvemshop", nuvemshop), ("stripe", stripe), ("whatsapp", whatsapp)):
        connection = channel(source, organization, external_id=f"x-{source}")
        assert await web.post(f"/webhooks/{source}/{connection}", body, sign(body)) == (200, "stored")
    assert [row["topic"] for row in rows(children=True)] == ["unknown"] * 4


async def test_body_cut_on_the_way_fails_its_signature(web, database, channel):
    connection = channel("shopify", database.organization())
    assert (await web.post(f"/webhooks/shopify/{connection}", ORDER[:-7], order_headers()))[0] == 401


async def test_sender_that_hangs_up_in_the_middle_leaves_a_refusal(web, database, channel, rows, emitted, signals):
    connection = channel("shopify", database.organization())
    _, writer = await asyncio.open_connection(*web.address)
    head = f"POST /webhooks/shopify/{connection} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(ORDER)}\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in order_headers().items())
    writer.write(head.encode() + b"\r\n" + ORDER[:10])
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    await signals.of("ingest.refused")
    (row,) = rows()
    assert row["status"] == "refused"
    assert row["reason"] == "body_truncated"
    assert row["raw_body"] is None
    assert emitted() == []


async def test_ten_megabytes_are_refused_before_they_are_read(web, database, channel, rows, emitted):
    connection = channel("shopify", database.organization())
    reader, writer = await asyncio.open_connection(*web.address)
    size = 10 * 1024 * 1024
    head = f"POST /webhooks/shopify/{connection} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n"
    writer.write(head.encode())
    await writer.drain()
    # not one byte of the body was sent
    answer = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)).decode()
    assert " 413 " in answer.splitlines()[0]
    assert "connection: close" in answer.lower()
    writer.close()
    (row,) = rows()
    assert row["status"] == "refused"
    assert row["reason"] == "body_too_large"
    assert row["raw_body"] is None
    assert row["body_bytes"] == size
    assert emitted() == []


async def test_body_without_a_declared_length_is_cut_off_at_the_bound(web, database, channel, rows, signals):
    connection = channel("shopify", database.organization())
    sent = 0

    async def endless():
        nonlocal sent
        for _ in range(160):
            sent += 65536
            yield b"x" * 65536

    # told while still sending: the connection may be gone before the answer is read
    with contextlib.suppress(aiohttp.ClientError, ConnectionError):
        status, _ = await web.post(f"/webhooks/shopify/{connection}", endless(), order_headers())
        assert status == 413
    await signals.of("ingest.refused")
    assert [row["reason"] for row in rows()] == ["body_too_large"]


async def test_three_megabytes_pass(web, database, channel, rows):
    connection = channel("shopify", database.organization())
    body = body_of({"id": 1, "note": "x" * (sources.MAX_BODY_BYTES - 100)})
    assert await web.post(f"/webhooks/shopify/{connection}", body, order_headers(body)) == (200, "stored")


async def test_refusals_beyond_the_bucket_are_answered_but_not_stored(web, database, channel, rows):
    connection = channel("shopify", database.organization())
    count = int(ingest.REFUSALS_BURST) + 20
    answers = await asyncio.gather(*(web.post(f"/webhooks/shopify/{connection}", ORDER, {}) for _ in range(count)))
    # 503 is "too much at once": also no row
    assert {status for status, _ in answers} <= {401, 503}
    assert 0 < len(rows()) <= ingest.REFUSALS_BURST + 20


async def test_postgres_away_is_503_and_the_repeat_is_stored(database, door, keyring, channel, rows, emitted):
    connection = channel("shopify", database.organization())
    path = f"/webhooks/shopify/{connection}"
    async with running(build(door.url, keyring)) as web:
        assert (await web.post(path, ORDER, order_headers(event="a")))[0] == 200
        await door.shut()
        async with web.session.post(web.url + path, data=ORDER, headers=order_headers(event="b")) as response:
            assert response.status == 503
            assert int(response.headers["retry-after"]) > 0
        assert (await web.get("/healthz"))[0] == 200
        assert (await web.get("/readyz"))[0] == 503
        await door.open()
        async with asyncio.timeout(30):
            # as the sender does: each try waits for a connection as long as the receiver may
            while (await web.post(path, ORDER, order_headers(event="b")))[0] != 200:
                pass
    assert [row["dedupe_key"] for row in rows(children=True)] == ["orders/create:a", "orders/create:b"]
    assert len(emitted()) == 2


async def test_receiver_that_starts_without_postgres_answers_503(door, keyring):
    await door.shut()
    async with running(build(door.url, keyring)) as web:
        status, _ = await web.post("/webhooks/shopify/00000000-0000-4000-8000-000000000000", ORDER, order_headers())
        assert status == 503
    await door.open()


async def test_nothing_is_left_when_the_outbox_row_cannot_be_written(web, database, channel, rows, emitted):
    connection = channel("shopify", database.organization())
    database.execute(
        "ALTER TABLE event_log ADD CONSTRAINT refuse_all CHECK (event_type <> 'webhook.received') NOT VALID"
    )
    status, _ = await web.post(f"/webhooks/shopify/{connection}", ORDER, order_headers())
    assert status >= 500
    assert rows() == []
    assert emitted() == []


async def test_shop_that_is_not_the_channels_is_kept_unrouted(web, database, channel, rows, emitted):
    connection = channel("shopify", database.organization(), external_id="azul.myshopify.com")
    headers = order_headers() | {"X-Shopify-Shop-Domain": "outra.myshopify.com"}
    assert await web.post(f"/webhooks/shopify/{connection}", ORDER, headers) == (200, "unrouted")
    (row,) = rows()
    assert row["status"] == "unrouted"
    assert row["organization_id"] is None
    assert bytes(row["raw_body"]) == ORDER
    assert emitted() == []
    headers["X-Shopify-Shop-Domain"] = "Azul.myshopify.com"
    assert await web.post(f"/webhooks/shopify/{connection}", ORDER, headers) == (200, "stored")


async def test_nuvemshop_once_is_once_but_updated_is_every_time(web, database, channel, rows, emitted):
    connection = channel("nuvemshop", database.organization(), external_id="1679854")
    for event in ("order/paid", "order/paid", "order/updated", "order/updated"):
        body = body_of({"store_id": 1679854, "event": event, "id": 871254203})
        await web.post(f"/webhooks/nuvemshop/{connection}", body, nuvemshop(body))
    assert [payload["topic"] for _, _, payload in emitted()] == ["order/paid", "order/updated", "order/updated"]
    assert {row["subject"] for row in rows(children=True)} == {"order:871254203"}


async def test_nuvemshop_store_must_be_the_channels(web, database, channel, emitted):
    connection = channel("nuvemshop", database.organization(), external_id="1")
    body = body_of({"store_id": 2, "event": "order/paid", "id": 3})
    assert await web.post(f"/webhooks/nuvemshop/{connection}", body, nuvemshop(body)) == (200, "unrouted")
    assert emitted() == []


async def test_nuvemshop_privacy_topic_stands_in_the_url(web, database, channel, rows):
    connection = channel("nuvemshop", database.organization(), external_id="1")
    body = body_of({"store_id": 1, "customer": {"id": 1}, "orders_to_redact": []})
    await web.post(f"/webhooks/nuvemshop/{connection}/customers/redact", body, nuvemshop(body))
    await web.post(f"/webhooks/nuvemshop/{connection}/x", body, nuvemshop(body))
    assert [row["topic"] for row in rows(children=True)] == ["customers/redact", "unknown"]


async def test_second_redaction_of_one_customer_is_not_taken_for_a_repeat(web, database, channel, rows, emitted):
    connection = channel("nuvemshop", database.organization(), external_id="1")
    body = body_of({"store_id": 1, "customer": {"id": 1}, "orders_to_redact": []})
    for _ in range(2):
        await web.post(f"/webhooks/nuvemshop/{connection}/customers/redact", body, nuvemshop(body))
    assert len(rows(children=True)) == len(emitted()) == 2


async def test_stripe_old_signature_is_refused_and_event_id_is_the_key(web, database, channel, rows):
    connection = channel("stripe", database.organization())
    body = body_of({"id": "evt_1", "type": "invoice.paid", "livemode": True})
    path = f"/webhooks/stripe/{connection}"
    assert await web.post(path, body, stripe(body, at=1_700_000_000)) == (401, "signature_too_old")
    assert await web.post(path, body, stripe(body)) == (200, "stored")
    assert await web.post(path, body, stripe(body)) == (200, "duplicate")
    (child,) = rows(children=True)
    assert child["dedupe_key"] == "event:evt_1"
    assert child["topic"] == "invoice.paid"


def change(number, *wamids, field="messages", account="waba-1"):
    messages = [{"id": wamid, "from": "5511900010001", "type": "text", "text": {"body": "olá"}} for wamid in wamids]
    value = {"metadata": {"phone_number_id": number}, "messages": messages} if number else {"event": "FLAGGED"}
    return {"id": account, "changes": [{"field": field, "value": value}]}


async def test_whatsapp_batch_over_two_organizations_and_an_unknown_number(web, database, channel, rows, emitted):
    first, second = database.organization("A"), database.organization("B")
    one = channel("whatsapp", first, external_id="111")
    two = channel("whatsapp", second, external_id="222")
    batch = {
        "object": "whatsapp_business_account",
        "entry": [change("111", "a", "b"), change("222", "c"), change("999", "d")],
    }
    body = body_of(batch)
    assert await web.post(f"/webhooks/whatsapp/{one}", body, whatsapp(body)) == (200, "stored")
    (parent,) = rows(children=False)
    assert parent["organization_id"] is None
    assert parent["reason"] == "unrouted_parts:1"
    assert bytes(parent["raw_body"]) == body
    children = rows(children=True)
    assert [(row["organization_id"], row["channel_id"]) for row in children] == [(first, one), (second, two)]
    # each has its own part and nothing of the others'
    parts = [json.loads(bytes(row["raw_body"])) for row in children]
    assert [
        [m["id"] for e in part["entry"] for c in e["changes"] for m in c["value"]["messages"]] for part in parts
    ] == [
        ["a", "b"],
        ["c"],
    ]
    assert [row["summary"] for row in children] == [{"messages": 2}, {"messages": 1}]
    assert [row[0] for row in emitted()] == [first, second]
    # no wamid stands in a key: it holds the person's number
    assert all(row["dedupe_key"].startswith("sha256:") for row in children)


async def test_connecting_the_number_later_and_replaying_makes_the_missing_child(
    web, database, channel, keyring, rows, emitted
):
    one = channel("whatsapp", database.organization("A"), external_id="111")
    body = body_of({"entry": [change("111", "a"), change("999", "d")]})
    await web.post(f"/webhooks/whatsapp/{one}", body, whatsapp(body))
    later = database.organization("C")
    channel("whatsapp", later, external_id="999")
    (parent,) = rows(children=False)
    async with await database.connect_async() as conn:
        assert await store.replay(conn, keyring, parent["id"], datetime.now(UTC)) == 1
    assert [row[0] for row in emitted()][-1] == later
    assert rows(children=False)[0]["reason"] is None
    before = rows()
    async with await database.connect_async() as conn:
        assert await store.replay(conn, keyring, parent["id"], datetime.now(UTC)) == 0
    # nothing is taken back: not the bytes, not the status
    assert rows() == before
    assert len(emitted()) == 2


async def test_who_signs_for_one_organization_cannot_write_into_another(web, database, channel, rows, emitted):
    ours = channel("whatsapp", database.organization("A"), external_id="111", secret=b"ours")
    channel("whatsapp", database.organization("B"), external_id="222", secret=b"theirs")
    body = body_of({"entry": [change("222", "c")]})
    assert await web.post(f"/webhooks/whatsapp/{ours}", body, whatsapp(body, b"ours")) == (200, "unrouted")
    assert rows(children=True) == []
    assert emitted() == []


async def test_whatsapp_change_of_an_account_goes_to_the_channel_that_names_it(web, database, channel, rows):
    organization = database.organization()
    one = channel("whatsapp", organization, external_id="111", settings={"account_id": "waba-1"})
    body = body_of({"entry": [change(None, field="phone_number_quality_update")]})
    assert await web.post(f"/webhooks/whatsapp/{one}", body, whatsapp(body)) == (200, "stored")
    assert [row["topic"] for row in rows(children=True)] == ["phone_number_quality_update"]


async def test_whatsapp_set_up_returns_the_challenge_unchanged(web, database, channel):
    one = channel(
        "whatsapp", database.organization(), external_id="1", secrets={"signature": SECRET, "verify_token": b"my token"}
    )
    asked = {"hub.mode": "subscribe", "hub.verify_token": "my token", "hub.challenge": "<1158201444> &"}
    async with web.session.get(f"{web.url}/webhooks/whatsapp/{one}", params=asked) as response:
        assert response.status == 200
        assert response.content_type == "text/plain"
        assert await response.text() == "<1158201444> &"
    for wrong in ({"hub.verify_token": "x"}, {"hub.mode": "unsubscribe"}, {"hub.verify_token": ""}):
        assert (await web.get(f"/webhooks/whatsapp/{one}", **(asked | wrong)))[0] == 403


async def test_set_up_without_a_token_in_store_is_refused(web, database, channel):
    one = channel("whatsapp", database.organization(), external_id="1")
    status, _ = await web.get(
        f"/webhooks/whatsapp/{one}", **{"hub.mode": "subscribe", "hub.verify_token": "", "hub.challenge": "1"}
    )
    assert status == 403


async def test_paused_channel_keeps_deliveries_without_events(web, database, channel, rows, emitted):
    connection = channel("shopify", database.organization())
    database.execute("UPDATE channels SET status = 'paused'")
    assert await web.post(f"/webhooks/shopify/{connection}", ORDER, order_headers()) == (200, "unrouted")
    assert emitted() == []
    assert rows()[0]["raw_body"] is not None


async def test_replaying_a_child_emits_for_its_worker_again(web, database, channel, keyring, rows, emitted):
    connection = channel("shopify", database.organization())
    await web.post(f"/webhooks/shopify/{connection}", ORDER, order_headers())
    (child,) = rows(children=True)
    async with await database.connect_async() as conn:
        assert await store.replay(conn, keyring, child["id"], datetime.now(UTC)) == 1
    assert len(emitted()) == 2


async def test_replaying_a_delivery_that_is_through_changes_nothing(web, database, channel, keyring, rows, emitted):
    connection = channel("shopify", database.organization())
    await web.post(f"/webhooks/shopify/{connection}", ORDER, order_headers())
    before = rows()
    database.execute("UPDATE channels SET status = 'paused'")
    for status in ("paused", "active"):
        database.execute("UPDATE channels SET status = %s", [status])
        async with await database.connect_async() as conn:
            assert await store.replay(conn, keyring, before[0]["id"], datetime.now(UTC)) == 0
    assert rows() == before
    assert len(emitted()) == 1


async def test_account_that_two_organizations_name_is_neithers_to_read(web, database, channel, rows):
    one = channel("whatsapp", database.organization("A"), external_id="111", settings={"account_id": "waba-1"})
    channel("whatsapp", database.organization("B"), external_id="222", settings={"account_id": "waba-1"})
    body = body_of({"entry": [change(None, field="phone_number_quality_update")]})
    assert await web.post(f"/webhooks/whatsapp/{one}", body, whatsapp(body)) == (200, "unrouted")
    assert rows(children=True) == []


async def test_refused_delivery_cannot_be_replayed(web, database, channel, keyring, rows):
    connection = channel("shopify", database.organization())
    await web.post(f"/webhooks/shopify/{connection}", ORDER, {})
    (row,) = rows()
    async with await database.connect_async() as conn:
        with pytest.raises(store.NotReplayable, match="body is not kept"):
            await store.replay(conn, keyring, row["id"], datetime.now(UTC))


async def test_deliveries_of_nobody_are_seen_by_operators_only(web, database, channel):
    organization = database.organization()
    connection = channel("shopify", organization, external_id="a.myshopify.com")
    await web.post(
        f"/webhooks/shopify/{connection}", ORDER, order_headers() | {"X-Shopify-Shop-Domain": "b.myshopify.com"}
    )
    seen = {}
    for role in ("afluente_app", "afluente_admin", "afluente_worker"):
        conn = database.connect(role=role)
        conn.execute("SELECT set_config('app.organization_id', %s, false)", [str(organization)])
        seen[role] = conn.execute("SELECT count(*) FROM webhook_events").fetchone()[0]
    assert seen == {"afluente_app": 0, "afluente_admin": 1, "afluente_worker": 1}
