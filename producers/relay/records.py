"""The record that a row becomes: on its family's topic, or on `relay.dead-letter` with the reason. No I/O.

What must stay true: every row becomes exactly one record, whatever is in it, none larger than its topic takes.
A dead letter's value is JSON:

    {"reason", "error_class", "event_id", "seq", "created_at", "organization_id", "event_type",
     "row": {all columns of the event} or null, "reference": null or {"table", "id", "created_at"}}

`row` is null when it would not fit: then `reference` says where the event still is. Keyed by the organization, like the
event itself; headers `x-event-id`, `x-error-class`, `x-error-message` beside the event's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, cast

import orjson

import schemas
from schemas import RawRow, Row, codec
from schemas.topics import SPREAD, Topics, partition_of

# Of a record batch around one record: 61 bytes of batch header, lengths and deltas of the record (73 measured without
# headers), and room for varints.
BATCH_OVERHEAD = 120
HEADER_OVERHEAD = 10
HEADERS_AT_MOST = 1_000  # names, overhead, and what is the same in every header; measured: 400
REASON_LENGTH = 1_000
BY_KEY = -1  # leave the partition to the client's partitioner, which is murmur2 as everywhere


class Record(NamedTuple):
    """One record to produce. `dead` marks a dead letter; `partition` is BY_KEY but for a spread organization."""

    topic: str
    key: bytes
    value: bytes
    headers: list[tuple[str, bytes]]
    partition: int
    made_of: Row | RawRow
    dead: bool = False

    @property
    def seq(self) -> int:
        return self.made_of.seq

    @property
    def row(self) -> Row:
        """What it was made of; not for every record, as of raw rows it is made when asked for."""
        return self.made_of.row() if isinstance(self.made_of, RawRow) else self.made_of

    @property
    def size(self) -> int:
        """Upper bound of the bytes of a batch that holds only this record, uncompressed."""
        headers = sum(len(name.encode()) + len(value) + HEADER_OVERHEAD for name, value in self.headers)
        return len(self.key) + len(self.value) + headers + BATCH_OVERHEAD


_record = cast(Callable[[tuple[object, ...]], Record], partial(tuple.__new__, Record))  # with no Python frame


def record_of(
    row: Row | RawRow,
    topics: Topics,
    limits: Mapping[str, int],
    partitions: Mapping[str, int],
    refused: Mapping[int, str] | None = None,
) -> Record:
    """The record of `row`. `limits`: max.message.bytes by topic; `refused`: seq -> why the broker would not have it."""
    if refused and (reason := refused.get(row.seq)) is not None:
        return dead_letter(row, topics, limits, "RefusedByBroker", reason)
    try:
        topic = topics.event(row.event_type.decode() if isinstance(row, RawRow) else row.event_type)
        key, value, headers = codec.parts(row)
        partition = BY_KEY
        if SPREAD and (organization := key.decode()) in SPREAD:
            entity_id = row.row().entity_id if isinstance(row, RawRow) else row.entity_id
            partition = partition_of(organization, partitions[topic], entity_id)
        record = _record((topic, key, value, headers, partition, row, False))
    except MemoryError:
        raise
    except Exception as error:
        # EncodeError is what is expected. Anything else is the codec's fault with this row; the others must go on.
        return dead_letter(row, topics, limits, type(error).__name__, str(error))
    # Whatever a header says is in the value too: most records need no counting.
    if 2 * len(value) + HEADERS_AT_MOST > limits[topic] and (size := record.size) > limits[topic]:
        return dead_letter(row, topics, limits, "TooLarge", f"{size} bytes as a record; {topic} takes {limits[topic]}")
    return record


def dead_letter(row: Row | RawRow, topics: Topics, limits: Mapping[str, int], error_class: str, reason: str) -> Record:
    """The dead letter of `row`, whole when it fits, else with a reference to the table."""
    row = row.row() if isinstance(row, RawRow) else row
    reason = reason[:REASON_LENGTH].encode("utf-8", "replace").decode()
    topic, key = topics.relay_dead_letter, str(row.organization_id).encode()
    headers = [
        *_headers(row),
        ("x-event-id", str(row.id).encode()),
        ("x-seq", str(row.seq).encode()),
        ("x-error-class", error_class.encode()),
        ("x-error-message", reason.encode()),
    ]
    about = {
        "reason": reason,
        "error_class": error_class,
        "event_id": str(row.id),
        "seq": row.seq,
        "created_at": row.created_at,
        "organization_id": str(row.organization_id),
        "event_type": row.event_type,
    }
    whole = {
        "seq": row.seq,
        "id": str(row.id),
        "organization_id": str(row.organization_id),
        "event_type": row.event_type,
        "entity_kind": row.entity_kind,
        "entity_id": None if row.entity_id is None else str(row.entity_id),
        "payload": orjson.Fragment(row.payload),
        "metadata": orjson.Fragment(row.metadata),
        "created_at": row.created_at,
    }
    value = orjson.dumps({**about, "row": whole, "reference": None})
    record = Record(topic, key, value, headers, BY_KEY, row, dead=True)
    if record.size <= limits[topic]:
        return record
    reference = {"table": "event_log", "id": str(row.id), "created_at": row.created_at}
    return record._replace(value=orjson.dumps({**about, "row": None, "reference": reference}))


def _headers(row: Row) -> list[tuple[str, bytes]]:
    try:
        return schemas.headers(row)
    except Exception:
        return []  # the row is a dead letter already: what it may hold in metadata must not keep it from getting there
