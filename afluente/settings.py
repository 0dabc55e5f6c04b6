"""What each process needs to know, read from the environment once, in the command line, and passed down from there.

Small groups (Kafka, Postgres, logging, secrets), and one class per process built from them. Nothing below the command
line reads the environment. A variable that is set but empty counts as not set (that is what compose files pass on).
For every variable `X` there may be `X_FILE` instead, naming a file that holds the value: the way secrets are mounted.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from afluente.errors import SettingsError

if TYPE_CHECKING:
    from afluente.secrets import Keyring


class Settings(BaseModel):
    """A frozen group of settings. Fields with an alias are variables; fields that are groups are read in their turn."""

    model_config = ConfigDict(frozen=True, populate_by_name=True, extra="forbid", hide_input_in_errors=True)

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Self:
        """Build from `environment`. SettingsError lists every problem at once, each with its variable and value."""
        problems: list[tuple[str, str | None, str]] = []
        values = cls._collect(environment, problems)
        if problems:
            raise SettingsError(problems)
        return cls(**values)

    @classmethod
    def variables(cls) -> dict[str, FieldInfo]:
        """Every environment variable that this class reads, with its field (description and default)."""
        found: dict[str, FieldInfo] = {}
        for field in cls.model_fields.values():
            if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
                found |= field.annotation.variables()
            elif field.alias:
                found[field.alias] = field
        return found

    @classmethod
    def _collect(cls, environment: Mapping[str, str], problems: list[tuple[str, str | None, str]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, field in cls.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
                group = field.annotation
                found = len(problems)
                group_values = group._collect(environment, problems)
                if len(problems) == found:
                    values[name] = group(**group_values)
            elif field.alias and (text := _value(field.alias, environment, problems)) is not None:
                values[field.alias] = text
        if any(isinstance(value, Settings) for value in values.values()):
            return values
        try:
            cls(**values)
        except ValidationError as error:
            for detail in error.errors(include_input=False, include_url=False):
                # a message of ours is "Value error, ..."; pydantic's own are sentences already
                what = str(detail["msg"]).removeprefix("Value error, ")
                location = str(detail["loc"][0]) if detail["loc"] else cls.__name__
                variable = cls.model_fields[location].alias or location if location in cls.model_fields else location
                if detail["type"] == "missing":
                    problems.append((variable, None, "is required and not set"))
                else:
                    problems.append((variable, _shown(cls, variable, environment), what))
        return values


def _value(variable: str, environment: Mapping[str, str], problems: list[tuple[str, str | None, str]]) -> str | None:
    if path := environment.get(f"{variable}_FILE"):
        if environment.get(variable):
            problems.append((variable, None, f"is set, and so is {variable}_FILE: keep one of them"))
            return environment[variable]
        try:
            return Path(path).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            problems.append((f"{variable}_FILE", path, f"cannot be read: {error}"))
            return None
    return environment.get(variable) or None


def _shown(cls: type[Settings], variable: str, environment: Mapping[str, str]) -> str | None:
    """The value as given, unless it is a secret."""
    field = cls.variables().get(variable)
    if field is None or "SecretStr" in str(field.annotation):
        return "**********" if environment.get(variable) else None
    return environment.get(variable)


SASL_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")


def _require_sasl(value: str | None, info: ValidationInfo) -> None:
    protocol = info.data.get("security_protocol")
    if value is not None and protocol is not None and not protocol.value.startswith("SASL"):
        raise ValueError(f"has no effect with KAFKA_SECURITY_PROTOCOL={protocol.value}: use SASL_SSL or SASL_PLAINTEXT")


class SecurityProtocol(StrEnum):
    PLAINTEXT = "PLAINTEXT"
    SSL = "SSL"
    SASL_PLAINTEXT = "SASL_PLAINTEXT"
    SASL_SSL = "SASL_SSL"


class Environment(StrEnum):
    local = "local"
    test = "test"
    production = "production"


class KafkaSettings(Settings):
    """How to reach the cluster. One object feeds librdkafka, Faust's aiokafka and the admin client."""

    bootstrap_servers: str = Field(alias="KAFKA_BOOTSTRAP_SERVERS", description="host:port[,host:port]")
    security_protocol: SecurityProtocol = Field(
        SecurityProtocol.PLAINTEXT,
        alias="KAFKA_SECURITY_PROTOCOL",
        description="PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL",
    )
    sasl_mechanism: str | None = Field(
        None,
        alias="KAFKA_SASL_MECHANISM",
        description="PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512; with SASL protocols only",
    )
    sasl_username: str | None = Field(None, alias="KAFKA_SASL_USERNAME", description="login of the SASL protocols")
    sasl_password: SecretStr | None = Field(None, alias="KAFKA_SASL_PASSWORD", description="its password")
    ssl_ca_location: str | None = Field(None, alias="KAFKA_SSL_CA_LOCATION", description="CA file, if not the system's")
    ssl_certificate_location: str | None = Field(
        None, alias="KAFKA_SSL_CERTIFICATE_LOCATION", description="client certificate, for mutual TLS"
    )
    ssl_key_location: str | None = Field(None, alias="KAFKA_SSL_KEY_LOCATION", description="its key")
    topic_prefix: str = Field(
        "",
        alias="AFLUENTE_TOPIC_PREFIX",
        description="put before every topic name and consumer group id: for several installations on one cluster",
    )

    @field_validator("bootstrap_servers")
    @classmethod
    def _check_servers(cls, value: str) -> str:
        for server in value.split(","):
            host, colon, port = server.strip().rpartition(":")
            if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
                raise ValueError(f"{server.strip()!r} is not host:port")
        return value

    @field_validator("topic_prefix")
    @classmethod
    def _check_prefix(cls, value: str) -> str:
        if not all(c.isascii() and (c.isalnum() or c in "._-") for c in value) or len(value) > 100:
            raise ValueError("may hold letters, digits, '.', '_' and '-' only, 100 at most")
        if value and not value.strip("."):
            raise ValueError("must hold a letter or a digit")
        return value

    @field_validator("sasl_mechanism")
    @classmethod
    def _check_mechanism(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and value not in SASL_MECHANISMS:
            raise ValueError(f"must be one of {', '.join(SASL_MECHANISMS)}")
        _require_sasl(value, info)
        return value

    @field_validator("sasl_username")
    @classmethod
    def _check_username(cls, value: str | None, info: ValidationInfo) -> str | None:
        _require_sasl(value, info)
        return value

    @field_validator("ssl_ca_location", "ssl_certificate_location", "ssl_key_location")
    @classmethod
    def _check_file(cls, value: str | None) -> str | None:
        if value is not None and not os.access(value, os.R_OK):
            raise ValueError("cannot be read: there is no such file, or it may not be opened")
        return value

    def client_config(self) -> dict[str, Any]:
        """The connection part of a librdkafka configuration."""
        config: dict[str, Any] = {
            "bootstrap.servers": self.bootstrap_servers,
            "security.protocol": self.security_protocol.value,
        }
        optional = {
            "sasl.mechanism": self.sasl_mechanism,
            "sasl.username": self.sasl_username,
            "sasl.password": self.sasl_password.get_secret_value() if self.sasl_password else None,
            "ssl.ca.location": self.ssl_ca_location,
            "ssl.certificate.location": self.ssl_certificate_location,
            "ssl.key.location": self.ssl_key_location,
        }
        return config | {name: value for name, value in optional.items() if value is not None}

    def group_id(self, name: str) -> str:
        """A consumer group's id on the cluster."""
        return self.topic_prefix + name


class PostgresSettings(Settings):
    """How to reach the database."""

    url: SecretStr = Field(alias="DATABASE_URL", description="postgresql://login:password@host:port/database")

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: SecretStr) -> SecretStr:
        from psycopg.conninfo import conninfo_to_dict

        try:
            given = conninfo_to_dict(value.get_secret_value())
            ports = str(given.get("port") or "5432").split(",")
        except Exception as error:
            # only its kind: libpq repeats the text it could not read, password and all
            raise ValueError(f"is not a connection string ({type(error).__name__})") from None
        if not all(port.isdigit() and 0 < int(port) < 65536 for port in ports):
            raise ValueError("has a port that is not a number from 1 to 65535")
        return value

    @property
    def dsn(self) -> str:
        """The connection string in clear."""
        return self.url.get_secret_value()


class LogLevel(StrEnum):
    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


class LogFormat(StrEnum):
    text = "text"
    json = "json"


class LogSettings(Settings):
    """What is logged, and how."""

    level: LogLevel = Field(LogLevel.info, alias="LOG_LEVEL", description="debug, info, warning or error")
    format: LogFormat = Field(LogFormat.text, alias="LOG_FORMAT", description="text for people, json for machines")

    heartbeat_file: str | None = Field(
        None,
        alias="AFLUENTE_HEARTBEAT_FILE",
        description="its time is renewed every few seconds while the process's loop turns: liveness without a port",
    )

    @field_validator("heartbeat_file")
    @classmethod
    def _check_heartbeat(cls, value: str | None) -> str | None:
        if value is not None and not os.access(Path(value).parent, os.W_OK):
            raise ValueError("cannot be written: its folder is not there, or not writable")
        return value

    @field_validator("level", "format", mode="before")
    @classmethod
    def _lower(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value


class MetricsSettings(Settings):
    """Where Prometheus asks this process for its numbers."""

    listen: str | None = Field(
        None,
        alias="AFLUENTE_METRICS",
        description="address:port that answers GET /metrics, as 0.0.0.0:9400; not set: none. Relays and workers; of "
        "workers /livez and /readyz, too",
    )

    @field_validator("listen")
    @classmethod
    def _check_listen(cls, value: str | None) -> str | None:
        if value is not None:
            host, colon, port = value.rpartition(":")
            if not colon or not host or not port.isdigit() or int(port) > 65535:
                raise ValueError("is not address:port")
        return value

    @property
    def address(self) -> tuple[str, int] | None:
        """Address and port; None when nothing is to listen."""
        if self.listen is None:
            return None
        host, _, port = self.listen.rpartition(":")
        return host.strip("[]"), int(port)


class SecretSettings(Settings):
    """The keys that seal what is stored sealed."""

    keys: SecretStr | None = Field(
        None,
        alias="AFLUENTE_SECRETS_KEY",
        description="<key id>:<base64 of 32 bytes>, several separated by commas, the sealing one first",
    )

    @field_validator("keys")
    @classmethod
    def _check_keys(cls, value: SecretStr | None) -> SecretStr | None:
        from afluente.secrets import Keyring, SecretError  # cryptography is slow to load

        try:
            if value is not None:
                Keyring.parse(value.get_secret_value())
        except SecretError as error:
            raise ValueError(str(error)) from None
        return value

    @property
    def keyring(self) -> Keyring | None:
        from afluente.secrets import Keyring

        return None if self.keys is None else Keyring.parse(self.keys.get_secret_value())

    def need_keyring(self, why: str) -> Keyring:
        """SettingsError, with what it is for, when no keys are set."""
        if (keyring := self.keyring) is None:
            raise SettingsError([("AFLUENTE_SECRETS_KEY", None, f"is required and not set: {why}")])
        return keyring


class EnvironmentSettings(Settings):
    """Where this runs."""

    environment: Environment = Field(
        Environment.local,
        alias="AFLUENTE_ENVIRONMENT",
        description="local, test or production: partitions, retention and replication of the topics",
    )


def _http_url(value: str | None) -> str | None:
    if value is None:
        return None
    try:
        parts = urlsplit(value)
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable:
        raise ValueError("is not an http or https URL with a host")
    return value.rstrip("/")


class RegistrySettings(Settings):
    """The schema registry, when there is one."""

    url: str | None = Field(
        None, alias="SCHEMA_REGISTRY_URL", description="Confluent-compatible API; without it the committed ids are used"
    )

    _check_url = field_validator("url")(_http_url)


Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def _networks(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    networks = []
    for part in filter(None, (part.strip() for part in value.split(","))):
        try:
            networks.append(ipaddress.ip_network(part))
        except ValueError as error:
            raise ValueError(f"{part!r} is not a network like 10.0.0.0/8 ({error})") from None
    return tuple(networks)


class OutboundSettings(Settings):
    """What outgoing webhooks may reach."""

    allow_networks: tuple[Network, ...] = Field(
        (),
        alias="AFLUENTE_WEBHOOK_ALLOW_NETWORKS",
        description="private networks that subscriptions may point to, as CIDRs separated by commas; none by default",
    )

    _parse = field_validator("allow_networks", mode="before")(_networks)


class SenderSettings(Settings):
    """The senders' APIs, asked for what a thin webhook points to. Not for a channel to set: we do the calling."""

    nuvemshop_api_url: str = Field(
        "https://api.nuvemshop.com.br/v1",
        alias="AFLUENTE_NUVEMSHOP_URL",
        description="base URL of the Nuvemshop API; the demo and tests name their stand-in",
    )

    _check_url = field_validator("nuvemshop_api_url")(_http_url)


class LinkSettings(Settings):
    """Tracked links: addresses of ours that people click."""

    url: str | None = Field(
        None,
        alias="AFLUENTE_LINKS_URL",
        description="where people reach `afluente web run --only links`, as https://l.example.com; a message with a "
        "tracked link is not sent without it",
    )

    _check_url = field_validator("url")(_http_url)


class BackoffSettings(Settings):
    """Waits between attempts."""

    scale: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] = Field(
        1.0, alias="AFLUENTE_BACKOFF_SCALE", description="multiplies every backoff; the demo and tests turn it down"
    )


class GroupProtocol(StrEnum):
    consumer = "consumer"
    classic = "classic"


class RuntimeSettings(Settings):
    """How workers live in their group."""

    group_protocol: GroupProtocol = Field(
        GroupProtocol.consumer,
        alias="AFLUENTE_GROUP_PROTOCOL",
        description="consumer (KIP-848, brokers from 4.0) or classic (cooperative-sticky), for older brokers",
    )
    drain_s: Annotated[float, Field(ge=0, le=600)] = Field(
        25.0, alias="AFLUENTE_DRAIN_S", description="after SIGTERM: seconds for what runs; then it is handed back"
    )
    takeover_s: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)] = Field(
        300.0, alias="AFLUENTE_CLAIM_TAKEOVER_S", description="seconds until a silent process's claims are taken over"
    )
    renew_s: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)] = Field(
        30.0, alias="AFLUENTE_CLAIM_RENEW_S", description="seconds between a process's signs of life, well below that"
    )
    stalled_s: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)] = Field(
        60.0,
        alias="AFLUENTE_STALLED_S",
        description="seconds without a turn of its loops, or with records that do not move, until /livez says so",
    )
    group_instance_id: str | None = Field(
        None,
        alias="AFLUENTE_GROUP_INSTANCE_ID",
        description="static membership, for processes with stable names of their own (a StatefulSet's pods): a restart "
        "within the session timeout moves no partitions. Two living processes of a worker with one id end each other",
    )

    @field_validator("group_instance_id")
    @classmethod
    def _check_instance(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[A-Za-z0-9._-]{1,200}", value):
            raise ValueError("may hold letters, digits, '.', '_' and '-' only, 200 at most")
        return value

    @field_validator("renew_s")
    @classmethod
    def _check_renewal(cls, value: float, info: ValidationInfo) -> float:
        if value > info.data.get("takeover_s", math.inf) / 2:
            raise ValueError("must be at most half of AFLUENTE_CLAIM_TAKEOVER_S: a living process would be given up")
        return value


class ToolSettings(Settings):
    """Commands that look at or change the installation: topics, doctor, emit, verify, dlq."""

    kafka: KafkaSettings
    postgres: PostgresSettings
    log: LogSettings
    environment: EnvironmentSettings


class TopicsSettings(Settings):
    """`afluente topics`: the cluster only."""

    kafka: KafkaSettings
    log: LogSettings
    environment: EnvironmentSettings


class TopicPrefixSettings(Settings):
    """The installation's prefix alone, for commands that ask no cluster."""

    prefix: str = Field("", alias="AFLUENTE_TOPIC_PREFIX", description="put before every topic name")


class SchemasSettings(Settings):
    """`afluente schemas`: files, and a registry when there is one."""

    topics: TopicPrefixSettings
    log: LogSettings
    registry: RegistrySettings


class MigrateSettings(Settings):
    """`afluente migrate`: Postgres only."""

    postgres: PostgresSettings
    log: LogSettings


class RelaySettings(Settings):
    """`afluente relay`."""

    kafka: KafkaSettings
    postgres: PostgresSettings
    log: LogSettings
    metrics: MetricsSettings
    environment: EnvironmentSettings
    registry: RegistrySettings


class WorkerSettings(Settings):
    """`afluente worker run`."""

    kafka: KafkaSettings
    postgres: PostgresSettings
    log: LogSettings
    metrics: MetricsSettings
    environment: EnvironmentSettings
    secrets: SecretSettings
    outbound: OutboundSettings
    senders: SenderSettings
    links: LinkSettings
    backoff: BackoffSettings
    runtime: RuntimeSettings
    registry: RegistrySettings


class StreamSettings(Settings):
    """`afluente stream run`."""

    kafka: KafkaSettings
    postgres: PostgresSettings
    log: LogSettings
    environment: EnvironmentSettings
    registry: RegistrySettings


class WebSettings(Settings):
    """`afluente web run`. The receiver needs no Kafka: it writes to Postgres."""

    postgres: PostgresSettings
    log: LogSettings
    environment: EnvironmentSettings
    secrets: SecretSettings


class SubscriptionSettings(Settings):
    """`afluente webhook`, its outgoing half: Postgres, the keys that seal, and what may be called."""

    postgres: PostgresSettings
    log: LogSettings
    environment: EnvironmentSettings
    secrets: SecretSettings
    outbound: OutboundSettings


class AutomationSettings(Settings):
    """`afluente automation`: Postgres, the keys that seal, where tracked links lead, and what may be called."""

    postgres: PostgresSettings
    log: LogSettings
    environment: EnvironmentSettings
    secrets: SecretSettings
    outbound: OutboundSettings
    links: LinkSettings
