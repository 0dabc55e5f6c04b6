"""What each sender's deliveries look like, as far as the receiver needs to know: signature, tenant, topic, dedupe key.

Pure functions over the raw bytes. A source parses only as far as routing; what a delivery means is `normalize`'s work.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from producers.ingest.signature import Check

MAX_BODY_BYTES = 3 * 1024 * 1024  # WhatsApp's own bound for one POST


@dataclass(frozen=True)
class Part:
    """What of one delivery belongs to one connection, and so to one organization."""

    topic: str
    """What it is about, in the sender's words; 'unknown' when the delivery does not say."""
    dedupe_key: str
    """Equal for repeats of one delivery, different for everything else of this connection. At most 200 characters."""
    external_id: str | None = None
    """The connection the part names (shop domain, store id, number); None: the one in the URL."""
    body: bytes | None = None
    """The part's own bytes; None: the whole body."""
    subject: str | None = None
    """What a thin webhook says to fetch, like 'order:1001'."""
    repeatable: bool = False
    """Two real deliveries may look alike (an order updated twice): repeats are collapsed later, never dropped here."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """Counts and kinds for people who look at deliveries. No personal data."""


def _take_any(settings: Mapping[str, Any]) -> None:
    """For senders without settings of their own."""


def _take_any_secret(settings: Mapping[str, Any], secret: bytes) -> None:
    """For senders whose secrets are texts."""


@dataclass(frozen=True)
class Source:
    """One sender."""

    name: str
    kind: str
    """The kind of a channel to it."""
    verify: Callable[[bytes, Mapping[str, str], Iterable[bytes], float], Check]
    """(raw body, lower-case headers, secrets, epoch seconds now)."""
    verify_again: Callable[[bytes, Mapping[str, str], Iterable[bytes]], Check]
    """The same for a stored delivery of a shared source: its age does not count."""
    route: Callable[[bytes, Mapping[str, str], str | None], list[Part]]
    """(raw body, lower-case headers, topic in the URL). Never raises: the unreadable is one part, 'unknown'."""
    kept_headers: frozenset[str]
    """Headers stored with the delivery, besides the common ones. Never one that holds a secret."""
    shared: bool = False
    """One delivery may belong to several connections: each part goes to the one it names, wherever it was posted."""
    challenged: bool = False
    """The sender asks by GET whether the address is ours (`hub.mode`, `hub.verify_token`, `hub.challenge`)."""
    without_secrets: Callable[[bytes], bytes] = bytes
    """The body as it is routed and stored: what a sender writes into it to prove itself is taken out."""
    max_body_bytes: int = MAX_BODY_BYTES
    """What is longer is refused (413)."""
    configured: Callable[[Mapping[str, Any]], Source] | None = None
    """This sender as one connection's settings have it. Never raises: with bad settings nothing verifies."""

    check_settings: Callable[[Mapping[str, Any]], None] = _take_any
    """Whether a connection may have these settings: raises Refused, which names the field that is wrong."""

    check_secret: Callable[[Mapping[str, Any], bytes], None] = _take_any_secret
    """Whether a connection with these settings can use a secret: raises Refused."""

    def of(self, settings: Mapping[str, Any]) -> Source:
        """The sender as this connection knows it."""
        return self if self.configured is None else self.configured(settings)


COMMON_HEADERS = frozenset({"content-type", "content-length", "user-agent", "x-request-id", "traceparent"})
UNKNOWN = "unknown"
MAX_CONTAINERS = 300_000
MAX_TOPIC = 255


def registered() -> Mapping[str, Source]:
    """Every sender that the receiver knows, by its name in the URL."""
    from producers.ingest.sources import (
        evolution,
        generic,
        hotmart,
        nuvemshop,
        shopify,
        stripe,
        typeform,
        waha,
        whatsapp,
    )

    modules = (shopify, stripe, nuvemshop, whatsapp, waha, evolution, hotmart, typeform, generic)
    return {module.SOURCE.name: module.SOURCE for module in modules}


def is_too_wide(body: bytes) -> bool:
    """More objects and lists than any sender's delivery has: each takes many times the two bytes it is written with."""
    return body.count(b"[") + body.count(b"{") > MAX_CONTAINERS


def read_object(body: bytes) -> dict[str, Any] | None:
    """The body as a JSON object, or None for anything else. Nothing of it is checked."""
    if is_too_wide(body):
        return None
    try:
        value = _strict.decode(body)
    except (ValueError, RecursionError):
        # Senders may be laxer than the quick reader: UTF-16, half a surrogate pair.
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


_strict = msgspec.json.Decoder()


def sha256(body: bytes) -> str:
    """Hex, for keys: what the bytes say must not stand in a key in clear."""
    return hashlib.sha256(body).hexdigest()


def topic_of(value: object) -> str:
    """A topic as stored: short, printable text, or 'unknown'."""
    if isinstance(value, str) and 0 < len(value) <= MAX_TOPIC and value.isascii() and value.isprintable():
        return value
    return UNKNOWN


def key(*parts: str) -> str:
    """A dedupe key out of its parts. Long or odd ones are hashed whole."""
    text = ":".join(parts)
    return (
        text
        if len(text) <= 200 and text.isascii() and text.isprintable()
        else f"sha256:{sha256(text.encode('utf-8', 'replace'))}"
    )
