"""Entries taken in turns: whoever is behind keeps nobody waiting, and what was parted comes together again."""

import uuid
from collections import defaultdict
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.relay import source as reading
from producers.relay import turns as taking
from producers.relay.position import Entry, slot_of
from producers.relay.source import Source
from producers.relay.turns import Shares, Turns

MANY = """
INSERT INTO event_log (organization_id, event_type, entity_kind)
SELECT %s, 'probe.counted', 'contact' FROM generate_series(1, %s)
"""


def made(row):
    return SimpleNamespace(key=row.organization_id, row=row)


@pytest.fixture
def source(database):
    source = Source(database.url, chunk_rows=100, poll_rows=10)
    yield source
    source.close()


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(taking, "JUDGED_ROWS", 300)
    monkeypatch.setattr(reading, "SCAN_SEQS", 400)


def until_caught_up(turns):
    found = [record.row for record in turns.take()]
    while turns.behind:
        found += [record.row for record in turns.take()]
    return found


def assert_each_once_in_order(rows, database):
    assert sorted(row.seq for row in rows) == [
        seq for (seq,) in database.execute("SELECT seq FROM event_log ORDER BY seq")
    ]
    by_organization = defaultdict(list)
    for row in rows:
        by_organization[row.organization_id].append(row.seq)
    assert all(seqs == sorted(seqs) for seqs in by_organization.values())


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4_000)), max_size=20))
def test_only_the_owner_of_more_than_half_of_a_backlog_is_named(chunks):
    shares, seen = Shares(lambda: 0.0), defaultdict(int)
    for letter, count in chunks:
        organization = uuid.UUID(letter * 32)
        named = shares.saw([str(organization).encode()] * count, behind=True)
        seen[organization] += count
        if (total := sum(seen.values())) < taking.JUDGED_ROWS:
            assert named is None
        else:
            most = max(seen.values())
            assert (named is None) == (most <= total / 2)
            assert named is None or seen[named] == most
            seen.clear()


def test_what_was_counted_is_forgotten_by_who_has_caught_up():
    shares, organization = Shares(lambda: 0.0), str(uuid.uuid4()).encode()
    assert shares.saw([organization] * 9_999, behind=True) is None
    assert shares.saw([organization] * 9_999, behind=False) is None
    assert shares.saw([organization] * 9_999, behind=True) is None


def test_fewer_rows_must_do_when_they_took_long():
    now = [0.0]
    shares, organization = Shares(lambda: now[0]), uuid.uuid4()
    chunk = [str(organization).encode()] * 100
    assert [shares.saw(chunk, behind=True) for _ in range(10)] == [None] * 10
    now[0] = taking.JUDGED_AFTER_S
    assert shares.saw(chunk, behind=True) == organization
    assert shares.saw(chunk, behind=True) is None  # it is counted anew


def test_a_large_organization_is_split_off_and_the_small_ones_go_ahead_of_it(short, database, writers, source):
    large, small = writers.organizations[:2]
    database.execute(MANY, [large, 2_000])
    database.execute(MANY, [small, 5])
    now = [0.0]
    turns = Turns(source, made, [Entry()], monotonic=lambda: now[0])
    rows = []
    while not any(row.organization_id == str(small).encode() for row in rows):
        rows += [record.row for record in turns.take()]
    # The small one's rows were the last to be written.
    assert turns.behind
    assert len(rows) < 1_200
    assert [entry.organization for entry in turns.entries] == [None, large]
    rows += until_caught_up(turns)
    assert_each_once_in_order(rows, database)

    # It stays apart for a while, and is taken back when it is calm.
    assert until_caught_up(turns) == []
    assert len(turns.entries) == 2
    now[0] += taking.APART_AT_LEAST_S
    writers.commit(3, large)
    assert len(until_caught_up(turns)) == 3
    assert turns.entries[0].everyone
    turns.close()


def test_entries_divided_anywhere_find_every_row_once(short, database, writers, source):
    database.execute(MANY, [writers.organizations[2], 150])
    writers.storm(120, threads=3, seed=11)
    first = Turns(source, made, [Entry()])
    rows = [record.row for record in first.take()]
    (entry,) = first.entries
    assert entry.window is not None
    border = slot_of(writers.organizations[0])
    parts = [part for low, high in ((0, border), (border + 1, 255)) if (part := entry.within(((low, high),)))]
    owner = next(part for part in parts if part.covers(writers.organizations[1]))
    parts.remove(owner)
    turns = Turns(source, made, [*parts, *owner.split_off(writers.organizations[1])])
    writers.storm(60, threads=3, seed=12)
    rows += until_caught_up(turns)
    # Others' transactions on this server let one turn's windows end in different places: another turn joins them.
    for _ in range(20):
        rows += until_caught_up(turns)
        if len(turns.entries) == 1:
            break
    assert_each_once_in_order(rows, database)
    assert turns.entries == (Entry(turns.entries[0].s1, turns.entries[0].t1),)
    turns.close()
    first.close()


def test_one_at_a_time_when_asked(short, database, writers, source):
    database.execute(MANY, [writers.organizations[0], 30])
    turns = Turns(source, made, Entry().split_off(writers.organizations[0]))
    rows = []
    while len(rows) < 30:
        taken = turns.take(alone=True)
        assert len(taken) <= 1
        rows += [record.row for record in taken]
    assert_each_once_in_order(rows, database)
    turns.close()
