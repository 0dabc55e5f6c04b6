"""C10: retry topics multiply topics, consumers and groups. Here they do not: they are fixed, and read by one member."""

import asyncio

from afluente import kafka as clients
from consumers import Policy
from consumers.workers import REGISTRY
from schemas.topics import RETRY_DELAYS_S, declared
from tests.consumers.runtime.support import PARTITIONS, create_topics, short_sessions, until
from tests.consumers.runtime.workers import Plain


def test_a_worker_has_one_topic_for_each_delay_and_two_more_whatever_its_policy():
    """The eight delays, `now` for what falls due, and the dead letters; and 9 workers 9 times that."""
    before = len(declared("local", []))
    workers = sorted(REGISTRY)[:1]
    each = len(RETRY_DELAYS_S) + 2
    assert len(Policy().backoff_s) == 8
    assert len(declared("local", workers)) - before == each
    nine = [f"w{n}-worker" for n in range(9)]
    assert len(declared("local", nine)) - before == 9 * each


async def test_a_process_is_one_member_that_reads_all_its_topics(topics, running):
    create_topics(topics, "plain-worker")
    short_sessions(topics, "plain-worker")  # its heartbeats say what it has been assigned
    async with running(Plain()):
        admin = clients.admin(topics.settings)
        group = topics.settings.group_id("plain-worker")

        def members():
            [described] = admin.describe_consumer_groups([group]).values()
            return described.result(20).members

        def all_assigned():
            return sum(len(member.assignment.topic_partitions) for member in members()) == 10 * PARTITIONS

        await asyncio.to_thread(until, all_assigned)
        [member] = members()
    assert {place.topic for place in member.assignment.topic_partitions} == {
        topics.event("message.received"),
        *topics.retries("plain-worker"),
    }
