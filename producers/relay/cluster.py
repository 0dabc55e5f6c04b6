"""What the relay asks the Kafka cluster: who it is, what its topics take, whether all is decided, and the position.

What must stay true: the position is what stands at the end of the lane's partition, and the end is the high watermark
asked read_uncommitted. Asked read_committed it would be the last stable offset: another producer's open transaction
would hide the newest position, and a relay that believed it would publish twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import ConfigResource, OffsetSpec, ResourceType

from afluente import kafka
from afluente.errors import Refused, Unavailable
from afluente.kafka.reading import LEADER_MOVED
from afluente.settings import KafkaSettings
from producers.relay.errors import UndecidedError
from producers.relay.position import KafkaIdentity, Position
from schemas.topics import Topics

REQUEST_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 60.0
# The broker ends a dead producer's transaction after its timeout (10 s), looking every 10 s; 5 more, and never.
UNDECIDED_AFTER_S = 25.0
UNDECIDED_POLL_S = 0.02
LOOK_BACK = (500, 20_000)  # records before the end to search for the position; then all that compaction left

Heartbeat = Callable[[], None]


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """Identity, and for each topic how many bytes a record batch may have and how many partitions there are."""

    identity: KafkaIdentity
    limits: Mapping[str, int]
    partitions: Mapping[str, int]


class Cluster:
    """An admin client and a consumer for the positions. KafkaException or TimeoutError: the broker is away."""

    def __init__(self, settings: KafkaSettings, topics: Topics) -> None:
        self._topics = topics
        self._names = [*topics.families(), topics.relay_dead_letter, topics.positions]
        self._admin = kafka.admin(settings, socket_timeout_ms=int(REQUEST_TIMEOUT_S * 1000))
        self._settings = settings
        self._consumer = self._open_consumer("read_committed")

    def close(self) -> None:
        self._consumer.close()

    def facts(self) -> ClusterFacts:
        """Raises Refused when a topic is missing, or the positions are not kept for ever."""
        described = self._admin.describe_cluster(request_timeout=REQUEST_TIMEOUT_S).result(REQUEST_TIMEOUT_S)
        topic_ids, partitions = {}, {}
        for name, future in self._admin.describe_topics(
            TopicCollection(self._names), request_timeout=REQUEST_TIMEOUT_S
        ).items():
            description = self._found(name, future)
            topic_ids[name] = str(description.topic_id)
            partitions[name] = len(description.partitions)
        limits = {}
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in self._names]
        for resource, future in self._admin.describe_configs(resources, request_timeout=REQUEST_TIMEOUT_S).items():
            config = self._found(resource.name, future)
            limits[resource.name] = int(config["max.message.bytes"].value)
            if resource.name == self._topics.positions and config["cleanup.policy"].value != "compact":
                raise Refused(
                    f"{resource.name} has cleanup.policy={config['cleanup.policy'].value}: the position would be "
                    "deleted after a while, and everything published again",
                    hint="afluente topics apply",
                )
        return ClusterFacts(
            KafkaIdentity(str(described.cluster_id), dict(sorted(topic_ids.items()))), limits, partitions
        )

    def require_decided(self, partitions: Mapping[str, int], heartbeat: Heartbeat) -> None:
        """Return once every transaction begun before now is committed or aborted.

        A broker that crashes between a commit and its markers can leave records undecided for ever: raises
        UndecidedError with the places after 25 s. Normally one round trip.
        """
        places = [TopicPartition(topic, number) for topic in self._names for number in range(partitions[topic])]
        ends = self._ends(places, IsolationLevel.READ_UNCOMMITTED)
        deadline = time.monotonic() + UNDECIDED_AFTER_S
        open_places = {(place.topic, place.partition) for place in places}
        while open_places:
            stable = self._ends(
                [TopicPartition(*place) for place in sorted(open_places)], IsolationLevel.READ_COMMITTED
            )
            open_places = {place for place in open_places if stable[place] < ends[place]}
            if open_places and time.monotonic() > deadline:
                raise UndecidedError([(*place, stable[place]) for place in sorted(open_places)])
            heartbeat()
            if open_places:
                time.sleep(UNDECIDED_POLL_S)

    def has_open_transactions(self, partitions: Mapping[str, int]) -> bool:
        """Is there a transaction in any partition, at this moment? One that ends just now may still count."""
        places = [TopicPartition(topic, number) for topic in self._names for number in range(partitions[topic])]
        stable = self._ends(places, IsolationLevel.READ_COMMITTED)
        ends = self._ends(places, IsolationLevel.READ_UNCOMMITTED)
        return any(stable[place] < ends[place] for place in stable)

    def read_position(self, lane: int, key: str, heartbeat: Heartbeat) -> Position | None:
        """The lane's newest committed position; None when there is none at all. Raises Unavailable after 60 s without
        the end: what was read up to then may be old, and is not used."""
        return self._read(self._consumer, lane, key, heartbeat)

    def peek_position(self, lane: int, key: str, heartbeat: Heartbeat) -> Position | None:
        """The newest position whether or not its transaction is ended: tells whose the lane is, not where it stands.
        Never waits for a transaction."""
        return self._peek(lane, key, heartbeat)

    def peek_layout(self, heartbeat: Heartbeat) -> Position | None:
        """The newest position of lane 0 in whichever layout, as above: every layout has a lane 0."""
        return self._peek(0, None, heartbeat)

    def _peek(self, lane: int, key: str | None, heartbeat: Heartbeat) -> Position | None:
        consumer = self._open_consumer("read_uncommitted")
        try:
            return self._read(consumer, lane, key, heartbeat)
        finally:
            consumer.close()

    def _open_consumer(self, isolation: str) -> Consumer:
        return kafka.consumer(
            self._settings,
            "relay-positions",
            isolation_level=isolation,
            enable_partition_eof=True,
            fetch_wait_max_ms=10,
            reconnect_backoff_max_ms=500,
        )

    def _read(self, consumer: Consumer, lane: int, key: str | None, heartbeat: Heartbeat) -> Position | None:
        place = TopicPartition(self._topics.positions, lane)
        (high,) = self._ends([place], IsolationLevel.READ_UNCOMMITTED).values()
        (low,) = self._ends([place], IsolationLevel.READ_UNCOMMITTED, OffsetSpec.earliest()).values()  # type: ignore[no-untyped-call]
        starts = dict.fromkeys(max(low, high - back) for back in (*LOOK_BACK, high))
        for start in starts if high > low else ():
            place.offset = start
            wanted = None if key is None else key.encode()
            if (value := _last_value(consumer, place, high, wanted, heartbeat)) is not None:
                return Position.parse(value)
        return None

    def _ends(
        self, places: list[TopicPartition], isolation: IsolationLevel, spec: OffsetSpec | None = None
    ) -> dict[tuple[str, int], int]:
        asked = dict.fromkeys(places, spec or OffsetSpec.latest())  # type: ignore[no-untyped-call]
        deadline = time.monotonic() + REQUEST_TIMEOUT_S
        while True:
            futures = self._admin.list_offsets(asked, isolation_level=isolation, request_timeout=REQUEST_TIMEOUT_S)
            try:
                return {
                    (place.topic, place.partition): future.result(REQUEST_TIMEOUT_S).offset
                    for place, future in futures.items()
                }
            except KafkaException as error:
                # A leader that has just moved, or a topic that has just been made: the next metadata know it.
                if error.args[0].code() not in LEADER_MOVED or time.monotonic() > deadline:
                    raise
            time.sleep(UNDECIDED_POLL_S)

    def _found(self, name: str, future: Future[Any]) -> Any:
        try:
            return future.result(REQUEST_TIMEOUT_S)
        except KafkaException as error:
            if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise Refused(f"topic {name} does not exist", hint="afluente topics apply") from error
            raise


def _last_value(
    consumer: Consumer, start: TopicPartition, high: int, key: bytes | None, heartbeat: Heartbeat
) -> bytes | None:
    """The value of the last record with `key` (None: with any) from `start` up to the offset `high`."""
    found: bytes | None = None
    deadline = time.monotonic() + READ_TIMEOUT_S
    consumer.assign([start])
    try:
        while True:
            record = consumer.poll(0.2)
            heartbeat()
            if record is None:
                if time.monotonic() > deadline:
                    raise Unavailable(
                        f"{start.topic}[{start.partition}] cannot be read to its end ({high}): "
                        "a transaction in it is open"
                    )
                continue
            if (error := record.error()) is None:
                if key is None or record.key() == key:
                    found = record.value()
            elif error.code() == KafkaError._PARTITION_EOF:
                # The end of what is committed. Not yet ours while a transaction below `high` is open: then it comes
                # again, further on. Control records have offsets too, so no record need have `high` - 1.
                if (record.offset() or 0) >= high:
                    return found
            elif not error.retriable():
                raise KafkaException(error)
    finally:
        consumer.unassign()
