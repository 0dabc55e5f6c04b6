"""Personal data and secrets do not reach the logs; ids and numbers do."""

import io
import json
import logging
import re
import uuid
from pathlib import Path

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from afluente import telemetry
from afluente.telemetry.names import EVENTS
from afluente.telemetry.redact import MASK, redact, redact_text


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("mail maria.silva+1@example.com.br bounced", "maria"),
        ("to +55 11 98765-4321 failed", "98765"),
        ("chat 5511987654321@c.us", "5511987654321"),
        ("jid 5511987654321 gone", "5511987654321"),
        ("cpf 123.456.789-09", "123.456"),
        ("postgresql://app:geheim@db/x", "geheim"),
        ("password=geheim and more", "geheim"),
        ("Authorization: geheim", "geheim"),
        ("key whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "MfKQ"),
    ],
)
def test_what_looks_personal_is_masked(text, hidden):
    assert hidden not in redact_text(text)
    assert MASK in redact_text(text)


@pytest.mark.parametrize(
    "text",
    [
        "2026-11-29T12:00:00.123456+00:00",
        "events.contact-event 3 at 123456789012",
        "position 1794837123:1794837140:1794837125,1794837131",
        "webhook-dispatch-worker.retry.30s",
        "127.0.0.1:9092",
    ],
)
def test_ids_offsets_and_times_pass(text):
    assert redact_text(text) == text


@given(st.uuids())
def test_a_uuid_passes(value):
    assert redact_text(f"event {value} done") == f"event {value} done"
    assert redact("event_id", uuid.UUID(int=value.int)) == value


def test_a_strangers_text_tells_no_terminal_anything():
    assert redact("error", "a\x1b[31m\x9b2J\u202e\n\tb é") == "a\\x1b[31m\\x9b2J\\u202e\n\tb é"
    assert redact("error", [ValueError("\x07")]) == ["ValueError: \\x07"]


def test_fields_are_hidden_by_name_and_inside_others():
    assert redact("phone", "12") == MASK
    assert redact("error", {"payload": {"a": 1}, "contact_ids": ["x@y.z"]}) == {"payload": MASK, "contact_ids": [MASK]}
    assert redact("raw", b"\x00\x01") == "<2 bytes>"
    assert redact("error", ValueError("bad a@b.co")) == f"ValueError: bad {MASK}"


@pytest.fixture
def lines():
    """What is logged as JSON during the test, parsed."""
    stream = io.StringIO()
    handlers, level = logging.getLogger().handlers[:], logging.getLogger().level
    telemetry.configure("info", "json", stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    structlog.reset_defaults()
    logging.getLogger().handlers[:] = handlers
    logging.getLogger().setLevel(level)


def test_a_line_of_json_has_name_level_time_and_fields(lines):
    log = telemetry.get_logger("afluente.test")
    log.info("relay.published", topic="events.lead", count=3, email="a@b.co")
    log.debug("relay.published", topic="not shown")
    (line,) = lines()
    assert line["event"] == "relay.published"
    assert line["level"] == "info"
    assert line["count"] == 3
    assert line["email"] == MASK
    assert line["timestamp"].endswith("Z")


def test_an_exception_is_one_line_without_personal_data(lines):
    try:
        raise ValueError("no contact maria@example.com")
    except ValueError:
        telemetry.get_logger("afluente.test").exception("process.failed")
    (line,) = lines()
    assert "ValueError" in line["exception"]
    assert "maria" not in line["exception"]


def test_what_libraries_log_is_one_event_and_masked(lines):
    logging.getLogger("some.library").warning("cannot reach %s", "maria@example.com")
    (line,) = lines()
    assert line["event"] == "library.log"
    assert line["logger"] == "some.library"
    assert line["message"] == f"cannot reach {MASK}"


LOGGED = re.compile(r'(?:\blog|_log|logger|get_logger\([^)]*\))\.(?:debug|info|warning|error|exception)\(\s*"([^"]+)"')


def test_every_event_that_is_logged_is_in_the_table_with_its_meaning():
    root = Path(__file__).parents[2]
    logged = {
        name: path
        for package in ("schemas", "sql", "afluente", "producers", "consumers", "streams")
        for path in (root / package).rglob("*.py")
        for name in LOGGED.findall(path.read_text())
    }
    assert len(logged) > 10
    assert {name: str(path) for name, path in logged.items() if name not in EVENTS} == {}
    assert all(name.count(".") >= 1 and meaning for name, meaning in EVENTS.items())
