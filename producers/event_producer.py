"""Events straight to their topics, for services that have no transaction of Postgres to put them in.

What must stay true:

* A record is what the relay would have made of the same event: same schema, key, partition and headers, but for
  `seq`: it has no place in event_log, and verification knows it by that.
* Nothing that a table owns goes this way (`producers.owned`).
* Every delivery report is accounted for: an event is known to be in its topic, or named by the error that `flush`
  raises.

There is no outbox behind it: a process that dies loses what was not flushed. Whoever must not lose an event keeps it,
with its `event_id`, until `flush` has returned, and produces it again under the same id; consumers take it once.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self
from uuid import UUID, uuid4

from confluent_kafka import KafkaError, KafkaException, Message

import schemas
from afluente import kafka
from afluente.settings import KafkaSettings
from producers.emit import Causation, checked
from producers.errors import NotDeliveredError, OwnedByTableError
from producers.owned import table_of
from schemas.topics import SPREAD, Topics, partition_of

FLUSH_TIMEOUT_S = 30.0
METADATA_TIMEOUT_S = 10.0
BY_KEY = -1  # the client's partitioner decides, and is the relay's


class EventProducer:
    """Produces catalogued and custom events. One for a process; its methods may be called from several threads.

    Use it as a context manager, or call `close`: both flush.

        with EventProducer.connect("127.0.0.1:9092", source="shop") as producer:
            producer.produce(
                "loyalty.earned", organization_id=organization_id, entity_kind="loyalty", payload={"points": 5}
            )

    A type that the catalogue does not know goes to events.custom, and its payload is not checked.
    """

    def __init__(self, settings: KafkaSettings, *, source: str, **overrides: Any) -> None:
        """`source`: the producing service, in every event's metadata. `overrides`: librdkafka settings, `_` for `.`."""
        self._source = source
        self._topics = Topics(settings.topic_prefix)
        self._producer = kafka.producer(settings, **overrides)
        self._lock = threading.Lock()
        self._failed: dict[UUID, str] = {}
        self._under_way: set[UUID] = set()
        self._partitions: dict[str, int] = {}

    @classmethod
    def connect(cls, bootstrap_servers: str, *, source: str, topic_prefix: str = "", **overrides: Any) -> Self:
        """A producer for `host:port[,host:port]`. SettingsError when it cannot be read so.

        `overrides` are librdkafka's settings with `_` for `.`, such as `security_protocol="SSL"`. A service that is
        configured by the environment as our own processes are passes `KafkaSettings.read(os.environ)` to the class.
        """
        given = {"KAFKA_BOOTSTRAP_SERVERS": bootstrap_servers, "AFLUENTE_TOPIC_PREFIX": topic_prefix}
        return cls(KafkaSettings.read(given), source=source, **overrides)

    def produce(
        self,
        event_type: str,
        *,
        organization_id: UUID,
        entity_kind: str,
        entity_id: UUID | None = None,
        payload: Mapping[str, Any],
        event_id: UUID | None = None,
        request_id: str | None = None,
        actor_id: str | UUID | None = None,
        trace_id: str | None = None,
        schema_version: str | None = None,
        causation: Causation | None = None,
    ) -> UUID:
        """Hand one event to the client and return its id. It is in its topic once `flush` has returned.

        `event_id`: the id of an event that is produced again because nobody knows what became of it; a new one is made
        otherwise. Waits while the client's queue is full.

        Raises OwnedByTableError for a type that a table owns, EmitError and what is below it for an event that does
        not fit (`producers.errors`), both before anything is sent; KafkaException when the client has failed for
        good.
        """
        if (table := table_of(event_type)) is not None:
            raise OwnedByTableError(event_type, table)
        row = self._row(
            event_id or uuid4(),
            organization_id,
            checked(
                event_type=event_type,
                entity_kind=entity_kind,
                entity_id=entity_id,
                payload=payload,
                organization_id=organization_id,
                request_id=request_id,
                actor_id=actor_id,
                source=self._source,
                trace_id=trace_id,
                idempotency_key=None,
                schema_version=schema_version,
                causation=causation,
                deliver_at=None,
            ),
        )
        self._send(row)
        return row.id

    def flush(self, timeout_s: float = FLUSH_TIMEOUT_S) -> None:
        """Wait until the broker has answered for every event. Raises NotDeliveredError naming those that are not
        there, or of
        which nothing is known after `timeout_s`; those it named are forgotten here and may be produced again."""
        self._producer.flush(timeout_s)
        with self._lock:
            failed = {**self._failed, **dict.fromkeys(self._under_way, f"no answer within {timeout_s:g} s")}
            self._failed.clear()
            self._under_way.clear()
        if failed:
            raise NotDeliveredError(failed)

    def close(self, timeout_s: float = FLUSH_TIMEOUT_S) -> None:
        """`flush`; what is still under way after it is given up."""
        try:
            self.flush(timeout_s)
        finally:
            self._producer.purge()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self.close()
        except NotDeliveredError as undelivered:
            # An error of the caller's own is the one to be seen; this one goes with it.
            if error is None:
                raise
            error.add_note(str(undelivered))

    def _row(self, event_id: UUID, organization_id: UUID, event: dict[str, Any]) -> schemas.Row:
        created_at = datetime.now(UTC)
        metadata = json.loads(event["metadata"]) | {"emitted_at": created_at.timestamp()}
        return schemas.Row(
            seq=0,  # none: schemas.headers leaves the header out
            id=event_id,
            organization_id=organization_id,
            event_type=event["event_type"],
            entity_kind=event["entity_kind"],
            entity_id=event["entity_id"],
            payload=event["payload"].encode(),
            metadata=json.dumps(metadata, ensure_ascii=False).encode(),
            created_at=created_at,
        )

    def _send(self, row: schemas.Row) -> None:
        topic = self._topics.event(row.event_type)
        key = str(row.organization_id)
        partition = BY_KEY
        if key in SPREAD:
            partition = partition_of(key, self._partition_count(topic), row.entity_id)
        value, headers = schemas.encode(row), schemas.headers(row)

        def report(error: KafkaError | None, _: Message) -> None:
            with self._lock:
                self._under_way.discard(row.id)
                if error is not None:
                    self._failed[row.id] = error.str()

        with self._lock:
            self._under_way.add(row.id)
        while True:
            try:
                self._producer.produce(topic, value, key, partition, on_delivery=report, headers=dict(headers))
                break
            except BufferError:
                self._producer.poll(0.1)
            except BaseException:
                with self._lock:
                    self._under_way.discard(row.id)
                raise
        self._producer.poll(0)

    def _partition_count(self, topic: str) -> int:
        if topic not in self._partitions:
            found = self._producer.list_topics(topic, timeout=METADATA_TIMEOUT_S).topics[topic]
            if found.error is not None:
                raise KafkaException(found.error)
            self._partitions[topic] = len(found.partitions)
        return self._partitions[topic]
