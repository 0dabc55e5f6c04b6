"""Nuvemshop (Tiendanube): thin webhooks, `{"store_id", "event", "id"}`, without an id of their own.

The app's secret signs for all its stores, so the store in the body must be the one of the channel in the URL. A
second real `order/updated` looks exactly like a repeat of the first: `*/updated` is repeatable (the worker collapses
what it has fetched since); events that happen once are deduped for ever. The LGPD webhooks have no event field: their
topic is the rest of the URL (`/webhooks/nuvemshop/<channel>/customers/redact`).
"""

from __future__ import annotations

from collections.abc import Mapping

from producers.ingest import signature
from producers.ingest.sources import UNKNOWN, Part, Source, key, read_object, sha256, topic_of

HEADER = "x-linkedstore-hmac-sha256"
PRIVACY_TOPICS = frozenset({"store/redact", "customers/redact", "customers/data_request"})
# What can happen to one resource again and again, and looks the same each time.
REPEATABLE_ACTIONS = frozenset(
    {"updated", "edited", "custom_fields_updated", "packed", "unpacked", "pending", "suspended", "resumed"}
)


def route(body: bytes, headers: Mapping[str, str], url_topic: str | None) -> list[Part]:
    thin = read_object(body)
    if thin is None:
        return [Part(topic=UNKNOWN, dedupe_key=f"body-{sha256(body)}")]
    store = thin.get("store_id")
    external_id = str(store) if isinstance(store, int | str) and not isinstance(store, bool) else None
    if "event" not in thin:
        topic = url_topic if url_topic in PRIVACY_TOPICS else UNKNOWN
        return [
            Part(
                topic=topic,
                dedupe_key=key(topic, f"body-{sha256(body)}"),
                external_id=external_id,
                # The same customer's second redaction looks like the first. It is one a customer and day, by the facts.
                repeatable=topic.endswith("/redact"),
            )
        ]
    topic = topic_of(thin.get("event"))
    resource, _, action = topic.partition("/")
    identifier = thin.get("id")
    known = isinstance(identifier, int | str) and not isinstance(identifier, bool) and str(identifier) != ""
    known = known and str(identifier).isprintable()
    return [
        Part(
            topic=topic,
            dedupe_key=key(topic, str(identifier), f"body-{sha256(body)}"),
            external_id=external_id,
            subject=f"{resource}:{identifier}"[:255] if known and topic != UNKNOWN else None,
            repeatable=action in REPEATABLE_ACTIONS,
        )
    ]


SOURCE = Source(
    name="nuvemshop",
    kind="ecommerce",
    verify=lambda body, headers, secrets, now_s: signature.nuvemshop(body, headers.get(HEADER), secrets),
    verify_again=lambda body, headers, secrets: signature.nuvemshop(body, headers.get(HEADER), secrets),
    route=route,
    kept_headers=frozenset({HEADER}),
)
