"""`afluente relay reposition`: whatever no longer fits, afterwards the topics hold each row of the table exactly once,
and beside that only what was listed as lost.

Every story: publish, break something, see the relay refuse and name the command, reposition, publish on.
"""

import json
import uuid
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from confluent_kafka import TopicPartition
from psycopg.conninfo import make_conninfo

import schemas
from afluente import kafka as clients
from afluente.cli.exits import Exit
from afluente.errors import NotAllowed, Refused
from producers.relay.errors import PositionError, PositionRefused
from producers.relay.position import (
    Closing,
    DatabaseIdentity,
    Entry,
    Identity,
    KafkaIdentity,
    Position,
    Snapshot,
    Window,
    Witness,
    lane_slots,
)
from producers.relay.reposition import Case, Options, Reposition
from producers.relay.reposition.case import (
    LISTED_AT_MOST,
    Place,
    diagnose,
    layout_of,
    positions_at,
    positions_here,
    published_at_most,
    with_running,
)
from schemas.topics import POSITIONS_PARTITIONS
from tests.fixtures.postgres import clone
from tests.producers.relay.oracle import Reader, Writers, assert_exactly_once_in_order, event_id_of
from tests.producers.relay.running import relay_of
from tests.producers.relay.test_identity import recreate, run_until_it_ends

EMIT_UNFIT = "SELECT emit_event_for(%s, 'lead.created', 'lead', NULL, '{}')"
REQUEST = "SELECT afluente.request_reprocess(%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, NULL)"
FAULTS = ("before_commit:1", "after_commit:1", "lane_written:1", "lane_written:2", "before_sequence:1")


@pytest.fixture
def published(database, topics, writers, reader):
    """Ten rows are published and the relay has ended."""
    with relay_of(topics, database):
        writers.commit(10)
        reader.wait_for(10)
    return reader


def writers_of(database):
    """Those of the database that this one was made from."""
    writers = object.__new__(Writers)
    writers.database = database
    writers.organizations = [row[0] for row in database.execute("SELECT organization_id FROM probe ORDER BY 1")]
    return writers


def reposition(topics, database, **options):
    return Reposition(topics.settings, database.url, Options(**options)).run()


def counts(outcome):
    found = outcome.comparison
    return {"published": found.published, "to_publish": found.to_publish, "assumed": found.assumed, "lost": found.lost}


def assert_refused(topics, database):
    with pytest.raises(PositionRefused) as refused:
        run_until_it_ends(topics, database)
    assert "afluente relay reposition" in refused.value.hint


def ids_in(database):
    return {row[0] for row in database.execute("SELECT id FROM event_log")}


def test_a_database_put_back_to_an_earlier_state(published, topics, database, postgres, tmp_path):
    """A copy of the database as it was. What was published after that is listed, what was written to it goes out, and
    an event that waits a second time is not published a second time."""
    writers = writers_of(database)
    organization = writers.organizations[0]
    with database.connect() as conn:
        later = datetime.now(UTC) + timedelta(hours=1)
        (deferred,) = conn.execute(
            "SELECT emit_event_for(%s, 'probe.deferred', 'contact', NULL, '{}', '{}', %s)", [organization, later]
        ).fetchone()
    database.close()
    with clone(postgres, database.name) as earlier:
        with relay_of(topics, database):
            writers.commit(5)
            database.execute("UPDATE deferred_event SET deliver_at = now()")
            published.wait_for(16)
        lost = ids_in(database) - ids_in(earlier) - {deferred}
        again = writers_of(earlier)
        again.commit(3)
        again.commit(4, again.organizations[1])
        assert_refused(topics, earlier)

        seen = reposition(topics, earlier, lost_file=tmp_path / "lost")
        assert seen.diagnosis.cases == (Case.OTHER_DATABASE, Case.EARLIER_STATE)[: len(seen.diagnosis.cases)]
        assert counts(seen) == {"published": 10, "to_publish": 7, "assumed": 0, "lost": 5}
        assert (seen.applied, seen.comparison.deferred) == (False, 1)
        listed = [json.loads(line) for line in (tmp_path / "lost").read_text().splitlines()]
        assert {uuid.UUID(line["event_id"]) for line in listed} == lost
        assert sorted(line["seq"] for line in listed) == [11, 12, 13, 14, 15]
        assert {(line["organization_id"], line["event_type"], line["topic"]) for line in listed} == {
            (str(organization), "probe.counted", topics.event("probe.counted"))
        }
        assert_refused(topics, earlier)  # nothing was done

        assert counts(reposition(topics, earlier, apply=True)) | {"published": 0} == counts(seen) | {"published": 0}
        with relay_of(topics, earlier):
            again.commit(2)
            published.wait_for(16 + 9)
        records = published.read_to_the_end()
        newest = earlier.execute("SELECT seq FROM event_log ORDER BY seq DESC LIMIT 2")
    assert len(records) == 25
    assert len({event_id_of(record) for record in records}) == 25
    assert min(newest)[0] > 16  # the numbers of lost events are not given out again


@pytest.mark.faults_long
@pytest.mark.timeout(300)
def test_topics_made_anew_get_what_the_table_has_and_a_killed_command_is_run_again(
    topics, database, writers, reader, processes, tmp_path
):
    """With three lanes, so that it is killed between two of them as well."""
    relay = processes.start("relay", "run", "--lanes", "3")
    for organization in writers.organizations:
        writers.commit(5, organization)
    reader.wait_for(20)
    assert relay.terminate() == 0
    recreate(topics, topics.event("probe.counted"), 6, {})
    writers.commit(3)
    refused = processes.run("relay", "run")
    assert refused.returncode != 0
    assert "afluente relay reposition" in refused.stderr
    log = tmp_path / "faults"
    for number, fault in enumerate(FAULTS):
        env = {"AFLUENTE_FAULT": f"reposition.{fault}", "AFLUENTE_FAULT_LOG": log}
        killed = processes.run("relay", "reposition", "--yes", env=env)
        assert killed.returncode == -9, killed.stderr
        assert sum(line.endswith(" KILL") for line in log.read_text().splitlines()) == number + 1
    done = processes.run("relay", "reposition", "--yes", "--format", "json")
    assert done.returncode == Exit.DONE, done.stderr
    outcome = json.loads(done.stdout)
    assert (outcome["applied"], outcome["lanes"]) == (True, 3)
    assert (outcome["rows"], outcome["to_publish"], outcome["lost"]) == (23, 23, 0)
    with closing(Reader(topics)) as again:
        processes.start("relay", "run")
        writers.commit(2, writers.organizations[1])
        again.wait_for(25)
        assert_exactly_once_in_order(database, again.read_to_the_end())


def test_lost_positions_are_found_again_and_what_has_expired_is_not_published_again(
    published, topics, database, writers, processes
):
    organization, other, *_ = writers.organizations
    unfit = database.execute(EMIT_UNFIT, [organization], role="afluente_worker")[0][0]
    with relay_of(topics, database):
        published.wait_for(11)
    place = next(record for record in published.records if event_id_of(record) != unfit)
    topic, partition = place.topic(), place.partition()
    asked = TopicPartition(topic, partition, place.offset() + 5)
    admin = clients.admin(topics.settings)
    (deleted,) = admin.delete_records([asked]).values()
    assert deleted.result(20).low_watermark == place.offset() + 5
    recreate(topics, topics.positions, POSITIONS_PARTITIONS, {"cleanup.policy": "compact"})
    (written,) = database.execute("SELECT created_at FROM event_log WHERE id = %s", [unfit])
    letter = [topics.prefix, "retry", organization, unfit, *written, "lead.created", 0, 0, datetime.now(UTC), "me", ""]
    ((request,),) = database.execute(REQUEST, letter, role="afluente_worker")
    with database.connect() as held:
        writers.emit(held, other)  # open all the while
        writers.commit(3)
        assert_refused(topics, database)
        seen = processes.run("relay", "reposition", "--format", "json")
        assert seen.returncode == Exit.FOUND, seen.stderr
        assert json.loads(seen.stdout)["cases"] == ["positions-lost"]
        assert "nothing was done" in seen.stderr
        outcome = reposition(topics, database, apply=True)
        assert counts(outcome) == {"published": 6, "to_publish": 3, "assumed": 5, "lost": 0}
        assert (outcome.layout, outcome.lanes) == (2, 1)
        held.commit()
    assert database.execute("SELECT id > %s FROM afluente.relay_reprocess", [request]) == [(True,)]  # asked again
    with relay_of(topics, database):
        published.wait_for(16)
    records = published.read_to_the_end()
    letters = [record for record in records if record.topic() == topics.relay_dead_letter]
    assert [event_id_of(record) for record in letters] == [unfit, unfit]  # as it was asked for
    assert_exactly_once_in_order(database, [record for record in records if record is not letters[0]])
    fits = processes.run("relay", "reposition")
    assert (fits.returncode, "the positions belong here" in fits.stderr) == (Exit.DONE, True)


@pytest.mark.faults_long
def test_since_decides_by_hand_what_is_published_again(published, topics, database, writers):
    recreate(topics, topics.event("probe.counted"), 6, {})
    border = datetime.now(UTC)
    writers.commit(3)
    outcome = reposition(topics, database, apply=True, since=border)
    assert counts(outcome) == {"published": 0, "to_publish": 3, "assumed": 10, "lost": 0}
    with closing(Reader(topics)) as reader, relay_of(topics, database):
        reader.wait_for(3)
        assert len(reader.read_to_the_end()) == 3


class Erased:
    """A file to list into; as it is opened, which is between the comparison and the restamping, rows are erased."""

    def __init__(self, path, database):
        self.path, self.database, self.opened = path, database, 0

    def open(self, *arguments, **options):
        self.opened += 1
        if self.opened == 1:
            self.database.execute(
                "SELECT set_config('afluente.rewrite', 'erasure', true);"
                """UPDATE event_log SET metadata = '{"erased": 1}'"""
            )
        return self.path.open(*arguments, **options)


def test_rows_of_a_sealed_month_are_published_again_as_they_are_and_it_stays_sealed(
    published, topics, database, writers, tmp_path
):
    unfit = database.execute(EMIT_UNFIT, [writers.organizations[0]], role="afluente_worker")[0][0]
    with relay_of(topics, database):
        published.wait_for(11)
    recreate(topics, topics.event("probe.counted"), 6, {})
    database.execute(
        "SET LOCAL session_replication_role = replica;"  # the month may be sealed already
        "UPDATE event_log SET created_at = created_at - interval '1 month'"
    )
    database.execute("SELECT afluente.seal_event_log('900000000:900000000:', 11)")
    database.execute("SELECT afluente.seal_event_log('900000000:900000000:', 11)")
    assert database.execute("SELECT count(*) FROM event_log_seal WHERE sealed_at IS NOT NULL") != [(0,)]
    (row,) = database.execute("SELECT organization_id, id, created_at FROM event_log WHERE seq = 4")
    letter = [topics.prefix, "retry", *row, "probe.counted", 0, 0, datetime.now(UTC), "me", ""]
    database.execute(REQUEST, letter, role="afluente_worker")  # which is not to publish it once more
    erased = Erased(tmp_path / "lost", database)
    assert reposition(topics, database, apply=True, lost_file=erased).comparison.to_publish == 10
    assert erased.opened == 2  # the first transaction gave way
    assert database.execute("SELECT state FROM afluente.relay_reprocess") == [("discarded",)]
    with closing(Reader(topics)) as reader, relay_of(topics, database):
        again = [record for record in reader.wait_for(11) if event_id_of(record) != unfit]
        assert [schemas.decode(record.value()).metadata["erased"] for record in again] == [1] * 10
        assert_exactly_once_in_order(database, reader.read_to_the_end())
    sealed = database.execute("SELECT count(*) FROM pg_trigger WHERE tgname = 'sealed'")
    assert sealed == database.execute("SELECT count(*) FROM event_log_seal WHERE sealed_at IS NOT NULL")


def test_a_living_relay_another_database_and_another_login_are_refused(
    published, topics, database, writers, postgres, template, processes, monkeypatch
):
    monkeypatch.setattr("producers.relay.reposition.mend.OWNED_FOR_S", 1.0)
    with relay_of(topics, database):
        writers.commit(1)
        published.wait_for(11)
        with pytest.raises(Refused, match="which lives"):
            reposition(topics, database, apply=True)
    with clone(postgres, template) as other:
        Writers(other).commit(3)
        with pytest.raises(Refused, match="not one is of a row that is here"):
            reposition(topics, other, apply=True)
    name = f"afluente_test_login_{uuid.uuid4().hex[:8]}"
    with postgres.admin() as admin:
        admin.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'x' IN ROLE afluente_worker")
    try:
        with pytest.raises(NotAllowed, match="does not own event_log"):
            Reposition(topics.settings, make_conninfo(database.url, user=name, password="x")).run()
    finally:
        with postgres.admin() as admin:
            admin.execute(f"DROP ROLE {name}")
    assert len(published.read_to_the_end()) == 11


NOW = Identity(DatabaseIdentity("2", 1, 5, "crm"), KafkaIdentity("k", {"a": "1", "b": "2"}))
PLACE = Place(Snapshot.parse("90:95:92"), 70, reprocess_top=4)


def position(**changes):
    was = Identity(DatabaseIdentity("1", 1, 5, "crm"), KafkaIdentity("k", {"a": "1", "b": "1"}))
    return replace(Position(was, (Entry(Snapshot(10, 10), 50, reprocessed=9),), number=7, instance="old"), **changes)


def test_what_has_happened_is_said_in_cases_and_sentences():
    def diagnosed(positions, last_seq=50, published_to="k", has=lambda witness: True):
        return diagnose(positions, NOW, last_seq, published_to, has)

    found = diagnosed([position()], last_seq=40)
    assert found.cases == (Case.OTHER_POSTGRES, Case.TOPICS_REMADE, Case.EARLIER_STATE)
    assert len(found.reasons) == 3
    assert diagnosed([], published_to=None).cases == (Case.NEVER_PUBLISHED,)
    assert diagnosed([]).cases == (Case.POSITIONS_LOST,)
    assert diagnosed([], published_to="other").cases == (Case.OTHER_KAFKA,)
    half = replace(Entry(), slots=lane_slots(0, 2))
    assert diagnosed([position(identity=NOW, entries=(half,), lanes=2)]).cases == (Case.POSITIONS_LOST,)
    known = position(identity=NOW, witness=Witness(50, "x"))
    assert diagnosed([known]).cases == ()
    assert diagnosed([known], has=lambda witness: False).cases == (Case.EARLIER_STATE,)


def test_a_transaction_listed_as_running_is_not_shown_and_nothing_else_changes():
    for taken, own in ((Snapshot(90, 95, (92,)), 97), (Snapshot(95, 95), 95)):
        listed = with_running(taken, own)
        assert own in listed.xip
        assert [listed.shows(tx_id) for tx_id in range(80, 110)] == [taken.shows(tx_id) for tx_id in range(80, 110)]
        assert Snapshot.parse(str(listed)) == listed
    assert with_running(Snapshot(95, 95), 95 + LISTED_AT_MOST + 1) == Snapshot(95, 95)
    with pytest.raises(PositionError, match="before its own snapshot"):
        with_running(Snapshot(90, 95), 94)


def test_lanes_keep_their_organizations_and_all_stand_at_the_place():
    own = uuid.UUID(int=255)
    (low, high), entry = (lane_slots(lane, 2) for lane in (0, 1)), Entry(Snapshot(10, 10), 50, reprocessed=9)
    rest, alone = replace(entry, slots=high).split_off(own)
    alone = replace(alone, reprocessed=2, window=Window(Snapshot(12, 12), 60, 55))
    old = [
        position(entries=(replace(entry, slots=low),), lanes=2),
        position(entries=(rest, alone), lane=1, lanes=2, number=3),
    ]
    assert published_at_most(old) == 55
    new = positions_at(PLACE, old, NOW, [1])
    assert [(p.key, p.number, p.identity, p.closing) for p in new] == [
        ("relay-1-1", 3, NOW, None),
        ("relay-1-0", 7, NOW, None),
    ]
    entries = [entry for p in new for entry in p.entries]
    assert {(e.s1, e.t1, e.window) for e in entries} == {(PLACE.s1, 70, None)}
    assert {e.organization: e.reprocessed for e in entries} == {None: 4, own: 2}  # requests above 4 are gone


def test_a_change_of_lanes_under_way_ends_in_a_layout_that_nobody_has_written_of():
    old = [position(closing=Closing(2, 4))]
    new = positions_at(PLACE, old, NOW, [1, 2])
    assert [p.key for p in new] == [f"relay-3-{lane}" for lane in (3, 2, 1, 0)]
    assert all((p.lanes, p.closing) == (4, None) for p in new)
    kept = positions_here(old, NOW, lambda entry: entry)
    assert [p.key for p in kept] == [p.key for p in new]
    assert {(e.s1, e.t1, e.reprocessed) for p in kept for e in p.entries} == {(Snapshot(10, 10), 50, 9)}


def test_lost_positions_become_one_lane_of_a_layout_above_any_known():
    entries = (Entry(PLACE.s1, 70, reprocessed=4),)
    (new,) = positions_at(PLACE, [], NOW, [1, 4, 2])
    assert (new.key, new.lanes, new.entries) == ("relay-5-0", 1, entries)
    one_of_two = [position(entries=(replace(entries[0], slots=lane_slots(1, 2)),), layout=6, lane=1, lanes=2)]
    (new,) = positions_at(PLACE, one_of_two, NOW, [1])
    assert (new.key, new.lanes, new.entries) == ("relay-7-0", 1, entries)
    assert published_at_most([]) is published_at_most(one_of_two) is None
    assert (layout_of("t.relay-12-3", "t."), layout_of("relay-12-3", "t."), layout_of("u.t.relay-1-0", "t.")) == (
        12,
        None,
        None,
    )
