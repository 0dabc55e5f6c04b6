"""Transaction ids given out again after a crash of Postgres, read at the level of windows; and what else needs a
server of one's own.

With wal_writer_delay at 10 s an aborted transaction's id is not on disk: kill the server, and the next ones get it. A
snapshot taken before the crash counts it as ended, so a reader that trusts ids alone loses their rows. Every story
counts how many ids came again, and fails when none did.
"""

import threading
import uuid

import pytest

from afluente import local
from producers.relay.errors import OnStandby
from producers.relay.lease import Lease
from producers.relay.position import DatabaseIdentity, Entry, Identity, KafkaIdentity, Position
from producers.relay.source import Source
from tests.fixtures.postgres import Database, Server, migrate
from tests.producers.relay.oracle import Writers

IDENTITY = Identity(DatabaseIdentity("1", 1, 1, "x"), KafkaIdentity("x", {}))
ABORTED = 60


class CrashingServer:
    def __init__(self, folder):
        self.postgres = local.start_postgres(folder)
        self.server = Server(self.postgres.url)
        with self.server.admin() as admin:
            admin.execute("ALTER SYSTEM SET wal_writer_delay = '10s'")
            admin.execute("ALTER SYSTEM SET autovacuum = off")  # its own transactions would flush what is to be lost
            admin.execute("SELECT pg_reload_conf()")

    def database(self):
        name = f"crash_{uuid.uuid4().hex[:8]}"
        with self.server.admin() as admin:
            admin.execute(f"CREATE DATABASE {name}")
        migrate(self.server.url_of(name))
        return Database(self.server, name)

    def abort_unflushed(self, database):
        """Take ids and give them up, the last thing before the crash. Returns them."""
        with database.connect() as conn:
            ids = []
            for _ in range(ABORTED):
                ids.append(int(conn.execute("SELECT pg_current_xact_id()::text").fetchone()[0]))
                conn.rollback()
        return ids

    def crash(self):
        self.postgres.kill()
        self.postgres = local.start_postgres(self.postgres.folder)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = CrashingServer(tmp_path_factory.mktemp("crashing"))
    yield server
    server.postgres.remove()


@pytest.fixture
def database(server):
    database = server.database()
    yield database
    database.close()


class Following:
    """A reader that keeps nothing but the text of its position between two chunks."""

    def __init__(self, database):
        self.database = database
        self.ids = []
        self.versions = {}
        self._text = Position(IDENTITY, (Entry(),)).format()

    @property
    def entry(self):
        return Position.parse(self._text).entries[0]

    def chunk(self, rows=5):
        source = Source(self.database.url)
        try:
            chunk = source.chunk(self.entry, rows=rows)
        finally:
            source.close()
        self.ids += [row.row().id for row in chunk.rows]
        self._text = Position(IDENTITY, (chunk.after,)).format()
        return chunk

    def to_the_end(self):
        while True:
            within = self.entry.window is not None
            if not self.chunk().rows and not within:
                return

    def check(self):
        """Everything committed was read, once, and each organization in the order of its versions."""
        table = {
            row[0]: (row[1], row[2])
            for row in self.database.execute(
                "SELECT id, organization_id, (payload ->> 'version')::bigint FROM event_log"
            )
        }
        assert len(self.ids) == len(set(self.ids)), "a row was read twice"
        assert set(self.ids) == set(table), f"{len(set(table) - set(self.ids))} of {len(table)} rows lost"
        seen: dict[uuid.UUID, int] = {}
        for event_id in self.ids:
            organization, version = table[event_id]
            assert version == seen.get(organization, 0) + 1, "a row came before one its writer had seen"
            seen[organization] = version


def given_out_again(database, ids):
    """How many of these transaction ids have rows now."""
    rows = database.execute(
        "SELECT count(DISTINCT tx_id) FROM event_log WHERE tx_id::text = ANY(%s)", [[*map(str, ids)]]
    )
    return rows[0][0]


def test_ids_given_out_again_between_windows_lose_nothing(server, database):
    writers, reader = Writers(database), Following(database)
    for _ in range(10):
        writers.commit(2)
    reader.to_the_end()
    aborted = server.abort_unflushed(database)
    reader.to_the_end()  # now the position counts the aborted ids as ended
    assert reader.entry.s1.xmax > aborted[-1]
    server.crash()
    for number in range(30):
        writers.commit(1, writers.organizations[number % 4])
    reader.to_the_end()
    assert given_out_again(database, aborted) > 0
    reader.check()


def test_ids_given_out_again_inside_a_window_lose_nothing_when_the_lower_seq_ends_last(server, database):
    writers, reader = Writers(database), Following(database)
    writers.commit(10)
    reader.to_the_end()
    for number in range(12):
        writers.commit(1, writers.organizations[number % 2])
    aborted = server.abort_unflushed(database)
    reader.chunk(5)  # the window is open, and its upper snapshot counts the aborted ids as ended
    assert reader.entry.window is not None
    assert reader.entry.window.s2.xmax > aborted[-1]
    server.crash()
    first, second = database.connect(), database.connect()
    writers.emit(first, writers.organizations[2])
    writers.emit(second, writers.organizations[3])
    second.commit()
    reader.chunk(5)
    reader.chunk(5)
    first.commit()
    reader.to_the_end()
    assert given_out_again(database, aborted) == 2
    reader.check()


def test_a_row_in_an_id_given_out_again_does_not_overtake_what_its_writer_had_seen(server, database):
    """One organization, first in an id above the aborted ones, then in one that came again and saw the first."""
    writers, reader = Writers(database), Following(database)
    writers.commit(10)
    reader.to_the_end()
    for _ in range(12):
        writers.commit(1, writers.organizations[1])
    aborted = server.abort_unflushed(database)
    reader.chunk(5)
    server.crash()
    again = database.connect()
    again.execute("SELECT pg_current_xact_id()")  # an id that came again, kept for later
    burnt = server.abort_unflushed(database)
    assert burnt[-1] > aborted[-1]
    writers.commit(1, writers.organizations[1])  # in a new id
    writers.emit(again, writers.organizations[1])  # after seeing that row
    again.commit()
    reader.chunk(5)
    reader.to_the_end()
    assert given_out_again(database, aborted) == 1
    reader.check()


@pytest.mark.faults_long
def test_windows_resumed_at_every_chunk_survive_crash_after_crash(server, database):
    writers, reader = Writers(database), Following(database)
    aborted = []
    for round_number in range(3):
        held = database.connect()
        writers.emit(held, writers.organizations[3], 3)
        for number in range(12):
            writers.commit(2, writers.organizations[number % 3])
        reader.chunk(7)
        aborted += server.abort_unflushed(database)
        reader.chunk(1 + round_number)
        held.close()  # rolled back; the crash does it in any case
        server.crash()
    writers.commit(5)
    reader.to_the_end()
    assert given_out_again(database, aborted) > 0
    reader.check()


def test_a_prepared_transaction_is_not_waited_for_here_or_in_another_database(server, database):
    writers, reader, other = Writers(database), Following(database), server.database()
    for place, name in ((other, "elsewhere"), (database, "here")):
        with place.connect(role=None, autocommit=True) as conn:
            conn.execute("BEGIN")
            conn.execute("SELECT pg_current_xact_id()")
            if place is database:
                writers.emit(conn, writers.organizations[1])
            conn.execute(f"PREPARE TRANSACTION '{name}'")
    writers.commit(7)
    reader.to_the_end()
    assert len(reader.ids) == 7
    with database.connect(role=None, autocommit=True) as conn:
        conn.execute("COMMIT PREPARED 'here'")
    reader.to_the_end()
    assert len(reader.ids) == 8
    reader.check()
    with other.connect(role=None, autocommit=True) as conn:
        conn.execute("ROLLBACK PREPARED 'elsewhere'")
    other.close()


def test_a_standby_is_refused(tmp_path):
    """A server in recovery: its snapshots do not list what runs on the primary."""
    postgres = local.start_postgres(tmp_path / "standby", durable=False)
    try:
        migrate(postgres.url)
        postgres.stop()
        (postgres.folder / "data" / "standby.signal").touch()
        postgres = local.start_postgres(postgres.folder, durable=False)
        source = Source(postgres.url)
        with pytest.raises(OnStandby):
            source.facts()
        source.close()
        lease = Lease(postgres.url, "relay-1-0", "me")
        with pytest.raises(OnStandby):
            lease.acquire(threading.Event())
        lease.release()
    finally:
        postgres.remove()


def test_facts_name_the_server_and_its_sequence_and_outlive_a_crash(server, database):
    Writers(database).commit(3)
    facts = []
    for _ in range(2):
        source = Source(database.url)
        facts.append(source.facts())
        source.close()
        server.crash()
    assert facts[0].identity == facts[1].identity
    assert (facts[0].identity.name, facts[0].identity.timeline) == (database.name, 1)
    assert facts[0].last_seq == 3
    assert facts[1].last_seq >= 3
