"""Record batches of which a header name may be any bytes.

aiokafka takes header names for UTF-8 and Kafka takes any bytes, from anybody who may produce: one such record is an
error out of the fetch, at the same place at every start, with everything behind it. Here a batch that aiokafka cannot
read is read again by a parser of ours, from the same bytes of the same fetch, so that nothing has to be sought, and
everything else about it (its place in a transaction, its checksum) has been decided by aiokafka as always. Other
batches are not touched.

What must stay true: each record of a batch is given once, in order, with its own offset, key and value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from aiokafka.consumer import fetcher
from aiokafka.errors import CorruptRecordException
from aiokafka.record.default_records import DefaultRecordBatch, _DefaultRecordBatchPy, _DefaultRecordPy
from aiokafka.record.memory_records import MemoryRecords
from aiokafka.record.util import decode_varint_py as decode_varint  # the one in C reads on behind the buffer's end

from streams.summaries.sink import UnreadableHeader

# Where a batch says how many bytes follow its length.
_LENGTH_AT, _LENGTH_ENDS = 8, 12


def install() -> None:
    """Make aiokafka's fetcher read with this. For the whole process; a second time changes nothing."""
    fetcher.MemoryRecords = TolerantRecords


class TolerantRecords:
    """The batches in the answer to a fetch, as aiokafka's own class gives them."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._records = MemoryRecords(data)
        self._given = 0

    def size_in_bytes(self) -> int:
        return int(self._records.size_in_bytes())

    def has_next(self) -> bool:
        return bool(self._records.has_next())

    def next_batch(self) -> Any:
        batch: Any = self._records.next_batch()
        self._given += 1
        # aiokafka takes the one record of a control batch by next(), and older formats have no headers.
        if not isinstance(batch, DefaultRecordBatch) or batch.is_control_batch:
            return batch
        return TolerantBatch(batch, self._data, self._given - 1)


class TolerantBatch:
    """A batch as aiokafka has it, but for its records."""

    __slots__ = ("_batch", "_data", "_number")

    def __init__(self, batch: Any, data: bytes, number: int) -> None:
        """`number`: how many batches are before it in the data."""
        self._batch = batch
        self._data = data
        self._number = number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)

    def __iter__(self) -> Iterator[Any]:
        given = 0
        try:
            for record in self._batch:
                yield record
                given += 1
        except (UnicodeDecodeError, CorruptRecordException) as error:
            # aiokafka's parser in Python hides the one in the other.
            if not isinstance(error if isinstance(error, UnicodeDecodeError) else error.__cause__, UnicodeDecodeError):
                raise
            yield from read_again(self._bytes(), skip=given)

    def _bytes(self) -> memoryview:
        data = memoryview(self._data)
        start = 0
        for _ in range(self._number):
            start = self._end(data, start)
        return data[start : self._end(data, start)]

    @staticmethod
    def _end(data: memoryview, start: int) -> int:
        return start + _LENGTH_ENDS + int.from_bytes(data[start + _LENGTH_AT : start + _LENGTH_ENDS], "big")


def read_again(data: memoryview, *, skip: int) -> Iterator[_DefaultRecordPy]:
    """The records of one batch but for the first `skip`. When a name is not UTF-8, all headers of its record are
    `UnreadableHeader`s, those bytes of the name written as \\xff. CorruptRecordException when the batch is not whole.
    """
    batch = _DefaultRecordBatchPy(data)
    iter(batch)  # decompresses
    buffer, at = batch._buffer, batch._pos
    for number in range(batch._num_records):
        try:
            record, at = _record(batch, buffer, at)
        except (ValueError, IndexError) as error:
            raise CorruptRecordException(f"Found invalid record structure: {error!r}") from error
        if number >= skip:
            yield record


def _record(batch: _DefaultRecordBatchPy, buffer: bytearray, at: int) -> tuple[_DefaultRecordPy, int]:
    """The record that begins at `at`, and where the next one does. See the layout in aiokafka's default_records."""
    length, at = decode_varint(buffer, at)
    end = at + length
    at += 1  # attributes, of which there are none
    milliseconds, at = decode_varint(buffer, at)
    offset, at = decode_varint(buffer, at)
    key, at = _content(buffer, at)
    value, at = _content(buffer, at)
    count, at = decode_varint(buffer, at)
    if count < 0:
        raise ValueError(f"{count} headers")
    names: list[bytes] = []
    contents: list[bytes | None] = []
    for _ in range(count):
        name, at = _content(buffer, at)
        content, at = _content(buffer, at)
        names.append(name or b"")
        contents.append(content)
    if at != end:
        raise ValueError(f"the record ends at {at}, not {end}")
    return (
        _DefaultRecordPy(
            batch.base_offset + offset,
            batch.max_timestamp if batch.timestamp_type else batch.first_timestamp + milliseconds,
            batch.timestamp_type,
            key,
            value,
            _headers(names, contents),
        ),
        end,
    )


def _content(buffer: bytearray, at: int) -> tuple[bytes | None, int]:
    length, at = decode_varint(buffer, at)
    if length < 0:
        return None, at
    return bytes(buffer[at : at + length]), at + length


def _headers(names: list[bytes], contents: list[bytes | None]) -> list[tuple[str, bytes | None]]:
    try:
        return [(name.decode(), content) for name, content in zip(names, contents, strict=True)]
    except UnicodeDecodeError:
        return [
            UnreadableHeader(name.decode("utf-8", "backslashreplace"), content)
            for name, content in zip(names, contents, strict=True)
        ]
