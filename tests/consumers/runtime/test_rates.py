"""No window has more calls than the rate allows, whoever asks when and however late they come."""

import heapq
import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from consumers import Policy, Rate
from consumers.runtime import rates
from consumers.runtime.rates import Answer, Ask, Bucket, answer

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
