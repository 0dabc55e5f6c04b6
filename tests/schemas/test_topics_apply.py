"""`afluente topics` against the real broker."""

import json
from dataclasses import replace

import pytest
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, NewPartitions, ResourceType

from afluente import kafka as clients
from afluente.kafka import topics_apply
from afluente.kafka.topics_apply import Kind
from schemas.topics import declared
from tests.fixtures.topics import PARTITIONS

WORKER = "webhook-dispatch-worker"


@pytest.fixture
def admin(kafka):
    return clients.admin(kafka.settings)


@pytest.fixture
def specs(topics):
    """The topics of one family and of one worker are enough here: 64 partitions of positions cost seconds."""
    wanted = {topics.event("lead.created"), topics.retry(WORKER, 30), topics.dead_letter(WORKER)}
    return [spec for spec in declared("test", [WORKER], topics.prefix) if spec.name in wanted]


@pytest.fixture
def created(topics, admin, specs):
    topics_apply.apply(admin, specs, topics_apply.plan(admin, specs, nobodys))
    topics._created += [spec.name for spec in specs]
    return specs


def nobodys(name):
    return False


def set_on(admin, topic, name, value):
    entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(30)
    seen = None
    while seen != value:  # the broker learns of it a moment after the controller; the test's time limit bounds this
        described = admin.describe_configs([ConfigResource(ResourceType.TOPIC, topic)])
        seen = next(iter(described.values())).result(30)[name].value


def test_missing_topics_are_planned_created_and_then_as_declared(admin, topics, specs):
    planned = topics_apply.plan(admin, specs, nobodys)
    assert [(d.topic, d.kind) for d in planned] == [(spec.name, Kind.missing) for spec in specs]
    assert topics_apply.plan(admin, specs, nobodys) == planned, "a plan does nothing"
    outcome = topics_apply.apply(admin, specs, planned)
    topics._created += [spec.name for spec in specs]
    assert all(d.applied for d in outcome)
    assert topics_apply.plan(admin, specs, nobodys) == []


def test_applying_an_old_plan_again_does_no_harm(admin, created):
    stale = [topics_apply.Difference(spec.name, Kind.missing, "", "", None) for spec in created]
    assert all(d.applied for d in topics_apply.apply(admin, created, stale))
    assert topics_apply.plan(admin, created, nobodys) == []


def test_changed_and_foreign_settings_are_found_and_put_right(admin, created):
    name = created[0].name
    set_on(admin, name, "retention.ms", "1000")
    set_on(admin, name, "segment.bytes", "1048576")
    planned = topics_apply.plan(admin, created, nobodys)
    assert [(d.setting, d.declared, d.found) for d in planned] == [
        ("retention.ms", created[0].config["retention.ms"], "1000"),
        ("segment.bytes", None, "1048576"),
    ]
    assert all(d.applied for d in topics_apply.apply(admin, created, planned))
    assert topics_apply.plan(admin, created, nobodys) == []


def test_other_partition_count_is_named_and_left_alone(admin, created):
    admin.create_partitions([NewPartitions(created[0].name, PARTITIONS + 1)])[created[0].name].result(30)
    while len(admin.list_topics(timeout=30).topics[created[0].name].partitions) == PARTITIONS:
        pass
    shrunk_and_grown = [created[0], replace(created[1], partitions=PARTITIONS + 2)]
    planned = topics_apply.plan(admin, shrunk_and_grown, nobodys)
    assert [(d.kind, d.declared, d.found) for d in planned] == [
        (Kind.partitions, "6", "7"),
        (Kind.partitions, "8", "6"),
    ]
    outcome = topics_apply.apply(admin, shrunk_and_grown, planned)
    assert not any(d.applied for d in outcome)
    assert all("drain plan" in d.note for d in outcome)
    found = admin.list_topics(timeout=30).topics
    assert [len(found[spec.name].partitions) for spec in created[:2]] == [7, 6]


def test_replication_is_named_and_left_alone(admin, created):
    planned = topics_apply.plan(admin, [replace(created[0], replication=3)], nobodys)
    assert [(d.kind, d.declared, d.found) for d in planned] == [(Kind.replication, "3", "1")]
    assert not topics_apply.apply(admin, created, planned)[0].applied


def test_topic_that_cannot_be_made_says_why_and_the_others_are_made(admin, topics, specs):
    impossible = [replace(specs[0], replication=3), *specs[1:]]
    outcome = topics_apply.apply(admin, impossible, topics_apply.plan(admin, impossible, nobodys))
    topics._created += [spec.name for spec in specs[1:]]
    assert [d.applied for d in outcome] == [False, True, True]
    assert "eplication factor" in outcome[0].note


def test_topic_that_nobody_declares_is_shown_and_kept(admin, topics, created):
    topics.create(f"{topics.prefix}old-worker.dead-letter")
    planned = topics_apply.plan(admin, created, lambda name: name.startswith(topics.prefix))
    assert [(d.topic, d.kind, d.is_change) for d in planned] == [
        (f"{topics.prefix}old-worker.dead-letter", Kind.undeclared, False)
    ]
    topics_apply.apply(admin, created, planned)
    assert f"{topics.prefix}old-worker.dead-letter" in admin.list_topics(timeout=30).topics


def test_records_of_each_partition_are_counted(kafka, admin, topics, created):
    producer = clients.producer(kafka.settings)
    for _ in range(3):
        producer.produce(created[0].name, b"x", key=b"42")
    assert producer.flush(30) == 0
    assert topics_apply.record_counts(admin, created[0].name) == {0: 0, 1: 0, 2: 0, 3: 0, 4: 3, 5: 0}


def test_commands_plan_apply_and_plan_again(processes, topics):
    planned = processes.run("topics", "plan", "--worker", WORKER, "--format", "json")
    assert planned.returncode == 3, planned.stderr
    missing = json.loads(planned.stdout)
    assert {d["kind"] for d in missing} == {"missing"}
    names = [spec.name for spec in declared("test", [WORKER], topics.prefix)]
    assert [d["topic"] for d in missing] == names

    dry = processes.run("topics", "apply", "--worker", WORKER, "--dry-run", "--format", "json")
    assert dry.returncode == 0
    assert not any(d["applied"] for d in json.loads(dry.stdout))

    applied = processes.run("topics", "apply", "--worker", WORKER, "--format", "json")
    topics._created += names
    assert applied.returncode == 0, applied.stderr
    assert all(d["applied"] for d in json.loads(applied.stdout))

    again = processes.run("topics", "plan", "--worker", WORKER, "--format", "json")
    assert again.returncode == 0, again.stdout + again.stderr
    assert json.loads(again.stdout) == []

    set_on(topics._admin, topics.event("lead.created"), "retention.ms", "5")
    asked = processes.run("topics", "apply", "--worker", WORKER)
    assert asked.returncode == 2
    assert "--yes" in asked.stderr
    told = processes.run("topics", "apply", "--worker", WORKER, "--yes")
    assert told.returncode == 0, told.stderr

    shown = processes.run("topics", "show", "events.lead", "--format", "json")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["records"] == {str(n): 0 for n in range(PARTITIONS)}


def test_commands_name_what_is_unknown(processes):
    assert processes.run("topics", "show", "events.nothing").returncode == 3
    wrong = processes.run("topics", "plan", "--worker", "nobody-worker")
    assert wrong.returncode == 2
    assert "webhook-dispatch-worker" in wrong.stderr


def test_list_needs_no_cluster(processes):
    listed = processes.run("topics", "list", "--format", "csv", env={"KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:1"})
    assert listed.returncode == 0, listed.stderr
    assert "events.contact-event,6,1,7 d,delete" in listed.stdout
