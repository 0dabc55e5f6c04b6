"""C6: a consumer keeps partitions that it no longer fetches. Paused for being full, it goes through a rebalance."""

import asyncio

import pytest

from consumers.runtime.places import Limits
from schemas.topics import partition_of
from tests.consumers.complaints.support import RECEIVED, Held
from tests.consumers.runtime.support import (
    PARTITIONS,
    create_topics,
    effects,
    organizations_everywhere,
    produce,
    row,
    short_sessions,
    states,
    until,
)

LIMITS = Limits(records=60, bytes=1024 * 1024)


def is_full(place):
    return place.waits or (place.paused and not place.loading)


def done(database, events):
    query = "SELECT count(*) FROM event_delivery WHERE state = 'done' AND event_id = ANY (%s)"
    return database.execute(query, [events])[0][0]


@pytest.mark.parametrize("protocol", ["consumer", pytest.param("classic", marks=pytest.mark.faults_long)])
@pytest.mark.faults_long
async def test_what_was_paused_and_taken_away_is_fetched_when_it_comes_back(database, topics, running, protocol):
    create_topics(topics, "held-worker")
    short_sessions(topics, "held-worker")  # and quick heartbeats, so that a rebalance does not take seconds
    organizations = organizations_everywhere(database, 6)
    rows = produce(topics, [row(organizations[n % 6]) for n in range(300)])
    full, other = Held(), Held()
    options = {"limits": LIMITS, "group_protocol": protocol, "revoke_drain_s": 0.2}
    async with running(full, **options) as first:
        poller = first.service._core.poller
        await asyncio.to_thread(until, lambda: len(full.calls) == full.policy.concurrency)
        await asyncio.to_thread(until, lambda: all(is_full(place) for place in list(poller._places.values())))
        async with running(other, **options) as second:
            await asyncio.to_thread(until, lambda: len(other.calls) > 0)
            # what was kept goes on, and leaves nothing in hand
            kept = {place.partition for place in list(poller._places.values()) if place.topic == topics.event(RECEIVED)}
            theirs = [event.id for event in rows if partition_of(event.organization_id, PARTITIONS) in kept]
            assert len(theirs) < 300  # with the classic protocol, which counts partitions of all topics, perhaps none
            full.all.set()
            await asyncio.to_thread(until, lambda: done(database, theirs) == len(theirs))
            # and what comes back from the other one, which is full as well and gives up
            assert await second.stop_now() is False
        await asyncio.to_thread(until, lambda: states(database, "held-worker") == {"done": 300}, 40)
        assert await first.stop()
    assert sorted(event for event, *_ in effects(database)) == sorted(event.id for event in rows)
