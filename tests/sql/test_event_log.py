"""emit_event and what it writes to: each refusal, one event for one key, deferral. Months: test_event_log_months."""

import json
import threading
import time
import uuid
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from psycopg import errors
from psycopg.types.json import Jsonb

from afluente import postgres
from tests.fixtures.postgres import clone


@pytest.fixture(scope="module")
def database(postgres, template):
    """One for all tests of this file, emptied of events after each."""
    with clone(postgres, template) as database:
        yield database


@pytest.fixture
def worker(database):
    with database.connect(autocommit=True) as conn:
        yield conn


@pytest.fixture
def owner(database):
    with database.connect(role=None, autocommit=True) as conn:
        conn.execute("SET search_path = public")
        yield conn


@pytest.fixture(autouse=True)
def _empty(owner):
    yield
    with owner.transaction():
        owner.execute("SET LOCAL afluente.rewrite = 'erasure'")
        owner.execute("DELETE FROM event_log")
        owner.execute("DELETE FROM event_idempotency; DELETE FROM deferred_event")


@pytest.fixture
def organization(database):
    return database.organization("Mine")


@pytest.fixture
def refusing(worker, organization):
    """A worker's connection and an organization that has no event at the end either."""
    yield worker, organization
    assert count(worker) == 0


def as_app(database, organization):
    """A connection of an application of this organization."""
    conn = database.connect(role="afluente_app", autocommit=True)
    conn.execute("SELECT set_config('app.organization_id', %s, false)", [str(organization)])
    return conn


def emit(conn, organization, event_type="lead.created", kind="lead", entity=None, payload="{}", metadata="{}", at=None):
    return conn.execute(
        "SELECT emit_event_for(%s, %s, %s, %s, %s, %s, %s)",
        [organization, event_type, kind, entity, payload, metadata, at],
    ).fetchone()[0]


def refused(sqlstate, conn, statement, parameters=None):
    with pytest.raises(psycopg.Error) as caught, conn.transaction():
        conn.execute(statement, parameters)
    assert caught.value.sqlstate == sqlstate, caught.value
    if sqlstate.startswith("AF"):
        assert caught.value.diag.message_hint
    return caught.value


def refused_both_ways(sqlstate, conn, organization, arguments, params=()):
    """emit_event writes what is usual by itself, and leaves the rest to what emit_event_for does: same limits."""
    refused(sqlstate, conn, f"SELECT emit_event_for(%s, {arguments})", [organization, *params])
    conn.execute("SELECT set_config('app.organization_id', %s, false)", [str(organization)])
    refused(sqlstate, conn, f"SELECT emit_event({arguments})", params)
    conn.execute("RESET app.organization_id")


def count(conn, table="event_log"):
    return conn.execute(f"SELECT count(*) FROM {table}").fetchone()[0]


# -------------------- what an event is made of


def test_an_event_holds_what_was_given_and_when(worker, organization):
    entity = uuid.uuid4()
    before = datetime.now(UTC)
    event_id = emit(
        worker,
        organization,
        entity=entity,
        payload='{"name": "Ana", "n": 1.50}',
        metadata='{"request_id": "r-1", "trace_id": "t-1", "actor_id": "u", "source": "api",'
        ' "schema_version": "1.0.0"}',
    )
    row = worker.execute(
        "SELECT id, organization_id, event_type, entity_kind, entity_id, payload::text, metadata, created_at,"
        " request_id, trace_id FROM event_log"
    ).fetchone()
    assert row[:6] == (event_id, organization, "lead.created", "lead", entity, '{"n": 1.50, "name": "Ana"}')
    emitted_at = row[6].pop("emitted_at")
    assert before.timestamp() <= emitted_at <= row[7].timestamp() <= datetime.now(UTC).timestamp()
    assert row[6] == {
        "request_id": "r-1",
        "trace_id": "t-1",
        "actor_id": "u",
        "source": "api",
        "schema_version": "1.0.0",
    }
    assert row[8:10] == ("r-1", "t-1")


def test_tx_id_is_that_of_the_top_level_under_savepoints(worker, organization):
    with worker.transaction():
        emit(worker, organization)
        with worker.transaction():
            emit(worker, organization)
        top = worker.execute("SELECT pg_current_xact_id()::text").fetchone()[0]
    assert worker.execute("SELECT DISTINCT tx_id::text FROM event_log").fetchall() == [(top,)]


def test_the_event_goes_with_its_transaction(worker, organization):
    with worker.transaction(force_rollback=True):
        emit(worker, organization)
        assert count(worker) == 1
    assert count(worker) == 0


def test_nulls_mean_the_defaults(worker, organization):
    emit(worker, organization, payload=None, metadata=None)
    assert worker.execute("SELECT payload, metadata - 'emitted_at' FROM event_log").fetchone() == ({}, {})


def test_synchronous_commit_is_on_for_the_rest_of_the_transaction_only(worker, organization):
    worker.execute("SET synchronous_commit = off")
    with worker.transaction():
        emit(worker, organization)
        assert worker.execute("SHOW synchronous_commit").fetchone() == ("on",)
    assert worker.execute("SHOW synchronous_commit").fetchone() == ("off",)
    worker.execute("SET synchronous_commit = remote_apply")  # stronger than on: left alone
    with worker.transaction():
        emit(worker, organization)
        assert worker.execute("SHOW synchronous_commit").fetchone() == ("remote_apply",)


def test_a_caller_cannot_put_its_own_objects_in_the_way(owner, database, organization):
    """search_path is pinned: an operator or a table of the caller's is not what the function uses."""
    owner.execute("CREATE SCHEMA evil; GRANT USAGE ON SCHEMA evil TO afluente_app")
    owner.execute("CREATE TABLE evil.event_log (LIKE event_log); GRANT ALL ON evil.event_log TO afluente_app")
    app = as_app(database, organization)
    app.execute("SET search_path = evil, public")
    app.execute("SELECT public.emit_event('lead.created', 'lead', NULL)")
    assert count(owner) == 1
    assert count(owner, "evil.event_log") == 0


# -------------------- refusals


def test_no_organization_is_refused(database, worker):
    app = database.connect(role="afluente_app", autocommit=True)
    refused("AF001", app, "SELECT emit_event('lead.created', 'lead', NULL)")
    refused("AF001", worker, "SELECT emit_event('lead.created', 'lead', NULL)")
    refused("AF001", worker, "SELECT emit_event_for(NULL, 'lead.created', 'lead', NULL)")
    refused("AF001", app, "SELECT cancel_deferred(%s)", [uuid.uuid4()])


def test_a_foreign_organization_is_refused(database, organization):
    other = database.organization("Theirs")
    app = as_app(database, organization)
    app.execute("SELECT emit_event('lead.created', 'lead', NULL, '{}', '{}', %s)", [organization])
    refused("AF002", app, "SELECT emit_event('lead.created', 'lead', NULL, '{}', '{}', %s)", [other])
    assert count(app) == 1


def test_emit_event_for_is_not_granted_to_applications(database, organization):
    for role in ("afluente_app", "afluente_admin"):
        conn = database.connect(role=role, autocommit=True)
        conn.execute("SELECT set_config('app.organization_id', %s, false)", [str(organization)])
        for statement in (
            "SELECT emit_event_for(%s, 'lead.created', 'lead', NULL)",
            "SELECT afluente.write_event(%s, 'lead.created', 'lead', NULL, '{}', '{}', NULL)",
            "SELECT cancel_deferred_for(%s, gen_random_uuid())",
            "INSERT INTO event_log (organization_id, event_type, entity_kind) VALUES (%s, 'lead.created', 'lead')",
        ):
            refused("42501", conn, statement, [organization])
        refused("42501", conn, "SELECT release_due_deferred(10)")
        refused("42501", conn, "SELECT afluente.seal_event_log(pg_current_snapshot(), 1)")
        refused("42501", conn, "SELECT afluente.purge_idempotency()")
        refused("42501", conn, "SELECT afluente.ensure_partitions('2030-01-01')")


@pytest.mark.parametrize(
    "event_type",
    ["Lead.created", "lead-created", "lead", "lead.", ".created", "lead.created.twice", "1lead.x", "lead.created\n", "",
     " lead.created", "lead.créée", None, "a" * 99 + ".b"],
)  # fmt: skip
def test_a_malformed_event_type_is_refused(refusing, event_type):
    worker, organization = refusing
    refused_both_ways("AF003", worker, organization, "%s, 'lead', NULL", [event_type])


@pytest.mark.parametrize("kind", ["Lead", "", None, "le ad", "a" * 101])
def test_a_malformed_entity_kind_is_refused(refusing, kind):
    worker, organization = refusing
    refused_both_ways("AF003", worker, organization, "'lead.created', %s, NULL", [kind])


@pytest.mark.parametrize("value", ["[]", "1", '"x"', "null", "true"])
def test_what_is_not_an_object_is_refused(refusing, value):
    worker, organization = refusing
    refused_both_ways("AF004", worker, organization, "'lead.created', 'lead', NULL, %s", [value])
    refused_both_ways("AF004", worker, organization, "'lead.created', 'lead', NULL, '{}', %s", [value])


@pytest.mark.parametrize(
    "metadata",
    [{"idempotency_key": ""}, {"idempotency_key": "k" * 256}, {"request_id": "r" * 256}, {"trace_id": "t" * 256},
     {"actor_id": "a" * 256}, {"source": "s" * 101}, {"schema_version": "1"}, {"schema_version": "v1.0.0"}],
    ids=lambda m: next(iter(m)),
)  # fmt: skip
def test_metadata_out_of_its_limits_is_refused(refusing, metadata):
    worker, organization = refusing
    refused_both_ways("AF004", worker, organization, "'lead.created', 'lead', NULL, '{}', %s", [Jsonb(metadata)])
    fits = {name: value[:-1] for name, value in metadata.items() if len(value) > 6}
    with worker.transaction(force_rollback=True):
        emit(worker, organization, metadata=json.dumps(fits))


def test_what_is_too_large_is_refused_at_the_byte(worker, organization):
    overhead = len('{"text": ""}')
    emit(worker, organization, payload=json.dumps({"text": "x" * (262_144 - overhead)}))
    refused_both_ways(
        "AF005",
        worker,
        organization,
        "'lead.created', 'lead', NULL, %s",
        [json.dumps({"text": "x" * (262_145 - overhead)})],
    )
    refused_both_ways(
        "AF005",
        worker,
        organization,
        "'lead.created', 'lead', NULL, %s",
        ['{"few bytes": 1e131071, "much text": 1e131071, "a": 1}'],
    )
    refused_both_ways(
        "AF005", worker, organization, "'lead.created', 'lead', NULL, '{}', %s", [json.dumps({"x": "x" * 16_384})]
    )


def test_an_unknown_organization_is_refused(worker):
    unknown = uuid.uuid4()
    refused_both_ways("AF007", worker, unknown, "'lead.created', 'lead', NULL")
    refused(
        "AF007",
        worker,
        "SELECT emit_event_for(%s, 'lead.created', 'lead', NULL, '{}', '{\"idempotency_key\": \"k\"}')",
        [unknown],
    )
    refused(
        "AF007",
        worker,
        "SELECT emit_event_for(%s, 'lead.created', 'lead', NULL, '{}', '{}', now() + interval '1 day')",
        [unknown],
    )


@pytest.mark.parametrize("text", ["\\u0000", "\\ud800", "\\udc00\\ud800"], ids=["nul", "lone_surrogate", "wrong_order"])
def test_text_that_postgres_cannot_keep_is_refused(refusing, text):
    worker, organization = refusing
    with pytest.raises((errors.UntranslatableCharacter, errors.InvalidTextRepresentation)):
        emit(worker, organization, payload='{"text": "a' + text + '"}')


def test_nothing_may_change_or_leave_but_by_erasure_and_restamping(owner, worker, organization):
    emit(worker, organization)
    refused("42501", worker, "UPDATE event_log SET payload = '{}'")
    refused("42501", worker, "DELETE FROM event_log")
    refused("AF009", owner, "UPDATE event_log SET payload = '{\"x\": 1}'")
    refused("AF009", owner, "DELETE FROM event_log")
    refused("AF009", owner, "TRUNCATE event_log")
    with owner.transaction():
        owner.execute("SET LOCAL afluente.rewrite = 'erasure'")
        assert owner.execute("UPDATE event_log SET payload = '{\"erased\": true}'").rowcount == 1
    refused("AF009", owner, "UPDATE event_log SET payload = '{}'")


# -------------------- one key, one event


def test_32_emitters_with_one_key_get_one_event(database, organization, owner):
    barrier = threading.Barrier(32)
    outcomes = []

    def run(number):
        with postgres.connect(database.url) as conn:
            barrier.wait(30)
            found = emit(conn, organization, payload='{"n": 1}', metadata='{"idempotency_key": "once"}')
            conn.commit()
            outcomes.append(found)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(outcomes) == 32
    assert set(outcomes) == {owner.execute("SELECT id FROM event_log").fetchone()[0]}
    assert count(owner) == count(owner, "event_idempotency") == 1


def test_a_second_emitter_waits_and_takes_over_when_the_first_rolls_back(database, organization, owner):
    first = database.connect()
    given_up = emit(first, organization, metadata='{"idempotency_key": "k"}')
    found = []

    def second():
        with postgres.connect(database.url) as conn:
            found.append(emit(conn, organization, metadata='{"idempotency_key": "k"}'))

    thread = threading.Thread(target=second)
    thread.start()
    _wait_until(owner, "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)")
    assert found == []
    first.rollback()
    thread.join(30)
    assert found == [owner.execute("SELECT id FROM event_log").fetchone()[0]]
    assert found != [given_up]


@pytest.mark.parametrize(
    "change",
    [{"payload": '{"n": 2}'}, {"event_type": "lead.updated"}, {"kind": "deal"}, {"entity": uuid.uuid4()}],
    ids=lambda change: next(iter(change)),
)
def test_a_key_for_another_content_is_refused(worker, organization, change):
    first = emit(worker, organization, payload='{"n": 1}', metadata='{"idempotency_key": "k"}')
    with pytest.raises(psycopg.Error, match=str(first)) as caught:
        emit(worker, organization, **({"payload": '{"n": 1}'} | change), metadata='{"idempotency_key": "k"}')
    assert caught.value.sqlstate == "AF006"
    # the order of keys and the metadata are not content
    assert (
        emit(worker, organization, payload='{"n":  1}', metadata='{"idempotency_key": "k", "request_id": "r"}') == first
    )
    assert count(worker) == 1


def test_a_key_belongs_to_its_organization(database, worker, organization):
    other = database.organization("Theirs")
    keys = '{"idempotency_key": "k"}'
    assert emit(worker, organization, metadata=keys) != emit(worker, other, metadata=keys)


def test_keys_are_kept_for_the_days_asked(worker, owner, organization):
    old = emit(worker, organization, metadata='{"idempotency_key": "old"}')
    new = emit(worker, organization, metadata='{"idempotency_key": "new"}')
    waits = emit(
        worker, organization, metadata='{"idempotency_key": "waits"}', at=datetime.now(UTC) + timedelta(days=90)
    )
    owner.execute("UPDATE event_idempotency SET created_at = created_at - interval '31 days' WHERE key <> 'new'")
    assert worker.execute("SELECT afluente.purge_idempotency('32 days')").fetchone() == (0,)
    assert worker.execute("SELECT afluente.purge_idempotency('30 days')").fetchone() == (1,)
    assert emit(worker, organization, metadata='{"idempotency_key": "new"}') == new
    assert emit(worker, organization, metadata='{"idempotency_key": "waits"}') == waits
    assert emit(worker, organization, metadata='{"idempotency_key": "old"}') != old


# -------------------- deferral


def test_a_deferred_event_waits_under_its_id_and_is_released_when_due(worker, organization):
    due = datetime.now(UTC) + timedelta(hours=2)
    event_id = emit(worker, organization, payload='{"n": 1}', metadata='{"request_id": "r"}', at=due)
    assert count(worker) == 0
    assert worker.execute("SELECT release_due_deferred(10)").fetchone() == (0,)
    assert worker.execute("SELECT release_due_deferred(10, %s)", [due]).fetchone() == (1,)
    found, metadata, created_at, request_id = worker.execute(
        "SELECT id, metadata, created_at, request_id FROM event_log"
    ).fetchone()
    assert (found, request_id, count(worker, "deferred_event")) == (event_id, "r", 0)
    assert metadata["emitted_at"] < created_at.timestamp() <= time.time()


def test_a_time_that_has_passed_defers_nothing(worker, organization):
    emit(worker, organization, at=datetime.now(UTC) - timedelta(seconds=1))
    assert (count(worker), count(worker, "deferred_event")) == (1, 0)


def test_due_events_are_released_in_the_order_of_their_times_a_few_at_a_time(worker, organization):
    start = datetime.now(UTC) + timedelta(hours=1)
    ids = [emit(worker, organization, at=start + timedelta(seconds=n)) for n in (3, 1, 2, 0)]
    assert worker.execute("SELECT release_due_deferred(3, %s)", [start + timedelta(hours=1)]).fetchone() == (3,)
    assert worker.execute("SELECT id FROM event_log ORDER BY seq").fetchall() == [(ids[3],), (ids[1],), (ids[2],)]
    assert worker.execute("SELECT release_due_deferred(3, %s)", [start + timedelta(hours=1)]).fetchone() == (1,)


def test_two_releasers_share_the_work(database, worker, organization):
    due = datetime.now(UTC) + timedelta(hours=1)
    for _ in range(10):
        emit(worker, organization, at=due)
    first, second = database.connect(), database.connect()
    assert first.execute("SELECT release_due_deferred(4, %s)", [due]).fetchone() == (4,)
    assert second.execute("SELECT release_due_deferred(100, %s)", [due]).fetchone() == (6,)
    first.rollback()
    second.commit()
    assert worker.execute("SELECT release_due_deferred(100, %s)", [due]).fetchone() == (4,)
    assert worker.execute("SELECT count(DISTINCT id), count(*) FROM event_log").fetchone() == (10, 10)


def test_a_cancelled_event_never_comes_and_frees_its_key(database, worker, organization):
    due = datetime.now(UTC) + timedelta(hours=1)
    key = '{"idempotency_key": "k"}'
    event_id = emit(worker, organization, metadata=key, at=due)
    assert emit(worker, organization, metadata=key, at=due) == event_id
    foreign = as_app(database, database.organization("Theirs"))
    assert foreign.execute("SELECT cancel_deferred(%s)", [event_id]).fetchone() == (False,)
    app = as_app(database, organization)
    assert app.execute("SELECT cancel_deferred(%s)", [event_id]).fetchone() == (True,)
    assert app.execute("SELECT cancel_deferred(%s)", [event_id]).fetchone() == (False,)
    assert worker.execute("SELECT release_due_deferred(10, %s)", [due]).fetchone() == (0,)
    assert emit(worker, organization, metadata=key) != event_id


def test_a_released_event_cannot_be_cancelled(database, worker, organization):
    due = datetime.now(UTC) + timedelta(hours=1)
    event_id = emit(worker, organization, at=due)
    worker.execute("SELECT release_due_deferred(10, %s)", [due])
    assert worker.execute("SELECT cancel_deferred_for(%s, %s)", [organization, event_id]).fetchone() == (False,)


# -------------------- what it costs


def test_an_emission_costs_little_more_than_its_insert(owner, organization):
    """In the server's own CPU time for the same rows; the least of several runs, since others use the machine."""
    insert = """
        INSERT INTO public.event_log (organization_id, event_type, entity_kind, entity_id, payload, metadata)
        VALUES (_o, 'lead.updated', 'lead', uuidv7(), _p,
                _m || jsonb_build_object('emitted_at', extract(epoch FROM now())))
        RETURNING id INTO _id"""
    call = "_id := public.emit_event_for(_o, 'lead.updated', 'lead', uuidv7(), _p, _m)"
    payload = json.dumps({f"field{n}": "value " * 4 for n in range(10)})
    metadata = '{"request_id": "r-1", "source": "api", "trace_id": "t-1"}'
    pid = owner.info.backend_pid

    def cost(statement):
        before = _cpu_seconds(pid)
        owner.execute(
            f"DO $do$ DECLARE _o uuid := '{organization}'; _p jsonb := '{payload}'; _m jsonb := '{metadata}'; _id uuid;"
            f" BEGIN FOR _n IN 1 .. 2000 LOOP {statement}; END LOOP; END $do$"
        )
        return (_cpu_seconds(pid) - before) / 2000 * 1e6

    runs = [(cost(insert), cost(call)) for _ in range(5)]
    plain, emitted = (min(run[n] for run in runs) for n in (0, 1))
    # A bound against a slip (a NOTIFY, a sub-transaction, a scan), not the figure; the figure is in the commit.
    assert emitted < plain * 2, f"insert {plain:.0f} us, emit_event_for {emitted:.0f} us of {runs}"


def _cpu_seconds(pid):
    with open(f"/proc/{pid}/schedstat") as file:
        return int(file.read().split()[0]) / 1e9


def _wait_until(conn, question, timeout="30s"):
    """Let the server wait for the answer to become true, and fail when it does not."""
    conn.execute(
        f"""
        DO $$
        DECLARE _deadline timestamptz := clock_timestamp() + interval '{timeout}';
        BEGIN
            WHILE NOT ({question}) LOOP
                IF clock_timestamp() > _deadline THEN RAISE 'not within {timeout}'; END IF;
                PERFORM pg_sleep(0.05);
            END LOOP;
        END;
        $$
        """
    )


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT emit_event_for(%s, 'x.y', 'x', NULL, %s::jsonb, '{}', NULL)",
        "SELECT emit_event('x.y', 'x', NULL, %s::jsonb) FROM set_config('app.organization_id', %s::text, false)",
    ],
)
def test_a_payload_nested_deeper_than_any_reader_is_refused(database, statement):
    organization = database.organization()

    def emit(levels):
        payload = '{"a":' + "[" * (levels - 1) + "]" * (levels - 1) + "}"
        parameters = [organization, payload] if "_for" in statement else [payload, organization]
        return database.execute(statement, parameters, role=postgres.WORKER_ROLE)

    assert emit(200)
    with pytest.raises(psycopg.Error, match="nested deeper") as error:
        emit(250)
    assert error.value.sqlstate == "AF004"
