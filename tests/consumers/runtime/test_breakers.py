"""When a destination is left alone, when one call tries it, and what closes it."""

from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers import Breaker, Reject, RetryAfter, Snooze
from consumers.runtime.breakers import CLOSED, Outcome, Probe, Wait, admit, after, counts, open_s

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
