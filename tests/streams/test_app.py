"""What the Faust app is built with, and what it refuses."""

import threading
from importlib.metadata import version
from typing import Any

import faust
import pytest
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor

from afluente.settings import KafkaSettings
from streams import app as faust_app
from streams import consumer
from streams.errors import Unfit
from streams.summaries.sink import Sink


@pytest.fixture
def folding():
    abandon = threading.Event()
    sink = Sink("postgresql://nowhere", topic_ids={"events.contact-event": "id"}, abandon=abandon)

    def never(status, reason):
        raise AssertionError(reason)

    return consumer.Folding(sink=sink, topic="events.contact-event", exit=never, abandon=abandon)


@pytest.fixture
def kafka_settings():
    return KafkaSettings(bootstrap_servers="k1:9092,k2:9092", topic_prefix="pre.")


async def test_the_group_is_named_with_the_prefix_and_reads_committed(kafka_settings, folding):
    app: Any = faust_app.build(kafka_settings, folding, member_id="one")
    assert app.conf.id == "pre.afluente-stream"
    assert app.conf.consumer_group_instance_id == "one"
    assert [str(url) for url in app.conf.broker] == ["kafka://k1:9092", "kafka://k2:9092"]
    assert not app.conf.web_enabled
    thread = app.consumer._thread
    client = thread._create_worker_consumer(app.transport)
    try:
        assert client._isolation_level == "read_committed"
        assert client._partition_assignment_strategy == [RoundRobinPartitionAssignor]
        assert client._enable_auto_commit is False
    finally:
        client._closed = True  # never started
        thread.thread_loop.close()


async def test_faust_pages_are_on_the_loopback_address(kafka_settings, folding):
    app: Any = faust_app.build(kafka_settings, folding, member_id="one", web_port=16066)
    assert app.conf.web_enabled
    assert (app.conf.web_bind, app.conf.web_port) == ("127.0.0.1", 16066)


async def test_faust_is_not_led_astray_by_the_environment(kafka_settings, folding, monkeypatch):
    monkeypatch.setenv("PROCESSING_GUARANTEE", "exactly_once")
    monkeypatch.setenv("APP_STORE", "rocksdb://")
    app: Any = faust_app.build(kafka_settings, folding, member_id="one")
    assert not app.in_transaction
    assert str(app.conf.store).startswith("memory:")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"processing_guarantee": "exactly_once"}, "exactly_once"),
        ({"store": "rocksdb://"}, "there are no tables to store"),
    ],
)
async def test_settings_that_lose_events_are_refused(settings, reason):
    with pytest.raises(Unfit, match=reason):
        faust_app.check(faust.App("refused", **settings))


async def test_isolated_partitions_are_refused():
    app = faust.App("refused")

    @app.agent(app.topic("x"), isolated_partitions=True)
    async def isolated(stream):
        async for _ in stream:
            yield

    with pytest.raises(Unfit, match="isolated_partitions"):
        faust_app.check(app)


@pytest.mark.parametrize("distribution", ["faust-streaming", "aiokafka"])
async def test_another_version_of_faust_or_aiokafka_is_refused(kafka_settings, folding, monkeypatch, distribution):
    monkeypatch.setattr(consumer, "version", lambda name: "9.9.9" if name == distribution else version(name))
    with pytest.raises(Unfit, match=f"{distribution} 9.9.9 is installed"):
        faust_app.build(kafka_settings, folding, member_id="one")


async def test_security_settings_reach_aiokafka(folding):
    settings = KafkaSettings(
        bootstrap_servers="k:9093",
        security_protocol="SASL_SSL",
        sasl_mechanism="SCRAM-SHA-512",
        sasl_username="u",
        sasl_password="p",
    )
    credentials: Any = faust_app.build(settings, folding, member_id="one").conf.broker_credentials
    assert credentials.protocol.value == "SASL_SSL"
    assert credentials.mechanism.value == "SCRAM-SHA-512"
    assert (credentials.username, credentials.password) == ("u", "p")
    assert credentials.ssl_context is not None
