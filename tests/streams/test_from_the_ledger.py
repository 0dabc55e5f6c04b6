"""The whole way: a contact event is recorded and published, and the summary equals the recount of contact_events."""

import random
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from tests.streams.records import METRICS, Fences

RECOUNT = """
    SELECT organization_id, contact_id, metric_name, count(*), min(occurred_at), max(occurred_at),
           coalesce(jsonb_object_agg(currency, total) FILTER (WHERE total IS NOT NULL), '{}')
    FROM (
        SELECT organization_id, contact_id, metric_name, currency, occurred_at,
               sum(value) OVER (PARTITION BY organization_id, contact_id, metric_name, currency) AS total
        FROM contact_events
        WHERE metric_name IS NOT NULL
    ) AS e
    GROUP BY organization_id, contact_id, metric_name
    ORDER BY organization_id, contact_id, metric_name
"""
SUMMARIES = """
    SELECT organization_id, contact_id, metric_name, event_count, first_event_at, last_event_at, totals
    FROM contact_metrics_summary_v
    ORDER BY organization_id, contact_id, metric_name
"""


def test_summaries_equal_the_recount_of_contact_events(processes, topics, database):
    topics.create_families()
    fences = Fences(database, topics.settings, topics.event("contact_event.recorded"))
    rng = random.Random(4)
    organizations = [database.organization(name) for name in ("Loja A", "Loja B")]
    contacts = [
        (organization, contact)
        for organization in organizations
        for (contact,) in database.execute(
            "INSERT INTO contacts (organization_id, name, source)"
            " SELECT %s, 'Contato ' || n, 'test' FROM generate_series(1, 4) n RETURNING id",
            [organization],
        )
    ]
    relay = processes.start("relay", "run")
    stream = processes.start("stream", "run", "--member-id", "a")
    recorded = 0
    conn = database.connect(role="afluente_app")
    for turn in range(60):
        organization, contact = rng.choice(contacts)
        conn.execute("SELECT set_config('app.organization_id', %s, true)", [str(organization)])
        for line in range(rng.randrange(1, 5)):
            amount = rng.random() < 0.5
            conn.execute(
                """
                SELECT record_contact_event(
                    contact_id => %s, metric_name => %s, event_type => %s, source => 'shopify',
                    external_event_id => %s, value => %s, currency => %s, occurred_at => %s)
                """,
                [
                    contact,
                    rng.choice([*METRICS, None]),
                    "product_viewed",
                    # Some are said twice, and count once.
                    f"fact:{rng.randrange(turn + 1)}:{line}",
                    Decimal(rng.randrange(1, 100_000)).scaleb(-2) if amount else None,
                    rng.choice(["BRL", "USD"]) if amount else None,
                    datetime(2026, 5, 1, tzinfo=UTC) + timedelta(seconds=rng.randrange(10**6)),
                ],
            )
        if rng.random() < 0.2:
            conn.rollback()
        else:
            conn.commit()
        if turn == 30:
            stream.kill()
            stream = processes.start("stream", "run", "--member-id", "a")
    recorded = database.execute("SELECT count(*) FROM contact_events")[0][0]
    assert recorded > 60

    def counted(_):
        return database.execute(
            "SELECT (SELECT count(*) FROM contact_events WHERE metric_name IS NOT NULL)"
            " <= (SELECT coalesce(sum(event_count), 0) FROM contact_metrics_summary_v)"
        )[0][0]

    fences.wait_for(counted, timeout=60)
    assert database.execute(SUMMARIES) == database.execute(RECOUNT)
    assert relay.returncode is None
    assert stream.returncode is None
