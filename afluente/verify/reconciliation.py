"""The three comparisons, in one snapshot of the database taken after the committed offsets and before the topics are
read.

That order makes a running system look right: whatever was behind a committed offset then has its rows in the
snapshot, and whatever is in the snapshot reaches the topics while they are read (for rows that are on their way there
is a little patience, `wait_s`).

1. published: the rows of event_log are the records with a `seq` and the dead letters of the relay, each exactly once,
each record after the one that caused it. Records without a `seq` were produced directly and are counted apart. 2.
deliveries, for each worker: the events published for it are those with delivery rows and those still to come (at or
beyond its committed offset, parked, or unreadable and kept as such); what is unfinished has something that brings it
back; what is dead has its record in the dead-letter topic, and the reverse. 3. summaries: a recount of contact_events
up to the stream application's fence is what the live generation holds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID

import psycopg
from confluent_kafka import Message
from confluent_kafka.admin import AdminClient
from psycopg.rows import dict_row

import schemas
import sql
from afluente import kafka, postgres
from afluente.kafka.reading import TopicReader, committed_offsets, headers_of, retention
from afluente.settings import KafkaSettings
from afluente.verify.report import Check, Finding, Report
from schemas.topics import Topics

CHECKS = ("published", "deliveries", "summaries")

# Brokers' clocks may differ by so much before an event looks older than its cause on another topic.
CLOCK_TOLERANCE = timedelta(seconds=1)
_ALWAYS = datetime.min.replace(tzinfo=UTC)
_MAX_BIGINT = 2**63 - 1

_SQL = sql.queries("verify")
_Connection = psycopg.Connection[dict[str, Any]]


def reconcile(
    settings: KafkaSettings, dsn: str, *, now: datetime, wait_s: float = 5.0, checks: Sequence[str] = CHECKS
) -> Report:
    """Compare, and report. ``wait_s``: how long to wait for rows that are committed and not yet in the topics.

    Reads everything the topics hold. Raises Unavailable, KafkaException or psycopg.OperationalError when a dependency
    is away.
    """
    topics = Topics(settings.topic_prefix)
    admin = kafka.admin(settings)
    report = Report()
    with (
        TopicReader(settings) as reader,
        postgres.connect(dsn, application_name="afluente-verify", autocommit=True) as plain,
        postgres.connect(dsn, application_name="afluente-verify") as conn,
    ):
        # 1. The committed offsets, before the snapshot.
        workers = [row[0] for row in plain.execute(_SQL["workers"]).fetchall()]
        committed = {worker: committed_offsets(admin, settings.group_id(worker)) for worker in workers}
        # 2. The snapshot, with places for what the topics hold.
        conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        tables = _Tables(conn)
        tables.begin()
        # 3. The topics.
        families = reader.existing(topics.families())
        kept_since = _kept_since(admin, families, now)
        letters: list[Message] = []
        tables.copy_records(
            _aside(reader.to_the_end([*families, *reader.existing([topics.relay_dead_letter])]), topics, letters)
        )
        tables.copy_relay_letters(letters)
        if unpublished := tables.unpublished(kept_since):
            letters.clear()
            tables.copy_records(_until_found(_aside(reader.onward(wait_s), topics, letters), letters, unpublished))
            tables.copy_relay_letters(letters)
        for worker in workers:
            own = _worker_topics(topics, worker)
            there = reader.existing(own)
            tables.copy_worker_records(worker, own, reader.to_the_end(there))
        tables.copy_committed(committed)
        tables.index()
        # 4. The comparisons.
        if "published" in checks:
            report.checks.append(_published(tables, plain, kept_since))
        if "deliveries" in checks:
            for worker in workers:
                own_letters = reader.existing([topics.dead_letter(worker)])
                report.checks.append(_deliveries(tables, plain, worker, _kept_since(admin, own_letters, now)))
        if "summaries" in checks:
            report.checks.append(_summaries(tables, kept_since))
        conn.rollback()
    return report


def _published(tables: _Tables, plain: psycopg.Connection[Any], kept_since: datetime) -> Check:
    check = Check("published", figures=tables.one("published_counts", kept_since=kept_since))
    check.figures["causes_followed"] = tables.one("caused_pairs")["count"]
    check.findings += tables.findings("missing", "never_published", kept_since=kept_since)
    check.findings += tables.findings("duplicates", "published_twice")
    unknown = tables.all("unknown")
    # The snapshot is older than the topics: what was committed since is no finding.
    since = {row[0] for row in plain.execute(_SQL["committed_since"], {"seqs": [row["seq"] for row in unknown]})}
    check.findings += [
        Finding("record_without_row", str(row["id"]), row["detail"]) for row in unknown if row["seq"] not in since
    ]
    check.findings += tables.findings("mismatches", "record_differs_from_row")
    check.findings += tables.findings("out_of_order", "before_its_cause", tolerance=CLOCK_TOLERANCE)
    return check


def _deliveries(tables: _Tables, plain: psycopg.Connection[Any], worker: str, letters_kept_since: datetime) -> Check:
    figures = tables.one("delivery_counts", worker=worker)
    figures.update(figures.pop("states"))
    check = Check("deliveries", worker, figures)
    check.findings += tables.findings("undelivered", "event_without_delivery", worker=worker)
    check.findings += tables.findings("unread", "record_unaccounted_for", worker=worker)
    check.findings += tables.findings("stranded", "delivery_stranded", worker=worker)
    check.findings += tables.findings(
        "letterless", "dead_without_letter", worker=worker, letters_kept_since=letters_kept_since
    )
    stray = tables.all("stray_letters", worker=worker)
    suspects = [
        {"event_id": str(r["id"]), "partition": r["partition"], "record_offset": r["record_offset"]} for r in stray
    ]
    # As above: the letter of a delivery that is younger than the snapshot.
    since = set(plain.execute(_SQL["delivered_since"], {"worker": worker, "suspects": json.dumps(suspects)}).fetchall())
    check.findings += [
        Finding("letter_without_delivery", str(row["id"]), row["detail"])
        for row in stray
        if (row["partition"], row["record_offset"]) not in since
    ]
    return check


def _summaries(tables: _Tables, kept_since: datetime) -> Check:
    tables.run("recount", kept_since=kept_since)
    check = Check("summaries", figures=tables.one("summary_counts"))
    check.findings += tables.findings("summary_differences", "summary_differs")
    return check


def _worker_topics(topics: Topics, worker: str) -> dict[str, str]:
    """Full topic name to what it is for: retry or dead-letter."""
    return {
        **dict.fromkeys(topics.retries(worker), "retry"),
        topics.dead_letter(worker): "dead-letter",
    }


def _kept_since(admin: AdminClient, topics: Sequence[str], now: datetime) -> datetime:
    kept = retention(admin, topics)
    return _ALWAYS if kept is None else now - kept


R = TypeVar("R", Message, Message | None)


def _aside(records: Iterable[R], topics: Topics, letters: list[Message]) -> Iterator[R]:
    """The records of events; the relay's dead letters, which are few, are put into `letters`."""
    for record in records:
        if record is not None and record.topic() == topics.relay_dead_letter:
            letters.append(record)
        else:
            yield record


def _until_found(records: Iterable[Message | None], letters: list[Message], wanted: set[int]) -> Iterator[Message]:
    """The records as they come, until each of the wanted seqs has come as a record or among the letters."""
    for record in records:
        if record is not None:
            yield record
            wanted.discard(_number(headers_of(record).get("seq")) or 0)
        elif wanted <= {_number(headers_of(letter).get("x-seq")) for letter in letters}:
            return


class _Tables:
    """The snapshot, and the topics copied beside it."""

    def __init__(self, conn: psycopg.Connection[Any]) -> None:
        self._conn: _Connection = conn
        self._conn.row_factory = dict_row

    def begin(self) -> None:
        self.run("begin")
        # The snapshot is that of the first statement which reads.
        self._conn.execute("SELECT 1 FROM event_log LIMIT 1")

    def index(self) -> None:
        self.run("indexes")

    def unpublished(self, kept_since: datetime) -> set[int]:
        return {row["seq"] for row in self.all("unpublished", kept_since=kept_since)}

    def copy_records(self, records: Iterable[Message]) -> None:
        columns = "topic, partition, record_offset, appended_at, record_key, seq, event_id, event_type, created_at"
        with self._conn.cursor() as cursor, cursor.copy(f"COPY verify_record ({columns}) FROM STDIN") as copy:
            for record in records:
                headers = headers_of(record)
                event_id, event_type, created_at = _identity(headers, record.value())
                copy.write_row(
                    (
                        record.topic(),
                        record.partition(),
                        record.offset(),
                        datetime.fromtimestamp(record.timestamp()[1] / 1000, UTC),
                        _text(record.key()),
                        _number(headers.get("seq")),
                        event_id,
                        event_type,
                        created_at,
                    )
                )

    def copy_relay_letters(self, records: Iterable[Message]) -> None:
        with (
            self._conn.cursor() as cursor,
            cursor.copy("COPY verify_relay_letter (partition, record_offset, seq, event_id) FROM STDIN") as copy,
        ):
            for record in records:
                headers = headers_of(record)
                copy.write_row(
                    (
                        record.partition(),
                        record.offset(),
                        _number(headers.get("x-seq")),
                        _uuid(headers.get("x-event-id")),
                    )
                )

    def copy_worker_records(self, worker: str, kinds: dict[str, str], records: Iterable[Message]) -> None:
        columns = "worker, kind, topic, partition, record_offset, event_id, target, generation, attempt"
        with self._conn.cursor() as cursor, cursor.copy(f"COPY verify_worker_record ({columns}) FROM STDIN") as copy:
            for record in records:
                headers = headers_of(record)
                topic = str(record.topic())
                copy.write_row(
                    (
                        worker,
                        kinds[topic],
                        topic,
                        record.partition(),
                        record.offset(),
                        # What a replay sent is the source record as it was, without headers of a delivery.
                        _uuid(headers.get("x-event-id")) or _uuid(headers.get("ce_id")),
                        headers.get("x-target", ""),
                        _number(headers.get("x-generation")),
                        _number(headers.get("x-attempt")),
                    )
                )

    def copy_committed(self, committed: dict[str, dict[tuple[str, int], int]]) -> None:
        with (
            self._conn.cursor() as cursor,
            cursor.copy("COPY verify_committed (worker, topic, partition, next_offset) FROM STDIN") as copy,
        ):
            for worker, offsets in committed.items():
                for (topic, partition), offset in offsets.items():
                    copy.write_row((worker, topic, partition, offset))

    def run(self, name: str, **parameters: Any) -> None:
        # Statements without parameters may be several in one text.
        self._conn.execute(_SQL[name], parameters or None)

    def all(self, name: str, **parameters: Any) -> list[dict[str, Any]]:
        return self._conn.execute(_SQL[name], parameters).fetchall()

    def one(self, name: str, **parameters: Any) -> dict[str, Any]:
        row = self._conn.execute(_SQL[name], parameters).fetchone()
        assert row is not None
        return dict(row)

    def findings(self, name: str, kind: str, **parameters: Any) -> list[Finding]:
        return [Finding(kind, str(row["id"]), row["detail"]) for row in self.all(name, **parameters)]


def _identity(headers: Mapping[str, str], value: object) -> tuple[UUID | None, str | None, datetime | None]:
    """Which event a record is: its headers say it, else its bytes; all None if neither does."""
    stated = _uuid(headers.get("ce_id")), headers.get("ce_type"), _moment(headers.get("ce_time"))
    if None not in stated:
        return stated
    try:
        event = schemas.decode(value if isinstance(value, bytes) else b"")
    except schemas.DecodeError:
        return None, None, None
    return event.id, event.event_type, event.created_at


def _uuid(value: object) -> UUID | None:
    try:
        return UUID(value) if isinstance(value, str) else None
    except ValueError:
        return None


def _number(value: str | None) -> int | None:
    return (
        int(value) if value is not None and value.isascii() and value.isdigit() and int(value) <= _MAX_BIGINT else None
    )


def _moment(value: str | None) -> datetime | None:
    try:
        moment = datetime.fromisoformat(value) if value is not None else None
    except ValueError:
        return None
    return moment if moment is None or moment.tzinfo is not None else None


def _text(value: object) -> str | None:
    # NUL cannot be stored as text, and no organization's key holds one.
    return value.decode("utf-8", "replace").replace("\x00", "\ufffd") if isinstance(value, bytes) else None
