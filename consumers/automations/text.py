"""Texts with places in them, that are filled in when a step runs.

    {{ contact.first_name }}               what the facts have at that path; nothing when it is unknown
    {{ contact.first_name | cliente }}     the words after the bar when it is unknown
    {{ link: https://loja.example/oferta }}   a tracked link to that address, the contact's own

What must stay true: what is filled in is not looked at again, so no text of a stranger's becomes a place; and it is
bounded, whatever it is and however often it stands there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any

from consumers.automations import conditions

MAX_URL = 2048
# Letters filled in, in all places together: as many fit into an event, however they are escaped.
MAX_FILLED = 40_000
_PATH = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z0-9_]{1,100}){0,20}\Z")
# The same as the CHECK of tracked_links.url: what goes into a header as it stands.
_LINK = re.compile(r"https://[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:[0-9]{1,5})?([/?#][!#-;=?-\[\]_a-z~]*)?\Z")


class BadText(ValueError):
    """A place that cannot be read."""


@dataclass(frozen=True)
class Field:
    path: str
    otherwise: str


@dataclass(frozen=True)
class Link:
    url: str


Part = str | Field | Link


def parse(text: str) -> list[Part]:
    """A text in parts. Raises BadText for a place that says nothing we know."""
    parts: list[Part] = []
    words, begun, rest = text.partition("{{")
    while begun:
        inside, ended, rest = rest.partition("}}")
        if not ended:
            raise BadText("'{{' is not closed by '}}'")
        parts += [words, _place(inside.strip())]
        words, begun, rest = rest.partition("{{")
    return [part for part in [*parts, words] if part != ""]


def _place(inside: str) -> Part:
    if inside.startswith("link:"):
        url = inside.removeprefix("link:").strip()
        if not is_link(url):
            raise BadText(
                f"{url[:200]!r} is no address that a link may lead to: https, without user and password,"
                f" percent-encoded, at most {MAX_URL} characters"
            )
        return Link(url)
    path, _, otherwise = inside.partition("|")
    if not _PATH.match(path.strip()):
        raise BadText(f"'{{{{ {inside[:200]} }}}}' is no field such as contact.first_name or event.value")
    return Field(path.strip(), otherwise.strip())


def is_link(url: str) -> bool:
    """Whether a tracked link may lead there."""
    return len(url) <= MAX_URL and _LINK.match(url) is not None


def links(text: str) -> list[str]:
    """The addresses that a text's links lead to."""
    return [part.url for part in parse(text) if isinstance(part, Link)]


def fill(text: str, facts: Mapping[str, Any], link: Callable[[str], str]) -> str:
    """The text with its places filled in, as far as `MAX_FILLED` goes. `link` gives the tracked link to an address."""
    return _fill(text, facts, link, _Room())


@dataclass
class _Room:
    """What may still be filled in."""

    left: int = MAX_FILLED

    def take(self, text: str) -> str:
        taken = text[: self.left]
        self.left -= len(taken)
        return taken


def _fill(text: str, facts: Mapping[str, Any], link: Callable[[str], str], room: _Room) -> str:
    filled = []
    for part in parse(text):
        match part:
            case Field():
                filled.append(room.take(_shown(facts, part)))
            case Link():
                filled.append(link(part.url))
            case _:
                filled.append(part)
    return "".join(filled)


def fill_all(value: Any, facts: Mapping[str, Any]) -> Any:
    """JSON with the texts in it filled in, as far as `MAX_FILLED` goes for all; links have no place there."""
    return _fill_all(value, facts, _Room())


def _fill_all(value: Any, facts: Mapping[str, Any], room: _Room) -> Any:
    match value:
        case str():
            return _fill(value, facts, lambda url: url, room)
        case Mapping():
            return {name: _fill_all(each, facts, room) for name, each in value.items()}
        case list():
            return [_fill_all(each, facts, room) for each in value]
    return value


def _shown(facts: Mapping[str, Any], field: Field) -> str:
    said: list[Any] = []
    for each in conditions.values(facts, field.path):
        said += each if isinstance(each, list | tuple) else [each]
    texts = [text for each in said if (text := _plain(each))]
    return ", ".join(texts) or field.otherwise


def _plain(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return value
        case int() | float() | Decimal():
            return str(value)
        case datetime():
            return value.isoformat()
    return ""
