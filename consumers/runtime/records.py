"""The records a worker reads and writes: what a retry record's headers say, and how the next one's are made. No I/O.

Key, value and the headers of the source record are passed on untouched; ours are set, never appended, so that the
headers after the eighth attempt have the same names as after the first, and bounded sizes.

Headers are anybody's input. Ours are believed on the worker's own topics only (`Record.ours`), and there too each is
checked for what its column in Postgres holds: a number beyond it, or a NUL, would end the batch's transaction and with
it the process, again at each start.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

MAX_ERROR_BYTES = 1000
MAX_TARGET_BYTES = 500  # it is part of a primary key, and Postgres refuses index entries beyond 2,700 bytes
MAX_GENERATION = 1_000_000  # far from the end of an integer, as each reprocessing adds one
MAX_ATTEMPT = 2**15 - 1
MAX_PARTITION = 2**31 - 1
MAX_OFFSET = 2**63 - 1
MAX_REPLAY = 2**63 - 1
MAX_MS = 253_402_300_799_999  # the end of the year 9999, where datetime ends

_HEADER_BYTES = 60  # of each, besides its name and value

_TOPIC = re.compile(rb"[A-Za-z0-9._-]{1,249}")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

EVENT_ID = "x-event-id"
WORKER = "x-worker"
TARGET = "x-target"
GENERATION = "x-generation"
ATTEMPT = "x-attempt"
DUE_MS = "x-due-ms"
FIRST_FAILURE_MS = "x-first-failure-ms"
ORIGIN_TOPIC = "x-origin-topic"
ORIGIN_PARTITION = "x-origin-partition"
ORIGIN_OFFSET = "x-origin-offset"
ORIGIN_TIMESTAMP = "x-origin-timestamp"
ERROR_CLASS = "x-error-class"
ERROR_MESSAGE = "x-error-message"
OMITTED = "x-omitted"
"""On a dead letter that would not fit: what was left out of it. Its value is then where `x-origin-*` says."""

REPLAY_ID = "x-replay-id"
"""On a record that a replay sent: which one. For people; it stays on what becomes of the record."""
AGAIN = "x-again"
"""On a replayed record that is to be done again where it was done: the number of the replay. A replayed record has no
generation; what comes of it has one, and then that counts."""

OURS = frozenset(
    {
        EVENT_ID,
        WORKER,
        TARGET,
        GENERATION,
        ATTEMPT,
        DUE_MS,
        FIRST_FAILURE_MS,
        ORIGIN_TOPIC,
        ORIGIN_PARTITION,
        ORIGIN_OFFSET,
        ORIGIN_TIMESTAMP,
        ERROR_CLASS,
        ERROR_MESSAGE,
        OMITTED,
        AGAIN,
    }
)

Headers = Sequence[tuple[str, bytes | None]]
Unread = Callable[[], Headers | None]


class Record:
    """A record as it was read. `place` is the poll side's: where its finish is reported.

    `headers` may come unread: most records need none of theirs, and reading them is a tenth of the work.
    """

    __slots__ = (
        "_headers",
        "again",
        "headers_unreadable",
        "key",
        "offset",
        "ours",
        "partition",
        "pending",
        "place",
        "size",
        "timestamp_ms",
        "topic",
        "value",
    )

    def __init__(
        self,
        topic: str,
        partition: int,
        offset: int,
        timestamp_ms: int,
        key: bytes | None,
        value: bytes | None,
        headers: Headers | Unread,
        place: Any = None,
        ours: bool = False,
        header_bytes: int = 0,
    ) -> None:
        self.topic, self.partition, self.offset, self.timestamp_ms = topic, partition, offset, timestamp_ms
        self.key, self.value, self.place = key, value, place
        self._headers = headers
        self.headers_unreadable = False
        """The name of one is not UTF-8, and the client gives out none of them. Known once `headers` was asked for."""
        self.pending = 0
        """Deliveries of this record that are not finished."""
        self.ours = ours
        """Read from a topic that only this worker writes to: its `x-` headers are believed, within their bounds."""
        self.again = 0
        """The number of the replay that asks for it again; 0: none does."""
        self.size = len(value or b"") + len(key or b"") + header_bytes + 500
        """Bytes it holds in memory, roughly."""

    @property
    def headers(self) -> Headers:
        """Empty when they are unreadable."""
        if callable(self._headers):
            read = self._headers()
            self.headers_unreadable = read is None
            self._headers = read or ()
        return self._headers

    def with_value(self, value: bytes) -> Record:
        """The same with other bytes."""
        return Record(
            self.topic,
            self.partition,
            self.offset,
            self.timestamp_ms,
            self.key,
            value,
            self.headers,
            self.place,
            self.ours,
        )

    def header(self, name: str) -> str | None:
        """The last header of that name as text; None when there is none."""
        found = None
        for header, value in self.headers:
            if header == name and value is not None:
                found = value
        return found.decode("utf-8", "replace") if found is not None else None


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the record came from first."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class RetryMark:
    """What a retry record says about its delivery. A record without a generation is treated like a source record."""

    target: str
    generation: int
    attempt: int
    due_ms: int


def read_mark(record: Record) -> RetryMark | None:
    """The mark of a retry record; None when it carries none (a source record, a replay). ValueError, and no other
    error, when it is broken."""
    values = {name: value for name, value in record.headers if name in OURS and value is not None}
    if GENERATION not in values:
        return None
    target = values.get(TARGET, b"")
    if b"\x00" in target or len(target) > MAX_TARGET_BYTES:
        raise ValueError(f"header {TARGET} holds a NUL, or more than {MAX_TARGET_BYTES} bytes")
    return RetryMark(
        target=target.decode(),
        generation=_number(values, GENERATION, MAX_GENERATION),
        attempt=_number(values, ATTEMPT, MAX_ATTEMPT, least=1),
        due_ms=_number(values, DUE_MS, MAX_MS) if DUE_MS in values else 0,
    )


def read_again(record: Record) -> int:
    """The number of the replay that wants a finished delivery to run once more; 0 when none does. ValueError, and no
    other error, when it is broken."""
    values = {name: value for name, value in record.headers if name in OURS and value is not None}
    return _number(values, AGAIN, MAX_REPLAY, least=1) if AGAIN in values and GENERATION not in values else 0


def origin_of(record: Record) -> Origin:
    """The origin its headers name, if the record is of ours and they can be true; else the record's own place."""
    own = Origin(record.topic, record.partition, record.offset, min(max(record.timestamp_ms, 0), MAX_MS))
    if not record.ours:
        return own
    values = {name: value for name, value in record.headers if name in OURS and value is not None}
    topic = values.get(ORIGIN_TOPIC, b"")
    if _TOPIC.fullmatch(topic) is None:
        return own
    try:
        return Origin(
            topic.decode(),
            _number(values, ORIGIN_PARTITION, MAX_PARTITION),
            _number(values, ORIGIN_OFFSET, MAX_OFFSET),
            _number(values, ORIGIN_TIMESTAMP, MAX_MS) if ORIGIN_TIMESTAMP in values else 0,
        )
    except ValueError:
        return own


def marked_headers(
    headers: Headers,
    *,
    worker: str,
    origin: Origin,
    event_id: UUID | None = None,
    target: str = "",
    generation: int = 0,
    attempt: int = 1,
    due: datetime | None = None,
    first_failure: datetime | None = None,
    error_class: str | None = None,
    error: str | None = None,
) -> list[tuple[str, bytes | None]]:
    """`headers` with ours set: those of the source stay, ours of an earlier attempt are replaced."""
    ours: dict[str, str | None] = {
        EVENT_ID: str(event_id) if event_id else None,
        WORKER: worker,
        TARGET: target,
        GENERATION: str(generation),
        ATTEMPT: str(attempt),
        DUE_MS: str(to_ms(due)) if due else None,
        FIRST_FAILURE_MS: str(to_ms(first_failure)) if first_failure else None,
        ORIGIN_TOPIC: origin.topic,
        ORIGIN_PARTITION: str(origin.partition),
        ORIGIN_OFFSET: str(origin.offset),
        ORIGIN_TIMESTAMP: str(origin.timestamp_ms),
        ERROR_CLASS: cut(error_class) if error_class else None,
        ERROR_MESSAGE: cut(error) if error else None,
    }
    kept = [(name, value) for name, value in headers if name not in OURS]
    return kept + [(name, value.encode()) for name, value in ours.items() if value is not None]


def with_origin(record: Record) -> list[tuple[str, bytes | None]]:
    """Its headers to keep in Postgres: of ours only where it came from, as far as that is believed."""
    origin = origin_of(record)
    where = {
        ORIGIN_TOPIC: origin.topic,
        ORIGIN_PARTITION: origin.partition,
        ORIGIN_OFFSET: origin.offset,
        ORIGIN_TIMESTAMP: origin.timestamp_ms,
    }
    kept = [(name, value) for name, value in record.headers if name not in OURS]
    return kept + [(name, str(value).encode()) for name, value in where.items()]


def cut(text: str, limit: int = MAX_ERROR_BYTES) -> str:
    """`text` within `limit` bytes of UTF-8, without NUL and lone surrogates (Postgres takes neither)."""
    if len(text) <= limit and text.isascii() and "\x00" not in text:
        return text
    clean = text.replace("\x00", "").encode("utf-8", "replace")
    return clean.decode() if len(clean) <= limit else clean[: limit - 3].decode("utf-8", "ignore") + "..."


def bytes_of(headers: Headers) -> int:
    """What they hold in memory, roughly."""
    return sum(len(name) + len(value or b"") + _HEADER_BYTES for name, value in headers)


def to_ms(moment: datetime) -> int:
    """Whole milliseconds since the epoch."""
    return (moment - _EPOCH) // timedelta(milliseconds=1)


def moment(ms: int) -> datetime:
    """The moment so many milliseconds after the epoch, within what datetime can say: a producer may have made it up."""
    return _EPOCH + timedelta(milliseconds=min(max(ms, 0), MAX_MS))


def whole_ms(moment: datetime) -> datetime:
    """`moment` cut to what a header holds, so that a due time in Postgres and in a record are equal."""
    return _EPOCH + timedelta(milliseconds=to_ms(moment))


def headers_to_json(headers: Headers) -> list[list[str | None]]:
    """For keeping in Postgres as jsonb: names as they are, bytes in hexadecimal."""
    return [[name, None if value is None else value.hex()] for name, value in headers]


def headers_from_json(kept: Sequence[Sequence[str | None]]) -> list[tuple[str, bytes | None]]:
    """The reverse of `headers_to_json`."""
    return [(str(name), None if value is None else bytes.fromhex(value)) for name, value in kept]


def _number(values: Mapping[str, bytes], name: str, most: int, least: int = 0) -> int:
    text = values.get(name, b"")
    if not text.isdigit() or len(text) > 19 or not least <= int(text) <= most:
        raise ValueError(f"header {name} is {text[:40].decode('ascii', 'replace')!r}, no number of {least} to {most}")
    return int(text)
