"""The whole command line: every command explains itself with an example; errors are a sentence and an exit status."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from confluent_kafka import KafkaError, KafkaException

from afluente import cli
from afluente.cli.exits import Exit
from afluente.errors import NotAllowed, Refused, SettingsError, Unavailable

COMMAND = Path(sys.executable).with_name("afluente")


def run(*arguments, env=None):
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=60, env=env)


def walk():
    """(words, command) of every command below `afluente`, groups included."""

    def below(words, command):
        yield words, command
        for name, child in sorted(getattr(command, "commands", {}).items()):
            if not child.hidden:
                yield from below([*words, name], child)

    for name in cli.COMMANDS:
        yield from below([name], cli.load(name))


COMMANDS = list(walk())


@pytest.mark.parametrize(("words", "command"), COMMANDS, ids=[" ".join(words) for words, _ in COMMANDS])
def test_every_command_says_what_it_does_with_an_example(words, command):
    assert command.help, "no help"
    if getattr(command, "commands", None):
        return  # a group: its commands have the examples
    examples = [
        line.strip() for line in command.help.splitlines() if line.strip().startswith(f"afluente {' '.join(words)}")
    ]
    assert examples, f"no example that begins with: afluente {' '.join(words)}"


@pytest.mark.parametrize("words", [words for words, _ in COMMANDS if len(words) == 1], ids=lambda words: words[0])
def test_help_is_shown_by_the_real_command(words):
    done = run(*words, "--help")
    assert done.returncode == 0, done.stderr
    assert "Usage: afluente " + words[0] in done.stdout


def test_help_loads_no_command_and_is_quick():
    begin = time.monotonic()
    done = run("--help")
    assert time.monotonic() - begin < 3
    assert done.returncode == 0
    for name, entry in cli.COMMANDS.items():
        assert name in done.stdout
        assert entry.help in done.stdout
    loaded = subprocess.run(
        [sys.executable, "-X", "importtime", COMMAND, "--help"], capture_output=True, text=True, timeout=60
    ).stderr
    for heavy in ("pydantic", "confluent_kafka", "psycopg", "fastapi", "aiohttp", "structlog", "faust"):
        assert f"| {heavy}" not in loaded.replace("|   ", "| "), heavy


def test_a_mistyped_command_gets_a_suggestion():
    done = run("relai")
    assert done.returncode == Exit.USAGE
    assert "relay" in done.stderr


def test_version():
    assert run("-V").stdout.startswith("afluente ")


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (SettingsError([("X", "1", "is odd")]), Exit.USAGE, "X='1': is odd"),
        (Unavailable("no broker", hint="start it"), Exit.TRY_AGAIN, "try: start it"),
        (NotAllowed("not yours"), Exit.NOT_ALLOWED, "not yours"),
        (Refused("would lose data"), Exit.FAILED, "would lose data"),
        (psycopg.OperationalError("connection refused\nmore"), Exit.TRY_AGAIN, "Postgres is away: connection refused"),
        (
            psycopg.OperationalError('FATAL:  permission denied to set role "afluente_worker"'),
            Exit.NOT_ALLOWED,
            "GRANT afluente_worker TO",
        ),
        (psycopg.errors.DeadlockDetected("deadlock detected"), Exit.TRY_AGAIN, "nothing was done: deadlock"),
        (psycopg.errors.InsufficientPrivilege("permission denied"), Exit.NOT_ALLOWED, "permission denied"),
        (psycopg.errors.UndefinedTable('relation "x" does not exist'), Exit.FAILED, "afluente migrate up"),
        (KafkaException(KafkaError(KafkaError._ALL_BROKERS_DOWN)), Exit.TRY_AGAIN, "Kafka:"),
        (KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)), Exit.FAILED, "Kafka:"),
        (ZeroDivisionError("division"), Exit.FAILED, "unexpected ZeroDivisionError: division"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_is_a_sentence_and_an_exit_status(error, status, says, capsys):
    assert cli._explain(error) == status
    assert says in capsys.readouterr().err


def test_wrong_settings_are_named_on_stderr_and_nothing_is_on_stdout(tmp_path):
    env = {"PATH": "/usr/bin:/bin", "DATABASE_URL": "postgresql://h/db", "LOG_LEVEL": "loud"}
    done = run("migrate", "status", env=env)
    assert done.returncode == Exit.USAGE
    assert "LOG_LEVEL='loud'" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_server_that_is_away_is_exit_75():
    env = {"PATH": "/usr/bin:/bin", "DATABASE_URL": "postgresql://u@127.0.0.1:1/db"}
    done = run("migrate", "status", env=env)
    assert done.returncode == Exit.TRY_AGAIN
    assert "Postgres is away" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.timeout(180)
@pytest.mark.faults_long
def test_without_kafka_every_command_ends_soon_with_75(processes, database):
    commands = ["topics plan", "topics apply --yes", "topics show events.lead", "tail", "dlq list --relay", "verify"]
    commands += ["stream status", "relay status", "relay lanes", "relay lanes 2"]

    def run_without(words):
        return processes.run(*words.split(), env={"KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:1"}, timeout=150)

    # Each waits until Kafka is known to be away; side by side they wait once.
    with ThreadPoolExecutor(len(commands)) as pool:
        for words, done in zip(commands, pool.map(run_without, commands), strict=True):
            assert done.returncode == Exit.TRY_AGAIN, (words, done.stderr)
            assert "Kafka" in done.stderr, (words, done.stderr)
            assert "Traceback" not in done.stderr, (words, done.stderr)


def test_faults_are_armed_by_the_command_only_when_asked(tmp_path):
    env = {"PATH": "/usr/bin:/bin", "DATABASE_URL": "postgresql://u@127.0.0.1:1/db", "AFLUENTE_FAULT": "nonsense"}
    done = run("migrate", "status", env=env)
    assert done.returncode == Exit.USAGE
    assert "AFLUENTE_FAULT" in done.stderr
