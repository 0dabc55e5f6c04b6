"""A position is used only where it belongs: anything else is refused with words, before the first wrong record."""

import threading
import time

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic, ResourceType

from afluente import kafka as clients
from afluente.errors import Refused
from producers.relay import service
from producers.relay.errors import PositionError, PositionRefused
from producers.relay.service import Relay
from schemas.topics import POSITIONS_PARTITIONS
from tests.fixtures.postgres import clone
from tests.producers.relay.oracle import Writers
from tests.producers.relay.running import relay_of


@pytest.fixture
def published(database, topics, writers, reader):
    """Ten rows are published and the relay has ended."""
    with relay_of(topics, database):
        writers.commit(10)
        reader.wait_for(10)
    return reader


def run_until_it_ends(topics, database):
    relay = Relay(topics.settings, database.url)
    patience = threading.Timer(30, relay.stop)
    patience.start()
    try:
        relay.run()
    finally:
        patience.cancel()


def recreate(topics, name, partitions, config):
    """Delete a topic and make it again; returns when the broker's own view is the new one."""
    admin = clients.admin(topics.settings)

    def described():
        try:
            return admin.describe_topics(TopicCollection([name]))[name].result(10)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise
            return None

    before = str(described().topic_id)
    admin.delete_topics([name], operation_timeout=30)[name].result(60)
    wait_until(lambda: described() is None)
    admin.create_topics([NewTopic(name, partitions, 1, config=config)], operation_timeout=30)[name].result(60)
    wait_until(lambda: (now := described()) is not None and str(now.topic_id) != before)


def wait_until(condition, timeout=30.0):
    """The broker's view follows the controller's by itself, and says nothing when it has."""
    waiting, deadline = threading.Event(), time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        waiting.wait(0.05)


def test_another_database_is_refused_and_its_relay_fences_nobody(
    reader, topics, database, writers, postgres, template, processes
):
    relay = processes.start("relay", "run")
    writers.commit(10)
    reader.wait_for(10)
    with clone(postgres, template) as other:
        Writers(other).commit(3)
        lost = processes.run("relay", "run", "--take-over", env={"DATABASE_URL": other.url})
    assert lost.returncode == 1
    assert "the database is another one" in lost.stderr
    writers.commit(10)
    reader.wait_for(20)
    assert relay.events("relay.session_lost") == []
    assert relay.terminate() == 0
    assert len(reader.read_to_the_end()) == 20


def test_a_topic_made_anew_is_refused(published, topics, database, writers):
    name = topics.family("lead")
    recreate(topics, name, 6, {})
    writers.commit(3)
    with pytest.raises(PositionRefused, match=f"topic {name} was deleted and made anew"):
        run_until_it_ends(topics, database)
    ((owner,),) = database.execute("SELECT instance FROM afluente.relay_lane")
    assert owner is None


def test_a_topic_made_anew_under_a_running_relay_is_noticed(published, topics, database, writers, monkeypatch):
    monkeypatch.setattr(service, "WATCH_EVERY_S", 0.2)

    def recreate_under_it():
        with relay_of(topics, database) as thread:
            writers.commit(1)
            published.wait_for(11)  # it runs
            recreate(topics, topics.family("lead"), 6, {})
            thread.join(30)

    # It may look between the two.
    with pytest.raises(Refused, match=r"was deleted and made anew|does not exist"):
        recreate_under_it()


def test_a_position_that_is_gone_is_not_taken_for_a_beginning(published, topics, database, writers):
    recreate(topics, topics.positions, POSITIONS_PARTITIONS, {"cleanup.policy": "compact"})
    writers.commit(3)
    with pytest.raises(PositionRefused, match="was published to") as refused:
        run_until_it_ends(topics, database)
    assert "afluente relay reposition" in str(refused.value.hint)
    assert len(published.read_to_the_end()) == 10


def test_a_sequence_put_back_is_refused(published, topics, database):
    """What a restore to an earlier state leaves: the sequence stands under what was published."""
    database.execute("ALTER TABLE event_log ALTER COLUMN seq RESTART WITH 4")
    with pytest.raises(PositionRefused, match="put back to an earlier state"):
        run_until_it_ends(topics, database)


def test_an_earlier_state_is_refused_even_when_new_rows_have_taken_the_sequence_past_the_position(
    published, topics, database, writers
):
    database.execute(
        "SELECT set_config('afluente.rewrite', 'erasure', true); DELETE FROM event_log WHERE seq > 7;"
        "ALTER TABLE event_log ALTER COLUMN seq RESTART WITH 8"
    )
    writers.commit(5, writers.organizations[1])
    with pytest.raises(PositionRefused, match="was published as number 10 and is not in event_log"):
        run_until_it_ends(topics, database)


def test_a_position_of_another_format_is_refused(published, topics, database):
    producer = clients.producer(topics.settings)
    producer.produce(topics.positions, b'{"format": 3}', b"relay-1-0", partition=0)
    producer.flush(10)
    with pytest.raises(PositionError, match="format 3"):
        run_until_it_ends(topics, database)


def test_positions_that_would_expire_are_refused(published, topics, database):
    resource = ConfigResource(
        ResourceType.TOPIC, topics.positions, incremental_configs=[_set("cleanup.policy", "delete")]
    )
    admin = clients.admin(topics.settings)
    admin.incremental_alter_configs([resource])[resource].result(10)
    asked = ConfigResource(ResourceType.TOPIC, topics.positions)
    wait_until(lambda: admin.describe_configs([asked])[asked].result(10)["cleanup.policy"].value == "delete")
    with pytest.raises(Refused, match=r"cleanup\.policy=delete"):
        run_until_it_ends(topics, database)


def test_a_missing_topic_is_refused_before_anything_is_claimed(topics, database):
    with pytest.raises(Refused, match="does not exist") as refused:
        run_until_it_ends(topics, database)
    assert refused.value.hint == "afluente topics apply"
    assert database.execute("SELECT kafka_cluster_id FROM afluente.relay_lane") == []


def test_the_same_place_is_accepted_again(published, topics, database, writers):
    with relay_of(topics, database):
        writers.commit(5, writers.organizations[1])
        published.wait_for(15)
    assert len(published.read_to_the_end()) == 15


def _set(name, value):
    return ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
