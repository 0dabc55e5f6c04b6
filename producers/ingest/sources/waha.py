"""WAHA: one event a delivery, `{id, timestamp, event, session, me, payload, engine}`, signed with HMAC-SHA512.

The event's id (`evt_...`) is the key: it stays equal over retries. `message` and `message.any` are two events about one
message; that they count once is the ledger's work. The session must be the channel's, if the channel names one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from producers.ingest import signature
from producers.ingest.signature import Check
from producers.ingest.sources import UNKNOWN, Part, Source, key, read_object, sha256, stripping, topic_of

HEADER = "x-webhook-hmac"
ALGORITHM = "x-webhook-hmac-algorithm"
TIMESTAMP = "x-webhook-timestamp"
REQUEST_ID = "x-webhook-request-id"
# A message may hold its media.
MAX_BODY_BYTES = 16 * 1024 * 1024


def route(body: bytes, headers: Mapping[str, str], url_topic: str | None) -> list[Part]:
    event = read_object(body)
    if event is None:
        return [Part(topic=UNKNOWN, dedupe_key=f"body-{sha256(body)}")]
    topic, event_id, session = topic_of(event.get("event")), event.get("id"), event.get("session")
    named = event_id if isinstance(event_id, str) and event_id else headers.get(REQUEST_ID)
    return [
        Part(
            topic=topic,
            dedupe_key=key(topic, named) if named else key(topic, f"body-{sha256(body)}"),
            external_id=session if isinstance(session, str) and session else None,
        )
    ]


def _verify(body: bytes, headers: Mapping[str, str], secrets: Iterable[bytes], now_s: float | None) -> Check:
    return signature.waha(body, headers.get(HEADER), headers.get(ALGORITHM), headers.get(TIMESTAMP), secrets, now_s)


SOURCE = Source(
    name="waha",
    kind="whatsapp",
    verify=_verify,
    verify_again=lambda body, headers, secrets: _verify(body, headers, secrets, None),
    route=route,
    kept_headers=frozenset({HEADER, ALGORITHM, TIMESTAMP, REQUEST_ID}),
    without_secrets=stripping.without_files,
    max_body_bytes=MAX_BODY_BYTES,
)
