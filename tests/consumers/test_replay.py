"""Replays, from the command to what workers make of them, on real servers."""

import asyncio
import json
import random
import re
import signal
import threading
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from uuid import uuid4

import pytest
import typer
from psycopg.types.json import Jsonb

import schemas
from afluente import archive
from afluente import kafka as clients
from afluente.cli.output import Format
from afluente.cli.relay.replay import SourceOption
from afluente.cli.relay.replay import replay as command
from afluente.errors import Refused
from afluente.verify import reconcile
from consumers import ExternalWorker, Policy
from consumers.replay import Target, foreign_topic, record_for
from producers.relay.replay.sources import Found, NotCovered
from tests.consumers.runtime.support import (
    MESSAGE,
    ROOT,
    create_topics,
    delivery,
    effect_table,
    effects,
    produce,
    produce_raw,
    row,
    short_sessions,
    states,
    until,
)
from tests.consumers.runtime.workers import Plain, write_effect
from tests.fixtures.kafka import Kafka
from tests.fixtures.topics import TestTopics
from tests.producers.relay.running import relay_of

EVENT = "SELECT emit_event_for(%s, %s, %s, %s, %s)"
RECEIVED = "message.received"


@pytest.fixture
def replay(request, monkeypatch, capsys):
    """The command in this process: `replay(since="1h", to=...)` gives its exit status, its JSON and its words."""
    url, servers = "postgresql://nobody@127.0.0.1:1/none", "127.0.0.1:1"
    if "topics" in request.fixturenames:
        topics = request.getfixturevalue("topics")
        url, servers = request.getfixturevalue("database").url, topics.settings.bootstrap_servers
        monkeypatch.setenv("AFLUENTE_TOPIC_PREFIX", topics.prefix)
    monkeypatch.setenv("DATABASE_URL", url)
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", servers)

    def run(**options):
        status = 0
        try:
            command(**{"format": Format.json, "yes": True} | options)
        except typer.Exit as ended:
            status = ended.exit_code
        said = capsys.readouterr()
        begin = re.search(r"^[{[]$", said.out, re.MULTILINE)  # a relay or a worker of this process talks there too
        data = json.JSONDecoder().raw_decode(said.out, begin.start())[0] if begin else None
        return SimpleNamespace(status=status, data=data, said=said.err)

    return run


def emit(database, organization, count=1, event_type=RECEIVED, body="oi"):
    """Commit events; their ids, in order."""
    with database.connect() as conn:
        payload = Jsonb(MESSAGE | {"body": body}) if event_type == RECEIVED else Jsonb({"n": 1})
        kind = event_type.split(".")[0]
        return [
            conn.execute(EVENT, [organization, event_type, kind, uuid4(), payload]).fetchone()[0] for _ in range(count)
        ]


def rows_of(database):
    """The rows of event_log as the relay reads them."""
    found = database.execute(
        "SELECT seq, id, organization_id, event_type, entity_kind, entity_id, convert_to(payload::text, 'UTF8'),"
        " convert_to(metadata::text, 'UTF8'), created_at FROM event_log ORDER BY seq"
    )
    return [schemas.Row(*columns) for columns in found]


def takes(database, worker, *event_types):
    """As a worker that has run says it."""
    for event_type in event_types:
        database.execute("INSERT INTO worker_event_types VALUES (%s, %s)", [worker, event_type])


def ids_in(topics, topic):
    return [schemas.decode(record.value()).id for record in topics.records(topic)]


def old_month(database, organization, months_ago=3, count=2, event_type=RECEIVED):
    """Rows of a month that is over: its first day, and their ids. The month's partitions are there."""
    month = datetime.now(UTC).replace(day=15, hour=12, minute=0, second=0, microsecond=0)
    for _ in range(months_ago):
        month = (month.replace(day=1) - timedelta(days=1)).replace(day=15)
    database.execute("SELECT afluente.ensure_partitions(%s, %s)", [month.date(), month.date()])
    ids = []
    for number in range(count):
        found = database.execute(
            "INSERT INTO event_log (id, organization_id, event_type, entity_kind, entity_id, payload, created_at)"
            " VALUES (%s, %s, %s, 'message', %s, %s, %s) RETURNING id",
            [uuid4(), organization, event_type, uuid4(), Jsonb(MESSAGE), month + timedelta(seconds=number)],
        )
        ids.append(found[0][0])
    return month.replace(day=1, hour=0), ids


def drop_month(database, table, month):
    """As the archive worker will: sealed, then dropped."""
    ends_at = (month + timedelta(days=32)).replace(day=1)
    if table == "event_log":
        database.execute(
            "INSERT INTO event_log_seal (month, ends_at, boundary, sealed_at) VALUES (%s, %s, '3', now())",
            [month.date(), ends_at],
        )
    database.execute(f"DROP TABLE {table}_y{month:%Y}m{month:%m}")
    database.execute(
        "UPDATE afluente.monthly_partitioned SET floor = %s WHERE table_name = %s::regclass", [ends_at, table]
    )


async def test_a_worker_does_what_it_has_not_done_and_once_more_what_it_is_told_to(database, topics, running, replay):
    organizations = [database.organization("A"), database.organization("B")]
    ids = [event_id for organization in organizations for event_id in emit(database, organization, 3)]
    create_topics(topics, "plain-worker")
    async with running(Plain()) as worker:
        planned = replay(since="1h", to="plain-worker", dry_run=True)
        assert (planned.status, planned.data["to_do"], planned.data["done"], planned.data["applied"]) == (
            0,
            6,
            0,
            False,
        )
        assert replay(since="1h", to="plain-worker").data["sent"] == 6
        await worker.of("worker.delivered", count=6)
        assert replay(since="1h", to="plain-worker").status == 3

        # What the table of deliveries has lost, and that alone.
        database.execute("DELETE FROM event_delivery WHERE event_id = ANY (%s)", [ids[1:3]])
        planned = replay(since="1h", to="plain-worker", dry_run=True).data
        assert planned["counts"] == [
            {"event_type": RECEIVED, "to": "plain-worker", "done": 4, "dead": 0, "open": 0, "to_do": 2}
        ]
        ran = replay(since="1h", to="plain-worker").data
        assert (ran["read"], ran["sent"], ran["skipped"], ran["finished"]) == (6, 2, 4, True)
        await worker.of("worker.delivered", count=8)

        # Sent all the same, the worker skips it: its row decides.
        worker_topic = topics.retry("plain-worker", "now")
        target = Target("plain-worker", worker_topic, True, frozenset({RECEIVED}))
        found = [
            Found(r.id, r.organization_id, r.event_type, r.created_at, *schemas.record(r)) for r in rows_of(database)
        ]
        producer = clients.producer(topics.settings)
        for again in (0, 5, 5):
            for event in found:
                record = record_for(event, target, uuid4(), again)
                produce_raw(producer, record.topic, record.value, record.key, record.headers)
        assert producer.flush(10) == 0
        await worker.of("worker.delivered", count=14)  # once more for replay 5, although its record came twice

        replay(event_id=[str(ids[0])], to="plain-worker", again=True)  # number 3: an older one than 5
        again = replay(since="1h", to="plain-worker", again=True, type_=[RECEIVED], org=["B"])
        assert (again.data["done"], again.data["to_do"], again.data["sent"]) == (3, 3, 3)
        [marker] = produce(topics, [row(organizations[0])])
        await worker.of("worker.delivered", event_id=str(marker.id))
        assert await worker.stop()
    counted = {event_id: sum(1 for e, *_ in effects(database) if e == event_id) for event_id in ids}
    assert list(counted.values()) == [2, 3, 3, 2, 2, 2]
    assert [delivery(database, "plain-worker", e)["generation"] for e in ids] == [1] * 6


class Chooses(ExternalWorker):
    """Its targets are what the test says."""

    name = "chooses-worker"
    event_types = frozenset({RECEIVED})
    policy = Policy(attempts=1)
    chosen = ()
    broken = False

    async def targets(self, event, conn):
        return self.chosen

    async def call(self, delivery, prepared):
        if self.broken:
            raise ConnectionError("refused")

    async def record(self, delivery, result, ctx):
        await write_effect(ctx.connection, delivery)


async def test_again_reaches_every_target_the_dead_ones_too_and_asks_where_there_was_none(
    database, topics, running, replay
):
    [event_id] = emit(database, database.organization())
    create_topics(topics, "chooses-worker")
    again = {"since": "1h", "to": "chooses-worker", "again": True}
    async with running(Chooses()) as worker:
        replay(since="1h", to="chooses-worker")
        await asyncio.to_thread(until, lambda: states(database, "chooses-worker") == {"skipped": 1})
        assert replay(since="1h", to="chooses-worker").status == 3
        worker.service.worker.chosen, worker.service.worker.broken = ("a", "b"), True
        assert replay(**again).data["to_do"] == 1
        await worker.of("worker.dead", count=2)
        buried = "SELECT count(dead_offset) FROM event_delivery"
        await asyncio.to_thread(until, lambda: database.execute(buried) == [(2,)])
        worker.service.worker.broken = False
        planned = replay(since="1h", to="chooses-worker")
        assert (planned.status, planned.data["dead"], planned.data["to_do"]) == (3, 2, 0)  # those are for `dlq retry`
        assert replay(**again).data["to_do"] == 2
        await worker.of("worker.delivered", target="a", attempt=1)
        await worker.of("worker.delivered", target="b", attempt=1)
        assert await worker.stop()
    assert states(database, "chooses-worker") == {"skipped": 1, "done": 2}
    assert {delivery(database, "chooses-worker", event_id, t)["generation"] for t in "ab"} == {1}
    report = reconcile(topics.settings, database.url, now=datetime.now(UTC), wait_s=0, checks=["deliveries"])
    assert report.is_ok, report.findings


def test_all_reaches_whoever_takes_the_type_and_a_topic_gets_the_records_themselves(database, topics, replay):
    organization, other = database.organization("Mine"), database.organization("Theirs")
    [received], [custom] = emit(database, organization), emit(database, organization, event_type="shelf.moved")
    [theirs] = emit(database, other)
    hook = database.execute(
        "INSERT INTO event_log (organization_id, event_type, entity_kind, payload) VALUES (%s, 'webhook.received',"
        " 'webhook_event', %s) RETURNING id",
        [organization, Jsonb({"webhook_event_id": str(uuid4()), "source": "generic", "topic": "x"})],
    )[0][0]
    takes(database, "every-worker", "*")
    takes(database, "some-worker", RECEIVED, "webhook.received")
    copy = topics.prefix + "copy"
    every, some = topics.retry("every-worker", "now"), topics.retry("some-worker", "now")
    topics.create(every, some, copy, partitions=2)

    planned = replay(since="1h", to="all", dry_run=True).data
    assert {(c["event_type"], c["to"]): c["to_do"] for c in planned["counts"]} == {
        (RECEIVED, "every-worker"): 2,
        (RECEIVED, "some-worker"): 2,
        ("shelf.moved", "every-worker"): 1,
        ("webhook.received", "some-worker"): 1,
    }
    assert replay(since="1h", to="all").data["sent"] == 6
    assert sorted(ids_in(topics, every)) == sorted([received, custom, theirs])
    assert sorted(ids_in(topics, some)) == sorted([received, theirs, hook])
    headers = dict(topics.records(some)[0].headers())
    assert headers["x-worker"] == b"some-worker"
    assert {"ce_id", "x-event-id", "x-replay-id"} <= set(headers)
    assert {"x-generation", "x-again"}.isdisjoint(headers)

    only = replay(since="1h", to=copy, org=["Mine"], type_=[RECEIVED, "shelf.moved"], until="0s")
    assert (only.status, only.data["sent"]) == (0, 2)
    assert sorted(ids_in(topics, copy)) == sorted([received, custom])
    record = topics.records(copy)[0]
    assert record.key() == str(organization).encode()
    assert [name for name, _ in record.headers() if name.startswith("x-")] == ["x-replay-id"]
    assert replay(event_id=[str(hook), str(theirs)], to=copy).data["read"] == 2
    assert replay(since="1h", until="30m", to=copy).status == 3


def test_what_cannot_be_sent_is_said_and_the_rest_goes(database, topics, replay):
    organization = database.organization()
    [good], [large] = emit(database, organization), emit(database, organization, body="x" * 8_000)
    [bad] = database.execute(
        "INSERT INTO event_log (organization_id, event_type, entity_kind, payload)"
        " VALUES (%s, %s, 'message', '{\"direction\": 7}') RETURNING id",
        [organization, RECEIVED],
    )[0]
    copy = topics.prefix + "copy"
    topics.create(copy, partitions=1, config={"max.message.bytes": "4000"})
    ran = replay(since="1h", to=copy)
    assert (ran.status, ran.data["sent"], ran.data["failed"]) == (5, 1, 2)
    assert {failure["event"] for failure in ran.data["failures"]} == {str(large), str(bad)}
    assert "as a record; " in ran.said
    assert ids_in(topics, copy) == [good]


@pytest.mark.parametrize(
    "name",
    [
        "events.lead", "events.contact-event", "relay.positions", "relay.dead-letter", "x-worker.retry.now",
        "x-worker.retry.30s", "x-worker.dead-letter", "x-worker.parked", "staging.events.lead", "__consumer_offsets",
    ],
)  # fmt: skip
def test_a_topic_of_ours_is_never_replayed_to(name):
    for prefix in ("", "t.", "prod-"):
        with pytest.raises(Refused, match="one of our own topics"):
            foreign_topic(prefix + name, prefix)


@pytest.mark.parametrize("name", ["copy", "events", "events.leads", "my-worker", "relay.positions.copy", "x.retry.now"])
def test_a_topic_of_somebody_elses_may_be(name):
    assert foreign_topic(name, "") == name


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"since": "1h"}, "--to says who"),
        ({"to": "all"}, "say from where"),
        ({"since": "1h", "from_position": "3:3:/1", "to": "all"}, "say from where"),
        ({"topic": "events.lead", "since": "1h", "to": "all"}, "go together"),
        ({"event_id": ["nine"], "to": "plain-worker"}, "is not an id"),
        ({"resume": str(uuid4()), "to": "all"}, "--resume goes on"),
        ({"from_position": "here", "to": "plain-worker"}, "is neither S1/T1"),
        ({"from_position": "3:3:/1", "to": "plain-worker", "source": SourceOption.archive}, "only the table can tell"),
        ({"topic": "events.lead", "from_offset": "0", "to": "all"}, "is not PARTITION:OFFSET"),
        ({"since": "999999d", "to": "all"}, "no time that a calendar has"),
        ({"since": "1h", "to": "copy", "again": True}, "--again is for workers"),
        ({"since": "1h", "to": "all", "rate": float("inf")}, "no number of events a second"),
    ],
)
def test_wrong_usage_is_said_before_anything_is_asked(options, refused, replay):
    with pytest.raises(typer.BadParameter, match=refused):
        replay(**options)


def test_what_cannot_be_replayed_is_refused_with_the_reason(database, topics, replay):
    topics.create(topics.retry("plain-worker", "now"), partitions=1)
    with pytest.raises(Refused, match="no worker has ever run here"):
        replay(since="1h", to="all")
    takes(database, "plain-worker", RECEIVED)
    with pytest.raises(Refused, match="no worker is called 'plane-worker'; did you mean plain-worker"):
        replay(since="1h", to="plane-worker")
    with pytest.raises(Refused, match="does not exist"):
        replay(since="1h", to="nobodys-topic")
    with pytest.raises(Refused, match="there is no replay"):
        replay(resume=str(uuid4()))
    emit(database, database.organization())
    asked = replay(since="1h", to="plain-worker", yes=False)
    assert (asked.status, asked.data) == (2, None)
    assert "1 to do, 0 done already" in asked.said


def test_offsets_are_a_topics_own(database, topics, replay):
    copy = topics.prefix + "copy"
    topics.create(topics.event(RECEIVED), copy, topics.retry("plain-worker", "now"), partitions=3)
    organization = database.organization()
    rows = produce(topics, [row(organization) for _ in range(6)], transactional=True)  # offsets 0, 2, 4 ... 10
    producer = clients.producer(topics.settings)
    forged = [("ce_type", b"message.received"), ("x-generation", b"7"), ("x-again", b"9"), ("x-target", b"t")]
    [last] = [row(organization)]
    produce_raw(producer, topics.event(RECEIVED), schemas.encode(last), str(organization).encode(), forged)
    produce_raw(producer, topics.event(RECEIVED), b"no event", str(organization).encode())
    producer.flush(10)
    partition = schemas.topics.partition_of(organization, 3)
    offsets = {"topic": "events.message", "from_offset": f"{partition}:5"}
    ran = replay(**offsets, to=copy)
    assert (ran.status, ran.data["source"]) == (5, "topic")  # one of them is no event
    assert ran.data["failures"][0]["event"] == f"{topics.event(RECEIVED)}[{partition}]@13"
    assert ids_in(topics, copy) == [*(r.id for r in rows[3:]), last.id]

    # To a worker a stranger's headers do not go along.
    takes(database, "plain-worker", RECEIVED)
    replay(**offsets, to="plain-worker")
    records = topics.records(topics.retry("plain-worker", "now"))
    assert all({"x-generation", "x-again", "x-target"}.isdisjoint(dict(r.headers())) for r in records)
    assert dict(records[0].headers())["x-origin-offset"] == b"6"
    # What is in an open transaction when the replay begins is waited for.
    late = clients.producer(topics.settings, transactional_id=f"{topics.prefix}late")
    late.init_transactions(30)
    late.begin_transaction()
    produce_raw(late, topics.event(RECEIVED), schemas.encode(row(organization)), str(organization).encode())
    assert late.flush(30) == 0
    commit = threading.Timer(0.5, late.commit_transaction)
    commit.start()
    assert replay(**offsets, to=copy, dry_run=True).data["events"] == 5
    commit.join()
    with pytest.raises(Refused, match="is beyond it"):
        replay(topic="events.message", from_offset=f"{partition}:99", to="plain-worker")
    with pytest.raises(Refused, match="has no partition 3"):
        replay(topic="events.message", from_offset="3:0", to="plain-worker")
    with pytest.raises(Refused, match="none of the event topics"):
        replay(topic="plain-worker.retry.now", from_offset="0:0", to="plain-worker")
    _expire(topics, topics.event(RECEIVED), partition, 8)
    with pytest.raises(NotCovered, match="begins at offset 8: 5 has expired"):
        replay(**offsets, to="plain-worker")


def _expire(topics, topic, partition, before):
    from confluent_kafka import TopicPartition

    admin = clients.admin(topics.settings)
    for future in admin.delete_records([TopicPartition(topic, partition, before)]).values():
        future.result(20)


def test_a_month_the_table_lost_comes_from_the_topics_or_the_archive(database, topics, replay, tmp_path):
    organization = database.organization()
    month, old = old_month(database, organization)
    new = emit(database, organization, 2)
    copy = topics.prefix + "copy"
    topics.create(*topics.families(), copy, partitions=1)
    rows = rows_of(database)
    published = produce(topics, rows)
    archive.write(tmp_path, published[0].created_at.date(), [r for r in rows if r.id in old])
    since = month.isoformat()
    assert replay(since=since, to=copy, dry_run=True).data["source"] == "table"
    drop_month(database, "event_log", month)

    from_topic = replay(since=since, to=copy)
    assert from_topic.data["source"].startswith("topic (before ")
    assert from_topic.data["source"].endswith(", then table")
    assert ids_in(topics, copy) == [*old, *new]
    # Which records were lost first is not known of a partition that has lost some.
    place = next((r.partition(), r.offset()) for r in topics.records(topics.event(RECEIVED)))
    _expire(topics, topics.event(RECEIVED), place[0], 1)
    with pytest.raises(NotCovered, match="may no longer reach back"):
        replay(since=since, to=copy)
    days = [month + timedelta(days=n) for n in range(31)]
    for day in days:  # an archive has every day
        if day.month == month.month and day.day != 15:
            archive.write(tmp_path, day.date(), [])
    from_archive = replay(since=since, to=copy, archive=str(tmp_path))
    assert from_archive.data["source"].startswith("archive (before ")
    assert ids_in(topics, copy) == [*old, *new] * 2
    assert replay(since=since, to=copy, source=SourceOption.table).data["read"] == 2
    from_topics = replay(since=since, to=copy, source=SourceOption.topic)
    assert "may no longer reach back" in from_topics.said
    assert from_topics.data["read"] == 3
    with pytest.raises(NotCovered, match="rows to come that are gone"):
        replay(from_position="3:3:/0", to=copy)
    # By their ids: one from each.
    by_id = replay(event_id=[str(old[0]), str(old[1]), str(new[0])], to=copy, archive=str(tmp_path))
    assert by_id.data["source"] == "archive, then topic, then table"
    assert by_id.data["sent"] == 3
    with pytest.raises(Refused, match="in the table, the topics"):
        replay(event_id=[str(uuid4())], to=copy)


def test_a_position_is_what_a_relay_there_had_before_it(database, topics, replay):
    organization = database.organization()
    copy = topics.prefix + "copy"
    topics.create(copy)
    emit(database, organization, 2)
    with database.connect() as late:
        [open_id] = [late.execute(EVENT, [organization, RECEIVED, "message", uuid4(), Jsonb(MESSAGE)]).fetchone()[0]]
        emit(database, organization, 2)
        s1, t1 = database.execute("SELECT pg_current_snapshot()::text, max(seq) FROM event_log")[0]
        emit(database, organization, 1)
        late.commit()
    after = emit(database, organization, 2)
    seqs = dict(database.execute("SELECT seq, id FROM event_log"))
    expected = {event_id for seq, event_id in seqs.items() if seq > t1} | {open_id}
    for text in (f"{s1}/{t1}", json.dumps({"position": {"s1": s1, "t1": t1, "s2": None}})):
        assert replay(from_position=text, to=copy).status == 0
    found = ids_in(topics, copy)
    assert set(found) == expected
    assert len(found) == 2 * len(expected)
    assert set(after) <= expected


async def test_where_deliveries_are_gone_only_again_replays(database, topics, running, replay):
    month, ids = old_month(database, database.organization(), months_ago=16)
    drop_month(database, "event_delivery", month)
    create_topics(topics, "plain-worker")
    asked = {"since": month.isoformat(), "until": "30d", "to": "plain-worker"}
    async with running(Plain()) as worker:
        with pytest.raises(Refused, match=f"events of {month:%Y-%m} is no longer known") as refused:
            replay(**asked)
        assert "--again" in refused.value.hint
        for times in (1, 2):
            assert replay(**asked, again=True).data["sent"] == 2
            await worker.of("worker.delivered", count=2 * times)
        # The partition that was made for it does not make the month known; and what else comes of it is refused.
        with pytest.raises(Refused, match="no longer known"):
            replay(**asked)
        [stray] = produce(topics, rows_of(database)[:1])
        await worker.of("worker.dead", event_id=None)
        assert await worker.stop()
    assert stray.id in ids
    assert sorted(event_id for event_id, *_ in effects(database)) == sorted(ids * 2)


@pytest.mark.parametrize(
    "point", ["replay.after_send:3", pytest.param("replay.after_commit:2", marks=pytest.mark.faults_long)]
)
def test_a_killed_replay_is_resumed_where_it_stands(point, database, topics, processes, replay, tmp_path):
    organization = database.organization()
    emit(database, organization, 620)
    copy = topics.prefix + "copy"
    topics.create(copy, partitions=1)
    log = tmp_path / "faults"
    killed = processes.run(
        "relay", "replay", "--since", "1h", "--to", copy, "--yes",
        env={"AFLUENTE_FAULT": point, "AFLUENTE_FAULT_LOG": log},
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL
    assert log.read_text()
    [(replay_id, number)] = database.execute("SELECT id, number FROM afluente.relay_replay")
    assert str(replay_id) in killed.stderr
    emit(database, organization, 5)  # written since: not of this replay
    resumed = replay(resume=str(replay_id))
    assert (resumed.status, resumed.data["finished"], resumed.data["read"]) == (0, True, 620)
    assert ids_in(topics, copy) == [r.id for r in rows_of(database)[:620]]
    assert database.execute("SELECT progress ->> 'sent', number FROM afluente.relay_replay") == [("620", number)]
    assert replay(resume=str(replay_id)).status == 3
    [listed] = replay(list_=True).data
    assert (listed["replay_id"], listed["sent"], listed["finished_at"] is not None) == (str(replay_id), 620, True)
    groups = [group.group_id for group in clients.admin(topics.settings).list_consumer_groups().result(20).valid]
    assert not [group for group in groups if str(replay_id) in group]


def test_a_replay_that_is_stopped_says_how_to_go_on_and_one_process_does(database, topics, processes, replay):
    emit(database, database.organization(), 40)
    copy = topics.prefix + "copy"
    topics.create(copy)
    began = time.monotonic()
    ran = replay(since="1h", to=copy, rate=40)
    assert time.monotonic() - began >= 0.7  # the first page goes at once
    assert ran.data["sent"] == 40

    process = processes.start("relay", "replay", "--since", "1h", "--to", copy, "--yes", "--rate", "2")
    until(lambda: len(topics.records(copy)) > 41, timeout=60)
    assert process.terminate() == 130
    [(replay_id,)] = database.execute("SELECT id FROM afluente.relay_replay WHERE finished_at IS NULL")
    assert f"--resume {replay_id}" in process.log
    # Two resume it: the later one goes on, the earlier one sends nothing more.
    process = processes.start("relay", "replay", "--resume", str(replay_id), "--rate", "2")
    sent = len(topics.records(copy))
    until(lambda: len(topics.records(copy)) > sent, timeout=60)
    assert replay(resume=str(replay_id), rate=10_000.0).data["read"] == 40
    assert process.wait(20) == 3, process.log
    assert "another process has resumed this replay" in process.log
    found = ids_in(topics, copy)
    assert len(found) == 80
    assert len(set(found)) == 40


def test_the_relay_goes_on_untouched(database, topics, replay):
    topics.create_families()
    organization = database.organization()
    emit(database, organization, 3)
    copy = topics.prefix + "copy"
    topics.create(copy)
    with relay_of(topics, database):
        until(lambda: len(topics.records(topics.event(RECEIVED))) == 3)
        assert replay(since="1h", to=copy).data["sent"] == 3
        position = topics.records(topics.positions)[-1].value()
        assert replay(topic="events.message", from_offset="0:0,1:0,2:0,3:0,4:0,5:0", to=copy).data["sent"] == 3
        new = emit(database, organization, 1)
        until(lambda: len(topics.records(topics.event(RECEIVED))) == 4)
        after = topics.records(topics.positions)[-1].value()
    assert ids_in(topics, topics.event(RECEIVED))[-1:] == new
    first, second = json.loads(position), json.loads(after)
    assert (first["instance"], first["published"]) == (second["instance"], second["published"] - 1)


@pytest.mark.faults_long
@pytest.mark.timeout(600)
def test_twenty_kills_send_everything_once(database, topics, processes):
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    emit(database, database.organization(), 6_000)
    copy = topics.prefix + "copy"
    topics.create(copy, partitions=1)
    arguments = ["relay", "replay", "--since", "1h", "--to", copy, "--yes"]
    kills = 0
    for _ in range(60):
        point = chance.choice(["replay.after_send", "replay.after_commit"])
        env = {"AFLUENTE_FAULT": f"{point}:{chance.randint(1, 3)}"} if kills < 20 else {}
        ended = processes.run(*arguments, env=env)
        kills += ended.returncode == -signal.SIGKILL
        [(replay_id, finished)] = database.execute("SELECT id, finished_at FROM afluente.relay_replay")
        arguments = ["relay", "replay", "--resume", str(replay_id)]
        if finished is not None:
            break
    assert finished is not None, f"seed {seed}"
    assert kills > 10, f"seed {seed}"
    assert ids_in(topics, copy) == [r.id for r in rows_of(database)], f"seed {seed}"


@pytest.mark.faults_long
@pytest.mark.timeout(300)
def test_a_broker_that_is_killed_and_comes_back_needs_no_hand(database, private_kafka, processes, kafka):
    topics = TestTopics(Kafka(private_kafka.bootstrap_servers), "t.")
    emit(database, database.organization(), 3_000)
    topics.create("t.copy", partitions=1)
    env = {"KAFKA_BOOTSTRAP_SERVERS": private_kafka.bootstrap_servers, "AFLUENTE_TOPIC_PREFIX": "t."}
    process = processes.start(
        "relay", "replay", "--since", "1h", "--to", "t.copy", "--yes", "--rate", "400", env=env
    )  # fmt: skip
    for records in (300, 900, 1_500):
        until(lambda least=records: len(topics.records("t.copy")) > least, timeout=60)
        private_kafka.kill()
        private_kafka.restart()
    assert process.wait(120) == 0, process.log
    assert "going on from where the replay stands" in process.log
    assert ids_in(topics, "t.copy") == [r.id for r in rows_of(database)]


@pytest.mark.faults_long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["Plain", "Caller"])
def test_workers_killed_in_a_replay_do_each_event_once_more(kind, database, topics, processes, replay, tmp_path):
    name = f"{kind.lower()}-worker"
    effect_table(database)
    create_topics(topics, name)
    short_sessions(topics, name)
    takes(database, name, RECEIVED)
    organizations = [database.organization(f"o{number}") for number in range(3)]
    ids = [event_id for organization in organizations for event_id in emit(database, organization, 100)]
    env = {"PYTHONPATH": ROOT, "AFLUENTE_CLAIM_RENEW_S": "0.5", "AFLUENTE_CLAIM_TAKEOVER_S": "3"}
    log = tmp_path / "faults"
    points = ["worker.after_claim:1", "worker.in_handler:40", "worker.after_commit:2", "worker.before_offset_commit:1"]
    worker = ["worker", "run", f"tests.consumers.runtime.workers:{kind}"]
    for again, times in ((False, 1), (True, 2)):
        assert replay(since="1h", to=name, again=again).data["to_do"] == 300
        for point in points:
            killed = processes.start(*worker, env=env | {"AFLUENTE_FAULT": point, "AFLUENTE_FAULT_LOG": log})
            assert killed.wait(60) == -signal.SIGKILL, point
        process = processes.start(*worker, env=env)
        until(lambda least=300 * times: len(effects(database)) >= least, timeout=60)
        until(lambda: states(database, name) == {"done": 300}, timeout=60)
        process.terminate()
    assert len(log.read_text().splitlines()) >= 2 * len(points)
    assert Counter(event_id for event_id, *_ in effects(database)) == dict.fromkeys(ids, 2)
    assert {g for (g,) in database.execute("SELECT DISTINCT generation FROM event_delivery")} == {1}
