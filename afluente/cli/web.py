"""`afluente web`: the HTTP server."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from afluente.errors import SettingsError

app = typer.Typer(help="Receive webhooks over HTTP.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Receive webhooks over HTTP."""


@app.command()
def run(
    only: Annotated[str, typer.Option(help="the part to serve: ingest")] = "ingest",
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on; 0 takes a free one", min=0, max=65535)] = 8080,
) -> None:
    """Serve until stopped. POST /webhooks/<source>/<channel> is stored before it is answered.

    \b
    Example:
      afluente web run --only ingest --port 8080
    """
    from afluente.secrets import Keyring
    from afluente.settings import WebSettings
    from afluente.web.app import Part, build
    from afluente.web.server import serve

    settings = WebSettings.read(os.environ)
    if only not in set(Part):
        raise typer.BadParameter(f"{only!r} is no part; there is: {', '.join(Part)}", param_hint="--only")
    if settings.secrets.keys is None:
        raise SettingsError([("AFLUENTE_SECRETS_KEY", None, "is required and not set: it opens the senders' secrets")])
    serve(build(settings.postgres.dsn, Keyring.parse(settings.secrets.keys.get_secret_value())), host, port)
