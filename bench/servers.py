"""The servers of one bench: a broker and a Postgres of its own, durable as in production, gone at the end.

One database for each kind of work, so that rows of one are no backlog of another; topics under a prefix for each run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
from confluent_kafka.admin import AdminClient

from afluente import kafka as clients
from afluente.kafka import topics_apply
from afluente.local import EmbeddedKafka, EmbeddedPostgres, start_kafka, start_postgres
from afluente.local.process import Ticket
from afluente.local.processes import COMMAND, Line, Process
from afluente.settings import KafkaSettings
from bench.errors import BenchError
from schemas.topics import Topics, TopicSpec, declared
from sql import migrate

TEMPLATE = "bench_template"
SLOTS = 20


@dataclass(frozen=True)
class Database:
    """A Postgres of its own. `folder` is for logs and files of the runs; `environment` what commands inherit."""

    folder: Path
    postgres: EmbeddedPostgres
    environment: Mapping[str, str]

    @property
    def postgres_pid(self) -> int:
        return _pid(self.postgres.folder)

    def versions(self) -> dict[str, str]:
        with psycopg.connect(self.postgres.url) as conn:
            (postgres,) = conn.execute("SHOW server_version").fetchone() or ("?",)
        return {"postgres": str(postgres)}

    def database(self, name: str) -> str:
        """The URL of a new, migrated database."""
        with psycopg.connect(self.postgres.url, autocommit=True) as admin:
            admin.execute(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}")
        return self.postgres.url_of(name)

    def drop(self, name: str) -> None:
        """The database `name` and whoever is still connected to it, gone."""
        with psycopg.connect(self.postgres.url, autocommit=True) as admin:
            admin.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    def checkpoint(self) -> None:
        """What one peer has written is flushed now, and not while the next one is measured."""
        with psycopg.connect(self.postgres.url, autocommit=True) as admin:
            admin.execute("CHECKPOINT")

    def process(
        self,
        arguments: Sequence[str],
        url: str,
        name: str,
        more: Mapping[str, str],
        heard: Callable[[Line], None] | None = None,
    ) -> Process:
        """A command of ours as it is in production: with no settings but where its servers are, and `more`."""
        environment = {key: value for key, value in self.environment.items() if not key.startswith("AFLUENTE_")}
        environment |= {
            "DATABASE_URL": url,
            "LOG_FORMAT": "json",
            "LOG_LEVEL": "info",
            "PYTHONUNBUFFERED": "1",
            **more,
        }
        return Process([COMMAND, *arguments], environment, self.folder / f"{name}.log", heard)


@dataclass(frozen=True)
class Servers(Database):
    """The same with a broker beside it."""

    kafka: EmbeddedKafka

    @property
    def kafka_pid(self) -> int:
        return _pid(self.kafka.folder)

    def versions(self) -> dict[str, str]:
        return super().versions() | {"kafka": self.kafka.version}

    def settings(self, prefix: str = "") -> KafkaSettings:
        return KafkaSettings(bootstrap_servers=self.kafka.bootstrap_servers, topic_prefix=prefix)

    @contextmanager
    def topics(self, prefix: str, workers: Sequence[str] = (), family: str | None = None) -> Iterator[Topics]:
        """The topics that the relay and these workers need, with 6 partitions each, deleted at the end.

        `family`: of the events' topics only this one, and none of the relay's.
        """
        admin = clients.admin(self.settings(), log_level=0)
        specs = declared("local", workers, prefix)
        if family is not None:
            starts = (Topics(prefix).family(family), *(f"{prefix}{worker}." for worker in workers))
            specs = [spec for spec in specs if spec.name.startswith(starts)]
        wrong = [d for d in topics_apply.apply(admin, specs, _missing(admin, specs)) if not d.applied]
        if wrong:
            raise BenchError(f"topic {wrong[0].topic} could not be made: {wrong[0].note}")
        try:
            yield Topics(prefix)
        finally:
            for future in admin.delete_topics([spec.name for spec in specs]).values():
                future.result(30)

    def relay(self, url: str, prefix: str, name: str) -> Process:
        """The relay's own command, started."""
        return self.command(["relay", "run"], url, prefix, name)

    def worker(
        self, kind: str, url: str, prefix: str, name: str, heard: Callable[[Line], None] | None = None
    ) -> Process:
        """The workers' own command with the worker `kind` (module:Class), started."""
        return self.command(["worker", "run", kind], url, prefix, name, heard)

    def command(
        self,
        arguments: Sequence[str],
        url: str,
        prefix: str,
        name: str,
        heard: Callable[[Line], None] | None = None,
    ) -> Process:
        """A command of ours as it is in production: with no settings but where its servers are."""
        more = {"KAFKA_BOOTSTRAP_SERVERS": self.kafka.bootstrap_servers, "AFLUENTE_TOPIC_PREFIX": prefix}
        return self.process(arguments, url, name, more, heard)


@contextmanager
def postgres_alone(folder: Path, environment: Mapping[str, str], *, keep: bool = False) -> Iterator[Database]:
    """Start a Postgres alone."""
    folder.mkdir(parents=True, exist_ok=True)
    server = None
    try:
        server = start_postgres(folder / "postgres")
        _make_template(server)
        yield Database(folder, server, environment)
    finally:
        if server is not None:
            if keep:
                server.stop()
            else:
                server.remove()
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def started(folder: Path, environment: Mapping[str, str], *, logical: bool, keep: bool = False) -> Iterator[Servers]:
    """Start both. `logical` for peers that read the WAL: Postgres then writes more of it, for everyone in the run."""
    folder.mkdir(parents=True, exist_ok=True)
    broker = server = None
    try:
        server = start_postgres(folder / "postgres")
        if logical:
            with psycopg.connect(server.url, autocommit=True) as admin:
                for name, value in (
                    ("wal_level", "logical"),
                    ("max_replication_slots", SLOTS),
                    ("max_wal_senders", SLOTS),
                ):
                    admin.execute(f"ALTER SYSTEM SET {name} = '{value}'")
            server = server.restart()
        broker = start_kafka(folder / "kafka", optimise=True)
        _make_template(server)
        yield Servers(folder, server, environment, broker)
    finally:
        if broker is not None:
            broker.kill()
        if server is not None:
            if keep:
                server.stop()
            else:
                server.remove()
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _make_template(server: EmbeddedPostgres) -> None:
    with psycopg.connect(server.url, autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {TEMPLATE}")
    with psycopg.connect(server.url_of(TEMPLATE), autocommit=True) as conn:
        migrate.up(conn)


def _missing(admin: AdminClient, specs: list[TopicSpec]) -> list[topics_apply.Difference]:
    return [d for d in topics_apply.plan(admin, specs, lambda name: False) if d.is_change]


def _pid(folder: Path) -> int:
    ticket = Ticket.load(folder / "ticket.json")
    if ticket is None or not ticket.alive:
        raise BenchError(f"the server of {os.path.basename(folder)} has ended")
    return ticket.pid
