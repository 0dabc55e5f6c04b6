"""Sending a replay: each page of events, and how far it brings the replay, in one Kafka transaction.

What must stay true:
- a replay has its own transactional.id, client id and consumer group (`replay-<id>`); those of the relay, and its
  position, are never touched;
- how far the replay has come is read from Kafka when a session begins, after it has fenced whoever ran the same replay
  before, never taken from memory: so nothing is sent twice, and nothing left out, whenever the process is killed;
- of several processes that run the same replay the last to have claimed it goes on, the others end. The first
  transaction of a session is the unchanged progress with the process's own mark: a fenced session looks the same
  whether the broker timed its transaction out or a rival began, and the mark tells;
- a transaction is open only while its page is sent, whatever the rate: readers of the target wait for its end.

The progress is the metadata of the offset of the replay's group at one partition, written by the transaction itself.
Kafka keeps it for seven days after the last of it.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple
from uuid import UUID

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from afluente import faults, kafka
from afluente.errors import Refused, Unavailable
from afluente.settings import KafkaSettings
from producers.relay.publish import RETRY_FOR_S, transactional_producer
from producers.relay.records import BATCH_OVERHEAD, HEADER_OVERHEAD
from producers.relay.replay.selection import Progress, Selection
from producers.relay.replay.sources import Found, Headers, Sources

PAGE_ROWS = 250
PAGES_PER_S = 4  # with a rate: the pages are as small as it takes to be even
CALL_TIMEOUT_S = 3.0
PROGRESS_EVERY_S = 5.0  # of what selects nothing
PAUSE_S = 1.0


class Outgoing(NamedTuple):
    """A record to send."""

    topic: str
    key: bytes
    value: bytes
    headers: Headers

    @property
    def size(self) -> int:
        """Upper bound of the bytes of a batch that holds only this record."""
        headers = sum(len(name.encode()) + len(value or b"") + HEADER_OVERHEAD for name, value in self.headers)
        return len(self.key) + len(self.value) + headers + BATCH_OVERHEAD


class Addressed(NamedTuple):
    """What becomes of a page: records, and how many deliveries were over already."""

    records: Sequence[Outgoing]
    skipped: int


Address = Callable[[Sequence[Found]], Addressed]


class Superseded(Refused):
    """Another process has resumed this replay."""

    exit_status = 3

    def __init__(self) -> None:
        super().__init__("another process has resumed this replay, and goes on with it: this one ends")


class Expired(Refused):
    """Kafka no longer says how far the replay had come."""

    def __init__(self) -> None:
        super().__init__(
            "how far this replay had come has expired in Kafka, which keeps it for seven days",
            hint="begin a new one: workers skip what they have done",
        )


class Replay:
    """One replay, from where it stands to its end or until `stop`. `limits`: what each topic takes, in bytes. `place`:
    the partition at whose offset the progress is kept, the same whenever it is resumed."""

    def __init__(
        self,
        settings: KafkaSettings,
        replay_id: UUID,
        wanted: Selection,
        sources: Sources,
        address: Address,
        limits: Mapping[str, int],
        *,
        place: tuple[str, int],
        rate: float | None = None,
        is_new: bool = True,
        told: Callable[[Progress], None] = lambda progress: None,
        failed: Callable[[str, str], None] = lambda what, why: None,
        lost: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._settings, self._wanted, self._sources, self._address = settings, wanted, sources, address
        self._limits, self._rate, self._is_new = limits, rate, is_new
        self._told, self._say_failed, self._say_lost = told, failed, lost
        self._name = name_of(replay_id)
        self._place = TopicPartition(*place)
        self._stop = threading.Event()
        self._failure: KafkaError | None = None
        self._lost: str | None = None
        self._free_at = 0.0  # monotonic: until then the rate has been used up
        self._committed: Progress | None = None
        self._instance = secrets.token_hex(6)
        self._claimed = False

    def stop(self) -> None:
        """End after the page in hand. May be called from a signal handler."""
        self._stop.set()

    def run(self) -> Progress:
        """Send what is left; the progress at the end. Raises Superseded, Expired, and Unavailable when Kafka has been
        away for a minute; whatever ends it, the replay can be resumed."""
        deadline = time.monotonic() + RETRY_FOR_S
        while True:
            before = self._committed
            try:
                return self._session()
            except (KafkaException, _SessionLost, SystemError) as error:
                # SystemError: what a client makes of its own exception inside a callback, when it is fenced in a flush.
                if self._committed != before:
                    deadline = time.monotonic() + RETRY_FOR_S
                if self._stop.is_set() or time.monotonic() > deadline:
                    raise Unavailable(f"Kafka: {error}") from error
                self._say_lost(str(error))
                self._stop.wait(PAUSE_S)

    def forget(self) -> None:
        """The replay is over and noted as such: its group is no longer needed."""
        group = self._settings.group_id(self._name)
        client = kafka.admin(self._settings)
        with suppress(KafkaException, TimeoutError):  # it expires by itself
            client.delete_consumer_groups([group])[group].result(CALL_TIMEOUT_S)

    def _session(self) -> Progress:
        """1. is it still ours?, 2. fence, 3. how far are we?, 4. claim, 5. page by page."""
        self._failure = self._lost = None
        producer = self._make_producer()
        consumer = kafka.consumer(self._settings, self._name, client_id=f"afluente-{self._name}")
        try:
            if self._claimed:
                self._read_progress(consumer)  # before the rival that fenced us would be fenced
            self._again(lambda: producer.init_transactions(CALL_TIMEOUT_S))
            producer.poll(0)
            self._lost = None  # what failed while connecting says nothing of the connections in use
            progress = replace(self._read_progress(consumer), instance=self._instance)
            self._commit(producer, consumer, (), progress)
            self._claimed, self._committed = True, progress
            self._told(progress)
            written_at, kept = time.monotonic(), progress
            while progress.part < len(self._wanted.parts) and not self._stop.is_set():
                rows = PAGE_ROWS if self._rate is None else max(1, min(PAGE_ROWS, int(self._rate / PAGES_PER_S)))
                progress, records = self._next(progress, rows)
                if self._stop.is_set():
                    break
                is_over = progress.part == len(self._wanted.parts)
                if records or is_over or time.monotonic() - written_at >= PROGRESS_EVERY_S:
                    self._commit(producer, consumer, records, progress)
                    written_at, kept = time.monotonic(), progress
                    self._committed = progress
                self._told(progress)
            return kept
        finally:
            consumer.close()
            with suppress(Exception):  # a fenced producer raises from every call
                producer.purge()

    def _next(self, progress: Progress, rows: int) -> tuple[Progress, Sequence[Outgoing]]:
        """The next page's records, and the progress once they are sent."""
        part = self._wanted.parts[progress.part]
        page = self._sources.page(self._wanted, part, progress.cursor, rows)
        records, skipped = self._address(page.events)
        fitting = []
        failures = list(page.failed)
        for record in records:
            if record.size > self._limits[record.topic]:
                about = dict(record.headers).get("ce_id") or b"?"
                what = f"{record.size} bytes as a record; {record.topic} takes {self._limits[record.topic]}"
                failures.append((about.decode("ascii", "replace")[:40], what))
            else:
                fitting.append(record)
        for what, why in failures:
            self._say_failed(what, why)
        self._wait_for(len(page.events))
        is_over = page.after is None
        return replace(
            progress,
            part=progress.part + is_over,
            cursor=[] if page.after is None else page.after,
            read=progress.read + len(page.events),
            sent=progress.sent + len(fitting),
            skipped=progress.skipped + skipped,
            failed=progress.failed + len(failures),
        ), fitting

    def _wait_for(self, events: int) -> None:
        """Until the rate allows so many more."""
        if self._rate is None or not events:
            return
        now = time.monotonic()
        self._free_at = max(self._free_at, now)
        if self._free_at > now:
            self._stop.wait(self._free_at - now)
        self._free_at += events / self._rate

    def _commit(self, producer: Producer, consumer: Consumer, records: Sequence[Outgoing], progress: Progress) -> None:
        producer.poll(0)
        self._require_well()
        producer.begin_transaction()
        for record in records:
            while True:
                try:
                    producer.produce(record.topic, record.value, record.key, headers=[*record.headers])
                    break
                except BufferError:
                    producer.poll(0.05)
                    self._require_well()
        while producer.flush(1.0):  # ends by itself: message.timeout.ms makes every report come
            self._require_well()
        self._require_well()
        offset = TopicPartition(self._place.topic, self._place.partition, progress.read, progress.format())
        group = consumer.consumer_group_metadata()
        self._again(lambda: producer.send_offsets_to_transaction([offset], group, CALL_TIMEOUT_S))
        faults.point("replay.after_send")
        # A broker that went away may have left the transaction before undecided: a commit now would decide part of it.
        self._require_well()
        self._again(lambda: producer.commit_transaction(CALL_TIMEOUT_S))
        faults.point("replay.after_commit")

    def _read_progress(self, consumer: Consumer) -> Progress:
        found: list[TopicPartition] = []
        self._again(lambda: found.extend(consumer.committed([self._place], CALL_TIMEOUT_S)))
        if found[0].error is not None:
            raise KafkaException(found[0].error)
        if found[0].offset < 0:
            if self._claimed:  # a rival has finished it
                raise Superseded()
            if not self._is_new:
                raise Expired()
            return Progress()
        progress = Progress.parse(found[0].metadata or "")
        if self._claimed and progress.instance != self._instance:
            raise Superseded()
        return progress

    def _make_producer(self) -> Producer:
        return transactional_producer(
            self._settings,
            self._settings.topic_prefix + self._name,
            self._limits,
            client_id=f"afluente-{self._name}",
            delivery_report_only_error=True,
            on_delivery=self._delivered,
            error_cb=self._client_error,
        )

    def _again(self, call: Callable[[], None]) -> None:
        deadline = time.monotonic() + RETRY_FOR_S
        while True:
            try:
                return call()
            except KafkaException as error:
                if not error.args[0].retriable() or time.monotonic() > deadline or self._stop.is_set():
                    raise

    def _require_well(self) -> None:
        if self._failure is not None:
            raise _SessionLost(f"a record was not delivered: {self._failure.str()}")
        if self._lost is not None:
            raise _SessionLost(f"the connection to the broker was lost ({self._lost})")

    # Callbacks run inside flush and poll: they only note.

    def _client_error(self, error: KafkaError) -> None:
        self._lost = error.str()

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self._failure = error


class _SessionLost(Exception):
    """This producer is to be thrown away."""


def name_of(replay_id: UUID) -> str:
    """Its group, its transactional.id and its client id, but for prefixes."""
    return f"replay-{replay_id}"
