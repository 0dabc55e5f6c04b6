"""Random concurrent writers against a reader that keeps nothing but the text of its position.

One thread plays many sessions, step by step, in an order the seed decides; so a failure comes again with its seed, but
for what other databases of the server do to the snapshots. After random steps the reader takes a chunk of random size,
writes its position down, and may begin anew from that text with a new connection.

The model shares no code with the relay. It knows what was committed, and two things about order:
- an organization's events bear its version number, taken under a row lock: each is published after the one before;
- every event bears the newest event its session could see then: that one is published before it. (Only as long as
  the position is one entry. Of several, each has the order of its own organizations.)
"""

import json
import os
import random
import uuid
from datetime import UTC, datetime, timedelta

import pytest

from producers.relay.position import DatabaseIdentity, Entry, Identity, KafkaIdentity, Position, lane_slots, merged
from producers.relay.source import Source
from tests.fixtures.postgres import clone
from tests.producers.relay.oracle import Writers
from tests.sql.test_event_log_months import month

IDENTITY = Identity(DatabaseIdentity("1", 1, 1, "x"), KafkaIdentity("x", {}))
SESSIONS = 6
ORGANIZATIONS = 5

_TAKE = (
    "UPDATE public.probe SET version = version + 1 WHERE organization_id = %s"
    " AND pg_try_advisory_xact_lock(%s) RETURNING version"
)
_SEEN = "SELECT id::text FROM public.event_log ORDER BY seq DESC LIMIT 1"
_INSERT = """
INSERT INTO public.event_log (organization_id, event_type, entity_kind, payload, created_at)
SELECT %s, 'probe.counted', 'probe', jsonb_build_object('version', v, 'seen', %s::text), %s
  FROM generate_series(%s::bigint, %s::bigint) v
"""
_NEXT = "nextval(pg_get_serial_sequence('public.event_log', 'seq'))"
_INSERT_AT = """
INSERT INTO public.event_log (seq, organization_id, event_type, entity_kind, payload) OVERRIDING SYSTEM VALUE
VALUES (%s, %s, 'probe.counted', 'probe', jsonb_build_object('seen', %s::text))
"""
_COPY = "COPY public.event_log (organization_id, event_type, entity_kind, payload, created_at) FROM STDIN"


class Session:
    """One connection and what its open transaction has written so far, by depth of savepoint."""

    def __init__(self, database, number):
        self.database, self.number = database, number
        self.conn = database.connect(role=None, autocommit=True)
        self.depth = 0
        self.open = False
        self.reserved = []

    def begin(self):
        if not self.open:
            self.conn.execute("BEGIN")
            self.open, self.depth = True, 0


class Story:
    """Plays `steps` random steps and reads meanwhile; `check` at the end."""

    def __init__(self, database, seed, divided):
        self.divided = divided
        self.chance = random.Random(seed)
        self.database = database
        self.writers = Writers(database, organizations=ORGANIZATIONS)
        self.loose = database.organization("without versions")
        self.sessions = [Session(database, number) for number in range(SESSIONS)]
        self.prepared = {}
        self.moments = [
            month(0) - timedelta(microseconds=1),
            month(0),
            datetime.now(UTC),
            month(1) - timedelta(microseconds=1),
            month(1),
        ]
        self.seen = []  # ids in the order of the reader
        self.resumed = self.most_entries = 0
        self.source = self._open()
        self.text = Position(IDENTITY, (Entry(),)).format()

    # Writing

    def step(self):
        session = self.chance.choice(self.sessions)
        act = self.chance.choices(
            [self.insert, self.copy, self.early, self.savepoint, self.release, self.roll_back_to, self.commit,
             self.roll_back, self.prepare, self.finish_prepared, self.burn, self.reserve,
             self.write_reserved],
            [30, 8, 4, 8, 5, 5, 24, 4, 4, 6, 2, 6, 6],
        )[0]  # fmt: skip
        act(session)

    def insert(self, session):
        session.begin()
        if (taken := self._take(session, self.chance.choice([1, 1, 1, 2, 7]))) is not None:
            organization, first, last, seen = taken
            session.conn.execute(_INSERT, [organization, seen, self.chance.choice(self.moments), first, last])

    def copy(self, session):
        session.begin()
        if (taken := self._take(session, self.chance.choice([2, 5, 20]))) is None:
            return
        organization, first, last, seen = taken
        at = self.chance.choice(self.moments)
        with session.conn.cursor().copy(_COPY) as copy:
            for version in range(first, last + 1):
                payload = json.dumps({"version": version, "seen": seen})
                copy.write_row((organization, "probe.counted", "probe", payload, at))

    def early(self, session):
        """Takes its transaction id now, and writes later, if at all."""
        session.begin()
        session.conn.execute("SELECT pg_current_xact_id()")

    def savepoint(self, session):
        session.begin()
        session.depth += 1
        session.conn.execute(f"SAVEPOINT s{session.depth}")

    def release(self, session):
        if session.depth:
            session.conn.execute(f"RELEASE s{session.depth}")
            session.depth -= 1

    def roll_back_to(self, session):
        if session.depth:
            session.conn.execute(f"ROLLBACK TO s{session.depth}")

    def commit(self, session):
        if session.open:
            session.conn.execute("COMMIT")
            session.open, session.depth = False, 0

    def roll_back(self, session):
        if session.open:
            session.conn.execute("ROLLBACK")
            session.open, session.depth = False, 0

    def prepare(self, session):
        if session.open and len(self.prepared) < 3:
            name = f"{self.database.name}_{uuid.uuid4().hex[:6]}"
            session.conn.execute(f"PREPARE TRANSACTION '{name}'")
            self.prepared[name] = True
            session.open, session.depth = False, 0

    def finish_prepared(self, session):
        if self.prepared and not session.open:
            name = self.chance.choice(sorted(self.prepared))
            del self.prepared[name]
            session.conn.execute(f"{self.chance.choice(['COMMIT', 'COMMIT', 'ROLLBACK'])} PREPARED '{name}'")

    def burn(self, session):
        session.conn.execute(f"SELECT {_NEXT} FROM generate_series(1, 50)")

    def reserve(self, session):
        """What one INSERT does, slowly: its seq first, and its transaction's id some time after."""
        session = next((other for other in self.sessions if not other.open and not other.reserved), None)
        if session is None:
            return
        seen = session.conn.execute(_SEEN).fetchone()
        (seq,) = session.conn.execute(f"SELECT {_NEXT}").fetchone()
        session.reserved = [(seq, seen[0] if seen else None)]

    def write_reserved(self, session):
        session = next((other for other in self.sessions if other.reserved), None)
        if session is not None:
            session.begin()
            ((seq, seen),) = session.reserved
            session.reserved = []
            session.conn.execute(_INSERT_AT, [seq, self.loose, seen])

    def _take(self, session, count):
        """An organization nobody else holds, `count` versions of it, and the newest event to be seen from here."""
        number = self.chance.randrange(ORGANIZATIONS)
        organization = self.writers.organizations[number]
        # Held to the end of the transaction, as the row's lock is; but this one is not waited for.
        row = session.conn.execute(_TAKE, [organization, number]).fetchone()
        if row is None:
            return None
        (first,) = row
        if count > 1:
            session.conn.execute(
                "UPDATE public.probe SET version = version + %s WHERE organization_id = %s", [count - 1, organization]
            )
        seen = session.conn.execute(_SEEN).fetchone()
        return organization, first, first + count - 1, seen[0] if seen else None

    # Reading

    def read(self):
        """A chunk of each entry, or of some, from the position's text, and the text after it; was there anything?"""
        if self.chance.random() < 0.3:
            self.source.close()
            self.source = self._open()
        entries = list(Position.parse(self.text).entries)
        self.resumed += any(entry.window is not None for entry in entries)
        if self.divided:
            entries = self._divide(entries)
        # Entries that begin a window together end it together; one by itself reads up to the present.
        head = self.source.head() if self.chance.random() < 0.7 and self.divided else None
        found = 0
        for index, entry in enumerate(entries):
            if len(entries) > 1 and self.chance.random() < 0.2:
                continue
            entries[index] = self._read_one(entry, head)
            found += entries[index] != entry
        self.text = Position(IDENTITY, tuple(entries)).format()
        return found

    def _read_one(self, entry, head):
        rows = self.chance.choice([1, 1, 2, 3, 5, 20, 1_000])
        chunk = self.source.chunk(entry, rows=rows, head=None if entry.window is not None else head)
        self.seen += [uuid.UUID(bytes(row.id).decode()) for row in chunk.rows]
        return chunk.after

    def _divide(self, entries):
        """Nothing, mostly; else one organization is split off, or all go over to lanes, or what can be one becomes."""
        act = self.chance.random()
        if act < 0.1:
            organization = self.chance.choice(self.writers.organizations)
            (index,) = [index for index, entry in enumerate(entries) if entry.covers(organization)]
            if entries[index].organization is None:
                entries[index : index + 1] = entries[index].split_off(organization)
        elif act < 0.2:
            lanes = self.chance.choice([1, 2, 3, 7])
            parts = [[entry.within(lane_slots(lane, lanes)) for entry in entries] for lane in range(lanes)]
            entries = [entry for lane in parts for entry in merged(part for part in lane if part is not None)]
        elif act < 0.4:
            entries = list(merged(entries))
        self.most_entries = max(self.most_entries, len(entries))
        return entries

    def _open(self):
        return Source(self.database.url, poll_rows=self.chance.choice([1, 3, 50]))

    # The end

    def finish(self):
        for session in self.sessions:
            (self.commit if self.chance.random() < 0.7 else self.roll_back)(session)
        for _ in list(self.prepared):
            self.finish_prepared(self.sessions[0])
        while any(e.window is not None for e in Position.parse(self.text).entries):
            self.read()
        # Whatever they were divided into, from one head on they are one again.
        head, entries = self.source.head(), Position.parse(self.text).entries
        for index, entry in enumerate(entries):
            while (after := self._read_one(entry, head)).window is not None:
                entry = after
            entries = (*entries[:index], after, *entries[index + 1 :])
        assert len(merged(entries)) == 1
        self.source.close()

    def check(self):
        rows = self.database.execute(
            "SELECT id, organization_id, (payload ->> 'version')::bigint, (payload ->> 'seen')::uuid FROM event_log"
        )
        table = {row[0]: row[1:] for row in rows}
        assert len(self.seen) == len(set(self.seen)), "a row came twice"
        assert set(self.seen) == set(table), f"{len(set(table) - set(self.seen))} lost, {len(self.seen)} seen"
        place = {event_id: number for number, event_id in enumerate(self.seen)}
        versions = {}
        for event_id in self.seen:
            organization, version, before = table[event_id]
            if version is not None:
                assert version == versions.get(organization, 0) + 1, f"{organization}: {version} out of order"
                versions[organization] = version
            # What its session had written itself may have been rolled back with a savepoint.
            if before in place and (not self.divided or table[before][0] == organization):
                assert place[before] < place[event_id], f"{event_id} came before {before}, which its writer had seen"


def play(database, seed, divided, steps):
    print(f"seed {seed}")
    story = Story(database, seed, divided)
    try:
        for _ in range(steps):
            story.step()
            if story.chance.random() < 0.3:
                story.read()
        story.finish()
        story.check()
        assert story.resumed > 0
        assert (story.most_entries > 1) is divided
        assert len(story.seen) > steps / 5
    finally:
        for name in story.prepared:
            with database.connect(role=None, autocommit=True) as conn:
                conn.execute(f"ROLLBACK PREPARED '{name}'")


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(1, id="short"),
        pytest.param(60, id="long", marks=[pytest.mark.faults_long, pytest.mark.timeout(1_200)]),
    ],
)
@pytest.mark.parametrize("divided", [False, True], ids=["one entry", "many entries"])
def test_every_committed_row_is_read_once_and_after_what_its_writer_had_seen(divided, seeds, postgres, template):
    first = int(os.environ.get("AFLUENTE_TEST_SEED") or random.SystemRandom().randrange(10**6))
    for seed in range(first, first + seeds):
        with clone(postgres, template) as database:
            play(database, seed, divided, steps=400 if seeds > 1 else 250)
