"""The relay end to end, in this process: exactly once, in causal order, whatever writers do and rows hold."""

import json
import secrets
import threading
import uuid
from datetime import UTC, datetime, timedelta

import pytest
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType
from psycopg.conninfo import make_conninfo

from afluente import kafka as clients
from afluente.cli.exits import Exit
from producers.relay.errors import Superseded
from producers.relay.service import Relay
from producers.relay.status import look
from tests.producers.relay.oracle import EVENT_TYPE, assert_exactly_once_in_order, event_id_of
from tests.producers.relay.running import relay_of


def test_a_thousand_events_of_concurrent_writers_are_published_once_and_in_causal_order(
    database, topics, writers, reader
):
    """Interleaved, out of order, rolled back, with savepoints, and one transaction open throughout."""
    held_organization = writers.add(database.organization("aberta"))
    held = database.connect()
    writers.emit(held, held_organization, 3)
    with relay_of(topics, database):
        writers.storm(1_000, seed=1)
        reader.wait_for(1_000)  # all of them, with the transaction still open
        assert held_organization not in {uuid.UUID(record.key().decode()) for record in reader.records}
        writers.emit(held, held_organization, 2)
        held.commit()
        reader.wait_for(1_005)
    records = reader.read_to_the_end()
    assert len(records) == 1_005
    assert_exactly_once_in_order(database, records)


def test_a_rival_that_no_lease_held_back_is_told_by_its_claim(database, topics, writers, reader):
    """Fencing is the safety net under the lease: the fenced one reads whose claim stands, and ends."""
    writers.commit(10)
    first = Relay(topics.settings, database.url)
    ended = []

    def run():
        try:
            first.run()
        except Superseded as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    reader.wait_for(10)
    rival = Relay(topics.settings, database.url)
    rival._lease = Unheld()  # type: ignore[assignment]
    second = threading.Thread(target=rival.run)
    second.start()
    try:
        while thread.is_alive():  # an idle relay notices at its next rows, and publishes nothing until then
            writers.commit(1)
            thread.join(0.2)
        writers.commit(10, writers.organizations[1])
        reader.wait_for(len(database.execute("SELECT 1 FROM event_log")))
    finally:
        first.stop()
        rival.stop()
        thread.join(15)
        second.join(15)
    assert [error.rival for error in ended] == [rival.instance]
    assert_exactly_once_in_order(database, reader.read_to_the_end())


class Unheld:
    """A lease that was lost: its holder does not know, and goes on."""

    def acquire(self, stop, take_over=False):
        return True

    def renew(self):
        pass

    def release(self):
        pass


def test_rows_too_large_or_unfit_go_to_the_dead_letters_and_the_rest_goes_on(database, topics, writers, reader):
    limit_topic(topics, topics.family("custom"), 20_000)
    organization = writers.organizations[0]
    with database.connect() as conn:
        for number in range(30):
            writers.emit(conn, organization, padding=secrets.token_hex(15_000) if number % 10 == 3 else "")
            if number % 10 == 7:
                conn.execute("SELECT emit_event_for(%s, 'lead.created', 'lead', NULL, '{}')", [organization])
    with relay_of(topics, database, chunk_rows=8):
        reader.wait_for(33)
    records = reader.read_to_the_end()
    dead = [json.loads(record.value()) for record in records if record.topic() == topics.relay_dead_letter]
    assert sorted(letter["error_class"] for letter in dead) == ["EncodeError"] * 3 + ["TooLarge"] * 3
    assert {event_id_of(record) for record in records} == {
        row[0] for row in database.execute("SELECT id FROM event_log")
    }
    state = look(topics.settings, database.url)
    assert state.position is not None
    assert (state.position.published, state.position.dead_lettered) == (27, 6)
    seqs = [int(dict(record.headers())["seq"]) for record in records if record.topic() != topics.relay_dead_letter]
    assert seqs == sorted(seqs)


def test_a_limit_lowered_meanwhile_costs_the_large_rows_their_place_and_the_others_nothing(
    database, topics, writers, reader
):
    """The broker refuses a whole batch then, with innocent records in it."""
    with relay_of(topics, database):
        writers.commit(5)
        reader.wait_for(5)
        limit_topic(topics, topics.family("custom"), 20_000)
        with database.connect() as conn:
            for number in range(20):
                writers.emit(conn, writers.organizations[1], padding=secrets.token_hex(15_000) if number == 9 else "")
        reader.wait_for(25)
    records = reader.read_to_the_end()
    dead = [json.loads(record.value()) for record in records if record.topic() == topics.relay_dead_letter]
    assert [(letter["error_class"], letter["row"]["payload"]["version"]) for letter in dead] == [("TooLarge", 10)]
    ids = [event_id_of(record) for record in records]
    assert len(ids) == len(set(ids)) == 25


def test_a_deferred_event_goes_out_when_it_is_due_and_not_before(database, topics, writers, reader):
    organization = writers.organizations[0]
    emit = "SELECT emit_event_for(%s, %s, 'contact', NULL, %s, '{}', %s)"
    soon, never = datetime.now(UTC) + timedelta(seconds=2), datetime.now(UTC) + timedelta(days=1)
    ((later,),) = database.execute(emit, [organization, EVENT_TYPE, '{"version": 2}', soon])
    database.execute(emit, [organization, EVENT_TYPE, '{"version": 3}', never])
    with relay_of(topics, database):
        database.execute(emit, [organization, EVENT_TYPE, '{"version": 1}', None])
        records = reader.wait_for(2)
        assert datetime.now(UTC) >= soon
    assert event_id_of(records[1]) == later
    assert len(reader.read_to_the_end()) == 2


def test_an_update_or_delete_of_published_rows_publishes_nothing(database, topics, writers, reader):
    with relay_of(topics, database):
        writers.commit(10)
        reader.wait_for(10)
        database.execute(
            "SET afluente.rewrite = 'erasure';"
            "UPDATE event_log SET payload = '{}' WHERE seq % 2 = 0;"
            "DELETE FROM event_log WHERE seq % 2 = 1"
        )
        writers.commit(1, writers.organizations[1])
        reader.wait_for(11)
    assert len(reader.read_to_the_end()) == 11


def test_status_tells_what_waits_and_who_owns_the_lane(database, topics, writers, reader, processes):
    writers.commit(3)
    before = json.loads(processes.run("relay", "status", "--format", "json").stdout)
    (lane,) = before["lanes"]
    assert (before["state"], before["lag_rows"], before["published"]) == ("not running", 3, 0)
    assert (lane["owner"], lane["number"], lane["entries"]) == (None, None, [])
    assert before["lag_seconds"] > 0
    relay = processes.start("relay", "run", "--log-records")
    lines = [relay.wait_for("relay.published", count=number, topic=topics.family("custom")) for number in (1, 2, 3)]
    assert {line["event_id"] for line in lines} == {str(row[0]) for row in database.execute("SELECT id FROM event_log")}
    assert {(line["partition"], line["offset"]) for line in lines} == {
        (record.partition(), record.offset()) for record in reader.wait_for(3)
    }
    after = json.loads(processes.run("relay", "status", "--format", "json").stdout)
    assert (after["lag_rows"], after["lag_seconds"], after["published"]) == (0, 0.0, 3)
    (lane,) = after["lanes"]
    assert lane["owner"] == lane["written_by"] == relay.wait_for("relay.ready")["instance"]
    assert (after["state"], lane["entries"][0]["slots"], after["rows_per_s"] > 0) == ("running", [[0, 255]], True)
    assert "owner" in processes.run("relay", "status").stdout
    assert relay.terminate() == 0


@pytest.mark.parametrize("command", [("relay",), ("relay", "run"), ("relay", "status")])
def test_help_shows_an_example(command, processes):
    shown = processes.run(*command, "--help")
    assert shown.returncode == 0
    assert command == ("relay",) or f"afluente {' '.join(command)}" in shown.stdout


def limit_topic(topics, name, max_bytes):
    entry = ConfigEntry("max.message.bytes", str(max_bytes), incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, name, incremental_configs=[entry])
    admin = clients.admin(topics.settings)
    admin.incremental_alter_configs([resource])[resource].result(10)
    asked = ConfigResource(ResourceType.TOPIC, name)
    while admin.describe_configs([asked])[asked].result(10)["max.message.bytes"].value != str(max_bytes):
        pass  # it is so once the broker says it


def test_a_login_that_may_not_ends_the_relay_and_is_not_waited_for(database, topics, reader, processes):
    login = f"stranger_{topics.prefix.strip('.')}"
    database.execute(f"CREATE ROLE {login} LOGIN PASSWORD 'stranger'")
    try:
        url = make_conninfo(database.url, user=login, password="stranger")
        done = processes.run("relay", "run", env={"DATABASE_URL": url})
    finally:
        database.execute(f"DROP ROLE {login}")
    assert done.returncode == Exit.NOT_ALLOWED, done.stderr
    assert "GRANT afluente_worker TO" in done.stderr
