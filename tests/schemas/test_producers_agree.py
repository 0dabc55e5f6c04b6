"""S5: librdkafka and aiokafka put a key where partition_for says, as the Java client does."""

from uuid import uuid4

from aiokafka.partitioner import DefaultPartitioner

from afluente import kafka as clients
from schemas.partitioner import partition_for
from tests.schemas.test_partitioner import VECTORS

KEYS = [key.encode() for key, _ in VECTORS] + [str(uuid4()).encode() for _ in range(200)]


def test_librdkafka_with_our_settings_agrees(kafka, topics):
    topic = f"{topics.prefix}agree"
    topics.create(topic, partitions=12)
    producer = clients.producer(topics.settings)
    for key in KEYS:
        producer.produce(topic, b"", key=key)
    assert producer.flush(30) == 0
    found = {record.key(): record.partition() for record in topics.records(topic)}
    assert found == {key: partition_for(key, 12) for key in KEYS}


def test_aiokafka_agrees():
    for partitions in (6, 12, 24, 32):
        everything = list(range(partitions))
        for key in KEYS:
            assert DefaultPartitioner()(key, everything, everything) == partition_for(key, partitions)
