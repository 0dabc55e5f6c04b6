"""Connections have their role from the start; acting for an organization ends with its block."""

import psycopg
import pytest

from afluente import postgres

WHO = "SELECT current_user::text, coalesce(current_setting('app.organization_id', true), '')"


def test_a_connection_is_the_worker_and_says_who_it_is(database):
    conn = database.connect()
    assert conn.execute(WHO).fetchone() == ("afluente_worker", "")
    assert conn.info.parameter_status("application_name") == "test"
    assert database.connect(role=None).execute("SELECT current_user = session_user").fetchone() == (True,)


def test_options_of_the_url_are_kept(database):
    with postgres.connect(f"{database.url}?options=-c%20statement_timeout%3D7s") as conn:
        assert conn.execute("SELECT current_setting('statement_timeout'), current_user::text").fetchone() == (
            "7s",
            "afluente_worker",
        )


def test_acting_for_an_organization_is_undone_at_the_end(database):
    first, second = database.organization("a"), database.organization("b")
    conn = database.connect()
    with postgres.act_for_sync(conn, first):
        assert conn.execute(WHO).fetchone() == ("afluente_app", str(first))
        with postgres.act_for_sync(conn, second):
            assert conn.execute(WHO).fetchone() == ("afluente_app", str(second))
        assert conn.execute(WHO).fetchone() == ("afluente_app", str(first))
    assert conn.execute(WHO).fetchone() == ("afluente_worker", "")


def test_an_error_inside_a_savepoint_leaves_the_outer_role(database):
    organization = database.organization()
    conn = database.connect()
    with postgres.act_for_sync(conn, organization):
        with pytest.raises(psycopg.errors.DivisionByZero), conn.transaction():
            conn.execute("SELECT 1 / 0")
        assert conn.execute(WHO).fetchone() == ("afluente_app", str(organization))
    assert conn.execute(WHO).fetchone() == ("afluente_worker", "")


def test_an_error_that_aborts_the_transaction_is_the_one_that_is_seen(database):
    conn = database.connect()
    with pytest.raises(psycopg.errors.DivisionByZero), postgres.act_for_sync(conn, database.organization()):
        conn.execute("SELECT 1 / 0")
    conn.rollback()
    assert conn.execute(WHO).fetchone() == ("afluente_worker", "")


def test_acting_outside_a_transaction_is_refused(database):
    conn = database.connect(autocommit=True)
    with pytest.raises(RuntimeError, match="transaction"), postgres.act_for_sync(conn, database.organization()):
        pass
    with conn.transaction(), postgres.act_for_sync(conn, database.organization()):
        assert conn.execute("SELECT current_user::text").fetchone() == ("afluente_app",)


def test_an_organization_is_a_uuid_or_nothing_is_done(database):
    conn = database.connect()
    with pytest.raises(ValueError, match="badly formed"), postgres.act_for_sync(conn, "'; DROP TABLE x; --"):
        pass


async def test_the_same_for_asyncio(database):
    organization = database.organization()
    async with await database.connect_async() as conn:
        async with postgres.act_for(conn, organization):
            assert await (await conn.execute(WHO)).fetchone() == ("afluente_app", str(organization))
        assert await (await conn.execute(WHO)).fetchone() == ("afluente_worker", "")


async def test_a_pool_hands_out_working_connections_after_the_server_dropped_them(database):
    async with postgres.pool_async(database.url, min_size=2, max_size=2, application_name="pool") as pool:
        async with pool.connection() as conn:
            assert await (await conn.execute(WHO)).fetchone() == ("afluente_worker", "")
        database.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = 'pool' AND datname = current_database()"
        )
        for _ in range(3):
            async with pool.connection() as conn:
                await conn.execute("SELECT 1")
