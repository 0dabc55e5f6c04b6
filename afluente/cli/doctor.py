"""`afluente doctor`: what is wrong with a set-up, and how to mend each thing. Changes nothing.

Keys of the JSON: one object per check with `check, state, found, fix`; `state` is ok, note, warning or problem.
Warnings and problems are findings. A check that needs what another found missing is left out, not failed twice.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from afluente.cli.exits import Exit
from afluente.cli.output import Format, FormatOption, say, show

app = typer.Typer()

CLOCK_TOLERANCE_S = 2.0
KAFKA_TIMEOUT_S = 5.0
LEAST_POSTGRES = 18
_SERVERS = ("KAFKA_BOOTSTRAP_SERVERS", "DATABASE_URL")
LEAST_LIBRDKAFKA = (2, 15)
ROLES = ("afluente_app", "afluente_worker", "afluente_admin")


class State(StrEnum):
    ok = "ok"
    note = "note"
    warning = "warning"
    problem = "problem"


@dataclass(frozen=True)
class Finding:
    check: str
    state: State
    found: str
    fix: str = ""


@app.command()
def doctor(
    state_dir: Annotated[Path, typer.Option("--state-dir", help="the state folder of `afluente up`")] = Path(
        ".afluente"
    ),
    settings: Annotated[bool, typer.Option("--settings", help="list every setting and where it came from")] = False,
    format: FormatOption = Format.text,
) -> None:
    """Look at settings, servers, versions, topics, migrations, roles and clocks. Exit 3 when something is to be mended.

    It looks at the servers that KAFKA_BOOTSTRAP_SERVERS and DATABASE_URL name, without them at what `afluente up` has
    started.

    \b
    Examples:
      afluente doctor
      afluente doctor --settings
      afluente doctor --format json
    """
    if settings:
        show(list(_settings(os.environ)), format, ["variable", "value", "source", "meaning"])
        return
    findings = list(examine(os.environ, state_dir))
    show([asdict(finding) for finding in findings], format, ["state", "check", "found"])
    wrong = [finding for finding in findings if finding.state in (State.warning, State.problem)]
    if format is Format.text:
        for finding in wrong:
            print(f"\n{finding.check}: {finding.found}\n  fix: {finding.fix}")
    if wrong:
        say(f"{len(wrong)} finding{'s'[: len(wrong) > 1]}")
        raise typer.Exit(Exit.FOUND)
    say("nothing to mend")


def examine(environment: Mapping[str, str], state_dir: Path) -> Iterator[Finding]:
    """All checks in order, each looking at the world as it is yielded."""
    from afluente.cli import doctor_relay, doctor_worker
    from afluente.local import stack as stacks

    environment = dict(environment)
    stack = stacks.load(state_dir.absolute())
    if stack is not None and _names_others(environment, stack):
        stack = None  # such as the demo's, while `afluente up` has left servers of its own
    if stack is not None:
        yield from _local(stack)
        for name, value in stack.environment().items():
            environment.setdefault(name, value)
    else:
        yield from _local_possible(environment)
    yield from _variables(environment)
    yield from _secrets(environment)
    yield from _libraries()
    yield from _kafka(environment)
    yield from _postgres(environment)
    yield from doctor_relay.examine(environment)
    yield from doctor_worker.examine(environment)


def _names_others(environment: Mapping[str, str], stack: Any) -> bool:
    """Whether the environment points at other servers than the stack's."""
    stacks_own = stack.environment()
    return any(environment.get(name, stacks_own[name]) != stacks_own[name] for name in _SERVERS)


def _local(stack: Any) -> Iterator[Finding]:
    from afluente.local import kafka
    from afluente.local import stack as stacks

    for name, server in (("kafka", stack.kafka), ("postgres", stack.postgres)):
        if server.source is stacks.Source.environment:
            continue
        where = f"{server.source}, log: {server.log}"
        if stacks.is_running(stack, name):
            yield Finding(f"local.{name}", State.ok, where)
        else:
            yield Finding(f"local.{name}", State.problem, f"does not run ({where})", "afluente up")
    if stack.kafka.source is stacks.Source.embedded and kafka.is_prepared():
        distribution = kafka.prepare()
        if damaged := kafka.damaged_jars(distribution):
            yield Finding(
                "local.jars",
                State.problem,
                f"{len(damaged)} changed since fetched: {damaged[0]}",
                f"rm -r {distribution}",
            )
        else:
            yield Finding("local.jars", State.ok, str(distribution))


def _local_possible(environment: Mapping[str, str]) -> Iterator[Finding]:
    """No stack of ours here: is one needed, and could there be one?"""
    from afluente.local import docker, kafka

    if all(environment.get(name) for name in _SERVERS):
        return
    if docker.answers():
        yield Finding("local.source", State.note, "`afluente up` would use Docker")
    elif kafka.is_prepared() or shutil.which("mvn"):
        yield Finding("local.source", State.note, "`afluente up` would run Kafka and Postgres embedded")
    else:
        yield Finding(
            "local.source",
            State.problem,
            "no servers are named, no Docker engine answers, and Maven is not installed",
            "install Docker or Maven, or set KAFKA_BOOTSTRAP_SERVERS and DATABASE_URL",
        )


def _variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    from afluente.errors import SettingsError

    problems: dict[str, tuple[str | None, str]] = {}
    for process in _processes():
        try:
            process.read(environment)
        except SettingsError as error:
            problems |= {variable: (value, what) for variable, value, what in error.problems}
    for variable, (value, what) in problems.items():
        missing = "is required" in what
        yield Finding(
            f"settings.{variable}",
            State.problem,
            f"{variable} {what}" if value is None else f"{variable}={value}: {what}",
            "afluente up, and source its env file" if missing else f"set {variable}: {_meaning(variable)}",
        )
    if not problems:
        yield Finding("settings", State.ok, "every process can read its settings")
    known = _known().keys() | _NOT_OF_A_PROCESS
    unknown = sorted(
        name for name in environment if name.startswith("AFLUENTE_") and not {name, name.removesuffix("_FILE")} & known
    )
    for name in unknown:
        yield Finding(
            f"settings.{name}", State.warning, f"{name} is not a setting", f"unset {name}; --settings lists them"
        )


def _secrets(environment: Mapping[str, str]) -> Iterator[Finding]:
    from afluente.errors import SettingsError
    from afluente.secrets import Keyring, SecretError
    from afluente.settings import SecretSettings

    try:
        keys = SecretSettings.read(environment).keys
        if keys is None:
            yield Finding(
                "settings.AFLUENTE_SECRETS_KEY",
                State.note,
                "not set: secrets of channels and webhook subscriptions can neither be stored nor read",
            )
            return
        Keyring.parse(keys.get_secret_value())
    except (SecretError, SettingsError) as error:
        yield Finding("settings.AFLUENTE_SECRETS_KEY", State.problem, str(error), "<key id>:<base64 of 32 bytes>")
    else:
        yield Finding("settings.AFLUENTE_SECRETS_KEY", State.ok, "opens and seals")


def _libraries() -> Iterator[Finding]:
    import confluent_kafka

    version = confluent_kafka.libversion()[0]
    if tuple(int(part) for part in version.split(".")[:2]) < LEAST_LIBRDKAFKA:
        yield Finding("librdkafka", State.warning, f"{version} is older than 2.15", "pip install -U confluent-kafka")
    else:
        yield Finding("librdkafka", State.ok, version)


def _kafka(environment: Mapping[str, str]) -> Iterator[Finding]:
    from confluent_kafka import KafkaException

    from afluente import kafka as clients
    from afluente.errors import AfluenteError, SettingsError
    from afluente.kafka import release
    from afluente.settings import KafkaSettings

    try:
        settings = KafkaSettings.read(environment)
    except SettingsError:
        return  # said under settings
    admin = clients.admin(settings)
    try:
        metadata = admin.list_topics(timeout=KAFKA_TIMEOUT_S)
    except KafkaException as error:
        yield Finding(
            "kafka.reachable",
            State.problem,
            f"{settings.bootstrap_servers} does not answer: {error.args[0].str()}",
            "start the broker, or correct KAFKA_BOOTSTRAP_SERVERS; locally: afluente up",
        )
        return
    brokers = len(metadata.brokers)
    yield Finding("kafka.reachable", State.ok, f"{settings.bootstrap_servers}, {brokers} broker{'s'[: brokers > 1]}")
    try:
        found = release.of_broker(settings)
    except AfluenteError as error:
        yield Finding("kafka.version", State.note, f"not known: {error}")
    else:
        if found.may_leave_transactions_undecided:
            yield Finding(
                "kafka.version",
                State.warning,
                f"{found.name}: a broker of 4.3.0 to 4.4.0 that crashes can leave a confirmed transaction undecided",
                "run 4.2.2; after a crash of this broker: afluente relay repair (KAFKA-20734)",
            )
        else:
            yield Finding("kafka.version", State.ok, f"{found.name} (metadata.version level {found.level})")
    yield from _transactions(settings)
    yield from _topics(environment, admin, settings.topic_prefix)


def _transactions(settings: Any) -> Iterator[Finding]:
    from afluente.errors import AfluenteError, Refused
    from producers.relay.repair import State as Open
    from producers.relay.repair import find

    try:
        hanging = [item for item in find(settings) if item.state in (Open.hanging, Open.foreign)]
    except Refused:
        return  # a topic is missing, which is said under topics
    except AfluenteError as error:
        yield Finding("kafka.transactions", State.note, f"not known: {error}")
        return
    if not hanging:
        yield Finding("kafka.transactions", State.ok, "none is left undecided")
        return
    by_others = all(item.state is Open.foreign for item in hanging)
    yield Finding(
        "kafka.transactions",
        State.problem,
        f"undecided for ever in {len(hanging)} place{'s'[: len(hanging) > 1]}, {hanging[0].place} from offset "
        f"{hanging[0].start_offset} for one: readers of committed records stop there"
        + (" (not of a relay)" if by_others else ", and the relay does not start"),
        "afluente relay repair --any-producer" if by_others else "stop every relay, then: afluente relay repair",
    )


def _topics(environment: Mapping[str, str], admin: Any, prefix: str) -> Iterator[Finding]:
    from afluente.errors import SettingsError
    from afluente.kafka import topics_apply
    from afluente.settings import EnvironmentSettings
    from consumers.workers import REGISTRY
    from schemas.topics import declared

    try:
        place = EnvironmentSettings.read(environment).environment
    except SettingsError:
        return
    specs = declared(place.value, list(REGISTRY), prefix)
    differences = [d for d in topics_apply.plan(admin, specs, lambda name: False) if d.is_change]
    if not differences:
        yield Finding("kafka.topics", State.ok, f"all {len(specs)} as declared for {place}")
        return
    missing = {d.topic for d in differences if d.kind is topics_apply.Kind.missing}
    other = {d.topic for d in differences} - missing
    parts = [f"{len(missing)} of {len(specs)} missing"] * bool(missing)
    parts += [f"{len(other)} differ, {min(other)} for one"] if other else []
    yield Finding("kafka.topics", State.problem, ", ".join(parts), "afluente topics plan, then afluente topics apply")


def _postgres(environment: Mapping[str, str]) -> Iterator[Finding]:
    import psycopg

    from afluente import postgres
    from afluente.errors import SettingsError
    from afluente.settings import PostgresSettings

    try:
        settings = PostgresSettings.read(environment)
    except SettingsError:
        return
    try:
        conn = postgres.connect(settings.dsn, role=None, application_name="afluente doctor", autocommit=True)
    except psycopg.OperationalError as error:
        yield Finding(
            "postgres.reachable",
            State.problem,
            _one_line(error),
            "start the server, or correct DATABASE_URL; locally: afluente up",
        )
        return
    with conn:
        before = datetime.now(UTC)
        row = conn.execute("SELECT clock_timestamp(), current_user, pg_is_in_recovery()").fetchone()
        after = datetime.now(UTC)
        assert row is not None
        there, login, in_recovery = row
        yield Finding(
            "postgres.reachable", State.ok, f"{conn.info.host}:{conn.info.port}/{conn.info.dbname} as {login}"
        )
        version = conn.info.server_version // 10000
        if version < LEAST_POSTGRES:
            yield Finding("postgres.version", State.problem, f"{version}", f"Postgres {LEAST_POSTGRES} or newer")
            return
        yield Finding("postgres.version", State.ok, f"{version}.{conn.info.server_version % 10000}")
        if in_recovery:
            yield Finding("postgres.primary", State.problem, "this is a standby", "DATABASE_URL must name the primary")
            return
        yield from _clock(there, before, after)
        yield from _migrations(conn)
        yield from _roles(conn, login)


def _clock(there: datetime, before: datetime, after: datetime) -> Iterator[Finding]:
    """The server's clock was read between `before` and `after`: outside of them it differs."""
    off = max((before - there).total_seconds(), (there - after).total_seconds(), 0.0)
    if off > CLOCK_TOLERANCE_S:
        yield Finding(
            "clocks",
            State.warning,
            f"this machine and Postgres differ by {off:.1f} s",
            "synchronise both clocks (chrony, ntpd): due times are compared across them",
        )
    else:
        yield Finding("clocks", State.ok, f"this machine and Postgres agree within {CLOCK_TOLERANCE_S:.0f} s")


def _migrations(conn: Any) -> Iterator[Finding]:
    from sql import migrate

    by_state: dict[str, list[str]] = {}
    for line in migrate.status(conn):
        by_state.setdefault(line.state, []).append(line.label)
    for state, fix in (
        ("edited", "put the files back as they were applied, and write the change as a new migration"),
        ("unknown", "this code is older than the database: deploy the newer one"),
        ("unfinished", "afluente migrate up"),
        ("pending", "afluente migrate up"),
    ):
        if labels := by_state.get(state):
            yield Finding("postgres.migrations", State.problem, f"{len(labels)} {state}: {', '.join(labels[:3])}", fix)
    if set(by_state) == {"applied"}:
        yield Finding("postgres.migrations", State.ok, f"{len(by_state['applied'])} applied")


def _roles(conn: Any, login: str) -> Iterator[Finding]:
    found = dict(
        conn.execute(
            "SELECT rolname, pg_has_role(current_user, oid, 'SET') FROM pg_roles WHERE rolname = ANY(%s)", [list(ROLES)]
        ).fetchall()
    )
    if missing := [role for role in ROLES if role not in found]:
        yield Finding("postgres.roles", State.problem, f"missing: {', '.join(missing)}", "afluente migrate up")
    elif refused := [role for role in ROLES if not found[role]]:
        yield Finding(
            "postgres.roles",
            State.problem,
            f"{login} may not become {', '.join(refused)}",
            f"GRANT {', '.join(refused)} TO {login}",
        )
    else:
        yield Finding("postgres.roles", State.ok, f"{login} may become {', '.join(ROLES)}")


def _settings(environment: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    for variable, field in sorted(_known().items()):
        secret = "SecretStr" in str(field.annotation)
        if environment.get(f"{variable}_FILE"):
            source, value = f"{variable}_FILE", f"in {environment[f'{variable}_FILE']}"
        elif environment.get(variable):
            source, value = "environment", "**********" if secret else environment[variable]
        else:
            default = field.get_default()
            source, value = ("required", "") if field.is_required() else ("default", _shown_default(default))
        yield {"variable": variable, "value": value, "source": source, "meaning": field.description}


def _shown_default(default: Any) -> str:
    if default is None or default == () or default == "":
        return ""
    return str(getattr(default, "value", default))


def _processes() -> list[Any]:
    """The settings class of every process: those that are made of groups."""
    from afluente import settings

    return [
        each
        for each in vars(settings).values()
        if isinstance(each, type)
        and issubclass(each, settings.Settings)
        and any(
            isinstance(f.annotation, type) and issubclass(f.annotation, settings.Settings)
            for f in each.model_fields.values()
        )
    ]


def _known() -> dict[str, Any]:
    known: dict[str, Any] = {}
    for process in _processes():
        known |= process.variables()
    return known


# Defaults of single options, and what tests set.
_NOT_OF_A_PROCESS = frozenset(
    {
        "AFLUENTE_RELAY_LOG_RECORDS",
        "AFLUENTE_STREAM_MEMBER_ID",
        "AFLUENTE_FAULT",
        "AFLUENTE_FAULT_LOG",
        "AFLUENTE_TEST_RUN_DIR",
    }
)


def _meaning(variable: str) -> str:
    field = _known().get(variable)
    return field.description or "" if field is not None else ""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
