"""When a destination is left alone, when one call tries it, and what closes it."""

import asyncio
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afluente.cli.worker.status import described
from consumers import Breaker, Reject, RetryAfter, Snooze
from consumers.runtime.breakers import CLOSED, Outcome, Probe, Wait, admit, after, counts, open_s
from consumers.runtime.status import look
from tests.consumers.runtime.limited_workers import Patched
from tests.consumers.runtime.support import MESSAGE, create_topics, produce, row, states

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
ME = uuid4()
BREAKER = Breaker(failures=3, open_s=30, max_open_s=100)
GOOD, BAD = Outcome("success"), Outcome("failure", error_class="ConnectionError", error="refused")


def later(seconds):
    return NOW + timedelta(seconds=seconds)


def opened():
    return after(BREAKER, CLOSED, [BAD, BAD, BAD], NOW)


def test_it_opens_after_failures_in_a_row_and_says_why():
    assert after(BREAKER, CLOSED, [BAD, BAD, GOOD, BAD, BAD], NOW).open_until is None
    state = opened()
    assert (state.open_until, state.failures, state.opened_count) == (later(30), 3, 1)
    assert (state.error_class, state.error) == ("ConnectionError", "refused")
    assert admit(BREAKER, state, ME, 5.0, later(29))[1] == Wait(later(30))


def test_one_probe_at_a_time_and_its_success_closes():
    state, admission = admit(BREAKER, opened(), ME, 5.0, later(30))
    assert admission == Probe(1)
    assert (state.probe_by, state.probe_until) == (ME, later(40))
    same, second = admit(BREAKER, state, uuid4(), 5.0, later(31))
    assert (same, second) == (state, Wait(later(36)))
    assert after(BREAKER, state, [Outcome("success", probe=1)], later(31)) == CLOSED


def test_its_failure_opens_for_twice_as_long_up_to_the_longest():
    state, waits = opened(), []
    for number in range(1, 5):
        now = state.open_until
        state, admission = admit(BREAKER, state, ME, 5.0, now)
        assert admission == Probe(number)
        state = after(BREAKER, state, [Outcome("failure", probe=number)], now)
        waits.append((state.open_until - now).total_seconds())
        assert state.probe_until is None
    assert waits == [60, 100, 100, 100]


def test_what_began_before_it_opened_changes_nothing():
    state = opened()
    assert after(BREAKER, state, [GOOD, BAD, Outcome("success", probe=0)], later(1)) == state


def test_a_probe_that_says_nothing_or_is_lost_makes_room_for_another():
    state, _ = admit(BREAKER, opened(), ME, 5.0, later(30))
    released = after(BREAKER, state, [Outcome("neither", probe=1)], later(31))
    assert admit(BREAKER, released, ME, 5.0, later(31))[1] == Probe(1)
    assert admit(BREAKER, state, ME, 5.0, later(40))[1] == Probe(1)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectionError(), True),
        (TimeoutError(), True),
        (RetryAfter(3, "429"), True),
        (Reject("400"), False),
        (Snooze(3), False),
        (KeyError("final"), False),
    ],
)
def test_which_errors_say_something_about_the_destination(error, expected):
    assert counts(BREAKER, error, final=(KeyError,)) is expected
    assert counts(Breaker(errors=(OSError,)), error) is (expected and isinstance(error, OSError))


@given(st.lists(st.sampled_from(["success", "failure", "neither", "ask", "later"]), max_size=60))
def test_open_nothing_is_called_but_one_probe(steps):
    state, now, probes = CLOSED, NOW, 0
    for step in steps:
        if step == "later":
            now += timedelta(seconds=20)
        elif step == "ask":
            before = state
            state, admission = admit(BREAKER, state, ME, 5.0, now)
            assert (admission is None) == (before.open_until is None)
            if isinstance(admission, Probe):
                assert now >= before.open_until
                assert probes == 0 or now >= before.probe_until
                probes = 1
        else:
            state = after(BREAKER, state, [Outcome(step, probe=state.opened_count if probes else None)], now)
            probes = 0
        assert state.open_until is None or state.opened_count >= 1
        if state.open_until is not None:
            assert state.open_until <= now + timedelta(seconds=open_s(BREAKER, state.opened_count))


@pytest.mark.parametrize("wrong", [{"failures": 0}, {"open_s": 0}, {"max_open_s": 1}])
def test_a_breaker_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="breaker needs"):
        Breaker(**wrong)


# On real servers


async def test_a_destination_that_is_down_burns_no_attempts_and_holds_up_no_other(database, topics, running):
    organization = database.organization()
    create_topics(topics, Patched.name)
    worker = Patched()
    worker.down.add("down.example")

    def to(destination):
        return row(organization, payload=MESSAGE | {"body": destination})

    broken = [to("down.example") for _ in range(30)]
    async with running(worker, backoff_scale=0.001) as member:
        produce(topics, broken)
        opened = await member.of("worker.circuit_opened", destination="down.example")
        fine = produce(topics, [to("up.example") for _ in range(30)])
        await member.of("worker.delivered", count=30)
        again = await member.of("worker.circuit_opened", destination="down.example", times=3)
        [breaker] = database.execute(
            "SELECT failures >= 3, opened_count >= 3, error_class, last_error FROM worker_breaker WHERE worker = %s",
            [worker.name],
        )
        types = {worker.name: worker.event_types}
        with database.connect(autocommit=True) as conn:
            [state] = await asyncio.to_thread(look, topics.settings, conn, types, over_s=0)
        while_down = sum(destination == "down.example" for _, destination, _ in worker.calls)
        worker.down.clear()
        await member.of("worker.circuit_closed", destination="down.example")
        await member.of("worker.delivered", count=60)
        assert await member.stop()
    assert (opened["times"], again["error"]) == (1, "no answer")
    assert breaker == (True, True, "ConnectionError", "no answer")
    [shown] = described(state, whole=True)["open_breakers"]
    assert (shown["destination"], shown["error"]) == ("down.example", "ConnectionError: no answer")
    assert shown["times"] >= 3
    # those in flight when it opened (at most the first batch), then one for each time that it was tried
    assert while_down <= 30 + 3
    assert states(database, worker.name) == {"done": 60}
    # each call was an attempt, each wait none: far from the eight of the policy
    attempts = dict(database.execute("SELECT event_id, attempts FROM event_delivery"))
    called = Counter(event for _, _, event in worker.calls)
    assert {str(event): n for event, n in attempts.items()} == dict(called)
    assert sum(called[str(r.id)] for r in broken) == while_down + 30
    assert {called[str(r.id)] for r in fine} == {1}
    assert database.execute("SELECT open_until, failures FROM worker_breaker") == [(None, 0)]


async def test_an_open_breaker_holds_for_the_next_member_and_one_probe_is_made(database, topics, running):
    organization = database.organization()
    create_topics(topics, Patched.name)
    database.execute(
        """INSERT INTO worker_breaker (worker, destination, failures, opened_count, open_until)
           VALUES (%s, 'down.example', 3, 1, clock_timestamp() + interval '0.7 s')""",
        [Patched.name],
    )
    worker = Patched()
    answered = asyncio.Event()

    async def call(delivery, prepared):
        worker.calls.append((time.time(), delivery.payload["body"], str(delivery.event.id)))
        await answered.wait()

    worker.call = call  # type: ignore[method-assign]
    [until] = database.execute("SELECT extract(epoch FROM open_until)::float8 FROM worker_breaker")[0]
    async with running(worker) as member:
        rows = produce(topics, [row(organization, payload=MESSAGE | {"body": "down.example"}) for _ in range(8)])
        # put off once by the open breaker, and the seven others once more by the probe
        await member.of("worker.put_off", count=8 + 7, error="CircuitOpen")
        assert len(worker.calls) == 1
        assert worker.calls[0][0] >= until
        answered.set()
        await member.of("worker.delivered", count=8)
        assert await member.stop()
    assert len(worker.calls) == len(rows)
    assert database.execute("SELECT DISTINCT attempts FROM event_delivery") == [(1,)]
