"""An organization with a surplus is parked: the others pass, nothing of it is lost, doubled or out of order."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

import schemas
from consumers import ExternalWorker, Policy
from consumers.runtime.offsets import PartitionOffsets
from consumers.runtime.parking import largest
from consumers.runtime.places import Limits, Place
from tests.consumers.runtime.support import (
    MESSAGE,
    PARTITIONS,
    create_topics,
    effects,
    lag,
    produce,
    row,
    states,
    until,
)
from tests.consumers.runtime.workers import RECEIVED, Plain, write_effect

LIMITS = Limits(records=200, bytes=4 * 1024 * 1024)
A_KEY = b"00000000-0000-4000-8000-00000000000a"


@pytest.fixture
def neighbours(database):
    """Two organizations of the same partition."""
    first = database.organization("large")
    partition = schemas.topics.partition_of(first, PARTITIONS)
    others = (database.organization(f"small{n}") for n in range(200))
    return first, next(o for o in others if schemas.topics.partition_of(o, PARTITIONS) == partition)


def marks(database):
    return database.execute("SELECT organization_id, from_offset FROM worker_parked")


def numbered(organization, count, keys=20):
    """Events of `keys` keys in turn, each with its number."""
    ids = [row(organization).id for _ in range(keys)]
    return [row(organization, entity_id=ids[n % keys], payload=MESSAGE | {"body": str(n)}) for n in range(count)]


def in_order(database, rows):
    """Each event once, and those of a key in the order in which they were produced."""
    done = [event_id for event_id, *_ in effects(database)]
    assert sorted(done) == sorted(event.id for event in rows)
    place = {event_id: n for n, event_id in enumerate(done)}
    by_key = {}
    for event in rows:
        by_key.setdefault((event.organization_id, event.entity_id), []).append(place[event.id])
    return all(places == sorted(places) for places in by_key.values())


class Slow(ExternalWorker):
    """So slow that what is behind stays behind, until it is told to hurry."""

    name = "slow-worker"
    event_types = RECEIVED
    policy = Policy(concurrency=10, timeout_s=30)

    def __init__(self):
        self.hurry = asyncio.Event()

    async def call(self, delivery, prepared):
        async with asyncio.timeout(None):
            if not self.hurry.is_set():
                await asyncio.wait([asyncio.ensure_future(self.hurry.wait())], timeout=0.1)

    async def record(self, delivery, result, ctx):
        await write_effect(ctx.connection, delivery)


async def test_another_passes_a_surplus_which_comes_after_in_its_order(database, topics, running, neighbours):
    large, small = neighbours
    create_topics(topics, "slow-worker")
    rows = produce(topics, numbered(large, 3_000))
    [theirs] = produce(topics, [row(small)])
    slow = Slow()
    async with running(slow, limits=LIMITS) as worker:
        await worker.of("worker.parked", organization_id=str(large))
        await worker.of("worker.delivered", event_id=str(theirs.id))
        assert len(effects(database)) < 400  # of what was in hand when it came, not of what is ahead of it
        [(organization, mark)] = marks(database)
        assert organization == large
        assert mark < 3_000
        more = produce(topics, numbered(large, 10))  # later ones of the parked come after the parked
        slow.hurry.set()
        await worker.of("worker.unparked", organization_id=str(large))
        await asyncio.to_thread(until, lambda: len(effects(database)) == 3_011)
        await asyncio.to_thread(until, lambda: not marks(database))
        assert await worker.stop()
    assert in_order(database, [*rows, theirs, *more])
    assert states(database, "slow-worker") == {"done": 3_011}
    assert lag(topics, "slow-worker", [topics.event("message.received")]) == 0


async def test_two_that_are_parked_on_one_partition_are_read_in_turns(database, topics, running):
    partition, found = None, []
    while len(found) < 3:
        organization = database.organization(f"o{len(found)}")
        at = schemas.topics.partition_of(organization, PARTITIONS)
        if partition in (None, at):
            partition, found = at, [*found, organization]
    *large, small = found
    create_topics(topics, "slow-worker")
    both = [event for pair in zip(*(numbered(each, 1_200) for each in large), strict=True) for event in pair]
    rows = [*produce(topics, both), *produce(topics, [row(small)])]
    slow = Slow()
    async with running(slow, limits=LIMITS) as worker:
        for each in large:
            await worker.of("worker.parked", organization_id=str(each))
        await worker.of("worker.delivered", event_id=str(rows[-1].id))
        slow.hurry.set()
        await asyncio.to_thread(until, lambda: len(effects(database)) == len(rows), 40.0)
        await asyncio.to_thread(until, lambda: not marks(database))
    assert in_order(database, rows)


async def test_what_is_parked_survives_its_process_and_a_rebalance(database, topics, running, neighbours):
    large, small = neighbours
    create_topics(topics, "slow-worker")
    rows = produce(topics, numbered(large, 2_000))
    rows += produce(topics, [row(small)])
    source = [topics.event("message.received")]
    async with running(Slow(), limits=LIMITS) as worker:
        await worker.of("worker.delivered", event_id=str(rows[-1].id))
        await worker.stop_now()
    # What was in hand holds the group's offset; what is passed over beyond it does not, but for its mark.
    assert marks(database)
    assert lag(topics, "slow-worker", source) > 0
    slow, other = Slow(), Slow()
    async with running(slow, limits=LIMITS) as first:
        await first.of("worker.parked", organization_id=str(large))
        async with running(other, limits=LIMITS) as second:
            await second.of("worker.ready")
            slow.hurry.set()
            other.hurry.set()
            await asyncio.to_thread(until, lambda: len(effects(database)) == len(rows), 60.0)
            await asyncio.to_thread(until, lambda: not marks(database))
    assert in_order(database, rows)
    assert lag(topics, "slow-worker", source) == 0


async def test_a_mark_from_before_is_read_from_where_it_stands(database, topics, running, neighbours):
    """The group is beyond what is parked, as after a crash with nothing in hand: only the mark knows of it."""
    large, _ = neighbours
    create_topics(topics, "plain-worker")
    rows = produce(topics, numbered(large, 500))
    partition = schemas.topics.partition_of(large, PARTITIONS)
    async with running(Plain()) as worker:
        await worker.of("worker.delivered", count=500)
    database.execute("DELETE FROM event_delivery; DELETE FROM effect")
    database.execute(
        """INSERT INTO worker_parked (worker, topic, partition, organization_id, from_offset, passed_over, process)
           VALUES ('plain-worker', %s, %s, %s, 100, 400, gen_random_uuid())""",
        [topics.event("message.received"), partition, large],
    )
    async with running(Plain()) as worker:
        await worker.of("worker.delivered", count=400)
        await worker.of("worker.unparked", organization_id=str(large))
        await asyncio.to_thread(until, lambda: not marks(database))
    assert in_order(database, rows[100:])


def test_only_who_has_much_is_parked():
    place = Place("t", 0, waits=False)
    for n in range(1_000):
        place.took(n, b"%08d-0000-4000-8000-000000000000" % (n % 100), 500, 0)
    assert largest([place], 1_000) is None
    for n in range(1_000, 1_200):
        place.took(n, A_KEY, 500, 0)
    assert largest([place], 1_200) == (place, A_KEY)
    assert largest([place], 10_000) is None
    for n in range(1_200, 3_000):
        place.took(n, b"not an organization", 500, 0)
    assert largest([place], 3_000) is None  # nobody can say whose they are


@given(st.lists(st.tuples(st.sampled_from(["hand out", "pass over"]), st.integers(1, 5)), max_size=40), st.randoms())
def test_what_is_passed_over_holds_nothing_and_is_held_by_what_is_out_before_it(steps, random):
    offsets, out, offset, passed_behind = PartitionOffsets(), [], 0, {}
    for what, gap in steps:
        offset += gap
        if what == "hand out":
            offsets.hand_out(offset)
            out.append(offset)
        else:
            offsets.pass_over(offset)
            if out:
                passed_behind[out[-1]] = offset
    random.shuffle(finishing := list(out))
    for done in finishing:
        offsets.finish(done)
        out.remove(done)
        if out and offsets.committable is not None:
            assert offsets.committable <= min(out)
    assert offsets.idle
    assert offsets.committable == (offset + 1 if steps else None)
