"""The README's examples, run as they stand there."""

import ast
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from afluente.local.processes import COMMAND

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


def blocks(language):
    return [text for name, text in BLOCKS if name == language]


def commands():
    """Every line `afluente ...` of the shell blocks, as arguments."""
    lines = "\n".join(blocks("sh")).replace(" &\n", "\n").splitlines()
    parts = [part.strip() for line in lines for part in line.split("&&")]
    return [shlex.split(part.partition(" 2>")[0], comments=True)[1:] for part in parts if part.startswith("afluente ")]


def the_one(found, text):
    (block,) = [block for block in found if text in block]
    return block


@pytest.mark.parametrize("arguments", commands(), ids=" ".join)
def test_commands_have_the_options_the_readme_gives_them(arguments):
    words = [word for word in arguments if word.replace("-", "").isalpha() and not word.startswith("-")][:2]
    shown = subprocess.run([COMMAND, *words, "--help"], capture_output=True, text=True, timeout=60)
    if shown.returncode != 0:  # the second word was an argument
        shown = subprocess.run([COMMAND, words[0], "--help"], capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    for option in [word for word in arguments if word.startswith("--")]:
        assert option in shown.stdout


@pytest.mark.parametrize("block", blocks("python"))
def test_python_is_python(block):
    ast.parse(block)


def test_an_event_of_ones_own_is_seen_on_its_topic(topics, processes):
    topics.create_families()
    emit, relay, tail = (next(line for line in commands() if line[0] == name) for name in ("emit", "relay", "tail"))

    emitted = processes.run(*emit)
    assert emitted.returncode == 0, emitted.stderr
    processes.start(*relay)
    seen = processes.run(*tail)

    assert seen.returncode == 0, seen.stderr
    assert "loyalty.earned" in seen.stdout
    assert '{"points": 5}' in seen.stdout


def test_a_worker_of_ones_own_handles_its_events(tmp_path, monkeypatch, database, topics, processes):
    (tmp_path / "loyalty.py").write_text(the_one(blocks("python"), "class LoyaltyWorker"))
    shell = the_one(blocks("sh"), "CREATE TABLE")
    monkeypatch.chdir(tmp_path)
    database.execute(re.search(r'-c "(.*?)"', shell, re.DOTALL).group(1))
    organization = database.organization()
    topics.create_families()

    missing = processes.run("worker", "run", "loyalty:LoyaltyWorker")
    assert missing.returncode == 1
    assert "afluente topics apply --worker loyalty:LoyaltyWorker" in missing.stderr
    apply, run = (next(line for line in commands() if line[0] == name and line[-1] == "loyalty:LoyaltyWorker")
                  for name in ("topics", "worker"))  # fmt: skip
    applied = processes.run(*apply)
    assert applied.returncode == 0, applied.stderr
    processes.start("relay", "run")
    worker = processes.start(*run)
    worker.wait_for("worker.ready")
    emitted = processes.run("emit", "loyalty.earned", "--org", organization, "--payload", '{"points": 5}')
    assert emitted.returncode == 0, emitted.stderr

    worker.wait_for("worker.delivered")
    assert database.execute("SELECT organization_id, points FROM loyalty_points") == [(organization, 5)]
