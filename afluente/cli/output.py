"""How commands show data: on stdout, in one of four formats. Words and progress go to stderr (`say`).

Keys of the JSON are stable and documented by each command; times in JSON are UTC, in text local.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum, StrEnum
from typing import Annotated, Any

import typer

# What would tell a terminal something, in text that may be a stranger's; lines and tabs stay.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Format(StrEnum):
    text = "text"
    json = "json"
    jsonl = "jsonl"
    csv = "csv"


FormatOption = Annotated[Format, typer.Option("--format", help="how to show the result", show_choices=True)]


def say(text: str) -> None:
    """A word to the person, on stderr."""
    typer.echo(text, err=True)


def printable(text: str) -> str:
    """`text` with its control characters shown instead of sent to the terminal."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def show(data: Any, format: Format | str = Format.text, columns: Sequence[str] | None = None) -> None:
    """Print one mapping, or rows of them, on stdout. `columns` picks and orders the keys of text and csv."""
    one = isinstance(data, Mapping) or (is_dataclass(data) and not isinstance(data, type))
    if format == Format.json:
        print(json.dumps(_plain(data), indent=2, ensure_ascii=False))
        return
    rows = [_row(data)] if one else [_row(item) for item in data]
    if format == Format.jsonl:
        for row in rows:
            print(json.dumps(_plain(row), ensure_ascii=False))
    elif format == Format.csv:
        names = list(columns or _names(rows))
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([_cell(row.get(name), utc=True) for name in names] for row in rows)
    elif one:
        names = list(columns or rows[0])
        width = max((len(name) for name in names), default=0)
        for name in names:
            print(f"{name:<{width}}  {printable(_cell(rows[0].get(name)))}".rstrip())
    else:
        _table(rows, list(columns or _names(rows)))


def json_line(item: Mapping[str, Any]) -> bytes:
    """`item` as a line of JSON, for files."""
    return (json.dumps(_plain(item), ensure_ascii=False) + "\n").encode()


def _table(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    cells = [[printable(_cell(row.get(name))) for name in names] for row in rows]
    widths = [max(len(name), *(len(line[i]) for line in cells)) if cells else len(name) for i, name in enumerate(names)]
    for line in [[name.replace("_", " ") for name in names], *cells]:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip())


def _names(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _row(item: Any) -> Mapping[str, Any]:
    if isinstance(item, Mapping):
        return item
    if is_dataclass(item) and not isinstance(item, type):
        return asdict(item)
    if hasattr(item, "_asdict"):
        return dict(item._asdict())
    raise TypeError(f"cannot show {type(item).__name__} as a row")


def _cell(value: Any, utc: bool = False) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat() if utc else value.astimezone().strftime("%Y-%m-%d %H:%M:%S%z")
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, (dict, list, tuple)):
        return json.dumps(_plain(value), ensure_ascii=False)
    return str(value)


def _plain(value: Any) -> Any:
    """`value` made of what JSON has."""
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Iterable) and not isinstance(value, (bytes, bytearray)):
        return [_plain(item) for item in value]
    return value.decode("utf-8", "replace") if isinstance(value, (bytes, bytearray)) else str(value)
