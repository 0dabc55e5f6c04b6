"""Kafka and Postgres as containers, when a Docker engine answers: the official images, by testcontainers.

The containers outlive the command that started them (no Ryuk), are found again by a label, and are stopped and not
removed, so that their data is there at the next start. Ports are fixed at creation: the broker has to advertise its
own.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afluente.local import kafka, process
from afluente.local.errors import LocalError

KAFKA_IMAGE = "apache/kafka:4.2.2"
POSTGRES_IMAGE = "pgvector/pgvector:0.8.1-pg18"
LABEL = "afluente.state"
PROBE_TIMEOUT_S = 2
START_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Container:
    """A container of ours. `address`: host:port of the broker, or the connection string of the database."""

    id: str
    address: str


def answers() -> bool:
    """Whether an engine answers, asked with a short limit: a client without an engine must not make anybody wait."""
    client = _client()
    if client is None:
        return False
    client.close()
    return True


def start_kafka(state: Path) -> Container:
    """The broker of this state folder, created or started again. LocalError when the image or the engine refuses."""
    port = process.free_ports(1)[0]
    environment = {
        "KAFKA_NODE_ID": "1",
        "KAFKA_PROCESS_ROLES": "broker,controller",
        "KAFKA_LISTENERS": f"HOST://0.0.0.0:{port},CONTROLLER://127.0.0.1:9093",
        "KAFKA_ADVERTISED_LISTENERS": f"HOST://127.0.0.1:{port}",
        "KAFKA_LISTENER_SECURITY_PROTOCOL_MAP": "HOST:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "KAFKA_INTER_BROKER_LISTENER_NAME": "HOST",
        "KAFKA_CONTROLLER_LISTENER_NAMES": "CONTROLLER",
        "KAFKA_CONTROLLER_QUORUM_VOTERS": "1@127.0.0.1:9093",
        "KAFKA_AUTO_CREATE_TOPICS_ENABLE": "false",
        "KAFKA_OFFSETS_TOPIC_REPLICATION_FACTOR": "1",
        "KAFKA_TRANSACTION_STATE_LOG_REPLICATION_FACTOR": "1",
        "KAFKA_TRANSACTION_STATE_LOG_MIN_ISR": "1",
        "KAFKA_GROUP_INITIAL_REBALANCE_DELAY_MS": "0",
        "KAFKA_LOG_DIRS": "/var/lib/kafka/data",
    }
    container = _start(state, "kafka", KAFKA_IMAGE, environment, port, port, f"127.0.0.1:{port}")
    deadline = process.Deadline(START_TIMEOUT_S)
    while not kafka.serves(container.address):
        if deadline.is_over:
            raise LocalError(f"the broker's container does not answer; see: {logs(container.id)}")
        deadline.pause()
    return container


def start_postgres(state: Path) -> Container:
    """The database server of this state folder, created or started again."""
    port, password = process.free_ports(1)[0], secrets.token_urlsafe(24)
    environment = {"POSTGRES_USER": "postgres", "POSTGRES_PASSWORD": password, "POSTGRES_DB": "postgres"}
    address = f"postgresql://postgres:{password}@127.0.0.1:{port}/postgres"
    return _start(state, "postgres", POSTGRES_IMAGE, environment, 5432, port, address)


def stop(container_id: str) -> None:
    """Stop a container; it and its data stay."""
    _with(container_id, lambda container: container.stop(timeout=20))


def remove(container_id: str) -> None:
    """Stop and delete a container and its data."""
    _with(container_id, lambda container: container.remove(force=True, v=True))


def logs(container_id: str) -> str:
    """The command that shows what it says."""
    return f"docker logs {container_id[:12]}"


def _start(
    state: Path, role: str, image: str, environment: dict[str, str], inner: int, outer: int, address: str
) -> Container:
    from testcontainers.core.config import testcontainers_config
    from testcontainers.core.container import DockerContainer

    label = f"{role}:{state}"
    client = _client()
    if client is None:
        raise LocalError("the Docker engine no longer answers")
    with contextlib.closing(client):
        for known in client.containers.list(all=True, filters={"label": f"{LABEL}={label}"}):
            known.start()
            return Container(known.id, known.labels["afluente.address"])
    testcontainers_config.ryuk_disabled = True  # it would end the containers together with this command
    container = DockerContainer(image)
    container.with_kwargs(labels={LABEL: label, "afluente.address": address})
    container.ports[f"{inner}/tcp"] = ("127.0.0.1", outer)  # type: ignore[assignment]  # docker takes pairs too
    for name, value in environment.items():
        container.with_env(name, value)
    try:
        container.start()
    except Exception as error:
        raise LocalError(f"Docker answers, but {image} does not start: {error}") from error
    return Container(container.get_wrapped_container().id, address)


def _client() -> Any:
    """A client whose engine answered a ping, or None."""
    host = os.environ.get("DOCKER_HOST", "")
    if not host and not Path("/var/run/docker.sock").exists() and not (Path.home() / ".docker").exists():
        return None
    try:
        import docker

        client = docker.from_env(timeout=PROBE_TIMEOUT_S)
        client.ping()
    except Exception:  # whatever is wrong with it, there is no engine to use
        return None
    client.api.timeout = START_TIMEOUT_S
    return client


def _with(container_id: str, action: Any) -> None:
    client = _client()
    if client is None:
        raise LocalError("the Docker engine that runs the containers does not answer", hint="start Docker")
    import docker

    with contextlib.closing(client), contextlib.suppress(docker.errors.NotFound):
        action(client.containers.get(container_id))
