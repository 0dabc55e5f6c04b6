"""The process: what it refuses, says, and ends with; and that a bare consumer with the same sink comes to the same."""

import json
import signal
import subprocess
import sys
import uuid
from dataclasses import replace

import pytest
from confluent_kafka import TopicPartition

import schemas
from afluente import kafka as clients
from schemas.partitioner import partition_for
from streams.service import check_topic
from streams.summaries.sink import Partition, Sink, UnreadableHeader
from tests.fixtures.raw_records import BAD_NAME, produce_batch
from tests.streams.records import Feed, Fences, Record, expected, some_events, summaries


@pytest.fixture
def topic(topics):
    topics.create(topics.event("contact_event.recorded"))
    return topics.event("contact_event.recorded")


@pytest.fixture
def feed(topics, topic):
    return Feed(topics)


@pytest.fixture
def fences(database, topics, topic):
    return Fences(database, topics.settings, topic)


@pytest.fixture
def stream(processes, topic):
    """Start the stream application."""

    def start(member="a", *arguments, **env):
        return processes.start("stream", "run", "--member-id", member, *arguments, env=env)

    return start


def test_committed_records_are_folded_and_status_says_so(stream, processes, feed, fences, database):
    events = some_events(300)
    feed.send(events[:150])
    feed.send(some_events(40, seed=7), abort=True)
    worker = stream()
    worker.wait_for("stream.ready")
    feed.send(events[100:])
    fences.wait_until_folded()
    assert summaries(database) == expected(events)
    said = [line["count"] for line in worker.events("stream.committed")]
    assert sum(said) == 350, "aborted records are not read"
    # The marker of the last transaction comes after its records.
    fences.wait_for(lambda found: found == fences.ends())
    shown = processes.run("stream", "status", "--format", "json")
    assert shown.returncode == 0, shown.stderr
    status = json.loads(shown.stdout)
    assert (status["lag"], status["dead_letters"], status["generation"]) == (0, 0, 1)
    assert status["summaries"] == len(expected(events))
    assert status["events"] == sum(count for count, *_ in expected(events).values())
    assert [partition["lag"] for partition in status["partitions"]] == [0] * 6

    assert worker.terminate() == 0
    feed.send(some_events(10, seed=8))
    behind = json.loads(processes.run("stream", "status", "--format", "json").stdout)
    assert behind["lag"] >= 10


def test_an_open_transaction_is_waited_for(stream, feed, fences, topics, database):
    """Its records are neither folded early nor skipped, although others of the partition are behind them."""
    events = some_events(30, organizations=1)
    held = clients.producer(topics.settings, transactional_id=f"{topics.prefix}held")
    held.init_transactions(30)
    held.begin_transaction()
    partition = None
    for event in events[:10]:
        key = str(event.organization_id).encode()
        partition = partition_for(key, 6)
        held.produce(feed.topic, event.value_bytes(), key, partition=partition)
    held.flush(30)
    feed.send(events[10:])
    other = some_events(10, organizations=8, seed=5)
    feed.send(other)
    stream().wait_for("stream.ready")
    fences.wait_for(lambda found: sum(found.values()) > 0)
    assert fences.now()[partition] == 0
    held.commit_transaction(30)
    fences.wait_until_folded()
    assert summaries(database) == expected(events + other)


def test_a_bare_consumer_with_the_same_sink_comes_to_the_same(stream, feed, fences, topics, topic, database, processes):
    events = some_events(400)
    for start in range(0, 400, 50):
        feed.send(events[start : start + 50] + events[max(0, start - 20) : start])
    feed.send_bytes(b"poison", events[0].value_bytes()[:-2])
    produce_batch(topics.settings, topic, [(b"k", event.value_bytes(), [(BAD_NAME, b"")]) for event in events[:3]])
    stream().wait_for("stream.ready")
    fences.wait_until_folded()
    from_faust = (summaries(database), dead_letters(database))

    database.execute("INSERT INTO stream_generation (generation, state) VALUES (2, 'building')")
    database.execute("UPDATE stream_generation SET state = 'retired' WHERE generation = 1")
    database.execute("UPDATE stream_generation SET state = 'live', live_at = now() WHERE generation = 2")
    fold_with_confluent(database, topics, topic, fences.ends())
    assert (summaries(database, generation=2), dead_letters(database, generation=2)) == from_faust
    assert from_faust[0] == expected(events)
    assert len(from_faust[1]) == 5


def fold_with_confluent(database, topics, topic, ends):
    """The reference: the sink under confluent-kafka's consumer."""
    consumer = clients.consumer(topics.settings, "reference")
    sink = Sink(database.url, topic_ids={topic: check_topic(topics.settings, topic, 6)})
    claimed = sink.claim(Partition(topic, partition) for partition in ends)
    consumer.assign([TopicPartition(topic, partition, offset) for (_, partition), offset in claimed.items()])
    try:
        while any(position.offset < ends[position.partition] for position in consumer.position(consumer.assignment())):
            fetch: dict[Partition, list[Record]] = {}
            for message in consumer.consume(500, 0.2):
                assert message.error() is None
                offset, partition = message.offset(), message.partition()
                assert offset is not None
                assert partition is not None
                headers = clients.headers_of(message)
                known = (UnreadableHeader("", None),) if headers is None else tuple(headers)
                record = Record(offset, message.value(), message.key(), known)
                fetch.setdefault(Partition(topic, partition), []).append(record)
            positions = {
                Partition(topic, position.partition): position.offset
                for position in consumer.position(list(consumer.assignment()))
                if position.offset > 0
            }
            sink.write(fetch, positions)
            if all(sink.fences[Partition(topic, partition)] >= end for partition, end in ends.items()):
                break
            if not fetch and all(
                sink.fences[Partition(topic, partition)] >= end - 1 for partition, end in ends.items()
            ):
                break  # librdkafka does not step over a trailing marker until a record follows
    finally:
        consumer.close()
        sink.close()


def dead_letters(database, generation=1):
    return database.execute(
        "SELECT partition, record_offset, record_key, record_value, reason FROM stream_dead_letter"
        " WHERE generation = %s ORDER BY 1, 2",
        [generation],
    )


# poison


def test_poison_never_stops_it_and_never_vanishes(stream, feed, fences, database, processes):
    events = some_events(60)
    wrong_type = events[0].row()._replace(event_type="shop.opened", payload=b"{}")
    poison = [
        b"",
        b"\xde\xad\xbe\xef" * 8,
        b"\0\x4f\xff\xff\xff unknown schema",
        b"\0\0\0\0\x2a of a registry",
        events[0].value_bytes()[:-4],
        schemas.encode(wrong_type),
        events[0].value_bytes(contact_id="nobody"),
        b"x" * 500_000,
        None,
    ]
    worker = stream()
    worker.wait_for("stream.ready")
    for at in range(6):
        feed.send(events[at * 10 : at * 10 + 10])
        feed.send_bytes(*poison, organization_id=uuid.UUID(int=at), headers=[("seq", b"\x00\xff")])
    fences.wait_until_folded()
    assert summaries(database) == expected(events)
    kept = database.execute("SELECT record_value, organization_id, record_headers, reason FROM stream_dead_letter")
    assert len(kept) == 6 * len(poison)
    for at in range(6):
        own = [value for value, organization, _, _ in kept if organization == uuid.UUID(int=at)]
        assert sorted(own, key=str) == sorted(poison, key=str)
    assert all(headers == [["seq", "00ff"]] and reason for _, _, headers, reason in kept)
    assert sum(line["dead_letters"] for line in worker.events("stream.committed")) == len(kept)
    assert worker.returncode is None
    assert json.loads(processes.run("stream", "status", "--format", "json").stdout)["dead_letters"] == len(kept)
    listed = json.loads(processes.run("stream", "dead-letters", "--format", "json").stdout)
    assert {row["reason"] for row in listed} == {reason for _, _, _, reason in kept}


def test_a_header_name_of_any_bytes_is_a_dead_letter_and_odd_headers_are_none(
    stream, feed, fences, topics, topic, database, processes
):
    bad, odd, sent = some_events(8, seed=2), some_events(3, seed=3), some_events(60)
    headers = [("seq", b"\x00\xff"), (BAD_NAME, b"x"), ("n\0", None)]
    many = [(f"h{n}", b"v" * 10) for n in range(20_000)]
    worker = stream()
    worker.wait_for("stream.ready")
    for partition in range(2):
        feed.send(sent[partition * 30 : partition * 30 + 30])
        own = bad[partition * 4 : partition * 4 + 4]
        key = str(own[0].organization_id).encode()
        produce_batch(
            topics.settings,
            topic,
            [
                (key, own[0].value_bytes(), headers),
                (None, odd[partition].value_bytes(), [("seq", None), ("", b"")]),
                (None, own[1].value_bytes(), [(BAD_NAME, None)] * 20_000),
                (None, None, headers),
                (b"\xff", own[2].value_bytes(), headers),
            ],
            partition=partition,
        )
        produce_batch(
            topics.settings, topic, [(key, own[3].value_bytes(), headers)], partition=partition, compression=1
        )
    produce_batch(topics.settings, topic, [(None, odd[2].value_bytes(), many)], partition=5)
    produce_batch(topics.settings, topic, [(None, b"poison", many)], partition=5)
    fences.wait_until_folded()
    assert summaries(database) == expected(sent + odd)
    kept = database.execute(
        "SELECT record_value, record_key, organization_id, record_headers, error_class, reason FROM stream_dead_letter"
        " WHERE partition < 2 OR error_class = 'BadHeaders'"
    )
    assert sorted((value for value, *_ in kept), key=str) == sorted(
        [*(event.value_bytes() for event in bad), None, None], key=str
    )
    assert {(error_class, reason) for *_, error_class, reason in kept} == {
        ("BadHeaders", "the name of a header is not UTF-8")
    }
    [(key, organization, names)] = [row[1:4] for row in kept if row[0] == bad[0].value_bytes()]
    assert (key, organization) == (str(bad[0].organization_id).encode(), bad[0].organization_id)
    assert names == [["seq", "00ff"], [r"\xff\xfe\x80", "78"], ["n\ufffd", None]]
    [(count,)] = database.execute(
        "SELECT jsonb_array_length(record_headers) FROM stream_dead_letter WHERE partition = 5"
    )
    assert count == 20_000
    listed = json.loads(processes.run("stream", "dead-letters", "--format", "json").stdout)
    assert len([row for row in listed if row["error_class"] == "BadHeaders"]) == len(kept)
    # and it goes on from behind them
    feed.send(some_events(20, seed=4))
    assert worker.terminate() == 0
    stream("a").wait_for("stream.ready", count=1)
    fences.wait_until_folded()
    assert summaries(database) == expected([*sent, *odd, *some_events(20, seed=4)])
    assert database.execute("SELECT count(*) FROM stream_dead_letter") == [(len(kept) + 1,)]


# what it refuses


def test_a_topic_that_is_not_there_is_refused(processes, topics):
    refused = processes.run("stream", "run")
    assert refused.returncode == 1
    assert f"topic {topics.event('contact_event.recorded')} does not exist" in refused.stderr
    assert "afluente topics apply" in refused.stderr


def test_another_number_of_partitions_is_refused(processes, topics):
    topics.create(topics.event("contact_event.recorded"), partitions=3)
    refused = processes.run("stream", "run")
    assert refused.returncode == 1
    assert "has 3 partitions, but 6 are declared" in refused.stderr


def test_a_database_that_is_not_migrated_is_refused(processes, topic, empty_database):
    refused = processes.run("stream", "run", env={"DATABASE_URL": empty_database.url})
    assert refused.returncode == 1
    assert "afluente migrate up" in refused.stderr


def test_a_fence_beyond_the_end_ends_it(stream, feed, topics, topic, database):
    feed.send(some_events(10))
    topic_id = check_topic(topics.settings, topic, 6)
    database.execute(
        "INSERT INTO stream_offset (generation, topic, partition, next_offset, topic_id, claimed_by)"
        " SELECT 1, %s, n, 1000, %s, gen_random_uuid() FROM generate_series(0, 5) n",
        [topic, topic_id],
    )
    worker = stream()
    assert worker.wait(60) == 70
    assert "but was folded up to 1000" in worker.log
    assert summaries(database) == {}


def test_a_topic_made_anew_ends_it(stream, feed, topic, database):
    database.execute(
        "INSERT INTO stream_offset (generation, topic, partition, next_offset, topic_id, claimed_by)"
        " SELECT 1, %s, n, 0, 'another', gen_random_uuid() FROM generate_series(0, 5) n",
        [topic],
    )
    worker = stream()
    assert worker.wait(60) == 70
    assert "was deleted and created anew" in worker.log


def test_records_that_retention_took_are_reported_and_passed(stream, feed, fences, topics, topic, database):
    organization = uuid.uuid4()
    lost = [replace(event, organization_id=organization) for event in some_events(10)]
    kept = [replace(event, organization_id=organization) for event in some_events(10, seed=2)]
    feed.send(lost)
    end = fences.ends()
    feed.send(kept)
    partition = next(partition for partition, offset in end.items() if offset)
    deleted = clients.admin(topics.settings)
    for future in deleted.delete_records([TopicPartition(topic, partition, end[partition])]).values():
        future.result(30)
    worker = stream()
    gap = worker.wait_for("stream.gap", partition=partition)
    assert (gap["offset"], gap["count"]) == (0, end[partition])
    fences.wait_until_folded()
    assert summaries(database) == expected(kept)


# how it ends


def test_sigterm_stops_it_while_postgres_holds_it(stream, feed, fences, database):
    worker = stream()
    worker.wait_for("stream.ready")
    locker = database.connect(role=None)
    locker.execute("LOCK TABLE stream_offset")
    feed.send(some_events(20))
    blocked_until(database)
    worker.signal(signal.SIGTERM)
    worker.wait_for("process.stopping")
    assert worker.wait(8) == 0, "the statement is cancelled, the deadline not needed"
    locker.rollback()
    assert summaries(database) == {}


def test_the_deadline_of_sigterm_holds_with_a_hanging_event_loop():
    script = """
import asyncio, time
from streams import service
loop = asyncio.new_event_loop()
with service.stop_on_signals(loop, within_s=0.5):
    loop.call_soon(lambda: (print("hanging", flush=True), time.sleep(120)))
    loop.run_forever()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"hanging\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_work_without_progress_ends_it(stream, feed, database):
    worker = stream("a", "--patience", "2")
    worker.wait_for("stream.ready")
    locker = database.connect(role=None)
    locker.execute("LOCK TABLE stream_offset")
    feed.send(some_events(20))
    assert worker.wait(30) == 71
    assert worker.events("stream.stuck")[0]["waiting"] > 0
    locker.rollback()


def test_idling_is_not_being_stuck(stream, feed, fences):
    feed.send(some_events(20))
    worker = stream("a", "--patience", "1")
    worker.wait_for("stream.ready")
    fences.wait_until_folded()
    # Longer than the patience: the transactional producer of another topic takes its time meanwhile.
    with pytest.raises(AssertionError, match="are over without"):
        worker.wait_for("stream.stuck", timeout=4)
    assert worker.returncode is None


def blocked_until(database):
    """Until a session of the stream application waits for a lock."""
    with database.connect(role=None, autocommit=True) as conn:
        conn.execute(
            """
            DO $$
            BEGIN
                FOR n IN 1 .. 600 LOOP
                    EXIT WHEN EXISTS (
                        SELECT FROM pg_locks l JOIN pg_stat_activity a USING (pid)
                        WHERE NOT l.granted AND a.datname = current_database()
                            AND a.application_name LIKE 'afluente-stream%');
                    PERFORM pg_sleep(0.05);
                    PERFORM pg_stat_clear_snapshot();
                END LOOP;
            END $$
            """
        )
