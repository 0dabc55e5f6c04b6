"""The body of a request: read within bounds, and read as JSON without loss.

What must stay true: what is held in memory is bounded, in all and for each key; what is emitted is what was sent. A
number that no double holds exactly is refused, since nobody downstream would read what was meant; so are two fields of
one name, where readers disagree about which one counts.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final, NoReturn

from starlette.requests import ClientDisconnect, Request

from afluente.web.api.problems import Problem

MAX_BODY_BYTES: Final = 3 * 1024 * 1024
READ_TIMEOUT_S: Final = 10.0
# A body that is being worked on is held as text and as objects.
MAX_HELD_BYTES: Final = 48 * 1024 * 1024
MAX_KEY_BYTES: Final = 12 * 1024 * 1024


async def read(request: Request, hold: Callable[[int], None]) -> bytes:
    """The body as it came. Raises Problem (400, 408, 413, 415, 503), having read no further than needed."""
    media_type, _, _ = request.headers.get("content-type", "").partition(";")
    if media_type.strip().lower() != "application/json":
        raise Problem("unsupported-media-type", "Content-Type is not application/json", headers=_CLOSE)
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and (len(declared) > 15 or int(declared) > MAX_BODY_BYTES):
        raise _too_large()
    body = bytearray()
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            async for piece in request.stream():
                body += piece
                if len(body) > MAX_BODY_BYTES:
                    raise _too_large()
                hold(len(body))
    except ClientDisconnect:
        raise Problem("malformed-body", "the body was cut short", headers=_CLOSE) from None
    except TimeoutError:
        raise Problem("body-too-slow", f"the body did not come within {READ_TIMEOUT_S:g} s", headers=_CLOSE) from None
    return bytes(body)


# What is left of the body is not read.
_CLOSE: Final = {"connection": "close"}


def _too_large() -> Problem:
    return Problem(
        "body-too-large", f"the body has more than {MAX_BODY_BYTES} bytes", hint="divide the batch", headers=_CLOSE
    )


def parse(body: bytes) -> Any:
    """The JSON value. Integers of any size are exact. Raises Problem (400)."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise malformed(f"byte {error.start} is not UTF-8") from None
    try:
        return json.loads(text, parse_float=_double, parse_constant=_constant, object_pairs_hook=_object)
    except RecursionError:
        raise malformed("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise malformed(f"line {error.lineno}, column {error.colno}: {error.msg}") from None
    except ValueError as error:  # ours, and integers of thousands of digits
        raise malformed(str(error)) from None


def malformed(detail: str) -> Problem:
    return Problem("malformed-body", f"the body cannot be read as JSON: {detail}")


def _double(text: str) -> float:
    number = float(text)
    # The shortest text of a double is what Postgres and every reader get; it has to be the number that was written.
    if not math.isfinite(number) or Decimal(repr(number)) != Decimal(text):
        raise ValueError(f"no double holds the number {text[:40]}; send it as text")
    return number


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        twice = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        raise ValueError(f"the field {twice[:80]!r} is there twice")
    return value
