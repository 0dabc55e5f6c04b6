"""The hash of an event is the same of its row, its record and its archived line, and of nothing else."""

import json
from datetime import timedelta

import orjson
import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import schemas
from afluente.archive import digest
from afluente.archive.format import line_of, row_of
from tests.schemas.rows import RECORDED, row
from tests.schemas.strategies import JSON_OBJECTS, JSON_VALUES, catalogue_payloads


@pytest.fixture(scope="module")
def jsonb(postgres):
    """What Postgres makes of a JSON text."""
    with psycopg.connect(postgres.url, autocommit=True) as conn:
        yield lambda texts: [
            text.encode()
            for (text,) in conn.execute(
                "SELECT j.v::jsonb::text FROM unnest(%s::text[]) WITH ORDINALITY AS j (v, place) ORDER BY place",
                [texts],
            )
        ]


EVENTS = st.one_of(
    catalogue_payloads(),
    st.tuples(st.just("loyalty.points_earned"), JSON_OBJECTS, JSON_OBJECTS),
    JSON_OBJECTS.map(lambda extra: ("contact_event.recorded", RECORDED | {f"x_{k}": extra[k] for k in extra}, {})),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(EVENTS, min_size=1, max_size=4))
def test_record_has_the_hash_of_its_row(jsonb, events):
    texts = jsonb([json.dumps(value) for _, payload, metadata in events for value in (payload, metadata)])
    for (event_type, _, _), payload, metadata in zip(events, texts[::2], texts[1::2], strict=True):
        emitted = row(event_type, payload, metadata)
        try:
            value = schemas.encode(emitted)
        except schemas.EncodeError:
            continue  # a dead letter, which has the text
        assert digest.event_parts(schemas.decode(value)) == digest.row_parts(emitted)
        assert digest.of_event(schemas.decode(value)) == digest.of_row(emitted)
        assert digest.of_row(row_of(line_of(emitted))) == digest.of_row(emitted)


@given(JSON_VALUES)
def test_spelling_does_not_matter(value):
    text = json.dumps(value)
    assert digest.canonical(json.loads(text)) == digest.canonical(value) == digest.canonical(digest.loads(text))
    assert digest.canonical(json.loads(json.dumps(value, ensure_ascii=False, indent=1))) == digest.canonical(value)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b'{"a": 1.0}', b'{"a": 1}'),
        (b'{"a": 1e3, "b": "x"}', b'{"b":"x","a":1000.00}'),
        (b'{"a": 10000000000000000000000}', b'{"a": 1e22}'),
        (b'{"a": "5e3 1.0"}', b'{ "a" : "5e3 1.0" }'),
        (b'{"a": 0.00000015}', b'{"a": 1.5e-7}'),
    ],
)
def test_same_json(one, other):
    assert digest.of_row(row("lead.won", one)) == digest.of_row(row("lead.won", other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b'{"a": 12345678901234567890}', b'{"a": 12345678901234567891}'),
        (b'{"a": 123456789012345678901234567890}', b'{"a": 123456789012345678901234567891}'),
        (b'{"a": 1}', b'{"a": "1"}'),
        (b'{"a": 1}', b'{"a": true}'),
        (b'{"a": null}', b"{}"),
        (b'{"a": 1' + b"0" * 5000 + b"}", b'{"a": 2' + b"0" * 5000 + b"}"),
        (b'{"a": 1' + b"0" * 400 + b".5}", b'{"a": 2' + b"0" * 400 + b".5}"),
        (b'{"a": ' + b"[" * 3000 + b"]" * 3000 + b"}", b'{"a": ' + b"[" * 2999 + b"]" * 2999 + b"}"),
    ],
    ids=range(8),
)
def test_other_json(one, other):
    assert digest.of_row(row("lead.won", one)) != digest.of_row(row("lead.won", other))


@pytest.mark.parametrize("field", range(8))
def test_each_field_counts(field):
    emitted = row("lead.won", {"a": 1}, {"b": 2})
    names = ("id", *digest.FIELDS)
    was = getattr(emitted, names[field])
    changed = {
        "payload": b'{"a": 2}',
        "metadata": b"{}",
        "created_at": emitted.created_at + timedelta(microseconds=1),
        "entity_id": None,
        "event_type": "lead.lost",
        "entity_kind": "leads",
    }.get(names[field], emitted.id if names[field] == "organization_id" else emitted.organization_id)
    assert was != changed
    assert digest.of_row(emitted._replace(**{names[field]: changed})) != digest.of_row(emitted)


def test_text_cannot_move_between_fields():
    one = row("lead.won", orjson.dumps({}), orjson.dumps({}))
    assert digest.of_row(one._replace(event_type="lead.wonl", entity_kind="ead")) != digest.of_row(
        one._replace(event_type="lead.won", entity_kind="lead")
    )
