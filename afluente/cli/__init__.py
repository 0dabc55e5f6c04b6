"""The command `afluente`: a table of commands, each module loaded only when its command is used.

`afluente --help` loads nothing but this file. Known errors become one clear sentence and an exit status
(`afluente.cli.exits`); an error nobody expected keeps its traceback. This is the only place that reads the environment.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from afluente.cli.exits import Exit


@dataclass(frozen=True)
class Entry:
    """One word after `afluente`: a group of commands, or a single command."""

    help: str
    module: str
    attribute: str = "app"
    group: bool = True


COMMANDS: dict[str, Entry] = {
    "demo": Entry("Play a small story end to end and show what came out.", "afluente.cli.demo", group=False),
    "up": Entry("Start Kafka and Postgres in the background, migrated.", "afluente.cli.local", "up_app", group=False),
    "down": Entry("Stop what `up` started.", "afluente.cli.local", "down_app", group=False),
    "doctor": Entry("Say what is wrong with a set-up and how to mend it.", "afluente.cli.doctor", group=False),
    "emit": Entry("Commit an event, as a service would.", "afluente.cli.emit", group=False),
    "tail": Entry("Show events as they pass on the topics.", "afluente.cli.tail", group=False),
    "migrate": Entry("Bring the database to its schema, or back.", "afluente.cli.migrate"),
    "topics": Entry("Compare the declared topics to a cluster, and apply.", "afluente.cli.topics"),
    "schemas": Entry("Check, generate, register and show event schemas.", "afluente.cli.schemas"),
    "relay": Entry("Publish committed events to Kafka.", "afluente.cli.relay"),
    "worker": Entry("Run, list and pause workers.", "afluente.cli.worker"),
    "dlq": Entry("Find, retry, edit, discard, export dead letters.", "afluente.cli.dlq"),
    "stream": Entry("Fold contact events into summaries.", "afluente.cli.stream"),
    "verify": Entry("Reconcile the event log, the topics and the deliveries.", "afluente.cli.verify", group=False),
    "web": Entry("Receive webhooks and answer the REST API over HTTP.", "afluente.cli.web"),
    "api-key": Entry("Make, rotate and revoke keys of the REST API.", "afluente.cli.api_key"),
    "channel": Entry("Connect senders of webhooks, and rotate their secrets.", "afluente.cli.channel"),
    "webhook": Entry("Manage webhook subscriptions and inbound deliveries.", "afluente.cli.webhook"),
    "automation": Entry("Write, try and switch automations, and see their runs.", "afluente.cli.automation"),
    "contact": Entry("Find, show and merge contacts.", "afluente.cli.contact"),
    "contact-events": Entry("List, count and import contact events.", "afluente.cli.contact_events"),
    "bench": Entry("Measure on this machine, beside other ways to do it.", "afluente.cli.bench"),
}


class LazyGroup(TyperGroup):
    """Knows its commands by the table, and imports a module when its command is run."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return list(COMMANDS)

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        """A stand-in that carries name and help: what the list of commands shows."""
        entry = COMMANDS.get(cmd_name)
        return None if entry is None else TyperCommand(cmd_name, help=entry.help, rich_help_panel="Commands")

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override]
        self.commands = {name: self.get_command(ctx, name) for name in COMMANDS}  # to suggest for a mistyped one
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else load(name), rest


def load(name: str) -> Any:
    """Import the module of a command and return it as a command of typer's."""
    entry = COMMANDS[name]
    app = getattr(importlib.import_module(entry.module), entry.attribute)
    app._add_completion = False
    app.rich_markup_mode = None  # plain help everywhere, which keeps the examples as they are written
    command = typer.main.get_group(app) if entry.group else typer.main.get_command(app)
    command.name = name
    command.context_settings.setdefault("help_option_names", ["-h", "--help"])
    return command


app = typer.Typer(
    cls=LazyGroup,
    name="afluente",
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"afluente {version('afluente')}")
        raise typer.Exit()


@app.callback()
def _begin(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="log at level debug")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="log warnings and errors only")] = False,
    version: Annotated[
        bool, typer.Option("--version", "-V", help="print the version", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """The event backbone: committed rows to Kafka, side effects, summaries.

    \b
    Examples:
      afluente up                    Kafka and Postgres, migrated, topics applied
      afluente demo                  events end to end, with a failure on purpose
    """
    from afluente import faults, telemetry
    from afluente.errors import SettingsError
    from afluente.settings import LogSettings

    log = LogSettings.read(os.environ)
    if log.heartbeat_file:
        telemetry.heartbeat.to_file(Path(log.heartbeat_file))
    telemetry.configure("debug" if verbose else "warning" if quiet else log.level.value, log.format.value)
    try:
        faults.arm_from(os.environ)
    except ValueError as error:
        raise SettingsError([("AFLUENTE_FAULT", os.environ.get("AFLUENTE_FAULT"), str(error))]) from None


def main(arguments: list[str] | None = None) -> None:
    """The entry point of the command: always ends in SystemExit."""
    try:
        typer.main.get_group(app).main(arguments, prog_name="afluente")
    except KeyboardInterrupt:
        raise SystemExit(Exit.INTERRUPTED) from None
    except Exception as error:
        raise SystemExit(_explain(error)) from None


def _explain(error: Exception) -> int:
    """Print what `error` means for the person and return the exit status."""
    from afluente.cli.output import say
    from afluente.errors import AfluenteError, NotAllowed, SettingsError, Unavailable

    hint = getattr(error, "hint", None)
    match error:
        case SettingsError():
            status, text = Exit.USAGE, f"settings: {error}"
        case NotAllowed():
            status, text = Exit.NOT_ALLOWED, f"not allowed: {error}"
        case Unavailable():
            status, text = Exit.TRY_AGAIN, f"unavailable: {error}"
        case AfluenteError():
            status, text = Exit(getattr(error, "exit_status", Exit.FAILED)), str(error)
        case _:
            status, text, hint = _explain_client(error)
    say(f"afluente: {text}")
    if hint:
        say(f"  try: {hint}")
    return int(status)


def _explain_client(error: Exception) -> tuple[Exit, str, str | None]:
    # Only what this run loaded can have raised: no import to find out.
    if (migrate := sys.modules.get("sql.migrate")) and isinstance(error, migrate.MigrationError):
        kinds = {migrate.EditedMigrationError: Exit.FOUND, migrate.LockTimeoutError: Exit.TRY_AGAIN}
        return kinds.get(type(error), Exit.FAILED), str(error), None
    if psycopg := sys.modules.get("psycopg"):
        if isinstance(error, psycopg.errors.InsufficientPrivilege):
            return Exit.NOT_ALLOWED, f"not allowed: {_first_line(error)}", "connect as a login that may"
        if (ours := sys.modules.get("afluente.postgres")) and ours.refuses_login(error):
            hint = "connect as a login that is a member of the role: GRANT afluente_worker TO the login"
            return Exit.NOT_ALLOWED, f"not allowed: {_first_line(error)}", hint if "set role" in str(error) else None
        if isinstance(error, psycopg.errors.DeadlockDetected | psycopg.errors.SerializationFailure):
            return Exit.TRY_AGAIN, f"somebody was quicker, and nothing was done: {_first_line(error)}", "run it again"
        if isinstance(error, psycopg.OperationalError):
            return Exit.TRY_AGAIN, f"Postgres is away: {_first_line(error)}", "afluente doctor"
        if isinstance(error, psycopg.errors.UndefinedTable | psycopg.errors.UndefinedFunction):
            return Exit.FAILED, f"the database lacks something: {_first_line(error)}", "afluente migrate up"
        if isinstance(error, psycopg.Error) and (error.sqlstate or "").startswith("AF"):
            return Exit.FAILED, f"{_first_line(error)} ({error.sqlstate})", None
    if confluent := sys.modules.get("confluent_kafka"):
        if isinstance(error, confluent.KafkaException):
            reason = error.args[0].str() if hasattr(error.args[0], "str") else str(error)
            away = hasattr(error.args[0], "retriable") and (
                error.args[0].retriable() or error.args[0].code() in _away_codes(confluent)
            )
            return (Exit.TRY_AGAIN if away else Exit.FAILED), f"Kafka: {reason}", "afluente doctor"
        if isinstance(error, TimeoutError):  # of a future of the admin client
            return Exit.TRY_AGAIN, "Kafka does not answer in time", "afluente doctor"
    traceback.print_exception(error)
    return Exit.FAILED, f"unexpected {type(error).__name__}: {error}", None


def _away_codes(confluent: Any) -> tuple[int, ...]:
    kinds = confluent.KafkaError
    return (kinds._TRANSPORT, kinds._ALL_BROKERS_DOWN, kinds._TIMED_OUT, kinds._RESOLVE, kinds._MSG_TIMED_OUT)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
