"""The comparison's pure parts: which rows wait, and what the sightings of one event mean."""

from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.relay.comparing import Bucket, ById, Kind, Published, Seen, Source, differing, portions
from producers.relay.position import Entry, Snapshot, Window

AT = datetime(2026, 11, 29, 12, 30, tzinfo=UTC)
SHOP = UUID("7f3c1d2e-5b6a-4c8d-9e0f-112233445566")


@st.composite
def snapshots(draw):
    xmin = draw(st.integers(3, 20))
    xmax = draw(st.integers(xmin, 25))
    running = draw(st.sets(st.integers(xmin, xmax - 1))) if xmax > xmin else set()
    return Snapshot(xmin, xmax, tuple(sorted(running)))


@given(snapshots(), snapshots(), st.integers(0, 9), st.integers(0, 9), st.integers(0, 18), st.data())
def test_a_row_waits_until_it_is_neither_left_in_the_window_nor_behind_it(s1, s2, t1, more, last, data):
    """By the position's own definition: not among what is left of the window, nor beyond what the window shows."""
    window = Window(s2, t1 + more, min(last, t1 + more))
    entry = Entry(s1, t1, window)
    tx_id, seq = data.draw(st.integers(3, 26)), data.draw(st.integers(1, 20))
    known = s1.shows(tx_id) and seq <= t1
    in_window = not known and seq <= window.t2 and s2.shows(tx_id)
    published = known or (in_window and not entry.contains(tx_id, seq))
    if known and not s2.shows(tx_id):
        return  # ids that came again after a crash: what s1 has seen is published whatever s2 says
    assert Published([entry])(SHOP, tx_id, seq) == published


def test_each_organization_is_judged_by_its_own_entry():
    behind, ahead = Snapshot(5, 5), Snapshot(50, 50)
    own = Entry(ahead, 100, slots=((0x66, 0x66),), organization=SHOP)
    low = Entry(behind, 10, slots=((0, 0x7F),), without=frozenset({SHOP}))
    published = Published([own, low])
    neighbour = UUID(int=SHOP.int ^ 1 << 100)  # of the same slot
    assert published(SHOP, 20, 50)
    assert not published(neighbour, 20, 50)
    assert published(neighbour, 4, 10)
    assert not published(UUID(int=0xFF), 4, 10)  # of slots that no lane has published yet


def seen(source, *, event_id=SHOP, hash_=1, place="t[0]@1", **fields):
    return Seen(source, event_id, SHOP, AT, "lead.won", None, 7, hash_, (b"x",) * 7, place=place, **fields)


@pytest.mark.parametrize(
    ("events", "kinds"),
    [
        ([Source.row, Source.record], []),
        ([Source.row, Source.letter], []),
        ([Source.row, Source.letter, Source.record], []),
        ([Source.row, Source.letter, Source.letter], []),  # published again on request, and refused again
        ([Source.waiting], []),
        ([Source.waiting, Source.record], []),
        ([Source.row], [Kind.missing_in_topic]),
        ([Source.record], [Kind.only_in_topic]),
        ([Source.letter], [Kind.only_in_topic]),
        ([Source.row, Source.record, Source.record], [Kind.twice_in_topic]),
        ([Source.waiting, Source.record, Source.record], [Kind.twice_in_topic]),
        ([Source.record, Source.record], [Kind.only_in_topic, Kind.twice_in_topic]),
        ([Source.row, Source.letter, Source.record, Source.record], [Kind.twice_in_topic]),
    ],
)
def test_what_sightings_of_one_event_mean(events, kinds):
    ids = ById()
    for source in events:
        ids.take(seen(source))
    assert [difference.kind for difference in ids.judge().differences] == kinds


def test_a_dead_letter_by_reference_is_looked_at_and_believed():
    bucket, ids = Bucket(), ById()
    for event in (seen(Source.row), seen(Source.letter, hash_=None)):
        bucket.add(event.source, event.hash_)
        ids.take(event)
    assert not bucket.is_equal
    verdict = ids.judge()
    assert (verdict.differences, verdict.dead_lettered) == ([], 1)


def test_sums_cannot_hide_a_swap():
    """One missing and another one twice have the right count, and not the right sum."""
    bucket = Bucket()
    for source, hash_ in ((Source.row, 1), (Source.row, 2), (Source.record, 1), (Source.record, 1)):
        bucket.add(source, hash_)
    assert not bucket.is_equal


def test_hours_are_looked_at_in_portions():
    buckets = {}
    for hour, count in enumerate([3, 3, 9, 1]):
        bucket = buckets[(1, hour)] = Bucket()
        for n in range(count):
            bucket.add(Source.row, n)
    assert list(portions(differing(buckets), 6)) == [{(1, 0), (1, 1)}, {(1, 2)}, {(1, 3)}]
    assert [key for key, bucket in buckets.items() if bucket.is_equal] == []
    event = seen(Source.row, event_id=uuid4())
    assert event.key == (SHOP.int, (AT - timedelta(minutes=30)).timestamp() // 3600)
