"""Makes a cluster have the topics that ``schemas.topics`` declares.

What must stay true: nothing is ever deleted, and no partition count changes here. A key's partition follows from the
count, so another count would put an organization's newer events beside its older ones; that needs the drain plan (stop
the emitters' relay, let every group finish, re-create, resume). Settings somebody put on a topic beside the
declaration are taken off again, except those that a reassignment puts there while it runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ConfigSource,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from schemas.topics import TopicSpec

REQUEST_TIMEOUT_S = 30.0
METADATA_TIMEOUT_S = 10.0  # the first question to a cluster: one that does not answer it is away

DRAIN_PLAN = "changes only by the drain plan: stop the relay, let every group finish, re-create the topics, resume"
REASSIGN = "a replication factor changes by kafka-reassign-partitions"

# Set and removed by kafka-reassign-partitions while it runs.
_THROTTLES = {"leader.replication.throttled.replicas", "follower.replication.throttled.replicas"}


class Kind(StrEnum):
    missing = "missing"
    setting = "setting"
    partitions = "partitions"
    replication = "replication"
    undeclared = "undeclared"


@dataclass(frozen=True)
class Difference:
    """One thing in which a topic differs from its declaration.

    ``applied``: whether it has been mended. ``note``: why it will not be, or why mending failed; empty when it can be.
    """

    topic: str
    kind: Kind
    setting: str
    declared: str | None
    found: str | None
    applied: bool = False
    note: str = ""

    @property
    def can_be_applied(self) -> bool:
        return self.kind in (Kind.missing, Kind.setting)

    @property
    def is_change(self) -> bool:
        """Topics that nobody declares are shown, and are no reason to act."""
        return self.kind is not Kind.undeclared


def plan(admin: AdminClient, specs: Sequence[TopicSpec], is_ours: Callable[[str], bool]) -> list[Difference]:
    """What differs, in the order of the declaration; last come topics that look like ours and that nobody declares.

    Raises KafkaException when the cluster does not answer.
    """
    found = admin.list_topics(timeout=METADATA_TIMEOUT_S).topics
    existing = [spec for spec in specs if spec.name in found]
    settings = _settings(admin, [spec.name for spec in existing])
    differences: list[Difference] = []
    for spec in specs:
        topic = found.get(spec.name)
        if topic is None:
            shape = f"{spec.partitions} partitions, {spec.replication} replicas"
            differences.append(Difference(spec.name, Kind.missing, "", shape, None))
            continue
        differences += _shape(spec, len(topic.partitions), {len(p.replicas) for p in topic.partitions.values()})
        differences += _setting_differences(spec, settings[spec.name])
    declared = {spec.name for spec in specs}
    differences += [
        Difference(name, Kind.undeclared, "", None, None, note="left alone: nothing is deleted here")
        for name in sorted(found)
        if name not in declared and is_ours(name)
    ]
    return differences


def apply(admin: AdminClient, specs: Sequence[TopicSpec], differences: Sequence[Difference]) -> list[Difference]:
    """Carry out what a plan says and may be carried out; returns the plan with what became of each part.

    Doing it again, or two at once, does no harm: a topic that somebody else made in the meantime counts as made.
    """
    by_name = {spec.name: spec for spec in specs}
    missing = [d.topic for d in differences if d.kind is Kind.missing]
    failed = _create(admin, [by_name[name] for name in missing])
    changed = sorted({d.topic for d in differences if d.kind is Kind.setting})
    failed |= _alter(admin, changed, [d for d in differences if d.kind is Kind.setting])
    done = {(d.topic, d.setting) for d in differences if d.can_be_applied and d.topic not in failed}
    _wait_until_seen(admin, [by_name[topic] for topic in sorted({topic for topic, _ in done})], done)
    return [
        d if not d.can_be_applied else replace(d, applied=d.topic not in failed, note=failed.get(d.topic, ""))
        for d in differences
    ]


def _shape(spec: TopicSpec, partitions: int, replicas: set[int]) -> list[Difference]:
    differences = []
    if partitions != spec.partitions:
        differences.append(
            Difference(spec.name, Kind.partitions, "", str(spec.partitions), str(partitions), note=DRAIN_PLAN)
        )
    if replicas != {spec.replication}:
        found = ",".join(map(str, sorted(replicas)))
        differences.append(Difference(spec.name, Kind.replication, "", str(spec.replication), found, note=REASSIGN))
    return differences


def _setting_differences(spec: TopicSpec, found: dict[str, ConfigEntry]) -> list[Difference]:
    differences = []
    for name, value in spec.config.items():
        entry = found.get(name)
        # What the broker's own default happens to be may change with the broker: ours is set on the topic.
        if entry is None or entry.value != value or not _is_set_on_topic(entry):
            held = None if entry is None else entry.value if _is_set_on_topic(entry) else f"{entry.value} (default)"
            differences.append(Difference(spec.name, Kind.setting, name, value, held))
    for name, entry in sorted(found.items()):
        if name not in spec.config and _is_set_on_topic(entry) and name not in _THROTTLES:
            differences.append(Difference(spec.name, Kind.setting, name, None, entry.value))
    return differences


def _is_set_on_topic(entry: ConfigEntry) -> bool:
    # The client hands out plain numbers here, whatever its types say.
    number = entry.source if isinstance(entry.source, int) else entry.source.value
    return bool(number == ConfigSource.DYNAMIC_TOPIC_CONFIG.value)


def _settings(admin: AdminClient, names: Sequence[str]) -> dict[str, dict[str, ConfigEntry]]:
    if not names:
        return {}
    futures = admin.describe_configs(
        [ConfigResource(ResourceType.TOPIC, name) for name in names], request_timeout=REQUEST_TIMEOUT_S
    )
    return {resource.name: future.result(REQUEST_TIMEOUT_S) for resource, future in futures.items()}


def _create(admin: AdminClient, specs: Sequence[TopicSpec]) -> dict[str, str]:
    if not specs:
        return {}
    futures = admin.create_topics(
        [
            NewTopic(s.name, num_partitions=s.partitions, replication_factor=s.replication, config=s.config)
            for s in specs
        ],
        operation_timeout=REQUEST_TIMEOUT_S,
        request_timeout=REQUEST_TIMEOUT_S,
    )
    return {name: text for name, (code, text) in _failures(futures).items() if code != KafkaError.TOPIC_ALREADY_EXISTS}


def _wait_until_seen(admin: AdminClient, specs: Sequence[TopicSpec], done: set[tuple[str, str]]) -> None:
    """The controller says yes before the brokers know: wait, so that whoever comes next finds what was done."""
    deadline = time.monotonic() + REQUEST_TIMEOUT_S
    while time.monotonic() < deadline:
        left = {(d.topic, d.setting) for d in plan(admin, specs, lambda _: False)}
        topics = admin.list_topics(timeout=REQUEST_TIMEOUT_S).topics
        led = all(p.leader >= 0 for name, _ in done if name in topics for p in topics[name].partitions.values())
        if led and not left & done:
            return
        time.sleep(0.05)


def _alter(admin: AdminClient, topics: Sequence[str], differences: Sequence[Difference]) -> dict[str, str]:
    if not topics:
        return {}
    resources = [
        ConfigResource(
            ResourceType.TOPIC,
            topic,
            incremental_configs=[
                ConfigEntry(
                    d.setting,
                    d.declared,
                    incremental_operation=AlterConfigOpType.DELETE if d.declared is None else AlterConfigOpType.SET,
                )
                for d in differences
                if d.topic == topic
            ],
        )
        for topic in topics
    ]
    futures = admin.incremental_alter_configs(resources, request_timeout=REQUEST_TIMEOUT_S)
    return {name: text for name, (_, text) in _failures({r.name: future for r, future in futures.items()}).items()}


def _failures(futures: dict[str, Future[Any]]) -> dict[str, tuple[int, str]]:
    failures = {}
    for name, future in futures.items():
        try:
            future.result(2 * REQUEST_TIMEOUT_S)
        except KafkaException as error:
            failures[name] = (error.args[0].code(), error.args[0].str())
    return failures


def record_counts(admin: AdminClient, topic: str) -> dict[int, int]:
    """Offsets between the first and the next record of each partition: records, and the marks of transactions."""
    partitions = admin.list_topics(topic, timeout=METADATA_TIMEOUT_S).topics[topic].partitions
    earliest, latest = OffsetSpec.earliest(), OffsetSpec.latest()  # type: ignore[no-untyped-call]
    first, following = (_offsets(admin, topic, partitions, spec) for spec in (earliest, latest))
    return {partition: following[partition] - first[partition] for partition in sorted(partitions)}


def _offsets(admin: AdminClient, topic: str, partitions: Iterable[int], spec: OffsetSpec) -> dict[int, int]:
    """One offset of each partition. A broker names the leader of a new partition a moment before it is one."""
    deadline = time.monotonic() + REQUEST_TIMEOUT_S
    while True:
        futures = admin.list_offsets(
            {TopicPartition(topic, partition): spec for partition in partitions}, request_timeout=REQUEST_TIMEOUT_S
        )
        try:
            return {tp.partition: future.result(REQUEST_TIMEOUT_S).offset for tp, future in futures.items()}
        except KafkaException as error:
            if error.args[0].code() != KafkaError.NOT_LEADER_FOR_PARTITION or time.monotonic() > deadline:
                raise
        time.sleep(0.1)
