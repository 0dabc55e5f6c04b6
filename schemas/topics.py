"""Every topic there is: names, partitions, retention, settings. Retry and dead-letter names come from here only.

What must stay true: all event families and all of a worker's topics have one partition count, so that an organization
has the same partition number everywhere; every topic but the positions has a finite retention (erasure relies on it);
the timestamp of a record is when the broker appended it, because retention by the fact's own time would expire a
backlog on arrival; what an event topic takes, the topics of its workers take with their headers on it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal
from uuid import UUID

from schemas import published
from schemas.partitioner import partition_for

Environment = Literal["local", "test", "production"]

RETRY_DELAYS_S = (30, 60, 120, 300, 600, 1800, 3600, 7200)

# The part of an event type before the dot, with `_` as `-`; `custom` takes what is not in the catalogue.
FAMILIES = (
    "lead",
    "lead-activity",
    "contact",
    "message",
    "conversation",
    "ai",
    "nuvemshop",
    "lgpd",
    "system",
    "webhook",
    "kb",
    "campaign",
    "contact-event",
    "custom",
)

# Organization id -> k: its records are spread over k partitions by entity (schemas.partitioner). Changes only by the
# drain plan: drain the topics, change this on every producer, resume; otherwise one entity's events overtake each
# other.
SPREAD: Mapping[str, int] = {}

POSITIONS_PARTITIONS = 64  # one for each lane the relay can have; part of the positions' format, not a tuning knob

EVENT_MAX_BYTES = 1_048_588  # Kafka's own default, declared so that another default of a broker's does not change it
LETTER_MAX_BYTES = 2 * 1024 * 1024  # for the same record with our headers, perhaps compressed less well

_DAY_MS = 24 * 60 * 60 * 1000


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """What a topic must be. ``config`` holds only what we set; everything else is the broker's default."""

    name: str
    partitions: int
    replication: int
    config: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Sizes:
    partitions: int
    replication: int
    min_insync_replicas: int
    events_days: int
    retry_days: int
    dead_letter_days: int


_ENVIRONMENTS: dict[Environment, _Sizes] = {
    "local": _Sizes(6, 1, 1, events_days=7, retry_days=7, dead_letter_days=30),
    "test": _Sizes(6, 1, 1, events_days=7, retry_days=7, dead_letter_days=30),
    # 24: room for 24 members of a worker's group; divides evenly by 2, 3, 4, 6, 8 and 12 of them.
    "production": _Sizes(24, 3, 2, events_days=30, retry_days=7, dead_letter_days=30),
}


class Topics:
    """Topic names under a prefix (tests and shared clusters have one; '' otherwise)."""

    __slots__ = ("_by_type", "prefix")

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix
        self._by_type: dict[str, str] = {}

    def event(self, event_type: str) -> str:
        """The topic of an event type; types outside the catalogue have one in common."""
        topic = self._by_type.get(event_type)
        if topic is None:
            topic = self.family(family_of(event_type))
            if event_type in published.event_types():
                # Only catalogued types are remembered: custom ones are the tenants' words, without end.
                self._by_type[event_type] = topic
        return topic

    def family(self, family: str) -> str:
        if family not in FAMILIES:
            raise ValueError(f"no event family {family!r}; there are {', '.join(FAMILIES)}")
        return f"{self.prefix}events.{family}"

    def families(self) -> list[str]:
        """The event topics, all of them."""
        return [self.family(family) for family in FAMILIES]

    def retry(self, worker: str, delay: int | Literal["now"]) -> str:
        """Where a delivery waits ``delay`` seconds; ``"now"`` for what is due, reprocessed or replayed."""
        if delay == "now":
            return f"{self.prefix}{worker}.retry.now"
        if delay not in RETRY_DELAYS_S:
            raise ValueError(f"no retry topic for {delay} s; there are {RETRY_DELAYS_S}")
        return f"{self.prefix}{worker}.retry.{delay}s"

    def retries(self, worker: str) -> list[str]:
        """All retry topics of a worker, shortest delay first."""
        return [self.retry(worker, "now"), *(self.retry(worker, delay) for delay in RETRY_DELAYS_S)]

    def dead_letter(self, worker: str) -> str:
        return f"{self.prefix}{worker}.dead-letter"

    @property
    def positions(self) -> str:
        return f"{self.prefix}relay.positions"

    @property
    def relay_dead_letter(self) -> str:
        return f"{self.prefix}relay.dead-letter"


def family_of(event_type: str) -> str:
    """The family of an event type: `custom` for everything the catalogue does not know."""
    if event_type not in published.event_types():
        return "custom"
    return event_type.split(".", 1)[0].replace("_", "-")


def partition_of(organization_id: UUID | str, partitions: int, entity_id: UUID | str | None = None) -> int:
    """The partition of an organization's record, the spread of a hot organization included."""
    key = str(organization_id)
    return partition_for(key.encode(), partitions, entity_id, SPREAD.get(key, 1))


def declared(environment: Environment, workers: Iterable[str], prefix: str = "") -> list[TopicSpec]:
    """Every topic that must exist in an environment, for these workers, in a stable order."""
    if environment not in _ENVIRONMENTS:
        raise ValueError(f"no environment {environment!r}; there are {', '.join(_ENVIRONMENTS)}")
    sizes = _ENVIRONMENTS[environment]
    topics = Topics(prefix)

    def spec(name: str, *, partitions: int = sizes.partitions, **config: str) -> TopicSpec:
        settings = {
            "message.timestamp.type": "LogAppendTime",
            "min.insync.replicas": str(sizes.min_insync_replicas),
            "unclean.leader.election.enable": "false",
            **{name.replace("_", "."): value for name, value in config.items()},
        }
        return TopicSpec(name, partitions, sizes.replication, dict(sorted(settings.items())))

    def kept(name: str, days: int, max_bytes: int = LETTER_MAX_BYTES) -> TopicSpec:
        return spec(name, cleanup_policy="delete", retention_ms=str(days * _DAY_MS), max_message_bytes=str(max_bytes))

    specs = [kept(name, sizes.events_days, EVENT_MAX_BYTES) for name in topics.families()]
    for worker in sorted(set(workers)):
        # Twice the longest delay and a long week-end's outage; what waits longer waits in Postgres.
        specs += [kept(name, sizes.retry_days) for name in topics.retries(worker)]
        specs.append(kept(topics.dead_letter(worker), sizes.dead_letter_days))
    specs.append(kept(topics.relay_dead_letter, sizes.dead_letter_days))
    # Small segments: the relay reads its partition from the start, and only closed segments are compacted.
    specs.append(
        spec(
            topics.positions,
            partitions=POSITIONS_PARTITIONS,
            cleanup_policy="compact",
            segment_bytes=str(16 * 1024 * 1024),
            min_cleanable_dirty_ratio="0.1",
        )
    )
    return specs
