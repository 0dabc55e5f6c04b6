"""Which Kafka release a broker is, as near as the protocol tells: the newest metadata.version that it supports.

librdkafka keeps what ApiVersions answers to itself, so the question is put by hand: it is the one request that every
broker answers before anybody logs in.
"""

from __future__ import annotations

import socket
import ssl
import struct
from dataclasses import dataclass

from afluente.errors import Unavailable
from afluente.settings import KafkaSettings, SecurityProtocol

TIMEOUT_S = 5.0
_API_VERSIONS = 18

# The first metadata.version level of each release (org.apache.kafka.server.common.MetadataVersion).
_FIRST_LEVELS = ((34, "4.5"), (31, "4.4"), (30, "4.3"), (28, "4.2"), (26, "4.1"), (22, "4.0"), (1, "3"))

# A broker of 4.3.0 to 4.4.0 that crashes between the commit of a transaction and its markers can leave the confirmed
# transaction undecided for ever (KAFKA-20734). The patch number is not in the protocol.
UNDECIDED_TRANSACTIONS = ("4.3", "4.4")


@dataclass(frozen=True)
class Release:
    """`name`: "4.2", without the patch number; `level`: the metadata.version it was told from."""

    name: str
    level: int

    @property
    def may_leave_transactions_undecided(self) -> bool:
        return self.name in UNDECIDED_TRANSACTIONS


def of_broker(settings: KafkaSettings) -> Release:
    """Ask the first bootstrap server that answers. Unavailable when none does, or the answer is not Kafka's."""
    failures = []
    for server in settings.bootstrap_servers.split(","):
        host, _, port = server.strip().rpartition(":")
        try:
            level = _level(_ask(settings, host.strip("[]"), int(port)))
        except (OSError, struct.error, IndexError, UnicodeDecodeError) as error:
            failures.append(f"{server.strip()}: {type(error).__name__} {error}")
            continue
        return Release(next((name for first, name in _FIRST_LEVELS if level >= first), "before 3.3"), level)
    raise Unavailable(f"no broker says its version ({'; '.join(failures)})")


def _ask(settings: KafkaSettings, host: str, port: int) -> bytes:
    """The body of an ApiVersions answer, version 3."""
    client = _compact(b"afluente")
    request = struct.pack(">hhih", _API_VERSIONS, 3, 1, -1) + b"\0" + client + _compact(b"1") + b"\0"
    with socket.create_connection((host, port), timeout=TIMEOUT_S) as plain:
        connection = plain
        if settings.security_protocol in (SecurityProtocol.SSL, SecurityProtocol.SASL_SSL):
            context = ssl.create_default_context(cafile=settings.ssl_ca_location)
            if settings.ssl_certificate_location:
                context.load_cert_chain(settings.ssl_certificate_location, settings.ssl_key_location)
            connection = context.wrap_socket(plain, server_hostname=host)
        connection.sendall(struct.pack(">i", len(request)) + request)
        (size,) = struct.unpack(">i", _receive(connection, 4))
        if not 4 <= size <= 1_000_000:
            raise OSError("what answers there is not Kafka")
        return _receive(connection, size)[4:]


def _level(answer: bytes) -> int:
    """The highest supported metadata.version in the answer's tagged fields; 0 when it names none."""
    at = 2  # the error code: 35 (unsupported version) still carries no features, and reads as none
    count, at = _varint(answer, at)
    for _ in range(count - 1):
        at = _skip_tags(answer, at + 6)
    at += 4  # throttle time
    tags, at = _varint(answer, at)
    for _ in range(tags):
        tag, at = _varint(answer, at)
        size, at = _varint(answer, at)
        if tag == 0:
            return _supported(answer[at : at + size])
        at += size
    return 0


def _supported(features: bytes) -> int:
    count, at = _varint(features, 0)
    for _ in range(count - 1):
        length, at = _varint(features, at)
        name = features[at : at + length - 1].decode()
        at += length - 1
        _, newest = struct.unpack_from(">hh", features, at)
        at = _skip_tags(features, at + 4)
        if name == "metadata.version":
            return int(newest)
    return 0


def _skip_tags(data: bytes, at: int) -> int:
    count, at = _varint(data, at)
    for _ in range(count):
        _, at = _varint(data, at)
        size, at = _varint(data, at)
        at += size
    return at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return value, at
        shift += 7


def _compact(text: bytes) -> bytes:
    return bytes([len(text) + 1]) + text


def _receive(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        part = connection.recv(size - len(received))
        if not part:
            raise OSError("the connection was closed")
        received += part
    return received
