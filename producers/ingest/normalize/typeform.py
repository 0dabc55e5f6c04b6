"""Typeform: a form that was filled in, with its answers, and who filled it in.

Answers come in any order, and those not given are absent; the form's definition, which has the questions' words, may be
missing. A field's `ref` is what stays the same; where an answer has only the field's id, the definition tells the ref.

Who it is: the first answer of type email and the first of type phone_number, then hidden fields of those names. Names
and documents are plain text answers, known by the words of their ref or question; a connection's settings can name the
refs where those do not help (`{"fields": {"name": "a1b2", "phone": "c3d4", "email": ..., "document": ...}}`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from producers.ingest.normalize import moments
from producers.ingest.normalize.document import Document
from producers.ingest.normalize.facts import (
    ContactEvent,
    Context,
    Normalized,
    Person,
    email_identity,
    fact_id,
    person,
    phone_identity,
    processed,
    tax_identity,
    unrecognised,
)

FIELDS = "fields"
# An event holds 256 KiB: of a longer form the first answers are recorded, all of it stays in the stored delivery.
MAX_RESPONSES_BYTES = 128 * 1024
MAX_TEXT = 10_000
MAX_HIDDEN, MAX_HIDDEN_TEXT = 50, 1000
MAX_GROUPS = 5

_WORDS = re.compile(r"[^\W_]+")
_NAME_WORDS = frozenset({"name", "nome", "nombre"})
# Words that may stand beside them: of a company's or a product's name none is asked for here.
_NAME_FILLERS = frozenset(
    {
        "what", "whats", "s", "is", "your", "you", "the", "first", "full", "last", "and", "please", "enter", "type",
        "qual", "é", "e", "o", "seu", "sua", "primeiro", "completo", "por", "favor", "digite", "informe", "diga", "me",
        "aqui", "tu", "su", "cual", "cuál", "es", "completa", "may", "we", "have", "tell", "us", "hi", "olá", "oi",
    }
)  # fmt: skip
_DOCUMENT_WORDS = frozenset({"cpf", "cnpj"})
_EMAIL_NAMES = ("email", "e-mail", "e_mail", "mail")
_PHONE_NAMES = ("phone", "telefone", "celular", "whatsapp", "phone_number", "tel", "telefono", "fone")


@dataclass(frozen=True)
class _Answer:
    ref: str | None
    kind: str
    title: str | None
    value: Any

    @property
    def text(self) -> str | None:
        return self.value if isinstance(self.value, str) else None

    def asks_for(self, words: frozenset[str], fillers: frozenset[str] = frozenset()) -> bool:
        """Whether ref or question has one of these words, and besides them only fillers (or any, if none are given)."""
        for said in (self.ref, self.title):
            found = {word.lower() for word in _WORDS.findall((said or "")[:200])}
            if found & words and (not fillers or found <= words | fillers):
                return True
        return False


def normalize(document: Document, headers: Mapping[str, str], context: Context) -> Normalized:
    """The facts of one delivery."""
    if document.need_text("event_type") != "form_response":
        return unrecognised("unknown_topic")
    response = document.need_child("form_response")
    form_id, token = response.need_identifier("form_id"), response.need_identifier("token")
    definition = response.child("definition")
    answers = list(_answers(response, definition))
    submitted = ContactEvent(
        fact="form_submitted",
        # Not the event's id: a resend has a new one.
        source_id=fact_id(form_id, token),
        event_type="form_submitted",
        metric=None,
        occurred_at=moments.occurred(moments.from_iso(response.text("submitted_at")), context.received_at),
        entity_type="form_response",
        entity_id=token,
        object_id_ref=form_id,
        properties={
            "formId": form_id,
            "formName": _cut(definition.text("title")),
            **_recorded(answers),
            **_hidden(response.child("hidden")),
            **_score(response.child("calculated")),
        },
    )
    return processed("form_submitted", submitted, person=_person(answers, response.child("hidden"), context))


# Answers


def _answers(response: Document, definition: Document) -> Iterator[_Answer]:
    by_id = {}
    by_ref = {}
    for question in _questions(definition):
        if identifier := question.identifier("id"):
            by_id[identifier] = question
        if ref := question.identifier("ref"):
            by_ref[ref] = question
    nobody = Document({})
    for answer in response.children("answers"):
        asked = answer.child("field")
        question = by_ref.get(asked.identifier("ref") or "") or by_id.get(asked.identifier("id") or "") or nobody
        yield _Answer(
            ref=asked.identifier("ref") or question.identifier("ref") or asked.identifier("id"),
            kind=_cut(answer.text("type"), 100) or "unknown",
            title=_cut(question.text("title"), 1000),
            value=_value(answer),
        )


def _questions(definition: Document) -> Iterator[Document]:
    """The questions, also those of groups."""
    level = list(definition.children("fields"))
    for _ in range(MAX_GROUPS):
        yield from level
        level = [inner for question in level for inner in question.child("properties").children("fields")]


def _value(answer: Document) -> Any:
    """What was answered: it stands under the name of the answer's type."""
    kind = answer.text("type") or ""
    if kind == "choice":
        return _choice(answer.child("choice"))
    if kind == "choices":
        choices = answer.child("choices")
        other = choices.text("other")
        return [_cut(label) for label in choices.texts("labels")] + ([_cut(other)] if other else [])
    if kind == "payment":
        payment = answer.child("payment")
        return {"amount": payment.identifier("amount"), "success": payment.raw("success") is True}
    value = answer.raw(kind)
    if isinstance(value, str):
        return _cut(value)
    if value is None or isinstance(value, bool) or (isinstance(value, int) and value.bit_length() < 64):
        return value
    number = answer.decimal(kind)
    if number is not None:
        return _number(number)
    # Of a type that is not known here, or a number out of all measure: as text.
    return _cut(json.dumps(value, ensure_ascii=False, default=str))


def _number(number: Decimal) -> int | float:
    return int(number) if number == number.to_integral_value() else float(number)


def _choice(choice: Document) -> str | None:
    return _cut(choice.text("label", "other"))


def _recorded(answers: list[_Answer]) -> dict[str, Any]:
    """The answers as the event carries them, as many as there is room for."""
    responses: list[dict[str, Any]] = []
    room = MAX_RESPONSES_BYTES
    for answer in answers:
        response = {"ref": answer.ref, "type": answer.kind, "title": answer.title, "value": answer.value}
        room -= len(json.dumps(response))
        if room < 0:
            return {"responses": responses, "truncated": True}
        responses.append(response)
    return {"responses": responses}


def _hidden(hidden: Document) -> dict[str, Any]:
    """What the link carried: where the person came from (utm_...), ids of other systems."""
    found = {
        name[:100]: value[:MAX_HIDDEN_TEXT]
        for name, value in list(hidden.value.items())[:MAX_HIDDEN]
        if isinstance(value, str)
    }
    return {"hidden": found} if found else {}


def _score(calculated: Document) -> dict[str, Any]:
    score = calculated.decimal("score")
    return {} if score is None else {"score": _number(score)}


# Who


def _person(answers: list[_Answer], hidden: Document, context: Context) -> Person:
    settings = context.settings.get(FIELDS)
    named: Mapping[str, Any] = settings if isinstance(settings, dict) else {}

    def of(field: str) -> Iterator[str]:
        """The answer that the settings name for this."""
        return (a.text for a in answers if a.ref is not None and a.ref == named.get(field) and a.text)

    def typed(kind: str) -> Iterator[str]:
        return (a.text for a in answers if a.kind == kind and a.text)

    def asked(words: frozenset[str], fillers: frozenset[str] = frozenset()) -> Iterator[str]:
        return (a.text for a in answers if a.kind == "text" and a.text and a.asks_for(words, fillers))

    emails = [*of("email"), *typed("email"), hidden.text(*_EMAIL_NAMES)]
    phones = [*of("phone"), *typed("phone_number"), hidden.text(*_PHONE_NAMES)]
    documents = [*of("document"), *asked(_DOCUMENT_WORDS)]
    names = [*of("name"), *asked(_NAME_WORDS, _NAME_FILLERS), hidden.text("name", "nome", "nombre")]
    return person(
        next((found for text in emails if (found := email_identity(text))), None),
        next((found for text in documents if (found := tax_identity(text))), None),
        next((found for text in phones if (found := phone_identity(text, context.country))), None),
        name=next((text for text in names if text), None),
    )


def _cut(text: str | None, length: int = MAX_TEXT) -> str | None:
    return None if text is None else text[:length]
