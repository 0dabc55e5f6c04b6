"""No window has more calls than the rate allows, whoever asks when and however late they come."""

import asyncio
import heapq
import itertools
import signal
import threading
import time
from collections import Counter, defaultdict
from uuid import uuid4

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from consumers import Policy, Rate
from consumers.runtime import rates
from consumers.runtime.rates import Answer, Ask, Bucket, answer
from schemas.topics import partition_of
from tests.consumers.runtime.limited_workers import Metered
from tests.consumers.runtime.support import (
    MESSAGE,
    PARTITIONS,
    ROOT,
    create_topics,
    effects,
    organizations_everywhere,
    produce,
    row,
    short_sessions,
    states,
    until,
)

RATES = st.integers(1, 12).flatmap(
    lambda count: st.builds(
        Rate, st.just(count), st.sampled_from([0.5, 1.0, 7.0, 60.0]), st.just("key"), st.integers(1, count)
    )
)
# Shares of the slack: under 1 a call comes in time, above it its moment is lost.
LATE = st.lists(st.sampled_from([0.0, 0.0, 0.3, 0.99, 1.0, 1.5, 8.0]), min_size=1, max_size=7)


def play(rate, arrivals, late, away=(0.0, 0.0)):
    """Deliveries arrive at `arrivals`, come back when they are told to, and are called at their moment, each time so
    much later as `late` says, but not for ever; between `away` nobody is there. Returns the times of the calls, by
    delivery."""
    late = itertools.chain(itertools.islice(itertools.cycle(late), 5 * len(arrivals)), itertools.repeat(0.0))
    numbers = itertools.count()
    bucket, calls = Bucket(), {}
    coming = [(at, next(numbers), n, Ask()) for n, at in enumerate(arrivals)]
    heapq.heapify(coming)
    for _ in range(100 * len(arrivals)):
        if not coming:
            return calls
        now, _, n, ask = heapq.heappop(coming)
        if away[0] <= now < away[1]:
            heapq.heappush(coming, (away[1], next(numbers), n, ask))
            continue
        bucket, [told] = answer(rate, bucket, [ask], now)
        delay = next(late) * rates.slack_s(rate)
        if told.given and told.moment - now <= rates.NEAR_S:
            if delay <= rates.slack_s(rate):
                calls[n] = told.moment + delay
                continue
            back = told.moment + delay
        elif told.given:
            back = max(now, told.moment - rates.LEAD_S) + delay
        else:
            back = told.moment + delay
        heapq.heappush(coming, (back, next(numbers), n, Ask(True, told.moment if told.given else None)))
    raise AssertionError("some were never called")


def most_in_a_window(times, per_s):
    times = sorted(times)
    return max(sum(1 for t in times[i:] if t - times[i] < per_s - 1e-6) for i in range(len(times)))


@settings(max_examples=200, deadline=None)
@given(
    rate=RATES,
    gaps=st.lists(st.sampled_from([0.0, 0.0, 0.0, 0.01, 0.4, 3.0, 50.0]), min_size=1, max_size=60),
    late=LATE,
    away=st.tuples(st.floats(0, 20), st.floats(0, 300)).map(lambda t: (t[0], t[0] + t[1])),
)
@example(Rate(3, 1.0), [0.0] * 40, [0.0], (0.5, 9.0))
def test_any_window_has_at_most_the_count_and_every_delivery_its_call(rate, gaps, late, away):
    calls = play(rate, list(itertools.accumulate(gaps)), late, away)
    assert len(calls) == len(gaps)
    assert most_in_a_window(calls.values(), rate.per_s) <= rate.count


@given(rate=RATES, count=st.integers(1, 40))
def test_a_burst_is_called_in_its_order_and_as_fast_as_the_rate_allows(rate, count):
    calls = play(rate, [0.0] * count, [0.0])
    spacing = rates.spacing_s(rate)
    assert [calls[n] for n in range(count)] == pytest.approx(
        [max(0, n + 1 - rate.burst) * spacing for n in range(count)]
    )


def test_300_a_minute_loses_two_in_a_hundred_to_the_slack():
    calls = play(Rate(300, 60), [0.0] * 1200, [0.0])
    assert calls[1199] == pytest.approx(240, rel=0.02)


def test_after_an_outage_what_was_due_goes_on_spread_and_in_order():
    rate = Rate(60, 60)
    calls = play(rate, [0.0] * 400, [0.0], away=(100.0, 200.0))
    # those that were due meanwhile follow each other; the rest moves back by as many, and none to the end of the line
    order = sorted(calls, key=calls.get)
    assert max(abs(n - at) for at, n in enumerate(order)) < 110
    assert max(calls.values()) == pytest.approx(500 * rates.spacing_s(rate), rel=0.02)


def test_who_waits_is_not_overtaken_by_who_comes_new():
    rate, now = Rate(1, 10.0), 100.0
    bucket, told = answer(rate, Bucket(), [Ask(), Ask(), Ask()], now)
    assert told == [Answer(100.0, True), Answer(111.0, False), Answer(122.0, False)]
    bucket, told = answer(rate, bucket, [Ask(waited=True), Ask()], 111.0)
    assert told == [Answer(111.0, True), Answer(133.0, False)]


def test_a_moment_is_good_until_the_slack_is_over():
    rate = Rate(10, 10.0)
    bucket = Bucket(50.0, 50.0)
    assert answer(rate, bucket, [Ask(True, 30.0)], 31.0) == (bucket, [Answer(30.0, True)])
    assert answer(rate, bucket, [Ask(True, 30.0)], 31.1)[1] == [Answer(50.0, True)]


@pytest.mark.parametrize("wrong", [{"count": 0}, {"per_s": 0}, {"burst": 0}, {"burst": 11}])
def test_a_rate_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="rate needs"):
        Policy(rate=Rate(**({"count": 10, "per_s": 1.0} | wrong)))


# On real servers


def received(organization, body="oi", entity=None):
    return row(organization, payload=MESSAGE | {"body": body}, entity_id=entity)


def by_organization(calls):
    times = defaultdict(list)
    for at, organization, _ in calls:
        times[organization].append(at)
    return times


@pytest.mark.parametrize("keep_s", [pytest.param(30.0, marks=pytest.mark.faults_long), 0.5])
@pytest.mark.faults_long
async def test_the_rate_holds_over_two_members_a_restart_and_failures(database, topics, running, monkeypatch, keep_s):
    """Some wait in memory, some come back through a retry topic (30.0) or out of Postgres (0.5)."""
    monkeypatch.setattr(rates, "NEAR_S", 0.4)
    monkeypatch.setattr(rates, "KEEP_BEYOND_S", keep_s)
    monkeypatch.setattr(rates, "LEAD_S", 0.2)
    organizations = organizations_everywhere(database, 3)
    first, second = Metered(), Metered()
    create_topics(topics, Metered.name)
    rows = [received(organizations[n % 3], "fail" if n < 15 else "oi") for n in range(90)]
    async with running(first, backoff_scale=0.001) as member:
        produce(topics, rows[:45])
        await member.of("worker.delivered", count=10)
        assert await member.stop()
    async with running(first, backoff_scale=0.001) as member, running(second, backoff_scale=0.001) as other:
        produce(topics, rows[45:])
        await asyncio.to_thread(until, lambda: states(database, Metered.name) == {"done": 90}, 30)
        assert await member.stop()
        assert await other.stop()
    calls = by_organization(first.calls + second.calls)
    assert sum(map(len, calls.values())) == 105  # a retry is a call
    for times in calls.values():
        assert most_in_a_window(times, 1.0) <= 20
    assert Counter(e for e, *_ in effects(database)) == dict.fromkeys([r.id for r in rows], 1)
    attempts = database.execute("SELECT attempts, count(*) FROM event_delivery GROUP BY 1 ORDER BY 1")
    assert attempts == [(1, 75), (2, 15)]  # waiting used none


@pytest.mark.faults_long
@pytest.mark.timeout(240)
def test_the_rate_holds_over_members_that_are_killed(database, topics, processes, tmp_path, effects_table):
    """Two members, each killed once in the middle and begun anew; the handler notes each call before it makes it."""
    organizations = organizations_everywhere(database, 3)
    create_topics(topics, Metered.name)
    short_sessions(topics, Metered.name)
    spelling = "tests.consumers.runtime.limited_workers:Metered"
    file, log = tmp_path / "calls", tmp_path / "faults"
    file.touch()
    env = {
        "PYTHONPATH": ROOT,
        "AFLUENTE_CLAIM_RENEW_S": "0.5",
        "AFLUENTE_CLAIM_TAKEOVER_S": "2",
        "AFLUENTE_BACKOFF_SCALE": "0.001",
        "CALLS_FILE": file,
    }
    rows = [received(organizations[n % 3], "fail" if n % 20 == 0 else "oi") for n in range(600)]
    produce(topics, rows)

    def calls():
        return [line.split() for line in file.read_text().splitlines()]

    first, second = (
        processes.start("worker", "run", spelling, env=env | {"AFLUENTE_FAULT": fault, "AFLUENTE_FAULT_LOG": log})
        for fault in ("worker.after_call:60", "worker.in_handler:90")
    )
    third = processes.start("worker", "run", spelling, env=env)
    for victim in (first, second):
        assert victim.wait(120) == -signal.SIGKILL, victim.log[-3000:]
    fourth = processes.start("worker", "run", spelling, env=env)
    until(lambda: states(database, Metered.name) == {"done": 600}, 90)
    assert log.read_text().count("KILL") == 2
    for process in (third, fourth):
        assert process.terminate() == 0
    by = by_organization((float(at), organization, event) for at, organization, event in calls())
    for times in by.values():
        assert most_in_a_window(times, 1.0) <= 20
    assert Counter(e for e, *_ in effects(database)) == dict.fromkeys([r.id for r in rows], 1)


class Thirty(Metered):
    policy = Policy(rate=Rate(30, 60, burst=10), concurrency=20)


async def test_one_at_its_limit_holds_no_place_and_another_on_its_partition_flows(database, topics, running):
    await other_flows(database, topics, running, 500)


@pytest.mark.faults_long
async def test_with_10_000_of_one_ahead_anothers_10_are_done_within_seconds(database, topics, running):
    await other_flows(database, topics, running, 10_000)


async def other_flows(database, topics, running, count):
    a, b = database.organization("a"), database.organization("b")
    while partition_of(b, PARTITIONS) != partition_of(a, PARTITIONS):
        b = database.organization("b")
    create_topics(topics, Thirty.name)
    worker = Thirty()
    produce(topics, [received(a) for _ in range(count)])
    async with running(worker) as member:
        await member.of("worker.delivered", organization_id=str(a))
        began = time.monotonic()
        theirs = await asyncio.to_thread(produce, topics, [received(b) for _ in range(10)])
        await member.of("worker.delivered", count=10, organization_id=str(b))
        took = time.monotonic() - began
        await asyncio.to_thread(
            until, lambda: states(database, Thirty.name).get("waiting", 0) + len(worker.calls) == count + 10, 60
        )
        calls = by_organization(worker.calls)
        assert await member.stop()
    assert took < 10
    assert len(calls[str(b)]) == 10
    assert 10 <= len(calls[str(a)]) <= 30
    assert theirs[-1].id in {event for event, *_ in effects(database)}
    # what waits is durable, and used no attempt
    waiting = database.execute("SELECT max(attempts), min(error_class) FROM event_delivery WHERE state = 'waiting'")
    assert waiting == [(0, "RateLimited")]


class Slow(Metered):
    """Takes longer to prepare than its moment is good for; once the event loop stands still besides."""

    name = "slow-worker"

    async def prepare(self, delivery, ctx):
        await ctx.connection.execute("SELECT pg_sleep(0.08)")

    async def call(self, delivery, prepared):
        await super().call(delivery, prepared)
        if len(self.calls) == 5:
            threading.Event().wait(0.5)


async def test_a_call_that_comes_too_late_for_its_moment_gets_another(database, topics, running):
    organizations = organizations_everywhere(database, 3)
    create_topics(topics, Slow.name)
    worker = Slow()
    produce(topics, [received(organizations[n % 3]) for n in range(24)])
    async with running(worker) as member:
        await member.of("worker.delivered", count=24)
        assert await member.stop()
    assert len(worker.calls) == 24
    for times in by_organization(worker.calls).values():
        assert most_in_a_window(times, 1.0) <= 20


class Keyed(Metered):
    name = "keyed-worker"
    policy = Policy(rate=Rate(4, 0.5, by="key"), ordering="key")


@pytest.mark.faults_long
async def test_each_key_has_its_rate_and_its_order(database, topics, running):
    organization = database.organization()
    create_topics(topics, Keyed.name)
    keys = [uuid4() for _ in range(3)]
    worker = Keyed()
    rows = [received(organization, entity=keys[n % 3]) for n in range(12)]
    async with running(worker) as member:
        produce(topics, rows)
        await member.of("worker.delivered", count=12, timeout=40)
        assert await member.stop()
    for key in keys:
        wanted = [r.id for r in rows if r.entity_id == key]
        assert [e for e, *_ in effects_of(database, key)] == wanted
        times = [at for at, _, event in worker.calls if event in set(map(str, wanted))]
        assert most_in_a_window(times, 0.5) <= 4


def effects_of(database, key):
    return database.execute("SELECT event_id FROM public.effect WHERE key = %s ORDER BY number", [str(key)])
