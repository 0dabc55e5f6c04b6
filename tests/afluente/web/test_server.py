"""The HTTP server around the parts, without any of them."""

import socket

import pytest

from afluente.errors import Refused
from afluente.web import server


async def nothing(scope, receive, send):
    """An application that only starts and stops."""
    while scope["type"] == "lifespan":
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Refused, match=f"cannot listen on 127.0.0.1:{port}: address already in use") as refused:
            server.serve(nothing, "127.0.0.1", port)
    assert "--port" in str(refused.value.hint)
