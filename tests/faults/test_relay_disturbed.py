"""What people and other programs do to the servers under a running relay: it goes on by itself, or says why not, and in
either case a read_committed consumer sees every row once and in order."""

import threading

import pytest
from confluent_kafka.admin import NewPartitions
from psycopg import sql as pgsql

from afluente import kafka as clients
from producers.relay import service
from producers.relay.errors import PositionRefused
from tests.producers.relay.conftest import reader, writers
from tests.producers.relay.oracle import assert_exactly_once_in_order
from tests.producers.relay.running import relay_of

__all__ = ["reader", "writers"]

TERMINATE = (
    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
    " WHERE application_name LIKE 'afluente-relay%' AND datname = current_database()"
)


@pytest.mark.faults_long
def test_connections_killed_again_and_again_cost_nothing_but_time(database, topics, writers, reader):
    """An impatient administrator, a proxy, an idle_session_timeout: whatever the relay is doing at that moment."""
    storm = threading.Thread(target=writers.storm, args=(600,), kwargs={"threads": 3, "seed": 5})
    killed, waiting = 0, threading.Event()
    with relay_of(topics, database, chunk_rows=10) as thread:
        storm.start()
        while killed < 10:
            killed += database.execute(TERMINATE)[0][0]
            waiting.wait(0.02 * (killed % 7))  # from while it connects to while it publishes
        storm.join()
        reader.wait_for(600)
        assert thread.is_alive()
    assert_exactly_once_in_order(database, reader.read_to_the_end())


def test_a_session_that_may_not_idle_and_statements_that_may_not_last(database, topics, writers, reader):
    database.execute(
        pgsql.SQL(
            "ALTER DATABASE {0} SET idle_session_timeout = '300ms'; ALTER DATABASE {0} SET statement_timeout = '250ms'"
        ).format(pgsql.Identifier(database.name))
    )
    with relay_of(topics, database) as thread:
        for number in range(4):
            writers.commit(5, writers.organizations[number])
            reader.wait_for(5 * (number + 1))
            threading.Event().wait(0.4)
        assert thread.is_alive()
    assert_exactly_once_in_order(database, reader.read_to_the_end())


MAINTENANCE = (
    "VACUUM (FULL) event_log",
    "REINDEX TABLE event_log",
    "REINDEX TABLE CONCURRENTLY event_log",
    "CLUSTER public.{partition} USING {partition}_pkey",
    "VACUUM (FREEZE) event_log",
    "ANALYZE event_log",
)


@pytest.mark.faults_long
def test_maintenance_moves_rows_and_none_is_missed_or_repeated(database, topics, writers, reader):
    """Rows get other places and other xmin: the relay asks for neither."""
    conn = database.connect(role=None, autocommit=True)
    partition = conn.execute("SELECT to_char(now() AT TIME ZONE 'UTC', '\"event_log_y\"YYYY\"m\"MM')").fetchone()[0]
    count = 0
    with relay_of(topics, database, chunk_rows=7):
        for statement in MAINTENANCE:
            held = database.connect()
            held.execute("SELECT pg_current_xact_id()")  # an id from before, and rows from after
            writers.commit(30)
            conn.execute(statement.format(partition=partition))
            writers.emit(held, writers.organizations[1], 5)
            held.commit()
            count += 35
        reader.wait_for(count)
    assert_exactly_once_in_order(database, reader.read_to_the_end())


@pytest.mark.faults_long
def test_a_database_renamed_is_the_same_database(database, topics, writers, reader):
    with relay_of(topics, database):
        writers.commit(10)
        reader.wait_for(10)
    name = f"{database.name}_r"
    renamed = pgsql.SQL("ALTER DATABASE {} RENAME TO {}")
    with database.server.admin() as admin:
        admin.execute(renamed.format(pgsql.Identifier(database.name), pgsql.Identifier(name)))
    try:
        moved = type(database)(database.server, name)
        moved.execute("UPDATE public.probe SET version = version")
        with relay_of(topics, moved), moved.connect() as conn:
            writers.emit(conn, writers.organizations[0], 10)
            conn.commit()
            reader.wait_for(20)
        assert_exactly_once_in_order(moved, reader.read_to_the_end())
    finally:
        with database.server.admin() as admin:
            admin.execute(renamed.format(pgsql.Identifier(name), pgsql.Identifier(database.name)))


@pytest.mark.faults_long  # the refusal itself: test_identity
def test_a_sequence_put_back_by_a_person_under_a_running_relay_is_refused_at_the_next_start(
    database, topics, writers, reader
):
    """Their new rows have seqs that the position is past. What is refused is not lost: the sequence is put right."""
    with relay_of(topics, database):
        writers.commit(10)
        reader.wait_for(10)
    database.execute("ALTER TABLE event_log ALTER COLUMN seq RESTART WITH 3")
    writers.commit(2)

    def start():
        with relay_of(topics, database) as thread:
            thread.join(20)

    with pytest.raises(PositionRefused, match="put back to an earlier state"):
        start()
    database.execute("ALTER TABLE event_log ALTER COLUMN seq RESTART WITH 11")
    with relay_of(topics, database):
        writers.commit(2)
        reader.wait_for(14)
    assert_exactly_once_in_order(database, reader.read_to_the_end())


def test_a_topic_that_gets_more_partitions_under_the_relay_gets_every_row_once(
    database, topics, writers, reader, monkeypatch
):
    """By somebody's hand, past the drain plan: keys move to other partitions, so nobody promises their order; but no
    row is lost or twice, and a row of before stays where it is."""
    monkeypatch.setattr(service, "WATCH_EVERY_S", 0.2)
    name = topics.family("custom")
    with relay_of(topics, database) as thread:
        writers.commit(20)
        reader.wait_for(20)
        admin = clients.admin(topics.settings)
        admin.create_partitions([NewPartitions(name, 9)])[name].result(30)
        for number in range(40):
            writers.commit(1, writers.organizations[number % 4])
        ids = [row[0] for row in database.execute("SELECT id FROM event_log")]
        found = []
        deadline = threading.Event()
        for _ in range(200):
            found = topics.records(name)
            if len(found) >= len(ids):
                break
            deadline.wait(0.1)
        assert thread.is_alive()
    assert sorted(dict(record.headers())["ce_id"].decode() for record in found) == sorted(map(str, ids))
    assert {record.partition() for record in found} <= set(range(9))
