"""Contacts and contact events as people ask for them: by index at a realistic size, under row-level security."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from psycopg.types.json import Jsonb

import sql
from afluente import postgres as connections
from producers import contacts
from tests.fixtures.postgres import clone

EVENTS = 12_000
PEOPLE = 300
NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)


@pytest.fixture(scope="module")
def shop(postgres, template):
    """An organization with forty events for each of its people over 125 days, beside one of the same size."""
    with clone(postgres, template) as database:
        organizations = [database.organization(name) for name in ("Mine", "Theirs")]
        conn = database.connect(role=None, autocommit=True)
        for organization in organizations:
            conn.execute(
                "INSERT INTO contacts (organization_id, name, source) SELECT %s, 'Pessoa ' || n, 's'"
                " FROM generate_series(1, %s) n",
                [organization, PEOPLE],
            )
            conn.execute(
                """
                WITH metric AS (
                    SELECT array_agg(afluente.ensure_metric(%(organization)s, name, 's') ORDER BY place) AS ids,
                           array_agg(name ORDER BY place) AS names
                      FROM unnest(ARRAY['Order Paid', 'Message Received', 'Order Placed'])
                           WITH ORDINALITY m (name, place)
                ), person AS (
                    SELECT array_agg(id) AS ids FROM contacts WHERE organization_id = %(organization)s
                )
                INSERT INTO contact_events (organization_id, contact_id, source_type, source, event_type, metric_id,
                                            metric_name, value, currency, external_event_id, occurred_at)
                SELECT %(organization)s, p.ids[1 + n %% %(people)s], 'EXTERNAL', 'shop',
                       CASE WHEN n %% 30 = 0 THEN 'purchase_completed' END, m.ids[k.metric], m.names[k.metric],
                       CASE WHEN n %% 30 = 0 THEN 10 END, CASE WHEN n %% 60 = 0 THEN 'USD' ELSE 'BRL' END, 'e:' || n,
                       %(now)s - n * interval '15 minutes'
                  FROM metric m, person p, generate_series(0, %(events)s - 1) n,
                       LATERAL (SELECT CASE WHEN n %% 30 = 0 THEN 1 WHEN n %% 3 = 1 THEN 3 ELSE 2 END AS metric) k
                """,
                {"organization": organization, "people": PEOPLE, "events": EVENTS, "now": NOW},
            )
        conn.execute("ANALYZE contact_events, contacts, metrics")
        database.mine, database.theirs = organizations
        yield database


@pytest.fixture
def app(shop):
    with (
        connections.connect(shop.url) as conn,
        conn.transaction(force_rollback=True),
        connections.act_for_sync(conn, shop.mine),
    ):
        yield conn


def person(conn, number=0):
    return conn.execute("SELECT id FROM contacts ORDER BY id OFFSET %s LIMIT 1", [number]).fetchone()[0]


NOTHING = dict.fromkeys(
    ("contact_id", "event_type", "metric_name", "source", "category", "since", "until", "before_at", "before_id")
)


@pytest.mark.parametrize(
    ("asked", "indexes"),
    [
        ({}, {"contact_events_period_idx"}),
        ({"since": NOW - timedelta(days=2)}, {"contact_events_period_idx"}),
        ({"event_type": "purchase_completed"}, {"contact_events_type_period_idx"}),
        ({"event_type": "purchase_completed", "since": NOW - timedelta(days=9)}, {"contact_events_type_period_idx"}),
        ({"metric_name": "Order Placed", "until": NOW - timedelta(days=110)}, {"contact_events_metric_period_idx"}),
        ({"contact_id": 1}, {"contact_events_contact_idx"}),
        ({"contact_id": 1, "since": NOW - timedelta(days=30)}, {"contact_events_contact_idx"}),
        (
            {"contact_id": 1, "event_type": "purchase_completed", "since": NOW - timedelta(days=30)},
            {"contact_events_type_idx", "contact_events_contact_idx"},
        ),
        (
            {"contact_id": 1, "metric_name": "Message Received", "since": NOW - timedelta(days=90)},
            {"contact_events_metric_idx", "contact_events_contact_idx"},
        ),
    ],
)
@pytest.mark.parametrize("name", ["list", "count"])
def test_questions_are_answered_by_index(app, shop, asked, indexes, name):
    asked = asked | ({"contact_id": person(app)} if "contact_id" in asked else {})
    parameters = NOTHING | {"organization_id": shop.mine, "limit": 50, "by": "metric"} | asked
    text = f"EXPLAIN {sql.queries('contact_events')[name]}"
    plan = "\n".join(line for (line,) in app.execute(text.encode(), parameters, prepare=False))
    if name == "count" and not asked:
        return  # all of an organization's events: whatever is cheapest
    assert "Seq Scan on contact_events" not in plan, plan
    # What is counted has no order: of the indexes that begin alike the smallest may be taken.
    assert any(index in plan for index in indexes) or (name == "count" and "contact_events_" in plan), plan


def test_questions_have_the_right_answers(app, shop):
    since, until = NOW - timedelta(hours=10), NOW - timedelta(hours=1)
    rows = contacts.events(app, shop.mine, since=since, until=until, limit=1000)
    assert len(rows) == 36
    assert rows[0]["occurred_at"] == until - timedelta(minutes=15)
    assert rows[-1]["occurred_at"] == since
    assert {row["category"] for row in rows} == {"ecommerce", "messaging"}
    rows = contacts.events(app, shop.mine, category="messaging", limit=10)
    assert {row["category"] for row in rows} == {"messaging"}
    (paid,) = contacts.counts(app, shop.mine, by=None, event_type="purchase_completed", limit=10)
    assert (paid["what"], paid["events"]) == (None, EVENTS // 30)
    assert paid["totals"] == dict.fromkeys(("BRL", "USD"), str(EVENTS // 60 * 10))
    by_metric = contacts.counts(app, shop.mine, by="metric", limit=10)
    assert [row["what"] for row in by_metric] == ["Message Received", "Order Placed", "Order Paid"]
    assert sum(row["events"] for row in by_metric) == EVENTS
    days = contacts.counts(app, shop.mine, by="day", since=NOW - timedelta(days=2), limit=10)
    assert {row["what"]: row["events"] for row in days} == {"2026-11-27": 60, "2026-11-28": 96, "2026-11-29": 37}
    people = contacts.counts(app, shop.mine, by="contact", limit=1000)
    assert {row["events"] for row in people} == {EVENTS // PEOPLE}


def test_pages_follow_each_other_without_gap_or_repetition(app, shop):
    ana, bia = person(app, 0), person(app, 1)
    app.execute("SELECT merge_contacts(%s, %s, 'me', 'one person')", [bia, ana])
    seen, before = [], None
    while page := contacts.events(app, shop.mine, contact_id=bia, limit=7, before=before):
        seen += page
        before = (page[-1]["occurred_at"], page[-1]["id"])
    assert len(seen) == len({row["id"] for row in seen}) == 2 * EVENTS // PEOPLE
    assert seen == sorted(seen, key=lambda row: (row["occurred_at"], row["id"]), reverse=True)
    (row,) = contacts.counts(app, shop.mine, by="contact", contact_id=ana, limit=10)
    assert (row["what"], row["events"]) == (str(ana), 2 * EVENTS // PEOPLE)


def test_nobody_asks_about_another_organization(app, shop):
    assert contacts.events(app, shop.theirs, limit=10) == []
    assert contacts.found(app, shop.theirs) == []
    assert contacts.counts(app, shop.theirs, by=None, limit=10) == []


def test_contact_is_found_by_whatever_people_write(app, shop):
    given = [
        {"kind": "phone", "value": "+5511987654321"},
        {"kind": "email", "value": "ana@example.com"},
        {"kind": "external", "source": "shopify", "value": "c-501"},
    ]
    ana = app.execute("SELECT contact_id FROM upsert_contact(%s, %s, 'Ana Prado', 's')", [shop.mine, Jsonb(given)])
    ana = ana.fetchone()[0]
    app.execute("SELECT add_tag(%s, 'vip')", [ana])
    for word in ("11 8765-4321", "+55 (11) 98765-4321", "Ana@Example.com", "c-501", "prado"):
        assert [row["id"] for row in contacts.found(app, shop.mine, search=word)] == [ana], word
    assert [row["id"] for row in contacts.found(app, shop.mine, tag="vip")] == [ana]
    assert contacts.found(app, shop.mine, search="100%") == []
    shown = contacts.shown(app, shop.mine, ana)
    assert (shown["tags"], shown["merged_ids"], len(shown["identities"])) == (["vip"], [], 3)


def test_metrics_of_a_person_are_those_of_all_its_ids(app, shop):
    ana, bia = person(app, 2), person(app, 3)
    app.execute("SELECT merge_contacts(%s, %s, 'me', 'one person')", [bia, ana])
    with connections.act_for_sync(app, shop.mine, role="afluente_worker"):
        for contact, count, at, totals in (
            (ana, 2, NOW, {"BRL": "9007199254740993.10"}),
            (bia, 3, NOW - timedelta(days=1), {"BRL": 5, "USD": 7}),
        ):
            app.execute(
                "INSERT INTO contact_metrics_summary (generation, organization_id, contact_id, metric_name,"
                " event_count, first_event_at, last_event_at) VALUES (1, %s, %s, 'Order Paid', %s, %s, %s)",
                [shop.mine, contact, count, at, at],
            )
            for currency, total in totals.items():
                app.execute(
                    "INSERT INTO contact_metrics_summary_currency VALUES (1, %s, %s, 'Order Paid', %s, %s, 1)",
                    [shop.mine, contact, currency, total],
                )
    shown = contacts.shown(app, shop.mine, bia)
    assert (shown["id"], shown["merged_ids"]) == (ana, [bia])
    (metric,) = shown["metrics"]
    assert (metric["events"], metric["first_at"], metric["last_at"]) == (5, NOW - timedelta(days=1), NOW)
    assert metric["totals"] == {"BRL": "9007199254740998.10", "USD": "7"}
    # found by index, and the merged one has none of its own any more
    view = "contact_metrics_summary_v WHERE organization_id = %s AND contact_id = %s"
    assert app.execute(f"SELECT * FROM {view}", [shop.mine, bia]).fetchall() == []
    app.execute("SET LOCAL enable_seqscan = off")
    plan = "\n".join(row[0] for row in app.execute(f"EXPLAIN SELECT * FROM {view}", [shop.mine, ana]))
    assert plan.count("contact_metrics_summary_pkey") == 2, plan
    assert "contacts_merged_idx" in plan, plan


# -------------------- as commands


@pytest.fixture
def command(processes, shop):
    def command(*arguments):
        words = [str(argument) for argument in arguments]
        done = processes.run(*words, "--org", "Mine", "--format", "json", env={"DATABASE_URL": shop.url})
        return done.returncode, json.loads(done.stdout) if done.stdout.strip() else None, done.stderr

    return command


def test_contacts_are_merged_by_command_after_a_look(command, shop):
    gone, stays = (
        shop.execute(
            "SELECT id FROM contacts WHERE organization_id = %s ORDER BY id OFFSET %s LIMIT 1", [shop.mine, n]
        )[0][0]
        for n in (10, 11)
    )
    words = ("contact", "merge", gone, "--into", stays, "--reason", "one person")
    status, tried, said = command(*words, "--dry-run")
    assert (status, tried["applied"], tried["merged"]) == (0, False, True)
    assert "nothing was done" in said
    status, _, said = command(*words)
    assert status == 2
    assert "40 contact events?" in said
    status, done, _ = command(*words, "--yes")
    assert (status, done["applied"], done["contact_id"]) == (0, True, str(stays))
    assert done["moved"] == tried["moved"]
    status, rows, _ = command("contact", "timeline", gone, "--limit", 100)
    assert status == 0
    assert {row["contact_id"] for row in rows} == {str(gone), str(stays)}


def test_commands_find_or_say_that_there_is_nothing(command):
    status, rows, said = command("contact", "list", "--limit", 2)
    assert (status, len(rows)) == (0, 2)
    assert f"--before {rows[-1]['id']}" in said
    assert command("contact", "list", "--search", "nobody")[:2] == (3, [])
    status, rows, _ = command("contact-events", "count", "--by", "metric", "--until", "2026-11-01T00:00:00Z")
    assert (status, [row["what"] for row in rows]) == (0, ["Message Received", "Order Placed", "Order Paid"])
