"""`afluente tail`: what it shows of the topics, and what it leaves alone."""

import json
import uuid
from datetime import UTC, datetime

import schemas
from afluente import kafka as clients


def _produce(topics, topic, *values):
    producer = clients.producer(topics.settings)
    for value in values:
        producer.produce(topic, value, b"k", partition=0)
    assert producer.flush(10) == 0


def _event(event_type, payload, organization=None):
    organization, content = organization or uuid.uuid4(), json.dumps(payload).encode()
    row = schemas.Row(1, uuid.uuid4(), organization, event_type, "order", None, content, b"{}", datetime.now(UTC))
    return row, schemas.encode(row)


def test_events_are_shown_decoded_and_filtered_by_type(topics, processes):
    topics.create_families()
    _, other_value = _event("shop.opened", {})
    wanted, wanted_value = _event("order.packed", {"boxes": 2})
    topic = topics.event("order.packed")
    _produce(topics, topic, other_value, wanted_value)

    ran = processes.run("tail", "--from-start", "--type", "order.packed", "--limit", "1", "--format", "json")

    assert ran.returncode == 0, ran.stderr
    (line,) = ran.stdout.splitlines()
    shown = json.loads(line)
    assert (shown["event_id"], shown["payload"], shown["topic"]) == (str(wanted.id), {"boxes": 2}, topic)


def test_only_of_one_organization_by_its_name(topics, processes, database):
    topics.create_families()
    topic = topics.event("order.packed")
    _, strange = _event("order.packed", {})
    wanted, value = _event("order.packed", {"boxes": 2}, database.organization("Loja Azul"))
    _produce(topics, topic, strange, value)
    tail = ("tail", "--from-start", "--limit", "1", "--format", "json", "--org")

    for word in ("Loja Azul", str(wanted.organization_id)):
        assert json.loads(processes.run(*tail, word).stdout)["event_id"] == str(wanted.id)
    assert processes.run(*tail, "Nobody").returncode == 3


def test_bytes_that_are_no_event_are_shown_with_their_place(topics, processes):
    topics.create_families()
    topic = topics.event("order.packed")
    _produce(topics, topic, b"\x07nonsense")

    ran = processes.run("tail", "--topic", topic, "--from-start", "--limit", "1", "--format", "json")

    shown = json.loads(ran.stdout)
    assert (shown["topic"], shown["partition"], shown["offset"]) == (topic, 0, 0)
    assert shown["error"]


def test_a_topic_that_is_not_there_is_refused_with_a_hint(topics, processes):
    ran = processes.run("tail", "--topic", topics.prefix + "nowhere", "--limit", "1")

    assert ran.returncode == 1
    assert "nowhere" in ran.stderr
    assert "afluente topics list" in ran.stderr
