"""What a stranger may make long costs as much time as it is long, not the square of it."""

import contextlib
import time

import pytest

from afluente.telemetry.redact import redact_text
from afluente.web.api import batch, body
from afluente.web.api.problems import Problem
from afluente.web.api.requests import ContactEventIn, EventIn
from consumers.automations import text
from producers.contact_event_import import rows
from producers.ingest.normalize import phone

FIELDS = [f"k{number}" for number in range(100_000)]
MAX_CPU_S = 3  # the square of any of these takes minutes


@pytest.mark.parametrize(
    "read",
    [
        lambda: redact_text("a" * 1_000_000 + ":"),
        lambda: redact_text("a." * 500_000 + "@b"),
        lambda: body.parse(("{" + "".join(f'"{name}":1,' for name in FIELDS) + '"k99999":1}').encode()),
        lambda: rows.columns([f"properties.{name}" for name in FIELDS]),
        lambda: text.parse("{{" * 500_000),
        lambda: phone.canonical("1" + " " * 1_000_000 + "2"),
    ],
    ids=["word", "dots", "twice", "columns", "places", "phone"],
)
def test_a_long_input_takes_no_square_of_its_length(read):
    begun = time.process_time()
    with contextlib.suppress(Problem, text.BadText):
        read()
    assert time.process_time() - begun < MAX_CPU_S


@pytest.mark.parametrize("value", [{}, {"contact": {}}])
def test_of_many_unknown_fields_one_complaint_is_made(value):
    unknown = dict.fromkeys(FIELDS)
    kind, given = (ContactEventIn, {"contact": unknown}) if value else (EventIn, unknown)
    with pytest.raises(Problem) as refused:
        batch.model(kind, given)
    assert len(refused.value.errors) == 1
    assert "100000 fields" in refused.value.detail
