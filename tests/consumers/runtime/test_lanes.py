"""Keys side by side, one key in order, organizations in turn."""

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers.runtime.lanes import Lanes

ITEMS = st.lists(st.tuples(st.sampled_from("AB"), st.sampled_from("xyz")), max_size=40)


@given(ITEMS, st.integers(1, 5), st.integers(1, 5), st.sampled_from([None, 1, 2]), st.randoms(use_true_random=False))
def test_a_key_runs_one_at_a_time_and_in_order_and_nothing_is_lost(items, limit, per_lane, organization_limit, random):
    lanes = Lanes(organization_limit=organization_limit)
    pending = list(enumerate(items))
    running = {}
    seen = defaultdict(list)
    while pending or running or len(lanes):
        for _ in range(random.randint(0, 3)):
            if pending:
                number, (organization, key) = pending.pop(0)
                lanes.add(organization, key, number)
        taken = lanes.take(limit, per_lane=per_lane)
        assert sum(len(numbers) for *_, numbers in taken) <= limit
        for organization, key, numbers in taken:
            assert (organization, key) not in running
            assert 1 <= len(numbers) <= per_lane
            running[organization, key] = numbers
            seen[organization, key] += numbers
        assert lanes.running == len(running)
        if organization_limit:
            for organization in "AB":
                assert sum(1 for org, _ in running if org == organization) <= organization_limit
        if running and (not taken or random.random() < 0.5):
            lane = random.choice(sorted(running))
            numbers = running.pop(lane)
            keep = random.randint(0, len(numbers)) if random.random() < 0.3 else len(numbers)
            seen[lane] = seen[lane][: len(seen[lane]) - (len(numbers) - keep)]
            lanes.release(lane[0], lane[1], numbers[keep:])
    for organization, key in {(o, k) for o, k in items}:
        expected = [n for n, entry in enumerate(items) if entry == (organization, key)]
        assert seen[organization, key] == expected
    assert not lanes.has_ready


def test_an_organization_with_many_keys_waits_its_turn():
    lanes = Lanes()
    for number in range(1000):
        lanes.add("big", f"k{number}", number)
    lanes.add("small", "k", "theirs")
    first = lanes.take(3)
    assert [organization for organization, *_ in first] == ["big", "small", "big"]


def test_an_organization_at_its_limit_holds_no_place():
    lanes = Lanes(organization_limit=2)
    for number in range(10):
        lanes.add("big", f"k{number}", number)
        lanes.add("small", f"k{number}", number)
    taken = lanes.take(10)
    assert sorted(str(organization) for organization, *_ in taken) == ["big", "big", "small", "small"]
    lanes.release("big", "k0")
    assert [organization for organization, *_ in lanes.take(10)] == ["big"]


def test_what_is_dropped_is_not_run_and_the_rest_stays_in_order():
    lanes = Lanes()
    for number in range(6):
        lanes.add("A", "x", number)
    [(_, _, first)] = lanes.take(1)
    assert first == [0]
    assert lanes.discard(lambda number: number % 2 == 1) == [1, 3, 5]
    lanes.release("A", "x")
    assert [lanes.take(5, per_lane=5)[0][2]] == [[2, 4]]
    assert lanes.discard(lambda number: True) == []


def test_a_lane_is_released_once():
    lanes = Lanes()
    lanes.add("A", "x", 1)
    lanes.add("A", "x", 2)
    lanes.take(1)
    lanes.release("A", "x")
    with pytest.raises(ValueError, match="not running"):
        lanes.release("A", "x")
