"""The reconciliation against states that were built by hand: one that adds up, and each way in which one does not.

Rows, records, offsets and deliveries are put there directly, so that these tests need neither relay nor runtime nor
stream application, and a mistake of theirs cannot hide one here.
"""

import json
from datetime import UTC, datetime
from decimal import Decimal
from uuid import uuid4

import orjson
import pytest
from confluent_kafka import TopicPartition

import schemas
from afluente import kafka, postgres
from afluente.verify import reconcile
from schemas import Row
from tests.fixtures.raw_records import BAD_NAME, produce_batch

WORKER = "webhook-dispatch-worker"
PARTITIONS = 2
LEAD = {"name": "Ana", "source": "site", "pipeline_id": str(uuid4()), "stage_id": str(uuid4())}


class World:
    """A database and topics, and the few hands that put things into them."""

    def __init__(self, database, topics, worker=WORKER):
        self.database = database
        self.topics = topics
        self.worker = worker
        self.organization = database.organization("A")
        self.records = {}
        topics.create(
            *(topics.event("lead.created"), topics.event("contact_event.recorded"), topics.relay_dead_letter),
            *(topics.dead_letter(worker), topics.retry(worker, 30)),
            partitions=PARTITIONS,
        )
        self.producer = kafka.producer(topics.settings)

    def emit(self, event_type="lead.created", payload=None, metadata=None):
        with postgres.connect(self.database.url) as conn, postgres.act_for_sync(conn, self.organization):
            conn.execute(
                "SELECT emit_event(%s, 'lead', %s, %s, %s)",
                (event_type, uuid4(), json.dumps(payload or LEAD), json.dumps(metadata or {})),
            )
        return self.rows()[-1]

    def rows(self):
        columns = (
            "seq, id, organization_id, event_type, entity_kind, entity_id, payload::text, metadata::text, created_at"
        )
        return [
            Row._make((*row[:6], row[6].encode(), row[7].encode(), row[8]))
            for row in self.database.execute(f"SELECT {columns} FROM event_log ORDER BY seq")
        ]

    def publish(self, row, headers=None, partition=None):
        """One record for a row, as the relay makes it. Returns (topic, partition, offset)."""
        return self.produce(
            self.topics.event(row.event_type),
            str(row.organization_id),
            schemas.encode(row),
            schemas.headers(row) if headers is None else headers,
            partition,
        )

    def produce(self, topic, key, value, headers, partition=None):
        places = []

        def report(error, message):
            assert error is None, error
            places.append((message.topic(), message.partition(), message.offset()))

        target = {} if partition is None else {"partition": partition}
        self.producer.produce(topic, key=key, value=value, headers=headers, on_delivery=report, **target)
        assert self.producer.flush(30) == 0
        return places[0]

    def takes(self, *event_types):
        for event_type in event_types:
            self.database.execute("INSERT INTO worker_event_types VALUES (%s, %s)", (self.worker, event_type))

    def deliver(self, row, state="done", target="", **columns):
        columns = {
            "event_created_at": row.created_at,
            "worker": self.worker,
            "event_id": row.id,
            "target": target,
            "organization_id": row.organization_id,
            "event_type": row.event_type,
            "key": "k",
            "state": state,
            "finished_at": datetime.now(UTC) if state in ("done", "skipped", "dead", "discarded") else None,
            "next_attempt_at": datetime.now(UTC) if state == "waiting" else None,
            **columns,
        }
        names, places = ", ".join(columns), ", ".join(f"%({name})s" for name in columns)
        self.database.execute(f"INSERT INTO event_delivery ({names}) VALUES ({places})", columns)

    def commit(self, *places, worker=None):
        """The group of the worker is past these places."""
        client = kafka.consumer(self.topics.settings, worker or self.worker)
        client.commit(offsets=[TopicPartition(t, p, o + 1) for t, p, o in places], asynchronous=False)
        client.close()

    def contact(self):
        return self.database.execute(
            "INSERT INTO contacts (organization_id, source) VALUES (%s, 'test') RETURNING id", (self.organization,)
        )[0][0]

    def record_fact(self, contact, metric="Order Paid", value=None, currency=None, occurred_at=None):
        with postgres.connect(self.database.url) as conn, postgres.act_for_sync(conn, self.organization):
            row = conn.execute(
                "SELECT record_contact_event(contact_id => %s, metric_name => %s, source => 'shopify', value => %s,"
                " currency => %s, occurred_at => %s, external_event_id => %s)",
                (contact, metric, value, currency, occurred_at, f"order_paid:{uuid4()}"),
            ).fetchone()
        assert row is not None
        return row[0]

    def summarise(self, contact, metric, count, first, last, totals=()):
        key = (1, self.organization, contact, metric)
        self.database.execute(
            "INSERT INTO contact_metrics_summary (generation, organization_id, contact_id, metric_name, event_count,"
            " first_event_at, last_event_at) VALUES (%s, %s, %s, %s, %s, %s, %s)",
            (*key, count, first, last),
        )
        for currency, total, n in totals:
            self.database.execute(
                "INSERT INTO contact_metrics_summary_currency (generation, organization_id, contact_id, metric_name,"
                " currency, total_value, value_count) VALUES (%s, %s, %s, %s, %s, %s, %s)",
                (*key, currency, total, n),
            )

    def fence(self, place):
        topic, partition, offset = place
        self.database.execute(
            "INSERT INTO stream_offset (generation, topic, topic_id, partition, next_offset, claimed_by)"
            " VALUES (1, %s, 'id', %s, %s, %s)"
            " ON CONFLICT (generation, topic, partition) DO UPDATE SET next_offset = EXCLUDED.next_offset",
            (topic, partition, offset + 1, uuid4()),
        )

    def reconcile(self, **options):
        options = {"wait_s": 0, **options}
        return reconcile(self.topics.settings, self.database.url, now=datetime.now(UTC), **options)

    def findings(self, **options):
        return [(finding.kind, finding.id) for finding in self.reconcile(**options).findings]


@pytest.fixture
def world(database, topics):
    return World(database, topics)


@pytest.fixture
def healthy(world):
    """Everything once: published, delivered, dead with its letter, to come, produced directly, refused by the relay,
    summed up."""
    world.takes("*")
    rows = {name: world.emit() for name in ("done", "dead", "ahead", "parked", "waiting")}
    places = {name: world.publish(row) for name, row in rows.items() if name != "ahead"}
    refused = world.emit()
    world.produce(
        world.topics.relay_dead_letter,
        str(world.organization),
        orjson.dumps({"reason": "too large"}),
        [("x-event-id", str(refused.id).encode()), ("x-seq", str(refused.seq).encode())],
    )
    direct = rows["done"]._replace(seq=0, id=uuid4())
    places["direct"] = world.publish(direct)
    world.deliver(direct)
    world.deliver(rows["done"], target="one")
    world.deliver(rows["done"], "skipped", target="two")
    world.deliver(rows["dead"], "dead", target="one", last_error="refused")
    world.letter = world.produce(
        world.topics.dead_letter(WORKER), "k", b"x", delivery_headers(rows["dead"], "one", generation=0, attempt=8)
    )
    topic, partition, offset = places["parked"]
    database_row = (WORKER, topic, partition, world.organization, offset)
    world.database.execute(
        "INSERT INTO worker_parked (worker, topic, partition, organization_id, from_offset, process)"
        " VALUES (%s, %s, %s, %s, %s, gen_random_uuid())",
        database_row,
    )
    world.deliver(rows["waiting"], "waiting", target="one", attempts=1)
    world.produce(world.topics.retry(WORKER, 30), "k", b"x", delivery_headers(rows["waiting"], "one", 0, 2))
    world.commit(*latest(places.values()))
    # After what is committed: not delivered yet.
    places["ahead"] = world.publish(rows["ahead"])

    contact = world.contact()
    first, last = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)
    world.record_fact(contact, value=Decimal("10.50"), occurred_at=last)
    world.record_fact(contact, value=Decimal("0.50"), currency="BRL", occurred_at=first)
    world.record_fact(contact, value=Decimal("3"), currency="USD", occurred_at=first)
    world.record_fact(contact, "Message Read", occurred_at=first)
    facts = [row for row in world.rows() if row.event_type == "contact_event.recorded"]
    for row in facts:
        place = world.publish(row)
        world.fence(place)
    world.record_fact(contact, occurred_at=datetime(2026, 2, 1, tzinfo=UTC))
    beyond = world.rows()[-1]
    world.publish(beyond)
    world.summarise(contact, "Order Paid", 3, first, last, [("BRL", Decimal("11.000"), 2), ("USD", Decimal(3), 1)])
    world.summarise(contact, "Message Read", 1, first, first)
    # The family's partition that nothing of the organization is in: committing there passes over nothing else.
    world.empty_partition = 1 - places["done"][1]
    world.rows_by_name, world.places, world.contact_id, world.facts = rows, places, contact, facts
    return world


def delivery_headers(row, target, generation, attempt):
    return [
        ("x-event-id", str(row.id).encode()),
        ("x-target", target.encode()),
        ("x-generation", str(generation).encode()),
        ("x-attempt", str(attempt).encode()),
    ]


def latest(places):
    """The furthest place of each partition."""
    furthest: dict[tuple[str, int], int] = {}
    for topic, partition, offset in places:
        furthest[topic, partition] = max(offset, furthest.get((topic, partition), -1))
    return [(*place, offset) for place, offset in furthest.items()]


def test_a_state_that_adds_up_has_no_findings_and_its_figures(healthy):
    report = healthy.reconcile()
    assert report.findings == []
    published, deliveries, summaries = report.checks
    assert published.figures == {
        "rows": 11,
        "records": 10,
        "relay_dead_letters": 1,
        "directly_produced": 1,
        "expired": 0,
        "causes_followed": 0,
    }
    assert deliveries.subject == WORKER
    # 5 leads, 1 direct, 5 contact events; rows: done, direct, dead, waiting.
    assert {name: deliveries.figures[name] for name in ("published", "with_rows", "without_rows", "rows")} == {
        "published": 11,
        "with_rows": 4,
        "without_rows": 7,
        "rows": 5,
    }
    assert {name: deliveries.figures[name] for name in ("done", "skipped", "dead", "waiting")} == {
        "done": 2,
        "skipped": 1,
        "dead": 1,
        "waiting": 1,
    }
    assert summaries.figures == {"summaries": 2, "counted": 4, "recounted": 4, "stream_dead_letters": 0}


def test_a_deleted_delivery_is_named(healthy):
    row = healthy.rows_by_name["done"]
    healthy.database.execute("DELETE FROM event_delivery WHERE event_id = %s", (row.id,))
    assert healthy.findings() == [("event_without_delivery", str(row.id))]


def test_a_record_whose_row_was_deleted_is_named(healthy):
    row = healthy.rows_by_name["done"]
    healthy.database.execute(
        "SELECT set_config('afluente.rewrite', 'erasure', false); DELETE FROM event_log WHERE seq = " + str(row.seq)
    )
    assert healthy.findings(checks=["published"]) == [("record_without_row", str(row.id))]


def test_a_row_that_was_never_published_is_named(healthy):
    row = healthy.emit()
    assert healthy.findings() == [("never_published", str(row.id))]


def test_a_deleted_record_is_named(healthy):
    """The broker itself deletes the first record of a partition: its retention has not passed, so it is missing."""
    topic, partition, offset = healthy.places["done"]
    first = next(row for row in healthy.rows_by_name.values() if row.seq == healthy.rows_by_name["done"].seq)
    admin = kafka.admin(healthy.topics.settings)
    for future in admin.delete_records([TopicPartition(topic, partition, offset + 1)]).values():
        future.result(30)
    assert healthy.findings(checks=["published"]) == [("never_published", str(first.id))]


def test_a_deleted_summary_row_is_named(healthy):
    healthy.database.execute("DELETE FROM contact_metrics_summary WHERE metric_name = 'Message Read'")
    assert healthy.findings() == [
        ("summary_differs", f"{healthy.organization}/{healthy.contact_id}/Message Read"),
    ]


def test_a_summary_that_is_off_by_the_least_is_named(healthy):
    summary = "UPDATE contact_metrics_summary SET {} WHERE metric_name = 'Order Paid'"
    in_reais = "UPDATE contact_metrics_summary_currency SET {} WHERE currency = 'BRL'"
    for change, back in (
        (summary.format("event_count = event_count + 1"), summary.format("event_count = event_count - 1")),
        (
            summary.format("first_event_at = first_event_at - interval '1 microsecond'"),
            summary.format("first_event_at = first_event_at + interval '1 microsecond'"),
        ),
        (
            summary.format("last_event_at = last_event_at + interval '1 microsecond'"),
            summary.format("last_event_at = last_event_at - interval '1 microsecond'"),
        ),
        (in_reais.format("total_value = total_value + 0.01"), in_reais.format("total_value = total_value - 0.01")),
        (in_reais.format("value_count = value_count + 1"), in_reais.format("value_count = value_count - 1")),
        ("DELETE FROM contact_metrics_summary_currency WHERE currency = 'USD'", None),
    ):
        healthy.database.execute(change)
        assert healthy.findings(checks=["summaries"]) == [
            ("summary_differs", f"{healthy.organization}/{healthy.contact_id}/Order Paid"),
        ], change
        if back is not None:
            healthy.database.execute(back)


def test_a_summary_that_nothing_accounts_for_is_named(healthy):
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    healthy.summarise(healthy.contact_id, "Invented", 1, moment, moment)
    assert healthy.findings(checks=["summaries"]) == [
        ("summary_differs", f"{healthy.organization}/{healthy.contact_id}/Invented"),
    ]


def test_a_contact_event_that_could_not_be_folded_is_not_expected_in_the_summaries(healthy):
    row = next(row for row in healthy.facts if b"Message Read" in row.payload)
    topic, partition, offset = next(
        (record.topic(), record.partition(), record.offset())
        for record in healthy.topics.records(healthy.topics.event("contact_event.recorded"))
        if dict(record.headers())["ce_id"].decode() == str(row.id)
    )
    healthy.database.execute(
        "INSERT INTO stream_dead_letter (generation, topic, partition, record_offset, error_class, reason)"
        " VALUES (1, %s, %s, %s, 'X', 'x')",
        (topic, partition, offset),
    )
    healthy.database.execute("DELETE FROM contact_metrics_summary WHERE metric_name = 'Message Read'")
    assert healthy.findings(checks=["summaries"]) == []


def test_a_duplicate_record_is_named(healthy):
    row = healthy.rows_by_name["dead"]
    healthy.publish(row)
    assert healthy.findings() == [("published_twice", str(row.id))]


def test_a_record_that_differs_from_its_row_is_named(healthy):
    row = healthy.emit()
    healthy.publish(row, headers=schemas.headers(row._replace(id=uuid4())))
    assert ("record_differs_from_row", str(row.id)) in healthy.findings(checks=["published"])


def test_an_event_before_its_cause_is_named_and_one_after_it_is_not(world):
    cause = world.emit()
    effect = world.emit(metadata={"causation_id": str(cause.id)})
    world.publish(cause, partition=0)
    world.publish(effect, partition=0)
    report = world.reconcile()
    assert report.findings == []
    assert report.checks[0].figures["causes_followed"] == 1

    late_cause = world.emit()
    early = world.emit(metadata={"causation_id": str(late_cause.id)})
    world.publish(early, partition=1)
    world.publish(late_cause, partition=1)
    assert world.findings() == [("before_its_cause", str(early.id))]


def test_seq_order_may_differ(world):
    first, second = world.emit(), world.emit()
    world.publish(second, partition=0)
    world.publish(first, partition=0)
    assert world.findings() == []


def test_what_an_aborted_transaction_wrote_is_not_there(world):
    row = world.emit()
    producer = kafka.producer(world.topics.settings, transactional_id=f"{world.topics.prefix}t")
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(
        world.topics.event(row.event_type),
        key=str(row.organization_id),
        value=schemas.encode(row),
        headers=dict(schemas.headers(row)),
    )
    producer.flush(30)
    producer.abort_transaction(30)
    assert world.findings() == [("never_published", str(row.id))]
    world.publish(row)
    assert world.findings() == []


def test_patience_waits_for_a_row_that_is_on_its_way(world):
    row = world.emit()
    producer = kafka.producer(world.topics.settings, transactional_id=f"{world.topics.prefix}t")
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(
        world.topics.event(row.event_type),
        key=str(row.organization_id),
        value=schemas.encode(row),
        headers=dict(schemas.headers(row)),
    )
    producer.flush(30)
    from threading import Timer

    commit = Timer(1.0, producer.commit_transaction)
    commit.start()
    assert world.findings(wait_s=20) == []
    commit.join()


def test_a_dead_delivery_without_its_letter_is_named(healthy):
    row = healthy.rows_by_name["done"]
    healthy.deliver(row, "dead", target="three")
    assert healthy.findings() == [("dead_without_letter", str(row.id))]


def test_a_letter_of_another_generation_or_target_is_not_the_one(healthy):
    row = healthy.rows_by_name["done"]
    healthy.deliver(row, "dead", target="three", generation=1)
    for headers in (delivery_headers(row, "three", 0, 8), delivery_headers(row, "one", 1, 8)):
        healthy.produce(healthy.topics.dead_letter(WORKER), "k", b"x", headers)
    assert healthy.findings() == [("dead_without_letter", str(row.id))]
    healthy.produce(healthy.topics.dead_letter(WORKER), "k", b"x", delivery_headers(row, "three", 1, 8))
    assert healthy.findings() == []


def test_a_letter_of_no_delivery_is_named(healthy):
    stray = uuid4()
    row = healthy.rows_by_name["done"]._replace(id=stray)
    healthy.produce(healthy.topics.dead_letter(WORKER), "k", b"x", delivery_headers(row, "one", 0, 8))
    assert healthy.findings() == [("letter_without_delivery", str(stray))]


def test_an_unfinished_delivery_that_nothing_brings_back_is_named(healthy):
    row = healthy.rows_by_name["done"]
    healthy.deliver(row, "waiting", target="three")
    healthy.deliver(row, "claimed", target="four")
    assert healthy.findings() == [("delivery_stranded", str(row.id))] * 2
    healthy.database.execute("UPDATE event_delivery SET kept_value = 'x' WHERE state = 'waiting'")
    assert healthy.findings() == [("delivery_stranded", str(row.id))]


def test_a_parked_event_is_to_come_until_the_mark_is_past_it(healthy):
    row = healthy.rows_by_name["parked"]
    healthy.database.execute("UPDATE worker_parked SET from_offset = from_offset + 1")
    assert healthy.findings() == [("event_without_delivery", str(row.id))]


@pytest.mark.parametrize("is_stated", [True, False])
def test_bytes_that_no_worker_could_read_are_accounted_for_by_their_place(healthy, is_stated):
    row = healthy.rows_by_name["done"]._replace(id=uuid4(), seq=0)
    headers = schemas.headers(row) if is_stated else []
    place = healthy.produce(
        healthy.topics.event("lead.created"), "x\x00", b"\xff\xff", headers, healthy.empty_partition
    )
    assert healthy.findings() == []
    healthy.commit(place)
    assert healthy.findings() == [
        ("event_without_delivery", str(row.id))
        if is_stated
        else ("record_unaccounted_for", "{}[{}]@{}".format(*place)),
    ]
    healthy.database.execute(
        "INSERT INTO undecodable_record (worker, topic, partition, record_offset, record_timestamp, error_class, error,"
        " size_bytes) VALUES (%s, %s, %s, %s, now(), 'X', 'x', 2)",
        (WORKER, *place),
    )
    assert healthy.findings() == []


def test_a_record_without_headers_is_known_by_its_bytes(healthy):
    row = healthy.rows_by_name["done"]._replace(id=uuid4(), seq=0)
    place = healthy.publish(row, headers=[], partition=healthy.empty_partition)
    healthy.commit(place)
    assert healthy.findings() == [("event_without_delivery", str(row.id))]
    healthy.deliver(row)
    assert healthy.findings() == []


def test_random_bytes_on_every_topic_do_not_stop_it(healthy):
    topics = healthy.topics
    for topic in (
        topics.event("lead.created"),
        topics.retry(WORKER, 30),
        topics.dead_letter(WORKER),
        topics.relay_dead_letter,
    ):
        healthy.produce(
            topic,
            b"\xff\x00",
            b"\x00\xff\xfe",
            [("seq", b"99999999999999999999"), ("ce_time", b"\xff"), ("x-generation", b"a")],
        )
    assert healthy.findings() == []


def test_headers_nobody_can_read_do_not_stop_it(healthy):
    topics = healthy.topics
    row = healthy.rows_by_name["done"]._replace(id=uuid4(), seq=0)
    place = topics.event("lead.created"), healthy.empty_partition, 0
    records = [(b"k", value, [*schemas.headers(row), (BAD_NAME, b"v")]) for value in (schemas.encode(row), b"x")]
    for topic in (
        topics.retry(WORKER, 30),
        topics.dead_letter(WORKER),
        topics.relay_dead_letter,
    ):
        produce_batch(topics.settings, topic, records * 20)
    produce_batch(topics.settings, place[0], records[:1], partition=place[1])
    assert healthy.findings() == []
    # the event's own bytes still say which it is, until the worker has buried them
    healthy.commit(place)
    assert healthy.findings() == [("event_without_delivery", str(row.id))]
    healthy.database.execute(
        "INSERT INTO undecodable_record (worker, topic, partition, record_offset, record_timestamp, error_class, error,"
        " size_bytes) VALUES (%s, %s, %s, %s, now(), 'BadHeaders', 'x', 2)",
        (WORKER, *place),
    )
    assert healthy.findings() == []


def test_a_worker_sees_only_its_own_types(world):
    world.takes("lead.won")
    row = world.emit()
    world.commit(world.publish(row))
    report = world.reconcile()
    assert report.findings == []
    assert report.checks[1].figures["published"] == 0


@pytest.mark.parametrize("event_type", ["webhook.received"])
def test_the_webhook_family_is_not_expected_of_a_worker_that_takes_all(world, event_type):
    world.takes("*")
    world.topics.create(world.topics.event(event_type), partitions=PARTITIONS)
    row = world.emit(event_type, {"webhook_event_id": str(uuid4()), "source": "shopify", "topic": "x"})
    world.commit(world.publish(row))
    assert world.findings() == []


def test_the_command_exits_3_and_names_the_id(healthy, processes):
    done = processes.run("verify", "--wait", "0")
    assert done.returncode == 0, done.stderr
    assert "everything adds up" in done.stderr
    row = healthy.rows_by_name["done"]
    healthy.database.execute("DELETE FROM event_delivery WHERE event_id = %s", (row.id,))
    found = processes.run("verify", "--wait", "0", "--format", "json")
    assert found.returncode == 3
    report = json.loads(found.stdout)
    assert report["ok"] is False
    (check,) = [check for check in report["checks"] if not check["ok"]]
    assert (check["name"], check["subject"]) == ("deliveries", WORKER)
    assert check["findings"][0]["id"] == str(row.id)
    text = processes.run("verify", "--wait", "0")
    assert text.returncode == 3
    assert str(row.id) in text.stdout


def test_the_command_refuses_an_unknown_check(processes):
    assert processes.run("verify", "--only", "nothing").returncode == 2
