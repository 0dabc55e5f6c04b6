"""What a killed test run leaves behind is ended by the next one; what a running one has is left alone."""

import os
import sys

import psutil

from afluente import local
from afluente.local import process
from tests.fixtures.servers import stop_abandoned


def test_servers_of_a_killed_run_are_ended_and_those_of_a_running_one_are_not(tmp_path):
    dead, alive = tmp_path / "afluente-tests-dead", tmp_path / "afluente-tests-alive"
    tickets = {}
    for folder, owner in (
        (dead, process.Ticket(os.getpid(), 1.0)),
        (alive, process.Ticket(os.getpid(), psutil.Process().create_time())),
    ):
        (folder / "kafka").mkdir(parents=True)
        owner.save(folder / "owner.json")
        tickets[folder] = process.spawn([sys.executable, "-c", "import signal; signal.pause()"], tmp_path / "log")
        tickets[folder].save(folder / "kafka" / "ticket.json")
    server = local.start_postgres(dead / "postgres", durable=False)
    try:
        stop_abandoned(tmp_path)
        assert not tickets[dead].alive
        assert not server.alive
        assert not dead.exists()
        assert tickets[alive].alive
        assert alive.exists()
    finally:
        for ticket in tickets.values():
            process.kill(ticket)
