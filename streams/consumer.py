"""Faust's consumer, handing whole fetches to one writer instead of one message at a time to agents.

Faust keeps assignment, rebalancing, timers and the life of the process. This subclass takes over what happens between:

    claim the assigned partitions in Postgres, seek to their fences
    fetch  →  write (one transaction, in a thread of its own)  →  fetch ...

What must stay true:

- Every position comes from a fence, never from an offset committed to Kafka: after each assignment, and after each
  fetch that was not written, the partitions are claimed and sought again before the next fetch. Only the one coroutine
  that fetches also seeks, so no fetch can straddle a seek.
- Records are read read_committed.
- No exception leaves the coroutine but a cancellation. What can be waited out is waited out; anything else ends the
  process, because Faust would go on without the records.

It overrides private methods of Faust and reads private state of aiokafka (the position behind markers of transactions
is not public), so both versions are checked when the application is built.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from time import monotonic
from typing import Any, Protocol, TypeVar, cast

from aiokafka.errors import ConsumerStoppedError, IllegalStateError, KafkaError
from aiokafka.structs import OffsetAndMetadata
from faust.transport.drivers.aiokafka import AIOKafkaConsumerThread, Consumer, Transport
from mode import Service

from afluente import faults, telemetry
from afluente.telemetry import metrics
from streams.errors import Abandoned, Fenced, Unfit
from streams.summaries.sink import Partition, Record, Sink, Written

PINNED = {"faust-streaming": "0.15.3", "aiokafka": "0.14.0"}

FETCH_WAIT_S = 1.0
BROKER_WAIT_MS = 250
DISPLAY_EVERY_S = 1.0  # how often offsets are committed to Kafka, for lag displays only
DISPLAY_TIMEOUT_S = 5.0
RETRY_S = 0.5
# A fence beyond the end of its partition may be a leader that has not caught up; after so many looks it is another
# topic.
BEYOND_END_LOOKS = 6

T = TypeVar("T")

_folded = metrics.labels("afluente_stream_folded_total")
_dead_letters = metrics.labels("afluente_stream_dead_letters_total")

log = telemetry.get_logger(__name__)


def check_versions() -> None:
    """Unfit when Faust or aiokafka is not the version that this module was written against."""
    for distribution, wanted in PINNED.items():
        if (installed := version(distribution)) != wanted:
            raise Unfit(
                f"{distribution} {installed} is installed, but private methods of {wanted} are overridden here",
                hint="install the versions of the lock file",
            )


class Exit(Protocol):
    """Ends the process at once with this status; never returns."""

    def __call__(self, status: int, reason: str) -> Any: ...


@dataclass
class Folding:
    """What the consumer works with, and what the watchdog looks at. One for each process."""

    sink: Sink
    topic: str
    exit: Exit
    abandon: threading.Event
    executor: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "sink"))
    moves: int = 0  # counts up with every fence written
    in_hand: bool = False  # something is being claimed or written
    behind: Callable[[], int] = lambda: 0  # records known to lie beyond the fences

    async def run(self, step: Callable[..., T], *arguments: Any) -> T:
        """Run a step of the sink in its thread. Steps queue up there, also those whose caller was cancelled."""
        self.in_hand = True
        try:
            return await asyncio.get_running_loop().run_in_executor(self.executor, step, *arguments)
        finally:
            self.in_hand = False


class CommittedThread(AIOKafkaConsumerThread):
    """Faust reads uncommitted records unless it is in its own exactly_once mode, which cannot be used."""

    def _create_worker_consumer(self, transport: Any) -> Any:
        consumer = super()._create_worker_consumer(transport)
        consumer._isolation_level = "read_committed"
        # Requests to a broker queue up behind a fetch that waits for records: with Faust's 1.5 s every look at the
        # offsets, and so every restart and rebalance, took seconds.
        consumer._fetch_max_wait_ms = BROKER_WAIT_MS
        return consumer


class BulkConsumer(Consumer):
    """See the module. `app.folding` is what it works with."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.folding: Folding = cast(Any, self.app).folding
        self.folding.behind = self._behind
        self._must_seek = True
        self._assignment: Any = None  # aiokafka's object for the assignment that was last sought
        self._shown: dict[Partition, int] = {}
        self._beyond_end = 0
        self._ready = False

    def _new_consumer_thread(self) -> CommittedThread:
        return CommittedThread(self, loop=self.loop, beacon=self.beacon)

    # what Faust calls

    async def perform_seek(self) -> None:
        """Faust asks for this once a new assignment is complete. The coroutine that fetches does it, before it
        fetches."""
        self._must_seek = True

    def stop_flow(self) -> None:
        """Partitions are being taken, or the process ends: do not go on waiting for Postgres."""
        self.folding.abandon.set()
        super().stop_flow()

    def resume_flow(self) -> None:
        self.folding.abandon.clear()
        super().resume_flow()

    async def verify_all_partitions_active(self) -> None:
        """Faust's own detector looks at agents' acknowledgements, of which there are none; `streams.watchdog` is
        ours."""

    async def _drain_messages(self, fetcher: Any) -> None:
        # A step of the last run of this coroutine may still be in the sink's thread, its outcome unknown.
        self._must_seek = True
        try:
            while not (self.should_stop or fetcher.should_stop):
                if not self.flow_active:
                    await self.wait(cast(Any, self.can_resume_flow))
                elif self._must_seek:
                    await self._seek_to_fences()
                else:
                    await self._fetch_and_write()
        except asyncio.CancelledError:
            raise
        except ConsumerStoppedError:
            if not self.transport.app.should_stop:
                self.folding.exit(70, "the Kafka consumer stopped by itself")
        except Unfit as error:
            self.folding.exit(70, str(error))
        except BaseException as error:
            log.exception("process.failed", error=f"{type(error).__name__}: {error}")
            self.folding.exit(70, f"unexpected {type(error).__name__}: {error}")

    # steps

    async def _seek_to_fences(self) -> None:
        self._must_seek = False
        subscription = self._kafka._subscription.subscription
        assignment = subscription.assignment if subscription is not None else None
        partitions = [Partition(*tp) for tp in self.assignment() if tp.topic == self.folding.topic]
        try:
            fences = await self.folding.run(self.folding.sink.claim, partitions)
            if partitions:
                seek = await self._starting_points(fences)
                if seek is None or self._must_seek or not self.flow_active:
                    self._must_seek = True
                    return
                await self.seek_wait(cast(Any, {_tp(partition): offset for partition, offset in seek.items()}))
        except Abandoned:
            self._must_seek = True
            return
        except (KafkaError, IllegalStateError, KeyError, TimeoutError) as error:
            # The broker is away, or the partition was taken while we looked; a KeyError is aiokafka's way to say so.
            await self._wait_out(error)
            return
        self._assignment = assignment
        self._beyond_end = 0
        log.info(
            "stream.assigned",
            generation=self.folding.sink.generation,
            partitions=sorted(partition.partition for partition in partitions),
            offsets=[offset for _, offset in sorted(fences.items())],
        )
        if not self._ready:
            self._ready = True
            log.info("stream.ready", topic=self.folding.topic, partitions=len(partitions))

    async def _starting_points(self, fences: Mapping[Partition, int]) -> dict[Partition, int] | None:
        """Where to read on, or None to look again: the fences, checked against what the broker still has."""
        tps = [_tp(partition) for partition in fences]
        first = await self.earliest_offsets(*tps)
        end = await self.highwaters(*tps)
        for partition, fence in sorted(fences.items()):
            if fence > end[_tp(partition)]:
                self._beyond_end += 1
                if self._beyond_end >= BEYOND_END_LOOKS:
                    raise Unfit(
                        f"{partition.topic}[{partition.partition}] ends at {end[_tp(partition)]}, but was folded "
                        f"up to {fence}: the topic was created anew or lost records",
                        hint="start a new generation of the summaries",
                    )
                await self.sleep(RETRY_S)
                return None
            if fence < first[_tp(partition)]:
                # Retention was faster than we were. Nothing brings them back from Kafka; a rebuild from the table does.
                log.error(
                    "stream.gap",
                    topic=partition.topic,
                    partition=partition.partition,
                    offset=fence,
                    count=first[_tp(partition)] - fence,
                )
        return {partition: max(fence, first[_tp(partition)]) for partition, fence in fences.items()}

    async def _fetch_and_write(self) -> None:
        try:
            records, _ = await self._wait_next_records(FETCH_WAIT_S)
        except ConsumerStoppedError:
            raise
        except (KafkaError, IllegalStateError, KeyError) as error:
            await self._wait_out(error)
            return
        if self._must_seek or not self.flow_active:
            # Fetched across a rebalance: whose they are is not certain. They are read again from the fences.
            self._must_seek = True
            return
        fetch = {Partition(*tp): cast(Sequence[Record], found) for tp, found in (records or {}).items()}
        if fetch:
            faults.point("stream.after_fetch")
        # With records in hand only their partitions move; while idle, all that stand behind markers do.
        positions = self._positions(fetch or self.folding.sink.fences)
        if not fetch and not positions:
            return
        started = monotonic()
        try:
            written = await self.folding.run(self.folding.sink.write, fetch, positions)
        except Abandoned:
            self._must_seek = True
            return
        except Fenced as error:
            rebalanced = self._must_seek or not self.flow_active
            self._must_seek = True
            if not rebalanced:
                # Kafka has not told us of a rebalance, yet the partitions are another's: we were taken for dead.
                log.error("stream.fenced", error=str(error))
                self.folding.exit(70, str(error))
            return
        self.folding.moves += 1
        if written.below_fence:
            # We read from the fences, so aiokafka has set the position back: the log no longer reaches it. Look
            # at the ends before anything is passed over in silence.
            self._must_seek = True
        _folded.inc(written.facts)
        _dead_letters.inc(written.dead_letters)
        if fetch:
            _say(written, fetch, self.folding.sink.generation, monotonic() - started)

    async def _wait_out(self, error: BaseException) -> None:
        log.warning("stream.retrying", error=f"{type(error).__name__}: {error}")
        self._must_seek = True
        await self.sleep(RETRY_S)

    # aiokafka's state

    @property
    def _kafka(self) -> Any:
        return self._thread._ensure_consumer()

    def _positions(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """Where reading stands beyond the fence, of the assignment that was sought: after a rebalance positions mean
        nothing."""
        subscription = self._kafka._subscription.subscription
        if subscription is None or subscription.assignment is not self._assignment:
            return {}
        fences = self.folding.sink.fences
        found = {}
        for partition in partitions:
            state = self._assignment.state_value(_tp(partition))
            if (
                state is not None
                and state.has_valid_position
                and state.position > fences.get(partition, state.position)
            ):
                found[partition] = state.position
        return found

    def _behind(self) -> int:
        """Offsets between the fences and the ends last seen. Called from the watchdog's thread."""
        assignment = self._assignment
        if assignment is None:
            return 0
        behind = 0
        for partition, fence in list(self.folding.sink.fences.items()):
            state = assignment.state_value(_tp(partition))
            if state is not None and state.lso is not None:
                behind += max(0, state.lso - fence)
        return behind

    # for display

    @Service.task
    async def _show_offsets(self) -> None:
        while not self.should_stop:
            await self.sleep(DISPLAY_EVERY_S)
            telemetry.heartbeat.beat()
            fences = dict(self.folding.sink.fences)
            if fences and fences != self._shown and self.flow_active and not self._must_seek:
                await self._thread.call_thread(self._commit_for_display, fences)
                self._shown = fences

    async def _commit_for_display(self, fences: Mapping[Partition, int]) -> None:
        try:
            offsets = {_tp(p): OffsetAndMetadata(offset, "") for p, offset in fences.items()}
            await asyncio.wait_for(self._kafka.commit(offsets), DISPLAY_TIMEOUT_S)
        except Exception as error:
            # A group that is rebalancing, a broker that is away: nothing depends on this offset.
            log.debug("stream.display_failed", error=f"{type(error).__name__}: {error}")


class BulkTransport(Transport):
    """Faust's transport with our consumer."""

    Consumer = BulkConsumer


def _tp(partition: Partition) -> Any:
    from faust.types import TP

    return TP(partition.topic, partition.partition)


def _say(written: Written, fetch: Mapping[Partition, Sequence[Record]], generation: int, seconds: float) -> None:
    log.info(
        "stream.committed",
        count=written.records,
        facts=written.facts,
        duplicates=written.duplicates,
        without_metric=written.without_metric,
        dead_letters=written.dead_letters,
        below_fence=written.below_fence,
        partitions=len(fetch),
        generation=generation,
        ms=round(seconds * 1000, 1),
    )
