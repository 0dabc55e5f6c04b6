"""Comparing the table with the topics: equal when it is, and each way in which it is not, by name.

Most states are built by hand, so that they need no relay and no mistake of its can hide one here.
"""

import json
import threading
from contextlib import closing
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import psycopg
import pytest
from confluent_kafka import TopicPartition

import schemas
from afluente import archive, kafka
from afluente.errors import Refused
from producers.relay.cluster import Cluster
from producers.relay.errors import PositionRefused
from producers.relay.position import DatabaseIdentity, Entry, Identity, Position, Snapshot, lane_key
from producers.relay.records import dead_letter
from producers.relay.verify import summary, verify
from schemas import Row
from schemas.topics import partition_of
from tests.producers.relay.running import relay_of

LEAD = {"name": "Ana", "source": "site", "pipeline_id": str(uuid4()), "stage_id": str(uuid4()), "value": 1.5}
_COLUMNS = "seq, id, organization_id, event_type, entity_kind, entity_id, payload::text, metadata::text, created_at"


class Scene:
    """A database and topics, and the hands that put things into them."""

    def __init__(self, database, topics):
        self.database, self.topics = database, topics
        topics.create_families()
        self.organization = database.organization("Loja Azul")
        self.other = database.organization("Loja Verde")
        self.producer = kafka.producer(topics.settings)
        with closing(Cluster(topics.settings, topics.names)) as cluster:
            self.kafka_identity = cluster.facts().identity

    def emit(self, count=1, *, organization=None, event_type="lead.created", payload=None, at=None):
        """Rows, in the order of seq. `at`: when they were created; then they are put there by hand."""
        organization = organization or self.organization
        ids = []
        with psycopg.connect(self.database.url) as conn:
            for _ in range(count):
                data = json.dumps(payload or LEAD)
                if at is None:
                    found = conn.execute(
                        "SELECT emit_event_for(%s, %s, 'lead', %s, %s)", (organization, event_type, uuid4(), data)
                    )
                else:
                    found = conn.execute(
                        "INSERT INTO event_log (organization_id, event_type, entity_kind, entity_id, payload,"
                        " created_at) VALUES (%s, %s, 'lead', %s, %s, %s) RETURNING id",
                        (organization, event_type, uuid4(), data, at),
                    )
                ids.append(found.fetchone()[0])
        return self.rows(ids)

    def rows(self, ids):
        found = self.database.execute(f"SELECT {_COLUMNS} FROM event_log WHERE id = ANY (%s) ORDER BY seq", [ids])
        return [Row._make((*r[:6], r[6].encode(), r[7].encode(), r[8].astimezone(UTC))) for r in found]

    def publish(self, *rows, headers=None, value=None, key=None):
        places = []
        for row in rows:
            self.producer.produce(
                self.topics.event(row.event_type),
                key=key or str(row.organization_id),
                value=value or schemas.encode(row),
                headers=headers or schemas.headers(row),
                on_delivery=lambda error, message: places.append(message),
            )
        assert self.producer.flush(30) == 0
        return [f"{m.topic()}[{m.partition()}]@{m.offset()}" for m in places]

    def letter(self, row, reason="name: is required and missing", limit=1_000_000):
        record = dead_letter(row, self.topics.names, {self.topics.relay_dead_letter: limit}, "EncodeError", reason)
        self.producer.produce(record.topic, key=record.key, value=record.value, headers=record.headers)
        assert self.producer.flush(30) == 0

    def position(self, **changes):
        """The relay has published all that is committed now."""
        (snapshot, top, system, timeline, oid, name), *_ = self.database.execute(
            "SELECT pg_current_snapshot()::text, (SELECT coalesce(max(seq), 0) FROM event_log), f.system_identifier,"
            " f.timeline, f.database_oid, f.database_name FROM afluente.relay_facts() f"
        )
        identity = DatabaseIdentity(system, timeline, changes.pop("oid", oid), name)
        position = Position(Identity(identity, self.kafka_identity), (Entry(Snapshot.parse(snapshot), top),), number=1)
        self.producer.produce(self.topics.positions, key=lane_key(1, 0), value=position.format(), partition=0)
        assert self.producer.flush(30) == 0

    def alter(self, statement, parameters):
        with psycopg.connect(self.database.url) as conn:
            conn.execute("SET LOCAL afluente.rewrite = 'erasure'")
            assert conn.execute(statement, parameters).rowcount == 1

    def verify(self, **options):
        options = {"since": datetime.now(UTC) - timedelta(hours=3), **options}
        return verify(self.topics.settings, self.database.url, **options)


@pytest.fixture
def scene(database, topics):
    return Scene(database, topics)


def found(result):
    return {(d.kind.value, d.event_id) for d in result.differences}


def test_each_difference_is_named(scene, processes):
    rows = [
        *scene.emit(4),
        *scene.emit(2, organization=scene.other),
        *scene.emit(2, event_type="loyalty.points_earned"),
    ]
    scene.publish(*rows)
    scene.position()
    direct = rows[0]._replace(seq=0, id=uuid4())
    scene.publish(direct)  # a service's own record
    deferred = "SELECT emit_event_for(%s, 'lead.created', 'lead', NULL, %s, deliver_at => now() + interval '1 day')"
    scene.database.execute(deferred, [scene.organization, json.dumps(LEAD)])
    result = scene.verify()
    assert result.is_equal
    figures = {name: count for name, count in summary(result).items() if count}
    assert figures == {"rows": 8, "records": 8, "directly_produced": 1}
    assert {(h.organization_id, h.rows, h.records) for h in result.hours} <= {
        (scene.organization, n, n) for n in range(1, 7)
    } | {(scene.other, n, n) for n in range(1, 3)}
    assert all(h.rows_hash == h.topic_hash for h in result.hours)
    ok = processes.run("relay", "verify", "--since", "3h")
    assert (ok.returncode, ok.stderr.strip()) == (0, "equal")

    # One of each, all at once, in the same hours.
    (lost,) = scene.emit()
    scene.position()
    scene.publish(rows[1])
    invented = rows[0]._replace(seq=99, id=uuid4())
    (where,) = scene.publish(invented)
    scene.alter("UPDATE event_log SET payload = jsonb_set(payload, '{value}', '1.75') WHERE id = %s", [rows[2].id])
    scene.alter("DELETE FROM event_log WHERE id = %s", [rows[4].id])
    scene.alter("UPDATE event_log SET created_at = created_at - interval '1 hour' WHERE id = %s", [rows[6].id])
    (unreadable,), (stray,) = scene.emit(), scene.emit()
    scene.publish(unreadable, value=b"\0\0\0\0\0what")
    scene.publish(stray, key=str(scene.other))
    expected = {
        ("missing_in_topic", lost.id),
        ("twice_in_topic", rows[1].id),
        ("only_in_topic", invented.id),
        ("content_differs", rows[2].id),
        ("only_in_topic", rows[4].id),
        ("content_differs", rows[6].id),
        ("content_differs", unreadable.id),
        ("content_differs", stray.id),
    }
    for at_once in (50_000, 6):  # with six at a time an hour is divided, and its parts looked at in portions
        result = scene.verify(at_once=at_once)
        assert found(result) == expected
        assert result.is_complete
        assert result.waiting == 0
    details = {d.event_id: d.detail for d in result.differences}
    assert details[rows[2].id].endswith("payload is not the row's")
    assert details[rows[6].id].endswith("is not the row's")
    assert details[invented.id] == where
    assert "cannot be decoded" in details[unreadable.id]
    assert f"its organization {scene.organization}" in details[stray.id]
    assert details[rows[1].id].startswith("2 records: ")
    done = processes.run("relay", "verify", "--since", "3h", "--format", "json")
    assert done.returncode == 3, done.stderr
    shown = json.loads(done.stdout)
    assert {(d["kind"], d["event_id"]) for d in shown["differences"]} == {(k, str(i)) for k, i in expected}
    assert shown["content_differs"] == 4
    only = scene.verify(organization_id=scene.other)
    assert found(only) == {("only_in_topic", rows[4].id)}


def test_what_the_relay_has_not_come_to_waits(scene):
    """Not past a row, whatever the order in which transactions commit; until a record of it is missing."""
    published = scene.emit(2)
    result = scene.verify()  # nothing was ever published
    assert (result.is_equal, result.waiting) == (True, 2)
    with psycopg.connect(scene.database.url) as late:
        emit = "SELECT emit_event_for(%s, 'lead.created', 'lead', NULL, %s)"
        late.execute(emit, [scene.organization, json.dumps(LEAD)])  # its seq is below, its commit above the position
        published += scene.emit()
        scene.publish(*published)
        scene.position()
    unseen = scene.emit(2)
    result = scene.verify()
    assert result.is_equal
    assert (result.rows, result.records, result.waiting) == (6, 3, 3)
    scene.publish(unseen[0])  # published since the position was read: equal too
    result = scene.verify()
    assert result.is_equal
    assert (result.records, result.waiting) == (4, 2)
    scene.position()
    assert [kind for kind, _ in found(scene.verify())] == ["missing_in_topic"] * 2
    scene.position(oid=1)
    with pytest.raises(PositionRefused, match="another server or time"):
        scene.verify()


def test_dead_letters_count_as_published(scene):
    rows = scene.emit(4)
    scene.publish(rows[0], rows[3])
    scene.position()
    scene.letter(rows[1])
    scene.letter(rows[2], limit=1_000)  # too large for its topic: by reference
    result = scene.verify()
    assert result.is_equal
    assert (result.records, result.dead_lettered, result.reprocessed) == (2, 2, 0)
    assert {letter.event_id for letter in result.dead_letters} == {rows[1].id, rows[2].id}
    assert result.dead_letters[0].reason == "name: is required and missing"
    scene.publish(rows[1])  # published after all
    result = scene.verify()
    assert result.is_equal
    assert (result.records, result.dead_lettered, result.reprocessed) == (3, 1, 1)
    assert [letter.event_id for letter in result.dead_letters] == [rows[2].id]
    scene.letter(rows[0]._replace(id=uuid4()))
    assert {kind for kind, _ in found(scene.verify())} == {"only_in_topic"}


def test_what_retention_has_deleted_is_not_called_missing(scene):
    now = datetime.now(UTC)
    old = scene.emit(3, at=now - timedelta(hours=2))
    recent = scene.emit(4)
    elsewhere = next(
        organization
        for number in range(50)
        if partition_of(organization := scene.database.organization(f"{number}"), 6)
        != partition_of(scene.organization, 6)
    )
    (lost,) = scene.emit(organization=elsewhere, at=now - timedelta(hours=2))
    scene.publish(*old, *recent)
    scene.position()
    assert found(scene.verify()) == {("missing_in_topic", lost.id)}
    place = TopicPartition(scene.topics.event("lead.created"), partition_of(scene.organization, 6), 5)
    admin = kafka.admin(scene.topics.settings)
    (future,) = admin.delete_records([place]).values()
    future.result(10)
    result = scene.verify()
    assert found(result) == {("missing_in_topic", lost.id)}  # its partition has all it ever had
    assert {(part.what, part.events) for part in result.not_comparable} == {
        (f"{place.topic}[{place.partition}]", 3),
        ("events", 2),  # so young that their records might be there: they were looked for
    }
    assert summary(result)["not_comparable"] == 5
    assert result.records == 2


def test_archive_stands_for_a_month_that_has_left_the_table(scene, tmp_path, processes):
    (months,), *_ = scene.database.execute(
        "SELECT array_agg(month ORDER BY month) FROM afluente.event_log_partitions()"
    )
    first = datetime(months[0].year, months[0].month, 3, tzinfo=UTC)
    rows = [*scene.emit(3, at=first + timedelta(hours=5)), *scene.emit(2, at=first + timedelta(hours=7))]
    following = scene.emit(at=first + timedelta(days=1, hours=2))
    recent = scene.emit(2)
    scene.publish(*rows, *following, *recent)
    scene.position()
    archive.write(tmp_path, first.date(), rows)
    archive.write(tmp_path, first.date() + timedelta(days=1), following)
    window = {"since": first, "until": first + timedelta(days=2)}
    scene.database.execute(f"DROP TABLE event_log_y{first:%Y}m{first:%m}")

    result = scene.verify(**window)
    assert result.is_equal
    assert (result.rows, result.records, summary(result)["not_comparable"]) == (0, 0, 6)
    result = scene.verify(**window, archived=tmp_path)
    assert result.is_equal
    assert (result.rows, result.records, result.not_comparable) == (6, 6, [])
    # A part of a day is compared line by line, and the table goes on where the archive ends.
    result = scene.verify(since=first + timedelta(hours=6), archived=tmp_path)
    assert result.is_equal
    assert (result.rows, result.records) == (5, 5)
    # Whole days are compared by their manifests: only a difference opens a file.
    file = tmp_path / "event_log" / f"{first:%Y}" / f"{first:%m}" / "03.ndjson.gz"
    whole = file.read_bytes()
    file.write_bytes(bytes(len(whole)))
    assert scene.verify(**window, archived=tmp_path).is_equal
    scene.publish(rows[1])
    with pytest.raises(archive.Altered):
        scene.verify(**window, archived=tmp_path)
    file.write_bytes(whole)
    assert found(scene.verify(**window, archived=tmp_path)) == {("twice_in_topic", rows[1].id)}
    archive.rewrite(tmp_path, first.date(), lambda row: None if row.id == rows[4].id else row)
    assert found(scene.verify(**window, archived=tmp_path)) == {
        ("twice_in_topic", rows[1].id),
        ("only_in_topic", rows[4].id),
    }
    arguments = ("--since", first.isoformat(), "--until", (first + timedelta(days=2)).isoformat())
    nothing = processes.run("relay", "verify", *arguments)
    assert nothing.returncode == 3  # nothing could be compared, which is not the same as equal
    assert "nothing of this window can be compared" in nothing.stderr


def test_window_that_ends_before_it_begins_is_refused(kafka, postgres):
    now = datetime.now(UTC)
    with pytest.raises(Refused, match="before it begins"):
        verify(kafka.settings, postgres.url, since=now, until=now - timedelta(hours=1))


def test_no_difference_beside_a_relay_that_publishes(topics, database, writers, reader):
    """The end is now, and rows are committed in every order all the time."""
    since = datetime.now(UTC) - timedelta(hours=1)
    with relay_of(topics, database):
        writers.commit()
        emit = "SELECT emit_event_for(%s, 'lead.created', 'lead', NULL, '{}')"  # does not fit its schema
        database.execute(emit, [writers.organizations[0]])
        reader.wait_for(2)
        storm = threading.Thread(target=writers.storm, kwargs={"events": 999, "threads": 4, "seed": 1})
        storm.start()
        results = []
        while storm.is_alive() or not results:
            results.append(verify(topics.settings, database.url, since=since))
        storm.join()
    results.append(verify(topics.settings, database.url, since=since))
    assert [result.differences for result in results] == [[]] * len(results)
    assert results[-1].records + results[-1].waiting == 1_000
    assert results[-1].records > 0
    assert [letter.reason for letter in results[-1].dead_letters] == ["payload.name: is required and missing"]
