"""The fold does not depend on order or on batch boundaries, and sums are exact."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal, Inexact
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.summaries.fold import DEFAULT_CURRENCY, EXACT, Fact, Increment, Key, fold, merge

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)

amounts = st.decimals(min_value="-1e30", max_value="1e30", allow_nan=False, allow_infinity=False, places=8)
facts = st.lists(
    st.builds(
        Fact,
        organization_id=st.sampled_from(["o1", "o2"]),
        contact_event_id=st.uuids().map(str),
        contact_id=st.sampled_from(["c1", "c2", "c3"]),
        metric_name=st.sampled_from(["Order Paid", "Pedido é"]),
        occurred_at=st.integers(-(10**15), 10**15).map(lambda n: EPOCH + timedelta(microseconds=n)),
        value=st.none() | amounts,
        currency=st.sampled_from([None, "BRL", "USD"]),
    ),
    max_size=40,
)


@given(facts, st.data())
def test_the_order_of_facts_does_not_matter(some, data):
    assert fold(data.draw(st.permutations(some))) == fold(some)


@given(facts, st.lists(st.integers(0, 40), max_size=6))
def test_batch_boundaries_do_not_matter(some, cuts):
    merged: dict[Key, Increment] = {}
    edges = [0, *sorted(min(cut, len(some)) for cut in cuts), len(some)]
    for start, end in pairwise(edges):
        merge(merged, fold(some[start:end]))
    assert merged == fold(some)


@given(facts)
def test_merging_leaves_the_other_side_alone(some):
    other = fold(some)
    into: dict[Key, Increment] = {}
    merge(into, other)
    merge(into, other)
    assert other == fold(some)
    assert sum(increment.event_count for increment in into.values()) == 2 * len(some)


@given(facts)
def test_the_fold_is_the_recount(some):
    folded = fold(some)
    assert set(folded) == {Key(fact.organization_id, fact.contact_id, fact.metric_name) for fact in some}
    for key, increment in folded.items():
        own = [fact for fact in some if (fact.organization_id, fact.contact_id, fact.metric_name) == key]
        assert increment.event_count == len(own)
        assert increment.first_event_at == min(fact.occurred_at for fact in own)
        assert increment.last_event_at == max(fact.occurred_at for fact in own)
        for currency in {fact.currency or DEFAULT_CURRENCY for fact in own if fact.value is not None}:
            # As integers of the smallest unit: no decimal context takes part.
            units = [
                int(fact.value.scaleb(8, EXACT))
                for fact in own
                if fact.value is not None and (fact.currency or DEFAULT_CURRENCY) == currency
            ]
            assert int(increment.totals[currency].value.scaleb(8, EXACT)) == sum(units)
            assert increment.totals[currency].count == len(units)


def test_sums_keep_every_digit_or_fail():
    def fact(value):
        return Fact("o", "e", "c", "m", EPOCH, Decimal(value), None)

    folded = fold([fact("1e40"), fact("1e-40")])
    assert folded[Key("o", "c", "m")].totals["BRL"].value == Decimal("1" + "0" * 40 + "." + "0" * 39 + "1")
    with pytest.raises(Inexact):
        fold([fact("1e150"), fact("1e-150")])
