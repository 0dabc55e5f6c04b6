"""A worker that is not in the registry: run from the folder it lies in, by `module:Class`."""

import pytest

from consumers import workers
from consumers.errors import BadWorker, UnknownWorker

SOURCE = """
from consumers import TransactionalWorker


class LoyaltyWorker(TransactionalWorker):
    name = "loyalty-worker"
    event_types = frozenset({"loyalty.earned"})

    async def handle(self, delivery, ctx):
        await ctx.connection.execute(
            "INSERT INTO loyalty_points (organization_id, points) VALUES (%s, %s)",
            (delivery.organization_id, delivery.payload["points"]),
        )
"""
TABLE = """
CREATE TABLE loyalty_points (organization_id uuid NOT NULL, points integer);
SELECT tenancy.protect('loyalty_points');
GRANT SELECT, INSERT ON loyalty_points TO afluente_app;
"""


def test_a_worker_of_ones_own_handles_its_events(tmp_path, monkeypatch, database, topics, processes):
    (tmp_path / "loyalty.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    database.execute(TABLE)
    organization = database.organization()
    topics.create_families()

    missing = processes.run("worker", "run", "loyalty:LoyaltyWorker")
    assert missing.returncode == 1
    assert "afluente topics apply --worker loyalty:LoyaltyWorker" in missing.stderr
    applied = processes.run("topics", "apply", "--worker", "loyalty:LoyaltyWorker")
    assert applied.returncode == 0, applied.stderr
    processes.start("relay", "run")
    worker = processes.start("worker", "run", "loyalty:LoyaltyWorker")
    worker.wait_for("worker.ready")
    emitted = processes.run("emit", "loyalty.earned", "--org", organization, "--payload", '{"points": 5}')
    assert emitted.returncode == 0, emitted.stderr

    worker.wait_for("worker.delivered")
    assert database.execute("SELECT organization_id, points FROM loyalty_points") == [(organization, 5)]


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("webhook-dispach-worker", UnknownWorker, "did you mean webhook-dispatch-worker"),
        ("nowhere_at_all:Worker", BadWorker, "no module is called 'nowhere_at_all'"),
        ("consumers.worker:Nothing", BadWorker, "has no class Nothing"),
        ("consumers.worker:Policy", BadWorker, "is not a Worker"),
    ],
)
def test_what_is_no_worker_is_refused_with_what_to_do(name, error, said):
    with pytest.raises(error, match=said):
        workers.load(name)
