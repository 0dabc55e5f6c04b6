"""The position's arithmetic and text form, against definitions written out a second time."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.relay.errors import PositionError
from producers.relay.position import (
    NOTHING,
    Closing,
    DatabaseIdentity,
    Entry,
    Head,
    Identity,
    KafkaIdentity,
    Position,
    Snapshot,
    Window,
    Witness,
    lane_slots,
    merged,
)

IDENTITY = Identity(
    DatabaseIdentity("7556", 1, 16384, "crm"), KafkaIdentity("abc", {"events.lead": "id-1", "relay.positions": "id-2"})
)


@st.composite
def snapshots(draw):
    xmin = draw(st.integers(3, 2**40))
    xmax = xmin + draw(st.integers(0, 30))
    xip = draw(st.sets(st.integers(xmin, xmax - 1), max_size=10)) if xmax > xmin else set()
    return Snapshot(xmin, xmax, tuple(sorted(xip)))


@st.composite
def entries(draw):
    t1 = draw(st.integers(0, 2**40))
    window = None
    if draw(st.booleans()):
        t2 = t1 + draw(st.integers(0, 1000))
        window = Window(draw(snapshots()), t2, draw(st.integers(0, t2)))
    return Entry(draw(snapshots()), t1, window)


@st.composite
def divided(draw):
    """The entries of one lane after some splits: of slots, and of organizations."""
    lanes = draw(st.integers(1, 64))
    lane = draw(st.integers(0, lanes - 1))
    ((low, high),) = lane_slots(lane, lanes)
    borders = sorted(draw(st.sets(st.integers(low + 1, high), max_size=2))) if high > low else []
    parts = []
    for first, last in zip([low, *borders], [border - 1 for border in borders] + [high], strict=True):
        entry = replace(draw(entries()), slots=((first, last),), reprocessed=draw(st.integers(0, 5)))
        for hot in draw(st.sets(st.integers(0, 2**120 - 1), max_size=2)):
            organization = UUID(int=(hot << 8) + draw(st.integers(first, last)))
            if entry.covers(organization):
                entry, own = entry.split_off(organization)
                parts.append(own)
        parts.append(entry)
    return lane, lanes, tuple(parts)


@st.composite
def positions(draw):
    lane, lanes, parts = draw(divided())
    return Position(
        identity=IDENTITY,
        entries=parts,
        number=draw(st.integers(0, 2**50)),
        instance=draw(st.text(max_size=20)),
        published=draw(st.integers(0, 2**50)),
        dead_lettered=draw(st.integers(0, 2**20)),
        written_at=draw(st.datetimes(timezones=st.just(UTC))),
        lane=lane,
        lanes=lanes,
        closing=draw(st.sampled_from([None, Closing(2, 3)])),
    )


@given(snapshots())
def test_snapshot_survives_its_text(snapshot):
    assert Snapshot.parse(str(snapshot)) == snapshot


@given(snapshots(), st.integers(1, 2**41))
def test_snapshot_shows_what_had_ended(snapshot, tx_id):
    running = tx_id in snapshot.xip or tx_id >= snapshot.xmax
    assert snapshot.shows(tx_id) is (not running)


@pytest.mark.parametrize(
    "text", ["", "1:2", "2:1:", "a:b:", "5:9:4", "5:9:9", "5:9:7,6", "5:9:6,6", "0:1:", "5:9:6,", "-5:9:", "5:9:٦"]
)
def test_what_is_no_snapshot_is_refused(text):
    with pytest.raises(PositionError, match="is not a snapshot"):
        Snapshot.parse(text)


@given(positions())
def test_position_survives_its_text(position):
    assert Position.parse(position.format()) == position
    assert Position.parse(position.format()).format() == position.format()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 3}, "run the newer version"),
        ({"entries": [{"slots": [[0, 255]], "s1": "3:3:", "t1": 5, "s2": "3:3:", "t2": 9}]}, "has s2, t2 only"),
        ({"entries": [{"slots": [[0, 255]], "s1": "3:3:", "t1": 5, "s2": "3:3:", "t2": 4, "last": 0}]}, "highest"),
        ({"entries": [{"slots": [[0, 256]], "s1": "3:3:", "t1": 5}]}, "leave 0-255"),
        (
            {"entries": [{"slots": [[0, 9]], "s1": "3:3:", "t1": 5}, {"slots": [[9, 9]], "s1": "3:3:", "t1": 5}]},
            "common",
        ),
        ({"number": None}, "cannot be read"),
    ],
)
def test_a_position_that_breaks_its_rules_is_not_guessed_at(change, message):
    data = json.loads(Position(IDENTITY, (Entry(),)).format()) | change
    with pytest.raises(PositionError, match=message):
        Position.parse(json.dumps(data).encode())


@pytest.mark.parametrize("value", [b"", b"[]", b"null", b"\xff\xfe", b"{}", b'{"format":1}'])
def test_bytes_that_are_no_position_are_refused(value):
    with pytest.raises(PositionError):
        Position.parse(value)


@given(entries(), snapshots(), st.integers(0, 2**41))
def test_t_never_falls_and_a_window_starts_empty(entry, snapshot, top):
    if entry.window is not None:
        with pytest.raises(PositionError, match="open already"):
            entry.opened(Head(snapshot, top))
        entry = entry.completed()
    opened = entry.opened(Head(snapshot, top))
    assert opened.window == Window(snapshot, max(entry.t1, top), 0)
    assert (opened.completed().s1, opened.completed().t1) == (snapshot, max(entry.t1, top))


@given(st.data())
def test_any_chunking_of_a_window_reads_each_row_once_and_leaves_the_rest_for_the_next(data):
    """Against sets: what s1 showed up to t1 is published; the window adds what s2 shows up to t2, in order."""
    tx_ids = st.integers(3, 20)
    rows = data.draw(st.lists(tx_ids, min_size=1, max_size=30))
    table = list(zip(rows, range(1, len(rows) + 1), strict=True))  # (tx_id, seq)
    running = data.draw(st.sets(tx_ids, max_size=5))
    s1 = Snapshot(min(running | {12}), 12, tuple(sorted(x for x in running if x < 12)))
    still_running = data.draw(st.sets(st.sampled_from(sorted(running)))) if running else set()
    s2 = Snapshot(min(still_running | {18}), 18, tuple(sorted(x for x in still_running if x < 18)))
    visible_1 = [seq for tx_id, seq in table if s1.shows(tx_id)]
    visible_2 = [seq for tx_id, seq in table if s2.shows(tx_id)]
    t1 = max(visible_1, default=0)
    entry = Entry(s1, t1).opened(Head(s2, max(visible_2, default=0)))

    read = []
    while left := sorted(seq for tx_id, seq in table if entry.contains(tx_id, seq)):
        chunk = left[: data.draw(st.integers(1, 5))]
        read += chunk
        entry = Position.parse(Position(IDENTITY, (entry.read_to(chunk[-1]),)).format()).entries[0]

    assert read == sorted(set(visible_2) - set(visible_1))
    after = entry.completed()
    assert after == Entry(s2, max([t1, *visible_2]))
    rest = after.opened(Head(Snapshot(100, 100), len(table)))
    assert {seq for tx_id, seq in table if rest.contains(tx_id, seq)} == {seq for _, seq in table} - set(visible_2) - {
        seq for seq in visible_1
    }


def test_a_row_of_a_transaction_id_given_out_again_is_in_the_next_window():
    """s1 counts id 10 as ended (it was aborted, unflushed); after the crash it comes again, with a seq above t1."""
    entry = Entry(Snapshot(12, 12), 40).opened(Head(Snapshot(11, 11), 44))
    assert entry.contains(tx_id=10, seq=43)
    assert not entry.contains(tx_id=10, seq=39)


def test_a_row_of_a_transaction_id_given_out_again_cannot_slip_into_an_open_window():
    """The window was fixed before the crash: a row made afterwards has a seq above t2, whatever its id."""
    entry = Entry(Snapshot(8, 8), 30).opened(Head(Snapshot(12, 12), 40)).read_to(35)
    assert entry.contains(tx_id=9, seq=36)
    assert not entry.contains(tx_id=10, seq=41)
    assert entry.completed().opened(Head(Snapshot(11, 11), 41)).contains(tx_id=10, seq=41)


def test_steps_that_would_break_the_window_are_refused():
    entry = Entry(Snapshot(8, 8), 30)
    with pytest.raises(PositionError, match="no window is open"):
        entry.completed()
    window = entry.opened(Head(Snapshot(9, 9), 40)).read_to(35)
    for seq in (35, 34, 41):
        with pytest.raises(PositionError, match="is not after"):
            window.read_to(seq)


def test_the_first_position_shows_nothing():
    assert not any(NOTHING.shows(tx_id) for tx_id in range(3, 100))
    entry = Entry().opened(Head(Snapshot(900, 900), 7))
    assert all(entry.contains(3, seq) for seq in range(1, 8))


def test_next_counts_and_names_its_writer():
    at = datetime(2026, 11, 29, tzinfo=UTC)
    first = Position(IDENTITY).next([Entry(t1=5)], instance="a", at=at, published=5, dead=1)
    second = first.next([Entry(t1=6)], instance="b", at=at, published=1, dead=0)
    assert (second.number, second.published, second.dead_lettered, second.instance) == (2, 6, 1, "b")


def test_the_witness_is_the_published_row_with_the_highest_seq():
    position, at = Position(IDENTITY), datetime(2026, 11, 29, tzinfo=UTC)
    seen = []
    for witness in (None, Witness(5, "a"), None, Witness(3, "b"), Witness(6, "c")):
        position = position.next([Entry()], instance="", at=at, published=0, dead=0, witness=witness)
        seen.append(Position.parse(position.format()).witness)
    assert seen == [None, Witness(5, "a"), Witness(5, "a"), Witness(5, "a"), Witness(6, "c")]


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (Identity(DatabaseIdentity("1", 1, 16384, "crm"), IDENTITY.kafka), "Postgres cluster is another one"),
        (Identity(DatabaseIdentity("7556", 2, 16384, "crm"), IDENTITY.kafka), "timeline 2"),
        (Identity(DatabaseIdentity("7556", 1, 5, "crm"), IDENTITY.kafka), "database is another one"),
        (Identity(IDENTITY.database, KafkaIdentity("x", IDENTITY.kafka.topic_ids)), "Kafka cluster is another one"),
        (Identity(IDENTITY.database, KafkaIdentity("abc", {"relay.positions": "id-2"})), "topic events.lead is gone"),
        (
            Identity(IDENTITY.database, KafkaIdentity("abc", {"events.lead": "new", "relay.positions": "id-2"})),
            "topic events.lead was deleted",
        ),
    ],
)
def test_each_change_of_identity_is_named(now, words):
    (difference,) = IDENTITY.differences(now)
    assert words in difference


def test_a_renamed_database_and_a_new_topic_are_no_change_of_identity():
    now = Identity(
        DatabaseIdentity("7556", 1, 16384, "renamed"),
        KafkaIdentity("abc", {**IDENTITY.kafka.topic_ids, "events.new": "id-3"}),
    )
    assert IDENTITY.differences(now) == []


organizations = st.integers(0, 2**128 - 1).map(lambda number: UUID(int=number))


@given(divided(), st.data())
def test_an_organization_has_one_entry_however_lanes_and_entries_are_divided(parts, data):
    lane, lanes, found = parts
    named = [entry.organization for entry in found if entry.organization is not None]
    organization = data.draw(st.sampled_from(named) | organizations if named else organizations)
    ((low, high),) = lane_slots(lane, lanes)
    ours = low <= organization.bytes[-1] <= high
    assert sum(entry.covers(organization) for entry in found) == ours
    shares = data.draw(st.integers(1, 64))
    taken = [entry.within(lane_slots(share, shares)) for share in range(shares) for entry in found]
    assert sum(entry.covers(organization) for entry in taken if entry is not None) == ours


@given(divided(), organizations)
def test_merged_entries_say_of_every_organization_what_they_said_apart(parts, organization):
    _, _, found = parts
    # As after a window that all of them have read to its end.
    alike = [replace(entry, s1=found[0].s1, t1=0, reprocessed=0) for entry in found]
    (*joined,) = merged(alike)

    def place(entries):
        return [(entry.s1, entry.t1, entry.window) for entry in entries if entry.covers(organization)]

    assert place(joined) == place(alike)
    if all(entry.window is None for entry in alike):
        assert len(joined) == 1
        assert not joined[0].without


@given(st.integers(1, 64))
def test_lanes_share_all_slots_evenly(lanes):
    shares = [last - first + 1 for lane in range(lanes) for first, last in lane_slots(lane, lanes)]
    assert sum(shares) == 256
    assert max(shares) - min(shares) <= 1


def test_a_position_of_one_lane_written_before_there_were_several_is_read():
    data = json.loads(Position(IDENTITY, (Entry(),)).format())
    older = {name: value for name, value in data.items() if name not in ("lanes", "closing")} | {"format": 1}
    assert Position.parse(json.dumps(older).encode()) == Position(IDENTITY, (Entry(),))


def test_a_lane_whose_entries_leave_somebody_out_is_refused():
    with pytest.raises(PositionError, match="of lane 1 of 2"):
        Position(IDENTITY, (Entry(),), lane=1, lanes=2)
    rest, _ = Entry().split_off(UUID(int=7))
    with pytest.raises(PositionError, match="an entry of its own"):
        Position(IDENTITY, (rest,))
