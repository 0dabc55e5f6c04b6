"""What the topics hold: an id for each record the relay has published, and how far back they reach.

Read committed, and to the high watermark: asked read_committed the end would be the last stable offset, and another
producer's open transaction would hide what is ours behind it. A record is the relay's when it carries a `seq`; services
that produce events themselves have none.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import NamedTuple
from uuid import UUID

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import ConfigResource, ResourceType

from afluente import kafka
from afluente.errors import Unavailable
from afluente.settings import KafkaSettings
from producers.relay.cluster import REQUEST_TIMEOUT_S, Heartbeat
from schemas.topics import SPREAD, Topics, partition_of

STALL_S = 60.0
BATCH = 2_000
# Records are stamped by the broker's clock and rows by Postgres's: so far apart may they be.
CLOCKS_APART = timedelta(minutes=1)
READ_BACK = timedelta(hours=1)  # before `since`, for the same reason and for windows published in several chunks
LONGEST_TYPE = 100
HIGHEST_SEQ = 2**63 - 1

Place = tuple[str, int]  # topic, partition


class Found(NamedTuple):
    """One record of the relay's. `at`: when its row was written (ce_time), else when the record was appended."""

    id: UUID
    seq: int
    organization_id: UUID | None
    event_type: str | None
    topic: str
    partition: int
    offset: int
    at: datetime


class Border(NamedTuple):
    """Rows written up to `until` whose seq is under `below` may have expired.

    Both are of the first record left. What went before it was appended earlier, and written earlier still; and it had
    a lower seq, but for rows of transactions that overlapped. So an unpublished row beside the only record that a quiet
    partition still holds is not taken for expired.
    """

    until: datetime
    below: int


class Content:
    """The event topics and the relay's dead letters, as they are when `read` is called. One use."""

    def __init__(
        self,
        settings: KafkaSettings,
        topics: Topics,
        partitions: Mapping[str, int],
        *,
        since: datetime | None = None,
        newest: int | None = None,
    ) -> None:
        """`since`: only what was appended after about that moment. `newest`: only so many offsets of each partition."""
        self._settings, self._topics, self._partitions = settings, topics, partitions
        self._since, self._newest = since, newest
        self.names = [*topics.families(), topics.relay_dead_letter]
        self._oldest: dict[Place, Border | None] = {}  # of partitions that have lost records: by the first one left
        self._retentions: dict[str, timedelta] = {}
        self.total = 0  # offsets to read, control records included
        self.passed = 0

    def read(self, heartbeat: Heartbeat) -> Iterator[Found]:
        """Every record of ours, partition by partition in order. Unavailable when nothing comes for 60 s."""
        starts, ends = self._bounds()
        unread = {place for place in ends if starts[place] < ends[place]}
        self.total = sum(ends[place] - starts[place] for place in unread)
        consumer = self._consumer("read_committed")
        try:
            consumer.assign([TopicPartition(*place, starts[place]) for place in sorted(unread)])
            deadline = time.monotonic() + STALL_S
            while unread:
                records = consumer.consume(BATCH, 0.5)
                heartbeat()
                if records:
                    deadline = time.monotonic() + STALL_S
                elif time.monotonic() > deadline:
                    raise Unavailable(
                        f"{len(unread)} partitions cannot be read to their ends, {min(unread)} among them"
                    )
                for record in records:
                    place = (str(record.topic()), int(record.partition() or 0))
                    if (error := record.error()) is not None:
                        # Control records have offsets too, so no record need have the last one.
                        if error.code() == KafkaError._PARTITION_EOF:
                            if (record.offset() or 0) >= ends[place]:
                                unread.discard(place)
                        elif not error.retriable():
                            raise KafkaException(error)
                        continue
                    offset = int(record.offset() or 0)
                    if offset < ends[place]:
                        self.passed += 1
                        if (found := _found(record, place, offset)) is not None:
                            if place in self._oldest and self._oldest[place] is None:
                                self._oldest[place] = Border(_appended_at(record) + CLOCKS_APART, found.seq)
                            yield found
                    if offset >= ends[place] - 1:
                        unread.discard(place)
        finally:
            consumer.close()

    def border(self, organization_id: UUID, event_type: str) -> Border | None:
        """Which rows of this kind may have been on their topic though they are not now, because their records would
        have expired. None: nothing of their partition has. To be asked after `read`."""
        topic = self._topics.event(event_type)
        count = self._partitions[topic]
        if str(organization_id) in SPREAD:
            places = [(topic, partition) for partition in range(count)]
        else:
            places = [(topic, partition_of(organization_id, count))]
        borders = [self._border(place) for place in places if place in self._oldest]
        if not borders:
            return None
        return Border(max(border.until for border in borders), max(border.below for border in borders))

    def _border(self, place: Place) -> Border:
        if (border := self._oldest[place]) is not None:
            return border
        # None is left. What was appended within the retention cannot have gone by age.
        return Border(datetime.now(UTC) - self._retention(place[0]), HIGHEST_SEQ)

    def _retention(self, topic: str) -> timedelta:
        if topic not in self._retentions:
            resource = ConfigResource(ResourceType.TOPIC, topic)
            admin = kafka.admin(self._settings)  # has to live until the answer is there
            answers = admin.describe_configs([resource], request_timeout=REQUEST_TIMEOUT_S)
            milliseconds = int(answers[resource].result(REQUEST_TIMEOUT_S)["retention.ms"].value)
            # -1: for ever; then the beginning was deleted by hand, and any of it may have been there.
            self._retentions[topic] = timedelta(milliseconds=milliseconds) if milliseconds >= 0 else timedelta(0)
        return self._retentions[topic]

    def _bounds(self) -> tuple[dict[Place, int], dict[Place, int]]:
        """Where reading begins and ends. Notes which partitions have lost their beginning."""
        starts: dict[Place, int] = {}
        ends: dict[Place, int] = {}
        consumer = self._consumer("read_uncommitted")
        try:
            for topic in self.names:
                for partition in range(self._partitions[topic]):
                    place = (topic, partition)
                    low, high = consumer.get_watermark_offsets(TopicPartition(*place), REQUEST_TIMEOUT_S)
                    starts[place] = low if self._newest is None else max(low, high - self._newest)
                    ends[place] = high
                    if low > 0:
                        self._oldest[place] = None
            if self._since is not None:
                moment = int((self._since - READ_BACK).timestamp() * 1000)
                asked = [TopicPartition(*place, moment) for place in starts]
                for answer in consumer.offsets_for_times(asked, REQUEST_TIMEOUT_S):
                    place = (answer.topic, answer.partition)
                    # Negative: no record is that young.
                    starts[place] = answer.offset if answer.offset >= 0 else ends[place]
        finally:
            consumer.close()
        return starts, ends

    def _consumer(self, isolation: str) -> Consumer:
        return kafka.consumer(
            self._settings,
            "relay-reposition",
            isolation_level=isolation,
            enable_partition_eof=True,
            fetch_wait_max_ms=20,
            reconnect_backoff_max_ms=500,
            # Read ahead of us, of all partitions together; a record in hand takes three times its bytes.
            queued_min_messages=5_000,
            queued_max_messages_kbytes=16_384,
            fetch_max_bytes=8 * 1024 * 1024,
        )


def _found(record: Message, place: Place, offset: int) -> Found | None:
    headers = dict(kafka.headers_of(record) or ())
    # A dead letter of a row whose metadata make no headers has only its own.
    seq, event_id = headers.get("seq") or headers.get("x-seq"), headers.get("ce_id") or headers.get("x-event-id")
    if seq is None or event_id is None or not seq.isdigit() or len(seq) > 19 or not 0 < int(seq) <= HIGHEST_SEQ:
        return None
    try:
        found = UUID(event_id.decode())
    except ValueError:
        return None
    return Found(
        found, int(seq), _uuid(record.key()), _type(headers.get("ce_type")), *place, offset, _time(headers, record)
    )


def _uuid(text: object) -> UUID | None:
    try:
        return UUID(text.decode()) if isinstance(text, bytes) else None
    except ValueError:
        return None


def _type(name: bytes | None) -> str | None:
    # Postgres takes no NUL; an event type of ours is ASCII.
    if name is None or len(name) > LONGEST_TYPE or not name.isascii() or b"\0" in name:
        return None
    return name.decode()


def _time(headers: Mapping[str, bytes | None], record: Message) -> datetime:
    try:
        moment = datetime.fromisoformat((headers.get("ce_time") or b"").decode())
    except ValueError:
        return _appended_at(record)
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _appended_at(record: Message) -> datetime:
    return datetime.fromtimestamp(record.timestamp()[1] / 1000, UTC)
