"""The file's time says when the loop last turned, and is touched no more often than that needs."""

from types import SimpleNamespace

import pytest

from afluente.telemetry import heartbeat


@pytest.fixture(autouse=True)
def _off():
    yield
    heartbeat.to_file(None)


def test_without_a_file_a_beat_does_nothing(tmp_path):
    heartbeat.beat()
    assert not list(tmp_path.iterdir())


def test_a_beat_makes_the_file_and_renews_it_when_it_is_due(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: now[0]))
    path = tmp_path / "beat"
    heartbeat.to_file(path)
    heartbeat.beat()
    assert path.exists()
    path.unlink()
    now[0] += heartbeat.EVERY_S - 0.1
    heartbeat.beat()
    assert not path.exists()
    now[0] += 0.2
    heartbeat.beat()
    assert path.exists()


@pytest.mark.parametrize("command", [("relay", "run"), ("worker", "run", "webhook-dispatch-worker"), ("stream", "run")])
def test_each_long_running_process_renews_it(command, processes, topics, tmp_path):
    topics.create_declared(["webhook-dispatch-worker"])
    path = tmp_path / "beat"
    process = processes.start(*command, env={"AFLUENTE_HEARTBEAT_FILE": path, "AFLUENTE_SECRETS_KEY": KEY})
    process.wait_for(f"{command[0]}.ready", timeout=60)
    process.terminate(timeout=60)
    assert path.exists(), process.log


KEY = "k1:" + "A" * 43 + "="
