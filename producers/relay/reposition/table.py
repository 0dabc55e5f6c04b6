"""What event_log holds, compared with what the topics hold, and the restamping of its rows.

What must stay true: the snapshot that becomes s1 is taken before the restamping transaction has an id. Postgres leaves
a transaction's own id out of its snapshots, so a later one may count it as ended (seen: `10918:10920:`, taken by
transaction 10918), and the rows restamped with it would never be published. REPEATABLE READ takes it with the first
statement, and it decides of every row: seen by it and restamped, seen and left alone, or not seen and so the relay's to
find.

Therefore nothing is locked and nobody waited for. Writers go on; what was open is not in s1.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import IO, Any, cast
from uuid import UUID

import psycopg
from psycopg import IsolationLevel

import sql
from afluente import postgres
from afluente.errors import NotAllowed
from producers.relay.position import NOTHING, Snapshot, Witness
from producers.relay.reposition.case import Place, with_running
from producers.relay.reposition.content import HIGHEST_SEQ, Border, Found

ALWAYS = "-infinity"
ADVANCE_AT_MOST = 100_000_000  # numbers, half a minute of work: more lost events than that are no events of ours
ADVANCE_BATCH = 1_000_000
LIST_BATCH = 2_000

_SESSION = """
SELECT set_config('TimeZone', 'UTC', false), set_config('statement_timeout', '0', false),
       set_config('lock_timeout', '60s', false), set_config('work_mem', '64MB', false), set_config('jit', 'off', false)
"""
_QUERIES = sql.queries("reposition")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Rows of the table: `published` are on the topics, `to_publish` are not, `assumed` are not either but would have
    expired. `lost`: events on the topics that are not in the table. `deferred`: of those that wait to be released."""

    place: Place
    rows: int
    published: int
    to_publish: int
    assumed: int
    lost: int
    deferred: int
    records: int
    highest_seq: int


class Table:
    """One connection, as the login that owns the tables: a worker has no business changing rows of event_log."""

    def __init__(self, url: str, topic_names: list[str], dead_letters: str) -> None:
        self._topics, self._dead_letters = topic_names, dead_letters
        self._conn = postgres.connect(url, role=None, application_name="afluente-relay-reposition", autocommit=True)
        try:
            self._conn.execute(_SESSION)
            if not self._one("owns")[0]:
                raise NotAllowed(
                    "this login does not own event_log, and only its owner may restamp rows",
                    hint="set DATABASE_URL to the login that runs `afluente migrate up`",
                )
        except BaseException:
            self._conn.close()
            raise

    def close(self) -> None:
        self._conn.close()

    def lanes(self) -> list[str]:
        """The names of all lanes that ever had an owner."""
        return [row[0] for row in self._conn.execute(_QUERIES["lanes"])]

    def take(self, records: Iterable[Found]) -> None:
        """Put the records into a table of this session, as they come."""
        self._conn.execute(_QUERIES["make_found"])
        numbers = {name: number for number, name in enumerate(self._topics)}
        with self._conn.cursor().copy(_QUERIES["copy_found"]) as copy:
            for found in records:
                number, dead = numbers[found.topic], found.topic == self._dead_letters
                copy.write_row((*found[:4], number, *found[5:], dead))
        self._conn.execute(_QUERIES["analyze_found"])

    def release_published(self) -> int:
        """Move what waits in deferred_event and is published already into event_log; returns how many."""
        with self._conn.transaction():
            self._conn.execute(_QUERIES["allow"])
            return self._conn.execute(_QUERIES["release_published"]).rowcount

    @contextmanager
    def compared(
        self,
        border: Callable[[UUID, str], Border | None],
        *,
        since: datetime | None,
        published_at_most: int | None,
    ) -> Iterator[Comparison]:
        """Compare, in a transaction that lasts as long as the `with`: restamp inside, or nothing has changed.

        `border`: which rows of an organization and type would have expired. psycopg.errors.SerializationFailure:
        somebody changed the same rows; do it again.
        """
        self._conn.isolation_level = IsolationLevel.REPEATABLE_READ
        try:
            with self._conn.transaction():
                yield self._compare(border, since or ALWAYS, published_at_most)
        finally:
            self._conn.isolation_level = None

    def _compare(
        self, border: Callable[[UUID, str], Border | None], since: datetime | str, published_at_most: int | None
    ) -> Comparison:
        s1, own, t1, witness, self._oldest, reprocess_top = self._one("snapshot")
        self._since, self._s1 = since, with_running(Snapshot.parse(s1), own)
        rows, before = self._one("rows", since=since)
        self._conn.execute(_QUERIES["make_missing"])
        missing = self._conn.execute(_QUERIES["find_missing"], {"since": since}).rowcount
        assumed = before
        if since == ALWAYS:
            assumed = self._assume_published(border, published_at_most)
        self._conn.execute(_QUERIES["analyze_missing"])
        (to_publish,) = self._one("missing")
        records, _, highest_seq = self._one("found")
        (deferred,) = self._one("deferred_published")
        lost = self._conn.execute(
            f"SELECT count(*) FROM ({_QUERIES['lost']}) AS lost", {"oldest": self._oldest, "since": since}
        ).fetchone()
        assert lost is not None
        assert to_publish == missing - (assumed if since == ALWAYS else 0)
        # Nothing of it is published: then no row need bear another id, and the relay begins at the first.
        self._everything = to_publish == rows
        return Comparison(
            Place(
                NOTHING if self._everything else self._s1,
                0 if self._everything else t1,
                reprocess_top,
                None if witness is None else Witness(t1, witness),
            ),
            rows=rows,
            published=rows - to_publish - assumed,
            to_publish=to_publish,
            assumed=assumed,
            lost=lost[0],
            deferred=deferred,
            records=records,
            highest_seq=highest_seq,
        )

    def _assume_published(self, border: Callable[[UUID, str], Border | None], published_at_most: int | None) -> int:
        kinds = self._conn.execute(_QUERIES["kinds_missing"]).fetchall()
        borders = [(*kind, *found) for kind in kinds if (found := border(*kind)) is not None]
        if not borders:
            return 0
        self._conn.execute(_QUERIES["make_border"])
        with self._conn.cursor().copy(_QUERIES["copy_border"]) as copy:
            for row in borders:
                copy.write_row(row)
        at_most = HIGHEST_SEQ if published_at_most is None else published_at_most
        return self._conn.execute(_QUERIES["assume_published"], {"published_at_most": at_most}).rowcount

    def list_lost(self, file: IO[str]) -> None:
        """Write what is lost as NDJSON. Inside `compared`."""
        with self._conn.cursor(name="lost") as cursor:
            cursor.itersize = LIST_BATCH
            cursor.execute(_QUERIES["lost"], {"oldest": self._oldest, "since": self._since})
            for event_id, organization_id, event_type, seq, topic, partition, offset, at in cursor:
                line = {
                    "event_id": str(event_id),
                    "organization_id": None if organization_id is None else str(organization_id),
                    "event_type": event_type,
                    "seq": seq,
                    "topic": self._topics[topic],
                    "partition": partition,
                    "offset": offset,
                    "time": at.isoformat(),
                }
                file.write(json.dumps(line) + "\n")

    def restamp(self, topic_prefix: str, *, ask_again: bool) -> int:
        """Make the relay's next window from s1 hold exactly what is to be published; returns how many published rows
        had to get another id. Inside `compared`. `ask_again`: requests to publish dead letters again have lost their
        place."""
        s1 = self._s1
        self._conn.execute(_QUERIES["allow"])
        unseen = {"xmax": str(s1.xmax), "xip": "{" + ",".join(map(str, s1.xip)) + "}"}
        settled = self._conn.execute(_QUERIES["settle"], {**unseen, "everything": self._everything}).rowcount
        if not self._everything:
            self._conn.execute(_QUERIES["restamp"])
        self._conn.execute(_QUERIES["reopen"])
        for request in ("close_requests", *(["ask_again"] if ask_again else [])):
            self._conn.execute(_QUERIES[request], {"prefix": topic_prefix})
        return settled

    def sequence(self) -> int:
        """The number that was given out last."""
        return cast(int, self._one("sequence")[0])

    def advance_sequence(self, up_to: int) -> None:
        """Let the sequence stand at `up_to` or above."""
        while (missing := up_to - self.sequence()) > 0:
            self._conn.execute(_QUERIES["advance"], {"count": min(missing, ADVANCE_BATCH)})

    def next_transaction(self) -> int:
        return cast(int, self._one("next_transaction")[0])

    def absent(self, published_at_most: int) -> int:
        """How many of the events taken are not in the table."""
        oldest = self._one("snapshot")[4]
        return cast(int, self._one("absent", oldest=oldest, published_at_most=published_at_most)[0])

    def _one(self, name: str, **parameters: Any) -> tuple[Any, ...]:
        row = self._conn.execute(_QUERIES[name], parameters).fetchone()
        assert row is not None
        return row


def is_conflict(error: psycopg.Error) -> bool:
    """Did somebody change the same rows meanwhile? Then the whole transaction can be done again."""
    return isinstance(error, psycopg.errors.SerializationFailure | psycopg.errors.DeadlockDetected)
