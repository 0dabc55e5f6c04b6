"""C18: memory grows behind slow handlers. What a process holds is bounded by bytes, not only by a count of records."""

import psutil
import pytest

import schemas
from afluente import kafka as clients
from tests.consumers.runtime.support import MESSAGE, ROOT, create_topics, effect_table, organizations_everywhere, row

LARGE = 100_000
RECORDS = 2000
BOUND_MB = 150


@pytest.mark.faults_long
@pytest.mark.timeout(300)
def test_records_of_100_kb_behind_a_slow_handler_stay_on_the_broker(database, topics, processes):
    effect_table(database)
    create_topics(topics, "caller-worker")
    organizations = organizations_everywhere(database, 6)
    producer = clients.producer(topics.settings, compression_type="none", linger_ms=50)
    for number in range(RECORDS):
        event = row(organizations[number % 6], payload=MESSAGE | {"body": f"{number} ".ljust(LARGE, "x")})
        producer.produce(
            topics.event("message.received"),
            schemas.encode(event),
            key=str(event.organization_id).encode(),
            headers=schemas.headers(event),
        )
        producer.poll(0)
        if number % 100 == 99:
            assert producer.flush(60) == 0
    env = {"PYTHONPATH": ROOT, "CALL_S": "1"}
    worker = processes.start("worker", "run", "tests.consumers.runtime.workers:Caller", env=env)
    worker.wait_for("worker.ready")
    process, most = psutil.Process(worker.pid), 0
    for count in range(100, RECORDS + 1, 100):
        worker.wait_for("worker.delivered", count=count, timeout=60)
        most = max(most, process.memory_info().rss)
    assert worker.terminate(timeout=60) == 0
    print(f"{most / 1e6:.0f} MB")
    assert most < BOUND_MB * 1e6
