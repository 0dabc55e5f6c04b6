"""What Postgres writes by itself fits the catalogue: triggers, functions, and the table of metrics that SQL has too."""

import json
from decimal import Decimal

import pytest

from afluente import postgres
from schemas import Row, decode, encode
from schemas.contact_events import METRICS, metric_category
from schemas.events.contact_event import PurchaseCompleted, Recorded


def test_metric_categories_in_sql_are_those_of_the_table(database):
    for metric in [*METRICS, "Points Earned", ""]:
        found = database.execute("SELECT afluente.metric_category(%s)", [metric])
        assert found == [(metric_category(metric),)], metric


@pytest.fixture
def conn(database):
    """A transaction as the application of one organization."""
    organization = database.organization()
    with database.connect() as conn, postgres.act_for_sync(conn, organization):
        yield conn


def one(conn, query, *parameters):
    return conn.execute(query, parameters).fetchone()[0]


def contact(conn):
    columns = "(organization_id, name, source) VALUES (auth.organization_id(), 'Ana', 'web')"
    return one(conn, f"INSERT INTO contacts {columns} RETURNING id")


def written(conn):
    """Every event of the transaction, as the relay reads it."""
    rows = conn.execute(
        "SELECT seq, id, organization_id, event_type, entity_kind, entity_id, payload::text, metadata::text, created_at"
        " FROM event_log ORDER BY seq"
    ).fetchall()
    return [Row._make((*row[:6], row[6].encode(), row[7].encode(), row[8])) for row in rows]


def test_what_a_lead_goes_through_fits(conn):
    who = contact(conn)
    pipeline = one(
        conn, "INSERT INTO pipelines (organization_id, name) VALUES (auth.organization_id(), 'Vendas') RETURNING id"
    )
    first, second = (
        one(
            conn,
            "INSERT INTO stages (organization_id, pipeline_id, name, position)"
            " VALUES (auth.organization_id(), %s, %s, %s) RETURNING id",
            pipeline,
            f"stage {position}",
            position,
        )
        for position in (1, 2)
    )
    owner = one(
        conn,
        "INSERT INTO members (organization_id, user_id, email) VALUES (auth.organization_id(), uuidv7(), 'a@b.c')"
        " RETURNING id",
    )
    leads = [
        one(
            conn,
            "INSERT INTO leads (organization_id, contact_id, pipeline_id, stage_id, name, source)"
            " VALUES (auth.organization_id(), %s, %s, %s, 'Enterprise', 'web') RETURNING id",
            who,
            pipeline,
            first,
        )
        for _ in range(2)
    ]
    conn.execute("SELECT set_config('app.automation_run', 'run-7', true), set_config('app.request_id', 'r-1', true)")
    conn.execute(
        "UPDATE leads SET stage_id = %s, value = 1999.90, name = 'Plano anual' WHERE id = %s", (second, leads[0])
    )
    conn.execute("UPDATE leads SET owner_id = %s WHERE id = %s", (owner, leads[0]))
    conn.execute("UPDATE leads SET owner_id = NULL WHERE id = %s", (leads[0],))
    assert one(conn, "SELECT mark_lead_won(%s, 'preço')", leads[0])
    assert one(conn, "SELECT mark_lead_lost(%s, NULL)", leads[1])
    conn.execute("UPDATE leads SET deleted_at = clock_timestamp(), deleted_by = 'ana' WHERE id = %s", (leads[1],))
    rows = written(conn)
    assert {row.event_type for row in rows} == {
        "lead.stage_changed",
        "lead.updated",
        "lead.assigned",
        "lead.won",
        "lead.lost",
        "lead.deleted",
    }
    for row in rows:
        assert decode(encode(row)).payload == json.loads(row.payload), row.event_type


def test_recorded_contact_events_fit_with_their_moments_in_our_form(conn):
    who = contact(conn)
    conn.execute(
        """SELECT record_contact_event(contact_id => %(who)s, event_type => 'purchase_completed',
            metric_name => 'Order Paid', source => 'shopify', external_event_id => 'order_paid:1001',
            entity_type => 'order', entity_id => '1001', value => 297.90, currency => 'BRL',
            occurred_at => '2026-11-29T12:00:00.000001-03', properties => '{"amount": "297.90"}')""",
        {"who": who},
    )
    conn.execute(
        """SELECT record_contact_event(contact_id => %(who)s, metric_name => 'Points Earned', source => 'loyalty',
            source_type => 'INTERNAL', properties => '{"points": 3, "tier": {"name": "gold"}}')""",
        {"who": who},
    )
    rows = [row for row in written(conn) if row.event_type == "contact_event.recorded"]
    assert len(rows) == 2
    for row in rows:
        event = decode(encode(row))
        assert event.payload == json.loads(row.payload)
        assert not event.data.model_extra
    bought, points = (decode(encode(row)).data for row in rows)
    assert isinstance(bought, Recorded)
    assert isinstance(bought.properties, PurchaseCompleted)
    assert (bought.value, bought.properties.amount) == (Decimal("297.90"), Decimal("297.90"))
    assert isinstance(points, Recorded)
    assert points.properties.model_extra == {"points": 3, "tier": {"name": "gold"}}
    payload = json.loads(rows[0].payload)
    assert payload["occurred_at"] == "2026-11-29T15:00:00.000001+00:00"
    assert payload["value"] == "297.90"
