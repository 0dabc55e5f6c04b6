"""The servers of one bench: a broker and a Postgres of its own, durable as in production, gone at the end.

One database for each kind of work, so that rows of one are no backlog of another; topics under a prefix for each run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
from confluent_kafka.admin import AdminClient

from afluente import kafka as clients
from afluente.kafka import topics_apply
from afluente.local import EmbeddedKafka, EmbeddedPostgres, start_kafka, start_postgres
from afluente.local.process import Ticket
from afluente.local.processes import COMMAND, Process
from afluente.settings import KafkaSettings
from bench.errors import BenchError
from schemas.topics import Topics, declared
from sql import migrate

TEMPLATE = "bench_template"
SLOTS = 20


@dataclass(frozen=True)
class Servers:
    """`folder` is for logs and files of the runs; `environment` what commands inherit."""

    folder: Path
    kafka: EmbeddedKafka
    postgres: EmbeddedPostgres
    environment: Mapping[str, str]

    @property
    def postgres_pid(self) -> int:
        return _pid(self.postgres.folder)

    @property
    def kafka_pid(self) -> int:
        return _pid(self.kafka.folder)

    def settings(self, prefix: str = "") -> KafkaSettings:
        return KafkaSettings(bootstrap_servers=self.kafka.bootstrap_servers, topic_prefix=prefix)

    def database(self, name: str) -> str:
        """The URL of a new, migrated database."""
        with psycopg.connect(self.postgres.url, autocommit=True) as admin:
            admin.execute(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}")
        return self.postgres.url_of(name)

    @contextmanager
    def topics(self, prefix: str) -> Iterator[Topics]:
        """The topics that the relay needs, with 6 partitions each, deleted at the end."""
        admin = clients.admin(self.settings(), log_level=0)
        specs = declared("local", (), prefix)
        wrong = [d for d in topics_apply.apply(admin, specs, _missing(admin, prefix)) if not d.applied]
        if wrong:
            raise BenchError(f"topic {wrong[0].topic} could not be made: {wrong[0].note}")
        try:
            yield Topics(prefix)
        finally:
            for future in admin.delete_topics([spec.name for spec in specs]).values():
                future.result(30)

    def relay(self, url: str, prefix: str, name: str) -> Process:
        """The relay's own command, started."""
        environment = {key: value for key, value in self.environment.items() if not key.startswith("AFLUENTE_")}
        environment |= {
            "DATABASE_URL": url,
            "KAFKA_BOOTSTRAP_SERVERS": self.kafka.bootstrap_servers,
            "AFLUENTE_TOPIC_PREFIX": prefix,
            "LOG_FORMAT": "json",
            "LOG_LEVEL": "info",
            "PYTHONUNBUFFERED": "1",
        }
        return Process([COMMAND, "relay", "run"], environment, self.folder / f"{name}.log")


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
        with psycopg.connect(server.url, autocommit=True) as admin:
            admin.execute(f"CREATE DATABASE {TEMPLATE}")
        with psycopg.connect(server.url_of(TEMPLATE), autocommit=True) as conn:
            migrate.up(conn)
        yield Servers(folder, broker, server, environment)
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


def _missing(admin: AdminClient, prefix: str) -> list[topics_apply.Difference]:
    return [d for d in topics_apply.plan(admin, declared("local", (), prefix), lambda name: False) if d.is_change]


def _pid(folder: Path) -> int:
    ticket = Ticket.load(folder / "ticket.json")
    if ticket is None or not ticket.alive:
        raise BenchError(f"the server of {os.path.basename(folder)} has ended")
    return ticket.pid
