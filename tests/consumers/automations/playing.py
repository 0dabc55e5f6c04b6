"""What the tests of automations share: the worker's handlers run on the real database, in the transactions that the
runtime gives them, over every event that was emitted, in order. The relay's part (deferred events that fall due) is
played by its own SQL function, at the time of the test's clock."""

import json
from collections import deque
from datetime import UTC, datetime, timedelta

from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

import schemas
from afluente import postgres
from afluente.secrets import Keyring
from consumers import ExternalWorker
from consumers.automations import book
from consumers.runtime import testing
from consumers.workers.automation import AutomationWorker
from tests.fixtures.clock import SettableClock

LINKS = "https://l.example"
ATTEMPTS = 3


def published(row):
    """An event as it comes from its topic: what does not fit its schema fails here, as it would at the relay."""
    texts = {name: json.dumps(row[name]).encode() for name in ("payload", "metadata")}
    return schemas.decode(schemas.encode(schemas.Row(**{name: row[name] for name in schemas.Row._fields} | texts)))


class Play:
    """One organization with its automations, and the worker."""

    def __init__(self, database, links_url=LINKS):
        self.database = database
        self._owner = database.connect(role=None, autocommit=True)
        self._owner.execute("SET search_path = public")
        self.organization = database.organization("Loja")
        self.keyring = Keyring.parse(Keyring.generate("test"))
        # a little ahead of the server's, whose clock gives events their times
        self.clock = SettableClock(datetime.now(UTC) + timedelta(seconds=1))
        self.workers = [AutomationWorker(links_url)]
        self._seen = set()

    # What there is

    def automation(self, trigger, *steps, name=None, status="enabled", conditions=None, secrets=()):
        source = {
            "name": name or f"automation {self.scalar('SELECT count(*) FROM automations')}",
            "trigger": {"type": trigger} if isinstance(trigger, str) else trigger,
            "steps": list(steps),
        } | ({} if conditions is None else {"conditions": conditions})
        with postgres.connect(self.database.url) as conn:
            written = book.create(conn, self.keyring, self.organization, source)
            found = book.find(conn, str(written.id))
            for secret, value in dict(secrets).items():
                book.set_secret(conn, self.keyring, found, secret, value.encode())
            book.set_status(conn, found, status, self.clock.now())
        return written.id

    def set_status(self, automation, status):
        with postgres.connect(self.database.url) as conn:
            return book.set_status(conn, book.find(conn, str(automation)), status, self.clock.now())

    def contact(self, name="Ana Souza", phone="+5511987654321", state="subscribed", tags=()):
        contact = self.scalar(
            "INSERT INTO contacts (organization_id, name, phone_e164, source, subscriber_state)"
            " VALUES (%s, %s, %s, 'test', %s) RETURNING id",
            self.organization, name, phone, state,
        )  # fmt: skip
        if phone:
            self.execute(
                "INSERT INTO contact_identities (organization_id, kind, value, contact_id)"
                " VALUES (%s, 'phone', %s, %s)",
                self.organization, phone, contact,
            )  # fmt: skip
        for tag in tags:
            self.execute(
                "WITH t AS (INSERT INTO tags (organization_id, name) VALUES (%s, %s)"
                " ON CONFLICT (organization_id, name) DO UPDATE SET name = excluded.name RETURNING id)"
                " INSERT INTO contact_tag_links (organization_id, contact_id, tag_id) SELECT %s, %s, id FROM t",
                self.organization, tag, self.organization, contact,
            )  # fmt: skip
        return contact

    def channel(self):
        return self.scalar(
            "INSERT INTO channels (organization_id, kind, source, external_id) VALUES (%s, 'whatsapp', 'whatsapp', %s)"
            " RETURNING id",
            self.organization, str(self.scalar("SELECT gen_random_uuid()")),
        )  # fmt: skip

    # What happens

    def record(self, contact, metric="Order Paid", event_type=None, fact=None, **given):
        """A contact event, as any source records it."""
        given = {"properties": {}, "value": None, "entity_type": None, "object_id": None, "metadata": {}} | given
        with postgres.connect(self.database.url) as conn, postgres.act_for_sync(conn, self.organization):
            return conn.execute(
                "SELECT record_contact_event(contact_id => %s, metric_name => %s, event_type => %s,"
                " source => 'shopify', external_event_id => %s, value => %s, properties => %s, entity_type => %s,"
                " object_id => %s, metadata => %s)",
                [contact, metric, event_type, fact, given["value"], Jsonb(given["properties"]), given["entity_type"],
                 given["object_id"], Jsonb(given["metadata"])],
            ).fetchone()[0]  # fmt: skip

    def emit(self, event_type, entity_kind, entity_id, payload, metadata=None):
        return self.scalar(
            "SELECT emit_event_for(%s, %s, %s, %s, %s, %s)",
            self.organization, event_type, entity_kind, entity_id, Jsonb(payload), Jsonb(metadata or {}),
        )  # fmt: skip

    def pass_time(self, span):
        """The clock moves on, and what is due by it is released as the relay would."""
        self.clock.advance(span)
        self.execute("SELECT release_due_deferred(1000, %s)", self.clock.now())

    async def work(self, limit=200):
        """Have every event handled that was not yet, and what follows from it."""
        ran = []
        async with await postgres.connect_async(self.database.url, autocommit=True) as conn:
            while waiting := deque(event for event in self.events() if event.id not in self._seen):
                for event in waiting:
                    self._seen.add(event.id)
                    for worker in self.workers:
                        if event.event_type in worker.event_types:
                            for target in await testing.targets(worker, event, conn):
                                ran += await self._attempts(worker, event, conn, target)
                                assert len(ran) < limit, "it does not end"
        return ran

    async def _attempts(self, worker, event, conn, target):
        """The runs of one delivery: a call has three attempts here, everything else one."""
        ran = []
        for attempt in range(1, ATTEMPTS + 1 if isinstance(worker, ExternalWorker) else 2):
            due = None if attempt == ATTEMPTS else self.clock.now() + timedelta(seconds=30)
            ran.append(
                await testing.run(
                    worker, event, conn, target=target, attempt=attempt, next_attempt_at=due, clock=self.clock
                )
            )
            if ran[-1].outcome not in ("failed", "retried"):
                break
        return ran

    async def again(self, event_id):
        """The same event once more, whatever became of it."""
        [event] = [event for event in self.events() if event.id == event_id]
        async with await postgres.connect_async(self.database.url, autocommit=True) as conn:
            for worker in self.workers:
                if event.event_type in worker.event_types:
                    for target in await testing.targets(worker, event, conn):
                        await self._attempts(worker, event, conn, target)

    async def tick(self):
        """The worker's periodic hook; the events of this organization that it emitted."""
        before = {event.id for event in self.events()}
        async with await postgres.connect_async(self.database.url, autocommit=True) as conn:
            await testing.run_periodic(self.workers[0], conn, clock=self.clock)
        return [event for event in self.events() if event.id not in before]

    # What came of it

    def events(self, event_type=None):
        with self._owner.transaction(), postgres.act_for_sync(self._owner, self.organization):
            rows = self._owner.cursor(row_factory=dict_row).execute("SELECT * FROM event_log ORDER BY seq").fetchall()
        events = [published(row) for row in rows]
        return [event for event in events if event_type in (None, event.event_type)]

    def facts(self, source="automation"):
        """(metric, properties) of the contact events of a source, in order."""
        return self.rows(
            "SELECT metric_name, properties FROM contact_events WHERE source = %s ORDER BY created_at, id", source
        )

    def runs(self, automation=None):
        return book.runs(self._owner, automation_id=automation, organization_id=self.organization)[::-1]

    def states(self, automation=None):
        return [(run["state"], run["reason"]) for run in self.runs(automation)]

    def steps(self, automation=None):
        return [(step["state"], step["reason"]) for run in self.runs(automation) for step in run["steps"]]

    def tags(self, contact):
        return [
            name
            for (name,) in self.rows(
                "SELECT t.name FROM contact_tag_links l JOIN tags t ON t.id = l.tag_id"
                " WHERE l.contact_id = %s ORDER BY 1",
                contact,
            )
        ]

    def rows(self, query, *parameters):
        """As the organization sees it: another test's rows in the same database are another organization's."""
        with self._owner.transaction(), postgres.act_for_sync(self._owner, self.organization):
            return self._owner.execute(query, list(parameters)).fetchall()

    def execute(self, query, *parameters):
        """As the owner of everything."""
        self._owner.execute(query, list(parameters))

    def scalar(self, query, *parameters):
        return self._owner.execute(query, list(parameters)).fetchone()[0]
