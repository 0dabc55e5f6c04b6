"""Typeform's answers and who gave them, beyond what the samples show. Values of our own."""

import json
import random
from datetime import UTC, datetime

import pytest

from producers.emit import MAX_PAYLOAD_BYTES, to_json
from producers.ingest.normalize import facts as f
from producers.ingest.normalize import normalize, typeform

RECEIVED = datetime(2026, 11, 29, 12, tzinfo=UTC)


def answer(ref, kind, value, **field):
    return {"type": kind, kind: value, "field": {"ref": ref, "type": "any", **field}}


ANSWERS = [
    answer("q-name", "text", "Lívia Torres"),
    answer("q-mail", "email", "Livia@Example.com"),
    answer("q-mail-2", "email", "other@example.com"),
    answer("q-phone", "phone_number", "+5581988887777"),
    answer("q-size", "choice", {"label": "M", "id": "x"}),
    answer("q-days", "choices", {"labels": ["seg", "ter"], "other": "feriados"}),
    answer("q-age", "number", 9007199254740993),
    answer("q-score", "number", 7.5),
    answer("q-ok", "boolean", False),
    answer("q-day", "date", "2026-11-01"),
    answer("q-pay", "payment", {"amount": "49.90", "last4": "1234", "name": "L T", "success": True}),
    answer("q-new", "signature", {"strokes": [1, 2]}),
]


def event(answers=ANSWERS, **response):
    return {
        "event_id": "01",
        "event_type": "form_response",
        "form_response": {
            "form_id": "F1",
            "token": "t1",
            "submitted_at": "2026-11-20T10:00:00Z",
            "answers": answers,
            **response,
        },
    }


def read(given, **settings):
    context = f.Context(topic="form_response", received_at=RECEIVED, settings=settings)
    return normalize("typeform", json.dumps(given).encode(), {}, context)


def values(result):
    return {response["ref"]: response["value"] for response in result.facts[0].properties["responses"]}


def test_every_kind_of_answer_has_its_value():
    result = read(event())
    (submitted,) = result.facts
    assert (submitted.external_id, submitted.event_type) == ("form_submitted:F1:t1", "form_submitted")
    assert submitted.occurred_at == datetime(2026, 11, 20, 10, tzinfo=UTC)
    assert values(result) == {
        "q-name": "Lívia Torres",
        "q-mail": "Livia@Example.com",
        "q-mail-2": "other@example.com",
        "q-phone": "+5581988887777",
        "q-size": "M",
        "q-days": ["seg", "ter", "feriados"],
        "q-age": 9007199254740993,
        "q-score": 7.5,
        "q-ok": False,
        "q-day": "2026-11-01",
        # neither the card's digits nor its holder
        "q-pay": {"amount": "49.90", "success": True},
        "q-new": '{"strokes": [1, 2]}',
    }


def test_order_of_answers_says_nothing():
    shuffled = random.Random(6).sample(ANSWERS, len(ANSWERS))
    assert values(read(event(shuffled))) == values(read(event()))


def test_typed_answers_say_who_it_was():
    assert [i.value for i in read(event()).person.identities] == ["livia@example.com", "+5581988887777"]


def test_definition_gives_refs_titles_and_the_forms_name():
    definition = {
        "title": "Cadastro",
        "fields": [
            {"id": "1", "ref": "a", "title": "Qual é o seu nome completo?"},
            {
                "id": "9",
                "ref": "g",
                "type": "group",
                "properties": {"fields": [{"id": "2", "ref": "b", "title": "CPF"}]},
            },
            {"id": "3", "ref": "c", "title": "Nome da empresa"},
        ],
    }
    answers = [
        {"type": "text", "text": "Lívia Torres", "field": {"id": "1"}},
        {"type": "text", "text": "529.982.247-25", "field": {"id": "2"}},
        {"type": "text", "text": "Loja Azul", "field": {"id": "3"}},
    ]
    result = read(event(answers, definition=definition))
    assert result.facts[0].properties["formName"] == "Cadastro"
    assert [r["title"] for r in result.facts[0].properties["responses"]][1] == "CPF"
    assert values(result) == {"a": "Lívia Torres", "b": "529.982.247-25", "c": "Loja Azul"}
    assert result.person.name == "Lívia Torres"
    assert [i.value for i in result.person.identities] == ["52998224725"]


@pytest.mark.parametrize("definition", [{}, None, [], {"fields": None}, {"fields": [{"properties": 3}]}])
def test_definition_may_be_missing(definition):
    assert values(read(event(definition=definition))) == values(read(event()))


def test_refs_of_the_connection_come_first():
    answers = [
        answer("r1", "text", "81 98888-7777"),
        answer("r2", "text", "livia@example.com"),
        answer("r3", "text", "Lívia"),
        answer("r4", "email", "other@example.com"),
    ]
    who = read(event(answers), fields={"phone": "r1", "email": "r2", "name": "r3"}).person
    assert [i.value for i in who.identities] == ["livia@example.com", "+5581988887777"]
    assert who.name == "Lívia"


def test_hidden_fields_are_kept_and_say_who_when_nobody_answered():
    hidden = {"utm_source": "google", "email": "livia@example.com", "phone": "81988887777", "n": 3}
    result = read(event([], hidden=hidden))
    assert result.facts[0].properties["hidden"] == {name: text for name, text in hidden.items() if name != "n"}
    assert [i.value for i in result.person.identities] == ["livia@example.com", "+5581988887777"]


def test_form_without_anybody_is_still_submitted():
    result = read(event([answer("q", "boolean", True)]))
    assert (result.status, result.person) == ("processed", None)


def test_long_form_is_cut_to_what_an_event_holds():
    answers = [answer(f"q{n}", "text", "é" * 20_000) for n in range(100)]
    properties = read(event(answers, hidden={f"h{n}" * 60: "x" * 5000 for n in range(100)})).facts[0].properties
    assert properties["truncated"] is True
    assert len(properties["responses"][0]["value"]) == typeform.MAX_TEXT
    assert len(to_json(properties, "properties").encode()) < MAX_PAYLOAD_BYTES * 0.9


def test_other_events_and_shapes_are_kept():
    assert read({"event_type": "form_response_partial"}).reason == "unknown_topic"
    assert read({"event_type": "form_response"}).reason == "unknown_shape:form_response"
    assert read(event(token=None)).reason == "unknown_shape:form_response.token"
