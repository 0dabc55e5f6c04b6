"""Who may do what: keys, scopes, tenants; making, rotating and revoking keys by command; what is written down of it."""

import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from uuid import uuid4

import aiohttp
import pytest
from psycopg import errors
from typer.testing import CliRunner

from afluente import postgres as connections
from afluente.cli.api_key import app
from afluente.errors import Refused
from afluente.telemetry.redact import redact_text
from afluente.web.api import keys
from afluente.web.app import Part, build
from tests.afluente.web.conftest import Client, event, fact
from tests.producers.ingest.conftest import running


def test_a_key_is_told_by_its_form_and_a_mistyped_one_too():
    text = keys.generate()
    assert re.fullmatch(r"afl_[0-9A-Za-z]{10}_[0-9A-Za-z]{38}", text)
    assert keys.prefix_of(text) == text[:14]
    swapped = text[:20] + ("a" if text[20] != "a" else "b") + text[21:]
    for wrong in (swapped, text + "a", text[:-1], text.upper(), f" {text}", text.replace("_", "-"), "", "afl__"):
        assert keys.prefix_of(wrong) is None
    assert text[15:] not in redact_text(f"failed for {text}, again")
    assert len({keys.generate() for _ in range(1000)}) == 1000


async def test_without_a_valid_key_nothing_is_read_of_a_request(api, make_key, organization, database):
    async def endless():
        while True:
            yield b" " * 1000
            await asyncio.sleep(0)

    for text, detail in (
        (None, "no Authorization header"),
        ("afl_x", "not written as an API key"),
        (keys.generate(), "unknown"),
        # the right prefix and another secret
        (_another_secret(api.key), "unknown"),
    ):
        answer = await api.of(text)("POST", "/v1/events", body=endless())
        assert (answer.status, answer.problem) == (401, "unauthorized")
        assert detail in answer.content["detail"]
        assert answer.headers["www-authenticate"].startswith('Bearer realm="afluente"')
        assert "ratelimit" not in answer.headers
    basic = await api.of(None)("POST", "/v1/events", event(), authorization="Basic YTpi")
    assert basic.status == 401


async def test_keys_that_are_made_up_keep_nobody_from_postgres(database, make_key, clock, signals, monkeypatch):
    monkeypatch.setattr(keys, "STRANGERS_AT_ONCE", 3.0)
    known, late = (make_key(database.organization()).text for _ in range(2))
    async with running(build(database.url, None, parts={Part.API}, clock=clock, observer=signals)) as web:
        api = Client(web.url, web.session, known)
        assert (await api.get("/v1/event-types")).status == 200
        statuses = [(await api.of(keys.generate()).get("/v1/event-types")).status for _ in range(4)]
        assert statuses == [401, 401, 503, 503]
        clock.advance(keys.REMEMBERED_S / 100)
        assert (await api.of(late).get("/v1/event-types")).status == 503
        clock.advance(keys.REMEMBERED_S)  # the one that is known is looked up again
        assert (await api.get("/v1/event-types")).status == 200
        assert (await api.of(late).get("/v1/event-types")).status == 200


async def test_an_error_of_ours_is_told_without_what_it_says(api, organization, database, heard, capfd):
    database.execute("REVOKE SELECT ON contact_events FROM afluente_app")
    try:
        answer = await api.get("/v1/contact-events?metric=maria")
    finally:
        database.execute("GRANT SELECT ON contact_events TO afluente_app")
    assert (answer.status, answer.problem) == (500, "internal")
    assert "contact_events" not in json.dumps(answer.content)
    said = capfd.readouterr().out
    assert "InsufficientPrivilege" in said
    assert "permission denied" not in said
    assert "maria" not in said


def _another_secret(text):
    other = text[:15] + "0" * keys.SECRET_LENGTH
    return other + keys._checksum(other)


async def test_a_key_ends_when_it_expires_or_is_revoked_and_only_its_holder_is_told(database, make_key, clock, signals):
    organization = database.organization()
    clock.set(datetime.now(UTC))
    dying = make_key(organization, expires_at=clock.now() + timedelta(seconds=30)).text
    revoked = make_key(organization).text
    async with running(build(database.url, None, parts={Part.API}, clock=clock, observer=signals)) as web:
        api = Client(web.url, web.session)
        for key in (dying, revoked):
            assert (await api.of(key).get("/v1/event-types")).status == 200
        with connections.connect(database.url) as conn:
            keys.revoke(conn, revoked[:14], now=clock.now(), reason="test", actor="test")
        clock.advance(keys.REMEMBERED_S)
        answer = await api.of(revoked).get("/v1/event-types")
        assert (answer.status, answer.content["detail"]) == (401, "the API key was revoked")
        stranger = await api.of(_another_secret(revoked)).get("/v1/event-types")
        assert stranger.content["detail"] == "the API key is unknown"
        clock.advance(29)
        answer = await api.of(dying).get("/v1/event-types")
        assert (answer.status, answer.content["detail"]) == (401, "the API key has expired")


async def test_a_key_may_what_its_scopes_say(api, make_key, organization):
    calls = {
        "events:write": ("POST", "/v1/events", event()),
        "events:read": ("GET", f"/v1/events/{uuid4()}", None),
        "contact-events:write": ("POST", "/v1/contact-events", fact()),
        "contact-events:read": ("GET", "/v1/contact-events", None),
    }
    assert calls.keys() == keys.SCOPES.keys()
    for granted in keys.SCOPES:
        client = api.of(make_key(organization, scopes=[granted]).text)
        for scope, call in calls.items():
            answer = await client(*call)
            if scope == granted:
                assert answer.status in (200, 201, 404)
            else:
                assert (answer.status, answer.problem) == (403, "forbidden")
                assert f'scope="{scope}"' in answer.headers["www-authenticate"]


async def test_no_tenant_sees_or_touches_anothers(api, make_key, database, organization):
    other = database.organization("Other")
    theirs = api.of(make_key(other).text)
    later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    waiting = (await api.post("/v1/events", event(deliver_at=later))).headers["location"]
    emitted = await api.post("/v1/events", event(idempotency_key="k"), idempotency_key="request")
    recorded = await api.post("/v1/contact-events", fact(external_event_id="order_paid:1"))
    contact_id = (await api.get(recorded.headers["location"])).content["contact_id"]
    for path in (waiting, emitted.headers["location"], recorded.headers["location"]):
        assert (await theirs.get(path)).problem == "not-found"
    assert (await theirs("DELETE", waiting)).problem == "not-found"
    assert (await api.get(waiting)).status == 200
    assert (await theirs.get("/v1/contact-events")).content["data"] == []
    foreign = await theirs.post("/v1/contact-events", fact(contact=None, contact_id=contact_id))
    assert foreign.problem == "contact-unknown"
    # names of facts and of requests are each organization's own
    for path, given, headers in (
        ("/v1/events", event(idempotency_key="k", payload={"theirs": 1}), {"idempotency_key": "request"}),
        ("/v1/contact-events", fact(external_event_id="order_paid:1"), {}),
    ):
        answer = await theirs.post(path, given, **headers)
        assert (answer.status, answer.content["status"]) == (201, "accepted")
    counts = database.execute("SELECT organization_id, count(*) FROM contacts GROUP BY 1")
    assert {(organization, 1), (other, 1)} <= set(counts)


async def test_what_is_logged_has_no_content_and_no_secret(api, heard, capfd):
    named = "maria@example.com"
    await api.post("/v1/contact-events", fact(contact={"email": named}), x_request_id="logged-1", idempotency_key="a")
    await api.get("/v1/contact-events?metric=" + named, x_request_id="logged-2")
    await api.of(_another_secret(api.key)).get("/v1/contact-events?metric=" + named, x_request_id="logged-3")
    for number, status in ((1, 201), (2, 200), (3, 401)):
        fields = await heard.of("api.request", request_id=f"logged-{number}")
        assert fields["status"] == status
        assert named not in json.dumps(fields)
        assert api.key[15:] not in json.dumps(fields)
    out = "".join(capfd.readouterr())
    assert "logged-2" in out
    assert named not in out
    assert api.key[15:] not in out


def test_who_acts_for_an_organization_cannot_make_a_key_or_read_a_hash(database, organization, make_key):
    made = make_key(organization)
    with database.connect() as conn, connections.act_for_sync(conn, organization):
        assert conn.execute("SELECT prefix FROM api_keys").fetchall() == [(made.prefix,)]
    for role in ("afluente_app", "afluente_admin"):
        with (
            pytest.raises(errors.InsufficientPrivilege),
            database.connect() as conn,
            connections.act_for_sync(conn, organization, role=role),
        ):
            conn.execute("SELECT key_hash FROM api_keys")
    with (
        pytest.raises(errors.InsufficientPrivilege),
        database.connect() as conn,
        connections.act_for_sync(conn, organization),
    ):
        conn.execute("UPDATE api_keys SET revoked_at = NULL")


async def test_two_keys_are_valid_while_one_is_rotated_and_never_three(api, database, organization):
    def rotate(word, hours=1.0):
        with connections.connect(database.url) as conn:
            now = datetime.now(UTC)
            return keys.rotate(conn, word, now=now, overlap=timedelta(hours=hours), actor="test")[0].text

    def valid():
        with connections.connect(database.url) as conn:
            rows = keys.listed(conn, organization, datetime.now(UTC))
        return {row["prefix"]: row["state"] for row in rows if row["state"] in ("active", "ending")}

    first = api.key
    second = rotate(first)
    for key in (first, second):
        assert (await api.of(key).get("/v1/contact-events")).status == 200
    with pytest.raises(keys.EndedKey, match="takes its place"):
        rotate(first)
    # two at once: the second waits for the first, and sees what it did
    with ThreadPoolExecutor() as pool:
        outcomes = [pool.submit(rotate, second) for _ in range(4)]
    (third,) = [outcome.result() for outcome in outcomes if outcome.exception() is None]
    assert valid() == {second[:14]: "ending", third[:14]: "active"}
    fourth = rotate(third, hours=0)  # it leaked
    assert valid() == {fourth[:14]: "active"}
    # a repeat under the next key is a repeat all the same
    assert (await api.of(fourth).get("/v1/contact-events")).status == 200


def test_the_commands_make_list_rotate_and_revoke_and_the_audit_log_has_it(database, organization):
    def run(*arguments):
        done = CliRunner().invoke(app, [*arguments, "--format", "json"], env={"DATABASE_URL": database.url})
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    org = str(organization)
    made = run("create", "--org", org, "--name", "pos", "--scope", "events:write", "--expires", "90d", "--rate", "5")
    assert keys.prefix_of(made["key"]) == made["prefix"]
    rotated = run("rotate", made["prefix"], "--overlap-h", "2")
    assert run("limit", rotated["prefix"], "--rate", "7.5", "--burst", "9")["rate_burst"] == 9
    revoked = run("revoke", made["id"], "--reason", "leaked")
    assert revoked["prefix"] == made["prefix"]
    rows = run("list", "--org", org)
    assert [(row["prefix"], row["state"], row["rate_per_s"]) for row in rows] == [
        (rotated["prefix"], "active", "7.5"),
        (made["prefix"], "revoked", "5.0"),
    ]
    lifetime = datetime.fromisoformat(rows[0]["expires_at"]) - datetime.fromisoformat(rows[0]["created_at"])
    assert abs(lifetime - timedelta(days=90)) < timedelta(minutes=1)
    assert "key_hash" not in rows[0]
    audited = database.execute(
        "SELECT action, actor_kind, details FROM audit_logs WHERE organization_id = %s ORDER BY created_at",
        [organization],
    )
    actions = ["api_key.created", "api_key.rotated", "api_key.limited", "api_key.revoked"]
    assert [action for action, _, _ in audited] == actions
    assert audited[3][2] == {"prefix": made["prefix"], "reason": "leaked"}
    assert made["key"][15:] not in str(audited)


def test_what_cannot_be_made_or_ended_is_refused(make_key, database, organization):
    for given, words in (
        ({"scopes": ["all"]}, "no scope all"),
        ({"scopes": []}, "without a scope"),
        ({"name": ""}, "name"),
        ({"rate_per_s": Decimal(0)}, "rate"),
        ({"rate_burst": 0}, "burst"),
    ):
        with pytest.raises(Refused, match=words):
            make_key(organization, **given)
    prefix = make_key(organization).prefix
    with connections.connect(database.url) as conn:
        now = datetime.now(UTC)
        keys.revoke(conn, prefix, now=now, reason="", actor="test")
        with pytest.raises(keys.EndedKey):
            keys.revoke(conn, prefix, now=now, reason="", actor="test")
        with pytest.raises(keys.UnknownKey):
            keys.revoke(conn, "afl_nobody", now=now, reason="", actor="test")


async def test_the_page_describes_the_api_to_whoever_asks_without_a_key(address):
    async with aiohttp.ClientSession() as session, session.get(f"{address}/v1/docs") as page:
        text = await page.text()
        assert page.status == 200
        assert "<script" not in text
        assert page.headers["content-security-policy"].startswith("default-src 'none'")
        for word in ("/v1/contact-events", "problem-rate-limited", "loyalty.points_earned"):
            assert word in text
