"""Which events a replay is about: what people write, and what is kept of it."""

import json
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.relay.position import Entry, Snapshot, Window
from producers.relay.replay.selection import (
    MAX_OFFSET,
    Part,
    Progress,
    Selection,
    is_to_come,
    parse_offsets,
    parse_position,
)

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


@given(st.dictionaries(st.integers(0, 2**31 - 1), st.integers(0, MAX_OFFSET), min_size=1, max_size=50))
def test_offsets_are_read_as_they_are_written(offsets):
    assert parse_offsets(", ".join(f"{partition}:{offset}" for partition, offset in offsets.items())) == offsets


@pytest.mark.parametrize(
    "text", ["", "0", "0:", ":1", "a:1", "0:-1", "0:1,", "0:1,0:2", "0:1;1:2", f"0:{2**64}", "²:1"]
)
def test_what_is_no_offset_is_refused(text):
    with pytest.raises(ValueError, match=r"is not|twice|larger"):
        parse_offsets(text)


@st.composite
def snapshots(draw):
    xmin = draw(st.integers(3, 30))
    xmax = xmin + draw(st.integers(0, 10))
    return Snapshot(xmin, xmax, tuple(sorted(draw(st.sets(st.integers(xmin, xmax - 1))) if xmax > xmin else ())))


@st.composite
def entries(draw):
    entry = Entry(draw(snapshots()), draw(st.integers(0, 20)))
    if draw(st.booleans()):
        t2 = draw(st.integers(entry.t1, 30))
        entry = Entry(entry.s1, entry.t1, Window(draw(snapshots()), t2, draw(st.integers(0, t2))))
    return entry


@given(entries())
def test_a_position_is_read_in_each_form_that_people_have_it_in(entry):
    data = {"s1": str(entry.s1), "t1": entry.t1}
    if entry.window is not None:
        data |= {"s2": str(entry.window.s2), "t2": entry.window.t2, "last": entry.window.last}
    assert parse_position(json.dumps(data)) == (entry,)
    assert parse_position(json.dumps({"owner": None, "lag_rows": 3, "position": data})) == (entry,)
    assert parse_position(json.dumps([{"entries": [data | {"slots": [[0, 9]]}]}]))[0].slots == ((0, 9),)
    # Without a window `relay status` has its keys all the same.
    assert parse_position(json.dumps({"s2": None, "t2": None, "last": None} | data)) == (entry,)
    if entry.window is None:
        assert parse_position(f"{entry.s1}/{entry.t1}") == (entry,)


@pytest.mark.parametrize(
    "text",
    [
        "", "12", "3:4:/", "3:4:/x", "9:4:/1", "{", "{}", '{"s1": 3, "t1": 4}', '{"s1": "3:4:", "t1": "4"}', "[" * 5000,
        '{"s1": "3:4:", "t1": -1}',
        '{"s1": "3:4:", "t1": 9, "s2": "3:4:"}', '{"s1": "3:4:", "t1": 1, "slots": [[9, 3]]}',
        '{"s1": "3:4:", "t1": 1, "slots": 3}', '{"s1": "3:4:", "t1": 1, "organization": 3}',
        '{"s1": "3:4:", "t1": 1, "without": "all"}', '{"s1": "3:4:", "t1": 1, "without": [1]}',
         '{"s1": "3:4:", "t1": true}', "{" + " " * 1_000_000 + "}",
    ],
)  # fmt: skip
def test_what_is_no_position_is_refused(text):
    with pytest.raises(ValueError):  # noqa: PT011 - each says something else
        parse_position(text)


@given(entries(), st.integers(3, 45), st.integers(1, 40))
def test_to_come_is_the_rest_of_the_window_and_what_is_after_it(entry, tx_id, seq):
    organization = uuid4()
    published = entry.s1.shows(tx_id) and seq <= entry.t1
    if entry.window is not None:
        in_window = Entry(entry.s1, entry.t1, Window(entry.window.s2, entry.window.t2, 0)).contains(tx_id, seq)
        published = published or (in_window and seq <= entry.window.last)
        if entry.contains(tx_id, seq):
            assert is_to_come([entry], tx_id, seq, organization)
    assert is_to_come([entry], tx_id, seq, organization) == (not published)


def test_an_entry_speaks_for_its_organizations_only():
    low, busy, high = UUID(int=3), UUID(int=5), UUID(int=200)
    data = {
        "lanes": [
            {"entries": [{"slots": [[0, 99]], "without": [str(busy)], "s1": "9:9:", "t1": 5, "s2": None}]},
            {"entries": [{"slots": [[5, 5]], "organization": str(busy), "without": [], "s1": "30:30:", "t1": 50}]},
        ]
    }
    parts = parse_position(json.dumps(data))
    assert is_to_come(parts, 10, 1, low)
    assert not is_to_come(parts, 5, 5, low)
    assert not is_to_come(parts, 10, 1, busy)
    assert is_to_come(parts, 10, 51, busy)
    assert not is_to_come(parts, 10, 1, high)


@given(st.integers(0, 9), st.lists(st.one_of(st.integers(0, MAX_OFFSET), st.text(max_size=10))), st.integers(0, 2**60))
def test_progress_comes_back_as_it_was_written(part, cursor, count):
    progress = Progress(part, cursor, count, count + 1, count + 2, count + 3, "me")
    assert Progress.parse(progress.format()) == progress
    assert len(Progress(9, [9999, MAX_OFFSET], *[2**60] * 4).format()) < 4096  # what a broker takes


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "[1,2,3,4,5,6]", '["",0,[],1,2,3]', "[0,0,[],1,2,3,4]", '["","a",[],1,2,3,4]']
)
def test_what_is_no_progress_is_not_guessed_at(text):
    with pytest.raises(ValueError, match="is not the progress of a replay"):
        Progress.parse(text)


def test_a_selection_is_kept_whole():
    parts = (
        Part("topic", NOW, NOW + timedelta(days=1), ranges=(("events.lead", 0, 3, 9), ("events.lead", 1, 0, 4))),
        Part("table", NOW, None, first=3, last=90, snapshot="3:9:4", entries="3:9:4/7", ids=(uuid4(),)),
        Part("archive", NOW, NOW, directory="/there"),
    )
    wanted = Selection(parts, frozenset({uuid4(), uuid4()}), frozenset({"lead.created"}))
    assert Selection.from_json(json.loads(json.dumps(wanted.to_json()))) == wanted
