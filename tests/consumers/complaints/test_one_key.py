"""C26: a batch fetch that breaks serial queues. 12 records of a key, four members, and it never runs twice at once."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from consumers import ExternalWorker, Policy
from tests.consumers.complaints.support import RECEIVED
from tests.consumers.runtime.support import MESSAGE, create_topics, produce, row, short_sessions, states, until
from tests.consumers.runtime.workers import write_effect


class Serial(ExternalWorker):
    """All members of a test share one list of what runs."""

    name = "serial-worker"
    event_types = frozenset({RECEIVED})
    policy = Policy(ordering="key", timeout_s=60)

    def __init__(self, running, most):
        self.running = running
        self.most = most

    def key(self, event, target):
        return event.payload["conversation_id"]

    async def call(self, delivery, prepared):
        self.running.append(delivery.event.id)
        self.most.append(len(self.running))
        await asyncio.sleep(0.05)
        self.running.remove(delivery.event.id)

    async def record(self, delivery, result, ctx):
        await write_effect(ctx.connection, delivery, "one")


@pytest.mark.parametrize("protocol", ["consumer", pytest.param("classic", marks=pytest.mark.faults_long)])
@pytest.mark.faults_long
async def test_twelve_records_of_one_key_and_four_members(database, topics, running, protocol):
    topics.create(topics.event(RECEIVED), partitions=6)  # something for each of the four
    create_topics(topics, "serial-worker")
    short_sessions(topics, "serial-worker")  # and quick heartbeats, so that a rebalance does not take seconds
    organization = database.organization()
    payload = MESSAGE | {"conversation_id": "one"}
    rows = produce(topics, [row(organization, payload=payload) for _ in range(6)])
    at_once, most = [], []
    async with AsyncExitStack() as stack:
        for number in range(4):
            # each that joins may be given the partition in the middle of the key
            member = Serial(at_once, most)
            await stack.enter_async_context(running(member, group_protocol=protocol, revoke_drain_s=5.0))
            if number == 1:
                rows += produce(topics, [row(organization, payload=payload) for _ in range(6)])
        await asyncio.to_thread(until, lambda: states(database, "serial-worker") == {"done": 12})
    assert most == [1] * 12
    done = database.execute("SELECT event_id FROM effect ORDER BY number")
    assert [event for (event,) in done] == [event.id for event in rows]
