"""How commands show data: on stdout, in one of four formats. Words and progress go to stderr (`say`).

Keys of the JSON are stable and documented by each command; times in JSON are UTC, in text local. Much of what is shown
is a stranger's: it tells the terminal nothing, makes no line of its own in a table, and is no formula to the
spreadsheet that opens a CSV (an apostrophe stands before it then; JSON has everything as it is).
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import Enum, StrEnum
from typing import Annotated, Any

import typer

from afluente.telemetry.redact import TURNING, printable

__all__ = ["Format", "FormatOption", "json_line", "printable", "say", "show"]

# What would tell a terminal something and JSON does not escape by itself.
_CONTROL_IN_JSON = re.compile(rf"[\x7f-\x9f{TURNING}]")
# What a spreadsheet calculates; numbers and phones it may.
_FORMULA = re.compile(r"[=@\t\r]|[+-](?![0-9 ().-]*\Z)")


class Format(StrEnum):
    text = "text"
    json = "json"
    jsonl = "jsonl"
    csv = "csv"


FormatOption = Annotated[Format, typer.Option("--format", help="how to show the result", show_choices=True)]


def say(text: str) -> None:
    """A word to the person, on stderr."""
    typer.echo(printable(text), err=True)


def show(data: Any, format: Format | str = Format.text, columns: Sequence[str] | None = None) -> None:
    """Print one mapping, or rows of them, on stdout. `columns` picks and orders the keys of text and csv."""
    one = isinstance(data, Mapping) or (is_dataclass(data) and not isinstance(data, type))
    if format == Format.json:
        print(_json(_plain(data), indent=2))
        return
    rows = [_row(data)] if one else [_row(item) for item in data]
    if format == Format.jsonl:
        for row in rows:
            print(_json(_plain(row)))
    elif format == Format.csv:
        names = list(columns or _names(rows))
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([_csv_cell(row.get(name)) for name in names] for row in rows)
    elif one:
        names = list(columns or rows[0])
        width = max((len(name) for name in names), default=0)
        for name in names:
            text = printable(_cell(rows[0].get(name))).replace("\n", "\n" + " " * (width + 2))
            print(f"{name:<{width}}  {text}".rstrip())
    else:
        _table(rows, list(columns or _names(rows)))


def json_line(item: Mapping[str, Any]) -> bytes:
    """`item` as a line of JSON, for files."""
    return (json.dumps(_plain(item), ensure_ascii=False) + "\n").encode()


def _table(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    cells = [[_on_one_line(printable(_cell(row.get(name)))) for name in names] for row in rows]
    widths = [max(len(name), *(len(line[i]) for line in cells)) if cells else len(name) for i, name in enumerate(names)]
    for line in [[name.replace("_", " ") for name in names], *cells]:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip())


def _on_one_line(text: str) -> str:
    return text.replace("\n", "\\n").replace("\t", "\\t")


def _json(value: Any, indent: int | None = None) -> str:
    # Such a letter stands inside of a text only, where its escape says the same.
    return _CONTROL_IN_JSON.sub(
        lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, indent=indent, ensure_ascii=False)
    )


def _csv_cell(value: Any) -> str:
    text = _cell(value, utc=True)
    if isinstance(value, str) and _FORMULA.match(text):
        text = "'" + text
    return printable(text) if sys.stdout.isatty() else text


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
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, (dict, list, tuple)):
        return _json(_plain(value))
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
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, Iterable) and not isinstance(value, (bytes, bytearray)):
        return [_plain(item) for item in value]
    return value.decode("utf-8", "replace") if isinstance(value, (bytes, bytearray)) else str(value)
