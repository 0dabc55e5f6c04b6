"""The runner on a real server: every step down and up again, two at once, killed in the middle, an edited file."""

import threading

import psycopg
import pytest

import sql
from sql import Migration, migrate
from tests.sql.catalogue import catalogue, difference


@pytest.fixture
def conn(empty_database):
    return empty_database.connect(role=None, autocommit=True)


def labels():
    return [migration.label for migration in sql.migrations()]


def test_every_step_down_and_up_again_ends_in_the_same_catalogue(conn):
    empty = catalogue(conn)
    after = [empty]
    for migration in sql.migrations():
        assert migrate.up(conn, to=migration.version) == [migration.label]
        after.append(catalogue(conn))
    for step, migration in reversed(list(enumerate(sql.migrations(), 1))):
        assert migrate.down(conn) == [migration.label]
        assert difference(after[step - 1], catalogue(conn)) == [], f"{migration.label} leaves something behind"
        assert migrate.up(conn, to=migration.version) == [migration.label]
        assert difference(after[step], catalogue(conn)) == [], f"{migration.label} up again is not what it was"
        migrate.down(conn)
    assert difference(empty, catalogue(conn)) == []
    assert migrate.up(conn) == labels()
    assert difference(after[-1], catalogue(conn)) == []
    assert migrate.down(conn, len(labels())) == labels()[::-1]
    assert difference(empty, catalogue(conn)) == []
    assert conn.execute("SELECT to_regnamespace('migration')").fetchone() == (None,)


def test_up_twice_does_nothing_the_second_time(conn):
    migrate.up(conn)
    before = catalogue(conn)
    assert migrate.up(conn) == []
    assert difference(before, catalogue(conn)) == []
    assert {state.state for state in migrate.status(conn)} == {"applied"}


def test_two_runs_at_once_share_the_work(empty_database):
    outcomes = []

    def run():
        outcomes.append(migrate.up(empty_database.connect(role=None, autocommit=True)))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(outcomes) == [[], labels()]


def test_databases_that_migrate_at_once_share_the_roles(postgres):
    from tests.fixtures.postgres import clone

    failures = []

    def run():
        with clone(postgres, "template0", prefix="afluente_empty") as database:
            try:
                conn = database.connect(role=None, autocommit=True)
                migrate.up(conn, to=1)
                migrate.down(conn)
                migrate.up(conn, to=1)
            except psycopg.Error as error:
                failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []


def test_a_run_killed_in_the_middle_of_a_file_is_finished_by_the_next(empty_database, conn, processes):
    migrate.up(conn, to=2)
    blocker = empty_database.connect(role=None)
    blocker.execute("LOCK TABLE organizations IN ACCESS EXCLUSIVE MODE")  # 0003 makes a foreign key to it
    process = processes.start("migrate", "up", env={"DATABASE_URL": empty_database.url})
    _wait_until(conn, "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND relation = 'organizations'::regclass)")
    process.kill()
    blocker.rollback()
    # The killed run's lock goes with its session; what its file had done so far goes with its transaction.
    assert migrate.up(conn) == labels()[2:]
    assert {state.state for state in migrate.status(conn)} == {"applied"}


def test_an_edited_file_is_refused_before_anything_is_changed(database, processes):
    conn = database.connect(role=None, autocommit=True)
    conn.execute("UPDATE migration.history SET checksum = 'of another text' WHERE version = 2")
    conn.execute("DELETE FROM migration.history WHERE version = (SELECT max(version) FROM migration.history)")
    before = catalogue(conn)
    with pytest.raises(migrate.EditedMigrationError, match="0002_organizations"):
        migrate.up(conn)
    assert difference(before, catalogue(conn)) == []
    assert {s.label for s in migrate.status(conn) if s.state == "edited"} == {"0002_organizations"}
    run = processes.run("migrate", "up")
    assert run.returncode == 3
    assert "0002_organizations" in run.stderr


def test_a_migration_that_is_not_known_here_is_not_taken_back(database):
    conn = database.connect(role=None, autocommit=True)
    conn.execute(
        "INSERT INTO migration.history (version, name, checksum, finished) VALUES (9999, 'of_tomorrow', '', true)"
    )
    assert migrate.up(conn) == []
    with pytest.raises(migrate.UnknownMigrationError, match="9999_of_tomorrow"):
        migrate.down(conn)


def test_a_failing_file_leaves_nothing_and_names_its_error(conn, monkeypatch):
    broken = Migration(9001, "broken", "CREATE TABLE half (id int); SELECT 1 / 0;", "")
    _with_extra(monkeypatch, broken)
    with pytest.raises(psycopg.errors.DivisionByZero):
        migrate.up(conn)
    assert conn.execute("SELECT to_regclass('public.half')").fetchone() == (None,)
    assert [s.state for s in migrate.status(conn)][-1] == "pending"
    assert conn.execute("SHOW lock_timeout").fetchone() == ("0",)


def test_a_concurrent_index_is_built_while_another_run_waits(empty_database, conn, monkeypatch):
    index = Migration(
        9001,
        "index",
        "-- no-transaction\nCREATE INDEX CONCURRENTLY organizations_made ON organizations (created_at);\n",
        "-- no-transaction\nDROP INDEX CONCURRENTLY organizations_made;\n",
    )
    _with_extra(monkeypatch, index)
    other = empty_database.connect(role=None, autocommit=True)
    waiting = threading.Thread(target=migrate.up, args=(other,))
    held = empty_database.connect(role=None, autocommit=True)
    held.execute("SELECT pg_advisory_lock(%s)", [migrate._LOCK_KEY])
    first = threading.Thread(target=migrate.up, args=(conn,))
    first.start()
    waiting.start()
    held.execute("SELECT pg_advisory_unlock(%s)", [migrate._LOCK_KEY])
    first.join(60)
    waiting.join(60)
    assert held.execute(
        "SELECT indisvalid FROM pg_index WHERE indexrelid = 'organizations_made'::regclass"
    ).fetchone() == (True,)
    assert migrate.down(held) == ["9001_index"]
    assert held.execute("SELECT to_regclass('organizations_made')").fetchone() == (None,)


def test_an_index_that_a_killed_run_left_invalid_is_built_again(conn, monkeypatch):
    index = Migration(
        9001,
        "index",
        "-- no-transaction\nCREATE INDEX CONCURRENTLY organizations_made ON organizations (created_at);",
        "",
    )
    migrate.up(conn)
    _with_extra(monkeypatch, index)
    # What a SIGKILL between the two phases of CREATE INDEX CONCURRENTLY leaves.
    conn.execute("CREATE INDEX organizations_made ON organizations (created_at)")
    conn.execute("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'organizations_made'::regclass")
    conn.execute("INSERT INTO migration.history (version, name, checksum, finished) VALUES (9001, 'index', '', false)")
    assert [s.state for s in migrate.status(conn)][-1] == "unfinished"
    assert migrate.up(conn) == ["9001_index"]
    assert conn.execute(
        "SELECT indisvalid FROM pg_index WHERE indexrelid = 'organizations_made'::regclass"
    ).fetchone() == (True,)


def test_functions_are_put_back_at_every_run(database):
    conn = database.connect(role=None, autocommit=True)
    before = catalogue(conn)
    conn.execute("SET search_path = public")
    conn.execute(
        "CREATE OR REPLACE FUNCTION cancel_deferred(id uuid) RETURNS boolean LANGUAGE sql AS $$ SELECT true $$"
    )
    assert difference(before, catalogue(conn)) != []
    migrate.up(conn)
    assert difference(before, catalogue(conn)) == []


def test_a_login_that_is_no_superuser_can_own_the_database(postgres, empty_database):
    from psycopg import sql as pgsql
    from psycopg.conninfo import make_conninfo

    login = f"owner_{empty_database.name[-12:]}"
    with postgres.admin() as admin:
        # the server may ask every login for its password
        create = pgsql.SQL("CREATE ROLE {} LOGIN CREATEROLE PASSWORD {}")
        admin.execute(create.format(pgsql.Identifier(login), pgsql.Literal(login)))
        admin.execute(
            pgsql.SQL("GRANT afluente_app, afluente_worker, afluente_admin TO {} WITH ADMIN TRUE").format(
                pgsql.Identifier(login)
            )
        )
        admin.execute(
            pgsql.SQL("ALTER DATABASE {} OWNER TO {}").format(
                pgsql.Identifier(empty_database.name), pgsql.Identifier(login)
            )
        )
    try:
        with psycopg.connect(make_conninfo(empty_database.url, user=login, password=login), autocommit=True) as conn:
            assert migrate.up(conn) == labels()
            organization = conn.execute("INSERT INTO organizations (name) VALUES ('A') RETURNING id").fetchone()[0]
            conn.execute("SET ROLE afluente_app")
            conn.execute("SELECT set_config('app.organization_id', %s, false)", [str(organization)])
            conn.execute("SELECT emit_event('lead.created', 'lead', NULL)")
            assert conn.execute("SELECT count(*) FROM event_log").fetchone() == (1,)
            conn.execute("RESET ROLE")
            assert migrate.down(conn, len(labels())) == labels()[::-1]
    finally:
        with postgres.admin() as admin:
            admin.execute(
                pgsql.SQL("ALTER DATABASE {} OWNER TO CURRENT_USER").format(pgsql.Identifier(empty_database.name))
            )
            admin.execute(pgsql.SQL("DROP ROLE {}").format(pgsql.Identifier(login)))


def _with_extra(monkeypatch, extra):
    known = (*sql.migrations(), extra)
    monkeypatch.setattr(migrate, "migrations", lambda: known)


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
