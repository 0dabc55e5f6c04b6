"""Transactions that nobody will ever end, on a broker that has not the defect which leaves them.

A broker that does not ask the coordinator whether a producer's transaction has a partition takes records of any
transaction. So a relay's own next transaction is caught before it is sent, and its records are put into the partitions
by hand: open there, and unknown to their coordinator.
"""

import asyncio
import time

from aiokafka.client import AIOKafkaClient
from aiokafka.protocol.coordination import FindCoordinatorRequest
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.protocol.transaction import InitProducerIdRequest
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.structs import TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from afluente import kafka as clients
from afluente.kafka.transactions import Place, connect
from producers.relay.errors import SessionLost
from producers.relay.publish import Session
from schemas.partitioner import partition_for
from tests.producers.relay.oracle import Reader, assert_exactly_once_in_order
from tests.producers.relay.running import relay_of

PARTITIONS = 6
FIRST = 3
NOT_YET = -1
NOT_LEADER = 6  # for a moment, of a topic that was just made
COORDINATOR_COMES = (14, 15, 16)  # for a moment, of a transactional id that is new


def take_anything(kafka):
    """Make a broker (of the test's own) take records of transactions that their coordinator does not know."""
    entry = ConfigEntry(
        "transaction.partition.verification.enable", "false", incremental_operation=AlterConfigOpType.SET
    )
    resource = ConfigResource(ResourceType.BROKER, "1", incremental_configs=[entry])
    admin = clients.admin(kafka.settings)
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(20)


def lose_transaction(monkeypatch, topics, database, writers):
    """Have a relay publish some events, and leave its next transaction undecided. Its places, the position last."""
    caught = []
    while len({partition_for(str(key).encode(), PARTITIONS) for key in writers.organizations}) < 3:
        writers.organizations.append(writers.add(database.organization("Mais uma loja")))
    with monkeypatch.context() as patch:
        publish = Session.publish

        def catch(self, records, position):
            if len(records) <= FIRST:
                return publish(self, records, position)
            caught.append((records, position))
            raise SessionLost("as if the broker had been killed")

        patch.setattr(Session, "publish", catch)
        with relay_of(topics, database) as relay:
            writers.commit(FIRST)
            _wait_until(lambda: len(topics.records(topics.positions)) > 1 or not relay.is_alive())
            with database.connect() as conn:
                for organization in writers.organizations:
                    writers.emit(conn, organization, FIRST)
                conn.commit()
            _wait_until(lambda: caught or not relay.is_alive())
    records, position = caught[0]
    placed = {}
    for record in records:
        where = Place(record.topic, partition_for(record.key, PARTITIONS))
        placed.setdefault(where, []).append((record.key, record.value, record.headers))
    placed[Place(topics.positions, position.lane)] = [(position.key.encode(), position.format(), [])]
    asyncio.run(_write(topics.settings, topics.prefix + position.key, placed))
    return list(placed)


def assert_the_relay_goes_on(topics, database, writers):
    """Everything committed before and after is on the topics once, in order, and readable to the end."""
    reader = Reader(topics)
    try:
        with relay_of(topics, database):
            writers.commit(2)
            reader.wait_for(database.execute("SELECT count(*) FROM event_log")[0][0])
        assert_exactly_once_in_order(database, reader.read_to_the_end())
    finally:
        reader.close()


def hang(settings, transactional_id, place):
    """Leave one record of a transaction of any other producer's undecided in `place`."""
    asyncio.run(_write(settings, transactional_id, {place: [(b"k", b"v", [])]}))


def end(settings, place, commit):
    """Write the marker of what is open there, as the broker that then crashed had for some of the partitions."""

    async def write():
        async with connect(settings) as transactions:
            (state,) = [s for s in (await transactions.producers([place]))[place] if s.start_offset is not None]
            await transactions.end(place, state, commit=commit)

    asyncio.run(write())


async def _write(settings, transactional_id, placed):
    client = AIOKafkaClient(bootstrap_servers=settings.bootstrap_servers)
    await client.bootstrap()
    try:
        await client.force_metadata_update()
        code = NOT_YET
        while code != 0:
            found = await client.send(client.get_random_node(), FindCoordinatorRequest(transactional_id, 1))
            if (code := found.error_code) == 0:
                started = await client.send(found.coordinator_id, InitProducerIdRequest(transactional_id, 10_000))
                code = started.error_code
            assert code in (0, *COORDINATOR_COMES)
        for place, records in placed.items():
            batch = DefaultRecordBatchBuilder(2, 0, 1, started.producer_id, started.producer_epoch, 0, 10**6)
            for number, (key, value, headers) in enumerate(records):
                assert batch.append(number, int(time.time() * 1000), key, value, list(headers)) is not None
            request = ProduceRequest(
                transactional_id, -1, 10_000, [(place.topic, [(place.partition, bytes(batch.build()))])]
            )
            code = NOT_YET
            while code != 0:
                leader = client.cluster.leader_for_partition(TopicPartition(*place))
                produced = await client.send(leader, request)
                ((_, ((_, code, *_),)),) = produced.topics
                assert code in (0, NOT_LEADER), f"{place}: error {code}"
    finally:
        await client.close()


def _wait_until(done, timeout=60.0):
    deadline = time.monotonic() + timeout
    while not done():
        assert time.monotonic() < deadline
