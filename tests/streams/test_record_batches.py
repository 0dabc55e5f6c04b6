"""Batches with header names of any bytes: each record once, with what it has. Other batches come from aiokafka."""

from typing import Any

import pytest
from aiokafka.errors import CorruptRecordException
from aiokafka.record import memory_records
from aiokafka.record.default_records import _DefaultRecordBatchPy
from aiokafka.record.memory_records import MemoryRecords, _MemoryRecordsPy

from streams import record_batches
from streams.record_batches import TolerantRecords
from streams.summaries.sink import UnreadableHeader
from tests.fixtures.raw_records import BAD_NAME, append, builder

GOOD: list[Any] = [
    (b"k", b"v" * 200, [("seq", b"1"), ("ce_id", None), ("", b""), ("nó", b"\xff")]),
    (None, b"w", []),
    (b"k", None, []),
]
BAD: Any = (b"k", b"poison", [("seq", b"1"), (BAD_NAME, b"x"), (b"a\\", None)])
BAD_READ = [("seq", b"1"), (r"\xff\xfe\x80", b"x"), ("a\\", None)]
CODECS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}


def batch(records, *, first=0, compression=0):
    """The bytes of a batch, as a broker holds it from offset `first` on."""
    built = builder(compression=compression)
    for offset, record in enumerate(records):
        append(built, offset, *record)
    data = built.build()
    data[:8] = first.to_bytes(8, "big")
    return bytes(data)


def read(records):
    found = []
    while records.has_next():
        for record in records.next_batch():
            found.append((record.offset, record.key, record.value, record.headers))
            assert record.timestamp > 1_500_000_000_000
            assert record.checksum is None
    return found


@pytest.fixture(params=["as installed", "written in Python"])
def parser(request, monkeypatch):
    if request.param == "written in Python":
        monkeypatch.setattr(record_batches, "MemoryRecords", _MemoryRecordsPy)
        for module in (record_batches, memory_records):
            monkeypatch.setattr(module, "DefaultRecordBatch", _DefaultRecordBatchPy)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("at", [0, 2, 5])
def test_each_record_is_given_once_and_the_bad_one_is_marked(parser, codec, at):
    records = [*GOOD, *GOOD]
    records[at:at] = [BAD]
    data = (
        batch(GOOD, compression=CODECS[codec])
        + batch(records, first=10, compression=CODECS[codec])
        + batch(GOOD, first=50)
    )
    found = read(TolerantRecords(data))
    assert [offset for offset, *_ in found] == [0, 1, 2, *range(10, 17), 50, 51, 52]
    for (_, *given), (key, value, headers) in zip(found, [*GOOD, *records, *GOOD], strict=True):
        assert given == [key, value, BAD_READ if value == b"poison" else headers]
    marked = [offset for offset, _, _, headers in found if any(type(h) is UnreadableHeader for h in headers)]
    assert marked == [10 + at]
    assert all(type(header) is UnreadableHeader for header in found[3 + at][3])


def test_a_batch_of_nothing_but_bad_ones(parser):
    assert [headers for *_, headers in read(TolerantRecords(batch([BAD] * 50)))] == [BAD_READ] * 50


def test_good_batches_are_as_aiokafka_reads_them():
    many = [(b"k", b"v", [(f"h{n}", b"v" * 10) for n in range(20_000)])]
    data = batch(GOOD) + batch(many, first=9)
    assert read(TolerantRecords(data)) == read(MemoryRecords(data))
    assert TolerantRecords(data).size_in_bytes() == len(data)
    assert not TolerantRecords(data[:20]).has_next()


@pytest.mark.parametrize("count", [0x7E, 0x7F])  # 63 and -64
def test_a_broken_batch_stays_broken(parser, count):
    data = bytearray(batch([BAD, *GOOD]))
    data[-1] = count  # so many headers the last record is to have, and has none
    with pytest.raises(CorruptRecordException):
        read(TolerantRecords(bytes(data)))


def test_the_rest_of_a_batch_is_asked_of_aiokafka():
    made = TolerantRecords(batch([BAD], first=7)).next_batch()
    assert (made.base_offset, made.next_offset, made.is_transactional, made.validate_crc()) == (7, 8, False, True)
