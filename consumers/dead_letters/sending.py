"""Copies of dead letters to a worker's retry.now, and at what pace.

A broker refuses batches, not records: what was refused is sent again alone before anything is concluded from it, so
that one record which no topic takes does not keep the others dead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from afluente import kafka
from afluente.errors import Refused
from afluente.settings import KafkaSettings
from consumers.runtime.outgoing import REFUSED
from consumers.runtime.records import Headers
from schemas.topics import Topics

AT_ONCE = 100  # letters in one transaction: their rows are locked while their copies are on the way
_FLUSH_S = 60.0
_FLUSH_STOPPED_S = 5.0  # told to stop: what is on its way gets so long, as a broker that is away answers nothing

T = TypeVar("T")


@dataclass(slots=True)
class Outcome:
    """What was done. `failed` says for each letter that was not, why; `left`: not begun, as it was told to stop."""

    done: list[str] = field(default_factory=list)
    failed: list[dict[str, str]] = field(default_factory=list)
    left: int = 0
    places: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    """Where the copies are, by id: topic, partition, offset."""

    def fail(self, id: str, error: str) -> None:
        self.failed.append({"id": id, "error": error})

    def add(self, other: Outcome) -> None:
        self.done += other.done
        self.failed += other.failed
        self.left += other.left
        self.places |= other.places


class Pace:
    """How fast bulk work goes, who watches it (`told` gets how many letters are behind it), and who can end it: between
    two batches, when `stop` is set."""

    def __init__(
        self,
        per_s: float | None = None,
        stop: threading.Event | None = None,
        told: Callable[[int], None] = lambda count: None,
    ) -> None:
        self.stop = stop or threading.Event()
        self._per_s = per_s
        self._told = told
        self._count = 0
        self._free_at = 0.0

    def batches(self, letters: Sequence[T], outcome: Outcome) -> Iterator[Sequence[T]]:
        """The letters in parts, each when it may begin."""
        size = AT_ONCE if self._per_s is None else max(1, min(AT_ONCE, int(self._per_s)))
        for start in range(0, len(letters), size):
            if self.stop.wait(max(0.0, self._free_at - time.monotonic())):
                outcome.left += len(letters) - start
                return
            batch = letters[start : start + size]
            if self._per_s is not None:
                self._free_at = max(self._free_at, time.monotonic()) + len(batch) / self._per_s
            yield batch
            self._count += len(batch)
            self._told(self._count)


class Copy(NamedTuple):
    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers


class Copies:
    """Owns the producers. Refused at once when a worker has no retry.now."""

    def __init__(self, settings: KafkaSettings, workers: Iterable[str], stop: threading.Event | None = None) -> None:
        self._settings = settings
        self._stop = stop or threading.Event()
        there = kafka.admin(settings).list_topics(timeout=kafka.METADATA_TIMEOUT_S).topics
        for worker in sorted(set(workers)):
            if (topic := Topics(settings.topic_prefix).retry(worker, "now")) not in there:
                raise Refused(f"topic {topic} does not exist", hint=f"afluente topics apply --worker {worker}")
        self._producer = self._make()
        self._single: Producer | None = None

    def send(self, copies: Sequence[Copy]) -> list[tuple[str, int, int] | str]:
        """For each where it is, or why the broker takes it in no case. KafkaException when one of them is not known to
        be there: it may be."""
        answers = _put(self._producer, copies, self._stop)
        for i, copy in enumerate(copies):
            if isinstance(answers[i], str):
                self._single = self._single or self._make(batch_num_messages=1)
                [answers[i]] = _put(self._single, [copy], self._stop)
        return answers

    def _make(self, **overrides: Any) -> Producer:
        return kafka.producer(self._settings, message_max_bytes=4_000_000, **overrides)


def _put(producer: Producer, copies: Sequence[Copy], stop: threading.Event) -> list[tuple[str, int, int] | str]:
    answers: list[tuple[str, int, int] | str] = [""] * len(copies)
    errors: list[KafkaError] = []

    def settle(i: int, error: KafkaError) -> None:
        if error.code() in REFUSED:
            answers[i] = f"{copies[i].topic} does not take its record: {error.str()}"
        else:
            errors.append(error)

    def reporter(i: int) -> Callable[[KafkaError | None, Message], None]:
        def report(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                settle(i, error)
            else:
                answers[i] = (message.topic() or "", message.partition() or 0, message.offset() or 0)

        return report

    for i, copy in enumerate(copies):
        while True:
            try:
                producer.produce(
                    copy.topic, value=copy.value, key=copy.key, headers=list(copy.headers), on_delivery=reporter(i)
                )
                break
            except BufferError:
                producer.poll(0.1)
            except KafkaException as refused:  # larger than what the client sends at all
                settle(i, refused.args[0])
                break
    began = time.monotonic()
    until = began + _FLUSH_S
    while (left := producer.flush(0.5)) and time.monotonic() < until:
        if stop.is_set():
            until = min(until, time.monotonic() + _FLUSH_STOPPED_S)
    if errors:
        raise KafkaException(errors[0])
    if left:
        raise KafkaException(
            KafkaError(KafkaError._TIMED_OUT, f"{left} of the copies were not confirmed in {until - began:.0f} s")
        )
    return answers
