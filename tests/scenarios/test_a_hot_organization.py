"""S14: one organization writes nine rows of ten, faster than they can go out; two hundred others write a little. They
do not wait behind it, and its own order is unbroken."""

import statistics
import threading
import time

import pytest

from tests.producers.relay.oracle import Reader, event_id_of

SMALL = 200
P99_S = 2.0
BACKLOG = 15_000  # rows of the hot one that wait when the others begin
# Small enough for a writer to outrun the relay on any machine.
CHUNK_ROWS = 60


class Delays(Reader):
    """Keeps the little that is asked below of each record, and when it was there."""

    def __init__(self, topics, hot):
        self.hot, self.hot_seen = str(hot).encode(), 0
        super().__init__(topics)

    def _take(self, record):
        if record is None or record.error() is not None:
            return super()._take(record)
        self.hot_seen += record.key() == self.hot
        seq = int(dict(record.headers())["seq"])
        self.records.append((record.key().decode(), seq, event_id_of(record), time.monotonic()))


class Writers:
    """The hot one writes two rows for each that is published, the others a hundred a second."""

    def __init__(self, database, reader, hot, small):
        self.database, self.reader, self.hot, self.small = database, reader, hot, small
        self.written, self.committed = 0, {}
        self.over = threading.Event()
        self.connection = database.connect(role=None, autocommit=True)
        self._write(BACKLOG)

    def start(self):
        self.threads = [threading.Thread(target=write) for write in (self._write_hot, self._write_small)]
        for thread in self.threads:
            thread.start()

    def stop(self):
        self.over.set()
        for thread in self.threads:
            thread.join()

    def _write_hot(self):
        while not self.over.is_set():
            if self.written > BACKLOG + 2 * self.reader.hot_seen:
                self.over.wait(0.005)
            else:
                self._write(1_000)

    def _write(self, rows):
        self.connection.execute(
            "INSERT INTO public.event_log (organization_id, event_type, entity_kind)"
            " SELECT %s, 'probe.hot', 'probe' FROM generate_series(1, %s)",
            [self.hot, rows],
        )
        self.written += rows

    def _write_small(self):
        conn, number = self.database.connect(autocommit=True), 0
        while not self.over.wait(0.01):
            number += 1
            emit = "SELECT emit_event_for(%s, 'probe.small', 'probe', NULL, '{}')"
            (event_id,) = conn.execute(emit, [self.small[number % SMALL]]).fetchone()
            self.committed[event_id] = time.monotonic()


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(4, id="short"),
        pytest.param(60, id="long", marks=[pytest.mark.faults_long, pytest.mark.timeout(300)]),
    ],
)
def test_the_others_do_not_wait_behind_a_backlog_that_grows(seconds, database, topics, processes):
    topics.create_families()
    database.execute(f"INSERT INTO organizations (name) SELECT 'small ' || n FROM generate_series(1, {SMALL}) n")
    small = [row[0] for row in database.execute("SELECT id FROM organizations")]
    hot = database.organization("hot")
    reader = Delays(topics, hot)
    writers = Writers(database, reader, hot, small)
    relay = processes.start("relay", "run", "--chunk-rows", str(CHUNK_ROWS))
    relay.wait_for("relay.ready")
    writers.start()
    try:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            reader.wait_for(len(reader.records) + 1)
        backlog = writers.written - reader.hot_seen
    finally:
        writers.stop()
    while len(reader.records) - reader.hot_seen < len(writers.committed):
        reader.wait_for(len(reader.records) + 1)
    assert relay.terminate() == 0

    delays = [at - writers.committed[e] for key, _, e, at in reader.records if e in writers.committed]
    p99 = statistics.quantiles(delays, n=100)[98]
    print(f"{len(delays)} rows of others: p99 {p99:.3f} s, {max(delays):.3f} s at most")
    print(f"{backlog} of {writers.written} rows of the hot one were waiting")
    assert backlog > BACKLOG, "the relay was not outrun: this shows nothing"
    assert p99 < P99_S
    # Everything of the others; of the hot one what was published before the relay ended, from the first row on.
    table = {}
    for organization, seq in database.execute("SELECT organization_id::text, seq FROM event_log ORDER BY seq"):
        table.setdefault(organization, []).append(seq)
    seen = {}
    for organization, seq, _, _ in reader.read_to_the_end():  # in the order of its partition
        seen.setdefault(organization, []).append(seq)
    of_the_hot = seen.pop(str(hot))
    assert of_the_hot == table.pop(str(hot))[: len(of_the_hot)]
    assert seen == table
    reader.close()
