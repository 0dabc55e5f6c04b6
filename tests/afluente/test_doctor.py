"""doctor: a healthy set-up has no findings; each thing that is wrong is one, with its fix."""

import os
import struct
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.conninfo import make_conninfo

from afluente.cli import doctor
from afluente.cli.doctor import State
from afluente.errors import Unavailable
from afluente.kafka import release
from afluente.local.stack import Server, Source, Stack
from afluente.settings import KafkaSettings
from consumers.workers import REGISTRY


@pytest.fixture
def env(kafka, database, topics):
    return {
        "PATH": os.environ["PATH"],
        "KAFKA_BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
        "DATABASE_URL": database.url,
        "AFLUENTE_TOPIC_PREFIX": topics.prefix,
        "AFLUENTE_ENVIRONMENT": "test",
    }


def examine(environment, folder):
    return {finding.check: finding for finding in doctor.examine(environment, folder)}


def wrong(findings):
    return {check for check, finding in findings.items() if finding.state in (State.warning, State.problem)}


def test_a_healthy_set_up_has_no_findings(env, topics, tmp_path):
    topics.create_declared(list(REGISTRY))
    found = examine(env | {"AFLUENTE_HEARTBEAT_FILE": "/tmp/beat", "AFLUENTE_STREAM_MEMBER_ID": "s-1"}, tmp_path)
    assert wrong(found) == set()
    assert found["kafka.version"].found.startswith("4.2 ")
    assert found["postgres.version"].found.startswith("18.")
    assert {"kafka.topics", "postgres.migrations", "postgres.roles", "clocks", "settings"} <= found.keys()


def test_missing_topics_and_pending_migrations_are_found_with_their_fix(env, empty_database, tmp_path):
    found = examine(env | {"DATABASE_URL": empty_database.url}, tmp_path)
    assert wrong(found) == {"kafka.topics", "postgres.migrations"}
    assert "afluente topics apply" in found["kafka.topics"].fix
    assert found["postgres.migrations"].fix == "afluente migrate up"
    assert "pending" in found["postgres.migrations"].found


def test_a_topic_that_differs_is_named(env, kafka, topics, tmp_path):
    name = topics.names.event("lead.created")
    topics.create(name, partitions=1)
    topics.create_declared(list(REGISTRY))
    found = examine(env, tmp_path)
    assert wrong(found) == {"kafka.topics"}
    assert name in found["kafka.topics"].found


def test_a_login_that_may_not_become_the_roles_is_found(env, database, postgres, tmp_path):
    login = f"nobody_{database.name}"
    with postgres.admin() as admin:
        admin.execute(f"CREATE ROLE {login} LOGIN PASSWORD 'x'")
    try:
        database.execute(f"GRANT USAGE ON SCHEMA migration TO {login}")
        database.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA migration TO {login}")
        found = examine(env | {"DATABASE_URL": make_conninfo(database.url, user=login, password="x")}, tmp_path)
        assert found["postgres.roles"].state is State.problem
        assert found["postgres.roles"].fix == f"GRANT afluente_app, afluente_worker, afluente_admin TO {login}"
    finally:
        database.execute(f"DROP OWNED BY {login}")
        with postgres.admin() as admin:
            admin.execute(f"DROP ROLE {login}")


def test_servers_that_the_environment_names_are_looked_at_and_not_those_of_another_stack(env, topics, tmp_path):
    topics.create_declared(list(REGISTRY))
    away = Server(Source.embedded, "127.0.0.1:1", log="kafka.log")
    Stack(tmp_path, away, Server(Source.embedded, "postgresql://127.0.0.1:1/x"), "k:a").save()
    found = examine(env, tmp_path)
    assert wrong(found) == set()
    assert not any(check.startswith("local.") for check in found)
    assert "local.kafka" in wrong(examine({}, tmp_path))


def test_servers_that_are_away_are_found_once_each(tmp_path):
    found = examine(
        {"KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:1", "DATABASE_URL": "postgresql://u:geheim@127.0.0.1:1/x"}, tmp_path
    )
    assert wrong(found) == {"kafka.reachable", "postgres.reachable"}
    assert not any("geheim" in finding.found for finding in found.values())


def test_wrong_and_unknown_settings_are_named(tmp_path):
    found = examine({"LOG_LEVEL": "loud", "AFLUENTE_BACKOF_SCALE": "1", "AFLUENTE_SECRETS_KEY": "k:AA"}, tmp_path)
    assert {
        "settings.LOG_LEVEL",
        "settings.DATABASE_URL",
        "settings.KAFKA_BOOTSTRAP_SERVERS",
        "settings.AFLUENTE_BACKOF_SCALE",
        "settings.AFLUENTE_SECRETS_KEY",
    } <= wrong(found)
    assert "loud" in found["settings.LOG_LEVEL"].found


def test_clocks_that_differ_are_found():
    here = datetime(2026, 11, 29, tzinfo=UTC)
    second = timedelta(seconds=1)
    (finding,) = doctor._clock(here + 60 * second, here, here + second)
    assert finding.state is State.warning
    assert "59.0 s" in finding.found
    (finding,) = doctor._clock(here, here, here + second)
    assert finding.state is State.ok


def test_settings_are_listed_with_their_source_and_secrets_masked():
    listed = {line["variable"]: line for line in doctor._settings({"DATABASE_URL": "geheim", "LOG_LEVEL": "debug"})}
    assert listed["DATABASE_URL"]["value"] == "**********"
    assert listed["LOG_LEVEL"]["source"] == "environment"
    assert listed["LOG_FORMAT"] == listed["LOG_FORMAT"] | {"source": "default", "value": "text"}
    assert listed["KAFKA_BOOTSTRAP_SERVERS"]["source"] == "required"
    assert all(line["meaning"] for line in listed.values())


def answer(level):
    """What a broker answers to ApiVersions, with two features of which metadata.version is one."""

    def feature(name, newest):
        return bytes([len(name) + 1]) + name + struct.pack(">hh", 1, newest) + b"\0"

    features = b"\x03" + feature(b"group.version", 1) + feature(b"metadata.version", level)
    keys = b"\x03" + 2 * (struct.pack(">hhh", 0, 0, 9) + b"\0")
    return struct.pack(">h", 0) + keys + struct.pack(">i", 0) + b"\x01\x00" + bytes([len(features)]) + features


@pytest.mark.parametrize(
    ("level", "name", "warned"),
    [(21, "3", False), (25, "4.0", False), (29, "4.2", False), (30, "4.3", True), (33, "4.4", True)],
)
def test_the_release_is_told_from_the_answer_and_those_with_the_defect_are_warned_of(level, name, warned):
    assert release._level(answer(level)) == level
    told = next(n for first, n in release._FIRST_LEVELS if level >= first)
    assert told == name
    assert release.Release(told, level).may_leave_transactions_undecided is warned


@given(st.binary(max_size=200))
def test_any_other_answer_is_no_crash(data):
    # these are what of_broker reports as "not Kafka's"
    with suppress(struct.error, IndexError, UnicodeDecodeError):
        assert isinstance(release._level(data), int)


def test_what_is_not_a_broker_is_said_so(postgres):
    from psycopg.conninfo import conninfo_to_dict

    given = conninfo_to_dict(postgres.url)
    with pytest.raises(Unavailable, match="no broker says its version"):
        release.of_broker(KafkaSettings(bootstrap_servers=f"127.0.0.1:{given['port']}"))


def test_doctor_changes_nothing(env, database, tmp_path):
    before = database.execute("SELECT count(*) FROM pg_class")
    examine(env, tmp_path / "none")
    assert not Path(tmp_path / "none").exists()
    assert database.execute("SELECT count(*) FROM pg_class") == before
