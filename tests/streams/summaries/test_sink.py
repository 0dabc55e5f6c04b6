"""The transaction of a fetch, on a real Postgres: exact under duplicates, redelivery, lost connections and zombies."""

import random
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import psycopg
import pytest

import schemas
from afluente import faults
from afluente.errors import Unavailable
from streams.errors import Abandoned, Fenced, Unfit
from streams.summaries.sink import Partition, Sink
from tests.streams.records import Record, expected, records_of, some_events, summaries

TOPIC = "events.contact-event"
P0, P1 = Partition(TOPIC, 0), Partition(TOPIC, 1)


@pytest.fixture
def new_sink(database):
    opened = []

    def build(**arguments):
        sink = Sink(database.url, **({"topic_ids": {TOPIC: "topic-a"}} | arguments))
        opened.append(sink)
        return sink

    yield build
    for sink in opened:
        sink.close()
    faults.disarm()


def fences(database):
    return {
        Partition(topic, partition): next_offset
        for topic, partition, next_offset in database.execute("SELECT topic, partition, next_offset FROM stream_offset")
    }


def dead(database):
    return database.execute(
        "SELECT partition, record_offset, record_value, error_class, reason FROM stream_dead_letter"
        " ORDER BY partition, record_offset"
    )


def test_a_fetch_becomes_summaries_and_moves_the_fences(database, new_sink):
    events = some_events(200)
    sink = new_sink()
    assert sink.claim([P0, P1]) == {P0: 0, P1: 0}
    written = sink.write({P0: records_of(events[:120]), P1: records_of(events[120:])})
    with_metric = sum(event.metric_name is not None for event in events)
    assert (written.records, written.facts, written.without_metric) == (200, with_metric, 200 - with_metric)
    assert summaries(database) == expected(events)
    assert fences(database) == sink.fences == {P0: 120, P1: 80}


@pytest.mark.parametrize("seed", range(5))
def test_any_cut_with_duplicates_comes_to_the_recount(database, new_sink, seed):
    rng = random.Random(seed)
    events = some_events(150, seed=seed)
    produced = events + rng.choices(events, k=60)
    rng.shuffle(produced)
    sink = new_sink()
    sink.claim([P0])
    records = records_of(produced)
    duplicates = 0
    while records:
        cut = rng.randrange(1, 40)
        duplicates += sink.write({P0: records[:cut]}).duplicates
        records = records[cut:]
    assert summaries(database) == expected(events)
    assert duplicates == sum(event.metric_name is not None for event in produced) - sum(
        event.metric_name is not None for event in events
    )


def test_redelivery_below_the_fence_changes_nothing(database, new_sink):
    events = some_events(60)
    sink = new_sink()
    sink.claim([P0])
    sink.write({P0: records_of(events)})
    before = summaries(database)
    written = sink.write({P0: records_of(events)})
    assert (written.below_fence, written.records) == (60, 0)
    # Half old, half new.
    more = some_events(30, seed=2)
    assert sink.write({P0: records_of(events[40:], 40) + records_of(more, 60)}).below_fence == 20
    assert before != summaries(database) == expected(events + more)


def test_everything_again_from_offset_zero_with_the_fence_set_back_changes_nothing(database, new_sink):
    events = some_events(60)
    sink = new_sink()
    sink.claim([P0])
    sink.write({P0: [*records_of(events), Record(60, b"poison")]})
    database.execute("UPDATE stream_offset SET next_offset = 0")
    assert sink.claim([P0]) == {P0: 0}
    written = sink.write({P0: [*records_of(events), Record(60, b"poison")]})
    assert (written.records, written.facts, written.dead_letters) == (61, 0, 1)
    assert summaries(database) == expected(events)
    assert len(dead(database)) == 1


def test_the_same_contact_event_of_two_organizations_is_two(database, new_sink):
    event = some_events(1, seed=3)[0]
    event = replace(event, metric_name="Order Paid")
    twin = replace(event, organization_id=uuid.uuid4())
    sink = new_sink()
    sink.claim([P0])
    sink.write({P0: records_of([event, twin])})
    assert summaries(database) == expected([event, twin])


def test_times_out_of_order_widen_the_span(database, new_sink):
    event = replace(some_events(1)[0], metric_name="Order Paid", value=None)
    earlier = replace(event, id=uuid.uuid4(), occurred_at=event.occurred_at - timedelta(days=700, microseconds=1))
    later = replace(event, id=uuid.uuid4(), occurred_at=event.occurred_at + timedelta(microseconds=1))
    sink = new_sink()
    sink.claim([P0])
    for offset, one in enumerate([event, later, earlier]):
        sink.write({P0: records_of([one], offset)})
    key = (event.organization_id, event.contact_id, "Order Paid")
    assert summaries(database)[key] == (3, earlier.occurred_at, later.occurred_at, {})


def test_positions_behind_markers_move_the_fence_without_records(database, new_sink):
    sink = new_sink()
    sink.claim([P0, P1])
    sink.write({P0: records_of(some_events(3))}, {P0: 5})
    assert fences(database) == {P0: 5, P1: 0}
    sink.write({}, {P1: 7})
    assert fences(database) == {P0: 5, P1: 7}
    sink.write({}, {P1: 7})


# poison


def test_poison_is_kept_whole_and_the_rest_goes_on(database, new_sink):
    events = some_events(10)
    organization = events[0].organization_id
    values = [event.value_bytes() for event in events]
    values[2:2] = [b"\xff\x00random", None]
    records = [
        Record(offset, value, str(organization).encode(), (("ce_type", b"\x00\xff"), ("empty", None)))
        for offset, value in enumerate(values)
    ]
    sink = new_sink()
    sink.claim([P0])
    written = sink.write({P0: records})
    assert (written.records, written.dead_letters) == (12, 2)
    assert summaries(database) == expected(events)
    assert fences(database) == {P0: 12}
    kept = database.execute(
        "SELECT record_offset, record_key, record_value, record_headers, organization_id, error_class, reason"
        " FROM stream_dead_letter ORDER BY record_offset"
    )
    key = str(organization).encode()
    headers = [["ce_type", "00ff"], ["empty", None]]
    assert kept[0][:5] == (2, key, b"\xff\x00random", headers, organization)
    assert kept[0][5] == "DecodeError"
    assert "zero byte" in kept[0][6]
    assert kept[1][:3] == (3, key, None)
    assert kept[1][6] == "the record has no value"


def test_what_the_tables_refuse_is_found_by_halving(database, new_sink):
    events = [replace(event, metric_name=event.metric_name or "Order Paid") for event in some_events(40)]
    bad = {7, 8, 31}
    # Nothing that decode lets through is refused today. A table that is stricter than the code shows what would happen.
    database.execute("ALTER TABLE contact_metrics_summary ADD CHECK (metric_name <> 'Refused')")
    produced = [replace(event, metric_name="Refused") if at in bad else event for at, event in enumerate(events)]
    sink = new_sink()
    sink.claim([P0, P1])
    written = sink.write({P0: records_of(produced[:20]), P1: records_of(produced[20:])})
    assert (written.records, written.facts, written.dead_letters) == (40, 37, 3)
    assert [(partition, offset, error) for partition, offset, _, error, _ in dead(database)] == [
        (0, 7, "CheckViolation"),
        (0, 8, "CheckViolation"),
        (1, 11, "CheckViolation"),
    ]
    assert summaries(database) == expected([event for at, event in enumerate(events) if at not in bad])
    assert fences(database) == sink.fences == {P0: 20, P1: 20}


def test_amounts_of_every_size_are_summed_to_the_digit(database, new_sink):
    event = replace(some_events(1)[0], metric_name="Order Paid", currency="BRL")
    values = ["9" * 38, "0." + "0" * 37 + "1", "-1", "0.10", "0.20"]
    sink = new_sink()
    sink.claim([P0])
    for offset, value in enumerate(values):
        sink.write({P0: records_of([replace(event, id=uuid.uuid4(), value=value)], offset)})
    found = database.execute("SELECT total_value::text, value_count FROM contact_metrics_summary_currency")
    assert found == [("9" * 37 + "8.3" + "0" * 36 + "1", 5)]


# whose partitions


def test_a_zombie_writes_nothing(database, new_sink):
    events = some_events(30)
    zombie, successor = new_sink(), new_sink()
    zombie.claim([P0])
    zombie.write({P0: records_of(events[:10])})
    assert successor.claim([P0]) == {P0: 10}
    with pytest.raises(Fenced):
        zombie.write({P0: records_of(events[10:20], 10)})
    successor.write({P0: records_of(events[10:], 10)})
    with pytest.raises(Fenced):
        zombie.write({P0: records_of(events[10:20], 10)})
    assert summaries(database) == expected(events)
    assert fences(database) == {P0: 30}


def test_a_fence_moved_behind_our_back_stops_us(database, new_sink):
    sink = new_sink()
    sink.claim([P0])
    database.execute("UPDATE stream_offset SET next_offset = 5")
    with pytest.raises(Fenced):
        sink.write({P0: records_of(some_events(10))})
    assert summaries(database) == {}


def test_partitions_that_were_not_claimed_are_not_written(new_sink):
    sink = new_sink()
    sink.claim([P0])
    with pytest.raises(Fenced):
        sink.write({P1: records_of(some_events(1))})


def test_a_claim_gives_up_what_was_claimed_before(new_sink):
    sink = new_sink()
    sink.claim([P0, P1])
    sink.claim([P1])
    with pytest.raises(Fenced):
        sink.write({P0: records_of(some_events(1))})


def test_a_topic_made_anew_is_refused(new_sink):
    new_sink().claim([P0])
    with pytest.raises(Unfit, match="deleted and created anew"):
        new_sink(topic_ids={TOPIC: "topic-b"}).claim([P0])


def test_two_processes_with_contacts_in_common_do_not_lock_up(database, new_sink):
    events = some_events(1200, organizations=1, contacts=4)
    rounds = 10

    def fold_half(partition, own):
        sink = new_sink()
        sink.claim([partition])
        size = len(own) // rounds
        for start in range(0, len(own), size):
            sink.write({partition: records_of(own[start : start + size], start)})

    with ThreadPoolExecutor(2) as pool:
        halves = [pool.submit(fold_half, P0, events[:600]), pool.submit(fold_half, P1, events[600:])]
        for half in halves:
            half.result(60)
    assert summaries(database) == expected(events)


# Postgres away


class Severed:
    """Terminates the sink's session, from another one, the first `times` times that `point` is passed."""

    def __init__(self, database, times):
        self._admin = database.connect(role=None, autocommit=True)
        self._left = times
        self.hits = 0

    def __call__(self, name):
        if name != "stream.before_commit" or self._left == 0:
            return
        self._left -= 1
        self.hits += 1
        self._admin.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name = 'afluente-stream'"
        )


def test_a_connection_lost_before_the_commit_writes_once(database, new_sink, monkeypatch):
    events = some_events(50)
    severed = Severed(database, times=3)
    monkeypatch.setattr("streams.summaries.sink.faults.point", severed)
    sink = new_sink()
    sink.claim([P0])
    written = sink.write({P0: [*records_of(events), Record(50, b"poison")]})
    assert severed.hits == 3
    assert written.facts == sum(event.metric_name is not None for event in events)
    assert summaries(database) == expected(events)
    assert len(dead(database)) == 1


def test_a_connection_lost_in_the_commit_is_asked_about(database, new_sink, monkeypatch):
    events = some_events(50)
    lost: list[str] = []

    def committed_but_never_told(name):
        if name == "stream.after_commit" and not lost:
            lost.append(name)
            raise psycopg.OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr("streams.summaries.sink.faults.point", committed_but_never_told)
    sink = new_sink()
    sink.claim([P0])
    assert sink.write({P0: records_of(events)}).records == 50
    assert lost
    assert summaries(database) == expected(events)
    assert sink.fences == fences(database) == {P0: 50}
    sink.write({P0: records_of(some_events(5, seed=2), 50)})
    assert fences(database) == {P0: 55}


def test_waiting_for_postgres_ends_when_the_partitions_are_taken(database):
    abandon = threading.Event()
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 4:
            abandon.set()

    sink = Sink(database.server.url_of("no_such_database"), topic_ids={TOPIC: "topic-a"}, abandon=abandon, sleep=sleep)
    with pytest.raises(Abandoned):
        sink.claim([P0])
    assert len(waits) == 4
    assert waits[0] < waits[3] <= 0.8


def test_a_frozen_process_does_not_keep_its_successor_waiting(database, new_sink, monkeypatch):
    """It holds the fences' locks in an open transaction; Postgres ends that session after a while."""
    monkeypatch.setattr("streams.summaries.sink.IDLE_TIMEOUT_MS", 300)
    events = some_events(20)
    frozen, thaw = threading.Event(), threading.Event()

    def freeze(name):
        if name == "stream.before_commit" and not frozen.is_set():
            frozen.set()
            assert thaw.wait(30)

    monkeypatch.setattr("streams.summaries.sink.faults.point", freeze)
    zombie, successor = new_sink(), new_sink()
    zombie.claim([P0])
    with ThreadPoolExecutor(1) as pool:
        write = pool.submit(zombie.write, {P0: records_of(events)})
        assert frozen.wait(30)
        assert successor.claim([P0]) == {P0: 0}
        successor.write({P0: records_of(events)})
        thaw.set()
        with pytest.raises(Fenced):
            write.result(30)
    assert summaries(database) == expected(events)


def test_a_registry_that_is_away_does_not_make_a_dead_letter(database, new_sink):
    class Away:
        asked = 0

        def id_of(self, entry):
            raise AssertionError("nothing is written here")

        def schema_of(self, schema_id):
            self.asked += 1
            if self.asked <= 3:
                raise Unavailable("the registry does not answer")
            return None

    registry = Away()
    schemas.use_registry(registry)
    try:
        waits: list[float] = []
        sink = new_sink(sleep=waits.append)
        sink.claim([P0])
        sink.write({P0: [Record(0, b"\0\0\0\0\x07 of a registry")]})
    finally:
        schemas.use_registry(None)
    assert len(waits) == 3
    assert registry.asked == 4
    assert "does not know it either" in dead(database)[0][4]


# what people read


def test_the_view_has_the_seeds_columns_at_the_live_generation(database, new_sink):
    organization = database.organization()
    event = replace(
        some_events(1)[0], organization_id=organization, metric_name="Order Paid", value="297.90", currency="BRL"
    )
    dollars = replace(event, id=uuid.uuid4(), contact_id=uuid.uuid4(), value="10", currency="USD")
    both = replace(event, id=uuid.uuid4(), contact_id=dollars.contact_id)
    sink = new_sink()
    sink.claim([P0])
    sink.write({P0: records_of([event, dollars, both])})
    query = (
        "SELECT contact_id, event_count, total_value, currency, totals, first_event_at, last_event_at, updated_at, id"
        " FROM contact_metrics_summary_v WHERE organization_id = %s AND metric_name = 'Order Paid'"
    )
    rows = {row[0]: row[1:] for row in database.execute(query, [organization], role="afluente_worker")}
    assert rows[event.contact_id][:4] == (1, Decimal("297.90"), "BRL", {"BRL": 297.9})
    assert rows[event.contact_id][4:6] == (event.occurred_at, event.occurred_at)
    # Two currencies have no sum.
    assert rows[dollars.contact_id][:4] == (2, None, None, {"BRL": 297.9, "USD": 10})

    database.execute("UPDATE stream_generation SET state = 'retired'")
    assert database.execute(query, [organization]) == []
    database.execute("INSERT INTO stream_generation (generation, state, live_at) VALUES (2, 'live', now())")
    sink.claim([P0])
    assert sink.generation == 2
    sink.write({P0: records_of([event])})
    rebuilt = {row[0]: row[1:] for row in database.execute(query, [organization])}
    assert rebuilt[event.contact_id][-1] == rows[event.contact_id][-1], "the id is the same in every generation"
    assert summaries(database, generation=1) == expected([event, dollars, both])


def test_applications_see_their_own_summaries_and_write_none(database, new_sink):
    mine, theirs = database.organization("mine"), database.organization("theirs")
    events = [
        replace(event, organization_id=organization, metric_name="Order Paid")
        for organization, event in zip((mine, theirs), some_events(2), strict=True)
    ]
    sink = new_sink()
    sink.claim([P0])
    sink.write({P0: [*records_of(events), Record(2, b"poison", str(theirs).encode())]})
    conn = database.connect(role="afluente_app")
    conn.execute("SELECT set_config('app.organization_id', %s, false)", [str(mine)])
    assert conn.execute("SELECT organization_id FROM contact_metrics_summary_v").fetchall() == [(mine,)]
    assert conn.execute("SELECT organization_id FROM contact_metrics_summary").fetchall() == [(mine,)]
    conn.commit()
    for statement in (
        "UPDATE contact_metrics_summary SET event_count = 99",
        "DELETE FROM contact_metrics_summary_currency",
        "SELECT * FROM stream_dead_letter",
        "SELECT * FROM stream_seen_event",
        "UPDATE stream_generation SET state = 'retired'",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            conn.execute(statement)
        conn.rollback()
        conn.execute("SELECT set_config('app.organization_id', %s, false)", [str(mine)])
        conn.commit()
