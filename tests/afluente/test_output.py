"""The four formats show the same data; JSON times are UTC."""

import csv
import io
import json
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum

import pytest

from afluente.cli.output import Format, say, show


class Colour(Enum):
    red = "red"


@dataclass
class Row:
    id: uuid.UUID
    at: datetime
    value: object


ROWS = [
    Row(uuid.UUID(int=1), datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone(timedelta(hours=-3))), Decimal("1.10")),
    Row(uuid.UUID(int=2), datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), {"a": [1, Colour.red]}),
]


def test_json_and_jsonl_hold_the_same(capsys):
    show(ROWS, Format.json)
    whole = json.loads(capsys.readouterr().out)
    show(ROWS, Format.jsonl)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert whole == lines
    assert whole[0] == {"id": str(uuid.UUID(int=1)), "at": "2026-01-02T06:04:05Z", "value": "1.10"}
    assert whole[1]["value"] == {"a": [1, "red"]}


def test_csv_has_a_header_and_the_chosen_columns(capsys):
    show(ROWS, Format.csv, ["at", "id"])
    rows = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert rows[0] == ["at", "id"]
    assert rows[1] == ["2026-01-02T06:04:05+00:00", str(uuid.UUID(int=1))]


def test_text_is_a_table_for_rows_and_lines_for_one(capsys):
    show([{"worker": "a", "dead": 2}, {"worker": "bb", "dead": None}])
    assert capsys.readouterr().out == "worker  dead\na       2\nbb\n"
    show({"worker": "a", "is_dead": True})
    assert capsys.readouterr().out == "worker   a\nis_dead  yes\n"


@pytest.mark.parametrize("format", list(Format))
def test_nothing_to_show_is_no_error(format, capsys):
    show([], format, ["a"])
    out = capsys.readouterr().out
    assert out in ("a\n", "[]\n", "")


def test_what_is_no_row_is_refused():
    with pytest.raises(TypeError, match="int"):
        show([1], Format.csv)


def test_what_a_stranger_wrote_tells_the_terminal_nothing(capsys):
    show({"reason": "broker \x1b]0;owned\x07 upgrade\x9b2J", "lines": "one\n\ttwo"}, Format.text)
    assert capsys.readouterr().out == "reason  broker \\x1b]0;owned\\x07 upgrade\\x9b2J\nlines   one\n        \ttwo\n"
    show([{"name": "a\nb\u202e"}, {"name": "c"}])
    assert capsys.readouterr().out == "name\na\\nb\\u202e\nc\n"
    for format in (Format.json, Format.jsonl):
        show([{"name": "a\x9b2J\u2067"}], format)
        out = capsys.readouterr().out
        assert "\\u009b2J\\u2067" in out
        assert json.loads(out if format == Format.jsonl else out.strip()[1:-1])["name"] == "a\x9b2J\u2067"
    say("names \x1b]0;owned\x07")
    assert capsys.readouterr().err == "names \\x1b]0;owned\\x07\n"


def test_what_a_spreadsheet_would_calculate_is_text(capsys):
    texts = ["=1+1", "@SUM(A1)", "+5511987654321", "+55 (11) 9", "-1.50", "-1+cmd|'x'!A1", "Ana"]
    show([{"name": text, "value": Decimal("-1E-7")} for text in texts], Format.csv)
    rows = list(csv.reader(io.StringIO(capsys.readouterr().out)))[1:]
    assert [row[0] for row in rows] == [
        "'=1+1",
        "'@SUM(A1)",
        "+5511987654321",
        "+55 (11) 9",
        "-1.50",
        "'-1+cmd|'x'!A1",
        "Ana",
    ]
    assert {row[1] for row in rows} == {"-0.0000001"}  # an amount, in every format
    show({"value": Decimal("1E-7")}, Format.json)
    assert json.loads(capsys.readouterr().out) == {"value": "0.0000001"}
