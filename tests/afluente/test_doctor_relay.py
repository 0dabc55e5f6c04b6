"""What doctor says of the relay: how it stands, in words, and what of the database it relies on."""

import urllib.request
from datetime import UTC, datetime

import psycopg
import pytest
from psycopg import sql as pgsql

from afluente.cli.doctor import State
from afluente.cli.doctor_relay import examine
from producers.relay import control
from producers.relay.status import look


@pytest.fixture
def env(kafka, database, topics):
    topics.create_families()
    return {
        "KAFKA_BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
        "DATABASE_URL": database.url,
        "AFLUENTE_TOPIC_PREFIX": topics.prefix,
    }


def found_by(env):
    return {finding.check: finding for finding in examine(env)}


def emit(database, organization, event_type="probe.counted", count=1):
    database.execute(
        "SELECT emit_event_for(%s, %s, 'lead', NULL, '{}') FROM generate_series(1, %s)",
        [organization, event_type, count],
    )


def test_a_relay_that_does_not_run_is_told_from_one_that_never_did(env, database, topics, processes):
    assert found_by(env)["relay.running"].state is State.note
    organization = database.organization()
    emit(database, organization, count=3)
    waiting = found_by(env)["relay.running"]
    assert (waiting.state, waiting.fix) == (State.problem, "afluente relay run")
    assert "3 rows wait" in waiting.found

    emit(database, organization, event_type="lead.created")  # a dead letter: its payload lacks everything
    relay = processes.start("relay", "run", env={"AFLUENTE_METRICS": "127.0.0.1:0"})
    relay.wait_for("relay.dead_lettered")
    relay.wait_for("relay.published")
    found = found_by(env)
    assert set(found) == {"relay", "relay.dead_letters"}
    assert found["relay"].found == "running: 1 lane, 3 rows published, 0 wait"
    assert "lead.created, EncodeError" in found["relay.dead_letters"].found

    numbers = scraped(relay)
    lane = f'lane="{topics.prefix}relay-1-0"'
    assert numbers[f"afluente_relay_owned{{{lane}}}"] == 1
    assert numbers["afluente_relay_dead_lettered_total"] == 1
    assert numbers[f'afluente_relay_published_total{{topic="{topics.family("custom")}"}}'] == 3
    assert numbers["afluente_relay_paused"] == 0
    assert relay.terminate() == 0
    assert found_by(env)["relay.running"].state is State.warning


def scraped(relay):
    port = relay.wait_for("process.metrics")["port"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def test_what_the_relay_relies_on_in_the_database_is_looked_at(env, database, postgres):
    assert set(found_by(env)) == {"relay.running"}
    with psycopg.connect(database.url, autocommit=True) as conn:
        control.pause(conn, env["AFLUENTE_TOPIC_PREFIX"], by="ana", reason="broker upgrade")
        conn.execute("ALTER TABLE event_log ALTER COLUMN seq SET CACHE 20")
        conn.execute(
            pgsql.SQL("ALTER DATABASE {} SET synchronous_commit = off").format(pgsql.Identifier(database.name))
        )
        later = f"event_log_y{datetime.now(UTC):%Ym%m}"
        for (partition,) in conn.execute(
            "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'event_log'::regclass"
        ).fetchall():
            if partition > later:
                conn.execute(f"DROP TABLE {partition}")
    found = found_by(env)
    assert set(found) == {
        "relay.running",
        "relay.paused",
        "postgres.sequence",
        "postgres.synchronous_commit",
        "postgres.months",
    }
    assert "paused by ana" in found["relay.paused"].found
    assert "cache 20" in found["postgres.sequence"].found
    assert f"database {database.name}: synchronous_commit=off" in found["postgres.synchronous_commit"].found
    assert "ensure_partitions" in found["postgres.months"].fix


def test_a_relay_that_would_refuse_is_found_with_the_way_out(env, database, topics, processes):
    emit(database, database.organization(), count=3)
    relay = processes.start("relay", "run")
    relay.wait_for("relay.published")
    assert relay.terminate() == 0
    database.execute("SELECT setval(pg_get_serial_sequence('event_log', 'seq'), 1)")
    found = found_by(env)["relay.position"]
    assert (found.state, found.fix) == (State.problem, "afluente relay reposition")
    assert "put back to an earlier state" in found.found
    refused = processes.start("relay", "run")
    assert refused.wait() == 1
    assert look(topics.settings, database.url).refusals[0] in refused.log
