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
from producers.relay import control, reprocess
from producers.relay.position import Entry
from producers.relay.status import look
from tests.producers.relay.oracle import assert_exactly_once_in_order, event_id_of
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
    assert relay.wait_for("relay.paused", timeout=2)["reason"] == "broker upgrade"
    assert run(processes, "relay", "pause", "--reason", "again") == (0, {**first, "changed": False})
    writers.commit(5)

    status = run(processes, "relay", "status")[1]
    assert (status["state"], status["lag_rows"]) == ("paused", 5)
    assert status["lanes"][0]["owner"] == relay.wait_for("relay.ready")["instance"]
    relay.kill()
    second = processes.start("relay", "run")
    second.wait_for("relay.ready")
    assert second.wait_for("relay.paused")["by"] == first["by"]
    assert len(reader.read_to_the_end()) == 5

    code, ended = run(processes, "relay", "resume")
    assert (code, ended["changed"], ended["reason"]) == (0, True, "broker upgrade")
    reader.wait_for(10)
    assert run(processes, "relay", "resume") == (
        0,
        {"paused": False, "changed": False, "by": None, "since": None, "reason": None},
    )
    assert second.terminate() == 0
    assert_exactly_once_in_order(database, reader.read_to_the_end())


@pytest.fixture
def unfit(database, topics, writers, reader):
    """One row too large for its topic, and one that its schema does not take: (organization, their event ids)."""
    limit_topic(topics, topics.family("custom"), 20_000)
    organization = writers.organizations[0]
    with database.connect() as conn:
        writers.emit(conn, organization, padding=secrets.token_hex(15_000))
        ((unfit,),) = conn.execute(
            "SELECT emit_event_for(%s, 'lead.created', 'lead', NULL, '{}')", [organization]
        ).fetchall()
    ((large,),) = database.execute("SELECT id FROM event_log WHERE event_type <> 'lead.created'")
    return organization, large, unfit


def test_dead_letters_are_published_again_on_request_once_or_are_dead_letters_again(
    database, topics, reader, processes, unfit
):
    _, large, refused = unfit
    relay = processes.start("relay", "run")
    reader.wait_for(2)
    limit_topic(topics, topics.family("custom"), 1_000_000)
    relay.terminate()  # the limits are read at the beginning of a session
    relay = processes.start("relay", "run")
    relay.wait_for("relay.ready")
    code, done = run(processes, "dlq", "retry", "--relay", "--all", "--yes", "--reason", "limit raised")
    assert (code, done["count"], done["workers"]) == (0, 2, ["relay"])
    reader.wait_for(4)
    relay.wait_for("relay.reprocessed")
    records = reader.read_to_the_end()
    published = [record for record in records if record.topic() != topics.relay_dead_letter]
    assert [event_id_of(record) for record in published] == [large]
    dead = [record for record in records if record.topic() == topics.relay_dead_letter]
    assert Counter(dict(r.headers())["x-event-id"].decode() for r in dead) == {str(large): 1, str(refused): 2}

    _, (again,) = run(processes, "dlq", "list", "--relay")
    assert (again["event_id"], again["state"], again["attempts"]) == (str(refused), "dead", 2)
    assert run(processes, "dlq", "discard", again["id"], "--yes", "--reason", "no lead")[0] == 0
    code, found = run(processes, "dlq", "list", "--relay", "--state", "published", "--state", "discarded")
    assert {letter["event_id"]: letter["state"] for letter in found} == {
        str(large): "published",
        str(refused): "discarded",
    }
    # Decided about once: neither letter can be given again, nor discarded.
    code, second = run(processes, "dlq", "retry", *(letter["id"] for letter in found), "--yes")
    assert (code, len(second["failed"])) == (1, 2)
    assert run(processes, "dlq", "list", "--relay")[0] == 3
    shown = run(processes, "dlq", "show", again["id"])[1]
    assert [decision["state"] for decision in shown["decisions"]] == ["dead", "discarded"]
    assert shown["row"]["event_type"] == "lead.created"
    assert relay.terminate() == 0
    assert {row[0] for row in database.execute("SELECT action FROM audit_logs")} == {
        "dead_letter.reprocessed",
        "dead_letter.discarded",
    }
    assert database.execute("SELECT count(*) FROM afluente.relay_reprocess WHERE row_copy IS NOT NULL") == [(0,)]


@pytest.mark.parametrize("point", ["relay.after_send:2", "relay.after_commit:2", "relay.reprocessed:1"])
def test_a_relay_killed_while_it_publishes_one_again_leaves_it_published_once(
    point, database, topics, reader, processes, unfit, tmp_path
):
    """The first transaction is the claim, the second the request's."""
    _, large, refused = unfit
    relay = processes.start("relay", "run")
    reader.wait_for(2)
    assert relay.terminate() == 0
    limit_topic(topics, topics.family("custom"), 1_000_000)
    assert run(processes, "dlq", "retry", str(large), "--relay", "--yes")[0] == 0
    log = tmp_path / "faults"
    killed = processes.start("relay", "run", env={"AFLUENTE_FAULT": point, "AFLUENTE_FAULT_LOG": log})
    assert killed.wait() == -signal.SIGKILL
    assert log.read_text().count("KILL") == 1
    last = processes.start("relay", "run")
    reader.wait_for(3)
    assert run(processes, "dlq", "retry", str(refused), "--relay", "--yes")[0] == 0
    reader.wait_for(4)
    last.wait_for("relay.reprocessed")
    assert last.terminate() == 0
    records = reader.read_to_the_end()
    assert Counter(record.topic() == topics.relay_dead_letter for record in records) == {True: 3, False: 1}
    ((state,),) = database.execute("SELECT state FROM afluente.relay_reprocess WHERE event_id = %s", [large])
    assert state in ("published", "answered")
    assert run(processes, "dlq", "list", "--relay", "--state", "published")[1][0]["event_id"] == str(large)
    assert look(topics.settings, database.url).position.entries[0].reprocessed == 2


def test_a_row_that_event_log_has_dropped_is_published_from_its_letter_and_the_copy_goes(
    database, topics, reader, processes, unfit
):
    _, large, _ = unfit
    relay = processes.start("relay", "run")
    reader.wait_for(2)
    assert relay.terminate() == 0
    limit_topic(topics, topics.family("custom"), 1_000_000)
    ((payload,),) = database.execute("SELECT payload FROM event_log WHERE id = %s", [large])
    database.execute("SET afluente.rewrite = 'erasure'; DELETE FROM event_log")
    relay = processes.start("relay", "run")
    assert run(processes, "dlq", "retry", str(large), "--relay", "--yes")[0] == 0
    (record,) = (r for r in reader.wait_for(3) if r.topic() != topics.relay_dead_letter)
    assert event_id_of(record) == large
    assert schemas.decode(record.value()).payload == payload
    relay.wait_for("relay.reprocessed")
    assert relay.terminate() == 0
    assert database.execute("SELECT state, row_copy FROM afluente.relay_reprocess") == [("published", None)]


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
