"""Who runs what, as event_delivery decides it."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest

from consumers.runtime.deliveries import (
    Blocked,
    BuryAgain,
    Deliveries,
    Duplicate,
    Early,
    Held,
    Item,
    ProduceAgain,
    PutOff,
    Row,
    Run,
    decide,
)
from consumers.runtime.records import Record, RetryMark, to_ms, whole_ms
from schemas import Event

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
ME, OTHER = uuid4(), uuid4()
DUE = NOW + timedelta(seconds=30)
ROW = Row(0, "waiting", 2, 0, 3, None, NOW, False, False, None, False, "E", "text")
KEEP = timedelta(hours=2)


def mark(attempt, generation=0, due=DUE):
    return RetryMark("", generation, attempt, to_ms(due))


@pytest.mark.parametrize(
    ("row", "its_mark", "expected"),
    [
        (ROW, mark(3), Run(3, 0)),
        (ROW, mark(1), Duplicate()),  # an older attempt's record
        (ROW, mark(5), Duplicate()),  # no such attempt
        (ROW, mark(3, generation=1), Duplicate()),  # a reprocessing that did not commit
        (replace_row := ROW._replace(generation=2), mark(3, generation=1), Duplicate()),
        (replace_row, mark(3, generation=2), Run(3, 2)),
        # the source record, and the record whose run led to this wait: its retry record may not exist
        (ROW, None, ProduceAgain(3, 0, NOW, None, "E", "text")),
        (ROW, mark(2), ProduceAgain(3, 0, NOW, None, "E", "text")),
        (ROW._replace(kept=True), None, Duplicate()),
        (ROW._replace(kept=True), mark(2), Duplicate()),
        # not due: the very record waits on, an older one is answered with the newer
        (ROW._replace(next_attempt_at=DUE), mark(3), Early(DUE)),
        (ROW._replace(next_attempt_at=DUE), mark(3, due=NOW), ProduceAgain(3, 0, DUE, None, "E", "text")),
        (ROW._replace(state="claimed", claimed_by=None), None, Run(3, 0)),
        (ROW._replace(state="claimed", claimed_by=ME, owned=True), mark(3), Run(3, 0)),
        (ROW._replace(state="claimed", claimed_by=OTHER, owned=True), mark(3), Held()),
        (ROW._replace(state="claimed", claimed_by=OTHER, owned=False), mark(3), Run(3, 0, None, OTHER)),
        (ROW._replace(state="claimed", claimed_by=OTHER, owned=True), mark(2), Duplicate()),
        (ROW._replace(state="dead"), None, BuryAgain(2, 0, None, "E", "text")),
        (ROW._replace(state="dead"), mark(2), BuryAgain(2, 0, None, "E", "text")),
        (ROW._replace(state="dead"), mark(1), Duplicate()),
        (ROW._replace(state="dead", buried=True), None, Duplicate()),
        *((ROW._replace(state=state), None, Duplicate()) for state in ("done", "skipped", "discarded")),
        (ROW._replace(state="needs_review"), None, BuryAgain(2, 0, None, "E", "text")),
        (ROW._replace(state="needs_review", buried=True), None, Duplicate()),
        (ROW._replace(state="blocked", kept=True), None, Duplicate()),
        (ROW._replace(state="done"), mark(3), Duplicate()),
    ],
)
def test_what_a_record_means_for_a_delivery_seen_before(row, its_mark, expected):
    assert decide(row, its_mark, NOW, ME) == expected


@pytest.mark.parametrize(
    ("row", "its_mark", "again", "expected"),
    [
        (ROW._replace(state="done", generation=4), None, 7, Run(1, 5, again=True)),
        (ROW._replace(state="dead", buried=True), None, 7, Run(1, 1, again=True)),
        (ROW._replace(state="done", replay=6), None, 7, Run(1, 1, again=True)),
        # a second copy of the replay's record, and an older replay's
        (ROW._replace(state="done", replay=7), None, 7, Duplicate()),
        (ROW._replace(state="done", replay=8), None, 7, Duplicate()),
        (ROW._replace(state="done"), None, 0, Duplicate()),
        # what came of it has a generation, and obeys that
        (ROW._replace(state="done"), mark(3), 7, Duplicate()),
        # open ones run anyway; people's ones are theirs
        (ROW, None, 7, ProduceAgain(3, 0, NOW, None, "E", "text")),
        (ROW._replace(state="claimed", claimed_by=OTHER, owned=True), None, 7, Held()),
        *((ROW._replace(state=state, buried=True), None, 7, Duplicate()) for state in ("discarded", "needs_review")),
        (ROW._replace(state="skipped"), None, 7, Run(1, 1, again=True)),
    ],
)
def test_a_replay_runs_what_is_over_once_more(row, its_mark, again, expected):
    assert decide(row, its_mark, NOW, ME, again) == expected


@pytest.fixture
def item(database):
    organization = database.organization()
    created_at = datetime.now(UTC)

    def make(its_mark=None, key="k", event=None, target=""):
        event = event or Event(uuid4(), organization, "message.received", "message", uuid4(), {}, {}, created_at)
        record = Record("events.message", 0, 7, 0, b"key", b"value", [("ce_id", b"1")])
        return Item(record, event, target, key, its_mark)

    return make


def deliveries(process=ME, transactional=True, ordered=False):
    return Deliveries("t-worker", process, transactional=transactional, ordered=ordered, takeover_s=300)


async def claim(database, who, items, now=None, delay=timedelta(0)):
    async with await database.connect_async() as conn:
        return await who.claim(conn, items, now or datetime.now(UTC), delay, KEEP)


async def test_a_delivery_is_done_once(database, item):
    first = item()
    again = item(event=first.event)
    other_target = item(event=first.event, target="t2")
    assert await claim(database, deliveries(), [first, other_target]) == [Run(1, 0), Run(1, 0)]
    assert await claim(database, deliveries(), [again]) == [Duplicate()]
    assert database.execute("SELECT state, attempts, target FROM event_delivery ORDER BY target") == [
        ("done", 1, ""),
        ("done", 1, "t2"),
    ]


async def test_a_rolled_back_claim_never_happened(database, item):
    first = item()
    async with await database.connect_async() as conn:
        await deliveries().claim(conn, [first], NOW, timedelta(0), KEEP)
        await conn.rollback()
    assert await claim(database, deliveries(), [first]) == [Run(1, 0)]


async def test_an_attempt_runs_by_its_retry_record_and_once(database, item):
    who = deliveries()
    first = item()
    now = whole_ms(datetime.now(UTC))
    async with await database.connect_async() as conn:
        await who.claim(conn, [first], now, timedelta(0), KEEP)
        await who.put_off(conn, [(first, PutOff("waiting", 1, now, "E", "broke"))], now, locked=True)
    retry_record = item(mark(2, due=now), event=first.event)
    assert await claim(database, who, [item(event=first.event)]) == [ProduceAgain(2, 0, now, now, "E", "broke")]
    assert await claim(database, who, [retry_record]) == [Run(2, 0, now)]
    assert await claim(database, who, [item(mark(2, due=now), event=first.event)]) == [Duplicate()]


async def test_a_claim_of_a_living_process_is_left_alone_and_a_dead_ones_taken_over(database, item):
    mine, others = deliveries(ME, transactional=False), deliveries(OTHER, transactional=False)
    first = item()
    async with await database.connect_async() as conn:
        await mine.renew(conn, "host", 1)
        await mine.claim(conn, [first], NOW, timedelta(0), KEEP)
    assert first.claim == 1
    second = item(event=first.event)
    assert await claim(database, others, [second]) == [Held()]
    database.execute("UPDATE worker_process SET renewed_at = renewed_at - interval '301 seconds'")
    assert await claim(database, others, [second]) == [Run(1, 0, None, ME)]
    assert second.claim == 2
    async with await database.connect_async() as conn:
        # the one that was given up for dead comes back with its outcome
        assert await mine.finish(conn, [first]) == set()
        assert await mine.put_off(conn, [(first, PutOff("dead", 1))], NOW, locked=False) == set()
        assert await others.finish(conn, [second]) == {0}


async def test_a_stop_hands_back_without_an_attempt(database, item):
    mine, others = deliveries(ME, transactional=False), deliveries(OTHER, transactional=False)
    first = item()
    await claim(database, mine, [first])
    async with await database.connect_async() as conn:
        assert await mine.hand_back(conn) == 1
    assert await claim(database, others, [item(event=first.event)]) == [Run(1, 0)]


async def test_two_processes_at_once_run_a_delivery_once(database, item):
    first = item()
    async with await database.connect_async() as one, await database.connect_async() as two:
        assert await deliveries(ME).claim(one, [first], NOW, timedelta(0), KEEP) == [Run(1, 0)]
        waiting = asyncio.create_task(deliveries(OTHER).claim(two, [item(event=first.event)], NOW, timedelta(0), KEEP))
        await asyncio.wait([waiting], timeout=0.3)
        assert not waiting.done()  # the row of the open transaction decides, once it is decided itself
        await one.commit()
        assert await waiting == [Duplicate()]


async def test_a_worker_that_starts_late_waits_in_a_topic_or_in_postgres(database, item):
    who = deliveries()
    now = datetime.now(UTC)
    short, long = item(), item()
    [verdict] = await claim(database, who, [short], now, timedelta(minutes=10))
    assert isinstance(verdict, ProduceAgain)
    assert verdict.attempt == 1
    assert verdict.due == whole_ms(short.event.created_at + timedelta(minutes=10))
    assert await claim(database, who, [long], now, timedelta(days=7)) == [Duplicate()]
    assert database.execute(
        "SELECT state, attempts, kept_value FROM event_delivery WHERE event_id = %s", [long.event.id]
    ) == [("waiting", 0, b"value")]


async def test_with_ordering_a_later_event_of_the_key_is_blocked_and_released(database, item):
    who = deliveries(ordered=True)
    now = whole_ms(datetime.now(UTC))
    first, second, third, elsewhere = item(key="a"), item(key="a"), item(key="a"), item(key="b")
    async with await database.connect_async() as conn:
        await who.claim(conn, [first], now, timedelta(0), KEEP)
        await who.put_off(conn, [(first, PutOff("waiting", 1, now, "E", "broke"))], now, locked=True)
    assert await claim(database, who, [second, elsewhere]) == [Blocked(), Run(1, 0)]
    assert await claim(database, who, [third]) == [Blocked()]
    async with await database.connect_async() as conn:
        assert await who.release_keys(conn, ["a"], now) == 0  # the first one still waits
        retried = item(mark(2, due=now), key="a", event=first.event)
        assert await who.claim(conn, [retried], now, timedelta(0), KEEP) == [Run(2, 0, now)]
        assert await who.release_keys(conn, ["a"], now) == 1
    rows = database.execute("SELECT event_id, state, kept_value IS NOT NULL FROM event_delivery WHERE key = 'a'")
    assert set(rows) == {
        (first.event.id, "done", False),
        (second.event.id, "waiting", True),
        (third.event.id, "blocked", True),
    }


async def test_with_ordering_those_blocked_together_go_on_in_their_order(database, item):
    """A batch blocks many at once; in which order the statement meets their rows is the planner's affair."""
    who = deliveries(ordered=True)
    now = whole_ms(datetime.now(UTC))
    first, behind = item(key="a"), [item(key="a") for _ in range(200)]
    async with await database.connect_async() as conn:
        await who.claim(conn, [first], now, timedelta(0), KEEP)
        await who.put_off(conn, [(first, PutOff("waiting", 1, now, "E", "broke"))], now, locked=True)
    async with await database.connect_async() as conn:
        await conn.execute("SET enable_nestloop = off")
        await conn.execute("SET enable_hashjoin = off")  # a merge join: by the events' random ids
        assert await who.claim(conn, behind, now, timedelta(0), KEEP) == [Blocked()] * 200
    rows = database.execute("SELECT event_id FROM event_delivery WHERE state = 'blocked' ORDER BY block_order")
    assert [event_id for (event_id,) in rows] == [i.event.id for i in behind]


@pytest.mark.parametrize("transactional", [True, False])
async def test_with_ordering_targets_fixed_before_wait_once_and_not_for_themselves(database, item, transactional):
    who = deliveries(transactional=transactional, ordered=True)
    now = whole_ms(datetime.now(UTC))
    items = [item(key="a") for _ in range(3)]
    first, second, third = items
    async with await database.connect_async() as conn:
        await who.fix_targets(conn, [(i.event, "", "a", "claimed") for i in items])
        for each in items:
            each.known = True
        assert await who.claim(conn, [first], now, timedelta(0), KEEP) == [Run(1, 0)]
        await who.put_off(conn, [(first, PutOff("waiting", 1, now, "E", "broke"))], now, locked=True)
        assert await who.claim(conn, [second], now, timedelta(0), KEEP) == [Blocked()]
        assert await who.claim(conn, [third], now, timedelta(0), KEEP) == [Blocked()]
        await who.put_off(conn, [(first, PutOff("dead", 2, None, "E", "broke"))], now, locked=True)
        assert await who.release_keys(conn, ["a"], now) == 1
        released = item(mark(1, due=now), key="a", event=second.event)
        assert await who.claim(conn, [released], now, timedelta(0), KEEP) == [Run(1, 0)]


async def test_with_ordering_a_delivery_that_a_stop_handed_back_is_still_in_front_of_its_key(database, item):
    """Its retry record comes to one member, the next event of its key to another."""
    stopped, other = (deliveries(who, transactional=False, ordered=True) for who in (ME, OTHER))
    first, second = item(key="a"), item(key="a")
    assert await claim(database, stopped, [first]) == [Run(1, 0)]
    async with await database.connect_async() as conn:
        assert await stopped.hand_back(conn) == 1
    assert await claim(database, other, [second]) == [Blocked()]
    assert await claim(database, other, [item(key="a", event=first.event)]) == [Run(1, 0)]


async def test_with_ordering_what_a_replay_runs_again_goes_behind_its_key(database, item):
    who = deliveries(ordered=True)
    now = whole_ms(datetime.now(UTC))
    done, failing = item(key="a"), item(key="a")
    assert await claim(database, who, [done]) == [Run(1, 0)]
    async with await database.connect_async() as conn:
        await who.claim(conn, [failing], now, timedelta(0), KEEP)
        await who.put_off(conn, [(failing, PutOff("waiting", 1, now, "E", "broke"))], now, locked=True)

    def replayed():
        again = item(key="a", event=done.event)
        again.record.again = 7
        return again

    assert await claim(database, who, [replayed()]) == [Blocked()]
    assert await claim(database, who, [replayed()]) == [Duplicate()]  # its bytes wait with it
    async with await database.connect_async() as conn:
        retried = item(mark(2, due=now), key="a", event=failing.event)
        assert await who.claim(conn, [retried], now, timedelta(0), KEEP) == [Run(2, 0, now)]
        assert await who.release_keys(conn, ["a"], now) == 1
    async with await database.connect_async() as conn:
        [row] = await who.due_kept(conn, now, 10)
        await who.no_longer_kept(conn, [row[:3]])
    assert (row[1], row[4], row[5]) == (done.event.id, 0, 1)
    assert await claim(database, who, [item(mark(1, 1, now), key="a", event=done.event)]) == [Run(1, 1)]
    assert await claim(database, who, [replayed()]) == [Duplicate()]


async def test_a_run_for_a_replay_that_is_lost_is_taken_over_under_the_same_generation(database, item):
    mine, others = deliveries(ME, transactional=False), deliveries(OTHER, transactional=False)
    first = item()
    async with await database.connect_async() as conn:
        await mine.renew(conn, "host", 1)
        await mine.claim(conn, [first], NOW, timedelta(0), KEEP)
        await mine.finish(conn, [first])

    def replayed(number):
        again = item(event=first.event)
        again.record.again = number
        return again

    assert await claim(database, mine, [replayed(3)]) == [Run(1, 1, again=True)]
    assert await claim(database, others, [second := replayed(3)]) == [Held()]
    assert await claim(database, others, [replayed(4)]) == [Held()]  # a later replay finds it open
    database.execute("UPDATE worker_process SET renewed_at = renewed_at - interval '301 seconds'")
    assert await claim(database, others, [second]) == [Run(1, 1, None, ME)]
    async with await database.connect_async() as conn:
        assert await others.finish(conn, [second]) == {0}
    assert await claim(database, mine, [replayed(3)]) == [Duplicate()]
    assert await claim(database, mine, [replayed(4)]) == [Run(1, 2, again=True)]


async def test_targets_are_fixed_by_the_first_who_looks(database, item):
    one = item()
    who = deliveries(transactional=False)
    async with await database.connect_async() as conn:
        assert await who.known_targets(conn, [one.event]) == {}
        await who.fix_targets(conn, [(one.event, "a", "a", "claimed"), (one.event, "b", "b", "claimed")])
    async with await database.connect_async() as conn:
        assert await who.known_targets(conn, [one.event]) == {0: ["a", "b"]}
    known = replace(item(event=one.event, target="a"), known=True)
    assert await claim(database, who, [known]) == [Run(1, 0)]
