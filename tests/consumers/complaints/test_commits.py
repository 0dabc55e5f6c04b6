"""C1: an offset committed past a failed record. C2: commits wrong at the gaps that transactions leave."""

import asyncio

from schemas.topics import partition_of
from tests.consumers.complaints.support import RECEIVED, Held, committed
from tests.consumers.runtime.support import (
    MESSAGE,
    PARTITIONS,
    create_topics,
    delivery,
    effects,
    lag,
    organizations_everywhere,
    produce,
    row,
    until,
)


async def until_committed(topics, worker, partition, offset):
    """Wait for the mark of that partition; returns where all others stand at that moment."""
    found = {}

    def there():
        found.update(committed(topics, worker, topics.event(RECEIVED)))
        return found[partition] == offset

    await asyncio.to_thread(until, there)
    return found


async def test_the_mark_waits_for_the_record_that_fails_until_its_retry_record_is_there(database, topics, running):
    """20 records of one partition; number 5 is slow and then fails, all behind it are done long before."""
    create_topics(topics, "held-worker")
    organization = database.organization()
    here = partition_of(organization, PARTITIONS)
    bodies = ["fail" if n == 5 else "ok" for n in range(20)]
    rows = produce(topics, [row(organization, payload=MESSAGE | {"body": body}) for body in bodies])
    held = Held()
    async with running(held) as worker:
        held.let_go(*rows[:5], *rows[6:])
        await worker.of("worker.delivered", count=19)
        await until_committed(topics, "held-worker", here, 5)
        assert topics.records(topics.retry("held-worker", 30)) == []
        held.let_go(rows[5])
        await until_committed(topics, "held-worker", here, 20)
        [waits] = topics.records(topics.retry("held-worker", 30))
        assert dict(waits.headers())["x-event-id"].decode() == str(rows[5].id)
    assert delivery(database, "held-worker", rows[5].id)["state"] == "waiting"
    assert {event for event, *_ in effects(database)} == {event.id for event in rows} - {rows[5].id}


async def test_the_mark_follows_what_was_handed_out_and_not_offsets_by_counting(database, topics, running):
    """Offsets 0, 2, 4, 6, a marker behind each; finished as 0, 4, 6, 2: the mark goes 1, 1, 1, 7, and at rest to 8."""
    create_topics(topics, "held-worker")
    here, *others = organizations_everywhere(database, PARTITIONS)
    partition = partition_of(here, PARTITIONS)
    elsewhere = next(o for o in others if partition_of(o, PARTITIONS) != partition)
    rows = produce(topics, [row(here) for _ in range(4)], transactional=True)
    held = Held()
    async with running(held) as worker:

        async def finish(event):
            held.let_go(event)
            await worker.of("worker.delivered", event_id=str(event.id))

        await finish(rows[0])
        await until_committed(topics, "held-worker", partition, 1)
        await finish(rows[2])
        await finish(rows[3])
        # another partition's mark is committed with all marks: what this one would have come to is there as well
        [other] = produce(topics, [row(elsewhere)])
        await finish(other)
        marks = await until_committed(topics, "held-worker", partition_of(elsewhere, PARTITIONS), 1)
        assert marks[partition] == 1
        assert lag(topics, "held-worker", [topics.event(RECEIVED)]) == 7
        await finish(rows[1])
        await until_committed(topics, "held-worker", partition, 8)
        assert lag(topics, "held-worker", [topics.event(RECEIVED)]) == 0
