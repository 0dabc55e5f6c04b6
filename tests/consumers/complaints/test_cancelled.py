"""C19: what a client had fetched is lost with a cancelled call. The whole worker is cancelled, wherever it awaits.

And C20, that a worker does not end: it does when a cancellation gets lost on its way.
"""

import asyncio
from collections import Counter
from contextlib import suppress

import pytest

from tests.consumers.complaints.support import Held
from tests.consumers.runtime.support import (
    MESSAGE,
    create_topics,
    effects,
    organizations_everywhere,
    produce,
    row,
    states,
    until,
)
from tests.consumers.runtime.workers import Caller, Plain


@pytest.mark.parametrize("kind", [pytest.param(Plain, marks=pytest.mark.faults_long), Caller])
async def test_a_worker_cancelled_in_the_middle_loses_nothing(database, topics, running, kind):
    create_topics(topics, kind.name)
    organizations = organizations_everywhere(database, 6)
    bodies = ["fail 1" if n % 10 == 0 else "ok" for n in range(400)]
    rows = [row(organizations[n % 6], payload=MESSAGE | {"body": body}) for n, body in enumerate(bodies)]
    produce(topics, rows)
    for delivered in (1, 60, 7):
        async with running(kind(), backoff_scale=0.001) as worker:
            await worker.of("worker.delivered", count=delivered)
            worker.task.cancel()
            await asyncio.wait([worker.task])
            assert worker.task.cancelled()
    async with running(kind(), backoff_scale=0.001) as worker:
        await asyncio.to_thread(until, lambda: states(database, kind.name) == {"done": 400}, 40)
        assert await worker.stop()
    assert Counter(event for event, *_ in effects(database)) == dict.fromkeys([event.id for event in rows], 1)


class Stubborn(Held):
    """Each call takes its first cancellation for something else, as a client that waits for a connection may."""

    async def call(self, delivery, prepared):
        self.calls.append((delivery.event.id, delivery.attempt))
        for _ in range(2):
            with suppress(asyncio.CancelledError):
                await self.all.wait()
        await asyncio.sleep(0)


async def test_a_cancellation_that_is_lost_is_said_again(database, topics, running):
    create_topics(topics, "held-worker")
    rows = produce(topics, [row(database.organization()) for _ in range(3)])
    stubborn = Stubborn()
    async with running(stubborn) as worker:
        await asyncio.to_thread(until, lambda: len(stubborn.calls) == len(rows))
        assert await asyncio.wait_for(worker.stop_now(), 30) is False
    assert effects(database) == []
    assert states(database, "held-worker") == {"claimed": 3}
