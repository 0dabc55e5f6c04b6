"""Tracked links over HTTP: where they lead, which clicks count, and what happens when Postgres is slow or away."""

import asyncio
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from starlette.applications import Starlette

from afluente import postgres
from afluente.web import links as web
from tests.consumers.automations.playing import Play
from tests.fixtures.clock import SettableClock
from tests.fixtures.postgres import clone
from tests.producers.ingest.conftest import running

URL = "https://loja.example/oferta?a=1&b=%C3%A9#topo"
PERSON = {"user-agent": "Mozilla/5.0 (Linux; Android 14) AppleWebKit/537.36 Chrome/130.0 Mobile Safari/537.36"}


@pytest.fixture(scope="module")
def database(postgres, template):
    with clone(postgres, template) as database:
        yield database


@pytest.fixture
def play(database):
    return Play(database)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """On a machine that does much besides, Postgres is no slower for it: only what a test says is slow is."""
    monkeypatch.setattr(web, "LOOK_UP_WITHIN_S", 20.0)
    monkeypatch.setattr(web, "RECORD_WITHIN_S", 20.0)


def link(play, contact=None, url=URL):
    with postgres.connect(play.database.url) as conn, postgres.act_for_sync(conn, play.organization):
        return conn.execute("SELECT create_tracked_link(%s, %s)", [url, contact]).fetchone()[0]


@asynccontextmanager
async def served(database, clock=None):
    """The part as a server; yields a function that asks for a path, and does not follow where it leads."""
    pool = postgres.pool_async(database.url, max_size=4, application_name="test links")
    part = web.Links(pool, clock=clock)

    @asynccontextmanager
    async def lifespan(_):
        async with pool, part.running():
            yield

    async with running(Starlette(routes=part.routes(), lifespan=lifespan)) as server:

        async def ask(path, method="GET", **headers):
            given = {name.replace("_", "-"): value for name, value in {**PERSON, **headers}.items()}
            async with server.session.request(
                method, server.url + path, headers=given, allow_redirects=False
            ) as answer:
                return answer

        yield ask


def clicks(play):
    return play.rows("SELECT clicks FROM tracked_links ORDER BY created_at")


async def test_it_leads_to_the_stored_address_and_nowhere_else(play, database):
    contact = play.contact()
    token = link(play, contact)
    async with served(database) as ask:
        answer = await ask(f"/l/{token}?url=https://evil.example/&next=//evil.example&click_id=%0d%0aSet-Cookie:%20x")
        assert (answer.status, answer.headers["location"]) == (302, URL)
        assert "set-cookie" not in answer.headers
        assert {name: answer.headers[name] for name in web._HEADERS} == web._HEADERS
        for path in (
            f"/l/{'x' * 22}",
            "/l/short",
            f"/l/{token}/more",
            f"/l/{token}%0d%0a",
            "/l/https%3A%2F%2Fevil.example",
        ):
            gone = await ask(path)
            assert gone.status == 404, path
            assert "location" not in gone.headers
        assert (await ask(f"/l/{token}", "POST")).status == 405
    # recorded before the answer was given
    [(metric, properties)] = play.facts("tracking")
    assert metric == "Link Clicked"
    assert properties == {"url": URL, "link_id": properties["link_id"]}
    assert [event.entity_id for event in play.events("contact_event.recorded")] == [contact]


async def test_only_a_persons_click_counts(play, database):
    token = link(play, play.contact())
    async with served(database) as ask:
        for method, headers in (
            ("HEAD", {}),
            ("GET", {"user_agent": "WhatsApp/2.24.11.79 A"}),
            ("GET", {"user_agent": "facebookexternalhit/1.1"}),
            ("GET", {"user_agent": "Mozilla/5.0 (compatible; Googlebot/2.1)"}),
            ("GET", {"user_agent": "curl/8.5"}),
            ("GET", {"sec_purpose": "prefetch;prerender"}),
            ("GET", {"purpose": "prefetch"}),
        ):
            if "user_agent" in headers:
                headers = {"user-agent": headers["user_agent"]}
            assert (await ask(f"/l/{token}", method, **headers)).status == 302
        assert clicks(play) == [(0,)]
        assert (await ask(f"/l/{token}")).status == 302
    assert clicks(play) == [(1,)]


async def test_a_click_is_counted_once_by_its_id_or_within_ten_minutes(play, database):
    clock = SettableClock(datetime(2026, 11, 30, 12, 0, tzinfo=UTC))
    token = link(play, play.contact())
    async with served(database, clock) as ask:
        await asyncio.gather(*(ask(f"/l/{token}") for _ in range(8)))
        assert clicks(play) == [(1,)]
        clock.advance(timedelta(minutes=9))
        await ask(f"/l/{token}")
        assert clicks(play) == [(1,)]
        clock.advance(timedelta(minutes=2))
        await ask(f"/l/{token}")
        assert clicks(play) == [(2,)]
        for _ in range(2):
            await ask(f"/l/{token}?click_id=abc")
        assert clicks(play) == [(3,)]
        for number in range(20):  # ids are the visitor's word
            await ask(f"/l/{token}?click_id=n{number}")
        assert clicks(play) == [(11,)]
    assert len(play.facts("tracking")) == 11


async def test_a_merged_contacts_click_is_the_one_that_stays_and_an_erased_ones_nobodys(play, database):
    stays, merged, erased = play.contact(), play.contact("Ana S.", None), play.contact("Bia", None)
    tokens = [link(play, merged), link(play, erased), link(play)]
    play.execute("UPDATE contacts SET merged_into = %s WHERE id = %s", stays, merged)
    play.execute("UPDATE contacts SET anonymized_at = now() WHERE id = %s", erased)
    async with served(database) as ask:
        for token in tokens:
            assert (await ask(f"/l/{token}")).status == 302
    assert play.rows("SELECT contact_id FROM contact_events WHERE source = 'tracking'") == [(stays,)]
    assert clicks(play) == [(1,), (1,), (1,)]


async def test_a_slow_postgres_keeps_nobody_waiting_and_the_click_is_written_later(play, database, monkeypatch):
    monkeypatch.setattr(web, "RECORD_WITHIN_S", 0.1)
    monkeypatch.setattr(web, "RETRY_AFTER_S", 0.01)
    monkeypatch.setattr(web, "WRITE_WITHIN_S", 0.3)
    token = link(play, play.contact())
    async with served(database) as ask, await psycopg.AsyncConnection.connect(database.url) as holding:
        await holding.execute("LOCK TABLE link_clicks IN ACCESS EXCLUSIVE MODE")
        assert (await ask(f"/l/{token}")).status == 302
        assert clicks(play) == [(0,)]
        # the end of the process waits for it
    assert clicks(play) == [(1,)]


async def test_known_links_lead_on_while_postgres_cannot_be_asked(play, database, monkeypatch):
    known, unknown = link(play, play.contact()), link(play)
    async with served(database) as ask:
        await ask(f"/l/{known}")
        monkeypatch.setattr(web, "LOOK_UP_WITHIN_S", 0.1)
        monkeypatch.setattr(web, "RECORD_WITHIN_S", 0.05)
        async with await psycopg.AsyncConnection.connect(database.url) as holding:
            await holding.execute("LOCK TABLE tracked_links IN ACCESS EXCLUSIVE MODE")
            assert (await ask(f"/l/{known}")).headers["location"] == URL
            refused = await ask(f"/l/{unknown}")
            assert (refused.status, refused.headers["retry-after"]) == (503, "5")
        monkeypatch.setattr(web, "LOOK_UP_WITHIN_S", 20.0)
        assert (await ask(f"/l/{unknown}")).status == 302


@pytest.mark.parametrize(
    "url", ["http://a.example/", "https://a@b.example/", "https://a.example/\nX: y", "javascript:x"]
)
def test_no_link_is_made_to_what_is_no_plain_https_address(play, url):
    with pytest.raises(psycopg.Error, match="not an address") as refused:
        link(play, url=url)
    assert refused.value.sqlstate == "AF004"


def test_tokens_are_long_random_and_not_alike(play):
    tokens = {link(play) for _ in range(50)}
    assert len(tokens) == 50
    assert {len(token) for token in tokens} == {22}
    assert all(len({token[i] for token in tokens}) > 5 for i in range(21))


async def test_it_is_a_part_of_the_web_of_its_own(play, database):
    from afluente.web.app import Part, build

    token = link(play, play.contact())
    async with running(build(database.url, None, parts={Part.LINKS})) as server:
        async with server.session.get(f"{server.url}/l/{token}", headers=PERSON, allow_redirects=False) as answer:
            assert answer.headers["location"] == URL
        async with server.session.get(f"{server.url}/readyz") as answer:
            assert answer.status == 200
        async with server.session.post(f"{server.url}/webhooks/stripe/x") as answer:
            assert answer.status == 404
    assert clicks(play) == [(1,)]
