"""Messages are inserted and stay; what became of them follows from their events as a set."""

import itertools
import random
import threading
import uuid
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from psycopg import errors

from afluente import postgres
from tests.fixtures.postgres import clone

START = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


@pytest.fixture(scope="module")
def database(postgres, template):
    """One for all: every test has an organization of its own in it."""
    with clone(postgres, template) as database:
        yield database


@pytest.fixture
def conn(database):
    with database.connect(autocommit=True) as conn:
        yield conn


@pytest.fixture
def organization(database):
    return database.organization("Mine")


@pytest.fixture
def conversation(conn, organization):
    contact = conn.execute(
        "INSERT INTO contacts (organization_id, source) VALUES (%s, 'whatsapp') RETURNING id", [organization]
    ).fetchone()[0]
    return conn.execute(
        "INSERT INTO conversations (organization_id, contact_id) VALUES (%s, %s) RETURNING id, contact_id",
        [organization, contact],
    ).fetchone()


def message(conn, organization, conversation, direction="out", waha=None, at=START):
    return conn.execute(
        "INSERT INTO messages (organization_id, conversation_id, contact_id, direction, status, waha_message_id,"
        " occurred_at) VALUES (%s, %s, %s, %s, %s, %s, %s) RETURNING id",
        [organization, *conversation, direction, "queued" if direction == "out" else "received", waha, at],
    ).fetchone()[0]


def event(conn, organization, message_id, kind, at=START, waha=None, **columns):
    names = "".join(f", {name}" for name in columns)
    conn.execute(
        f"INSERT INTO message_events (organization_id, message_id, kind, occurred_at, waha_message_id{names})"
        f" VALUES (%s, %s, %s, %s, %s{', %s' * len(columns)})",
        [organization, message_id, kind, at, waha, *columns.values()],
    )


def state(conn, message_id):
    return conn.execute(
        "SELECT status, status_at, waha_message_id, sentiment FROM messages WHERE id = %s", [message_id]
    ).fetchone()


def test_the_furthest_state_holds_in_any_order_of_arrival(conn, organization, conversation):
    acks = [("sending", 0, None), ("sent", 1, "wamid.{}"), ("delivered", 2, None), ("read", 3, None)]
    for order in itertools.permutations(acks):
        found = message(conn, organization, conversation)
        for kind, second, waha in order:
            provider = waha.format(found) if waha else None
            event(conn, organization, found, kind, START + timedelta(seconds=second), provider)
        assert state(conn, found) == ("read", START + timedelta(seconds=3), f"wamid.{found}", None), order


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ([("sent", 1), ("failed", 2)], "failed"),
        ([("failed", 2), ("sent", 1)], "failed"),
        ([("delivered", 2), ("failed", 3)], "delivered"),  # kept, but no downgrade
        ([("failed", 1), ("queued", 60), ("sent", 61)], "sent"),  # tried again
        ([("failed", 1), ("queued", 60)], "queued"),
        ([("sent", 0.7), ("failed", 0)], "failed"),  # the provider gives whole seconds
        ([("read", 5)], "read"),  # delivered may be missing for ever
    ],
)
def test_failures_hold_against_what_is_not_newer_nor_delivered(conn, organization, conversation, events, status):
    for order in itertools.permutations(events):
        found = message(conn, organization, conversation)
        for kind, second in order:
            event(conn, organization, found, kind, START + timedelta(seconds=second))
        assert state(conn, found)[0] == status, order


def test_a_status_that_comes_before_our_send_returned_counts_afterwards(conn, organization, conversation):
    event(conn, organization, None, "delivered", START + timedelta(seconds=5), waha="wamid.1")
    found = message(conn, organization, conversation)
    assert state(conn, found)[0] == "queued"
    event(conn, organization, found, "sent", START + timedelta(seconds=4), waha="wamid.1")
    assert state(conn, found)[:3] == ("delivered", START + timedelta(seconds=5), "wamid.1")
    event(conn, organization, None, "read", START + timedelta(seconds=9), waha="wamid.2")
    echoed = message(conn, organization, conversation, waha="wamid.2")
    assert state(conn, echoed)[0] == "read"
    event(conn, organization, None, "failed", START + timedelta(seconds=9), waha="wamid.2")
    assert state(conn, echoed)[0] == "read"


def test_what_another_organization_says_of_the_same_id_does_not_count(database, conn, organization, conversation):
    found = message(conn, organization, conversation, waha="wamid.1")
    event(conn, database.organization("Theirs"), None, "read", waha="wamid.1")
    assert state(conn, found)[0] == "queued"


def test_inbound_messages_stay_received_and_get_their_sentiment(conn, organization, conversation):
    found = message(conn, organization, conversation, direction="in", waha="wamid.1")
    event(conn, organization, found, "sentiment", START, sentiment="neutral")
    event(conn, organization, found, "sentiment", START + timedelta(hours=1), sentiment="angry", sentiment_score=-0.9)
    event(conn, organization, found, "sentiment", START + timedelta(minutes=1), sentiment="positive")
    assert state(conn, found) == ("received", None, "wamid.1", "angry")


def test_acks_of_one_message_at_once_lose_nothing(database, conn, organization, conversation):
    """Each sees those before it; the one that brings the provider's id does not deadlock with the others."""
    messages = [message(conn, organization, conversation) for _ in range(10)]
    barrier = threading.Barrier(4)
    failures = []

    def run(kind, second):
        with postgres.connect(database.url, autocommit=True) as own:
            for found in messages:
                barrier.wait(30)
                try:
                    waha = f"wamid.{found}" if kind == "sent" else None
                    event(own, organization, found, kind, START + timedelta(seconds=second), waha)
                except psycopg.Error as error:
                    failures.append(error)

    threads = [
        threading.Thread(target=run, args=(kind, second))
        for second, kind in enumerate(("sending", "sent", "delivered", "read"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert {state(conn, found) for found in messages} == {
        ("read", START + timedelta(seconds=3), f"wamid.{found}", None) for found in messages
    }


def test_nobody_may_rewrite_a_message_or_set_what_follows_from_its_events(database, conn, organization, conversation):
    found = message(conn, organization, conversation)
    for role, may in (("afluente_app", set()), ("afluente_admin", set()), ("afluente_worker", {"body"})):
        own = database.connect(role=role, autocommit=True)
        own.execute("SELECT set_config('app.organization_id', %s, false)", [str(organization)])
        for column, value in (("body", "x"), ("status", "read"), ("sentiment", "x"), ("waha_message_id", "x")):
            if column in may:
                own.execute(f"UPDATE messages SET {column} = %s WHERE id = %s", [value, found])
            else:
                with pytest.raises(errors.InsufficientPrivilege):
                    own.execute(f"UPDATE messages SET {column} = %s WHERE id = %s", [value, found])
        for statement in (
            "DELETE FROM messages",
            "DELETE FROM message_events",
            "UPDATE message_events SET kind = 'read'",
        ):
            with pytest.raises(errors.InsufficientPrivilege):
                own.execute(statement)


def test_no_row_points_into_another_organization(database, conn, organization, conversation):
    other = database.organization("Theirs")
    found = message(conn, organization, conversation)
    for statement, parameters in (
        ("INSERT INTO message_events (organization_id, message_id, kind) VALUES (%s, %s, 'read')", [other, found]),
        (
            "INSERT INTO messages (organization_id, conversation_id, contact_id, direction, status)"
            " VALUES (%s, %s, %s, 'out', 'queued')",
            [other, *conversation],
        ),
        ("INSERT INTO conversations (organization_id, contact_id) VALUES (%s, %s)", [other, conversation[1]]),
        (
            "INSERT INTO orders (organization_id, contact_id, source, external_id) VALUES (%s, %s, 'x', '1')",
            [other, conversation[1]],
        ),
    ):
        with pytest.raises(errors.ForeignKeyViolation):
            conn.execute(statement, parameters)


def test_one_conversation_is_open_for_a_contact_on_a_channel(conn, organization, conversation):
    again = "INSERT INTO conversations (organization_id, contact_id) VALUES (%s, %s)"
    with pytest.raises(errors.UniqueViolation):
        conn.execute(again, [organization, conversation[1]])
    conn.execute("UPDATE conversations SET status = 'resolved', resolved_at = now() WHERE id = %s", [conversation[0]])
    conn.execute(again, [organization, conversation[1]])


def test_a_conversation_follows_from_its_messages_and_is_rebuilt_to_the_same(
    conn, database, organization, conversation
):
    moments = [START + timedelta(minutes=n) for n in range(20)]
    random.Random(7).shuffle(moments)
    for at in moments:
        message(conn, organization, conversation, "in" if at.minute % 3 == 0 else "out", at=at)
    shown = (
        "SELECT message_count, first_message_at, last_message_at, last_inbound_at FROM conversations"
        f" WHERE id = '{conversation[0]}'"
    )
    expected = (20, START, START + timedelta(minutes=19), START + timedelta(minutes=18))
    assert conn.execute(shown).fetchone() == expected
    assert conn.execute("SELECT afluente.rebuild_conversations(%s)", [organization]).fetchone() == (0,)
    database.execute(
        "UPDATE public.conversations SET message_count = 3, last_inbound_at = NULL WHERE id = %s", [conversation[0]]
    )
    assert conn.execute("SELECT afluente.rebuild_conversations(%s)", [organization]).fetchone() == (1,)
    assert conn.execute(shown).fetchone() == expected


def test_one_order_at_two_shops_and_twice_at_one(conn, database, organization):
    insert = "INSERT INTO orders (organization_id, source, external_id, ns_order_id) VALUES (%s, %s, '1001', %s)"
    conn.execute(insert, [organization, "shopify", None])
    conn.execute(insert, [organization, "stripe", None])
    conn.execute(insert, [database.organization("Theirs"), "shopify", None])
    conn.execute(insert, [organization, "nuvemshop", "1001"])
    for source, number in (("shopify", None), ("nuvemshop", "1002")):
        with pytest.raises(errors.UniqueViolation):
            conn.execute(insert, [organization, source, number])
    with pytest.raises(errors.CheckViolation):
        conn.execute(insert, [organization, "yampi", "7"])
    assert conn.execute("SELECT DISTINCT currency FROM orders").fetchall() == [("BRL",)]


@pytest.fixture
def lead(conn, organization, conversation):
    pipeline = conn.execute(
        "INSERT INTO pipelines (organization_id, name) VALUES (%s, 'Sales') RETURNING id", [organization]
    ).fetchone()[0]
    stages = [
        conn.execute(
            "INSERT INTO stages (organization_id, pipeline_id, name, position) VALUES (%s, %s, %s, %s) RETURNING id",
            [organization, pipeline, name, position],
        ).fetchone()[0]
        for position, name in enumerate(("New", "Talking"))
    ]
    member = conn.execute(
        "INSERT INTO members (organization_id, user_id, email) VALUES (%s, %s, 'a@example.test') RETURNING id",
        [organization, uuid.uuid4()],
    ).fetchone()[0]
    found = conn.execute(
        "INSERT INTO leads (organization_id, contact_id, pipeline_id, stage_id, name, source, value)"
        " VALUES (%s, %s, %s, %s, 'Ana', 'web', 10) RETURNING id",
        [organization, conversation[1], pipeline, stages[0]],
    ).fetchone()[0]
    return found, stages, member


def emitted(conn, lead_id):
    """Events of the lead, checked against the catalogue: each must be one that the relay can encode."""
    import schemas

    rows = [
        schemas.Row(*row)
        for row in conn.execute(
            "SELECT seq, id, organization_id, event_type, entity_kind, entity_id, convert_to(payload::text, 'UTF8'),"
            " convert_to(metadata::text, 'UTF8'), created_at FROM event_log WHERE entity_id = %s ORDER BY seq",
            [lead_id],
        )
    ]
    return [(event.event_type, event.payload) for event in (schemas.decode(schemas.encode(row)) for row in rows)]


def test_changes_of_a_lead_are_emitted_whoever_makes_them(conn, lead):
    found, stages, member = lead
    conn.execute("UPDATE leads SET updated_at = now() WHERE id = %s", [found])
    assert emitted(conn, found) == []
    conn.execute("UPDATE leads SET stage_id = %s, owner_id = %s, value = 12.5, name = 'Bia'", [stages[1], member])
    with conn.transaction():
        conn.execute(
            "SELECT set_config('app.automation_run', 'run-1', true), set_config('app.request_id', 'r-1', true)"
        )
        conn.execute("UPDATE leads SET stage_id = %s", [stages[0]])
    conn.execute("UPDATE leads SET owner_id = NULL WHERE id = %s", [found])
    conn.execute("UPDATE leads SET deleted_at = now(), deleted_by = 'u-1' WHERE id = %s", [found])
    old, new = str(stages[0]), str(stages[1])
    assert emitted(conn, found) == [
        ("lead.stage_changed", {"from_stage_id": old, "to_stage_id": new}),
        ("lead.assigned", {"from_owner_id": None, "to_owner_id": str(member)}),
        ("lead.updated", {"changes": {"name": {"from": "Ana", "to": "Bia"}, "value": {"from": 10.0, "to": 12.5}}}),
        ("lead.stage_changed", {"from_stage_id": new, "to_stage_id": old, "automation_run": "run-1"}),
        ("lead.updated", {"changes": {"owner_id": {"from": str(member), "to": None}}}),
        ("lead.deleted", {"soft": True, "deleted_by": "u-1"}),
    ]
    assert conn.execute("SELECT count(*) FROM event_log WHERE request_id = 'r-1'").fetchone() == (1,)


def test_a_lead_is_won_or_lost_once(database, organization, conn, lead):
    found, _, _ = lead
    foreign = database.connect(role="afluente_app", autocommit=True)
    foreign.execute("SELECT set_config('app.organization_id', %s, false)", [str(database.organization("Theirs"))])
    assert foreign.execute("SELECT mark_lead_won(%s)", [found]).fetchone() == (False,)
    app = database.connect(role="afluente_app", autocommit=True)
    app.execute("SELECT set_config('app.organization_id', %s, false)", [str(organization)])
    assert app.execute("SELECT mark_lead_won(%s, 'paid')", [found]).fetchone() == (True,)
    assert app.execute("SELECT mark_lead_won(%s)", [found]).fetchone() == (False,)
    assert app.execute("SELECT mark_lead_lost(%s, 'no')", [found]).fetchone() == (False,)
    ((event_type, payload),) = emitted(conn, found)
    assert (event_type, payload["value"], payload["reason"]) == ("lead.won", "10.00", "paid")
