"""What the relay's status says: what is so, in numbers and in words, of every lane and of what is open beneath it."""

import uuid
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from psycopg import sql as pgsql

from afluente.telemetry import metrics
from producers.relay.control import Pause
from producers.relay.numbers import Numbers
from producers.relay.position import DatabaseIdentity, Entry, Head, Identity, KafkaIdentity, Position, Snapshot, Window
from producers.relay.source import Source, Waiting
from producers.relay.status import (
    EntryState,
    LaneState,
    Severity,
    State,
    Transaction,
    entry_state,
    look,
    open_transactions,
    remarks,
)
from tests.producers.relay.running import relay_of

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
ORGANIZATION = uuid.UUID("0199c0de-0000-7000-8000-000000000007")
IDENTITY = Identity(DatabaseIdentity("1", 1, 1, "shop"), KafkaIdentity("k", {}))


def ago(seconds):
    return NOW - timedelta(seconds=seconds)


def lane(rows=0, oldest_s=0.0, written_s=0.0, **columns):
    entry = Entry(Snapshot(10, 12, (10,)), 40, Window(Snapshot(20, 20), 90, 50))
    oldest = ago(oldest_s)
    waiting = Waiting(rows, False, oldest if rows else None)
    state = EntryState(entry, waiting, {ORGANIZATION: (rows, oldest)} if rows else {})
    given = {
        "number": 0,
        "name": "relay-1-0",
        "owner": "host-1",
        "owner_since": ago(3600),
        "owner_silent_s": 0.5,
        "takeovers": 1,
        "position": Position(IDENTITY, (entry,), 7, "host-1", 100, 2, ago(written_s)),
        "entries": (state,),
        "rows_per_s": 10.0,
        "rate_over_s": 60.0,
    }
    return LaneState(**given | columns)


def transaction(**columns):
    given = {
        "tx_id": 10,
        "pid": 4711,
        "gid": None,
        "database": "shop",
        "user": "crm",
        "application": "import",
        "state": "idle in transaction",
        "since": ago(4000),
        "age_s": 4000.0,
        "writes_events": True,
        "rows_at_most": 12,
        "at_least": False,
        "rows_meanwhile": 500,
        "months_held": 1,
        "ids_behind": 90,
    }
    return Transaction(**given | columns)


def state(*lanes, **columns):
    given = {"layout": 1, "pause": None, "transactions": (), "undecided": (), "refusals": (), "at": NOW}
    return State(lanes=lanes or (lane(),), **given | columns)


@pytest.mark.parametrize(
    ("given", "word", "kind", "severity", "said", "fix"),
    [
        (state(), "running", None, None, "", ""),
        (
            state(lane(rows=3, owner=None, owner_silent_s=None)),
            "not running",
            "relay.running",
            Severity.problem,
            "not running: nobody owns relay-1-0; 3 rows wait",
            "afluente relay run",
        ),
        (
            state(lane(owner_silent_s=60.0)),
            "not running",
            "relay.running",
            Severity.problem,
            "host-1 is silent for 60 s",
            "takes over by itself",
        ),
        (
            state(lane(rows=1, oldest_s=90, written_s=600), pause=Pause("ana", ago(600), "broker upgrade")),
            "paused",
            "relay.paused",
            Severity.warning,
            "paused by ana since 2026-11-29 11:50:00Z: broker upgrade; 1 row waits",
            "afluente relay resume",
        ),
        (
            state(lane(rows=9, oldest_s=50, written_s=50)),
            "standing still",
            "relay.moving",
            Severity.problem,
            "relay-1-0 stands still: 9 rows wait",
            "log of host-1",
        ),
        (
            state(lane(rows=9_000, oldest_s=300)),
            "running",
            "relay.behind",
            Severity.warning,
            f"300 s behind: 9,000 rows wait, 10 a second go out, 900 s to clear if nothing comes in; "
            f"9,000 are of organization {ORGANIZATION}",
            "lanes",
        ),
        (
            state(refusals=("the Kafka cluster is another one",)),
            "refused",
            "relay.position",
            Severity.problem,
            "the Kafka cluster is another one",
            "afluente relay reposition",
        ),
        (
            state(undecided=(("events.lead", 3, 17),)),
            "undecided",
            "relay.transactions",
            Severity.problem,
            "events.lead[3] from offset 17",
            "afluente relay repair",
        ),
        (
            state(transactions=(transaction(),)),
            "running",
            "relay.open_transaction",
            Severity.warning,
            "pid 4711 (database shop, crm, import; idle in transaction) has a transaction open since "
            "2026-11-29 10:53:20Z; it has written events, at most 12, which nobody sees before it commits; "
            "1 month cannot be sealed. The relay does not wait for it",
            "SELECT pg_terminate_backend(4711)",
        ),
        (
            state(transactions=(transaction(pid=None, gid="o'k", state="prepared", writes_events=False),)),
            "running",
            "relay.prepared_transaction",
            Severity.warning,
            "it has written no event",
            "COMMIT PREPARED 'o''k' or ROLLBACK PREPARED 'o''k'",
        ),
        (
            state(transactions=(transaction(age_s=400.0, writes_events=False, months_held=0),)),
            "running",
            "relay.open_transaction",
            Severity.note,
            "it has written no event. The relay does not wait for it",
            "end it where it was begun",
        ),
        (state(transactions=(transaction(age_s=30.0),)), "running", None, None, "", ""),
    ],
)
def test_what_a_person_should_know_is_said_with_what_to_do(given, word, kind, severity, said, fix):
    assert given.words == word
    known = list(remarks(given))
    if kind is None:
        assert known == []
    else:
        (remark,) = known
        assert (remark.kind, remark.severity) == (kind, severity)
        assert said in remark.found
        assert fix in remark.fix


def test_lanes_are_summed_and_the_largest_organizations_named():
    other = uuid.uuid4()
    many = {uuid.uuid4(): (1, ago(1)) for _ in range(20)}
    second = lane(rows=22)
    entries = tuple(replace(e, organizations={other: (2, ago(9)), **many}) for e in second.entries)
    both = state(lane(rows=40, oldest_s=5), replace(second, number=1, entries=entries, rows_per_s=None))
    assert (both.waiting.rows, both.published, both.dead_lettered, both.takeovers) == (62, 200, 4, 2)
    assert both.rows_per_s == 10.0
    assert len(both.organizations) == 10
    assert both.organizations[0][:2] == (ORGANIZATION, 40)
    assert both.organizations[1] == (other, 2, ago(9))


def test_open_transactions_are_named_with_what_only_their_commit_will_show(database, empty_database, topics, writers):
    """One with events and a savepoint, one without, one of another database, one prepared."""
    topics.create_families()
    organization = writers.organizations[0]
    writers.commit(3)
    with database.connect() as idle, database.connect() as quiet, empty_database.connect(role=None) as elsewhere:
        idle.execute("SELECT set_config('application_name', 'importer', false)")
        writers.emit(idle, organization, 2)
        idle.execute("SAVEPOINT half")
        writers.emit(idle, organization, 2)
        quiet.execute("CREATE TEMPORARY TABLE nothing ()")
        elsewhere.execute("CREATE TABLE something ()")
        prepared = database.connect(role=None)
        gid = f"forgotten {database.name}"
        prepared.execute("SELECT emit_event_for(%s, 'probe.counted', 'lead', NULL, '{}')", [writers.organizations[1]])
        prepared.execute(pgsql.SQL("PREPARE TRANSACTION {}").format(gid))
        prepared.commit()
        try:
            writers.commit(5, writers.organizations[2])
            found = look(topics.settings, database.url)
            by = {t.gid or t.pid: t for t in found.transactions}
            first = by[idle.info.backend_pid]
            assert (first.database, first.application) == (database.name, "importer")
            assert (first.state, first.writes_events) == ("idle in transaction", True)
            # Its 4, and the prepared one's: who of them wrote which number, nobody can see.
            assert (first.rows_at_most, first.at_least, first.rows_meanwhile) == (5, False, 5)
            assert by[gid].state == "prepared"
            assert by[gid].writes_events
            assert 1 <= by[gid].rows_at_most <= 5
            assert found.blocker.tx_id == min(t.tx_id for t in found.transactions if t.writes_events)
            for other in (quiet, elsewhere):
                seen = by[other.info.backend_pid]
                assert (seen.writes_events, seen.rows_at_most) == (False, 0)
            assert by[elsewhere.info.backend_pid].database == empty_database.name
            assert found.waiting.rows == 8
        finally:
            prepared.autocommit = True
            prepared.execute(pgsql.SQL("ROLLBACK PREPARED {}").format(gid))
        idle.rollback()
        assert idle.info.backend_pid not in {t.pid for t in look(topics.settings, database.url).transactions}


def test_rows_of_a_transaction_that_was_open_for_an_hour_are_not_an_hour_late(database, writers):
    """They wait since the position that did not show them; while a window is open, nobody can tell."""
    writers.commit(2)
    database.execute(
        "SET afluente.rewrite = 'restamp'; UPDATE event_log SET created_at = created_at - interval '1 hour'"
    )
    ((now, snapshot, top),) = database.execute("SELECT now(), pg_current_snapshot()::text, max(seq) FROM event_log")
    with closing(Source(database.url)) as source:
        seen = entry_state(source, Entry(), 100, now - timedelta(seconds=5))
        assert (seen.waiting.rows, seen.waiting.oldest) == (2, now - timedelta(seconds=5))
        opened = Entry().opened(Head(Snapshot.parse(snapshot), top))
        assert entry_state(source, opened, 100, now).waiting.oldest < now - timedelta(minutes=59)
        assert entry_state(source, Entry(), 100, None).waiting.oldest < now - timedelta(minutes=59)


def test_a_login_that_is_no_superuser_sees_who_holds_rows_back(postgres, database, writers):
    """By the rights of the function's owner; when that one may see nothing either, at least the pid."""
    worker = f"login_{uuid.uuid4().hex[:8]}"
    held = database.connect()
    writers.emit(held, writers.organizations[0], 1)
    with postgres.admin() as admin:
        login = pgsql.SQL("CREATE ROLE {} LOGIN PASSWORD 'its own' IN ROLE afluente_worker")
        admin.execute(login.format(pgsql.Identifier(worker)))
    try:
        with psycopg.connect(database.url, user=worker, password="its own", autocommit=True) as conn:
            hidden = conn.execute("SELECT query FROM pg_stat_activity WHERE pid = %s", [held.info.backend_pid])
            assert hidden.fetchone() == ("<insufficient privilege>",)
            (seen,) = (t for t in open_transactions(conn) if t.pid == held.info.backend_pid)
            assert (seen.application, seen.state, seen.rows_at_most) == ("test", "idle in transaction", 1)
            database.execute("ALTER FUNCTION afluente.relay_open_transactions() OWNER TO afluente_worker")
            (seen,) = (t for t in open_transactions(conn) if t.pid == held.info.backend_pid)
            assert (seen.state, seen.age_s, seen.writes_events, seen.rows_at_most) == (None, None, True, 1)
    finally:
        with postgres.admin() as admin:
            admin.execute(pgsql.SQL("DROP ROLE {}").format(pgsql.Identifier(worker)))


def test_a_rate_is_what_was_published_in_the_last_minute(database, topics, writers, reader):
    with relay_of(topics, database):
        writers.commit(30)
        reader.wait_for(30)
        found = look(topics.settings, database.url)
        assert found.words == "running"
        assert found.published == 30
        (only,) = found.lanes
        assert only.rate_over_s > 0
        assert only.rows_per_s == pytest.approx(30 / only.rate_over_s, rel=0.01)


def test_what_a_relay_would_refuse_is_said(database, topics, writers, reader):
    with relay_of(topics, database):
        writers.commit(3)
        reader.wait_for(3)
    database.execute("SELECT setval(pg_get_serial_sequence('event_log', 'seq'), 1)")
    found = look(topics.settings, database.url)
    assert found.words == "refused"
    assert "put back to an earlier state" in found.refusals[0]
    assert found.lanes[0].owner is None


def test_the_organizations_with_the_largest_backlogs_are_named_in_the_metrics_and_no_others(database, writers):
    large, small = writers.organizations[0], writers.organizations[1]
    writers.commit(9, large)
    for number in range(12):
        writers.commit(1, writers.add(database.organization(f"Klein {number}")))
    numbers = Numbers(database.url, "t.relay-1-0")
    rest, own = Entry().split_off(large)
    numbers.show([rest, own], 1.5)
    shown = values()
    assert shown['afluente_relay_lag_rows{lane="t.relay-1-0"}'] == 21
    assert 0 < shown['afluente_relay_lag_seconds{lane="t.relay-1-0"}'] < 2
    assert shown['afluente_relay_position_age_seconds{lane="t.relay-1-0"}'] == 1.5
    assert shown[f'afluente_relay_organization_lag_rows{{organization="{large}"}}'] == 9
    assert shown[f'afluente_relay_organization_split_off{{organization="{large}"}}'] == 1
    assert sum(name.startswith("afluente_relay_organization_lag_rows{") for name in shown) == 10

    writers.commit(2, small)
    ((snapshot, top),) = database.execute("SELECT pg_current_snapshot()::text, max(seq) FROM event_log")
    numbers.show([Entry().opened(Head(Snapshot.parse(snapshot), top)).read_to(top - 1)], 0.0)
    named = [name for name in values() if name.startswith("afluente_relay_organization_")]
    assert named == [f'afluente_relay_organization_lag_rows{{organization="{small}"}}']
    Numbers(database.url, "t.relay-2-0")  # the lanes were changed: this process has another one now
    assert not any('lane="t.relay-1-0"' in name for name in values())


def values():
    lines = (line for line in metrics.exposition().decode().splitlines() if line[0] != "#")
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
