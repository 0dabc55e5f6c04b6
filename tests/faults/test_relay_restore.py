"""Servers put back, replaced and upgraded for real: each is refused before the first wrong record, and mended by
`afluente relay reposition`.

The oracle is a plain read_committed consumer: afterwards it has each row of the table exactly once, and beside those
only the events that were listed as published and no longer there.
"""

import json
import os
import shutil
import subprocess
import tempfile
import uuid
from contextlib import closing
from pathlib import Path

import pytest

from afluente import local
from afluente.local.postgres import program
from producers.relay.errors import PositionRefused
from producers.relay.reposition import Case
from tests.fixtures.kafka import Kafka
from tests.fixtures.postgres import Database, Server, migrate
from tests.fixtures.topics import TestTopics
from tests.producers.relay.oracle import Reader, Writers, assert_exactly_once_in_order, event_id_of
from tests.producers.relay.running import relay_of
from tests.producers.relay.test_identity import run_until_it_ends
from tests.producers.relay.test_reposition import counts, ids_in, reposition, writers_of

pytestmark = pytest.mark.timeout(300)

NAME = "crm"
BURN = """
DO $$
BEGIN
    FOR _ IN 1 .. %s LOOP
        PERFORM pg_current_xact_id();
        COMMIT;
    END LOOP;
END;
$$
"""


class Place:
    """A Postgres of one's own: its files can be copied and put back."""

    def __init__(self, folder):
        self.postgres = local.start_postgres(folder, durable=False)
        self.folder = self.postgres.folder

    def create(self):
        with Server(self.postgres.url).admin() as admin:
            admin.execute(f"CREATE DATABASE {NAME}")
        migrate(self.postgres.url_of(NAME))
        return self.database()

    def database(self):
        return Database(Server(self.postgres.url), NAME)

    def start(self):
        self.postgres = local.start_postgres(self.folder, durable=False)

    def burn(self, count):
        """Use up so many transaction ids."""
        with Server(self.postgres.url).admin() as admin:
            admin.execute("SET synchronous_commit = off")
            admin.execute(BURN % count)

    def next_id(self):
        with Server(self.postgres.url).admin() as admin:
            return int(admin.execute("SELECT pg_snapshot_xmax(pg_current_snapshot())::text").fetchone()[0])

    def copy_to(self, copy):
        """Its files as they are, which needs it stopped."""
        self.postgres.stop()
        shutil.copytree((self.folder / "data").resolve(), copy)
        self.start()

    def put_back(self, copy):
        self.postgres.stop()
        data = (self.folder / "data").resolve()
        for entry in data.iterdir():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        shutil.copytree(copy, data, dirs_exist_ok=True)
        _own(data, data.stat())

    def promote(self):
        """Start as a standby that has lost its primary, and become one."""
        signal = (self.folder / "data").resolve() / "standby.signal"
        signal.touch()
        self.start()
        with Server(self.postgres.url).admin() as admin:
            assert admin.execute("SELECT pg_promote()").fetchone() == (True,)


def _own(folder, like):
    """Everything in `folder` belongs to whom the folder belongs to."""
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            os.chown(os.path.join(root, name), like.st_uid, like.st_gid)


@pytest.fixture
def place(tmp_path):
    place = Place(tmp_path / "postgres")
    yield place
    place.postgres.remove()


@pytest.fixture
def reader(topics):
    topics.create_families()
    with closing(Reader(topics)) as reader:
        yield reader


@pytest.fixture
def crm(place):
    database = place.create()
    yield database
    database.close()


def assert_refused(topics, database, match):
    with pytest.raises(PositionRefused, match=match) as refused:
        run_until_it_ends(topics, database)
    assert "afluente relay reposition" in refused.value.hint


def assert_all_there_and_only_lost_beside(database, records, lost):
    ids = [event_id_of(record) for record in records]
    assert len(ids) == len(set(ids)), "an event was published twice"
    assert set(ids) - ids_in(database) == lost
    assert_exactly_once_in_order(database, [record for record in records if event_id_of(record) not in lost])


def run_program(name, *arguments, **options):
    done = subprocess.run(
        [program(name), *map(str, arguments)], capture_output=True, text=True, stdin=subprocess.DEVNULL, **options
    )
    assert done.returncode == 0, f"{name}: {done.stdout[-2000:]} {done.stderr[-2000:]}"


def test_a_dump_restored_into_a_cluster_with_lower_transaction_ids(place, topics, reader, tmp_path):
    """The old ids would come up again weeks later: here they do within seconds, and nothing is published twice."""
    place.burn(20_000)
    crm = place.create()
    writers = Writers(crm)
    with relay_of(topics, crm):
        writers.commit(30)
        reader.wait_for(30)
    writers.commit(5)  # unpublished in the dump
    run_program("pg_dump", "-Fc", "-f", tmp_path / "dump", crm.url)
    with relay_of(topics, crm):
        writers.commit(4, writers.organizations[1])  # published and not in the dump
        reader.wait_for(39)
    crm.close()
    other = Place(tmp_path / "other")
    try:
        with Server(other.postgres.url).admin() as admin:
            admin.execute(f"CREATE DATABASE {NAME}")
            for role in ("app", "worker", "admin"):
                admin.execute(f"CREATE ROLE afluente_{role} NOLOGIN")
        run_program("pg_restore", "--no-owner", "-d", other.postgres.url_of(NAME), tmp_path / "dump")
        restored = other.database()
        highest = max(int(row[0]) for row in restored.execute("SELECT tx_id::text FROM event_log"))
        assert other.next_id() < highest - 10_000
        lost = {event_id_of(record) for record in reader.records} - ids_in(restored)
        assert len(lost) == 4
        again = writers_of(restored)
        again.commit(3, again.organizations[2])
        assert_refused(topics, restored, "the Postgres cluster is another one")

        done = reposition(topics, restored, apply=True, lost_file=tmp_path / "lost")
        assert done.diagnosis.cases[0] == Case.OTHER_POSTGRES
        assert counts(done) == {"published": 35, "to_publish": 3, "assumed": 0, "lost": 4}
        assert done.settled == 35
        listed = {uuid.UUID(json.loads(line)["event_id"]) for line in (tmp_path / "lost").read_text().splitlines()}
        assert listed == lost
        with relay_of(topics, restored):
            again.commit(2, again.organizations[3])
            reader.wait_for(39 + 5)
            while other.next_id() <= highest + 1_000:
                other.burn(2_000)
                again.commit(1, again.organizations[2])
        with relay_of(topics, restored):  # and from the position as it is read back
            again.commit(1, again.organizations[1])
            total = len(ids_in(restored) | lost)
            reader.wait_for(total)
        assert_all_there_and_only_lost_beside(restored, reader.read_to_the_end(), lost)
        restored.close()
    finally:
        other.postgres.remove()


@pytest.mark.faults_long
@pytest.mark.parametrize("overtaken", [False, True])
def test_files_put_back_to_an_earlier_state(place, crm, topics, reader, tmp_path, overtaken):
    """Same server, same timeline; only what was written since is gone. Whether or not new events have taken the
    sequence past the position by the time that a relay looks."""
    writers = Writers(crm)
    with relay_of(topics, crm):
        writers.commit(20)
        reader.wait_for(20)
    crm.close()
    place.copy_to(tmp_path / "copy")
    with relay_of(topics, crm):
        writers.commit(5)
        writers.commit(3, writers.organizations[1])
        reader.wait_for(28)
    before = ids_in(crm)
    crm.close()
    place.put_back(tmp_path / "copy")
    place.start()
    crm = place.database()
    lost = before - ids_in(crm)
    assert len(lost) == 8
    again = writers_of(crm)
    again.commit(40 if overtaken else 2, again.organizations[2])
    assert_refused(topics, crm, "put back|earlier state")

    done = reposition(topics, crm, apply=True)
    assert done.comparison.lost == 8
    with relay_of(topics, crm):
        again.commit(6, again.organizations[3])
        reader.wait_for(28 + (40 if overtaken else 2) + 6)
    assert_all_there_and_only_lost_beside(crm, reader.read_to_the_end(), lost)
    crm.close()


@pytest.mark.faults_long
def test_a_failover_that_lost_commits(place, crm, topics, reader, tmp_path):
    """The standby had not received the last ones. Its transaction ids are given out again, for other rows."""
    writers = Writers(crm)
    with relay_of(topics, crm):
        writers.commit(20)
        reader.wait_for(20)
    writers.commit(4)  # received by the standby, not published
    crm.close()
    place.copy_to(tmp_path / "copy")
    with relay_of(topics, crm):
        for _ in range(5):
            writers.commit(1)
        reader.wait_for(29)
    before = ids_in(crm)
    crm.close()
    place.put_back(tmp_path / "copy")
    place.promote()
    crm = place.database()
    lost = before - ids_in(crm)
    assert len(lost) == 5
    again = writers_of(crm)
    for _ in range(12):
        again.commit(1, again.organizations[1])
    assert_refused(topics, crm, "timeline")

    done = reposition(topics, crm, apply=True)
    assert done.diagnosis.cases[0] == Case.FAILOVER
    assert counts(done) == {"published": 24, "to_publish": 12, "assumed": 0, "lost": 5}
    with relay_of(topics, crm):
        again.commit(3, again.organizations[2])
        reader.wait_for(29 + 15)
    assert_all_there_and_only_lost_beside(crm, reader.read_to_the_end(), lost)
    crm.close()


@pytest.mark.faults_long
def test_pg_upgrade_keeps_everything_but_the_identity(place, crm, topics, reader, tmp_path, processes):
    """With a window open and a transaction in progress in the position. A restored dump is not taken for an upgrade."""
    writers = Writers(crm)
    with crm.connect() as held:
        writers.emit(held, writers.organizations[0])
        writers.commit(30, writers.organizations[1])
        fault = {"AFLUENTE_FAULT": "relay.after_commit:4", "DATABASE_URL": crm.url}
        relay = processes.start("relay", "run", "--chunk-rows", "4", env=fault)
        assert relay.wait() == -9
        held.commit()
    assert len(reader.read_to_the_end()) == 12
    crm.close()
    place.postgres.stop()
    new = local.start_postgres(_with_password(tmp_path / "new", place.postgres.password), durable=False)
    new.stop()
    upgrade(place, new)
    upgraded = Place(new.folder)
    try:
        crm = upgraded.database()
        again = writers_of(crm)
        again.commit(3, again.organizations[2])
        assert_refused(topics, crm, "pg_upgrade")
        seen = reposition(topics, crm)
        assert seen.diagnosis.cases == (Case.OTHER_POSTGRES,)
        assert seen.comparison.lost == 0
        done = reposition(topics, crm, apply=True, pg_upgrade=True)
        assert (done.applied, done.comparison) == (True, None)
        with relay_of(topics, crm):
            again.commit(2, again.organizations[3])
            reader.wait_for(36)
        assert_all_there_and_only_lost_beside(crm, reader.read_to_the_end(), set())
        crm.close()
    finally:
        upgraded.postgres.remove()


def upgrade(old, new):
    """pg_upgrade, from files to files, as the user that they belong to. Its sockets need a folder with a short name."""
    data, binaries = (old.folder / "data").resolve(), program("postgres").parent
    owner = data.stat()
    as_owner = {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []} if os.geteuid() == 0 else {}
    with tempfile.TemporaryDirectory() as scratch:
        os.chown(scratch, owner.st_uid, owner.st_gid)
        run_program(
            "pg_upgrade", "-b", binaries, "-B", binaries, "-U", "postgres", "-s", scratch,
            "-d", data, "-D", (new.folder / "data").resolve(), cwd=scratch,
            env={**os.environ, "PGPASSWORD": old.postgres.password, "LC_ALL": "C.UTF-8", "HOME": "/"}, **as_owner,
        )  # fmt: skip


def _with_password(folder, password):
    folder.mkdir()
    (folder / "password").write_text(password)
    return folder


@pytest.mark.faults_long
def test_a_kafka_cluster_made_anew_and_positions_that_would_expire(private_kafka, database, tmp_path, processes):
    """Its data are gone, its address is the same. `topics apply` mends the topics, `reposition` what is in them."""
    env = {"KAFKA_BOOTSTRAP_SERVERS": private_kafka.bootstrap_servers, "AFLUENTE_TOPIC_PREFIX": ""}
    topics = TestTopics(Kafka(private_kafka.bootstrap_servers), "")
    topics.create_families()
    writers = Writers(database)
    with closing(Reader(topics)) as reader, relay_of(topics, database):
        writers.commit(10)
        reader.wait_for(10)
    private_kafka.stop()
    shutil.rmtree(Path(private_kafka.folder) / "data")
    broker = local.start_kafka(private_kafka.folder)
    assert broker.port == private_kafka.port
    try:
        topics = TestTopics(Kafka(broker.bootstrap_servers), "")
        topics.create_families()
        writers.commit(5)
        assert_refused(topics, database, "published to")
        topics.configure(topics.positions, {"cleanup.policy": "delete"})
        refused = processes.run("relay", "reposition", "--yes", env=env)
        assert refused.returncode == 1
        assert "afluente topics apply" in refused.stderr
        applied = processes.run("topics", "apply", "--worker", "webhook-fetch-worker", "--yes", env=env)
        assert applied.returncode == 0, applied.stderr
        done = processes.run("relay", "reposition", "--yes", "--format", "json", env=env)
        assert done.returncode == 0, done.stderr
        outcome = json.loads(done.stdout)
        assert (outcome["cases"], outcome["to_publish"], outcome["layout"]) == (["other-kafka"], 15, 2)
        with closing(Reader(topics)) as reader, relay_of(topics, database):
            writers.commit(2, writers.organizations[1])
            reader.wait_for(17)
            assert_exactly_once_in_order(database, reader.read_to_the_end())
    finally:
        broker.kill()
