"""`afluente api-key`: the keys of the REST API.

Keys of the JSON: create gives `id, organization_id, name, prefix, scopes, expires_at, key`; rotate gives `id, prefix,
key, old_valid_until`; limit gives `id, prefix, rate_per_s, rate_burst`; revoke gives `id, prefix, revoked_at`; list
gives `id, organization_id, organization, name, prefix, scopes, state (active, ending, expired or revoked), rate_per_s,
rate_burst, created_at, last_used_at, expires_at, revoked_at, rotated_from`.
"""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any

import typer

from afluente.cli.exits import Exit
from afluente.cli.output import Format, FormatOption, say, show
from afluente.cli.who import who

if TYPE_CHECKING:
    from psycopg import Connection

app = typer.Typer(help="Make, rotate and revoke keys of the REST API.", no_args_is_help=True)

KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help="its id or its prefix (afl_...)")]

_SPAN = re.compile(r"(\d{1,5})([hd])\Z")


@app.command()
def create(
    organization: Annotated[str, typer.Option("--org", help="whose key: id, slug or name of the organization")],
    name: Annotated[str, typer.Option("--name", help="what people call it: the service that has it")],
    scope: Annotated[
        list[str],
        typer.Option("--scope", help="events:write, events:read, contact-events:write, contact-events:read; repeat it"),
    ],
    expires: Annotated[
        str | None, typer.Option("--expires", help="when it ends: 90d, 12h, or a time with its zone; default: never")
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", help="items written, and requests that read, a second; default 100")
    ] = None,
    burst: Annotated[int | None, typer.Option("--burst", help="so many at once; default 1000")] = None,
    create_org: Annotated[
        bool, typer.Option("--create-org", help="make the organization if there is none of that name")
    ] = False,
    format: FormatOption = Format.text,
) -> None:
    """Make a key and show it, once: only its hash is kept.

    \b
    Examples:
      afluente api-key create --org "Loja Azul" --name checkout --scope events:write --scope events:read
      afluente api-key create --org ORG --name pos --scope contact-events:write --expires 90d --rate 20 --burst 200
    """
    from afluente.web.api import keys
    from producers import organizations

    ends_at = None if expires is None else _moment(expires)
    with _connected() as conn:
        organization_id = organizations.find(conn, organization, create=create_org)
        made = keys.create(
            conn,
            organization_id=organization_id,
            name=name,
            scopes=scope,
            expires_at=ends_at,
            rate_per_s=None if rate is None else Decimal(repr(rate)),
            rate_burst=burst,
            actor=who(),
        )
    row = {
        "id": made.id,
        "organization_id": organization_id,
        "name": name,
        "prefix": made.prefix,
        "scopes": sorted(set(scope)),
        "expires_at": ends_at,
        "key": made.text,
    }
    show(row, format)
    say("the key is not shown again; next: afluente web run --only api, then GET /v1/docs")


@app.command("list")
def list_(
    organization: Annotated[
        str | None, typer.Option("--org", help="only this organization's: its id, slug or name")
    ] = None,
    format: FormatOption = Format.text,
) -> None:
    """List keys, newest first: what they may, when they were used, when they end. Exit 3 when there are none.

    \b
    Examples:
      afluente api-key list
      afluente api-key list --org "Loja Azul" --format json
    """
    from afluente.web.api import keys
    from producers import organizations

    with _connected() as conn:
        organization_id = organizations.find(conn, organization) if organization else None
        rows = keys.listed(conn, organization_id, datetime.now(UTC))
    columns = ["prefix", "organization", "name", "scopes", "state", "last_used_at", "expires_at"]
    show(rows, format, None if format in (Format.json, Format.jsonl) else columns)
    if not rows:
        say("no keys; next: afluente api-key create")
        raise typer.Exit(Exit.FOUND)


@app.command()
def rotate(
    key: KeyArgument,
    overlap_h: Annotated[
        float, typer.Option("--overlap-h", min=0, help="hours for which the old key stays valid; 0 when it leaked")
    ] = 24.0,
    format: FormatOption = Format.text,
) -> None:
    """Make a key that takes another's place, and show it, once. Both are valid until the old one ends.

    \b
    Examples:
      afluente api-key rotate afl_V1StGXR8Z5
      afluente api-key rotate afl_V1StGXR8Z5 --overlap-h 0
    """
    from afluente.web.api import keys

    with _connected() as conn:
        overlap = timedelta(hours=overlap_h)
        made, ends_at = keys.rotate(conn, key, now=datetime.now(UTC), overlap=overlap, actor=who())
    show({"id": made.id, "prefix": made.prefix, "key": made.text, "old_valid_until": ends_at}, format)
    say("the key is not shown again")


@app.command()
def limit(
    key: KeyArgument,
    rate: Annotated[
        float | None, typer.Option("--rate", help="items written, and requests that read, a second; default 100")
    ] = None,
    burst: Annotated[int | None, typer.Option("--burst", help="so many at once; default 1000")] = None,
    format: FormatOption = Format.text,
) -> None:
    """Give a key other limits, within two seconds in every process; what is left out is the default again.

    \b
    Examples:
      afluente api-key limit afl_V1StGXR8Z5 --rate 500 --burst 5000
      afluente api-key limit afl_V1StGXR8Z5            the defaults
    """
    from afluente.web.api import keys

    with _connected() as conn:
        rate_per_s = None if rate is None else Decimal(repr(rate))
        row = keys.limit(conn, key, rate_per_s=rate_per_s, rate_burst=burst, now=datetime.now(UTC), actor=who())
    show(row, format)


@app.command()
def revoke(
    key: KeyArgument,
    reason: Annotated[str, typer.Option("--reason", help="why, for the audit log")] = "",
    format: FormatOption = Format.text,
) -> None:
    """End a key. Within two seconds no process takes it. Exit 3 when it had ended already, or there is none.

    \b
    Examples:
      afluente api-key revoke afl_V1StGXR8Z5 --reason "left the company"
      afluente api-key revoke 0198c2a4-... --format json
    """
    from afluente.web.api import keys

    with _connected() as conn:
        row = keys.revoke(conn, key, now=datetime.now(UTC), reason=reason, actor=who())
    show(row, format)


def _connected() -> Connection[Any]:
    from afluente import postgres
    from afluente.settings import MigrateSettings

    return postgres.connect(MigrateSettings.read(os.environ).postgres.dsn, application_name="afluente api-key")


def _moment(text: str) -> datetime:
    """A time to come: 90d, 12h, or ISO 8601 with its zone."""
    now = datetime.now(UTC)
    if found := _SPAN.match(text):
        return now + timedelta(**{{"h": "hours", "d": "days"}[found[2]]: int(found[1])})
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None or moment <= now:
        raise typer.BadParameter("90d, 12h, or a time to come in ISO 8601 with its zone", param_hint="--expires")
    return moment
