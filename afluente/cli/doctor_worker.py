"""What `afluente doctor` says of the workers: which of them people have paused. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from afluente.cli.doctor import Finding, State


def examine(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Everything about the workers. What other checks have said (Postgres away, migrations missing) is left out."""
    import psycopg

    from afluente import postgres
    from afluente.errors import SettingsError
    from afluente.settings import PostgresSettings
    from consumers.runtime import control

    try:
        url = PostgresSettings.read(environment).dsn
        with postgres.connect(url, application_name="afluente doctor", autocommit=True) as conn:
            pauses = control.paused(conn)
    except (SettingsError, psycopg.Error):
        return
    for worker, pause in sorted(pauses.items()):
        why = f": {pause.reason}" if pause.reason else ""
        yield Finding(
            "worker.paused",
            State.warning,
            f"{worker} is paused by {pause.by} since {pause.since.astimezone():%Y-%m-%d %H:%M:%S%z}{why}",
            f"afluente worker resume {worker}",
        )
