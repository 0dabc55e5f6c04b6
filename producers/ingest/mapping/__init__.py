"""Declarative mappings of generic senders: checked when a connection is made, kept with it, shipped as examples.

`model` says what a mapping may hold, `paths` how a place in a payload is named, `reading` what a mapping finds in one
delivery. The facts are made by `producers.ingest.normalize.generic`, the check of a signature by
`producers.ingest.sources.generic`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from collections.abc import Mapping as MappingOf
from functools import lru_cache
from importlib.resources import files
from typing import Any

import orjson
from pydantic import ValidationError

from afluente.errors import Refused
from producers.ingest.mapping.model import Mapping

__all__ = [
    "MAX_BYTES",
    "SETTING",
    "Mapping",
    "MappingRefused",
    "example",
    "examples",
    "kept",
    "parsed",
    "read",
    "samples",
    "text_of",
]

MAX_BYTES = 64 * 1024
SETTING = "mapping"
"""Where a connection's settings hold it."""


class MappingRefused(Refused):
    """A mapping that cannot be used. `problems` holds (field, what is wrong), the field as a path into the mapping."""

    def __init__(self, problems: list[tuple[str, str]]) -> None:
        self.problems = problems
        super().__init__(
            "the mapping is wrong: " + "; ".join(f"{field}: {what}" for field, what in problems),
            hint="`afluente channel mapping fields` lists what a mapping may hold",
        )


def read(given: Any) -> Mapping:
    """A mapping from its JSON, checked whole. MappingRefused names every field that is wrong."""
    try:
        size = len(json.dumps(given))
    except (TypeError, ValueError, RecursionError):
        raise MappingRefused([("(all)", "is not JSON")]) from None
    if size > MAX_BYTES:
        raise MappingRefused([("(all)", f"is {size} bytes long; at most {MAX_BYTES}")])
    try:
        return Mapping.model_validate(given)
    except ValidationError as error:
        raise MappingRefused(list(_problems(error))) from None


def text_of(settings: MappingOf[str, Any]) -> bytes | None:
    """The mapping in a connection's settings as text: what is made of one is kept under it."""
    given = settings.get(SETTING)
    if not isinstance(given, dict):
        return None
    try:
        return orjson.dumps(given)
    except TypeError:  # nothing that a column of JSON gives back
        return None


def kept(settings: MappingOf[str, Any]) -> Mapping | None:
    """The mapping of a connection's settings, or None if there is none that can be used."""
    text = text_of(settings)
    return None if text is None else parsed(text)


@lru_cache(maxsize=256)
def parsed(text: bytes) -> Mapping | None:
    """Checked once for each that is in use: a delivery costs a look-up."""
    try:
        return read(json.loads(text))
    except (MappingRefused, ValueError, RecursionError):
        return None


def examples() -> list[str]:
    """Names of the mappings that are shipped."""
    names = (path.name for path in (files(__name__) / "examples").iterdir())
    return sorted(name.removesuffix(".mapping.json") for name in names if name.endswith(".mapping.json"))


def example(name: str) -> dict[str, Any]:
    """A shipped mapping, as JSON."""
    return _shipped(name, "mapping")


def samples(name: str) -> dict[str, Any]:
    """Payloads that a shipped mapping is made for, by their names. Made up; the shapes are the sender's."""
    return _shipped(name, "samples")


def _shipped(name: str, what: str) -> dict[str, Any]:
    if name not in examples():
        raise Refused(f"no mapping is called {name!r}", hint=f"one of {', '.join(examples())}, or a file")
    found: dict[str, Any] = json.loads((files(__name__) / "examples" / f"{name}.{what}.json").read_text("utf-8"))
    return found


# Where pydantic's own words say more of Python than of JSON.
_PLAIN = {
    "extra_forbidden": "there is no such field",
    "missing": "is required",
    "tuple_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "too_short": "is empty",
    "union_tag_not_found": "by is required: hmac or token",
    "union_tag_invalid": "by must be hmac or token",
}


def _problems(error: ValidationError) -> Iterator[tuple[str, str]]:
    problems = error.errors(include_url=False, include_input=False, include_context=False)
    # A list of which no item is right is said to be too short as well.
    places = {problem["loc"][:depth] for problem in problems for depth in range(len(problem["loc"]))}
    for problem in problems:
        if problem["type"] == "too_short" and problem["loc"] in places:
            continue
        field = ""
        for step in problem["loc"]:
            if isinstance(step, int):
                field += f"[{step}]"
            elif not (field == "verify" and step in ("hmac", "token")):
                field += f".{step}" if field else step
        message = _PLAIN.get(problem["type"]) or problem["msg"].removeprefix("Value error, ")
        # Checks over several fields say which one by its name before a colon.
        named, colon, rest = message.partition(": ")
        if colon and named.replace("_", "").replace(".", "").replace("[", "").replace("]", "").isalnum():
            yield (f"{field}.{named}" if field else named), rest
        else:
            yield field or "(all)", message[:1].lower() + message[1:]
