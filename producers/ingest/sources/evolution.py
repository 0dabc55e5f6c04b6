"""Evolution API: nothing is signed. It proves itself by a header that the instance is told to send.

That is the channel's secret itself (`X-Webhook-Secret`, or `Authorization: Bearer ...`), or, when the instance has its
`jwt_key` set to the secret, a JSON Web Token signed with it. The address is a random UUID besides. The `apikey` in the
body is the gateway's own password: it proves nothing here, and is taken out before anything is stored.

The event's name stands in the body, or in the path (`/messages-upsert`) with `webhook_by_events`; dotted, or in
capitals in some builds: all become `messages.upsert`. There is no id of a delivery, and a message comes again under the
same id with other content (first undecrypted, then whole): the key is the body. That a message counts once is the
ledger's work.

What it is answered: it tries again up to ten times within 35 minutes, but a 400, 401, 403, 404 or 422 ends that at
once, and the event is lost. So those are only for what cannot become right by itself: an address of nobody's (404), a
secret that is not the channel's (401: put the new one here first, both are valid while it rotates). A database that is
away, too much in flight: 503. A body too slow (408) or too large (413) is tried again too. A paused channel takes all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from producers.ingest import signature
from producers.ingest.signature import Check
from producers.ingest.sources import UNKNOWN, Part, Source, key, read_object, sha256, stripping, topic_of
from producers.ingest.sources.waha import MAX_BODY_BYTES

HEADER = "x-webhook-secret"
API_KEY = stripping.field("apikey")


def verify(body: bytes, headers: Mapping[str, str], secrets: Iterable[bytes], now_s: float) -> Check:
    secrets = tuple(secrets)
    scheme, _, bearer = headers.get("authorization", "").strip().partition(" ")
    if HEADER in headers or scheme.lower() != "bearer":
        return signature.token(headers.get(HEADER), secrets)
    if bearer.count(".") == 2 and (check := signature.jwt_hs256(bearer, secrets, now_s)).reason != "token_malformed":
        return check
    return signature.token(bearer.strip(), secrets)


def without_secrets(body: bytes) -> bytes:
    return stripping.without_files(stripping.without(body, API_KEY))


def event_name(name: object) -> str:
    """`messages.upsert`, however it is written."""
    topic = topic_of(name)
    return topic.lower().replace("_", ".").replace("-", ".") if topic != UNKNOWN else UNKNOWN


def route(body: bytes, headers: Mapping[str, str], url_topic: str | None) -> list[Part]:
    event = read_object(body)
    if event is None:
        return [Part(topic=UNKNOWN, dedupe_key=f"body-{sha256(body)}")]
    topic = event_name(event.get("event") or url_topic)
    instance = event.get("instance")
    return [
        Part(
            topic=topic,
            dedupe_key=key(topic, f"body-{sha256(body)}"),
            external_id=instance if isinstance(instance, str) and instance else None,
        )
    ]


SOURCE = Source(
    name="evolution",
    kind="whatsapp",
    verify=verify,
    verify_again=lambda body, headers, secrets: Check(False, "not_shared"),
    route=route,
    kept_headers=frozenset(),
    without_secrets=without_secrets,
    max_body_bytes=MAX_BODY_BYTES,
)
