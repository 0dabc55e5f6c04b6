"""Typeform: the signed body holds a submission. Its token is the key: a resend from their panel has a new event id."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afluente.errors import Refused
from producers.ingest import signature
from producers.ingest.sources import UNKNOWN, Part, Source, key, read_object, sha256, topic_of

HEADER = "typeform-signature"
FIELDS = ("name", "email", "phone", "document")


def route(body: bytes, headers: Mapping[str, str], url_topic: str | None) -> list[Part]:
    event = read_object(body)
    if event is None:
        return [Part(topic=UNKNOWN, dedupe_key=f"body-{sha256(body)}")]
    topic = topic_of(event.get("event_type"))
    found = event.get("form_response")
    response = found if isinstance(found, dict) else {}
    form_id, token = response.get("form_id"), response.get("token")
    if not isinstance(form_id, str) or not isinstance(token, str) or not form_id or not token:
        return [Part(topic=topic, dedupe_key=f"body-{sha256(body)}")]
    return [Part(topic=topic, dedupe_key=key(topic, form_id, token), external_id=form_id)]


def check_settings(settings: Mapping[str, Any]) -> None:
    """`fields` names the refs of answers that say who it was, where their types and questions do not."""
    fields = settings.get("fields", {})
    if not isinstance(fields, dict):
        raise Refused("fields must be an object of names and refs")
    for name, ref in fields.items():
        if name not in FIELDS:
            raise Refused(f"fields.{name}: there is no such field", hint=f"one of {', '.join(FIELDS)}")
        if not isinstance(ref, str) or not 0 < len(ref) <= 200:
            raise Refused(f"fields.{name}: must be the ref of a question")


SOURCE = Source(
    name="typeform",
    kind="form",
    verify=lambda body, headers, secrets, now_s: signature.typeform(body, headers.get(HEADER), secrets),
    verify_again=lambda body, headers, secrets: signature.typeform(body, headers.get(HEADER), secrets),
    route=route,
    kept_headers=frozenset({HEADER}),
    check_settings=check_settings,
)
