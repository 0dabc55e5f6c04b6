"""`afluente up` and `afluente down`: Kafka and Postgres in the background.

Keys of the JSON: up gives `kafka`, `postgres` (each `source, address, log`), `env_file`, `migrations`, `topics`; down
gives `stopped` and `data`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from afluente.cli.output import Format, FormatOption, say, show

up_app = typer.Typer()
down_app = typer.Typer()

STATE_DIR = Path(".afluente")
StateDirOption = Annotated[Path, typer.Option("--state-dir", help="where data, logs and addresses are kept")]


@up_app.command()
def up(
    state_dir: StateDirOption = STATE_DIR,
    use: Annotated[
        str | None, typer.Option("--use", metavar="docker|embedded", help="instead of looking first")
    ] = None,
    format: FormatOption = Format.text,
) -> None:
    """Start Kafka and Postgres in the background, migrate, apply the topics, and print where they are.

    Servers named by KAFKA_BOOTSTRAP_SERVERS and DATABASE_URL are used as they are; else Docker runs them, when an
    engine answers; else they run embedded. Called again it brings back what is not running, on its data.

    \b
    Examples:
      afluente up && source .afluente/env
      afluente up --state-dir /tmp/try --use embedded --format json
    """
    from afluente.errors import SettingsError
    from afluente.local import stack as stacks
    from afluente.settings import EnvironmentSettings

    if use not in (None, "docker", "embedded"):
        raise typer.BadParameter("is docker or embedded", param_hint="--use")
    environment = EnvironmentSettings.read(os.environ).environment
    prefix = os.environ.get("AFLUENTE_TOPIC_PREFIX", "")
    if environment.value == "production":
        raise SettingsError([("AFLUENTE_ENVIRONMENT", "production", "up is for local and test set-ups")])
    stack = stacks.up(state_dir, os.environ, use=stacks.Source(use) if use else None, say=say)
    migrations, topics = stacks.prepare(stack, environment=environment.value, topic_prefix=prefix)
    result: dict[str, Any] = {
        "kafka": {"source": stack.kafka.source, "address": stack.kafka.address, "log": stack.kafka.log},
        "postgres": {"source": stack.postgres.source, "address": stack.postgres.address, "log": stack.postgres.log},
        "env_file": str(stack.env_file),
        "migrations": migrations,
        "topics": topics,
    }
    if format is not Format.text:
        show(result, format)
        return
    for name, server in (("kafka", stack.kafka), ("postgres", stack.postgres)):
        print(f"{name:<8}  {_without_password(server.address)}  ({server.source})")
    print(f"applied   {len(migrations)} migrations, {topics} changes of topics")
    say(f"next: source {_shown(stack.env_file)}; afluente doctor; afluente down")


@down_app.command()
def down(
    state_dir: StateDirOption = STATE_DIR,
    delete_data: Annotated[bool, typer.Option("--delete-data", help="and delete what they stored")] = False,
    format: FormatOption = Format.text,
) -> None:
    """Stop what `afluente up` started. Data is kept for the next `up`, unless it is to be deleted.

    \b
    Examples:
      afluente down
      afluente down --delete-data
    """
    from afluente.cli.exits import Exit
    from afluente.local import stack as stacks

    known = stacks.load(state_dir.absolute())
    stopped = stacks.down(state_dir, delete_data=delete_data)
    data = "deleted" if delete_data else "kept"
    if format is not Format.text:
        show({"stopped": stopped, "data": data}, format)
    else:
        print(f"stopped   {', '.join(stopped) or 'nothing'}")
    if known is None:
        say(f"nothing was started from {_shown(state_dir)}")
        raise typer.Exit(Exit.FOUND)
    if not delete_data:
        say("data is kept; next: afluente up, or afluente down --delete-data")


def _without_password(address: str) -> str:
    from afluente.telemetry.redact import redact_text

    return redact_text(address).replace(":[redacted]@", "@")


def _shown(path: Path) -> str:
    """Relative to here when it is below here: shorter to type."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
