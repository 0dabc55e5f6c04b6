"""C7: max.poll.interval.ms exceeded. The poll thread never waits for a handler, so a slow one costs no membership."""

import asyncio

import pytest

from afluente import kafka as clients
from consumers import ExternalWorker, Policy
from tests.consumers.complaints.support import RECEIVED
from tests.consumers.runtime.support import (
    create_topics,
    effects,
    organizations_everywhere,
    produce,
    row,
    short_sessions,
    states,
    until,
)
from tests.consumers.runtime.workers import write_effect


class Slow(ExternalWorker):
    """Each call takes one and a half poll intervals."""

    name = "slow-worker"
    event_types = frozenset({RECEIVED})
    policy = Policy(timeout_s=60)

    def __init__(self, seconds):
        self.seconds = seconds
        self.calls = []

    async def call(self, delivery, prepared):
        self.calls.append(delivery.event.id)
        await asyncio.sleep(self.seconds)

    async def record(self, delivery, result, ctx):
        await write_effect(ctx.connection, delivery)


def assignments(*workers):
    return [[fields for name, fields in worker.signals.seen if name == "worker.assigned"] for worker in workers]


@pytest.mark.parametrize(
    ("protocol", "interval_ms", "overrides"),
    [
        ("consumer", 1000, {}),
        pytest.param("classic", 6000, {"session_timeout_ms": 6000}, marks=pytest.mark.faults_long),
        pytest.param("consumer", 6000, {}, marks=pytest.mark.faults_long),
    ],
)
@pytest.mark.faults_long
async def test_a_handler_slower_than_the_poll_interval_keeps_its_partitions_and_runs_once(
    database, topics, running, monkeypatch, protocol, interval_ms, overrides
):
    consumer = clients.consumer

    def impatient(*arguments, **settings):
        return consumer(*arguments, **(settings | overrides | {"max_poll_interval_ms": interval_ms}))

    monkeypatch.setattr(clients, "consumer", impatient)
    create_topics(topics, "slow-worker")
    short_sessions(topics, "slow-worker")  # and quick heartbeats, so that a rebalance does not take seconds
    organizations = organizations_everywhere(database, 6)
    one, two = (Slow(1.5 * interval_ms / 1000) for _ in range(2))
    async with running(one, group_protocol=protocol) as first, running(two, group_protocol=protocol) as second:
        rows = produce(topics, [row(organization) for organization in organizations])
        await asyncio.to_thread(until, lambda: len(one.calls) + len(two.calls) == len(rows), 40)
        before = assignments(first, second)
        await asyncio.to_thread(until, lambda: states(database, "slow-worker") == {"done": len(rows)}, 40)
        assert assignments(first, second) == before
    assert sorted(one.calls + two.calls) == sorted(event.id for event in rows)
    assert sorted(event for event, *_ in effects(database)) == sorted(event.id for event in rows)
