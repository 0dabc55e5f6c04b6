"""Replays and workers: who takes a replayed event, what of it is over already, and the record that brings the rest.

A worker gets a replayed event through its `retry.now`, as a source record that names its replay (`x-replay-id`): what
it has done it skips, what it has not it does, for all targets. With `x-again` what is done or dead is done once more.

What must stay true: a topic of ours is written to by its owner only, so a replay goes to a worker's `retry.now` or to
a topic that is none of ours; and what strangers wrote in the headers of an event is not passed on as ours, which the
worker would believe.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date
from typing import Any
from uuid import UUID

import orjson
from confluent_kafka.admin import ConfigResource, ResourceType
from psycopg import Connection

import sql
from afluente import kafka
from afluente.errors import Refused
from afluente.settings import KafkaSettings
from consumers.errors import UnknownWorker
from consumers.runtime.records import (
    AGAIN,
    EVENT_ID,
    ORIGIN_OFFSET,
    ORIGIN_PARTITION,
    ORIGIN_TIMESTAMP,
    ORIGIN_TOPIC,
    OURS,
    REPLAY_ID,
    WORKER,
)
from consumers.workers import REGISTRY, load
from producers.relay.replay.run import Addressed, Outgoing
from producers.relay.replay.sources import Found, Headers
from schemas.topics import FAMILIES, Topics

REQUEST_TIMEOUT_S = 10.0

_OURS = re.compile(
    rf"(.*\.)?(events\.({'|'.join(FAMILIES)})"
    r"|[a-z0-9-]+-worker\.(retry\..+|dead-letter|parked)"
    r"|relay\.(positions|dead-letter))"
    r"|__.*"
)
_QUERIES = sql.queries("replay")

OVER = ("done", "skipped")
LEFT_TO_PEOPLE = ("dead", "needs_review", "discarded")
OPEN = ("claimed", "waiting", "blocked")


@dataclass(frozen=True, slots=True)
class Target:
    """Where events go. `worker`: whose `topic` it is, and `event_types` what it takes; None: somebody else's topic."""

    name: str
    topic: str
    worker: bool = False
    event_types: frozenset[str] = frozenset()

    def takes(self, event_type: str) -> bool:
        if not self.worker or event_type in self.event_types:
            return True
        return "*" in self.event_types and not event_type.startswith("webhook.")


@dataclass(slots=True)
class Counts:
    """Deliveries of one event type to one target. An event that the worker has never seen counts as one to do."""

    done: int = 0
    """done or skipped"""
    dead: int = 0
    """dead, discarded, or for a person to look at: `afluente dlq` is for those; with --again the dead ones run too"""
    open: int = 0
    """In somebody's hands or waiting: they will be done without a replay too."""
    to_do: int = 0
    """What the replay makes the worker do."""

    def add(self, other: Counts) -> None:
        self.done += other.done
        self.dead += other.dead
        self.open += other.open
        self.to_do += other.to_do


@dataclass(slots=True)
class Plan:
    """What a replay would do, counted by event type and target."""

    events: int = 0
    counts: dict[tuple[str, str], Counts] = field(default_factory=dict)
    organizations: set[UUID] = field(default_factory=set)
    untaken: int = 0
    """Events that no target takes."""
    unknown_months: set[date] = field(default_factory=set)
    """Months of these events whose deliveries are not all known any more."""

    @property
    def total(self) -> Counts:
        total = Counts()
        for counts in self.counts.values():
            total.add(counts)
        return total


def find_targets(conn: Connection[Any], settings: KafkaSettings, to: str) -> list[Target]:
    """WORKER, `all`, or a topic of somebody else's. Refused for one of ours, or one that is not there."""
    topics, registered = Topics(settings.topic_prefix), dict(conn.execute(_QUERIES["expected"]).fetchall())
    if to == "all":
        if not registered:
            raise Refused("no worker has ever run here, so none takes anything", hint="name the worker: --to WORKER")
        targets = [Target(w, topics.retry(w, "now"), True, frozenset(types)) for w, types in registered.items()]
    elif to in registered:
        targets = [Target(to, topics.retry(to, "now"), True, frozenset(registered[to]))]
    elif to in REGISTRY:
        targets = [Target(to, topics.retry(to, "now"), True, load(to).event_types)]
    elif to.endswith("-worker"):
        raise UnknownWorker(to, sorted({*registered, *REGISTRY}))
    else:
        targets = [Target(to, foreign_topic(to, settings.topic_prefix))]
    there = kafka.admin(settings).list_topics(timeout=REQUEST_TIMEOUT_S).topics
    if missing := [target.topic for target in targets if target.topic not in there]:
        hint = (
            "afluente topics apply --worker WORKER" if targets[0].worker else "a worker, all, or a topic's whole name"
        )
        raise Refused(f"topic {missing[0][:250]} does not exist", hint=hint)
    return targets


def foreign_topic(topic: str, prefix: str) -> str:
    """`topic` if it is none of ours, of this installation or another; Refused if it is. No I/O."""
    for name in (topic, topic.removeprefix(prefix)):
        if _OURS.fullmatch(name):
            raise Refused(
                f"{topic[:250]} is one of our own topics: only its owner writes to it, and its readers would take the "
                "replayed events for new ones",
                hint="--to WORKER reaches one worker, --to all every worker that takes the type",
            )
    return topic


def limits_of(settings: KafkaSettings, targets: Sequence[Target]) -> dict[str, int]:
    """max.message.bytes of each target's topic."""
    resources = [ConfigResource(ResourceType.TOPIC, target.topic) for target in targets]
    client = kafka.admin(settings)  # gone with its name, and the answers with it
    described = client.describe_configs(resources, request_timeout=REQUEST_TIMEOUT_S)
    return {
        resource.name: int(future.result(REQUEST_TIMEOUT_S)["max.message.bytes"].value)
        for resource, future in described.items()
    }


class Addressing:
    """What becomes of pages of events: counted (`count`), or addressed (`records`) for `producers.relay.replay.run`.

    `again`: what is done or dead is to do.
    """

    def __init__(self, conn: Connection[Any], targets: Sequence[Target], *, again: bool) -> None:
        self._conn, self._targets, self._again = conn, targets, again
        self._months: set[date] | None = None

    def count(self, events: Sequence[Found], plan: Plan) -> None:
        """Add what these events are to the plan."""
        states = self._states(events)
        plan.events += len(events)
        for event in events:
            plan.organizations.add(event.organization_id)
            taken = False
            for target in self._targets:
                if target.takes(event.event_type):
                    taken = True
                    counts = plan.counts.setdefault((event.event_type, target.name), Counts())
                    counts.add(self._counts(states.get((target.name, event.event_id)), target))
            plan.untaken += not taken
            if taken and self._targets[0].worker and not self._is_known(event):
                plan.unknown_months.add(_month(event))

    def records(self, events: Sequence[Found], replay_id: UUID, number: int) -> Addressed:
        """The records that bring what is to do, in the order of the events."""
        states = self._states(events)
        records: list[Outgoing] = []
        skipped = 0
        for event in events:
            for target in self._targets:
                if not target.takes(event.event_type):
                    continue
                found = states.get((target.name, event.event_id))
                counts = self._counts(found, target)
                # Open ones are sent too: what should bring them back may be what was lost.
                if counts.to_do or counts.open:
                    records.append(record_for(event, target, replay_id, number if self._again else 0))
                else:
                    skipped += sum(found.values()) if found else 0
        return Addressed(records, skipped)

    def _counts(self, states: Mapping[str, int] | None, target: Target) -> Counts:
        if not states:
            return Counts(to_do=1)
        counts = Counts(
            done=sum(states.get(state, 0) for state in OVER),
            dead=sum(states.get(state, 0) for state in LEFT_TO_PEOPLE),
            open=sum(states.get(state, 0) for state in OPEN),
        )
        if self._again:
            # Of an event that had no target the worker is asked again; it may have some now.
            skipped = 0 if len(states) > 1 else states.get("skipped", 0)
            counts.to_do = states.get("done", 0) + states.get("dead", 0) + skipped
        return counts

    def _states(self, events: Sequence[Found]) -> dict[tuple[str, UUID], Counter[str]]:
        workers = [target.name for target in self._targets if target.worker]
        if not events or not workers:
            return {}
        items = orjson.dumps([{"event_created_at": e.created_at, "event_id": e.event_id} for e in events]).decode()
        states: dict[tuple[str, UUID], Counter[str]] = {}
        for worker, event_id, state, count in self._conn.execute(
            _QUERIES["deliveries"], {"items": items, "workers": workers}
        ):
            states.setdefault((worker, event_id), Counter())[state] += count
        return states

    def _is_known(self, event: Found) -> bool:
        if self._months is None:
            self._months = {month for (month,) in self._conn.execute(_QUERIES["known_months"])}
        return _month(event) in self._months


def record_for(event: Found, target: Target, replay_id: UUID, again: int) -> Outgoing:
    """The event's record, marked for the target. `again`: the replay's number, or 0. No I/O."""
    headers: Headers = [(name, value) for name, value in event.headers if name not in OURS and name != REPLAY_ID]
    headers.append((REPLAY_ID, str(replay_id).encode()))
    if target.worker:
        headers += [(EVENT_ID, str(event.event_id).encode()), (WORKER, target.name.encode())]
        if event.origin is not None:
            names = (ORIGIN_TOPIC, ORIGIN_PARTITION, ORIGIN_OFFSET, ORIGIN_TIMESTAMP)
            headers += [(name, str(value).encode()) for name, value in zip(names, event.origin, strict=True)]
        if again:
            headers.append((AGAIN, str(again).encode()))
    return Outgoing(target.topic, event.key, event.value, headers)


def _month(event: Found) -> date:
    return event.created_at.astimezone(UTC).date().replace(day=1)
