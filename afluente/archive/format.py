"""A line and a manifest: what their bytes are. No I/O.

A line is one row of `event_log` as a JSON object, its texts as they were:

    {"seq":7,"id":"…","organization_id":"…","event_type":"lead.won","entity_kind":"lead","entity_id":"…" or null,
     "created_at":"2026-11-29T12:00:00.000001+00:00","sizes":[21,2],"payload":{…},"metadata":{…}}

`sizes` are the bytes of payload and metadata, so that a reader cuts them out and need not parse them: parsing would
change how numbers are written. The manifest is JSON with sorted keys; `self` is the sha256 of all the rest of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from hashlib import sha256
from typing import Any
from uuid import UUID

import orjson

from afluente.archive import digest
from afluente.archive.errors import NotArchivable
from schemas import Row

FORMAT = 1
TABLE = "event_log"

_PAYLOAD, _METADATA = b',"payload":', b',"metadata":'


@dataclass(slots=True)
class Sum:
    """How many events, and the sum of their hashes modulo 2**128."""

    rows: int = 0
    total: int = 0

    def add(self, hash_: int) -> None:
        self.rows += 1
        self.total = (self.total + hash_) % digest.MODULUS

    @property
    def text(self) -> str:
        return f"{self.total:032x}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a day's file holds. `size` (in bytes) and `sha256` are of the file as it lies there, `content` of the lines
    before compression.

    `hours`: organization -> hour of the day (0-23, UTC) -> its rows and their hash, as `afluente relay verify` adds it
    up. `first_seq` and `last_seq` are None for a day without events.
    """

    day: date
    rows: int
    size: int
    sha256: str
    content: str
    first_seq: int | None
    last_seq: int | None
    hours: Mapping[UUID, Mapping[int, Sum]] = field(default_factory=dict)

    @property
    def file(self) -> str:
        return f"{self.day:%d}.ndjson.gz"

    def same_content(self, other: Manifest) -> bool:
        """The same rows, whoever compressed them."""
        return (self.day, self.rows, self.content) == (other.day, other.rows, other.content)

    def format(self) -> bytes:
        data: dict[str, Any] = {
            "format": FORMAT,
            "table": TABLE,
            "day": self.day.isoformat(),
            "file": self.file,
            "rows": self.rows,
            "bytes": self.size,
            "sha256": self.sha256,
            "content_sha256": self.content,
            "first_seq": self.first_seq,
            "last_seq": self.last_seq,
            "hours": {
                str(organization): {f"{hour:02d}": [sums.rows, sums.text] for hour, sums in hours.items()}
                for organization, hours in self.hours.items()
            },
        }
        return _dumps(data | {"self": sha256(_dumps(data)).hexdigest()})

    @classmethod
    def parse(cls, text: bytes) -> Manifest:
        """Raises ValueError saying what is wrong, for any bytes that `format` did not give."""
        try:
            data = json.loads(text)
            stated = data.pop("self")
            if data["format"] != FORMAT:
                raise ValueError(f"has format {data['format']!r}, this release reads {FORMAT}")
            if sha256(_dumps(data)).hexdigest() != stated or _dumps(data | {"self": stated}) != text:
                raise ValueError("was altered: it is not what its own hash says")
            return cls(
                day=date.fromisoformat(data["day"]),
                rows=data["rows"],
                size=data["bytes"],
                sha256=data["sha256"],
                content=data["content_sha256"],
                first_seq=data["first_seq"],
                last_seq=data["last_seq"],
                hours={
                    UUID(organization): {int(hour): Sum(rows, int(total, 16)) for hour, (rows, total) in hours.items()}
                    for organization, hours in data["hours"].items()
                },
            )
        except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"is no manifest: {type(error).__name__}: {error}") from error


def line_of(row: Row) -> bytes:
    """The row's line, with its end. Raises NotArchivable for a row that `event_log` could not hold."""
    if row.created_at.tzinfo is None:
        raise NotArchivable(f"event {row.id}: created_at has no time zone")
    for name, text in (("payload", row.payload), ("metadata", row.metadata)):
        if not (text[:1] == b"{" and text[-1:] == b"}") or b"\n" in text or b"\r" in text:
            raise NotArchivable(f"event {row.id}: {name} is not a JSON object on one line, as jsonb gives it")
    head = orjson.dumps(
        {
            "seq": row.seq,
            "id": str(row.id),
            "organization_id": str(row.organization_id),
            "event_type": row.event_type,
            "entity_kind": row.entity_kind,
            "entity_id": None if row.entity_id is None else str(row.entity_id),
            "created_at": row.created_at.astimezone(UTC).isoformat(timespec="microseconds"),
            "sizes": [len(row.payload), len(row.metadata)],
        }
    )
    return b"".join((head[:-1], _PAYLOAD, row.payload, _METADATA, row.metadata, b"}\n"))


def row_of(line: bytes) -> Row:
    """The row that a line holds. Raises ValueError for any line that `line_of` does not give."""
    try:
        # Quotes inside a text are escaped, so the first of these is the key.
        start = line.index(_PAYLOAD)
        head = orjson.loads(line[:start] + b"}")
        payload_size, metadata_size = head["sizes"]
        start += len(_PAYLOAD)
        middle = start + payload_size
        end = middle + len(_METADATA) + metadata_size
        if line[middle : middle + len(_METADATA)] != _METADATA or line[end:] != b"}\n":
            raise ValueError("payload and metadata are not as long as it says")
        entity_id = head["entity_id"]
        return Row(
            head["seq"],
            UUID(head["id"]),
            UUID(head["organization_id"]),
            head["event_type"],
            head["entity_kind"],
            None if entity_id is None else UUID(entity_id),
            line[start:middle],
            line[end - metadata_size : end],
            datetime.fromisoformat(head["created_at"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a row: {type(error).__name__}: {error}") from error


def id_of(line: bytes) -> bytes:
    """The event id in a line, as text, without reading the rest."""
    start = line.index(b'"id":"') + 6
    return line[start : start + 36]


class Contents:
    """Adds up the rows of one day as they are written, and refuses those that are not of it."""

    def __init__(self, day: date) -> None:
        self.day = day
        self.rows = 0
        self.first_seq: int | None = None
        self.last_seq: int | None = None
        self.hours: dict[UUID, dict[int, Sum]] = {}
        self._lines = sha256()

    def take(self, row: Row) -> bytes:
        """The row's line. Raises NotArchivable."""
        line = line_of(row)
        moment = row.created_at.astimezone(UTC)
        if moment.date() != self.day:
            raise NotArchivable(f"event {row.id} was created {moment.isoformat()}, which is not on {self.day}")
        if self.last_seq is not None and row.seq <= self.last_seq:
            raise NotArchivable(f"event {row.id}: seq {row.seq} comes after {self.last_seq}; rows come by seq")
        self.first_seq = row.seq if self.first_seq is None else self.first_seq
        self.last_seq = row.seq
        self.rows += 1
        self.hours.setdefault(row.organization_id, {}).setdefault(moment.hour, Sum()).add(digest.of_row(row))
        self._lines.update(line)
        return line

    def manifest(self, size: int, file_hash: str) -> Manifest:
        """`size`, `file_hash`: of the file that the lines became."""
        return Manifest(
            self.day, self.rows, size, file_hash, self._lines.hexdigest(), self.first_seq, self.last_seq, self.hours
        )


def _dumps(data: Mapping[str, Any]) -> bytes:
    return (json.dumps(data, sort_keys=True, separators=(",", ":")) + "\n").encode()
