"""`afluente emit` as a person types it."""

import json
from uuid import UUID

import pytest


@pytest.fixture
def emit(processes):
    return lambda *arguments: processes.run("emit", *arguments)


def test_an_event_of_ones_own(emit, database):
    run = emit("loyalty.earned", "--org", "Shop", "--create-org", "--payload", '{"n": 5}', "--format", "json")
    assert run.returncode == 0, run.stderr
    shown = json.loads(run.stdout)
    ((event_id, organization, kind, payload, source),) = database.execute(
        "SELECT id, organization_id, entity_kind, payload, metadata ->> 'source' FROM public.event_log"
    )
    assert (UUID(shown["event_id"]), UUID(shown["organization_id"])) == (event_id, organization)
    assert (kind, payload, source) == ("loyalty", {"n": 5}, "cli")
    assert "1 committed" in run.stderr
    # the organization is found by its name and its id the next time
    for named in ("Shop", str(organization)):
        assert emit("loyalty.earned", "--org", named).returncode == 0
    assert database.execute("SELECT count(*), count(DISTINCT organization_id) FROM public.event_log") == [(3, 1)]


def test_many_from_a_file(emit, database, tmp_path):
    organization = database.organization("Shop")
    file = tmp_path / "lead.json"
    file.write_text('{"name": "São", "source": "web", "pipeline_id": "p", "stage_id": "s"}', "utf-8")
    entity = UUID(int=5)
    run = emit(
        "lead.created", "--org", str(organization), "--entity", f"lead:{entity}", "--payload", f"@{file}",
        "--count", "1200", "--request-id", "r-1", "--format", "jsonl",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert len({json.loads(line)["event_id"] for line in run.stdout.splitlines()}) == 1200
    assert database.execute(
        "SELECT count(DISTINCT id), min(entity_id::text), min(payload ->> 'name'), count(DISTINCT tx_id)"
        " FROM public.event_log WHERE request_id = 'r-1'"
    ) == [(1200, str(entity), "São", 2)]


def test_once_and_later(emit, database):
    database.organization("Shop")
    ids = {
        json.loads(emit("a.b", "--org", "Shop", "--idempotency-key", "k", "--format", "json").stdout)["event_id"]
        for _ in range(2)
    }
    assert len(ids) == 1
    again = emit("a.b", "--org", "Shop", "--idempotency-key", "k", "--payload", '{"n": 1}')
    assert again.returncode == 1
    assert "idempotency key 'k'" in again.stderr
    later = emit("a.b", "--org", "Shop", "--deliver-at", "2999-01-01T00:00:00-03:00")
    assert later.returncode == 0
    assert database.execute("SELECT count(*) FROM public.deferred_event") == [(1,)]


def test_a_mistyped_type_of_the_catalogue_is_pointed_out(emit, database):
    database.organization("Shop")
    for event_type, says in (
        ("campaign.complete", "did you mean campaign.completed?"),
        ("campaign.ended", "campaign.cancelled, campaign.completed"),
        ("loyalty.earned", None),
    ):
        run = emit(event_type, "--org", "Shop")
        assert run.returncode == 0, run.stderr
        assert (says or "not in the catalogue") in run.stderr or says is None
        assert ("events.custom" in run.stderr) == (says is not None)
    assert database.execute("SELECT count(*) FROM public.event_log") == [(3,)]


def test_the_next_step_is_a_relay_unless_one_runs(emit, database):
    database.organization("Shop")
    assert "next: afluente relay run" in emit("a.b", "--org", "Shop").stderr
    lane = "INSERT INTO afluente.relay_lane (name, instance, renewed_at) VALUES ('x', 'me', clock_timestamp() + '1 h')"
    database.execute(lane)
    run = emit("a.b", "--org", "Shop")
    assert run.returncode == 0
    assert "next:" not in run.stderr


# (arguments, exit status, what stderr says)
WRONG = [
    (["Lead.created", "--org", "Shop"], 1, "lead.stage_changed"),
    (["lead.created", "--org", "Shop"], 1, "payload.name"),
    (["a.b", "--org", "Nobody"], 3, "--create-org"),
    (["a.b"], 2, "--org"),
    (["a.b", "--org", "Shop", "--payload", "[1]"], 2, "JSON object"),
    (["a.b", "--org", "Shop", "--payload", '{"n": NaN}'], 2, "NaN"),
    (["a.b", "--org", "Shop", "--payload", "{"], 2, "not JSON"),
    (["a.b", "--org", "Shop", "--payload", '{"t": "\\u0000"}'], 1, "NUL"),
    (["a.b", "--org", "Shop", "--payload", '{"t": "\\ud800"}'], 1, "surrogate"),
    (["a.b", "--org", "Shop", "--payload", "@no/such/file"], 2, "cannot read"),
    (["a.b", "--org", "Shop", "--entity", "a:7"], 2, "UUID"),
    (["a.b", "--org", "Shop", "--deliver-at", "2999-01-01T00:00:00"], 2, "offset"),
    (["a.b", "--org", "Shop", "--deliver-at", "soon"], 2, "ISO 8601"),
    (["a.b", "--org", "Shop", "--count", "2", "--idempotency-key", "k"], 2, "--count"),
]


def test_what_is_wrong_is_said_and_nothing_is_written(emit, database):
    database.organization("Shop")
    for arguments, status, says in WRONG:
        run = emit(*arguments)
        assert run.returncode == status, (arguments, run.stderr)
        assert says in run.stderr, arguments
        assert "Traceback" not in run.stderr, arguments
    assert database.execute("SELECT count(*) FROM public.event_log") == [(0,)]


def test_help_has_an_example(emit):
    run = emit("--help")
    assert run.returncode == 0
    assert "afluente emit loyalty.earned --org Shop --create-org" in run.stdout
