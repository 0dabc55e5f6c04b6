"""The named statements: how they are found, and the seed's questions answered by them."""

import uuid
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from psycopg.types.json import Jsonb

import sql
from tests.fixtures.postgres import clone


@pytest.fixture(scope="module")
def database(postgres, template):
    """One for all tests of this file, emptied after each."""
    with clone(postgres, template) as database:
        yield database


@pytest.fixture
def owner(database):
    with database.connect(role=None, autocommit=True) as conn:
        conn.execute("SET search_path = public")
        yield conn
        with conn.transaction():
            conn.execute("SET LOCAL afluente.rewrite = 'erasure'")
            for table in ("event_log", "event_delivery", "audit_logs", "worker_event_types"):
                conn.execute(f"DELETE FROM {table}")


@pytest.fixture
def organization(database):
    return database.organization("Mine")


def emit(conn, organization, event_type="lead.created", entity=None, **metadata):
    return conn.execute(
        "SELECT emit_event_for(%s, %s, %s, %s, '{}', %s)",
        [organization, event_type, event_type.partition(".")[0], entity, Jsonb(metadata)],
    ).fetchone()[0]


def deliver(conn, event_id, worker, state, target="", **columns):
    """A delivery as the runtime would leave it."""
    finished = datetime.now(UTC) if state in ("done", "skipped", "dead", "discarded") else None
    due = datetime.now(UTC) + timedelta(minutes=1) if state == "waiting" else None
    columns = {"attempts": 1, "last_error": None, "finished_at": finished, "next_attempt_at": due} | columns
    names, places = ", ".join(columns), ", ".join(["%s"] * len(columns))
    conn.execute(
        f"""
        INSERT INTO event_delivery (event_created_at, worker, event_id, target, organization_id, event_type, key, state,
                                    {names})
        SELECT e.created_at, %s, e.id, %s, e.organization_id, e.event_type, e.id::text, %s, {places}
          FROM event_log e WHERE e.id = %s
        """,
        [worker, target, state, *columns.values(), event_id],
    )


def ask(conn, table, name, **parameters):
    cursor = conn.execute(sql.queries(table)[name].encode(), parameters)
    names = [column.name for column in cursor.description]
    return [SimpleNamespace(**dict(zip(names, row, strict=True))) for row in cursor]


def status(conn, event_id):
    (found,) = ask(conn, "event_log_status", "status", event_id=event_id)
    return found


# -------------------- the loader


def test_statements_are_found_by_name_with_their_comment():
    queries = sql.queries("event_log")
    assert {"request", "trace", "entity", "of_type", "by_id"} <= set(queries)
    assert queries["by_id"].startswith("-- Events by their ids")
    assert not queries["by_id"].endswith(";")
    assert "-- name" not in "".join(queries.values())


def test_an_unknown_file_or_name_is_an_error():
    with pytest.raises(FileNotFoundError):
        sql.queries("nothing")
    with pytest.raises(KeyError):
        sql.queries("event_log")["nothing"]


# -------------------- event_log


def test_all_of_request_x_in_order(owner, organization):
    other = emit(owner, organization, request_id="y")
    first = emit(owner, organization, request_id="x")
    audit = owner.execute(
        "INSERT INTO audit_logs (organization_id, action, metadata) VALUES (%s, 'member.invited', %s) RETURNING id",
        [organization, Jsonb({"request_id": "x", "trace_id": "t"})],
    ).fetchone()[0]
    last = emit(owner, organization, "lead.updated", request_id="x", trace_id="t")
    found = ask(owner, "event_log", "request", request_id="x")
    assert [(row.src, row.id, row.what) for row in found] == [
        ("event", first, "lead.created"),
        ("audit", audit, "member.invited"),
        ("event", last, "lead.updated"),
    ]
    assert other not in {row.id for row in found}
    assert [row.id for row in ask(owner, "event_log", "trace", trace_id="t")] == [audit, last]


def test_an_application_sees_its_own_part_of_a_request(database, owner, organization):
    emit(owner, organization, request_id="x")
    emit(owner, database.organization("Theirs"), request_id="x")
    app = database.connect(role="afluente_app", autocommit=True)
    app.execute("SELECT set_config('app.organization_id', %s, false)", [str(organization)])
    assert [row.organization_id for row in ask(app, "event_log", "request", request_id="x")] == [organization]


def test_one_things_history_and_one_types(owner, organization):
    thing = uuid.uuid4()
    ids = [emit(owner, organization, t, entity=thing) for t in ("lead.created", "lead.updated", "lead.updated")]
    emit(owner, organization, "lead.updated", entity=uuid.uuid4())
    found = ask(owner, "event_log", "entity", entity_kind="lead", entity_id=thing, max_rows=2)
    assert [row.id for row in found] == ids[:0:-1]
    since = datetime.now(UTC) - timedelta(hours=1)
    of_type = {"organization_id": organization, "event_type": "lead.updated", "max_rows": 10}
    assert len(ask(owner, "event_log", "of_type", **of_type, since=since, until=datetime.now(UTC))) == 3
    assert ask(owner, "event_log", "of_type", **of_type, since=since, until=since) == []
    assert [row.id for row in ask(owner, "event_log", "by_id", ids=ids[::-1])] == ids


@pytest.mark.parametrize(
    ("name", "parameters", "index"),
    [
        ("request", {"request_id": "r"}, "request_id_idx"),
        ("entity", {"entity_kind": "lead", "entity_id": uuid.UUID(int=1), "max_rows": 10}, "entity_kind_entity_id"),
    ],
)
def test_correlation_uses_its_index_under_row_level_security(database, owner, organization, name, parameters, index):
    """Why request_id is a column: an index on metadata ->> 'request_id' is not used here, ->> is not leakproof."""
    owner.execute(
        "INSERT INTO event_log (organization_id, event_type, entity_kind, entity_id, metadata)"
        " SELECT %s, 'lead.created', 'lead', uuidv7(), jsonb_build_object('request_id', 'r-' || n)"
        "   FROM generate_series(1, 20000) n",
        [organization],
    )
    owner.execute("ANALYZE event_log")
    app = database.connect(role="afluente_app", autocommit=True)
    app.execute("SELECT set_config('app.organization_id', %s, false)", [str(organization)])
    plan = "\n".join(line for (line,) in app.execute(f"EXPLAIN {sql.queries('event_log')[name]}".encode(), parameters))
    month = f"event_log_y{datetime.now(UTC):%Y}m{datetime.now(UTC):%m}"
    assert f"{month}_{index}" in plan, plan
    assert f"Seq Scan on {month}" not in plan, plan


# -------------------- event_log_status


@pytest.fixture
def workers(owner):
    owner.execute("INSERT INTO worker_event_types VALUES ('a-worker', 'lead.created'), ('b-worker', '*')")
    return "a-worker", "b-worker"


def test_an_event_that_nobody_expects_is_done(owner, organization):
    assert status(owner, emit(owner, organization)).status == "done"


def test_status_is_pending_until_every_expected_worker_is_done(owner, organization, workers):
    event_id = emit(owner, organization)
    assert status(owner, event_id).status == "pending"
    deliver(owner, event_id, workers[0], "done")
    found = status(owner, event_id)
    assert (found.status, found.consumed_by) == ("pending", ["a-worker"])
    deliver(owner, event_id, workers[1], "skipped", attempts=0)
    found = status(owner, event_id)
    assert (found.status, found.consumed_by) == ("done", ["a-worker", "b-worker"])


def test_one_workers_dead_letter_hides_nothing_of_the_others(owner, organization, workers):
    event_id = emit(owner, organization)
    deliver(owner, event_id, workers[0], "dead", attempts=8, last_error="boom")
    deliver(owner, event_id, workers[1], "done")
    found = status(owner, event_id)
    assert (found.status, found.consumed_by, found.attempts, found.last_error) == ("dead", ["b-worker"], 8, "boom")


def test_one_targets_dead_letter_makes_the_event_dead(owner, organization, workers):
    event_id = emit(owner, organization, "lead.updated")
    deliver(owner, event_id, workers[1], "done", target="x")
    deliver(owner, event_id, workers[1], "dead", target="y")
    assert status(owner, event_id).status == "dead"
    assert status(owner, event_id).consumed_by == []


def test_a_waiting_delivery_says_when(owner, organization, workers):
    event_id = emit(owner, organization, "lead.updated")
    due = datetime.now(UTC) + timedelta(minutes=5)
    deliver(owner, event_id, workers[1], "waiting", next_attempt_at=due, last_error="503")
    found = status(owner, event_id)
    assert (found.status, found.next_attempt_at, found.last_error) == ("pending", due, "503")


def test_dead_letters_by_type_agree_with_the_view(owner, organization, workers):
    for event_type, count in (("lead.created", 3), ("lead.updated", 1)):
        for _ in range(count):
            deliver(owner, emit(owner, organization, event_type), workers[1], "dead", attempts=8)
    twice = emit(owner, organization, "lead.created")
    deliver(owner, twice, workers[0], "dead")
    deliver(owner, twice, workers[1], "needs_review")
    deliver(owner, emit(owner, organization, "lead.lost"), workers[1], "done")
    found = ask(owner, "event_log_status", "dead_letters_by_type")
    assert [(row.event_type, row.events, row.deliveries) for row in found] == [
        ("lead.created", 4, 5),
        ("lead.updated", 1, 1),
    ]
    seen = owner.execute(
        "SELECT event_type, count(*) FROM event_log_status WHERE status = 'dead' GROUP BY 1 ORDER BY 1"
    ).fetchall()
    assert seen == [(row.event_type, row.events) for row in found]
    since = datetime.now(UTC) - timedelta(hours=1)
    dead = ask(owner, "event_log_status", "dead", organization_id=organization, since=since, max_rows=3)
    assert dead[0].id == twice
    assert len(dead) == 3


def test_lag_is_the_age_of_the_oldest_that_is_not_finished(owner, organization, workers):
    old = owner.execute(
        "INSERT INTO event_log (organization_id, event_type, entity_kind, created_at)"
        " VALUES (%s, 'lead.updated', 'lead', clock_timestamp() - interval '90 seconds') RETURNING id",
        [organization],
    ).fetchone()[0]
    emit(owner, organization, "lead.updated")
    deliver(owner, emit(owner, organization, "lead.lost"), workers[1], "done")
    since = datetime.now(UTC) - timedelta(days=1)
    (lag,) = ask(owner, "event_log_status", "lag", since=since)
    assert (lag.event_type, lag.events) == ("lead.updated", 2)
    assert 90 <= lag.lag_seconds < 120
    deliver(owner, old, workers[1], "done")
    (lag,) = ask(owner, "event_log_status", "lag", since=since)
    assert lag.lag_seconds < 60
