"""Any sender with a mapping: how it proves itself and where its topic stands are the connection's settings.

A connection without a usable mapping verifies nothing: every delivery to it is refused, and nobody's is taken on trust.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from afluente.errors import Refused
from producers.ingest import mapping as mappings
from producers.ingest.mapping.model import Hmac, Timestamp, Token
from producers.ingest.mapping.reading import Reading
from producers.ingest.normalize.document import Malformed, read_document
from producers.ingest.signature import OK, Check, token
from producers.ingest.sources import UNKNOWN, Part, Source, key, sha256, topic_of

# More signatures in one header than anybody sends while a secret rotates.
MAX_SIGNATURES = 10


def configured(settings: Mapping[str, Any]) -> Source:
    """The sender as its mapping has it."""
    text = mappings.text_of(settings)
    return SOURCE if text is None else _source(text)


@lru_cache(maxsize=256)
def _source(text: bytes) -> Source:
    mapping = mappings.parsed(text)
    if mapping is None:
        return SOURCE

    def verify(body: bytes, headers: Mapping[str, str], secrets: Iterable[bytes], now_s: float) -> Check:
        return check(mapping.verify, body, headers, secrets, now_s)

    def verify_again(body: bytes, headers: Mapping[str, str], secrets: Iterable[bytes]) -> Check:
        return check(mapping.verify, body, headers, secrets, None)

    def route(body: bytes, headers: Mapping[str, str], url_topic: str | None) -> list[Part]:
        return _route(mapping, body, headers)

    return replace(SOURCE, verify=verify, verify_again=verify_again, route=route, kept_headers=mapping.kept_headers())


def check_settings(settings: Mapping[str, Any]) -> None:
    """`mapping` is there and right."""
    if mappings.SETTING not in settings:
        raise Refused(
            "a generic sender needs a mapping", hint=f"--mapping {' or '.join(mappings.examples())}, or a file of yours"
        )
    mappings.read(settings[mappings.SETTING])


def check_secret(settings: Mapping[str, Any], secret: bytes) -> None:
    """Whether the mapping can make a key of a secret: one that it cannot would refuse every delivery."""
    mapping = mappings.kept(settings)
    if mapping is not None and isinstance(mapping.verify, Hmac) and not _key(mapping.verify, secret):
        raise Refused(f"the secret is not {mapping.verify.key}, as verify.key of the mapping says")


def new_secret(settings: Mapping[str, Any]) -> str:
    """A secret that the mapping can use."""
    mapping = mappings.kept(settings)
    random = os.urandom(32)
    if mapping is not None and isinstance(mapping.verify, Hmac) and mapping.verify.key == "hex":
        return random.hex()
    return f"whsec_{base64.b64encode(random).decode()}"


def check(
    how: Hmac | Token, body: bytes, headers: Mapping[str, str], secrets: Iterable[bytes], now_s: float | None
) -> Check:
    """Whether a delivery is verified; `now_s` None skips its age."""
    given = headers.get(how.header, "").strip()
    if isinstance(how, Token):
        if how.scheme:
            scheme, _, given = given.partition(" ")
            if scheme.lower() != how.scheme.lower():
                return Check(False, "token_missing")
        return token(given.strip(), secrets)
    if not given:
        return Check(False, "signature_missing")
    signed = _signed(how, body, headers)
    if signed is None:
        return Check(False, "signature_malformed")
    digests = list(_digests(how, given))
    if not digests:
        return Check(False, "signature_malformed")
    keys = [found for secret in secrets if secret and (found := _key(how, secret))]
    # A list, not a generator: how long this takes must not say which secret fitted.
    matches = [
        hmac.compare_digest(digest, expected)
        for expected in [hmac.digest(found, signed, how.algorithm) for found in keys]
        for digest in digests
    ]
    if not matches:
        return Check(False, "secret_unset")
    if not any(matches):
        return Check(False, "signature_mismatch")
    return OK if how.timestamp is None or now_s is None else _age(how.timestamp, headers, now_s)


def _age(how: Timestamp, headers: Mapping[str, str], now_s: float) -> Check:
    at = headers.get(how.header, "").strip()
    if not at:
        return Check(False, "timestamp_missing")
    if not at.isascii() or not at.isdigit() or len(at) > 16:
        return Check(False, "timestamp_malformed")
    at_s = int(at) / (1000 if how.unit == "ms" else 1)
    return OK if abs(now_s - at_s) <= how.tolerance_s else Check(False, "signature_too_old")


def _signed(how: Hmac, body: bytes, headers: Mapping[str, str]) -> bytes | None:
    """What the signature is over; None when a header that belongs to it is missing."""
    parts: list[bytes] = []
    for is_place, name in how.pieces():
        if not is_place:
            parts.append(name.encode())
        elif name == "body":
            parts.append(body)
        else:
            stamp = how.timestamp.header if how.timestamp is not None else ""
            value = headers.get(stamp if name == "timestamp" else name.removeprefix("header:"))
            if value is None:
                return None
            parts.append(value.strip().encode("utf-8", "replace"))
    return b"".join(parts)


def _digests(how: Hmac, given: str) -> Iterable[bytes]:
    for one in (given.split(how.separator) if how.separator else [given])[:MAX_SIGNATURES]:
        text = one.strip()
        if not text.startswith(how.prefix):
            continue
        digest = _decoded(how.encoding, text.removeprefix(how.prefix))
        if digest:
            yield digest


def _key(how: Hmac, secret: bytes) -> bytes | None:
    if how.key == "text":
        return secret
    return _decoded(how.key, secret.decode("ascii", "replace").strip().removeprefix("whsec_"))


def _decoded(encoding: str, text: str) -> bytes | None:
    try:
        if encoding == "hex":
            return bytes.fromhex(text) if text.isalnum() else None
        if encoding == "base64url":
            # Padding is left out by many.
            return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None


def _route(mapping: mappings.Mapping, body: bytes, headers: Mapping[str, str]) -> list[Part]:
    document = read_document(body)
    if document is None:
        return [Part(topic=UNKNOWN, dedupe_key=f"body-{sha256(body)}")]
    reading = Reading(document.value, headers)
    try:
        topic = topic_of(reading.text(mapping.topic))
        delivery = reading.text(mapping.delivery_id)
    except Malformed:
        topic, delivery = UNKNOWN, None
    return [Part(topic=topic, dedupe_key=key(topic, delivery) if delivery else key(topic, f"body-{sha256(body)}"))]


def _refuse(body: bytes, headers: Mapping[str, str], secrets: Iterable[bytes], now_s: float = 0) -> Check:
    return Check(False, "mapping_unusable")


SOURCE = Source(
    name="generic",
    kind="generic",
    verify=_refuse,
    verify_again=_refuse,
    route=lambda body, headers, url_topic: [Part(topic=UNKNOWN, dedupe_key=f"body-{sha256(body)}")],
    kept_headers=frozenset(),
    challenged=True,
    configured=configured,
    check_settings=check_settings,
    check_secret=check_secret,
)
