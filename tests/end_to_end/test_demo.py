"""The demo as people run it: a command whose exit status is the reconciliation's."""

import os
import re
import subprocess
import threading
import time
import urllib.request

import psycopg
import pytest

from afluente import kafka as clients
from afluente.local.processes import COMMAND


@pytest.fixture
def demo(tmp_path, kafka, postgres):
    """Runs `afluente demo ARGUMENTS` on this run's servers; returns the completed process."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("AFLUENTE_", "LOG_"))}
    env |= {"KAFKA_BOOTSTRAP_SERVERS": kafka.bootstrap_servers, "DATABASE_URL": postgres.url}

    def run(*arguments):
        return subprocess.run(
            [COMMAND, "demo", "--state-dir", tmp_path / "demo", *arguments],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=170,
        )

    return run


@pytest.fixture
def leftovers(kafka, postgres):
    """Whether a demo that said `told` has left its topics or its database on the servers."""

    def left(told):
        run = re.search(r"demo\.(\w+)\.events\.", told).group(1)
        admin = clients.admin(kafka.settings)
        # the broker deletes topics in its own time
        _wait_until(lambda: not [t for t in admin.list_topics(timeout=10).topics if t.startswith(f"demo.{run}.")])
        with postgres.admin() as conn:
            name = f"afluente_demo_{run}"
            return conn.execute("SELECT datname FROM pg_database WHERE datname = %s", [name]).fetchall()

    return left


def _wait_until(condition, timeout_s=30.0):
    """The worker is another process, and its log a file: the row is looked at until it says so."""
    end, pause = time.monotonic() + timeout_s, threading.Event()
    while not condition():
        assert time.monotonic() < end, f"not within {timeout_s} s"
        pause.wait(0.05)


@pytest.mark.timeout(300)
def test_everything_adds_up_and_the_failures_on_purpose_are_seen(demo, leftovers):
    ran = demo()

    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    sent = re.findall(r"^  in +(shopify|nuvemshop|stripe|whatsapp) .* (\d{3})( \(.*\))?$", ran.stdout, re.MULTILINE)
    assert len(sent) >= 40
    assert {source for source, _, _ in sent} == {"shopify", "nuvemshop", "stripe", "whatsapp"}
    assert [status for _, status, note in sent if "a repeat" in note] == ["200"]
    assert [status for _, status, note in sent if "signature does not fit" in note] == ["401"]
    assert [status for _, status, note in sent if "nobody knows" in note] == ["200"]
    assert "lead.won -> third-time-lucky, attempt 3" in ran.stdout
    assert "lead.lost -> never-works: after 8 attempts" in ran.stdout
    assert re.search(r"afluente dlq retry [0-9a-f-]{36}", ran.stdout)
    assert re.search(r"p50 [\d.]+ ms, p99 [\d.]+ ms over \d+ records", ran.stdout)
    assert "everything adds up" in ran.stdout
    # nothing of it is left on servers that are somebody's
    assert leftovers(ran.stdout) == []


@pytest.mark.timeout(300)
@pytest.mark.faults_long
def test_a_kept_demo_goes_on_until_it_is_stopped(demo, tmp_path, leftovers):
    ran = demo("--keep")
    try:
        assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
        env_file = (tmp_path / "demo" / "env").read_text()
        env = os.environ | dict(re.findall(r"^export (\w+)='?(.*?)'?$", env_file, re.MULTILINE))

        def command(*arguments):
            return subprocess.run([COMMAND, *arguments], env=env, capture_output=True, text=True, timeout=60)

        listed = command("dlq", "list", "--format", "jsonl")
        assert '"event_type": "lead.lost"' in listed.stdout
        again = demo()
        assert again.returncode == 1
        assert "afluente demo --stop" in again.stderr
        assert command("verify").returncode == 0
        # as the demo says: mend the receiver, give the letter back, see it delivered
        control, body = re.search(r"curl -X PUT (\S+) .* -d '(.*)'", ran.stdout).groups()
        with urllib.request.urlopen(urllib.request.Request(control, body.encode(), method="PUT"), timeout=10):
            pass
        retried = command("dlq", "retry", "--worker", "webhook-dispatch-worker", "--reason", "mended", "--yes")
        assert retried.returncode == 0, retried.stderr
        delivered = "SELECT count(*) FROM event_delivery WHERE state = 'dead'"
        with psycopg.connect(env["DATABASE_URL"], autocommit=True) as conn:
            _wait_until(lambda: conn.execute(delivered).fetchone() == (0,))
    finally:
        stopped = demo("--stop")
    assert stopped.returncode == 0
    assert demo("--stop").returncode == 3
    assert leftovers(ran.stdout) == []
