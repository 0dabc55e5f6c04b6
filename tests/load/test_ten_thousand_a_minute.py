"""A steady load through the whole pipeline: 10,000 contact events a minute, from the commit to the summary.

Not part of `make test`: `make load-stream`, for one minute; LOAD_MINUTES=10 for the ten of the validation plan. It
fails when an event is lost or counted twice, and when the pipeline falls behind; it prints the delays it saw.
"""

import os
import statistics
import threading
import time
import uuid
from datetime import UTC, datetime

import psycopg
import pytest
from confluent_kafka import KafkaError

from afluente import kafka as clients

A_MINUTE = 10_000
MINUTES = float(os.environ.get("LOAD_MINUTES", "1"))
WRITERS = 4
PER_TRANSACTION = 5
CONTACTS = 200
KEEPS_UP_S = 5.0  # 99 of 100 events of the last quarter are consumable this soon after their commit

SECRETS_KEY = "k1:" + "A" * 43 + "="
WORKERS = ("webhook-dispatch-worker",)


class Arrivals(threading.Thread):
    """A read_committed consumer that notes when each event could first be read, and how old it was then."""

    def __init__(self, settings, topic, total):
        super().__init__(daemon=True)
        self.total = total
        self.delays = {}  # event id -> (seconds since created_at, seconds since the start)
        self.twice = 0
        self.ready, self.complete = threading.Event(), threading.Event()
        self._begin = time.monotonic()
        self._consumer = clients.consumer(settings, "load-arrivals", fetch_wait_max_ms=20)
        self._consumer.subscribe([topic], on_assign=lambda *_: self.ready.set())
        self._ending = threading.Event()

    def run(self):
        while not self._ending.is_set():
            for record in self._consumer.consume(500, 0.1):
                if record.error():
                    assert record.error().code() == KafkaError._PARTITION_EOF, record.error()
                    continue
                now = datetime.now(UTC)
                headers = dict(record.headers())
                event_id = headers["ce_id"].decode()
                created_at = datetime.fromisoformat(headers["ce_time"].decode().replace("Z", "+00:00"))
                self.twice += event_id in self.delays
                self.delays[event_id] = ((now - created_at).total_seconds(), time.monotonic() - self._begin)
            if len(self.delays) >= self.total:
                self.complete.set()

    def end(self):
        self._ending.set()
        self.join(20)
        self._consumer.close()


class Writer(threading.Thread):
    """Commits its share at an even pace: each transaction has its moment, and being late is made up for."""

    def __init__(self, url, organization, contacts, transactions, every_s):
        super().__init__()
        self._url, self._organization, self._contacts = url, organization, contacts
        self._transactions, self._every_s = transactions, every_s
        self.failure = None

    def run(self):
        pace = threading.Event()  # never set: waits until the moment of the next transaction
        begin = time.monotonic()
        try:
            with psycopg.connect(self._url) as conn:
                for number in range(self._transactions):
                    pace.wait(max(0.0, begin + number * self._every_s - time.monotonic()))
                    with conn.transaction():
                        conn.execute(
                            "SELECT set_config('role', 'afluente_app', true), "
                            "set_config('app.organization_id', %s, true)",
                            [str(self._organization)],
                        )
                        for step in range(PER_TRANSACTION):
                            contact = self._contacts[(number + step) % len(self._contacts)]
                            conn.execute(
                                "SELECT record_contact_event(contact_id => %s, metric_name => 'Order Paid', "
                                "source => 'load', external_event_id => %s, value => 10.00, entity_type => 'order')",
                                [contact, f"order_paid:{uuid.uuid4()}"],
                            )
        except Exception as error:
            self.failure = error


@pytest.mark.timeout(300 + MINUTES * 120)
def test_ten_thousand_events_a_minute_reach_their_summaries(database, topics, processes):
    topics.create_declared(WORKERS)
    organizations = [database.organization(f"Loja {number}") for number in range(WRITERS)]
    contacts = {
        organization: [
            row[0]
            for row in database.execute(
                "INSERT INTO contacts (organization_id, name, source) SELECT %s, 'x', 'load' "
                "FROM generate_series(1, %s) RETURNING id",
                [organization, CONTACTS],
            )
        ]
        for organization in organizations
    }
    transactions = round(A_MINUTE * MINUTES / WRITERS / PER_TRANSACTION)
    total = transactions * WRITERS * PER_TRANSACTION

    processes.start("relay", "run").wait_for("relay.ready", timeout=60)
    stream = processes.start("stream", "run")
    for worker in WORKERS:
        env = {"AFLUENTE_SECRETS_KEY": SECRETS_KEY}
        processes.start("worker", "run", worker, env=env).wait_for("worker.ready", timeout=60)
    stream.wait_for("stream.ready", timeout=60)
    arrivals = Arrivals(topics.settings, topics.names.event("contact_event.recorded"), total)
    arrivals.start()
    assert arrivals.ready.wait(60)

    begin = time.monotonic()
    writers = [
        Writer(database.url, organization, contacts[organization], transactions, 60 * MINUTES / transactions)
        for organization in organizations
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.failure is None
    written_s = time.monotonic() - begin
    assert arrivals.complete.wait(60), f"{len(arrivals.delays)} of {total} events arrived"
    arrivals.end()
    assert arrivals.twice == 0

    # the reconciliation waits for nothing but what is committed and not yet published
    verified = None
    for _ in range(30):
        verified = processes.run("verify", "--wait", "5", env={"AFLUENTE_SECRETS_KEY": SECRETS_KEY}, timeout=120)
        counted = database.execute("SELECT coalesce(sum(event_count), 0)::bigint FROM contact_metrics_summary")[0][0]
        if verified.returncode == 0 and counted == total:
            break
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert counted == total

    in_order = [delay for delay, _ in sorted(arrivals.delays.values(), key=lambda pair: pair[1])]
    p50, p99 = quantile(in_order, 50), quantile(in_order, 99)
    late = quantile(in_order[-len(in_order) // 4 :], 99)
    print(
        f"\nload: {total} events in {written_s:.0f} s ({total / written_s * 60:.0f} a minute), {WRITERS} writers; "
        f"commit to consumer p50 {p50 * 1000:.0f} ms, p99 {p99 * 1000:.0f} ms, "
        f"p99 of the last quarter {late * 1000:.0f} ms, slowest {max(in_order) * 1000:.0f} ms"
    )
    assert written_s < 60 * MINUTES * 1.1 + 5, "the writers did not keep their own pace: no figure for the pipeline"
    assert late < KEEPS_UP_S


def quantile(values, percent):
    return statistics.quantiles(values, n=100)[percent - 1]
