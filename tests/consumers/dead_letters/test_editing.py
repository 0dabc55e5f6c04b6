"""A dead letter with another payload: for its worker and target only, and never twice, whoever dies."""

import json
import signal
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from uuid import uuid4

import pytest

import schemas
from afluente import kafka as clients
from consumers.dead_letters import Filter, find, reprocess
from consumers.dead_letters.editing import BadEdition, drop, put
from consumers.runtime.deliveries import Deliveries, Duplicate, Item, Run
from consumers.runtime.records import Record, RetryMark, to_ms
from tests.consumers.dead_letters.test_bulk import Mended
from tests.consumers.dead_letters.test_dlq import command, letters_of
from tests.consumers.runtime.support import MESSAGE, create_topics, delivery, produce, produce_raw, row

REASON = ("--yes", "--reason", "the sender was wrong", "--format", "json")


class Wants(Mended):
    """Rejects what has the body "never", for target "b"."""

    is_well = True


class Other(Wants):
    name = "other-worker"


def bodies(topics, worker):
    """What the copies in retry.now say, in order, with their generations."""
    copies = topics.records(topics.retry(worker, "now"))
    return [(schemas.decode(r.value()).payload["body"], dict(r.headers())["x-generation"]) for r in copies]


async def test_an_edited_event_is_delivered_to_its_own_target_and_a_killed_edition_never(
    database, topics, running, processes, tmp_path
):
    create_topics(topics, "mended-worker", "other-worker")
    organization, worker, other, log = database.organization(), Wants(), Other(), tmp_path / "faults"
    async with running(worker) as service, running(other) as other_service:
        [event] = await letters_of(service, topics, organization, ["never"])
        await other_service.of("worker.dead", event_id=str(event.id), target="b")
    id, seen = f"mended-worker:{event.id}:b", len(worker.runs)
    # killed with its copy in the topic and the letter still dead; then the letter is retried as it is
    fault = {"AFLUENTE_FAULT": "dlq.after_copy:1", "AFLUENTE_FAULT_LOG": log}
    killed = await command(processes, "edit", id, "--set", "body=from the dead", *REASON, env=fault)
    assert (killed.returncode, log.read_text().count("KILL")) == (-signal.SIGKILL, 1)
    assert delivery(database, "mended-worker", event.id, "b")["state"] == "dead"
    with database.connect(autocommit=True) as conn:
        letters = find(conn, Filter(worker="mended-worker"))
        now = datetime.now(UTC)
        assert reprocess(conn, topics.settings, letters, actor="me", reason="as it is", now=now).done == [id]
    assert bodies(topics, "mended-worker") == [("from the dead", b"1"), ("never", b"2")]
    async with running(worker) as service, running(other):
        await service.of("worker.dead", event_id=str(event.id), target="b")
        assert [run[1:] for run in worker.runs[seen:]] == [("b", 2)]

        done = await command(processes, "edit", id, "--set", "body=mended", "--set", "extra={}", *REASON)
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert result["changed"] == [
            {"path": "payload.body", "before": "never", "after": "mended"},
            {"path": "payload.extra", "before": None, "after": {}},
        ]
        await service.of("worker.delivered", event_id=str(event.id), target="b", attempt=1)
        produce(topics, [event])  # the event's own record again changes nothing
        [last] = await letters_of(service, topics, organization, ["never"])
    assert [run[1:] for run in worker.runs[seen:] if run[0] == event.id] == [("b", 2), ("b", 3)]
    found = delivery(database, "mended-worker", event.id, "b")
    assert (found["state"], found["generation"], found["edited_sha256"]) == ("done", 3, f"\\x{result['after_sha256']}")
    assert {run[0:3:2] for run in other.runs} == {(event.id, 0), (last.id, 0)}
    assert len(topics.records(topics.event("message.received"))) == 3
    [(actor, details)] = database.execute(
        "SELECT actor_id, details FROM audit_logs WHERE action = 'dead_letter.edited'"
    )
    assert actor
    assert details["reason"] == "the sender was wrong"
    assert details["changed"] == ["payload.body", "payload.extra"]
    assert details["before_sha256"] == sha256(schemas.encode(event)).hexdigest()
    assert details["after_sha256"] == result["after_sha256"]
    assert "mended" not in json.dumps(details).replace("mended-worker", "")  # values are not the audit log's


def test_what_does_not_fit_is_refused_before_anything_is_written(database, topics, here, bury, tmp_path):
    topics.create(topics.retry("mended-worker", "now"), partitions=1)
    organization = database.organization()
    event_id = bury(organization, event_type="message.received", payload=MESSAGE)
    free = bury(organization, payload={"items": [{"sku": "a"}], "n": 1})
    file = tmp_path / "payload.json"
    file.write_text("[1]")
    for arguments, status, says in (
        (["--set", "direction=5"], 1, "payload.direction: must be one of"),
        (["--unset", "direction"], 1, "payload.direction"),
        (["--unset", "nothing"], 1, "nothing: is not there"),
        (["--set", "a.b=1"], 1, "a.b: there is no 'a' in it"),
        (["--set", f"body={MESSAGE['body']}"], 3, "nothing of mended-worker"),
        (["--set", "body=" + "x" * 262_144], 1, "an event takes 262144"),
        (["--payload-file", file], 2, "is a JSON object"),
        (["--value-file", file], 2, "for letters that are no event"),
        (["--set", "body"], 2, "PATH=VALUE"),
    ):
        ran = here("edit", event_id, *arguments, "--yes", "--reason", "x")
        assert (ran.status, ran.data) == (status, None), ran.words
        assert says in ran.words
    assert here("edit", event_id, "--set", "body=x", "--yes").status == 2  # no reason
    assert "Nobody is there to answer" in here("edit", event_id, "--set", "body=x", "--reason", "x").words
    dry = here("edit", free, "--set", "items[0].sku=b", "--unset", "n", "--dry-run")
    assert (dry.status, dry.data["applied"]) == (0, False)
    assert {change["path"] for change in dry.data["changed"]} == {"payload.items[0].sku", "payload.n"}
    assert topics.records(topics.retry("mended-worker", "now")) == []
    assert database.execute("SELECT count(*), max(generation) FROM event_delivery WHERE state = 'dead'") == [(2, 0)]

    file.write_text('{"items": []}')
    assert here("edit", free, "--payload-file", file, "--yes", "--reason", "x").data["applied"] is True
    [copy] = topics.records(topics.retry("mended-worker", "now"))
    assert schemas.decode(copy.value()).payload == {"items": []}
    assert database.execute("SELECT payload FROM event_log WHERE id = %s", [free]) == [
        ({"items": [{"sku": "a"}], "n": 1},)
    ]
    # dead again, and its record expired: what it was before is not given in its place
    database.execute("UPDATE event_delivery SET state = 'dead', next_attempt_at = NULL, finished_at = now()")
    again = here("retry", f"mended-worker:{free}", "--yes", "--reason", "x")
    assert (again.status, again.data["ids"]) == (1, [])
    assert "its edited record is no longer in Kafka" in again.data["failed"][0]["error"]


def test_bytes_that_are_no_event_are_replaced_by_bytes_that_are(database, topics, here, bury_bytes, tmp_path):
    topics.create(topics.retry("mended-worker", "now"), topics.dead_letter("mended-worker"), partitions=1)
    organization = database.organization()
    producer = clients.producer(topics.settings)
    headers = [("ce_id", b"wrong"), ("x-kept", b"1")]
    produce_raw(producer, topics.dead_letter("mended-worker"), b"junk", key=b"k", headers=headers)
    producer.flush(30)
    bury_bytes(7, 8)
    file, event = tmp_path / "value", row(organization)
    arguments = ["edit", "mended-worker@t/0/7", "--value-file", file, "--yes", "--reason", "framing was lost"]
    for value in (b"", b"junk", b"\0" * 9, schemas.encode(event)[:-1]):
        file.write_bytes(value)
        assert here(*arguments).status == 1
    assert here("edit", "mended-worker@t/0/7", "--set", "a=1", "--yes", "--reason", "x").status == 2
    file.write_bytes(schemas.encode(event))
    done = here(*arguments)
    assert (done.status, done.data["applied"], done.data["event_id"]) == (0, True, str(event.id))
    [copy] = topics.records(topics.retry("mended-worker", "now"))
    assert (copy.key(), schemas.decode(copy.value()).id) == (str(organization).encode(), event.id)
    given = dict(copy.headers())
    assert (given["ce_id"], given["x-kept"], "x-generation" in given) == (str(event.id).encode(), b"1", False)
    [(details,)] = database.execute("SELECT details FROM undecodable_audit WHERE action = 'dead_letter.edited'")
    assert details["before_sha256"] == sha256(b"junk").hexdigest()
    assert database.execute("SELECT organization_id, entity_id FROM audit_logs") == [(organization, str(event.id))]
    assert here(*arguments).status == 3  # it is no longer a letter
    # an event that the worker has is not given in the name of another record
    database.execute(
        """INSERT INTO event_delivery (event_created_at, worker, event_id, organization_id, event_type, key, state,
                                       finished_at)
           VALUES (%s, 'mended-worker', %s, %s, 'message.received', '', 'done', now())""",
        [event.created_at, event.id, organization],
    )
    known = here("edit", "mended-worker@t/0/8", *arguments[2:])
    assert (known.status, "knows event" in known.words) == (1, True)


async def test_only_the_edited_record_runs_an_edited_delivery(database):
    organization = database.organization()
    original, mended = (row(organization), b"another value")
    now = datetime.now(UTC)
    database.execute(
        """INSERT INTO event_delivery (event_created_at, worker, event_id, organization_id, event_type, key, state,
                                       generation, next_attempt_at, edited_sha256)
           VALUES (%s, 'mended-worker', %s, %s, 'message.received', '', 'waiting', 3, %s, %s)""",
        [original.created_at, original.id, organization, now, sha256(mended).digest()],
    )
    event = schemas.decode(schemas.encode(original))
    deliveries = Deliveries("mended-worker", uuid4(), transactional=False, ordered=False, takeover_s=0.0)

    def item(value, mark):
        return Item(Record("t", 0, 0, 0, b"", value, [], ours=mark is not None), event, "", "", mark)

    async with await database.connect_async() as conn:
        for value, mark, expected in (
            (schemas.encode(original), None, Duplicate),  # the event's own, again
            (schemas.encode(original), RetryMark("", 3, 1, to_ms(now)), Duplicate),  # of a retry that did not commit
            (mended, RetryMark("", 3, 1, to_ms(now)), Run),
        ):
            claimed = await deliveries.claim(conn, [item(value, mark)], now, timedelta(0), timedelta(hours=2))
            assert [type(verdict) for verdict in claimed] == [expected]
        await conn.execute("UPDATE event_delivery SET claimed_by = %s", [uuid4()])
        [orphan] = await deliveries.orphaned(conn, 10)
        assert orphan[4] is None  # event_log's row is not what the reaper may run in its place
        # a replay with --again is a new life, of the event as it is
        await conn.execute("UPDATE event_delivery SET state = 'dead', claimed_by = NULL, finished_at = now()")
        replayed = item(schemas.encode(original), None)
        replayed.record.again = 7
        claimed = await deliveries.claim(conn, [replayed], now, timedelta(0), timedelta(hours=2))
        assert [type(verdict) for verdict in claimed] == [Run]
        cursor = await conn.execute("SELECT generation, edited_sha256 FROM event_delivery")
        assert await cursor.fetchall() == [(4, None)]


@pytest.mark.parametrize("path", ["", ".", "a..b", "a[", "a[x]", "a[0", "[1]x[", "a" * 1001, "a[1]", "a.b.c", "x.y"])
def test_paths_that_lead_nowhere_are_refused(path):
    payload = {"a": [1], "b": {}}
    with pytest.raises(BadEdition):
        put(payload, path, 1)
    assert payload == {"a": [1], "b": {}}


def test_paths_set_and_take_away():
    payload = {"a": [{"b": 1}, 2], "c": None}
    put(payload, "a[0].b", {"x": []})
    put(payload, "a[0].new", "y")
    drop(payload, "a[1]")
    drop(payload, "c")
    assert payload == {"a": [{"b": {"x": []}, "new": "y"}]}
