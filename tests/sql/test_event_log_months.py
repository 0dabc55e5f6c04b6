"""The months of event_log: made ahead, sealed once over and published, and the clock that steps back into one."""

import time
from datetime import UTC, datetime, timedelta

import pytest

from tests.sql.test_event_log import count, emit, refused


@pytest.fixture
def worker(database):
    return database.connect(autocommit=True)


@pytest.fixture
def owner(database):
    conn = database.connect(role=None, autocommit=True)
    conn.execute("SET search_path = public")
    return conn


@pytest.fixture
def organization(database):
    return database.organization("Mine")


def month(offset=0):
    """The first moment (UTC) of the month `offset` months from this one."""
    now = datetime.now(UTC)
    year, index = divmod(now.year * 12 + now.month - 1 + offset, 12)
    return datetime(year, index + 1, 1, tzinfo=UTC)


def partition(moment):
    return f"event_log_y{moment:%Y}m{moment:%m}"


def seal(conn, snapshot, top):
    return conn.execute("SELECT afluente.seal_event_log(%s::pg_snapshot, %s)", [snapshot, top]).fetchone()[0]


def snapshot(conn, open_transaction=None):
    """A position's snapshot: everything begun so far has ended, but for one transaction. Not pg_current_snapshot():
    that holds the open transactions of every database of the server, those of other tests among them."""
    end = int(conn.execute("SELECT pg_snapshot_xmax(pg_current_snapshot())::text").fetchone()[0])
    if open_transaction is None:
        return f"{end}:{end}:"
    return f"{open_transaction}:{max(end, int(open_transaction) + 1)}:{open_transaction}"


def note_boundaries(conn):
    """The first of the two steps: the position is older than every month."""
    assert seal(conn, "3:3:", 0) == 0


def sealed(conn):
    return [m for (m,) in conn.execute("SELECT month FROM event_log_seal WHERE sealed_at IS NOT NULL ORDER BY 1")]


def write_into(owner, organization, moment):
    return owner.execute(
        "INSERT INTO event_log (organization_id, event_type, entity_kind, created_at)"
        " VALUES (%s, 'lead.created', 'lead', %s) RETURNING seq",
        [organization, moment],
    ).fetchone()[0]


def test_partitions_are_made_ahead_and_once(worker, owner):
    names = [
        n
        for (n,) in owner.execute(
            "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'event_log'::regclass"
        )
    ]
    assert {partition(month(n)) for n in range(-1, 4)} == set(names)
    registered = owner.execute("SELECT count(*) FROM afluente.monthly_partitioned").fetchone()[0]
    assert worker.execute("SELECT afluente.ensure_partitions(%s)", [month(4).date()]).fetchone() == (registered,)
    assert worker.execute("SELECT afluente.ensure_partitions(%s)", [month(4).date()]).fetchone() == (0,)


def test_partitions_are_made_while_events_are_written(database, worker, organization):
    writer = database.connect()
    emit(writer, organization)  # an open transaction on the parent
    assert worker.execute("SELECT afluente.ensure_partitions(%s)", [month(5).date()]).fetchone()[0] > 0
    emit(writer, organization)
    writer.commit()
    assert count(worker) == 2


def test_a_month_is_sealed_when_it_is_over_and_published(owner, worker, organization):
    last = month(0) - timedelta(days=1)
    note_boundaries(worker)
    before = snapshot(worker)
    top = write_into(owner, organization, last)
    assert seal(worker, before, 0) == 0, "its row is not in the position's snapshot"
    assert seal(worker, snapshot(worker), top - 1) == 0, "its row is above the position's top"
    assert sealed(worker) == []
    assert seal(worker, snapshot(worker), top) == 1
    assert sealed(worker) == [month(-1).date()]
    assert seal(worker, snapshot(worker), top) == 0, "this month is not over"
    error = refused(
        "AF008",
        owner,
        "INSERT INTO event_log (organization_id, event_type, entity_kind, created_at) VALUES (%s, 'a.b', 'a', %s)",
        [organization, last],
    )
    assert "sealed" in str(error)


def test_a_transaction_begun_before_the_end_of_the_month_holds_the_seal(database, worker):
    held = database.connect()
    before = held.execute("SELECT pg_current_xact_id()::text").fetchone()[0]
    note_boundaries(worker)
    assert seal(worker, snapshot(worker, open_transaction=before), 0) == 0
    held.commit()
    after = held.execute("SELECT pg_current_xact_id()::text").fetchone()[0]  # begun after it: does not matter
    assert seal(worker, snapshot(worker, open_transaction=after), 0) == 1


def test_a_writer_inside_the_month_is_not_locked_out_half_way(database, worker, organization):
    """The clock stepped back: a transaction has written into the month that is about to be sealed."""
    note_boundaries(worker)
    late = database.connect(role=None)
    late.execute("SET search_path = public")
    position = snapshot(worker)
    top = write_into(late, organization, month(0) - timedelta(days=1))
    assert seal(worker, position, top) == 0, "the writer is still there"
    late.commit()
    assert seal(worker, position, top) == 0, "the row is not published"
    assert seal(worker, snapshot(worker), top) == 1


def test_months_are_sealed_in_order_oldest_first(owner, worker, organization):
    owner.execute("SELECT afluente.ensure_partitions(%s, %s)", [month(0).date(), month(-3).date()])
    top = write_into(owner, organization, month(-2))
    note_boundaries(worker)
    assert seal(worker, snapshot(worker), 0) == 1, "the row of the month in the middle is not published"
    assert sealed(worker) == [month(-3).date()]
    assert seal(worker, snapshot(worker), top) == 2
    assert sealed(worker) == [month(n).date() for n in (-3, -2, -1)]
    # A sealed month does not come back, nor is one made below it.
    owner.execute("SELECT afluente.ensure_partitions(%s, %s)", [month(0).date(), month(-5).date()])
    assert owner.execute("SELECT to_regclass(%s)", [partition(month(-5))]).fetchone() == (None,)


def test_a_clock_that_stepped_back_does_not_put_an_event_into_a_sealed_month(owner, worker, organization):
    """Sealed to the end of this month, as if the clock had been past it already: events are put at its end."""
    owner.execute("SELECT afluente.ensure_partitions(%s)", [month(2).date()])
    end = month(1)
    owner.execute(
        "INSERT INTO event_log_seal (month, ends_at, boundary, sealed_at) VALUES (%s, %s, pg_current_xact_id(), now())",
        [month(0).date(), end],
    )
    emit(worker, organization)
    due = datetime.now(UTC) + timedelta(hours=1)
    emit(worker, organization, at=due)
    worker.execute("SELECT release_due_deferred(10, %s)", [due])
    owner.execute(
        "INSERT INTO event_log (organization_id, event_type, entity_kind) VALUES (%s, 'a.b', 'a')", [organization]
    )
    rows = worker.execute("SELECT created_at, tableoid::regclass::text, metadata FROM event_log").fetchall()
    assert [(r[0], r[1]) for r in rows] == [(end, partition(end))] * 3
    assert abs(rows[0][2]["emitted_at"] - time.time()) < 60  # the call's own time is kept as it was
