"""What people tell a running relay: to pause, to resume, and to publish a dead letter again; and who may see what."""

import json
import secrets
import signal
import uuid
from collections import Counter
from datetime import UTC, datetime

import psycopg
import pytest

import schemas
import sql
from afluente import postgres as connections
from afluente.clock import SystemClock
from consumers.dead_letters import Filter
from consumers.dead_letters import relay as relay_letters
from producers.relay import control, reprocess
from producers.relay.lanes import settle_lanes
from producers.relay.position import Entry, slot_of
from producers.relay.status import look
from tests.producers.relay.oracle import assert_exactly_once_in_order, event_id_of
from tests.producers.relay.running import relay_of
from tests.producers.relay.test_service import limit_topic


def run(processes, *arguments):
    done = processes.run(*arguments, "--format", "json")
    return done.returncode, json.loads(done.stdout) if done.stdout else None


def test_a_paused_relay_publishes_nothing_keeps_its_lane_and_goes_on_where_it_stood(
    database, topics, writers, reader, processes
):
    relay = processes.start("relay", "run")
    relay.wait_for("relay.ready")
    writers.commit(5)
    reader.wait_for(5)
    code, first = run(processes, "relay", "pause", "--reason", "broker upgrade")
    assert (code, first["changed"], first["reason"]) == (0, True, "broker upgrade")
    assert relay.wait_for("relay.paused", timeout=10)["reason"] == "broker upgrade"
    with database.connect() as conn:
        held, changed = control.pause(conn, topics.prefix, by="somebody else", reason="again")
    assert (held.by, held.reason, changed) == (first["by"], "broker upgrade", False)
    writers.commit(5)

    found = look(topics.settings, database.url)
    assert (found.words, found.waiting.rows) == ("paused", 5)
    assert found.lanes[0].owner == relay.wait_for("relay.ready")["instance"]
    relay.kill()
    with relay_of(topics, database):
        writers.commit(1)
        assert len(reader.read_to_the_end()) == 5
        code, ended = run(processes, "relay", "resume")
        assert (code, ended["changed"], ended["reason"]) == (0, True, "broker upgrade")
        reader.wait_for(11)
    with database.connect() as conn:
        assert control.resume(conn, topics.prefix, by="somebody else") is None
    assert_exactly_once_in_order(database, reader.read_to_the_end())


def test_a_relay_started_while_paused_says_so_and_publishes_nothing(database, topics, writers, reader, processes):
    with database.connect() as conn:
        control.pause(conn, topics.prefix, by="ana", reason="broker upgrade")
    writers.commit(3)
    relay = processes.start("relay", "run")
    assert relay.wait_for("relay.paused")["by"] == "ana"
    relay.wait_for("relay.ready")
    assert reader.read_to_the_end() == []
    assert relay.terminate() == 0


@pytest.fixture
def unfit(database, topics, writers, reader):
    """One row too large for its topic, and one that its schema does not take, are dead letters: their event ids. The
    topic takes larger ones by now."""
    limit_topic(topics, topics.family("custom"), 20_000)
    organization = writers.organizations[0]
    with database.connect() as conn:
        writers.emit(conn, organization, padding=secrets.token_hex(15_000))
        emit = "SELECT emit_event_for(%s, 'lead.created', 'lead', NULL, '{}')"
        (refused,) = conn.execute(emit, [organization]).fetchone()
    with relay_of(topics, database):
        reader.wait_for(2)
    limit_topic(topics, topics.family("custom"), 1_000_000)
    ((large,),) = database.execute("SELECT id FROM event_log WHERE event_type <> 'lead.created'")
    return large, refused


def letters(database, topics, **wanted):
    with database.connect() as conn:
        states = wanted.pop("states", relay_letters.ALL)
        return relay_letters.find(conn, topics.settings, Filter(**wanted), states=states)


def retry(database, topics, event_id):
    with database.connect(autocommit=True) as conn:
        outcome = relay_letters.retry(
            conn, topics.settings, letters(database, topics, event_id=event_id), actor="ana", reason="mended"
        )
    assert (len(outcome.done), outcome.failed) == (1, [])


def test_dead_letters_are_published_again_on_request_once_or_are_dead_letters_again(
    database, topics, reader, processes, unfit
):
    large, refused = unfit
    code, done = run(processes, "dlq", "retry", "--relay", "--all", "--yes", "--reason", "limit raised")
    assert (code, done["count"], done["workers"]) == (0, 2, ["relay"])
    assert {letter.state for letter in letters(database, topics)} == {"requested"}
    with relay_of(topics, database):
        reader.wait_for(4)
    records = reader.read_to_the_end()
    published = [record for record in records if record.topic() != topics.relay_dead_letter]
    assert [event_id_of(record) for record in published] == [large]
    dead = [record for record in records if record.topic() == topics.relay_dead_letter]
    assert Counter(dict(r.headers())["x-event-id"].decode() for r in dead) == {str(large): 1, str(refused): 2}

    (again,) = letters(database, topics, states=relay_letters.OPEN)
    assert (again.event_id, again.state, again.attempts) == (refused, "dead", 2)
    shown = run(processes, "dlq", "show", again.id)[1]
    assert [decision["state"] for decision in shown["decisions"]] == ["dead"]
    assert shown["row"]["event_type"] == "lead.created"
    with database.connect(autocommit=True) as conn:
        assert relay_letters.discard(conn, topics.settings, [again], actor="ana", reason="no lead").done == [again.id]
        # A second person, whose list is of before: the database knows better.
        assert relay_letters.discard(conn, topics.settings, [again], actor="eva", reason="").done == []
    found = letters(database, topics)
    assert {letter.event_id: letter.state for letter in found} == {large: "published", refused: "discarded"}
    code, second = run(processes, "dlq", "retry", *(letter.id for letter in found), "--yes", "--reason", "twice")
    assert (code, len(second["failed"])) == (1, 2)
    assert {row[0] for row in database.execute("SELECT action FROM audit_logs")} == {
        "dead_letter.reprocessed",
        "dead_letter.discarded",
    }
    state = look(topics.settings, database.url)
    assert (state.published, state.dead_lettered, state.position.entries[0].reprocessed) == (1, 3, 2)


@pytest.mark.parametrize(
    "point",
    [
        "relay.after_commit:2",
        pytest.param("relay.after_send:2", marks=pytest.mark.faults_long),
        pytest.param("relay.before_commit:2", marks=pytest.mark.faults_long),
        pytest.param("relay.reprocessed:1", marks=pytest.mark.faults_long),
    ],
)
def test_a_relay_killed_while_it_publishes_one_again_leaves_it_published_once(
    point, database, topics, reader, processes, unfit, tmp_path
):
    """The first transaction is the claim, the second the request's."""
    large, refused = unfit
    retry(database, topics, large)
    log = tmp_path / "faults"
    killed = processes.start("relay", "run", env={"AFLUENTE_FAULT": point, "AFLUENTE_FAULT_LOG": log})
    assert killed.wait() == -signal.SIGKILL
    assert log.read_text().count("KILL") == 1
    with relay_of(topics, database):
        reader.wait_for(3)
        retry(database, topics, refused)
        reader.wait_for(4)
    records = reader.read_to_the_end()
    assert Counter(record.topic() == topics.relay_dead_letter for record in records) == {True: 3, False: 1}
    ((state,),) = database.execute("SELECT state FROM afluente.relay_reprocess WHERE event_id = %s", [large])
    assert state in ("published", "answered")
    assert [letter.event_id for letter in letters(database, topics, states=["published"])] == [large]


def test_a_row_that_event_log_has_dropped_is_published_from_its_letter_and_the_copy_goes(
    database, topics, reader, unfit
):
    large, _ = unfit
    ((payload,),) = database.execute("SELECT payload FROM event_log WHERE id = %s", [large])
    database.execute("SET afluente.rewrite = 'erasure'; DELETE FROM event_log")
    retry(database, topics, large)
    with relay_of(topics, database):
        (record,) = (r for r in reader.wait_for(3) if r.topic() != topics.relay_dead_letter)
    assert event_id_of(record) == large
    assert schemas.decode(record.value()).payload == payload
    assert database.execute("SELECT state, row_copy FROM afluente.relay_reprocess") == [("published", None)]


def test_each_lane_answers_what_is_asked_for_its_organizations_across_a_change_of_lanes(database, topics, reader):
    organizations = [database.organization(f"Loja {number}") for number in range(6)]
    lanes_of = {slot_of(organization) >= 128 for organization in organizations}
    while len(lanes_of) < 2:  # both halves of the slots
        organizations.append(database.organization("Loja"))
        lanes_of.add(slot_of(organizations[-1]) >= 128)
    emit = "SELECT emit_event_for(%s, 'lead.created', 'lead', NULL, '{}')"
    for organization in organizations:
        database.execute(emit, [organization])
    with relay_of(topics, database):
        reader.wait_for(len(organizations))
    first, *others = letters(database, topics)
    with database.connect(autocommit=True) as conn:
        assert relay_letters.retry(conn, topics.settings, [first], actor="ana", reason="").failed == []
    with relay_of(topics, database):
        reader.wait_for(len(organizations) + 1)
    with database.connect(autocommit=True) as conn:
        assert relay_letters.retry(conn, topics.settings, others, actor="ana", reason="").failed == []
    settle_lanes(
        topics.settings, database.url, 2, instance="test", clock=SystemClock(), heartbeat=lambda: None, under_load=True
    )
    with relay_of(topics, database), relay_of(topics, database, lane=1):
        reader.wait_for(2 * len(organizations))
        found = look(topics.settings, database.url)
        assert ([lane.number for lane in found.lanes], found.layout, found.words) == ([0, 1], 2, "running")
    records = reader.read_to_the_end()
    assert Counter(Counter(event_id_of(record) for record in records).values()) == {2: len(organizations)}
    found = look(topics.settings, database.url)
    assert found.dead_lettered == len(records)
    assert {letter.state for letter in letters(database, topics)} == {"dead"}
    assert {letter.attempts for letter in letters(database, topics)} == {2}


def test_requests_become_visible_in_the_order_of_their_ids(database):
    organization = database.organization()
    first, second = database.connect(), database.connect()
    ask(first, organization, 1)
    (free,) = second.execute("SELECT pg_try_advisory_xact_lock(hashtext('afluente.request_reprocess'))").fetchone()
    assert not free
    first.commit()
    assert ask(second, organization, 1) is None  # that letter is decided about
    assert ask(second, organization, 2) is not None


def test_an_entry_passes_only_what_was_asked_for_its_organizations(database):
    """And what it passes is everything up to there, so that entries that stand at one place can become one."""
    conn = database.connect(autocommit=True)
    mine, other = database.organization("Mine"), database.organization("Other")
    ids = [ask(conn, organization, number) for number, organization in enumerate([mine, other, mine, mine])]
    rest, own = Entry().split_off(mine)
    batch = reprocess.next_batch(conn, "", [own], ids[-1], rows=2)
    assert list(batch.rows) == [ids[0], ids[2]]
    assert [entry.reprocessed for entry in batch.after] == [ids[2]]
    batch = reprocess.next_batch(conn, "", [rest, own], ids[-1])
    assert list(batch.rows) == ids
    assert {entry.reprocessed for entry in batch.after} == {ids[-1]}
    assert reprocess.next_batch(conn, "other.", [own], ids[-1]).rows == {}


def test_an_organizations_admin_sees_its_own_requests_only(database):
    conn = database.connect(autocommit=True)
    mine, other = database.organization("Mine"), database.organization("Other")
    ask(conn, mine, 1)
    ask(conn, other, 2)
    with connections.connect(database.url, role="afluente_admin") as admin:
        admin.execute("SELECT set_config('app.organization_id', %s, true)", [str(mine)])
        assert admin.execute("SELECT DISTINCT organization_id FROM afluente.relay_reprocess").fetchall() == [(mine,)]
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            admin.execute("SELECT * FROM afluente.relay_pause")


def ask(conn, organization, number):
    """Ask for a letter at offset `number`; returns the request's id, None when it was decided about already."""
    parameters = {
        "prefix": "",
        "action": "retry",
        "organization_id": organization,
        "event_id": uuid.uuid4(),
        "created_at": datetime.now(UTC),
        "event_type": "probe.counted",
        "partition": 0,
        "offset": number,
        "at": "2026-11-01T00:00:00Z",
        "by": "test",
        "reason": "",
        "row": None,
    }
    return conn.execute(sql.queries("relay_control")["request"], parameters).fetchone()[0]


def test_a_watch_publishes_nothing_before_it_has_looked(database):
    watch = control.Watch(database.url, "")
    assert watch.halted
