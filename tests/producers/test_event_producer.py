"""EventProducer on a real broker: its records are the relay's, less the seq; what it may not produce, it does not."""

import json
import subprocess
import sys
from datetime import UTC, datetime
from decimal import Decimal
from uuid import UUID, uuid4

import pytest

import schemas
from afluente.errors import SettingsError
from afluente.settings import KafkaSettings
from producers.emit import Causation
from producers.errors import EventTypeError, NotDeliveredError, OwnedByTableError, PayloadError, TooLargeError
from producers.event_producer import EventProducer
from producers.owned import TABLE_OF, UNOWNED, table_of
from schemas import published
from schemas.partitioner import partition_for
from schemas.topics import partition_of

PARTITIONS = 6
PRODUCT = {"product_id": "p-1", "action": "updated"}


@pytest.fixture
def producer(topics):
    topics.create(topics.event("nuvemshop.product_synced"), topics.event("acme.thing_done"), partitions=PARTITIONS)
    with EventProducer(topics.settings, source="catalogue-service") as producer:
        yield producer


def only_record(topics, event_type):
    (record,) = topics.records(topics.event(event_type))
    return record


def test_a_record_is_what_the_relay_would_have_made_but_for_the_seq(producer, topics):
    organization, entity, cause = uuid4(), uuid4(), uuid4()
    began = datetime.now(UTC)
    event_id = producer.produce(
        "nuvemshop.product_synced",
        organization_id=organization,
        entity_kind="product",
        entity_id=entity,
        payload=PRODUCT,
        request_id="r-1",
        causation=Causation(cause, 1, "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    )
    producer.flush()
    record = only_record(topics, "nuvemshop.product_synced")
    headers = dict(record.headers())
    event = schemas.decode(record.value())

    assert "seq" not in headers
    assert record.key() == str(organization).encode()
    assert record.partition() == partition_of(organization, PARTITIONS)
    assert (event.id, event.organization_id, event.entity_id) == (event_id, organization, entity)
    assert event.payload == PRODUCT
    assert event.metadata["source"] == "catalogue-service"
    assert event.metadata["causation_id"] == str(cause)
    assert began.timestamp() <= event.metadata["emitted_at"] <= datetime.now(UTC).timestamp()
    row = schemas.Row(
        7,
        event.id,
        organization,
        event.event_type,
        "product",
        entity,
        b'{"product_id": "p-1", "action": "updated"}',
        json.dumps(event.metadata).encode(),
        event.created_at,
    )
    assert record.value() == schemas.encode(row)
    assert record.headers() == [(name, value) for name, value in schemas.headers(row) if name != "seq"]


def test_a_type_of_the_services_own_goes_to_the_custom_topic(producer, topics):
    organization = uuid4()
    producer.produce(
        "acme.thing_done", organization_id=organization, entity_kind="thing", payload={"amount": Decimal("1.10")}
    )
    producer.flush()
    record = only_record(topics, "acme.thing_done")
    assert record.topic() == f"{topics.prefix}events.custom"
    assert schemas.decode(record.value()).payload == {"amount": "1.10"}


def test_plain_arguments_are_enough(topics):
    topics.create(topics.event("loyalty.earned"), partitions=1)
    servers = topics.settings.bootstrap_servers
    with EventProducer.connect(servers, source="shop", topic_prefix=topics.prefix, linger_ms=0) as producer:
        event_id = producer.produce(
            "loyalty.earned", organization_id=uuid4(), entity_kind="loyalty", payload={"points": 5}
        )
    assert schemas.decode(only_record(topics, "loyalty.earned").value()).id == event_id
    with pytest.raises(SettingsError, match="KAFKA_BOOTSTRAP_SERVERS"):
        EventProducer.connect("nowhere", source="shop")


@pytest.mark.parametrize("event_type", [*sorted(TABLE_OF), "contact_event.invented", "webhook.invented"])
def test_what_a_table_owns_is_refused_with_the_way_it_goes(kafka, event_type):
    producer = EventProducer(kafka.settings, source="s")
    with pytest.raises(OwnedByTableError) as caught:
        producer.produce(event_type, organization_id=uuid4(), entity_kind="x", payload={})
    assert caught.value.table in str(caught.value)
    assert "emit" in (caught.value.hint or "")


def test_every_type_of_the_catalogue_is_owned_or_declared_not_to_be():
    assert set(TABLE_OF) | UNOWNED == set(published.event_types())
    assert not set(TABLE_OF) & UNOWNED
    assert all(table_of(event_type) is None for event_type in UNOWNED)


def test_the_owning_tables_are_there(database):
    there = {
        name
        for (name,) in database.execute("SELECT relname FROM pg_class WHERE relkind IN ('r', 'p')")
        if isinstance(name, str)
    }
    # These come with the parts of the product that keep them.
    assert set(TABLE_OF.values()) - there <= {"campaigns", "campaign_recipients", "lgpd_requests"}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"payload": {"product_id": "p-1"}}, PayloadError),
        ({"payload": {**PRODUCT, "note": "\x00"}}, PayloadError),
        ({"payload": {**PRODUCT, "note": "\ud800"}}, PayloadError),
        ({"payload": {**PRODUCT, "price": float("nan")}}, PayloadError),
        ({"payload": {**PRODUCT, "at": datetime(2026, 1, 1)}}, PayloadError),
        ({"payload": {**PRODUCT, "note": "x" * 300_000}}, TooLargeError),
        ({"payload": [1]}, PayloadError),
        ({"event_type": "Nuvemshop"}, EventTypeError),
        ({"entity_kind": "a b"}, EventTypeError),
        ({"schema_version": "1"}, PayloadError),
    ],
)
def test_an_event_that_does_not_fit_is_refused_before_it_is_sent(producer, topics, change, error):
    given = {
        "event_type": "nuvemshop.product_synced",
        "organization_id": uuid4(),
        "entity_kind": "product",
        "payload": PRODUCT,
        **change,
    }
    with pytest.raises(error):
        producer.produce(given.pop("event_type"), **given)
    producer.flush()
    assert topics.records(topics.event("nuvemshop.product_synced")) == []


def test_events_that_are_not_there_are_named_and_can_be_produced_again():
    producer = EventProducer(
        KafkaSettings(bootstrap_servers="127.0.0.1:1"), source="s", message_timeout_ms=300, log_level=0
    )
    ids = [
        producer.produce("acme.thing", organization_id=uuid4(), entity_kind="thing", payload={"n": n}) for n in range(3)
    ]
    with pytest.raises(NotDeliveredError) as caught:
        producer.flush(20)
    assert set(caught.value.failed) == set(ids)
    again = producer.produce(
        "acme.thing", organization_id=uuid4(), entity_kind="thing", payload={"n": 0}, event_id=ids[0]
    )
    assert again == ids[0]
    with pytest.raises(NotDeliveredError, match="no answer within") as caught:
        producer.close(0.01)
    assert list(caught.value.failed) == [ids[0]]


def test_an_error_of_the_callers_own_is_the_one_that_is_seen():
    def produce_and_fail():
        settings = KafkaSettings(bootstrap_servers="127.0.0.1:1")
        with EventProducer(settings, source="s", message_timeout_ms=300, log_level=0) as producer:
            producer.produce("acme.thing", organization_id=uuid4(), entity_kind="thing", payload={})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        produce_and_fail()
    assert "1 events are not known" in caught.value.__notes__[0]


def test_a_topic_that_is_not_there_is_an_error_not_a_wait_for_ever(topics):
    producer = EventProducer(topics.settings, source="s", message_timeout_ms=500)
    producer.produce("acme.thing", organization_id=uuid4(), entity_kind="thing", payload={})
    with pytest.raises(NotDeliveredError):
        producer.flush(20)


def test_a_hot_organization_is_spread_as_the_relay_spreads_it(producer, topics, monkeypatch):
    organization = uuid4()
    for module in ("producers.event_producer.SPREAD", "schemas.topics.SPREAD"):
        monkeypatch.setattr(module, {str(organization): 3})
    entities = [UUID(int=n) for n in range(12)]
    for entity in entities:
        producer.produce(
            "nuvemshop.product_synced",
            organization_id=organization,
            entity_kind="product",
            entity_id=entity,
            payload=PRODUCT,
        )
    producer.flush()
    records = topics.records(topics.event("nuvemshop.product_synced"))
    for record in records:
        of = schemas.decode(record.value()).entity_id
        assert record.partition() == partition_for(str(organization).encode(), PARTITIONS, of, 3)
    assert len({record.partition() for record in records}) == 3


def test_more_than_the_queue_holds_waits_and_loses_nothing(topics):
    topics.create(topics.event("acme.thing_done"), partitions=1)
    organization = uuid4()
    with EventProducer(topics.settings, source="s", queue_buffering_max_messages=10) as producer:
        ids = [
            producer.produce("acme.thing_done", organization_id=organization, entity_kind="thing", payload={"n": n})
            for n in range(200)
        ]
    found = [schemas.decode(record.value()).id for record in topics.records(topics.event("acme.thing_done"))]
    assert found == ids


def test_emit_alone_loads_no_kafka_client():
    asked = "import sys, producers; assert 'confluent_kafka' not in sys.modules; from producers import EventProducer"
    subprocess.run([sys.executable, "-c", asked], check=True)
