"""One transactional producer's life: initialised, used for chunks, thrown away at the first error.

What must stay true:
- a chunk's records and the new position are in one Kafka transaction;
- only the same call of init or commit is repeated, and only when librdkafka calls the error retriable. After anything
  else nobody asks whether the commit happened: the next session reads the position, which says it;
- nothing is committed over a connection that was lost in between. A broker that died may have left the previous
  transaction undecided, and a later commit of the same producer would decide a part of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from afluente import faults, kafka
from afluente.settings import KafkaSettings
from producers.relay.cluster import ClusterFacts, Heartbeat
from producers.relay.errors import SessionLost
from producers.relay.position import Position
from producers.relay.records import Record
from schemas.topics import Topics

RETRY_FOR_S = 60.0
CALL_TIMEOUT_S = 3.0  # of one call of init or commit: the lease is renewed in between
# Lanes share the topics' partitions: a dead lane holds back the readers of all for this long, and up to 10 s more.
TRANSACTION_TIMEOUT_MS = 10_000
SEND_TIMEOUT_MS = 8_000  # must not exceed it, else a record could be sent after its transaction has ended
# A commit returns before its markers are written. Who begins anew meanwhile is refused (CONCURRENT_TRANSACTIONS), and
# librdkafka then waits 20 ms, whatever it is told: seen in 12 of 100 transactions at once, in 2 to 4 of 100 after 2 ms.
MARKERS_S = 0.002
BATCH_BYTES = 1_000_000
BATCH_ROOM = 10_000

FENCED = frozenset({KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH})
# What the broker says of a record, not of the session: the record itself must go.
REFUSED_RECORD = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_RECORD, KafkaError.INVALID_MSG})

Report = tuple[Record, int, int]  # record, partition, offset


def code_of(error: BaseException) -> int | None:
    """librdkafka's code in an error, if it has one."""
    if isinstance(error, SessionLost):
        return error.code
    if isinstance(error, KafkaException) and error.args and isinstance(error.args[0], KafkaError):
        return error.args[0].code()
    return None


def transactional_producer(
    settings: KafkaSettings, transactional_id: str, limits: Mapping[str, int], **options: Any
) -> Producer:
    """A producer whose transactions end, one way or the other, in seconds. `limits`: max.message.bytes by topic."""
    return kafka.producer(
        settings,
        transactional_id=transactional_id,
        transaction_timeout_ms=TRANSACTION_TIMEOUT_MS,
        message_timeout_ms=SEND_TIMEOUT_MS,
        socket_timeout_ms=SEND_TIMEOUT_MS,
        retry_backoff_ms=20,
        # A chunk goes out at its flush, which waits for nobody, in a few large requests: many small ones on the way
        # there cost both sides more than they gain (35,000 to 39,000 rows/s against 32,000 to 34,000).
        linger_ms=500,
        reconnect_backoff_max_ms=500,
        message_max_bytes=max(limits.values()),
        # Else a whole batch is refused, with innocents.
        batch_size=max(1, min(BATCH_BYTES, min(limits.values()) - BATCH_ROOM)),
        **options,
    )


class Session:
    """From `init` to the first exception of any method; then `discard`, and make a new one."""

    def __init__(
        self,
        settings: KafkaSettings,
        topics: Topics,
        facts: ClusterFacts,
        transactional_id: str,
        heartbeat: Heartbeat,
        *,
        report: Callable[[Sequence[Report]], None] | None = None,
    ) -> None:
        self._topics, self._heartbeat, self._report = topics, heartbeat, report
        self._reports: list[Report] = []
        self._failed_code: int | None = None
        self._lost: str | None = None
        self._committed_at = 0.0
        self._producer: Producer = transactional_producer(
            settings,
            transactional_id,
            facts.limits,
            delivery_report_only_error=report is None,
            on_delivery=self._delivered,
            error_cb=self._client_error,
        )

    def init(self) -> None:
        """Fence whoever has this transactional id and end its open transaction."""
        self._again(lambda: self._producer.init_transactions(CALL_TIMEOUT_S))
        # What failed while connecting (a host name with two addresses, one of them deaf) says nothing of the
        # connections that transactions will use.
        self._producer.poll(0)
        self._lost = None

    def idle(self) -> None:
        """Serve the client's callbacks; raises SessionLost when the connection was lost meanwhile."""
        self._producer.poll(0)
        self._require_connection()

    def publish(self, records: Sequence[Record], position: Position) -> None:
        """Commit `records` and `position` together. When it raises, they may or may not be committed."""
        self.idle()
        self._failed_code, self._reports = None, []
        at, key = position.format(), position.key.encode()
        if (early := self._committed_at + MARKERS_S - time.monotonic()) > 0:
            time.sleep(early)
        self._producer.begin_transaction()
        produce: Any = self._producer.produce
        report: Any = None
        for record in records:
            topic, record_key, value, headers, partition, _, _ = record
            if self._report is not None:
                report = partial(self._reported, record)
            try:
                # By place, as there are so many: partition (BY_KEY is the client's own word for it), callback twice,
                # timestamp, headers.
                produce(topic, value, record_key, partition, report, None, 0, headers)
            except BufferError:
                self._produce(topic, value, record_key, partition, report, None, 0, headers)
        self._produce(self._topics.positions, at, key, position.lane)
        self._flush()
        faults.point("relay.after_send")
        self._require_connection()
        faults.point("relay.before_commit")
        self._again(lambda: self._producer.commit_transaction(CALL_TIMEOUT_S))
        self._committed_at = time.monotonic()
        faults.point("relay.after_commit")
        if self._report is not None:
            self._report(self._reports)

    def discard(self) -> None:
        """Throw the producer away as it is. Nothing is aborted: the next session's init does it."""
        producer = self.__dict__.pop("_producer", None)
        if producer is not None:
            # A fenced producer raises its fatal error from every call: not in place of what ended the session.
            with suppress(Exception):
                producer.purge()

    def _produce(self, *record: Any) -> None:
        while True:
            try:
                self._producer.produce(*record)
            except BufferError:
                self._producer.poll(0.05)
                self._heartbeat()
                self._require_delivered()
            else:
                return

    def _flush(self) -> None:
        # Ends by itself: message.timeout.ms makes every report come.
        while self._producer.flush(1.0):
            self._heartbeat()
            self._require_delivered()
        self._require_delivered()

    def _again(self, call: Callable[[], None]) -> None:
        deadline = time.monotonic() + RETRY_FOR_S
        while True:
            try:
                return call()
            except KafkaException as error:
                if not error.args[0].retriable() or time.monotonic() > deadline:
                    raise
            self._heartbeat()

    def _require_connection(self) -> None:
        if self._lost is not None:
            raise SessionLost(f"the connection to the broker was lost ({self._lost})")

    def _require_delivered(self) -> None:
        if self._failed_code is not None:
            reason = KafkaError(self._failed_code).str()
            raise SessionLost(f"a record was not delivered: {reason}", self._failed_code)

    # Callbacks run inside flush and poll, where an exception of ours would come out as a SystemError: they only note.

    def _client_error(self, error: KafkaError) -> None:
        self._lost = error.str()

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None and self._failed_code not in REFUSED_RECORD:
            # A refused record makes innocent ones fail too, with other codes: its own is the one to keep.
            self._failed_code = error.code()

    def _reported(self, record: Record, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self._delivered(error, message)
        else:
            self._reports.append((record, message.partition() or 0, message.offset() or 0))
