"""Retry and dead-letter records to Kafka: idempotent, and believed only when the broker's delivery report is in.

A broker refuses batches, not records: who shares one with a record that is too large is refused with it. What was
refused is therefore sent again alone, by a producer that makes batches of one, before anything is concluded from it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from confluent_kafka import KafkaException, Message, Producer

from consumers.runtime.records import Headers

_POLL_S = 0.05
_FULL_QUEUE_PAUSE_S = 0.05


class Sender:
    """Owns the producers and the thread that serves their delivery reports. One for a worker.

    `make` takes settings of the client as keywords.
    """

    def __init__(self, make: Callable[..., Producer]) -> None:
        self._make = make
        self._producer = make()
        self._single: Producer | None = None
        self._loop = asyncio.get_running_loop()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="delivery-reports", daemon=True)
        self._thread.start()

    async def send(
        self, topic: str, key: bytes | None, value: bytes | None, headers: Headers, *, alone: bool = False
    ) -> tuple[int, int]:
        """Returns (partition, offset) once the record is durable. KafkaException when the broker did not take it in
        time, or refused its batch; with `alone` there is nothing else in that."""
        producer = self._producer
        if alone:
            producer = self._single = self._single or self._make(batch_num_messages=1)
        future: asyncio.Future[tuple[int, int]] = self._loop.create_future()

        def report(error: object, message: Message) -> None:
            self._loop.call_soon_threadsafe(settle, error, message.partition(), message.offset())

        def settle(error: object, partition: int | None, offset: int | None) -> None:
            if future.done():
                return  # whoever waited was cancelled; the record may be there, which a redelivery survives
            if error is not None:
                future.set_exception(KafkaException(error))
            else:
                future.set_result((partition or 0, offset or 0))

        while True:
            try:
                producer.produce(topic, value=value, key=key, headers=list(headers), on_delivery=report)
                break
            except BufferError:
                await asyncio.sleep(_FULL_QUEUE_PAUSE_S)
        return await future

    def close(self, timeout_s: float) -> None:
        """Wait for what is on its way, at most so long."""
        for producer in self._producers():
            producer.flush(timeout_s)
        self._stop.set()
        self._thread.join(1.0)

    def _serve(self) -> None:
        while not self._stop.is_set():
            for producer in self._producers():
                producer.poll(_POLL_S)

    def _producers(self) -> list[Producer]:
        return [self._producer] if self._single is None else [self._producer, self._single]
