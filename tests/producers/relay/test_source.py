"""Reading event_log on a real server: what is seen, how much of it at a time, and by which plans."""

import json
import re
import time

import pytest
from psycopg import sql

from producers.relay import source as reading
from producers.relay.position import Entry, Head, Snapshot
from producers.relay.source import Source
from schemas import Row

PADDING = "x" * 10_000


def read_all(source, entry, **options):
    """Chunks until a whole window is empty: the rows, the entry after them, the size of each chunk."""
    rows: list[Row] = []
    sizes: list[int] = []
    while True:
        chunk = source.chunk(entry, **options)
        if not chunk.rows and entry.window is None:
            return rows, chunk.after, sizes
        rows += [row.row() for row in chunk.rows]
        sizes.append(len(chunk.rows))
        entry = chunk.after


@pytest.fixture
def source(database):
    source = Source(database.url, chunk_rows=50, poll_rows=10)
    yield source
    source.close()


def test_a_window_goes_out_in_bounded_chunks_in_the_order_of_seq(writers, source):
    writers.commit(175)
    rows, entry, sizes = read_all(source, Entry())
    assert [row.seq for row in rows] == sorted(row.seq for row in rows)
    assert len({row.id for row in rows}) == 175
    assert sizes == [50, 50, 50, 25]
    assert entry.window is None
    assert read_all(source, entry)[0] == []


def test_a_chunk_is_bounded_in_bytes(database, writers):
    writers.commit(60, padding=PADDING)
    source = Source(database.url, chunk_bytes=200_000, poll_rows=5)
    rows, _, sizes = read_all(source, Entry())
    assert len(rows) == 60
    assert max(sizes) <= 20
    source.close()


def test_rows_of_an_open_transaction_come_when_it_commits_and_nobody_waits_for_it(database, writers, source):
    held = database.connect()
    writers.emit(held, writers.organizations[0], 120)
    writers.commit(30, writers.organizations[1])
    rows, entry, _ = read_all(source, Entry())
    assert {row.organization_id for row in rows} == {writers.organizations[1]}
    writers.commit(5, writers.organizations[2])  # others go on past it
    rows, entry, _ = read_all(source, entry)
    assert len(rows) == 5
    held.commit()
    rows, entry, sizes = read_all(source, entry)
    assert {row.organization_id for row in rows} == {writers.organizations[0]}
    assert sizes == [50, 50, 20]
    assert [row.seq for row in rows] == sorted(row.seq for row in rows)


def test_a_window_interrupted_anywhere_goes_on_where_it_was(database, writers, source):
    """Resumed at every chunk from the position alone; low seqs of an ended transaction are in it; others write on."""
    writers.commit(10)
    _, entry, _ = read_all(source, Entry())
    held = database.connect()
    writers.emit(held, writers.organizations[0], 15)
    writers.commit(10, writers.organizations[1])
    _, entry, _ = read_all(source, entry)
    held.commit()
    writers.commit(40, writers.organizations[2])
    seen = []
    while (chunk := source.chunk(entry, rows=4)).rows:
        seen += [row.row().id for row in chunk.rows]
        entry = chunk.after
        if len(seen) < 30:
            writers.commit(1, writers.organizations[3])
        source.close()
        source = Source(database.url)
    assert len(seen) == len(set(seen)) == 15 + 40 + 7
    assert len(database.execute("SELECT 1 FROM event_log")) == 20 + len(seen)
    source.close()


def test_savepoints_rolled_back_leave_holes_and_nothing_else(database, writers, source):
    with database.connect() as conn:
        writers.emit(conn, writers.organizations[0])
        with conn.transaction(force_rollback=True):
            writers.emit(conn, writers.organizations[0], 3)
        with conn.transaction():
            writers.emit(conn, writers.organizations[0])
    rows, _, _ = read_all(source, Entry())
    assert [json.loads(row.payload)["version"] for row in rows] == [1, 2]
    assert rows[1].seq - rows[0].seq == 4


def test_rows_arrive_as_the_bytes_and_types_of_the_table(database, source):
    organization = database.organization()
    database.execute(
        "SELECT emit_event_for(%s, 'probe.typed', 'probe', NULL, %s, %s)",
        [organization, '{"n": 12345678901234567890.5, "t": "ção 🎉"}', '{"request_id": "r1"}'],
    )
    (row,) = read_all(source, Entry())[0]
    assert json.loads(row.payload) == {"n": 12345678901234567890.5, "t": "ção 🎉"}
    assert row.entity_id is None
    assert row.created_at.utcoffset().total_seconds() == 0
    ((created_at,),) = database.execute("SELECT created_at FROM event_log")
    assert row.created_at == created_at


def test_nothing_is_looked_for_until_a_transaction_has_ended(database, writers, source, monkeypatch):
    poll, polls = source._poll, []

    def counted(*asked):
        polls.append(asked)
        return poll(*asked)

    monkeypatch.setattr(source, "_poll", counted)
    writers.commit(3)
    _, entry, _ = read_all(source, Entry())
    with database.connect() as held:
        writers.emit(held, writers.organizations[0], 2)
        del polls[:]
        for _ in range(200):  # others may use the server: in one of so many moments they do not
            assert not source.chunk(entry).rows
            if not polls:
                break
            del polls[:]
            entry = source.chunk(entry).after
        else:
            pytest.fail("every poll looked for rows")
    rows, entry, _ = read_all(source, entry)
    assert len(rows) == 2


def test_a_month_that_is_over_and_published_is_sealed_and_read_no_more(database, writers, source):
    database.execute(
        "SELECT afluente.ensure_partitions(current_date, (current_date - interval '3 months')::date);"
        "INSERT INTO event_log (organization_id, event_type, entity_kind, created_at)"
        f" SELECT '{writers.organizations[0]}', 'probe.counted', 'probe', now() - make_interval(months => m)"
        "   FROM generate_series(1, 3) m"
    )
    rows, entry, _ = read_all(source, Entry())
    assert len(rows) == 3
    with database.connect(autocommit=True) as conn:
        held = database.connect()
        held.execute("SELECT pg_current_xact_id()")  # might still write to those months
        assert reading.seal_months(conn, read_all(source, entry)[1]) == 0
        held.rollback()
        deadline, sealed = time.monotonic() + 30, 0
        while sealed < 3:  # other databases of the server have transactions open too: they count until they end
            assert time.monotonic() < deadline
            entry = read_all(source, entry)[1]
            sealed += reading.seal_months(conn, entry)
    while source._since == "-infinity":  # the position must have passed the seals themselves, too
        assert time.monotonic() < deadline
        entry = read_all(source, entry)[1]
        source.leave_out_sealed([entry])
    writers.commit(4)
    assert len(read_all(source, entry)[0]) == 4
    # Whoever begins from nothing has read none of them.
    source.leave_out_sealed([Entry()])
    assert len(read_all(source, Entry())[0]) == 7


def test_what_waits_is_counted_from_any_position(database, writers, source):
    held = database.connect()
    writers.emit(held, writers.organizations[0], 3)
    writers.commit(7, writers.organizations[1])
    assert source.waiting(Entry()).rows == 7
    entry = source.chunk(Entry(), rows=4).after
    assert source.waiting(entry).rows == 3
    entry = read_all(source, entry)[1]
    assert source.waiting(entry).rows == 0
    assert source.waiting(entry).oldest is None
    held.commit()
    assert source.waiting(entry).rows == 3


@pytest.mark.parametrize("plan", ["force_custom_plan", "force_generic_plan"])
@pytest.mark.parametrize("analyzed", [False, True])
def test_an_empty_poll_touches_no_published_row_with_36_partitions(plan, analyzed, database, writers):
    """The plans themselves: index scans only, and none that reads and throws away. The same for the question that an
    entry of some organizations asks instead."""
    database.execute(
        "SELECT afluente.ensure_partitions((current_date + interval '17 months')::date,"
        "                                  (current_date - interval '18 months')::date);"
        "INSERT INTO event_log (organization_id, event_type, entity_kind, created_at)"
        f" SELECT '{writers.organizations[0]}', 'probe.counted', 'probe', now() - make_interval(days => n % 500)"
        "   FROM generate_series(1, 20000) n"
    )
    assert len(database.execute("SELECT 1 FROM pg_inherits WHERE inhparent = 'event_log'::regclass")) == 36
    if analyzed:
        database.execute("ANALYZE event_log")
    source = Source(database.url)
    entry = read_all(source, Entry())[1]
    # An id that was running then and has ended without rows: its probe must run, and find nothing.
    database.execute("SELECT pg_current_xact_id()")
    entry = read_all(source, entry)[1]
    entry = Entry(Snapshot(entry.s1.xmin - 1, entry.s1.xmax, (entry.s1.xmin - 1,)), entry.t1)
    rest, own = entry.split_off(writers.organizations[1])
    asked = [(reading._query("poll"), {**source._place(entry), "rows": 100})]
    asked += [source._page_query(part.opened(source.head()), 100) for part in (rest, own)]
    for query, parameters in asked:
        explain = _explained(source, query, parameters, plan)
        scans = list(_scans(explain["Plan"]))
        assert len(scans) >= 36
        for scan in scans:
            assert scan["Node Type"] in ("Index Scan", "Index Only Scan"), scan
            assert scan["Actual Rows"] * scan["Actual Loops"] <= 1, scan  # the highest seq of each partition
            assert not scan.get("Rows Removed by Filter"), scan
            assert not scan.get("Rows Removed by Index Recheck"), scan
            assert "Index Cond" in scan or scan["Scan Direction"] == "Backward", scan
        source._conn.execute("DEALLOCATE explained")
    source.close()


@pytest.mark.parametrize("plan", ["force_custom_plan", "force_generic_plan"])
@pytest.mark.parametrize("name", ["page", "tail"])
def test_a_page_of_a_backlog_reads_its_own_rows_only(name, plan, database, writers):
    database.execute(
        "INSERT INTO event_log (organization_id, event_type, entity_kind)"
        f" SELECT '{writers.organizations[0]}', 'probe.counted', 'probe' FROM generate_series(1, 20000) n"
    )
    database.execute("ANALYZE event_log")
    source = Source(database.url)
    ((top,),) = database.execute("SELECT max(seq) FROM event_log")
    published = Entry(source.chunk(Entry()).after.window.s2, top - 10_000)  # type: ignore[union-attr]
    entry = published.opened(Head(published.s1, top)).read_to(top - (9_000 if name == "tail" else 10_000))
    window = entry.window
    assert window is not None
    place = source._place(entry) | {"s2": str(window.s2), "t2": window.t2, "last": window.last, "rows": 500}
    explain = _explained(source, reading._query(name), place, plan)
    for scan in _scans(explain["Plan"]):
        assert scan["Node Type"] in ("Index Scan", "Index Only Scan"), scan
        assert scan["Actual Rows"] <= 500, scan
        assert not scan.get("Rows Removed by Filter"), scan
    source.close()


def _explained(source, text, parameters, plan):
    """EXPLAIN ANALYZE of a query as the relay's session would run it, with that kind of plan."""
    names = list(parameters)
    query = re.sub(r"%\((\w+)\)s", lambda match: f"${names.index(match[1]) + 1}", text)
    types = {"since": "timestamptz", "xmax": "xid8", "xip": "xid8[]", "s2": "pg_snapshot"}
    types |= {"slots": "bytea", "without": "uuid[]", "organization": "uuid"}
    conn = source._conn
    conn.execute(f"SET plan_cache_mode = {plan}")
    conn.execute(f"PREPARE explained ({', '.join(types.get(name, 'bigint') for name in names)}) AS {query}")
    values = ", ".join(sql.Literal(value).as_string(conn) for value in parameters.values())
    ((found,),) = conn.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) EXECUTE explained ({values})").fetchall()
    return found[0]


def _scans(node):
    if node.get("Relation Name", "").startswith("event_log"):
        yield node
    for child in node.get("Plans", []):
        yield from _scans(child)
