"""C11: a tier read in log order loses its jitter. 1,000 failures of one second come back as they were drawn."""

import random
from collections import Counter
from datetime import UTC, datetime

import pytest

from consumers import ExternalWorker
from tests.consumers.complaints.support import RECEIVED
from tests.consumers.runtime.support import create_topics, organizations_everywhere, produce, row


class Once(ExternalWorker):
    """Fails the first time, and notes when it runs again."""

    name = "once-worker"
    event_types = frozenset({RECEIVED})

    def __init__(self):
        self.ran = {}

    async def call(self, delivery, prepared):
        if delivery.attempt == 1:
            raise RuntimeError("once")
        self.ran[str(delivery.event.id)] = datetime.now(UTC).timestamp()


@pytest.mark.faults_long
@pytest.mark.timeout(180)
async def test_a_thousand_failures_come_back_spread_over_the_jitter_of_the_30_s_tier(database, topics, running):
    create_topics(topics, "once-worker")
    organizations = organizations_everywhere(database, 6)
    produce(topics, [row(organizations[n % 6]) for n in range(1000)])
    once = Once()
    async with running(once, random=random.Random(11).random) as worker:
        await worker.of("worker.retried", count=1000, timeout=60)
        await worker.of("worker.delivered", count=1000, timeout=90)
        retried = [fields for name, fields in worker.signals.seen if name == "worker.retried"]
    due = {fields["event_id"]: datetime.fromisoformat(fields["next_attempt_at"]).timestamp() for fields in retried}
    late = [once.ran[event] - at for event, at in due.items()]
    assert min(late) >= 0
    assert max(late) <= 1
    in_a_second = Counter(int(moment) for moment in once.ran.values())
    assert max(in_a_second.values()) < 150
    assert max(once.ran.values()) - min(once.ran.values()) > 8
