"""The seed's backoff, its tiers and the order of what is due."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers import Policy
from consumers.runtime.retry import DueHeap, backoff_s, is_spent, tier_s, topic_delay

SEED = [30, 60, 120, 300, 600, 1800, 3600, 7200, 7200, 7200]


@pytest.mark.parametrize(("failed", "base"), list(enumerate(SEED, start=1)))
def test_backoff_of_the_seed_for_1_to_10(failed, base):
    policy = Policy()
    assert tier_s(policy, failed) == base
    assert backoff_s(policy, failed, lambda: 0.0) == base
    assert backoff_s(policy, failed, lambda: 0.999999) == pytest.approx(base * 1.3, rel=1e-5)


@given(st.integers(1, 20), st.floats(0, 1, exclude_max=True), st.floats(0.001, 10))
def test_jitter_stays_within_30_percent_and_scales(failed, random, scale):
    policy = Policy()
    base = SEED[min(failed, 8) - 1]
    assert base * scale <= backoff_s(policy, failed, lambda: random, scale) <= base * 1.3 * scale * 1.000001


def test_eight_runs_have_seven_waits_between_them():
    policy = Policy()
    assert [is_spent(policy, failed) for failed in range(1, 9)] == [False] * 7 + [True]


@pytest.mark.parametrize(
    ("wait_s", "delay"),
    [(-5, "now"), (0, "now"), (0.1, 30), (30, 30), (30.1, 60), (601, 1800), (7200, 7200), (7200.1, None), (1e9, None)],
)
def test_a_wait_goes_to_the_shortest_topic_that_is_long_enough(wait_s, delay):
    assert topic_delay(wait_s) == delay


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(0, 1000))
def test_what_is_due_comes_out_in_due_order_and_nothing_early(dues, now):
    heap = DueHeap()
    for number, due in enumerate(dues):
        heap.push(due, (due, number))
    out = list(heap.pop_due(now))
    assert out == sorted((due, number) for number, due in enumerate(dues) if due <= now)
    assert len(heap) == len(dues) - len(out)
    assert heap.next_due_ms == min((due for due in dues if due > now), default=None)


def test_what_is_discarded_never_comes_out():
    heap = DueHeap()
    for due in range(10):
        heap.push(due, due)
    assert heap.discard(lambda due: due % 2 == 0) == 5
    assert list(heap.pop_due(100)) == [1, 3, 5, 7, 9]


def test_a_burst_in_one_tier_is_spread_over_the_jitter():
    """1,000 failures in the same instant: none early, and no second gets more than 15% of them."""
    import random

    source = random.Random(7)
    dues = [backoff_s(Policy(), 1, source.random) for _ in range(1000)]
    per_second = [sum(1 for due in dues if second <= due < second + 1) for second in range(30, 40)]
    assert sum(per_second) == 1000
    assert max(per_second) < 150


@pytest.mark.parametrize(
    "wrong", [{"attempts": 0}, {"jitter": 1.5}, {"backoff_s": ()}, {"timeout_s": 0}, {"concurrency": 0}]
)
def test_a_policy_that_cannot_work_is_refused(wrong):
    with pytest.raises(ValueError, match=r"policy|jitter|positive"):
        Policy(**wrong)
