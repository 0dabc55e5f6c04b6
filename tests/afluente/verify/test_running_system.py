"""The reconciliation beside the real processes at work: a system that is in order looks so at any moment."""

import asyncio
import threading
from datetime import UTC, datetime
from decimal import Decimal
from uuid import uuid4

import pytest

from afluente import postgres
from afluente.local.services.receiver import Receiver
from afluente.secrets import Keyring
from afluente.verify import reconcile
from consumers.outbound import subscriptions
from producers import emit

WORKER = "webhook-dispatch-worker"
LEAD = {"name": "Ana", "source": "site", "pipeline_id": "p", "stage_id": "s"}


class Traffic(threading.Thread):
    """Leads and facts about contacts, committed as fast as they go, some rolled back, until told to stop."""

    def __init__(self, database, organization):
        super().__init__(daemon=True)
        self.database = database
        self.organization = organization
        self.stopped = threading.Event()
        self.began = threading.Event()
        self.committed = 0
        (self.contact,) = database.execute(
            "INSERT INTO contacts (organization_id, source) VALUES (%s, 'test') RETURNING id", (organization,)
        )[0]

    def run(self):
        with postgres.connect(self.database.url) as conn:
            while not self.stopped.wait(0.1):
                self.write(conn)
                self.began.set()

    def write(self, conn):
        with postgres.act_for_sync(conn, self.organization):
            emit(conn, "lead.created", entity_kind="lead", entity_id=uuid4(), payload=LEAD)
            conn.execute(
                "SELECT record_contact_event(contact_id => %s, metric_name => 'Order Paid', source => 'shopify',"
                " value => %s, external_event_id => %s)",
                (self.contact, Decimal("10.10"), f"order_paid:{uuid4()}"),
            )
        self.committed += 1
        conn.rollback() if self.committed % 5 == 0 else conn.commit()


@pytest.mark.timeout(240)
async def test_it_finds_nothing_while_everything_runs_and_all_of_it_at_the_end(database, topics, processes):
    topics.create_worker(WORKER)
    organization = database.organization()
    key = Keyring.generate("test")
    env = {
        "AFLUENTE_SECRETS_KEY": key,
        "AFLUENTE_WEBHOOK_ALLOW_NETWORKS": "127.0.0.0/8",
        "AFLUENTE_BACKOFF_SCALE": "0.01",
    }
    async with Receiver() as receiver:
        with database.connect() as conn:
            for name in ("up", "down"):
                subscriptions.create(
                    conn,
                    Keyring.parse(key),
                    organization_id=organization,
                    url=receiver.url(name),
                    event_types=["lead.created"],
                )
        receiver.order("down", then={"do": "answer", "status": 500})
        with database.connect() as conn, postgres.act_for_sync(conn, organization):
            # Past the client's check, as SQL can: the relay will set it aside.
            conn.execute("""SELECT emit_event('lead.created', 'lead', uuidv7(), '{"name": 1}')""")
        traffic = Traffic(database, organization)
        await check_while_running(database, topics, processes, traffic, env)


async def check_while_running(database, topics, processes, traffic, env):
    def verify(wait_s):
        return reconcile(topics.settings, database.url, now=datetime.now(UTC), wait_s=wait_s)

    running = [
        processes.start("relay", "run", env=env),
        processes.start("worker", "run", WORKER, env=env),
        processes.start("stream", "run", env=env),
    ]
    traffic.start()
    try:
        for process, event in zip(running, ("relay.ready", "worker.ready", "stream.ready"), strict=True):
            await asyncio.to_thread(process.wait_for, event, 60)
        for _ in range(4):
            report = await asyncio.to_thread(verify, 30)
            assert report.findings == []
    finally:
        traffic.stopped.set()
        await asyncio.to_thread(traffic.join)
    (rows,) = database.execute("SELECT count(*) FROM event_log WHERE event_type = 'lead.created'")[0]
    leads = rows - 1
    assert leads > 20
    await asyncio.to_thread(running[2].wait_for_total, "stream.committed", "count", leads, 60)
    await asyncio.to_thread(running[1].wait_for, "worker.delivered", 90, leads)
    for process in reversed(running):
        await asyncio.to_thread(process.terminate)
    report = await asyncio.to_thread(verify, 0)
    assert report.findings == []
    published, deliveries, summaries = report.checks
    assert published.figures["records"] == published.figures["rows"] - 1 >= 2 * leads
    assert published.figures["relay_dead_letters"] == 1
    assert deliveries.figures["done"] == leads
    assert deliveries.figures["without_rows"] == 0
    assert summaries.figures["counted"] == summaries.figures["recounted"] == leads
