"""`afluente webhook`: deliveries that came in. What goes out to subscribers has its commands in the same group."""

from __future__ import annotations

import os
from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

import typer

from afluente.cli import webhook_out
from afluente.cli.exits import Exit
from afluente.cli.output import Format, FormatOption, say, show

app = typer.Typer(help="Manage webhook subscriptions and inbound deliveries.", no_args_is_help=True)
# subscribe, subscriptions, enable, rotate-secret, recover
app.add_typer(webhook_out.app)


@app.command("list")
def list_(
    status: Annotated[
        Literal["received", "processed", "ignored", "unrecognised", "failed", "unrouted", "duplicate", "refused"]
        | None,
        typer.Option(help="what became of them; unrouted: the sender named a shop, number or session of no connection"),
    ] = None,
    source: Annotated[
        str | None, typer.Option(help="the sender: shopify, or the name in a generic one's mapping")
    ] = None,
    channel: Annotated[UUID | None, typer.Option(help="that came to the address of this connection")] = None,
    organization: Annotated[
        str | None, typer.Option("--org", help="only of this organization: its id, slug or name")
    ] = None,
    since: Annotated[datetime | None, typer.Option(help="received at or after this time (UTC)")] = None,
    limit: Annotated[int, typer.Option(help="at most so many, newest first", min=1)] = 50,
    format: FormatOption = Format.text,
) -> None:
    """Show deliveries that came in and what became of them. Bodies are not shown.

    \b
    Example:
      afluente webhook list --status unrecognised --source shopify
    """
    import sql
    from afluente import postgres
    from afluente.settings import MigrateSettings
    from producers import organizations

    settings = MigrateSettings.read(os.environ)
    parameters: dict[str, Any] = {
        "status": status,
        "source": source,
        "channel_id": channel,
        "organization_id": None,
        "since": f"{since.isoformat()}+00:00" if since is not None and since.tzinfo is None else since,
        "limit": limit,
    }
    with postgres.connect(settings.postgres.dsn, application_name="afluente webhook list") as conn:
        from psycopg.rows import dict_row

        if organization:
            parameters["organization_id"] = organizations.identify(conn, organization)
        with conn.cursor(row_factory=dict_row) as cursor:
            rows = cursor.execute(sql.queries("webhook_events")["list"], parameters).fetchall()
    show(rows, format, ["received_at", "id", "sender", "topic", "status", "reason", "attempts"])


@app.command()
def replay(
    ids: Annotated[list[UUID], typer.Argument(help="ids of deliveries, as `webhook list` shows them")],
    format: FormatOption = Format.text,
) -> None:
    """Let stored deliveries go through again: one that was not understood, or one that belonged to no connection yet.

    What a delivery recorded before is found again and not doubled.

    \b
    Example:
      afluente webhook replay 0199b2a4-...
    """
    import asyncio

    from afluente.settings import WebSettings

    settings = WebSettings.read(os.environ)
    keyring = settings.secrets.need_keyring("it opens the senders' secrets")
    rows = asyncio.run(_replay(settings.postgres.dsn, keyring, ids))
    show(rows, format, ["id", "events", "problem"])
    failed = [row for row in rows if row["problem"]]
    if failed:
        raise typer.Exit(Exit.FAILED if len(failed) == len(rows) else Exit.PARTLY)
    if not any(row["events"] for row in rows):
        say("Nothing to do: every part has been through, or names what no connection is called, or a paused one.")
        say("`afluente channel list` shows what they are called, `afluente channel change` corrects it.")
        raise typer.Exit(Exit.FOUND)


async def _replay(dsn: str, keyring: Any, ids: list[UUID]) -> list[dict[str, Any]]:
    from datetime import UTC

    from afluente import postgres
    from producers.ingest import store

    rows = []
    async with await postgres.connect_async(dsn, application_name="afluente webhook replay") as conn:
        for webhook_event_id in ids:
            row: dict[str, Any] = {"id": str(webhook_event_id), "events": 0, "problem": None}
            try:
                async with conn.transaction():
                    row["events"] = await store.replay(conn, keyring, webhook_event_id, datetime.now(UTC))
            except store.NotReplayable as problem:
                row["problem"] = str(problem)
            rows.append(row)
    return rows
