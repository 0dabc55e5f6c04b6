"""Stripe: everything is in the signed body. The event's id is the key; a connected account names its own connection."""

from __future__ import annotations

from collections.abc import Mapping

from producers.ingest import signature
from producers.ingest.sources import UNKNOWN, Part, Source, key, read_object, sha256, topic_of

HEADER = "stripe-signature"


def route(body: bytes, headers: Mapping[str, str], url_topic: str | None) -> list[Part]:
    event = read_object(body)
    if event is None:
        return [Part(topic=UNKNOWN, dedupe_key=f"body-{sha256(body)}")]
    event_id, account = event.get("id"), event.get("account")
    return [
        Part(
            topic=topic_of(event.get("type")),
            dedupe_key=key("event", event_id) if isinstance(event_id, str) and event_id else f"body-{sha256(body)}",
            external_id=account if isinstance(account, str) and account else None,
            summary={"livemode": event["livemode"]} if isinstance(event.get("livemode"), bool) else {},
        )
    ]


SOURCE = Source(
    name="stripe",
    kind="payment",
    verify=lambda body, headers, secrets, now_s: signature.stripe(body, headers.get(HEADER), secrets, now_s),
    verify_again=lambda body, headers, secrets: signature.stripe(
        body, headers.get(HEADER), secrets, 0, tolerance_s=None
    ),
    route=route,
    kept_headers=frozenset({HEADER}),
)
