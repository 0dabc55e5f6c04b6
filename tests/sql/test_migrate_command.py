"""`afluente migrate` as a person types it."""

import json

import pytest

import sql


@pytest.fixture
def migrate(empty_database, processes):
    return lambda *arguments: processes.run("migrate", *arguments, env={"DATABASE_URL": empty_database.url})


def test_from_nothing_to_the_newest_and_back(migrate):
    labels = [migration.label for migration in sql.migrations()]
    before = migrate("status", "--format", "json")
    assert before.returncode == 3
    assert {row["state"] for row in json.loads(before.stdout)} == {"pending"}

    dry = migrate("up", "--dry-run", "--format", "json")
    assert dry.returncode == 0
    assert json.loads(dry.stdout) == [{"migration": label, "done": False} for label in labels]
    assert "nothing was done" in dry.stderr
    shown = migrate("up", "--to", "1", "--show-sql")
    assert "CREATE SCHEMA tenancy" in shown.stdout
    assert migrate("status").returncode == 3

    up = migrate("up", "--format", "json")
    assert up.returncode == 0, up.stderr
    assert json.loads(up.stdout) == [{"migration": label, "done": True} for label in labels]
    again = migrate("up")
    assert (again.returncode, again.stdout.strip()) == (0, "")
    assert "up to date" in again.stderr
    status = migrate("status", "--format", "json")
    assert status.returncode == 0
    assert [(row["migration"], row["state"]) for row in json.loads(status.stdout)] == [(x, "applied") for x in labels]
    assert all(row["applied_at"].endswith("Z") for row in json.loads(status.stdout))

    asked = migrate("down", "2")
    assert asked.returncode == 2, "nobody is there to answer"
    assert "--yes" in asked.stderr
    assert labels[-1] in asked.stderr
    dry = migrate("down", "2", "--dry-run", "--format", "json")
    assert [row["migration"] for row in json.loads(dry.stdout)] == labels[:-3:-1]
    assert migrate("status").returncode == 0
    down = migrate("down", str(len(labels)), "--yes", "--format", "json")
    assert [row["migration"] for row in json.loads(down.stdout)] == labels[::-1]
    assert migrate("down", "--yes").returncode == 3


def test_an_unreachable_server_is_something_to_try_again(processes):
    run = processes.run("migrate", "status", env={"DATABASE_URL": "postgresql://nobody@127.0.0.1:9/none"})
    assert run.returncode == 75
    assert "Traceback" not in run.stderr


def test_new_names_the_next_number(processes, tmp_path, monkeypatch):
    """In a copy of the tree: the command writes beside the migrations it finds."""
    import shutil
    from pathlib import Path

    shutil.copytree(Path(sql.__path__[0]), tmp_path / "sql")
    shutil.copytree(Path(sql.__path__[0]).parent / "afluente", tmp_path / "afluente")
    environment = {"PYTHONPATH": str(tmp_path)}
    number = max(migration.version for migration in sql.migrations()) + 1
    run = processes.run("migrate", "new", "contact_notes", env=environment)
    assert run.returncode == 0, run.stderr
    up, down = (Path(line) for line in run.stdout.split())
    assert up == tmp_path / "sql" / "migrations" / f"{number:04d}_contact_notes.up.sql"
    assert up.exists()
    assert down.exists()
    assert processes.run("migrate", "new", "Contact-Notes", env=environment).returncode == 2


@pytest.mark.parametrize("command", [(), ("up",), ("down",), ("status",), ("new",)])
def test_help_has_an_example(processes, command):
    run = processes.run("migrate", *command, "--help")
    assert run.returncode == 0
    assert not command or f"afluente migrate {command[0]}" in run.stdout
