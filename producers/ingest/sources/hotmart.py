"""Hotmart: one static token for all requests of an account (the `hottok`); nothing is signed.

The token stands in a header, in older payloads in the body: there it is taken out before anything is stored. The
event's id is the key, for good: nothing else tells a repeat from a new event. A connection may also refuse what is
older than `max_age_days`; without that any age is taken, since Hotmart's history can be sent again by hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from afluente.errors import Refused
from producers.ingest import signature
from producers.ingest.signature import Check
from producers.ingest.sources import UNKNOWN, Part, Source, key, read_object, sha256, stripping, topic_of

HEADER = "x-hotmart-hottok"
MAX_AGE_DAYS = "max_age_days"

_DAY_S = 86_400
_IN_JSON = stripping.field("hottok")
_IN_FORM = re.compile(rb"((?:^|&)hottok=)[^&]*")


def verify(body: bytes, headers: Mapping[str, str], secrets: Iterable[bytes]) -> Check:
    return signature.token(headers.get(HEADER) or _token_of(body), secrets)


def route(body: bytes, headers: Mapping[str, str], url_topic: str | None) -> list[Part]:
    event = read_object(body)
    if event is None:
        return [Part(topic=UNKNOWN, dedupe_key=f"body-{sha256(body)}")]
    event_id = event.get("id")
    known = isinstance(event_id, str) and event_id != ""
    return [
        Part(
            topic=topic_of(event.get("event")),
            dedupe_key=key("event", str(event_id)) if known else f"body-{sha256(body)}",
        )
    ]


def without_secrets(body: bytes) -> bytes:
    """The body with another word in the token's place; what has none is untouched."""
    if b"hottok" not in body:
        return body
    return _IN_FORM.sub(rb"\1" + stripping.REMOVED, stripping.without(body, _IN_JSON))


def configured(settings: Mapping[str, Any]) -> Source:
    """With the age that this connection allows, if it says one."""
    days = settings.get(MAX_AGE_DAYS)
    if isinstance(days, bool) or not isinstance(days, int | float) or days <= 0:
        return SOURCE

    def not_too_old(body: bytes, headers: Mapping[str, str], secrets: Iterable[bytes], now_s: float) -> Check:
        check = verify(body, headers, secrets)
        created_ms = _created_ms(body) if check.ok else None
        if created_ms is not None and now_s - created_ms / 1000 > days * _DAY_S:
            return Check(False, "event_too_old")
        return check

    return replace(SOURCE, verify=not_too_old)


def check_settings(settings: Mapping[str, Any]) -> None:
    """`max_age_days` is a number of days, if it is there."""
    days = settings.get(MAX_AGE_DAYS)
    if days is not None and (isinstance(days, bool) or not isinstance(days, int | float) or not 0 < days <= 3650):
        raise Refused(f"{MAX_AGE_DAYS} must be a number of days above 0, not {days!r}")


def _token_of(body: bytes) -> str | None:
    event = read_object(body)
    token = event.get("hottok") if event is not None else None
    return token if isinstance(token, str) else None


def _created_ms(body: bytes) -> int | None:
    event = read_object(body) or {}
    for name in ("creation_date", "creationDate"):
        value = event.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


SOURCE = Source(
    name="hotmart",
    kind="payment",
    verify=lambda body, headers, secrets, now_s: verify(body, headers, secrets),
    verify_again=verify,
    route=route,
    kept_headers=frozenset(),
    without_secrets=without_secrets,
    configured=configured,
    check_settings=check_settings,
)
