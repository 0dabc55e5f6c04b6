"""`afluente schemas` as a person uses it."""

import json

import pytest
from typer.testing import CliRunner

from afluente.cli.schemas import app
from schemas import catalogue, published
from schemas.events import message
from schemas.generate import AVRO_DIRECTORY


@pytest.fixture
def run():
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def test_check_finds_nothing(run):
    result = run("check", "--format", "json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == []


def test_check_names_what_drifted(run, monkeypatch):
    monkeypatch.setattr("schemas.asyncapi.render", lambda: "")
    result = run("check", "--format", "jsonl")
    assert result.exit_code == 3
    assert "asyncapi.json" in json.loads(result.stdout)["finding"]


def test_generate_has_nothing_to_do(run):
    before = (AVRO_DIRECTORY / "ids.json").read_bytes()
    for arguments in (["generate", "--dry-run", "--format", "json"], ["generate", "--format", "json"]):
        result = run(*arguments)
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout) == []
    assert (AVRO_DIRECTORY / "ids.json").read_bytes() == before


@pytest.mark.parametrize("arguments", [["generate"], ["generate", "--dry-run"]])
def test_generate_refuses_a_breaking_change(run, monkeypatch, arguments):
    class Read(message.Read):
        device: str

    monkeypatch.setitem(catalogue.EVENTS, "message.read", Read)
    before = (AVRO_DIRECTORY / "ids.json").read_bytes()
    result = run(*arguments)
    assert result.exit_code == 3
    assert "message.read" in result.stderr
    assert "device" in result.stderr
    assert (AVRO_DIRECTORY / "ids.json").read_bytes() == before


def test_list_has_every_type_once_per_major(run):
    rows = json.loads(run("list", "--format", "json").stdout)
    assert {row["event_type"] for row in rows} - {published.CUSTOM} == published.event_types()
    assert [row["version"] for row in rows if row["event_type"] == "kb.document_changed"] == ["1.0.0", "2.0.0"]
    family = json.loads(run("list", "--family", "contact-event", "--format", "json").stdout)
    assert len(family) == 21
    assert {row["topic"] for row in family} == {"events.contact-event"}
    assert run("list", "--family", "nothing").exit_code == 3


def test_show_gives_fields_or_the_schema(run):
    fields = run("show", "lead.won", "--format", "csv").stdout.splitlines()
    assert fields == [
        "field,type,required,may_be_null",
        "value,amount,yes,no",
        "won_at,moment,yes,no",
        "reason,string,no,yes",
    ]
    schema = json.loads(run("show", "purchase_completed", "--format", "json").stdout)
    assert schema == published.current("contact_event.recorded", "purchase_completed")[0].schema()
    old = json.loads(run("show", "kb.document_changed", "--version", "1.0.0", "--format", "json").stdout)
    assert old["namespace"] == "afluente.kb.v1"
    assert "properties.items" in run("show", "purchase_completed").stdout
    assert run("show", "lead.nothing").exit_code == 3
