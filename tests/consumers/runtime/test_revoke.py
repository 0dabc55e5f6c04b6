"""A partition is taken away while some of its records are still on their way to their lanes."""

import asyncio
import threading

from consumers import Policy
from schemas.topics import partition_of
from tests.consumers.complaints.support import RECEIVED, Held
from tests.consumers.runtime.support import (
    MESSAGE,
    PARTITIONS,
    create_topics,
    effects,
    organizations_everywhere,
    produce,
    row,
    until,
)


class Asked(Held):
    """One key; the targets of an event whose body is "later" are told when the test lets them."""

    name = "held-worker"
    policy = Policy(timeout_s=60, ordering="key")

    def __init__(self):
        super().__init__()
        self.asked, self.answer = asyncio.Event(), asyncio.Event()

    def key(self, event, target):
        return event.payload["conversation_id"]

    async def targets(self, event, conn):
        if event.payload["body"] == "later":
            self.asked.set()
            await self.answer.wait()
        return ("",)


async def test_what_comes_to_its_lane_after_the_revoke_does_not_overtake_what_was_dropped(database, topics, running):
    create_topics(topics, "held-worker")
    here, *others = organizations_everywhere(database, PARTITIONS)
    elsewhere = next(o for o in others if partition_of(o, PARTITIONS) != partition_of(here, PARTITIONS))
    held = Asked()
    async with running(held) as worker:
        first, second = produce(topics, [row(here), row(here)])
        await asyncio.to_thread(until, lambda: held.calls == [(first.id, 1)])
        service = worker.service
        await asyncio.to_thread(until, lambda: len(service._core.lanes) == 1)
        [third] = produce(topics, [row(here, payload=MESSAGE | {"body": "later"})])
        await asyncio.wait_for(held.asked.wait(), 30)
        place = service._core.poller._places[topics.event(RECEIVED), partition_of(here, PARTITIONS)]
        drained = threading.Event()
        service._revoked([place], drained)
        held.answer.set()
        # in another partition, so it is asked for its targets after the third one, and runs after that would have
        [last] = produce(topics, [row(elsewhere, payload=MESSAGE | {"conversation_id": "another"})])
        held.let_go(first, third, last)
        await worker.of("worker.delivered", event_id=str(last.id))
        assert await asyncio.to_thread(drained.wait, 30)
        assert [event for event, _ in held.calls] == [first.id, last.id]
    assert {event for event, *_ in effects(database)} == {first.id, last.id}
    assert second.id not in {event for event, *_ in effects(database)}
