"""What the replayed complaints share: where a group stands, and an external worker whose calls the test lets go."""

import asyncio
from collections import defaultdict

from confluent_kafka import TopicPartition

from afluente import kafka as clients
from consumers import ExternalWorker, Policy
from tests.consumers.runtime.support import PARTITIONS
from tests.consumers.runtime.workers import write_effect

RECEIVED = "message.received"


def committed(topics, worker, topic, partitions=PARTITIONS):
    """The committed offset of each partition; None where there is none yet."""
    consumer = clients.consumer(topics.settings, worker)
    try:
        found = consumer.committed([TopicPartition(topic, n) for n in range(partitions)], timeout=10)
        return {place.partition: place.offset if place.offset >= 0 else None for place in found}
    finally:
        consumer.close()


class Held(ExternalWorker):
    """Each call waits for the gate of its event, or for the one of all; a body of "fail" then fails."""

    name = "held-worker"
    event_types = frozenset({RECEIVED})
    policy = Policy(timeout_s=60, concurrency=30)

    def __init__(self):
        self.gates = defaultdict(asyncio.Event)
        self.all = asyncio.Event()
        self.calls = []

    def let_go(self, *events):
        for event in events:
            self.gates[event.id].set()

    async def call(self, delivery, prepared):
        self.calls.append((delivery.event.id, delivery.attempt))
        gate = asyncio.ensure_future(self.gates[delivery.event.id].wait())
        everybody = asyncio.ensure_future(self.all.wait())
        try:
            await asyncio.wait([gate, everybody], return_when=asyncio.FIRST_COMPLETED)
        finally:
            gate.cancel()
            everybody.cancel()
        if delivery.payload["body"] == "fail":
            raise RuntimeError("as told")

    async def record(self, delivery, result, ctx):
        await write_effect(ctx.connection, delivery)
