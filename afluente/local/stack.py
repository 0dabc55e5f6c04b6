"""One Kafka and one Postgres for `afluente up`: those the environment names, else Docker's, else embedded ones.

What it started is noted in the state folder (`state.json`, readable by its owner alone), so that `down` stops exactly
that, a second `up` finds it or brings back what was killed, and `doctor` knows where the logs are. Data stays until it
is deleted on purpose.
"""

from __future__ import annotations

import fcntl
import json
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql as pgsql
from psycopg.conninfo import conninfo_to_dict

from afluente.local import docker, kafka, postgres, process
from afluente.local.errors import LocalError, Missing
from afluente.secrets import Keyring
from schemas.topics import Environment

DATABASE = "afluente"
READY_TIMEOUT_S = 60.0


class Source(StrEnum):
    """Where a server comes from."""

    environment = "environment"
    docker = "docker"
    embedded = "embedded"


@dataclass(frozen=True)
class Server:
    """`address`: host:port of the broker, or the connection string of the database. `log`: a file, or a command."""

    source: Source
    address: str
    log: str | None = None
    container: str | None = None


@dataclass(frozen=True)
class Stack:
    """What `up` found or started."""

    folder: Path
    kafka: Server
    postgres: Server
    secrets_key: str

    @property
    def env_file(self) -> Path:
        return self.folder / "env"

    def environment(self) -> dict[str, str]:
        """The variables that point a process at this stack."""
        return {
            "KAFKA_BOOTSTRAP_SERVERS": self.kafka.address,
            "DATABASE_URL": self.postgres.address,
            "AFLUENTE_SECRETS_KEY": self.secrets_key,
        }

    def save(self) -> None:
        state = {"kafka": asdict(self.kafka), "postgres": asdict(self.postgres), "secrets_key": self.secrets_key}
        process.write_private(self.folder / "state.json", json.dumps(state, indent=1))
        lines = [f"export {name}={shlex.quote(value)}\n" for name, value in self.environment().items()]
        process.write_private(self.env_file, "".join(lines))


def load(folder: Path) -> Stack | None:
    """The stack noted in that state folder, None when there is none."""
    try:
        state = json.loads((folder / "state.json").read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise LocalError(
            f"{folder / 'state.json'} cannot be read: {error}", hint=f"rm {folder / 'state.json'}"
        ) from None
    return Stack(folder, _server(state["kafka"]), _server(state["postgres"]), state["secrets_key"])


def up(
    folder: Path, environment: Mapping[str, str], *, use: Source | None = None, say: Callable[[str], None] = print
) -> Stack:
    """Have a Kafka and a Postgres that answer, with a database of ours in it. Safe to call again.

    `use` forces Docker or embedded servers; without it the order is environment, Docker, embedded. Missing when there
    is nothing to run them with; LocalError when they do not come up.
    """
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        before = load(folder)
        named_kafka = _named(environment, "KAFKA_BOOTSTRAP_SERVERS", before.kafka if before else None)
        named_postgres = _named(environment, "DATABASE_URL", before.postgres if before else None)
        missing = [name for name, named in (("Kafka", named_kafka), ("Postgres", named_postgres)) if named is None]
        source = _choose(before, use) if missing else Source.environment
        if named_kafka is None and source is Source.embedded:
            _require_kafka(say)
        # Two servers, neither waits for the other. When Kafka does not come up, the Postgres just made stops too.
        with ThreadPoolExecutor(2) as both:
            starting = both.submit(lambda: named_postgres or _start_postgres(folder, source))
            try:
                kafka_server = named_kafka or _start_kafka(folder, source)
            except LocalError:
                if named_postgres is None and starting.exception() is None and before is None:
                    _stop(folder, "postgres", starting.result())
                raise
            stack = Stack(
                folder,
                kafka_server,
                starting.result(),
                environment.get("AFLUENTE_SECRETS_KEY") or (before.secrets_key if before else Keyring.generate()),
            )
        if named_postgres is None:
            stack = replace(stack, postgres=replace(stack.postgres, address=_own_database(stack.postgres.address)))
        stack.save()
        return stack


def prepare(stack: Stack, *, environment: Environment = "local", topic_prefix: str = "") -> tuple[list[str], int]:
    """Migrate the database and make the declared topics. Returns the migrations applied and how many topics were made
    or changed. LocalError when a topic cannot be made as declared."""
    from afluente import kafka as clients
    from afluente.kafka import topics_apply
    from afluente.settings import KafkaSettings
    from consumers.workers import REGISTRY
    from schemas.topics import declared
    from sql import migrate

    with psycopg.connect(stack.postgres.address, autocommit=True) as conn:
        applied = migrate.up(conn)
    settings = KafkaSettings(bootstrap_servers=stack.kafka.address, topic_prefix=topic_prefix)
    admin = clients.admin(settings)
    specs = declared(environment, list(REGISTRY), topic_prefix)
    differences = [d for d in topics_apply.plan(admin, specs, lambda name: False) if d.is_change]
    outcome = topics_apply.apply(admin, specs, differences)
    if left := [d for d in outcome if not d.applied]:
        raise LocalError(
            f"{len(left)} topics are not as declared: {left[0].topic} {left[0].note}", hint="afluente topics plan"
        )
    return applied, len(outcome)


def down(folder: Path, *, delete_data: bool = False) -> list[str]:
    """Stop what `up` started there. Servers of the environment are left alone. Returns what was stopped."""
    folder = folder.absolute()
    if not folder.exists() or (stack := load(folder)) is None:
        return []
    stopped = []
    with _locked(folder):
        for name, server in (("kafka", stack.kafka), ("postgres", stack.postgres)):
            if _stop(folder, name, server):
                stopped.append(name)
            if delete_data and server.container is not None:
                docker.remove(server.container)
        if delete_data:
            _delete(folder, stack)
    return stopped


def is_running(stack: Stack, name: str) -> bool:
    """Whether the server `name` ("kafka", "postgres") accepts connections."""
    if name == "kafka":
        return any(
            process.answers(server.rpartition(":")[0], int(server.rpartition(":")[2]))
            for server in stack.kafka.address.split(",")
        )
    given = conninfo_to_dict(stack.postgres.address)
    return process.answers(str(given.get("host") or "127.0.0.1"), int(given.get("port") or 5432))


def _named(environment: Mapping[str, str], variable: str, before: Server | None) -> Server | None:
    """The server the environment names, unless it is the one we started ourselves (its env file was sourced)."""
    address = environment.get(variable)
    if not address or (before is not None and before.source is not Source.environment and before.address == address):
        return None
    return Server(Source.environment, address)


def _choose(before: Stack | None, use: Source | None) -> Source:
    """Docker or embedded. Data that is there decides: a database does not move from one to the other."""
    kept = {server.source for server in (before.kafka, before.postgres)} - {Source.environment} if before else set()
    if use is None and kept:
        return kept.pop()
    if use is not None and kept and use not in kept:
        raise LocalError(
            f"this state folder holds data of {kept.pop()} servers",
            hint="another --state-dir, or down --delete-data first",
        )
    if use is Source.docker and not docker.answers():
        raise Missing("no Docker engine answers", hint="start Docker, or leave --use away")
    if use is not None:
        return use
    return Source.docker if docker.answers() else Source.embedded


def _stop(folder: Path, name: str, server: Server) -> bool:
    """Stop one server of ours, its data kept. False when it did not run, or is not ours."""
    if server.source is Source.docker and server.container is not None:
        docker.stop(server.container)
        return True
    if server.source is Source.embedded:
        return kafka.stop_kafka(folder / name) if name == "kafka" else postgres.stop_postgres(folder / name)
    return False


def _require_kafka(say: Callable[[str], None]) -> None:
    """Missing, before anything is started, when an embedded broker cannot be had."""
    if not kafka.is_prepared() and shutil.which("mvn") is None:
        raise Missing(
            "Kafka cannot be had: no Docker engine answers, and Maven (mvn), which would fetch it, is not installed",
            hint="install Docker or Maven, or set KAFKA_BOOTSTRAP_SERVERS to a broker that runs",
        )
    if not kafka.is_prepared():
        say(f"fetching Kafka {kafka.KAFKA_VERSION} with Maven, once ...")


def _start_kafka(folder: Path, source: Source) -> Server:
    if source is Source.docker:
        container = docker.start_kafka(folder)
        return Server(source, container.address, docker.logs(container.id), container.id)
    broker = kafka.start_kafka(folder / "kafka", optimise=True)
    return Server(source, broker.bootstrap_servers, str(broker.log_path))


def _start_postgres(folder: Path, source: Source) -> Server:
    if source is Source.docker:
        container = docker.start_postgres(folder)
        return Server(source, container.address, docker.logs(container.id), container.id)
    server = postgres.start_postgres(folder / "postgres")
    return Server(source, server.url, str(server.log_path))


def _own_database(address: str) -> str:
    """Make the database `afluente` on that server if it is not there, and return its connection string."""
    deadline = process.Deadline(READY_TIMEOUT_S)
    while True:
        try:
            with psycopg.connect(address, autocommit=True, connect_timeout=5) as conn:
                found = conn.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE]).fetchone()
                if found is None:
                    conn.execute(pgsql.SQL("CREATE DATABASE {}").format(pgsql.Identifier(DATABASE)))
            break
        except psycopg.OperationalError as error:
            # a container answers some seconds after it was started
            if deadline.is_over:
                raise LocalError(f"Postgres does not answer: {str(error).strip()}") from None
            deadline.pause()
    base, _, _ = address.rpartition("/")
    return f"{base}/{DATABASE}"


def _delete(folder: Path, stack: Stack) -> None:
    if stack.kafka.source is Source.embedded:
        shutil.rmtree(folder / "kafka", ignore_errors=True)
    if stack.postgres.source is Source.embedded:
        postgres.remove(folder / "postgres")
    for name in ("state.json", "env"):
        (folder / name).unlink(missing_ok=True)


def _server(state: dict[str, Any]) -> Server:
    return Server(Source(state["source"]), state["address"], state.get("log"), state.get("container"))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with open(folder / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
