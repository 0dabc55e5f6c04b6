"""Records out: put in a topic until the broker has them, in a smaller form when it refuses the whole one.

What must stay true: a record is finished only when what follows from it is durable, so nothing is given up here. A
broker that is away gets the same again. A broker that refuses a record for what it is would refuse it for ever, and
its partition's offset would stand still: it gets the next smaller form, and of a dead letter at last only the
reference to where its bytes are. That one is tried for ever too: it fits wherever a topic is of any use.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from consumers.runtime.records import OMITTED, OURS, Headers, Record
from consumers.runtime.sender import Sender

AWAY_PAUSES_S = (0.2, 0.5, 1.0, 2.0, 5.0)
MAX_REFERENCE_KEY_BYTES = 1000

REFUSED = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_MSG,
    }
)
"""The same record is never taken, however often it comes."""


class RecordRefused(Exception):
    """The broker takes the record in no form that would still be the record."""


@dataclass(frozen=True, slots=True)
class Form:
    """What is sent, and what of the record was left out for it."""

    key: bytes | None
    value: bytes | None
    headers: Headers
    left_out: str = ""


def whole(record: Record, headers: Headers) -> Form:
    return Form(record.key, record.value, headers)


def bare(record: Record, headers: Headers) -> Form:
    """Without the headers that the source brought: key and value are untouched."""
    ours = [(name, value) for name, value in headers if name in OURS]
    return Form(record.key, record.value, [*ours, (OMITTED, b"headers")], "headers")


def reference(record: Record, headers: Headers) -> Form:
    """Only where the record is: `x-origin-*`, and for an event of ours its id, by which event_log has it."""
    ours = [(name, value) for name, value in headers if name in OURS]
    key = record.key if len(record.key or b"") <= MAX_REFERENCE_KEY_BYTES else None
    return Form(key, None, [*ours, (OMITTED, b"headers, value")], "headers, value")


def pauses_s() -> Iterator[float]:
    """How long to wait between attempts at something that is away, without end."""
    return itertools.chain(AWAY_PAUSES_S, itertools.repeat(AWAY_PAUSES_S[-1]))


class Outgoing:
    """The retry records and dead letters of one worker. `say(event name, level=..., **fields)` tells what happens."""

    def __init__(self, sender: Sender, say: Callable[..., None]) -> None:
        self._sender = sender
        self._say = say

    async def retry(self, topic: str, record: Record, headers: Headers) -> None:
        """RecordRefused when the broker refuses even the bare record: without its value it could not be tried again."""
        await self._put(topic, [whole(record, headers), bare(record, headers)], insist=False)

    async def dead_letter(self, topic: str, record: Record, headers: Headers) -> tuple[int, int]:
        """Its partition and offset there."""
        forms = [whole(record, headers), bare(record, headers), reference(record, headers)]
        return await self._put(topic, forms, insist=True)

    async def _put(self, topic: str, forms: Sequence[Form], *, insist: bool) -> tuple[int, int]:
        try:
            return await self._until_there(topic, forms[0], alone=False)
        except _Refused:
            pass  # perhaps for another record in its batch
        pauses = pauses_s()
        for number in itertools.count():
            form = forms[min(number, len(forms) - 1)]
            try:
                return await self._until_there(topic, form, alone=True)
            except _Refused as refused:
                following = forms[number + 1].left_out if number + 1 < len(forms) else None
                self._say(
                    "worker.record_refused",
                    level="error",
                    topic=topic,
                    size=len(form.value or b""),
                    error=str(refused),
                    left_out=following,
                )
                if following is None:
                    if not insist:
                        raise RecordRefused(f"{topic}: {refused}") from refused
                    await asyncio.sleep(next(pauses))
        raise AssertionError("unreachable")

    async def _until_there(self, topic: str, form: Form, *, alone: bool) -> tuple[int, int]:
        for pause_s in pauses_s():
            try:
                return await self._sender.send(topic, form.key, form.value, form.headers, alone=alone)
            except KafkaException as error:
                reason: Any = error.args[0]
                if reason.fatal():
                    raise
                if reason.code() in REFUSED:
                    raise _Refused(reason.str()) from error
                self._say("worker.kafka_away", level="error", topic=topic, error=reason.str())
                await asyncio.sleep(pause_s)
        raise AssertionError("unreachable")


class _Refused(Exception):
    pass
