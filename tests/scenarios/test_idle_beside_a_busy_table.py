"""S2: the relay idles while another table takes all the writes, and is then down for as many. No WAL is kept for it."""

import threading

import psycopg
import pytest

from tests.fixtures.postgres import Database, Server
from tests.producers.relay.oracle import Writers, assert_exactly_once_in_order
from tests.producers.relay.running import relay_of

MAX_WAL_MB = 64
PIECE_MB = 10


@pytest.mark.parametrize(
    ("idle_s", "megabytes"),
    [
        pytest.param(0, 70, id="short"),
        pytest.param(600, 1_000, id="long", marks=[pytest.mark.faults_long, pytest.mark.timeout(1_000)]),
    ],
)
def test_no_wal_is_kept_for_a_relay_that_idles_or_is_down(idle_s, megabytes, private_postgres, topics, reader):
    server = Server(private_postgres.url)
    with server.admin() as admin:
        admin.execute(f"ALTER SYSTEM SET max_wal_size = '{MAX_WAL_MB}MB'")
        admin.execute("ALTER SYSTEM SET min_wal_size = '32MB'")
        admin.execute("ALTER SYSTEM SET wal_recycle = off")  # what is not needed is gone, not kept for later
        admin.execute("SELECT pg_reload_conf()")
    database = Database(server, "afluente")
    writers = Writers(database)
    with psycopg.connect(database.url, autocommit=True) as busy:
        busy.execute("CREATE TABLE busy (text text)")
        with relay_of(topics, database):
            writers.commit(3)
            reader.wait_for(3)
            write_beside(busy, megabytes, idle_s)
            held = busy.execute(
                "SELECT application_name, state FROM pg_stat_activity"
                " WHERE application_name LIKE 'afluente%' AND state LIKE 'idle in transaction%'"
            ).fetchall()
            assert held == [], "a transaction of the relay holds back VACUUM"
            nothing_is_kept(busy)
            writers.commit(3, writers.organizations[1])
            reader.wait_for(6)
        writers.commit(2, writers.organizations[2])
        write_beside(busy, megabytes, 0)
        nothing_is_kept(busy)
    with relay_of(topics, database):
        reader.wait_for(8)
    assert_exactly_once_in_order(database, reader.read_to_the_end())
    database.close()


def write_beside(conn, megabytes, spread_over_s):
    pieces = megabytes // PIECE_MB
    pace = threading.Event()
    for _ in range(pieces):
        # rows too small to be compressed
        conn.execute("INSERT INTO busy SELECT repeat(md5(n::text), 60) FROM generate_series(1, %s) n", [PIECE_MB * 500])
        conn.execute("TRUNCATE busy")
        pace.wait(spread_over_s / pieces)


def nothing_is_kept(conn):
    conn.execute("CHECKPOINT")
    conn.execute("CHECKPOINT")  # the first one is kept for recovery
    assert conn.execute("SELECT * FROM pg_replication_slots").fetchall() == []
    ((kept,),) = conn.execute("SELECT sum(size) / 1048576 FROM pg_ls_waldir()").fetchall()
    assert kept <= MAX_WAL_MB, f"{kept} MB of WAL"
