"""Files that commands are given by name: - is stdin."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NoReturn

from afluente.errors import Refused

MAX_BYTES = 3 * 1024 * 1024


def read(name: str, hint: str | None = None) -> bytes:
    """Refused when it cannot be read (`hint`: what else might be given), or is longer than MAX_BYTES."""
    try:
        if name == "-":
            data = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with Path(name).open("rb") as file:
                data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise Refused(f"cannot read {name}: {getattr(error, 'strerror', None) or error}", hint=hint) from None
    if len(data) > MAX_BYTES:
        raise Refused(f"{_called(name)} has more than {MAX_BYTES:,} bytes")
    return data


def read_json(name: str, hint: str | None = None) -> Any:
    """Refused, with the place, when it is none."""
    return as_json(read(name, hint), _called(name))


def as_json(text: str | bytes, called: str) -> Any:
    """Refused, with the place, when it is none; NaN and Infinity are none."""
    try:
        return json.loads(text if isinstance(text, str) else text.decode(), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise Refused(f"{called} is not JSON: {str(error)[:200]}") from None


def _called(name: str) -> str:
    return "stdin" if name == "-" else name


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")
