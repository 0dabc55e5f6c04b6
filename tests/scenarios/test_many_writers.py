"""S4: thirty-two writers of single rows, and what the relay costs them. The figures: `afluente bench relay`."""

import statistics
import threading
import time

import pytest

from tests.producers.relay.oracle import assert_exactly_once_in_order
from tests.producers.relay.running import relay_of

WRITERS = 32
OURS = "application_name LIKE 'afluente-relay%' AND datname = current_database()"


def test_rows_of_32_writers_go_out_without_a_notification_and_past_killed_connections(
    database, topics, writers, reader
):
    organizations = writers.organizations + [
        writers.add(database.organization(f"Loja {number}")) for number in range(WRITERS - len(writers.organizations))
    ]
    stop, written = threading.Event(), []
    pace = 0.03  # about a thousand rows/s: what saturates the machine is for the long form

    def write(organization):
        with database.connect(autocommit=True) as conn:
            while not stop.wait(pace):
                with conn.transaction():
                    writers.emit(conn, organization)
                written.append(time.monotonic())

    threads = [threading.Thread(target=write, args=(organization,)) for organization in organizations]
    with relay_of(topics, database):
        for thread in threads:
            thread.start()
        try:
            reader.wait_for(300)
            database.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {OURS}")
            reader.wait_for(len(reader.records) + 300)
            ((listening,),) = database.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE query ILIKE 'listen %' AND datname = current_database()"
            )
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        reader.wait_for(len(written), timeout=10)
    assert listening == 0
    assert database.execute("SELECT pg_notification_queue_usage()") == [(0.0,)]
    assert_exactly_once_in_order(database, reader.read_to_the_end())


@pytest.mark.faults_long
@pytest.mark.timeout(600)
def test_32_writers_at_80_percent_keep_their_rate_with_the_relay_on(database, topics, writers, reader):
    """Alternating, 10 s each, three of each; the commits' p99 too."""
    saturated, _ = load(database, writers, 5.0, None)
    off, on = [], []
    for _ in range(3):
        off.append(load(database, writers, 10.0, 0.8 * saturated))
        with relay_of(topics, database):
            reader.wait_for(len(database.execute("SELECT 1 FROM event_log")), timeout=120)  # nothing to catch up with
            on.append(load(database, writers, 10.0, 0.8 * saturated))
    achieved = statistics.median(rate for rate, _ in on) / (0.8 * saturated)
    slower = statistics.median(p99 for _, p99 in on) / statistics.median(p99 for _, p99 in off)
    print(f"saturated {saturated:.0f}/s; off {off}; on {on}; achieved {achieved:.3f}; p99 x{slower:.2f}")
    assert achieved >= 0.95
    assert slower <= 1.5


def load(database, writers, seconds, offered):
    """32 connections for so long, at `offered` rows/s (None: as fast as they can). Rows/s, p99 of a commit in s."""
    ends, took = time.monotonic() + seconds, []
    pace = threading.Event()

    def write(number):
        organization = writers.organizations[number % len(writers.organizations)]
        due = time.monotonic() + (number / offered if offered else 0)
        with database.connect() as conn:
            while time.monotonic() < ends:
                if offered:
                    pace.wait(max(0.0, due - time.monotonic()))
                    due += WRITERS / offered
                conn.execute("SELECT emit_event_for(%s, 'probe.loaded', 'probe', NULL, '{}')", [organization])
                began = time.perf_counter()
                conn.commit()
                took.append(time.perf_counter() - began)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(took) / seconds, statistics.quantiles(took, n=100)[98]
