"""Where a replay's events come from: the table while it has them, then the topics, or the archive; found, and read.

What must stay true:
- a page is bounded, in events and in bytes, and so is what one statement looks at; no transaction stays open;
- the same part and cursor give the same events in the same order, whenever they are read: rows by a fixed snapshot,
  records up to fixed ends, those that are committed;
- an event is in one part only: parts meet at a moment of created_at, where months of the table begin.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta
from time import monotonic
from typing import Any, Literal, NamedTuple, TypeAlias, cast
from uuid import UUID

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
from psycopg.types.numeric import Int8

import schemas
import sql
from afluente import archive, kafka, postgres
from afluente.errors import Refused, Unavailable
from afluente.kafka.reading import offsets_at, retained
from afluente.settings import KafkaSettings
from producers.relay.position import Entry
from producers.relay.replay import selection
from producers.relay.replay.selection import Cursor, Part, Selection
from schemas import Row
from schemas.topics import Topics

SourceName: TypeAlias = Literal["table", "topic", "archive"]
Headers: TypeAlias = list[tuple[str, bytes | None]]

PAGE_BYTES = 4 * 1024 * 1024
SCAN_ROWS = 20_000  # rows, or records, that one page looks at when the filters leave few of them
FETCH_ROWS = 64
REQUEST_TIMEOUT_S = 10.0
STALL_S, POLL_S = 30.0, 1.0
# created_at is the clock at the insert, like seq: nearly the same order. A clock that stepped back may have disturbed
# it, by less than a day; and brokers stamp a record after its event, by clocks of their own.
CLOCK_STEPS = timedelta(days=1)
BROKER_CLOCKS = timedelta(hours=1)

_SESSION = """
SELECT set_config('enable_seqscan', 'off', false), set_config('enable_bitmapscan', 'off', false),
       set_config('jit', 'off', false), set_config('max_parallel_workers_per_gather', '0', false),
       set_config('TimeZone', 'UTC', false), set_config('statement_timeout', '60s', false)
"""
_EVER = (datetime(1, 1, 2, tzinfo=UTC), datetime(9999, 12, 30, tzinfo=UTC))
_QUERIES = sql.queries("replay")


class Origin(NamedTuple):
    """The record that an event was read from."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int


class Found(NamedTuple):
    """An event, with the record that it is. `origin` is None when it was made of a row."""

    event_id: UUID
    organization_id: UUID
    event_type: str
    created_at: datetime
    key: bytes
    value: bytes
    headers: Headers
    origin: Origin | None = None


class Page(NamedTuple):
    """Selected events in their order; those that cannot be sent, with the reason; and where the next page begins (None:
    the part is at its end)."""

    events: list[Found]
    failed: list[tuple[str, str]]
    after: Cursor | None


class NotCovered(Refused):
    """No source has all of it any more."""


class Gone(Refused):
    """Some of what is asked for is nowhere."""

    exit_status = 3


class Sources:
    """A connection to Postgres, and a consumer when a topic is read. `name` is the client's id, and its group's."""

    def __init__(self, settings: KafkaSettings, postgres_url: str, name: str) -> None:
        self._settings, self._name = settings, name
        self._topics = Topics(settings.topic_prefix)
        self._admin = kafka.admin(settings, client_id=f"afluente-{name}")
        self.conn = postgres.connect(postgres_url, application_name=f"afluente-{name}", autocommit=True)
        self.conn.execute(_SESSION)
        self._consumer: Consumer | None = None
        self._at: tuple[str, int, int] | None = None  # where the consumer reads on
        self._archived: tuple[Part, Cursor, Iterator[Row]] | None = None
        self._ids: tuple[Part | None, frozenset[UUID]] = (None, frozenset())
        self.remarks: list[str] = []
        """What a person should know of the parts that were found."""

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
        self.conn.close()

    # Finding the parts

    def since(
        self, since: datetime, until: datetime | None, force: SourceName | None, directory: str | None
    ) -> tuple[Part, ...]:
        """Everything written since then. NotCovered when no source, nor two of them together, reach back that far."""
        if force == "archive":
            return (self._archive(directory, since, until),)
        if force == "topic":
            return (self._since_in_topics(since, until, required=False),)
        (dropped,) = self._one("dropped_until")
        if dropped is not None and since < dropped and force == "table":
            self.remarks.append(f"event_log begins at {dropped.isoformat()}: what is older is not replayed")
        if dropped is None or since >= dropped or force == "table":
            return (self._table(since, until, self._first_seq(since)),)
        older_until = dropped if until is None else min(dropped, until)
        newer = [] if older_until == until else [self._table(dropped, until, self._first_seq(dropped))]
        if directory is not None:
            return (self._archive(directory, since, older_until), *newer)
        try:
            return (self._since_in_topics(since, older_until, required=True), *newer)
        except NotCovered as error:
            raise NotCovered(
                f"{error}, and event_log begins at {dropped.isoformat()}",
                hint="--archive DIR, where the days are archived; or replay what is there: "
                f"--since {dropped.isoformat()}, or --source topic",
            ) from None

    def from_offsets(self, topic: str, offsets: dict[int, int], until: datetime | None) -> Part:
        """The records of a topic from these offsets to its end. Refused when an offset is gone, or never was."""
        topic = self._family(topic)
        places = self._partitions([topic])
        if unknown := sorted(set(offsets) - {partition for _, partition in places}):
            raise Refused(f"{topic} has no partition {unknown[0]}: its partitions are 0 to {len(places) - 1}")
        there = retained(self._admin, [(topic, partition) for partition in sorted(offsets)])
        ranges = []
        for (_, partition), held in there.items():
            offset = offsets[partition]
            if offset < held.first:
                raise NotCovered(
                    f"{topic}[{partition}] begins at offset {held.first}: {offset} has expired",
                    hint=f"--from-offset {partition}:{held.first}, or --since TIME, which also reads the table",
                )
            if offset > held.end:
                raise Refused(f"{topic}[{partition}] ends at offset {held.end}: {offset} is beyond it")
            if offset < held.end:
                ranges.append((topic, partition, offset, held.end))
        return Part("topic", None, until, ranges=tuple(ranges))

    def from_position(self, entries: tuple[Entry, ...], text: str, until: datetime | None) -> Part:
        """The rows that a relay at this position had before it. NotCovered when the table no longer has them."""
        first = []
        for entry in entries:
            (seq,) = self._one("first_to_come", s1=str(entry.s1), t1=Int8(entry.t1))
            first.append(entry.t1 + 1 if seq is None else seq)
        (dropped,) = self._one("dropped_until")
        if dropped is not None:
            lowest = self._row("lowest")
            if lowest is None or min(first) < lowest[0]:
                raise NotCovered(
                    f"the position has rows to come that are gone: event_log begins at {dropped.isoformat()}, and only "
                    "the table can tell what a position means",
                    hint="--since TIME, from the topics or the archive",
                )
        return replace(self._table(None, until, min(first)), entries=text)

    def named(
        self, ids: Sequence[UUID], until: datetime | None, force: SourceName | None, directory: str | None
    ) -> tuple[Part, ...]:
        """These events. Gone when one of them is in no source."""
        left, parts = list(dict.fromkeys(ids)), []
        if force in (None, "table"):
            found = [row[0] for row in self.conn.execute(_QUERIES["found"], {"ids": left})]
            if found:
                parts.append(Part("table", None, until, ids=tuple(found)))
            left = [event_id for event_id in left if event_id not in set(found)]
        if left and force in (None, "topic"):
            places = self._search(set(left))
            if places:
                ranges = tuple((topic, partition, offset, offset + 1) for topic, partition, offset in places.values())
                parts.append(Part("topic", None, until, ids=tuple(places), ranges=ranges))
            left = [event_id for event_id in left if event_id not in places]
        if left and directory is not None and force in (None, "archive"):
            there = {row.id for row in archive.find(directory, left)}
            if there:
                parts.append(Part("archive", None, until, ids=tuple(sorted(there)), directory=directory))
            left = [event_id for event_id in left if event_id not in there]
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise Gone(
                f"no event {', '.join(map(str, left[:3]))}{more} in {self._looked_in(force, directory)}",
                hint=None if directory is not None or force in ("table", "topic") else "--archive DIR looks there too",
            )
        return tuple(reversed(parts))  # the older ones first

    def _looked_in(self, force: SourceName | None, directory: str | None) -> str:
        names = [force] if force is not None else ["table", "topics", *(["archive"] if directory else [])]
        return "the " + ", the ".join(names)

    def _table(self, since: datetime | None, until: datetime | None, first: int) -> Part:
        snapshot, last = self._one("head")
        return Part("table", since, until, first=first, last=last, snapshot=snapshot)

    def _first_seq(self, since: datetime) -> int:
        """A seq at or before the first row written since then."""
        _, last = self._one("head")
        low, high, before = 1, last + 1, since - CLOCK_STEPS
        while low < high:
            middle = (low + high) // 2
            row = self._row("row_at", seq=Int8(middle))
            if row is None or row[1] >= before:
                high = middle
            else:
                low = row[0] + 1
        return low

    def _since_in_topics(self, since: datetime, until: datetime | None, *, required: bool) -> Part:
        places = self._partitions(self._topics.families())
        there, firsts = retained(self._admin, places), offsets_at(self._admin, places, since - BROKER_CLOCKS)
        ranges = []
        for place, held in there.items():
            first = firsts[place]
            first = held.end if first is None else first
            # The first one that is there, of a partition that has lost others, may not be the first there was.
            if held.first > 0 and first <= held.first:
                said = f"{place[0]}[{place[1]}] may no longer reach back to {since.isoformat()}"
                if required:
                    raise NotCovered(said)
                self.remarks.append(said)
            if first < held.end:
                ranges.append((*place, first, held.end))
        return Part("topic", since, until, ranges=tuple(ranges))

    def _archive(self, directory: str | None, since: datetime, until: datetime | None) -> Part:
        if directory is None:
            raise Refused("the archive is a directory: which one?", hint="--archive DIR")
        days = archive.days(directory)
        if not days or days[0] > since.astimezone(UTC).date():
            first = f"its first day is {days[0]}" if days else "there is no day in it"
            raise NotCovered(f"{directory} does not reach back to {since.isoformat()}: {first}")
        last = datetime.combine(days[-1] + timedelta(days=1), time(), UTC)
        if until is not None and until > last:
            raise NotCovered(f"{directory} ends with {days[-1]}", hint=f"--until {last.isoformat()}")
        return Part("archive", since, until or last, directory=directory)

    def _search(self, ids: set[UUID]) -> dict[UUID, tuple[str, int, int]]:
        """Where in the topics these events are: all of them are read."""
        wanted = {str(event_id).encode(): event_id for event_id in ids}
        found: dict[UUID, tuple[str, int, int]] = {}
        places = self._partitions(self._topics.families())
        for place, held in retained(self._admin, places).items():
            offset = held.first
            while offset < held.end and len(found) < len(ids):
                messages, offset = self._read(*place, offset, held.end, SCAN_ROWS)
                for message in messages:
                    about = dict(kafka.headers_of(message) or ())
                    if (event_id := wanted.get(about.get("ce_id") or b"")) is not None and event_id not in found:
                        found[event_id] = (*place, cast(int, message.offset()))
        return found

    def _family(self, topic: str) -> str:
        for name in (topic, self._topics.prefix + topic):
            if name in self._topics.families():
                return name
        families = ", ".join(name.removeprefix(self._topics.prefix) for name in self._topics.families())
        raise Refused(f"{topic[:250]!r} is none of the event topics", hint=f"one of {families}")

    def _partitions(self, topics: Sequence[str]) -> list[tuple[str, int]]:
        there = self._admin.list_topics(timeout=REQUEST_TIMEOUT_S).topics
        if missing := [topic for topic in topics if topic not in there]:
            raise Refused(f"topic {missing[0]} does not exist", hint="afluente topics apply")
        return [(topic, partition) for topic in topics for partition in sorted(there[topic].partitions)]

    # Reading a part

    def page(self, wanted: Selection, part: Part, cursor: Cursor, rows: int) -> Page:
        """The next events of the part, `rows` of them at most."""
        if part.kind == "topic":
            return self._topic_page(wanted, part, cursor, rows)
        if part.kind == "archive":
            return self._archive_page(wanted, part, cursor, rows)
        return (self._named_page if part.ids else self._table_page)(wanted, part, cursor, rows)

    def _table_page(self, wanted: Selection, part: Part, cursor: Cursor, rows: int) -> Page:
        after = cursor[0] if cursor else part.first - 1
        place = {"since": part.since or _EVER[0], "until": part.until or _EVER[1], "after": Int8(after)}
        reach, count = self._one("reach", **place, last=Int8(part.last), scan=SCAN_ROWS)
        if not count:
            return Page([], [], None)
        place |= {"reach": Int8(reach), "snapshot": part.snapshot, "rows": rows}
        place["organizations"] = list(wanted.organizations) or None
        place["event_types"] = list(wanted.event_types) or None
        found, is_whole = self._stream("page", place, rows)
        entries = selection.parse_position(part.entries) if part.entries else ()
        page = Page([], [], None)
        for row, tx_id in found:
            if not entries or selection.is_to_come(entries, tx_id, row.seq, row.organization_id):
                _add(page, row)
        if not is_whole:
            return page._replace(after=[found[-1][0].seq])
        return page._replace(after=[reach] if count == SCAN_ROWS else None)

    def _named_page(self, wanted: Selection, part: Part, cursor: Cursor, rows: int) -> Page:
        done = cursor[0] if cursor else 0
        asked = part.ids[done : done + rows]
        found, is_whole = self._stream("named", {"ids": list(asked)}, len(asked) + 1)
        page = Page([], [], None)
        for row, _ in found:
            if wanted.takes(part, row.organization_id, row.event_type, row.created_at):
                _add(page, row)
        # The ids are in the order of their rows. One that is gone since would make `found` short, not wrong.
        done = done + len(asked) if is_whole else part.ids.index(found[-1][0].id) + 1
        return page._replace(after=[done] if done < len(part.ids) else None)

    def _stream(self, query: str, parameters: dict[str, Any], rows: int) -> tuple[list[tuple[Row, int]], bool]:
        """Rows with their transaction ids until they are enough; and whether these are all."""
        found, size = [], 0
        stream = self.conn.cursor().stream(_QUERIES[query], parameters, binary=True, size=FETCH_ROWS)
        with closing(cast(Generator[tuple[Any, ...], None, None], stream)) as all_of_them:
            for *columns, tx_id in all_of_them:
                row = Row(*columns)
                found.append((row, int(tx_id)))
                size += len(row.payload) + len(row.metadata)
                if size >= PAGE_BYTES:
                    return found, False
        return found, len(found) < rows

    def _topic_page(self, wanted: Selection, part: Part, cursor: Cursor, rows: int) -> Page:
        number, offset = cursor or (0, None)
        page, seen, size = Page([], [], None), 0, 0
        while number < len(part.ranges) and len(page.events) < rows and seen < SCAN_ROWS and size < PAGE_BYTES:
            topic, partition, first, end = part.ranges[number]
            offset = first if offset is None else offset
            messages, offset = self._read(topic, partition, offset, end, rows - len(page.events))
            seen += 1 + len(messages)
            for message in messages:
                size += len(message.value() or b"")
                _add_record(page, wanted, part, self._named(part), message)
            if offset >= end:
                number, offset = number + 1, None
        return page._replace(after=[number, offset] if number < len(part.ranges) else None)

    def _named(self, part: Part) -> frozenset[UUID]:
        if self._ids[0] is not part:
            self._ids = (part, frozenset(part.ids))
        return self._ids[1]

    def _read(self, topic: str, partition: int, offset: int, end: int, rows: int) -> tuple[list[Message], int]:
        """Committed records from `offset`, before `end`; and where to go on."""
        if self._consumer is None:
            self._consumer = kafka.consumer(
                self._settings,
                self._name,
                client_id=f"afluente-{self._name}",
                enable_partition_eof=True,
                auto_offset_reset="error",
                fetch_wait_max_ms=20,
            )
        if self._at != (topic, partition, offset):
            self._consumer.assign([TopicPartition(topic, partition, offset)])
        self._at = None  # until all went well
        found: list[Message] = []
        size, silent_at = 0, monotonic() + STALL_S
        while offset < end and len(found) < rows and size < PAGE_BYTES:
            message = self._consumer.poll(POLL_S)
            if message is None:
                if monotonic() > silent_at:
                    raise Unavailable(
                        f"{topic}[{partition}] cannot be read from offset {offset} to {end}, where it ended when the "
                        f"replay began: nothing came for {STALL_S:.0f} s",
                        hint="a transaction there may be undecided: afluente relay repair",
                    )
                continue
            here = message.offset() or 0
            if (error := message.error()) is None:
                if here >= end:
                    return found, end
                found.append(message)
                offset, size = here + 1, size + len(message.value() or b"")
                silent_at = monotonic() + STALL_S
            elif error.code() == KafkaError._PARTITION_EOF:
                # Markers of transactions have offsets too. While one is open below the end this is not it: it comes
                # again, further on.
                offset = max(offset, here)
            elif error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
                raise NotCovered(f"{topic}[{partition}] has expired at offset {offset} before it was replayed")
            elif not error.retriable():
                raise KafkaException(error)
        self._at = (topic, partition, offset) if offset < end else None
        return found, offset

    def _archive_page(self, wanted: Selection, part: Part, cursor: Cursor, rows: int) -> Page:
        if self._archived is None or self._archived[:2] != (part, cursor):
            self._archived = (part, cursor, self._archived_rows(part, cursor))
        page, size = Page([], [], None), 0
        for seen, row in enumerate(self._archived[2], 1):
            cursor = _place_of(row)
            if wanted.takes(part, row.organization_id, row.event_type, row.created_at):
                _add(page, row)
                size += len(row.payload) + len(row.metadata)
            if len(page.events) + len(page.failed) >= rows or size >= PAGE_BYTES or seen >= SCAN_ROWS:
                self._archived = (part, cursor, self._archived[2])
                return page._replace(after=cursor)
        self._archived = None
        return page

    def _archived_rows(self, part: Part, cursor: Cursor) -> Iterator[Row]:
        day, seq = (date.fromisoformat(cursor[0]), cursor[1]) if cursor else (date.min, 0)
        if part.ids:
            found = archive.find(part.directory, part.ids)
        else:
            since = part.since if not cursor else max(part.since or _EVER[0], datetime.combine(day, time(), UTC))
            found = archive.read(part.directory, since=since, until=part.until)
        for row in found:
            if _day_of(row) > day or (_day_of(row) == day and row.seq > seq):
                yield row

    def _one(self, name: str, **parameters: Any) -> tuple[Any, ...]:
        row = self._row(name, **parameters)
        assert row is not None
        return row

    def _row(self, name: str, **parameters: Any) -> tuple[Any, ...] | None:
        return self.conn.execute(_QUERIES[name], parameters).fetchone()


def _add(page: Page, row: Row) -> None:
    try:
        key, value, headers = schemas.record(row)
    except schemas.EncodeError as error:
        page.failed.append((str(row.id), str(error)))
        return
    about = (row.id, row.organization_id, row.event_type, row.created_at)
    page.events.append(Found(*about, key, value, [*headers]))


def _add_record(page: Page, wanted: Selection, part: Part, named: frozenset[UUID], message: Message) -> None:
    origin = Origin(
        message.topic() or "", message.partition() or 0, message.offset() or 0, max(0, message.timestamp()[1])
    )
    place, value = f"{origin.topic}[{origin.partition}]@{origin.offset}", message.value() or b""
    try:
        event = schemas.decode(value)
    except schemas.SchemaError as error:
        page.failed.append((place, f"no event: {error}"))
        return
    if not wanted.takes(part, event.organization_id, event.event_type, event.created_at):
        return
    if named and event.id not in named:
        return  # it was found by a header, which is anybody's word
    if (headers := kafka.headers_of(message)) is None:
        page.failed.append((place, "the name of a header is not UTF-8"))
        return
    key = message.key() or str(event.organization_id).encode()
    about = (event.id, event.organization_id, event.event_type, event.created_at)
    page.events.append(Found(*about, key, value, headers, origin))


def _day_of(row: Row) -> date:
    return row.created_at.astimezone(UTC).date()


def _place_of(row: Row) -> Cursor:
    return [_day_of(row).isoformat(), row.seq]
