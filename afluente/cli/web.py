"""`afluente web`: the HTTP server, and the document of the API that it serves."""

from __future__ import annotations

import os
from typing import Annotated

import typer

app = typer.Typer(help="Receive webhooks and answer the REST API over HTTP.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Receive webhooks and answer the REST API over HTTP."""


@app.command()
def run(
    only: Annotated[
        str | None, typer.Option(help="the one part to serve: ingest, api or links. Without it: all")
    ] = None,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on; 0 takes a free one", min=0, max=65535)] = 8080,
) -> None:
    """Serve until stopped. POST /webhooks/<source>/<channel> is stored before it is answered; /v1/docs has the API.

    \b
    Examples:
      afluente web run --port 8080
      afluente web run --only api --port 8081
      afluente web run --only links --port 8082      tracked links, and nothing else
    """
    from afluente.settings import WebSettings
    from afluente.web.app import Part, build
    from afluente.web.server import serve

    settings = WebSettings.read(os.environ)
    if only is not None and only not in set(Part):
        raise typer.BadParameter(f"{only!r} is no part; there is: {', '.join(Part)}", param_hint="--only")
    parts = frozenset(Part) if only is None else frozenset({Part(only)})
    secrets = settings.secrets
    keyring = secrets.need_keyring("it opens the senders' secrets") if Part.INGEST in parts else secrets.keyring
    serve(build(settings.postgres.dsn, keyring, parts=parts), host, port)


@app.command()
def openapi() -> None:
    """Print the OpenAPI document of the REST API. The committed copy is afluente/web/api/openapi.json.

    \b
    Example:
      afluente web openapi > afluente/web/api/openapi.json
    """
    from afluente.web.api import openapi as api

    print(api.render(), end="")
