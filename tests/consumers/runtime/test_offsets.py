"""What may be committed, under any order of finishing and any gaps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers.runtime.offsets import PartitionOffsets


@st.composite
def histories(draw):
    """Offsets with gaps, in log order, and the order in which they finish."""
    offsets = sorted(draw(st.sets(st.integers(0, 1000), min_size=1, max_size=60)))
    return offsets, draw(st.permutations(offsets))


@given(histories(), st.data())
def test_everything_below_the_mark_is_finished_and_the_first_above_is_not(history, data):
    offsets, finishing = history
    partition = PartitionOffsets()
    handed_out = 0
    finished = set()
    for offset in finishing:
        # hand out in log order, as far as this one needs and sometimes further
        need = offsets.index(offset) + 1
        upto = max(handed_out, data.draw(st.integers(need, len(offsets))))
        for out in offsets[handed_out:upto]:
            partition.hand_out(out)
        handed_out = upto
        partition.finish(offset)
        finished.add(offset)
        open_offsets = [o for o in offsets[:handed_out] if o not in finished]
        mark = partition.committable
        if mark is not None:
            assert all(o in finished for o in offsets[:handed_out] if o < mark)
        if open_offsets:
            assert mark is None or mark <= open_offsets[0]
            done_before = [o for o in offsets if o < open_offsets[0]]
            assert mark == (done_before[-1] + 1 if done_before else None)
        else:
            assert mark == offsets[handed_out - 1] + 1
        assert partition.idle == (not open_offsets)


def test_gaps_of_transactions_do_not_hold_the_mark():
    partition = PartitionOffsets()
    for offset in (0, 2, 4, 6):
        partition.hand_out(offset)
    marks = []
    for offset in (0, 4, 6, 2):
        partition.finish(offset)
        marks.append(partition.committable)
    assert marks == [1, 1, 1, 7]


def test_an_offset_is_handed_out_and_finished_once():
    partition = PartitionOffsets()
    partition.hand_out(3)
    with pytest.raises(ValueError, match="handed out already"):
        partition.hand_out(3)
    with pytest.raises(ValueError, match="not outstanding"):
        partition.finish(2)
    partition.finish(3)
    with pytest.raises(ValueError, match="not outstanding"):
        partition.finish(3)
    with pytest.raises(ValueError, match="handed out already"):
        partition.hand_out(2)
