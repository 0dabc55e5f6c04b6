"""Paths into a JSON document: `customer.phones[0].number`, `items[*].id`, `attributes["a.b"]`, `@.status`.

Small on purpose: keys, places, every item, and nothing that can be made to search. A path is as long as it is written,
finds at most `MAX_FOUND` values, and what is not there is not found; no document makes one fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MAX_TEXT, MAX_STEPS, MAX_KEY, MAX_EVERY = 200, 16, 100, 1
MAX_FOUND = 200

ITEM = "@"
_SPECIAL = frozenset('.[]"@*')


@dataclass(frozen=True, slots=True)
class Path:
    """A parsed path. A step is a key, a place in a list, or None for every item of it."""

    text: str
    steps: tuple[str | int | None, ...]
    of_item: bool
    """Whether it begins at the item (`@`) rather than at the document."""

    def find(self, document: Any, item: Any = None) -> list[Any]:
        """What stands there, in order; nothing for what is not there."""
        found = [item if self.of_item else document]
        for place, step in enumerate(self.steps):
            if step is None:
                # The one list whose items are all looked at: from here on there are several places.
                items = found[0][:MAX_FOUND] if isinstance(found[0], list) else []
                rest = self.steps[place + 1 :]
                return [value for inner in items for value in _walk(inner, rest)]
            found = _walk(found[0], (step,))
            if not found:
                break
        return found


def parse(text: str) -> Path:
    """A path from its text. ValueError says what is wrong, and where."""
    if not 0 < len(text) <= MAX_TEXT:
        raise ValueError(f"a path has 1 to {MAX_TEXT} characters")
    of_item = text.startswith(ITEM)
    steps = tuple(_steps(text, len(ITEM) if of_item else 0, begun=of_item))
    if len(steps) > MAX_STEPS:
        raise ValueError(f"a path has at most {MAX_STEPS} steps")
    if steps.count(None) > MAX_EVERY:
        raise ValueError("a path has at most one [*]")
    return Path(text, steps, of_item)


def _steps(text: str, at: int, *, begun: bool) -> Iterator[str | int | None]:
    """The steps from a place on: `.key` (the first without its dot), `["key"]`, `[3]`, `[*]`."""
    while at < len(text):
        if text[at] == "[":
            step, at = _bracket(text, at)
            yield step
        elif text[at] == "." or not begun:
            start = at + 1 if text[at] == "." and begun else at
            at = next((end for end in range(start, len(text)) if text[end] in _SPECIAL), len(text))
            yield _key(text[start:at], start)
        else:
            raise ValueError(f"{text[at]!r} does not belong at character {at + 1}")
        begun = True


def _bracket(text: str, at: int) -> tuple[str | int | None, int]:
    inside = at + 1
    if text.startswith('"', inside):
        end = text.find('"]', inside + 1)
        if end < 0:
            raise ValueError(f'[" at character {at + 1} has no "]')
        return _key(text[inside + 1 : end], inside), end + 2
    end = text.find("]", inside)
    if end < 0:
        raise ValueError(f"[ at character {at + 1} has no ]")
    content = text[inside:end]
    if content == "*":
        return None, end + 1
    digits = content.removeprefix("-")
    if not digits.isascii() or not digits.isdigit() or len(digits) > 4:
        raise ValueError(f"[{content[:20]}] at character {at + 1} is neither a place, [*] nor a quoted key")
    return int(content), end + 1


def _key(key: str, at: int) -> str:
    if not key.strip():
        raise ValueError(f"a key is missing at character {at + 1}")
    if len(key) > MAX_KEY:
        raise ValueError(f"the key at character {at + 1} is longer than {MAX_KEY} characters")
    return key


def _walk(value: Any, steps: tuple[str | int | None, ...]) -> list[Any]:
    """The one value that keys and places lead to, or none."""
    for step in steps:
        if isinstance(step, str):
            if not isinstance(value, dict) or step not in value:
                return []
            value = value[step]
        else:
            if not isinstance(value, list) or step is None or not -len(value) <= step < len(value):
                return []
            value = value[step]
    return [value]
