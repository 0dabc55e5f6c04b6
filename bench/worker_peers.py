"""What people would run instead of our workers, with the same effect: our own small programs on published packages.

Java ones are built by Maven, FastStream has a virtual environment of its own as its pins are not ours; both once, into
the cache. Each reads one topic read_committed, decodes the Avro record, and writes an idempotency row and an effect
row. What it needs is in PEER_* of its environment; once it has partitions it says {"event": "peer.ready", ...}.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict

from afluente.local import cache
from afluente.local.errors import LocalError
from afluente.local.kafka import fetch_jars, find_java, java_version
from afluente.local.processes import Line, Process
from bench.rows import EVENT_TYPE
from bench.servers import Servers
from bench.worker_runs import Work
from schemas import published

HEAP = "-Xmx512m"
VENV_TIMEOUT_S = 600.0
VERSIONS = {"faststream": "0.7.8", "spring-kafka": "4.1.2", "parallel-consumer": "0.5.3.3"}
_PACKAGES = {"faststream": "faststream", "spring": "spring-kafka", "parallel": "parallel-consumer"}


@dataclass(frozen=True)
class Program:
    """One peer as one way to run it. `command` gives what starts it, once it is prepared."""

    name: str
    command: Callable[[], Sequence[str | Path]]
    settings: Mapping[str, str] = field(default_factory=dict)
    ready_event: str = "peer.ready"
    worker: None = None

    def group(self, work: Work) -> str:
        return f"{work.prefix}{self.name}"

    def start(self, servers: Servers, url: str, work: Work, label: str, heard: Callable[[Line], None]) -> Process:
        schema = servers.folder / "schema.avsc"
        schema.write_text(published.current(EVENT_TYPE, "")[0].text())
        given = conninfo_to_dict(url)
        environment = {
            **servers.environment,
            "PYTHONUNBUFFERED": "1",
            "PEER_BOOTSTRAP_SERVERS": servers.kafka.bootstrap_servers,
            "PEER_TOPIC": work.topic,
            "PEER_GROUP": self.group(work),
            "PEER_DATABASE_URL": url,
            "PEER_JDBC_URL": f"jdbc:postgresql://{given['host']}:{given['port']}/{given['dbname']}",
            "PEER_DATABASE_USER": str(given["user"]),
            "PEER_DATABASE_PASSWORD": str(given.get("password") or ""),
            "PEER_SCHEMA": str(schema),
            **self.settings,
        }
        return Process(self.command(), environment, servers.folder / f"{label}.log", heard)


def _java(folder: str, main: str) -> list[str | Path]:
    built = build_java(folder)
    return [find_java(), HEAP, "-cp", f"{built / 'libs'}/*:{built / 'target' / 'classes'}", main]


def _loop() -> list[str | Path]:
    return [sys.executable, "-m", "bench.peers.loop"]


def _faststream() -> list[str | Path]:
    return [build_faststream() / "bin" / "python", Path(str(files("bench.peers").joinpath("faststream_app.py")))]


LOOP = Program("loop", _loop)
FASTSTREAM = Program("faststream", _faststream)
SPRING_1, SPRING, SPRING_UNNEST = (
    Program(name, lambda: _java("spring", "SpringPeer"), {"PEER_THREADS": threads, "PEER_SQL": sql})
    for name, threads, sql in (("spring_1", "1", "json"), ("spring", "3", "json"), ("spring_unnest", "3", "unnest"))
)
PARALLEL_200, PARALLEL_400 = (
    Program(f"parallel_{count}", lambda: _java("parallel", "ParallelPeer"), {"PEER_IN_FLIGHT": str(count)})
    for count in (200, 400)
)


def build_java(folder: str) -> Path:
    """Fetch its jars and compile it, when that is not in the cache."""
    source = Path(str(files("bench.peers").joinpath(folder)))
    found = sorted(path for path in source.rglob("*") if path.is_file())
    digest = sha256(b"".join(path.read_bytes() for path in found)).hexdigest()[:8]

    def prepare(into: Path) -> None:
        shutil.copytree(source / "src", into / "src")
        pom = (source / "pom.xml").read_bytes()
        fetch_jars(into, find_java(), pom, what=f"the peer {folder}", also=["compiler:compile"])

    return cache.prepared(f"peer-{folder}-{digest}", prepare)


def build_faststream() -> Path:
    """Its virtual environment, made by pip when it is not in the cache."""
    requirements = files("bench.peers").joinpath("faststream.txt").read_bytes()
    python = f"{sys.version_info.major}.{sys.version_info.minor}"

    def prepare(into: Path) -> None:
        (into / "requirements.txt").write_bytes(requirements)
        log_path = into / "pip.log"
        with open(log_path, "w") as log:
            pip: list[str | Path] = [into / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install"]
            make: list[str | Path] = [sys.executable, "-m", "venv", into]
            for command in (make, [*pip, "-r", into / "requirements.txt"]):
                done = subprocess.run(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, timeout=VENV_TIMEOUT_S
                )
                if done.returncode != 0:
                    raise LocalError(
                        "the virtual environment of FastStream could not be made",
                        hint="check the network and pip's settings, then try again",
                        log=log_path,
                    )

    return cache.prepared(f"peer-faststream-py{python}-{sha256(requirements).hexdigest()[:8]}", prepare)


def versions(peers: Iterable[str]) -> dict[str, str]:
    """Of the packages of these peers."""
    chosen = set(peers)
    found = {package: VERSIONS[package] for peer, package in _PACKAGES.items() if peer in chosen}
    return found | ({"java": str(java_version(find_java()))} if chosen & {"spring", "parallel"} else {})
