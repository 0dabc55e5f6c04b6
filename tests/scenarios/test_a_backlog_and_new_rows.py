"""S13: a relay is stopped with rows waiting, and started while new ones arrive. Restarts of the broker and of Postgres
under load: `tests/faults/test_relay_servers.py`."""

import threading
import time

import pytest

from tests.producers.relay.oracle import assert_exactly_once_in_order


@pytest.mark.parametrize(
    "rows",
    [pytest.param(500, id="short"), pytest.param(10_000, id="long", marks=pytest.mark.faults_long)],
)
def test_old_rows_go_before_new_ones_and_a_stop_leaves_nothing_half_done(
    rows, database, topics, writers, reader, processes
):
    for number in range(rows // 100):
        writers.commit(100, writers.organizations[number % 4])
    relay = processes.start("relay", "run", "--chunk-rows", "20")
    storm = threading.Thread(target=writers.storm, args=(rows // 5,), kwargs={"threads": 4, "seed": 13})
    storm.start()
    reader.wait_for(60)
    began = time.monotonic()
    assert relay.terminate(timeout=10) == 0
    assert time.monotonic() - began < 10
    assert len(reader.read_to_the_end()) < rows, "it had finished before it was stopped"
    relay = processes.start("relay", "run")
    storm.join()
    reader.wait_for(rows + rows // 5)
    assert relay.terminate() == 0
    assert_exactly_once_in_order(database, reader.read_to_the_end())
