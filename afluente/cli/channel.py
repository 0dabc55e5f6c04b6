"""`afluente channel`: connections to the senders of webhooks."""

from __future__ import annotations

import os
import secrets as random
import sys
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal
from uuid import UUID

import typer

from afluente.cli import channel_mapping
from afluente.cli.output import Format, FormatOption, say, show
from afluente.errors import Refused

app = typer.Typer(help="Connect senders of webhooks, and rotate their secrets.", no_args_is_help=True)
app.add_typer(channel_mapping.app, name="mapping")

Secret = Annotated[
    str | None,
    typer.Option(help="what the sender signs with; - reads it from stdin; left out: a new one is made and shown once"),
]


@app.command()
def add(
    source: Annotated[
        str, typer.Argument(help="shopify, nuvemshop, stripe, hotmart, typeform, whatsapp, waha, evolution or generic")
    ],
    organization: Annotated[str, typer.Option("--org", help="id, slug or name of the organization")],
    external_id: Annotated[
        str | None,
        typer.Option(
            help="shop domain, store id, account or form id, phone_number_id, session (waha), instance (evolution): "
            "what the sender calls it; a delivery that names another one is not taken"
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="what people call it")] = None,
    secret: Secret = None,
    verify_token: Annotated[
        str | None, typer.Option(help="whatsapp, generic: the token of the set-up request; - for stdin")
    ] = None,
    api_token: Annotated[str | None, typer.Option(help="nuvemshop: access token of the API; - for stdin")] = None,
    account_id: Annotated[
        str | None, typer.Option(help="whatsapp: the business account, for what concerns all of it")
    ] = None,
    mapping: Annotated[
        str | None,
        typer.Option(help="generic: a shipped mapping (`channel mapping list`) or a file; - for stdin"),
    ] = None,
    called: Annotated[
        str | None,
        typer.Option("--as", help="generic: the sender's name for its facts, instead of the mapping's (yampi_outlet)"),
    ] = None,
    field: Annotated[
        list[str] | None,
        typer.Option(help="typeform: name, email, phone or document=REF of the question that asks it; repeatable"),
    ] = None,
    max_age_days: Annotated[
        float | None, typer.Option(help="hotmart: refuse events older than this; left out: any age", min=0.01)
    ] = None,
    left_after_min: Annotated[
        int | None, typer.Option(help="shopify: minutes without a change after which a checkout is left [60]")
    ] = None,
    country: Annotated[
        str | None, typer.Option(help="where a phone without a country's code is dialled; left out: BR")
    ] = None,
    test: Annotated[
        bool, typer.Option("--test", help="take the sender's test deliveries; a live one does not count them")
    ] = False,
    create: Annotated[
        bool, typer.Option("--create-org", help="make the organization if there is none of that name")
    ] = False,
    base_url: Annotated[str, typer.Option(help="where the receiver is reached from outside")] = "http://127.0.0.1:8080",
    format: FormatOption = Format.text,
) -> None:
    """Make a connection and print the address for the sender.

    \b
    What the secret is:
      shopify, nuvemshop   the app's client secret
      stripe               the endpoint's signing secret (whsec_...)
      hotmart              the hottok
      typeform             the webhook's secret; one connection takes all forms, or with --external-id FORM_ID one
      whatsapp             the Meta app's secret
      waha                 the session's webhook hmac.key
      evolution            what the instance sends as X-Webhook-Secret, or its jwt_key
      generic              as the mapping says: the key of the signature, or the token
    A generic sender is described by a mapping: `afluente channel mapping` lists, shows and checks them.

    \b
    Examples:
      afluente channel add shopify --org "Loja Azul" --create-org --external-id loja-azul.myshopify.com --secret -
      afluente channel add hotmart --org "Loja Azul" --secret -
      afluente channel add generic --mapping yampi --org "Loja Azul" --secret -
      afluente channel add generic --mapping our-courier.json --org "Loja Azul"
    """
    from afluente import postgres
    from afluente.settings import WebSettings
    from producers import organizations
    from producers.ingest import channels

    given_settings: dict[str, Any] = {}
    if account_id:
        given_settings["account_id"] = account_id
    if country:
        given_settings["country"] = country.upper()
    if left_after_min is not None:
        given_settings["left_after_min"] = left_after_min
    if max_age_days is not None:
        given_settings["max_age_days"] = max_age_days
    if field:
        given_settings["fields"] = dict(_named(text) for text in field)
    if mapping is not None:
        given_settings["mapping"] = channel_mapping.read(mapping, called)
    settings = WebSettings.read(os.environ)
    keyring = settings.secrets.need_keyring("secrets are stored sealed")
    given = _read(secret)
    made = given is None
    plain = channels.new_secret(source, given_settings) if given is None else given
    plains = {"signature": plain.encode()}
    token = _read(verify_token) or (random.token_urlsafe(24) if source == "whatsapp" else None)
    if token:
        plains["verify_token"] = token.encode()
    if api := _read(api_token):
        plains["api_token"] = api.encode()
    with postgres.connect(settings.postgres.dsn, application_name="afluente channel add") as conn:
        organization_id = organizations.find(conn, organization, create=create)
        channel_id = channels.add(
            conn,
            keyring,
            organization_id=organization_id,
            source=source,
            secrets=plains,
            external_id=external_id.lower() if external_id and source == "shopify" else external_id,
            name=name,
            mode="test" if test else "live",
            settings=given_settings,
        )
    row = {
        "id": str(channel_id),
        "organization_id": str(organization_id),
        "source": source,
        "url": f"{base_url.rstrip('/')}/webhooks/{source}/{channel_id}",
    }
    if given_settings.get("mapping"):
        row["sender"] = given_settings["mapping"].get("source")
    if made:
        row["secret"] = plain
    if token and verify_token is None:
        row["verify_token"] = token
    show(row, format)
    if made:
        say("The secret is shown this once. Senders that give you theirs: `afluente channel rotate ID --secret -`.")


@app.command("list")
def list_(
    organization: Annotated[
        str | None, typer.Option("--org", help="only of this organization: id, slug or name")
    ] = None,
    format: FormatOption = Format.text,
) -> None:
    """Show the connections.

    \b
    Example:
      afluente channel list --org "Loja Azul"
    """
    from afluente import postgres
    from afluente.settings import MigrateSettings
    from producers import organizations
    from producers.ingest import channels

    settings = MigrateSettings.read(os.environ)
    with postgres.connect(settings.postgres.dsn, application_name="afluente channel list") as conn:
        organization_id = organizations.find(conn, organization) if organization else None
        rows = channels.listed(conn, organization_id)
    show(rows, format, ["id", "organization", "source", "external_id", "status", "mode", "valid_secrets"])


@app.command()
def change(
    channel: Annotated[UUID, typer.Argument(help="id of the connection")],
    external_id: Annotated[
        str | None, typer.Option(help="what the sender calls it: shop domain, session, instance, ...")
    ] = None,
    name: Annotated[str | None, typer.Option(help="what people call it")] = None,
    status: Annotated[
        Literal["active", "paused"] | None, typer.Option(help="paused: what comes is answered and kept, no more")
    ] = None,
    format: FormatOption = Format.text,
) -> None:
    """Correct what a sender calls a connection, name it, or pause it.

    What came while it was paused, or named what the connection was not called, is kept as unrouted: `afluente webhook
    list --status unrouted --channel ID` shows it, and `afluente webhook replay` takes it in.

    \b
    Examples:
      afluente channel change 4f0c7d5e-... --external-id loja-azul
      afluente channel change 4f0c7d5e-... --status paused
    """
    from afluente import postgres
    from afluente.settings import MigrateSettings
    from producers.ingest import channels

    if external_id is None and name is None and status is None:
        raise typer.BadParameter("give --external-id, --name or --status")
    if external_id is not None and not external_id.strip():
        raise typer.BadParameter("--external-id is empty")
    settings = MigrateSettings.read(os.environ)
    with postgres.connect(settings.postgres.dsn, application_name="afluente channel change") as conn:
        row = channels.change(conn, channel, external_id=external_id, name=name, status=status)
    show(row, format)


@app.command()
def rotate(
    channel: Annotated[UUID, typer.Argument(help="id of the connection")],
    secret: Secret = None,
    purpose: Annotated[
        Literal["signature", "verify_token", "api_token"],
        typer.Option(help="what it is for; an api_token is the sender's, so --secret gives it"),
    ] = "signature",
    overlap_h: Annotated[float, typer.Option(help="hours for which the old secret stays valid", min=0)] = 24,
    format: FormatOption = Format.text,
) -> None:
    """Put a new secret beside the old one, which stays valid for a while.

    \b
    Example:
      afluente channel rotate 4f0c7d5e-... --secret - --overlap-h 24
    """
    from afluente import postgres
    from afluente.settings import WebSettings
    from producers.ingest import channels

    settings = WebSettings.read(os.environ)
    keyring = settings.secrets.need_keyring("secrets are stored sealed")
    given = _read(secret)
    if given is None and purpose == "api_token":
        raise Refused("a token of the sender's API cannot be made up here", hint="--secret - reads it from stdin")
    until = datetime.now(UTC) + timedelta(hours=overlap_h)
    with postgres.connect(settings.postgres.dsn, application_name="afluente channel rotate") as conn:
        plain = channels.new_secret_of(conn, channel) if given is None else given
        channels.rotate(conn, keyring, channel, purpose, plain.encode(), until)
    show({"id": str(channel), "old_valid_until": until} | ({"secret": plain} if given is None else {}), format)


def _named(text: str) -> tuple[str, str]:
    name, equals, ref = text.partition("=")
    if not equals:
        raise typer.BadParameter("give --field as name=REF")
    return name.strip(), ref.strip()


def _read(value: str | None) -> str | None:
    """An option's value; - is a line of stdin, so that a secret need not stand in the shell's history. Refused when
    empty: a variable that is not set would leave a connection that nobody can sign for."""
    text = sys.stdin.readline().strip() if value == "-" else value
    if text is not None and not text.strip():
        raise Refused("the secret is empty", hint="leave the option out where one may be made up")
    return text
