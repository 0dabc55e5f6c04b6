"""S8: one transaction of very many rows. Memory is bounded, so are the Kafka transactions, and others do not wait."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

import schemas
from tests.producers.relay.oracle import EVENT_TYPE, Reader, event_id_of

AT_MOST_MB = 120
BACK_TO_NORMAL_S = 10.0
CHUNK_ROWS = 2_500


class Few(Reader):
    """Keeps of each record what is asked below: 200,000 of them are not to be this process's memory."""

    def _take(self, record):
        if record is not None and record.error() is None:
            event = schemas.decode(record.value())
            place = (record.topic(), record.partition(), record.offset())
            at = datetime.fromtimestamp(record.timestamp()[1] / 1000, UTC)
            self.records.append((place, event_id_of(record), event.organization_id, event.payload["version"], at))
        else:
            super()._take(record)


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(20_000, id="short"),
        pytest.param(200_000, id="long", marks=[pytest.mark.faults_long, pytest.mark.timeout(300)]),
    ],
)
def test_a_huge_transaction_is_published_in_pieces_within_bounded_memory(rows, database, topics, writers, processes):
    topics.create_families()
    reader = Few(topics)
    relay = processes.start("relay", "run")
    relay.wait_for("relay.ready")
    idle_mb = peak_mb(relay.pid)
    small, huge = writers.organizations[0], writers.organizations[1]
    with database.connect(role=None) as conn:
        conn.execute(
            "INSERT INTO public.event_log (organization_id, event_type, entity_kind, payload)"
            " SELECT %s, %s, 'probe', jsonb_build_object('version', n, 'padding', repeat('x', 1000))"
            "   FROM generate_series(1, %s) n",
            [huge, EVENT_TYPE, rows],
        )
        writers.commit(1, small)  # while it is open
        reader.wait_for(1)
    huge_at = datetime.now(UTC)
    writers.commit(1, small)
    reader.wait_for(rows + 2, timeout=200)
    last_at = datetime.now(UTC)
    writers.commit(1, small)
    reader.wait_for(rows + 3)
    # By the broker's clock, which is this machine's: the test's own reading of so much takes longer than the relay.
    arrived = sorted(at for _, _, organization, _, at in reader.records if organization == small)
    assert (arrived[1] - huge_at).total_seconds() < BACK_TO_NORMAL_S
    assert (arrived[2] - last_at).total_seconds() < 1.0
    print(f"peak RSS {peak_mb(relay.pid):.0f} MB, {idle_mb:.0f} before the first row")
    assert peak_mb(relay.pid) < AT_MOST_MB
    assert relay.terminate() == 0

    place_of, versions = {}, {small: [], huge: []}
    for place, event_id, organization, version, _ in sorted(reader.records):
        assert event_id not in place_of
        place_of[event_id] = place
        versions[organization].append(version)
    assert versions == {small: [1, 2, 3], huge: list(range(1, rows + 1))}
    assert {row[0] for row in database.execute("SELECT id FROM event_log")} == set(place_of)
    positions = len(topics.records(topics.positions))
    assert positions >= rows / CHUNK_ROWS, "more rows in one Kafka transaction than a chunk may have"
    reader.close()


def peak_mb(pid):
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024
