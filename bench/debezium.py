"""Debezium on Kafka Connect, as people run it: the PostgreSQL connector with the outbox event router.

The slot is made before the rows and copied for each run, so that every run reads the same WAL; with
`snapshot.mode=no_data` and no stored offset the connector begins where its slot does. Jars from Maven, once, into the
cache; run by the same Java as the broker.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

import psycopg
from confluent_kafka.admin import NewTopic
from psycopg.conninfo import conninfo_to_dict

from afluente import kafka
from afluente.local import cache
from afluente.local.kafka import fetch_jars, find_java
from afluente.local.process import free_ports, write_private
from afluente.local.processes import Line, Process
from bench import check
from bench.drain import Drain, Watch
from bench.errors import BenchError
from bench.rows import ENTITY_KIND, Rows
from bench.servers import Servers

VERSION, CONNECT_VERSION = "3.6.1", "4.3.0"
HEAP = ("-Xmx1g", "-XX:+UseG1GC")
STREAMING = "Starting streaming"
START_TIMEOUT_S = 120.0
BASE_SLOT, PUBLICATION = "bench_base", "bench"
PARTITIONS = 6

_TUNED_CONNECTOR = {"poll.interval.ms": "10", "max.batch.size": "20480", "max.queue.size": "81920"}
_TUNED_PRODUCER = {
    "producer.linger.ms": "5",
    "producer.batch.size": "1000000",
    "producer.buffer.memory": str(128 * 1024 * 1024),
    "producer.max.in.flight.requests.per.connection": "5",
    "producer.enable.idempotence": "true",
}
_CONVERTERS = {
    "key.converter": "org.apache.kafka.connect.storage.StringConverter",
    "value.converter": "org.apache.kafka.connect.storage.StringConverter",
}


@dataclass(frozen=True)
class Debezium:
    """One way to run it. Standalone Connect delivers at least once; only a distributed worker can exactly once."""

    name: str
    connector: Mapping[str, str]
    worker: Mapping[str, str]
    distributed: bool = False

    def drain(self, servers: Servers, url: str, rows: Rows, run: int) -> Drain:
        label = f"{self.name}-{run}".replace("_", "-")
        slot, topic_prefix = label.replace("-", "_"), f"{label}.event."
        topic = topic_prefix + ENTITY_KIND
        folder = servers.folder / label
        folder.mkdir()
        with _topic(servers, topic), _slot(url, slot):
            watch = Watch(servers, topic, rows.count)
            process: Process | None = None
            begun_at: list[float] = []

            def heard(line: Line) -> None:
                if not begun_at and STREAMING in (line.get("text") or "") and process is not None:
                    begun_at.append(time.time())
                    watch.begin(process.pid)

            connector = {**_connector(url, slot, topic_prefix), **self.connector}
            (port,) = free_ports(1)
            worker = folder / "worker.properties"
            worker.write_text(_properties(self._worker(servers, label, port, folder)))
            arguments: list[str | Path] = [worker]
            if not self.distributed:
                write_private(folder / "connector.properties", _properties({"name": label} | connector))
                arguments.append(folder / "connector.properties")
            main = "ConnectDistributed" if self.distributed else "ConnectStandalone"
            java: list[str | Path] = [find_java(), *HEAP, "-cp", f"{prepare() / 'libs'}/*", *_LOGGING]
            command = [*java, f"org.apache.kafka.connect.cli.{main}", *arguments]
            process = Process(command, servers.environment, folder / "connect.log", heard)
            try:
                if self.distributed:
                    _put(f"http://127.0.0.1:{port}/connectors/{label}/config", connector, process)
                _wait_until_streaming(process, begun_at)
                watch.until_done(process)
                return watch.result(self.name, begun_at[0], url, rows, check.DEBEZIUM, servers.settings())
            finally:
                process.terminate(60)

    def _worker(self, servers: Servers, label: str, port: int, folder: Path) -> dict[str, str]:
        common = {
            "bootstrap.servers": servers.kafka.bootstrap_servers,
            "listeners": f"http://127.0.0.1:{port}",
            **_CONVERTERS,
            **self.worker,
        }
        if not self.distributed:
            return common | {"offset.storage.file.filename": str(folder / "offsets")}
        return common | {
            "group.id": label,
            "config.storage.topic": f"{label}.configs",
            "offset.storage.topic": f"{label}.offsets",
            "status.storage.topic": f"{label}.status",
            **{f"{kind}.storage.replication.factor": "1" for kind in ("config", "offset", "status")},
        }


PEERS = (
    Debezium("debezium", {}, {}),
    Debezium("debezium_tuned", _TUNED_CONNECTOR, _TUNED_PRODUCER),
    Debezium(
        "debezium_eos",
        {"exactly.once.support": "required"},
        {"exactly.once.source.support": "enabled"},
        distributed=True,
    ),
)

_LOGGING = ("-Dorg.slf4j.simpleLogger.defaultLogLevel=info", "-Dorg.slf4j.simpleLogger.showDateTime=true")


def prepare() -> Path:
    """The jars, fetched when they are not in the cache. Missing when there is no Maven, LocalError when it fails."""
    pom = files("bench").joinpath("pom.xml").read_bytes()
    return cache.prepared(
        f"debezium-{VERSION}-{sha256(pom).hexdigest()[:8]}",
        lambda folder: fetch_jars(folder, find_java(), pom, what="Debezium"),
    )


def make_slot(url: str) -> None:
    """Before the rows are written: where every run begins, and what it reads."""
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute(f"CREATE PUBLICATION {PUBLICATION} FOR TABLE event_log WITH (publish_via_partition_root = true)")
        conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [BASE_SLOT])


def drop_slot(url: str) -> None:
    """The WAL since then is no longer wanted."""
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute("SELECT pg_drop_replication_slot(%s)", [BASE_SLOT])


@contextmanager
def _slot(url: str, name: str) -> Iterator[None]:
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute("SELECT pg_copy_logical_replication_slot(%s, %s)", [BASE_SLOT, name])
        try:
            yield
        finally:
            conn.execute("SELECT pg_drop_replication_slot(%s)", [name])


@contextmanager
def _topic(servers: Servers, topic: str) -> Iterator[None]:
    admin = kafka.admin(servers.settings(), log_level=0)
    config = {"message.timestamp.type": "LogAppendTime"}
    for future in admin.create_topics([NewTopic(topic, PARTITIONS, 1, config=config)]).values():
        future.result(30)
    try:
        yield
    finally:
        for future in admin.delete_topics([topic]).values():
            future.result(30)


def _connector(url: str, slot: str, topic_prefix: str) -> dict[str, str]:
    """Record: key organization, value the payload's text, headers id (the seq), type, kind, entity, metadata, time."""
    given = conninfo_to_dict(url)
    return {
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "tasks.max": "1",
        "database.hostname": str(given["host"]),
        "database.port": str(given["port"]),
        "database.user": str(given["user"]),
        "database.password": str(given["password"]),
        "database.dbname": str(given["dbname"]),
        "topic.prefix": slot,
        "plugin.name": "pgoutput",
        "slot.name": slot,
        "publication.name": PUBLICATION,
        "publication.autocreate.mode": "disabled",
        "table.include.list": "public.event_log",
        "snapshot.mode": "no_data",
        "transforms": "outbox",
        "transforms.outbox.type": "io.debezium.transforms.outbox.EventRouter",
        "transforms.outbox.route.by.field": "entity_kind",
        "transforms.outbox.route.topic.replacement": f"{topic_prefix}${{routedByValue}}",
        "transforms.outbox.table.field.event.id": "seq",
        "transforms.outbox.table.field.event.key": "organization_id",
        "transforms.outbox.table.field.event.type": "event_type",
        "transforms.outbox.table.field.event.payload": "payload",
        "transforms.outbox.table.fields.additional.placement": "event_type:header:ce_type,entity_kind:header:kind,"
        "entity_id:header:ce_subject,metadata:header:metadata,created_at:header:ce_time",
    }


def _wait_until_streaming(process: Process, begun_at: list[float]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not begun_at:
        if process.returncode is not None or time.monotonic() > deadline:
            raise BenchError(f"Debezium does not stream: {process.tail(5)}")
        time.sleep(0.05)


def _put(address: str, body: Mapping[str, str], process: Process) -> None:
    """Give the worker its connector, as soon as it takes one."""
    deadline = time.monotonic() + START_TIMEOUT_S
    headers = {"Content-Type": "application/json"}
    while True:
        try:
            request = urllib.request.Request(address, json.dumps(body).encode(), headers, method="PUT")
            with urllib.request.urlopen(request, timeout=30):
                return
        except (urllib.error.URLError, OSError) as error:
            refused = isinstance(error, urllib.error.HTTPError) and error.code == 400
            if refused or process.returncode is not None or time.monotonic() > deadline:
                said = error.read().decode() if isinstance(error, urllib.error.HTTPError) else error
                raise BenchError(f"Connect does not take the connector ({said}): {process.tail(5)}") from None
        time.sleep(0.2)


def _properties(values: Mapping[str, str]) -> str:
    return "".join(f"{key}={value}\n" for key, value in values.items())
