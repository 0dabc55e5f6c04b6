"""`record_contact_event` and `emit_metric_event` on a real Postgres: the metrics seed's rules, and races."""

import asyncio
from decimal import Decimal

import psycopg
import pytest
from psycopg.rows import dict_row

from afluente import postgres as connections
from schemas.contact_events import CONTACT_EVENT_TYPES, METRICS, contact_event_type_of, metric_category, metric_of


@pytest.fixture
def organization(database):
    return database.organization("A")


@pytest.fixture
def contact(database, organization):
    return make_contact(database, organization)


def make_contact(database, organization):
    return database.execute(
        "INSERT INTO contacts (organization_id, name, source) VALUES (%s, 'Ana', 'test') RETURNING id", [organization]
    )[0][0]


@pytest.fixture
def app(database, organization):
    """A connection as an application of the organization, in a transaction."""
    conn = database.connect(role="afluente_app")
    conn.execute("SELECT set_config('app.organization_id', %s, false)", [str(organization)])
    return conn


def record(conn, contact, **given):
    values = {"event_type": "purchase_completed", "metric_name": "Order Paid", "source": "shopify"} | given
    names = ", ".join(f"{name} => %({name})s" for name in values)
    return conn.execute(f"SELECT record_contact_event(%(contact)s, {names})", values | {"contact": contact}).fetchone()[
        0
    ]


def events(database):
    with connections.connect(database.url) as conn:
        rows = conn.cursor(row_factory=dict_row).execute("SELECT * FROM event_log ORDER BY seq").fetchall()
        return [row["payload"] for row in rows if row["event_type"] == "contact_event.recorded"]


def test_row_and_event_are_one_transaction(database, app, contact):
    event_id = record(
        app, contact, external_event_id="order_paid:1", entity_type="order", entity_id="1", value=Decimal("10.50"),
        occurred_at="2026-11-20T10:00:00-03:00",
    )  # fmt: skip
    assert events(database) == []
    app.commit()
    (payload,) = events(database)
    assert payload["contact_event_id"] == str(event_id)
    assert payload["contact_id"] == str(contact)
    assert payload["contact_event_type"] == "purchase_completed"
    assert (payload["metric_name"], payload["category"]) == ("Order Paid", "ecommerce")
    assert (payload["value"], payload["currency"]) == ("10.50", "BRL")
    assert payload["occurred_at"] == "2026-11-20T13:00:00.000000+00:00"
    assert payload["unique_event_id"] == "shopify:order:order_paid:1"
    assert set(payload) == {
        "contact_event_id", "contact_id", "contact_event_type", "metric_name", "category", "source_type", "source",
        "external_event_id", "unique_event_id", "object_id", "object_id_ref", "entity_type", "entity_id", "value",
        "currency", "occurred_at", "received_at", "properties",
    }  # fmt: skip


def test_rollback_leaves_neither(database, app, contact):
    record(app, contact, external_event_id="order_paid:1")
    app.rollback()
    assert events(database) == []
    assert database.execute("SELECT count(*) FROM contact_events") == [(0,)]


def test_no_contact_is_a_warning_and_null(database, app):
    notices = []
    app.add_notice_handler(lambda notice: notices.append(notice.severity))
    assert record(app, None, external_event_id="order_paid:1") is None
    assert notices == ["WARNING"]
    assert database.execute("SELECT count(*) FROM contact_events") == [(0,)]


@pytest.mark.parametrize("role", ["afluente_app", "afluente_worker"])
def test_contact_of_another_organization_is_refused(database, organization, role):
    foreign = make_contact(database, database.organization("B"))
    conn = database.connect(role=role)
    conn.execute("SELECT set_config('app.organization_id', %s, false)", [str(organization)])
    with pytest.raises(psycopg.Error) as refused:
        record(conn, foreign)
    assert refused.value.sqlstate == "AF010"


def test_no_organization_and_a_foreign_one_are_refused(database, app, contact):
    conn = database.connect(role="afluente_worker")
    with pytest.raises(psycopg.Error) as refused:
        record(conn, contact)
    assert refused.value.sqlstate == "AF001"
    with pytest.raises(psycopg.Error) as refused:
        record(app, contact, organization_id=database.organization("B"))
    assert refused.value.sqlstate == "AF002"


def test_duplicate_gives_the_existing_id_and_emits_nothing(database, app, contact):
    first = record(app, contact, external_event_id="order_paid:1", entity_type="order")
    assert record(app, contact, external_event_id="order_paid:1", entity_type="order") == first
    # by either name
    assert record(app, contact, unique_event_id="shopify:order:order_paid:1") == first
    app.commit()
    assert len(events(database)) == 1


def test_facts_of_one_order_are_rows_of_their_own(database, app, contact):
    for fact in ("order_placed", "order_paid", "order_cancelled", "order_refunded"):
        record(app, contact, external_event_id=f"{fact}:1001", entity_type="order", entity_id="1001")
    app.commit()
    assert len(events(database)) == 4


def test_two_organizations_have_the_same_order(database, contact, app):
    record(app, contact, external_event_id="order_paid:1001")
    app.commit()
    other = database.organization("B")
    conn = database.connect(role="afluente_app")
    conn.execute("SELECT set_config('app.organization_id', %s, false)", [str(other)])
    record(conn, make_contact(database, other), external_event_id="order_paid:1001")
    conn.commit()
    assert len(events(database)) == 2


@pytest.mark.parametrize("names", [["order_paid:1"] * 12, [f"order_paid:{n}" for n in range(12)]])
async def test_race_makes_one_metric_and_one_row_for_each_fact(database, organization, contact, names):
    async def one(name):
        query = "SELECT record_contact_event(%s, metric_name => 'Brand New', source => 's', external_event_id => %s)"
        async with (
            await connections.connect_async(database.url) as conn,
            conn.transaction(),
            connections.act_for(conn, organization),
        ):
            return (await (await conn.execute(query, [contact, name])).fetchone())[0]

    ids = await asyncio.gather(*(one(name) for name in names))
    assert len(set(ids)) == len(set(names)) == len(events(database))
    assert database.execute("SELECT name, category, is_system FROM metrics") == [("Brand New", "custom", False)]


def test_emit_metric_event_is_the_seeds(database, app, contact):
    query = "SELECT emit_metric_event(%s, 'Message Received', '{\"phone\": \"x\"}', source => 'whatsapp',"
    query += " source_id => 'received:wamid.X', entity_type => 'message')"
    first = app.execute(query, [contact]).fetchone()
    assert app.execute(query, [contact]).fetchone() == first
    app.commit()
    ((unique, currency, value),) = database.execute("SELECT unique_event_id, currency, value FROM contact_events")
    assert (unique, currency, value) == ("whatsapp:message:received:wamid.X", "BRL", None)
    ((category, system, display),) = database.execute("SELECT category, is_system, display_name FROM metrics")
    assert (category, system, display) == ("messaging", True, "Message Received")
    # without a name of its own, two calls are two facts
    for _ in range(2):
        app.execute("SELECT emit_metric_event(%s, 'Link Clicked', source => 'tracking')", [contact])
    app.commit()
    assert len(events(database)) == 3


def test_categories_are_those_of_the_catalogue(database):
    names = [*METRICS, "Anything else"]
    found = database.execute("SELECT n, afluente.metric_category(n) FROM unnest(%s::text[]) n", [names])
    assert dict(found) == {name: metric_category(name) for name in names}


def test_pairs_of_type_and_metric_are_those_of_the_catalogue(database):
    types, metrics = [*CONTACT_EVENT_TYPES, "anything"], [*METRICS, "Anything else"]
    found = database.execute("SELECT n, afluente.metric_of(n) FROM unnest(%s::text[]) n", [types])
    assert dict(found) == {name: metric_of(name) for name in types}
    found = database.execute("SELECT n, afluente.contact_event_type_of(n) FROM unnest(%s::text[]) n", [metrics])
    assert dict(found) == {name: contact_event_type_of(name) for name in metrics}


def test_a_fact_has_both_names_whichever_is_given(database, app, contact):
    record(app, contact, event_type="purchase_completed", metric_name=None)
    record(app, contact, event_type=None, metric_name="Conversation Closed")
    record(app, contact, event_type="ticket_opened", metric_name=None)
    app.commit()
    assert database.execute("SELECT event_type, metric_name FROM contact_events ORDER BY created_at") == [
        ("purchase_completed", "Order Paid"), ("conversation_ended", "Conversation Closed"), ("ticket_opened", None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"value": "NaN"}, psycopg.errors.CheckViolation),
        ({"value": "Infinity"}, psycopg.errors.CheckViolation),
        ({"source": "x" * 101}, psycopg.errors.CheckViolation),
        ({"event_type": "x" * 101}, psycopg.errors.CheckViolation),
        ({"external_event_id": "x" * 256}, psycopg.errors.CheckViolation),
        ({"object_id": "x" * 256}, psycopg.errors.CheckViolation),
        ({"object_id_ref": "x" * 256}, psycopg.errors.CheckViolation),
        ({"source_type": "OTHER"}, psycopg.errors.CheckViolation),
        ({"currency": "reais"}, psycopg.errors.CheckViolation),
        ({"properties": "[]"}, psycopg.errors.CheckViolation),
        ({"event_type": None, "metric_name": None}, psycopg.errors.CheckViolation),
    ],
)
def test_limits_of_the_seeds_hold(database, app, contact, given, error):
    with pytest.raises(error):
        record(app, contact, **given)
    app.rollback()
    assert events(database) == []


def test_only_the_function_writes(database, app, contact):
    record(app, contact)
    for statement in (
        "INSERT INTO contact_events (organization_id, contact_id, source_type, source, event_type, occurred_at)"
        " SELECT organization_id, contact_id, source_type, source, 'x', now() FROM contact_events",
        "UPDATE contact_events SET value = 1",
        "DELETE FROM contact_events",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege), app.transaction():
            app.execute(statement)


@pytest.mark.parametrize(
    ("column", "value", "index"),
    [
        ("event_type", "product_viewed", "contact_events_type_idx"),
        ("metric_name", "Order Placed", "contact_events_metric_idx"),
    ],
)
def test_events_of_a_type_in_a_period_come_by_index(database, app, contact, organization, column, value, index):
    metrics = [
        database.execute("SELECT afluente.ensure_metric(%s, %s, 's')", [organization, name])[0][0]
        for name in ("Order Placed", "Message Received")
    ]
    database.execute(
        "WITH c AS (SELECT array_agg(id) AS ids FROM (SELECT %(contact)s::uuid AS id UNION ALL"
        " SELECT unnest(%(others)s::uuid[])) c)"
        " INSERT INTO contact_events (organization_id, contact_id, source_type, source, event_type, metric_id,"
        " metric_name, occurred_at)"
        " SELECT %(organization)s, c.ids[1 + n %% cardinality(c.ids)], 'EXTERNAL', 's',"
        " (ARRAY['product_viewed', 'ticket_opened'])[1 + n %% 2],"
        " (%(metrics)s::uuid[])[1 + n %% 2], (ARRAY['Order Placed', 'Message Received'])[1 + n %% 2],"
        " now() - n * interval '1 minute' FROM c, generate_series(1, 20000) n",
        {
            "organization": organization,
            "contact": contact,
            "others": [make_contact(database, organization) for _ in range(30)],
            "metrics": metrics,
        },
    )
    database.execute("ANALYZE contact_events")
    plan = app.execute(
        "EXPLAIN SELECT * FROM contact_events WHERE organization_id = auth.organization_id() AND contact_id = %s"
        f" AND {column} = %s AND occurred_at > now() - interval '3 days'",
        [contact, value],
    ).fetchall()
    assert any(index in line for (line,) in plan), plan


def test_references_never_cross_organizations(database, organization, contact):
    other = database.organization("B")
    foreign = make_contact(database, other)
    tag = database.execute("INSERT INTO tags (organization_id, name) VALUES (%s, 'x') RETURNING id", [organization])[0][
        0
    ]
    link = "INSERT INTO contact_tag_links (organization_id, contact_id, tag_id) VALUES (%s, %s, %s)"
    name = "INSERT INTO contact_identities (organization_id, kind, value, contact_id) VALUES (%s, 'email', 'a@b.c', %s)"
    for statement, values in (
        (link, [organization, foreign, tag]),
        (link, [other, foreign, tag]),
        (name, [organization, foreign]),
        ("UPDATE contacts SET merged_into = %s WHERE id = %s", [foreign, contact]),
    ):
        with pytest.raises(psycopg.errors.ForeignKeyViolation):
            database.execute(statement, values)
