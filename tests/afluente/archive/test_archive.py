"""The archive's files: what is read is what was written, and nothing is read from what was changed."""

import errno
import gzip
import json
import os
from datetime import UTC, date, datetime, timedelta
from uuid import UUID, uuid4

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afluente import archive
from afluente.archive import digest
from afluente.archive.format import Manifest
from schemas import Row
from tests.schemas.strategies import JSON_OBJECTS, TEXT

DAY = date(2026, 11, 29)
MIDNIGHT = datetime(2026, 11, 29, tzinfo=UTC)
MICROSECONDS = 24 * 3600 * 1_000_000
SHOP, OTHER = uuid4(), uuid4()


def row(seq, payload=b'{"n": 1}', *, at=None, organization=SHOP, event_id=None, metadata=b"{}"):
    at = MIDNIGHT + timedelta(hours=9, microseconds=seq) if at is None else at
    return Row(seq, event_id or uuid7(at), organization, "lead.won", "lead", UUID(int=seq + 1), payload, metadata, at)


def uuid7(at):
    milliseconds = int(at.timestamp() * 1000)
    return UUID(int=milliseconds << 80 | 7 << 76 | uuid4().int & ((1 << 76) - 1) & ~(3 << 62) | 2 << 62)


def data(directory, day=DAY):
    return directory / "event_log" / f"{day:%Y}" / f"{day:%m}" / f"{day:%d}.ndjson.gz"


def manifest_path(directory, day=DAY):
    return data(directory, day).with_name(f"{day:%d}.manifest.json")


def json_text(value, spaced):
    separators = (", ", ": ") if spaced else (",", ":")
    return json.dumps(value, ensure_ascii=False, separators=separators).encode()


OBJECTS = st.one_of(
    st.tuples(JSON_OBJECTS, st.booleans()).map(lambda both: json_text(*both)),
    # What looks like the seam of a line, and numbers that parsing would change.
    st.sampled_from(
        [
            b'{"a":1,"metadata":{"payload":{}}}',
            b'{"a": "\\",\\"metadata\\":{"}',
            b'{"n": 1.0, "m": 1.10, "big": 123456789012345678901234567890.5}',
        ]
    ),
)
ROWS = st.lists(
    st.builds(
        Row,
        st.integers(1, 2**63 - 1),
        st.uuids(),
        st.sampled_from([SHOP, OTHER]),
        st.sampled_from(["lead.won", "loyalty.points_earned"]),
        st.sampled_from(["lead", "contact"]),
        st.none() | st.uuids(),
        OBJECTS,
        OBJECTS,
        st.integers(0, MICROSECONDS - 1).map(lambda n: MIDNIGHT + timedelta(microseconds=n)),
    ),
    max_size=6,
    unique_by=lambda row: row.seq,
).map(sorted)


@settings(max_examples=40, deadline=None)
@given(ROWS)
def test_rows_are_read_as_they_were_written(tmp_path_factory, rows):
    directory = tmp_path_factory.mktemp("archive")
    manifest = archive.write(directory, DAY, iter(rows))
    assert list(archive.read(directory)) == rows
    assert archive.read_manifest(directory, DAY) == manifest
    assert (manifest.rows, manifest.size) == (len(rows), data(directory).stat().st_size)
    assert sum(sums.rows for hours in manifest.hours.values() for sums in hours.values()) == len(rows)
    for event in rows:
        assert manifest.hours[event.organization_id][event.created_at.hour].rows >= 1
    lines = gzip.decompress(data(directory).read_bytes()).splitlines()
    assert [orjson.loads(line)["id"] for line in lines] == [str(row.id) for row in rows]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(TEXT, st.integers(0, 23)), min_size=1, max_size=5), st.randoms())
def test_hash_of_an_hour_does_not_depend_on_the_order_of_its_rows(cases, chance):
    rows = [row(n, json_text({"t": text}, True), at=MIDNIGHT + timedelta(hours=h)) for n, (text, h) in enumerate(cases)]
    shuffled = chance.sample(rows, len(rows))
    assert sum(map(digest.of_row, rows)) % digest.MODULUS == sum(map(digest.of_row, shuffled)) % digest.MODULUS


def test_same_rows_are_the_same_bytes(tmp_path):
    rows = [row(n) for n in range(100)]
    for name in ("one", "two"):
        archive.write(tmp_path / name, DAY, rows)
    assert data(tmp_path / "one").read_bytes() == data(tmp_path / "two").read_bytes()
    assert manifest_path(tmp_path / "one").read_bytes() == manifest_path(tmp_path / "two").read_bytes()


@pytest.mark.parametrize("path", [data, manifest_path], ids=["file", "manifest"])
def test_any_byte_that_was_changed_is_noticed(tmp_path, path):
    archive.write(tmp_path, DAY, [row(n) for n in range(3)])
    whole = path(tmp_path).read_bytes()
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 8
        path(tmp_path).write_bytes(changed)
        with pytest.raises(archive.Altered):
            next(archive.read(tmp_path))
    path(tmp_path).write_bytes(whole)
    assert len(list(archive.read(tmp_path))) == 3


def test_what_is_wrong_is_said(tmp_path):
    archive.write(tmp_path, DAY, [row(n) for n in range(3)])
    whole = data(tmp_path).read_bytes()
    data(tmp_path).write_bytes(whole[:-10])
    for look in (lambda: next(archive.read(tmp_path)), lambda: archive.read_manifest(tmp_path, DAY)):
        with pytest.raises(archive.Altered, match=rf"is truncated: it has {len(whole) - 10} bytes of the {len(whole)}"):
            look()
    data(tmp_path).write_bytes(whole + b"x")
    with pytest.raises(archive.Altered, match="1 more than"):
        next(archive.read(tmp_path))
    data(tmp_path).write_bytes(whole)
    manifest = manifest_path(tmp_path).read_bytes()
    manifest_path(tmp_path).unlink()
    with pytest.raises(archive.Incomplete, match=r"29\.manifest\.json is missing"):
        next(archive.read(tmp_path))
    manifest_path(tmp_path).write_bytes(manifest)
    data(tmp_path).unlink()
    with pytest.raises(archive.Incomplete, match=r"29\.ndjson\.gz is missing"):
        next(archive.read(tmp_path))


def test_reading_is_by_time_and_does_not_skip_a_day_in_silence(tmp_path):
    for n, day in enumerate([DAY, DAY + timedelta(days=1), DAY + timedelta(days=3)]):
        at = datetime(day.year, day.month, day.day, 23, 59, 59, 999_999, tzinfo=UTC)
        archive.write(tmp_path, day, [row(2 * n, at=at - timedelta(hours=1)), row(2 * n + 1, at=at)])
    assert archive.days(tmp_path) == [DAY, DAY + timedelta(days=1), DAY + timedelta(days=3)]
    upto = MIDNIGHT + timedelta(days=1)

    def seqs(**bounds):
        return [r.seq for r in archive.read(tmp_path, **bounds)]

    assert seqs(until=upto) == [0, 1]
    assert seqs(until=upto - timedelta(microseconds=1)) == [0]
    assert seqs(since=upto - timedelta(microseconds=1), until=upto + timedelta(days=1)) == [1, 2, 3]
    assert seqs(since=MIDNIGHT + timedelta(days=3), until=MIDNIGHT + timedelta(days=99)) == [4, 5]
    for bounds in ({}, {"since": MIDNIGHT + timedelta(days=2)}):
        with pytest.raises(archive.MissingDay, match="2026-12-01"):
            seqs(**bounds)
    assert list(archive.read(tmp_path / "nothing")) == []


def test_events_are_found_by_their_ids(tmp_path):
    days = [DAY + timedelta(days=n) for n in range(4)]
    rows = [row(n, at=MIDNIGHT + timedelta(days=n, hours=3)) for n in range(4)]
    deferred = row(9, at=MIDNIGHT + timedelta(days=3, hours=4), event_id=uuid7(MIDNIGHT))  # emitted three days before
    old_style = row(10, at=MIDNIGHT + timedelta(days=3, hours=5), event_id=uuid4())
    for day, event in zip(days, rows, strict=True):
        archive.write(tmp_path, day, [event, deferred, old_style] if day == days[-1] else [event])
    wanted = [rows[2].id, deferred.id, old_style.id, uuid4()]
    assert list(archive.find(tmp_path, wanted)) == [rows[2], deferred, old_style]
    data(tmp_path, days[0]).write_bytes(b"")
    assert list(archive.find(tmp_path, [rows[2].id])) == [rows[2]]  # days before it are not even opened


def test_what_is_archived_is_not_overwritten(tmp_path):
    first = archive.write(tmp_path, DAY, [row(1)])
    before = data(tmp_path).stat().st_mtime_ns
    again = [row(1, event_id=next(archive.read(tmp_path)).id)]
    assert archive.write(tmp_path, DAY, again) == first
    assert data(tmp_path).stat().st_mtime_ns == before
    with pytest.raises(archive.Occupied):
        archive.write(tmp_path, DAY, [*again, row(2)])
    assert list(archive.read(tmp_path)) == again


@pytest.mark.parametrize(
    "rows",
    [
        [row(2), row(1)],
        [row(1), row(1)],
        [row(1, at=MIDNIGHT - timedelta(microseconds=1))],
        [row(1, b'{"a":\n1}')],
        [row(1, b"[]")],
        [row(1, at=datetime(2026, 11, 29, 1))],
    ],
    ids=["descending", "twice", "of another day", "two lines", "no object", "naive"],
)
def test_rows_that_do_not_belong_there_are_refused(tmp_path, rows):
    with pytest.raises(archive.NotArchivable):
        archive.write(tmp_path, DAY, rows)
    assert archive.days(tmp_path) == []
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_erasure_rewrites_a_day(tmp_path):
    rows = [row(n) for n in range(4)]
    archive.write(tmp_path, DAY, rows)
    cleaned = rows[1]._replace(payload=b"{}")
    changed = archive.rewrite(
        tmp_path, DAY, lambda r: None if r.id == rows[0].id else cleaned if r.id == cleaned.id else r
    )
    assert list(archive.read(tmp_path)) == [cleaned, rows[2], rows[3]]
    assert changed == archive.read_manifest(tmp_path, DAY)
    assert changed.hours[SHOP][9].rows == 3
    total = sum(map(digest.of_row, [cleaned, rows[2], rows[3]])) % digest.MODULUS
    assert changed.hours[SHOP][9].total == total
    inode = data(tmp_path).stat().st_ino
    assert archive.rewrite(tmp_path, DAY, lambda r: r) == changed
    assert data(tmp_path).stat().st_ino == inode
    with pytest.raises(archive.MissingDay):
        archive.rewrite(tmp_path, DAY + timedelta(days=1), lambda r: r)


@pytest.mark.parametrize("operation", ["write", "rewrite"])
def test_a_day_is_whole_wherever_its_writer_is_killed(tmp_path, monkeypatch, operation):
    """Fails at the first, second, third ... rename: what a reader then finds is the old day or the new one."""
    rows = [row(n) for n in range(3)]
    old, new = (rows, rows[1:]) if operation == "rewrite" else ([], rows)
    rename, seen = os.replace, []
    for survives in range(9):
        directory = tmp_path / str(survives)
        if operation == "rewrite":
            archive.write(directory, DAY, rows)
        left = survives

        def killed(source, target):
            nonlocal left
            if left == 0:
                raise OSError(errno.EIO, "killed here")
            left -= 1
            rename(source, target)

        def act(directory=directory):
            if operation == "write":
                return archive.write(directory, DAY, rows)
            return archive.rewrite(directory, DAY, lambda r: None if r.id == rows[0].id else r)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", killed)
            try:
                act()
                finished = True
            except OSError:
                finished = False
        try:
            found = list(archive.read(directory))
        except archive.Incomplete:
            found = []  # a new day whose manifest is not there yet: said, and nothing is read
        assert found == (new if finished else found)
        assert found in (old, new)
        seen.append(found)
        data(directory).with_name(".29.0badc0de.tmp").write_bytes(b"left by a SIGKILL")
        act()
        assert list(archive.read(directory)) == new
        assert archive.read_manifest(directory, DAY).rows == len(new)
        assert len([path for path in directory.rglob("*") if path.is_file()]) == 2
        if finished:
            break
    assert finished
    assert seen[0] == old
    assert survives >= 2


def test_manifest_of_another_day_is_not_believed(tmp_path):
    archive.write(tmp_path, DAY, [row(1)])
    other = data(tmp_path).with_name("28.manifest.json")
    other.write_bytes(manifest_path(tmp_path).read_bytes())
    data(tmp_path).with_name("28.ndjson.gz").write_bytes(data(tmp_path).read_bytes())
    with pytest.raises(archive.Altered, match="is that of 2026-11-29"):
        next(archive.read(tmp_path))


def test_manifest_of_a_newer_format_is_refused(tmp_path):
    archive.write(tmp_path, DAY, [row(1)])
    text = manifest_path(tmp_path).read_bytes().replace(b'"format":1', b'"format":2')
    with pytest.raises(ValueError, match="has format 2, this release reads 1"):
        Manifest.parse(text)


def test_memory_does_not_grow_with_the_rows(tmp_path):
    import tracemalloc

    padding = b'{"padding": "' + b"x" * 1_000 + b'"}'
    tracemalloc.start()
    try:
        archive.write(tmp_path, DAY, (row(n, padding) for n in range(3_000)))
        count = sum(1 for _ in archive.read(tmp_path))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 3_000
    assert peak < 1_500_000  # the rows are 3 MB
