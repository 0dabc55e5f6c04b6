"""Is this body from the sender? One function for each sender, over the raw bytes.

Pure: no clock, no I/O; of the body not even its JSON is read. Every comparison takes constant time. What is missing,
empty or oddly encoded is a failed check, never a skipped one. Each takes all secrets that are valid now (two while one
rotates) and accepts if any fits.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeGuard

# What Stripe's own libraries allow between signing and receiving.
STRIPE_TOLERANCE_S = 300

# WAHA sends one delivery again for as long as its session is told to, under the time of the first try. A repeat is
# found by its key; a clock this far off is not the sender's.
WAHA_TOLERANCE_S = 86_400
# Evolution makes a token for a delivery and sends it again with each of its ten tries. The last is up to 35 minutes
# after the first, the token is for ten: without this, what Postgres was away for would be refused, and lost, when it is
# back.
JWT_LEEWAY_S = 1_800

_KEY = b"length"
_HEX_64 = re.compile(r"[0-9a-f]{64}\Z")
_HEX_128 = re.compile(r"[0-9a-f]{128}\Z")
_BASE64URL = re.compile(r"[A-Za-z0-9_-]{1,4096}\Z")
_TIMESTAMP_MS = re.compile(r"[0-9]{1,15}\Z")
_TIMESTAMP = re.compile(r"[0-9]{1,12}\Z")


@dataclass(frozen=True)
class Check:
    """Whether a delivery is verified; if not, `reason` is one fixed word that holds nothing of the request."""

    ok: bool
    reason: str | None = None


OK = Check(True)


def shopify(body: bytes, header: str | None, secrets: Iterable[bytes]) -> Check:
    """`X-Shopify-Hmac-Sha256`: base64 of HMAC-SHA256 of the body with the app's client secret."""
    if not header:
        return Check(False, "signature_missing")
    given = _from_base64(header)
    if given is None:
        return Check(False, "signature_malformed")
    return _any_matches(given, body, secrets)


def nuvemshop(body: bytes, header: str | None, secrets: Iterable[bytes]) -> Check:
    """`x-linkedstore-hmac-sha256`: hex of HMAC-SHA256 of the body with the app's client secret."""
    if not header:
        return Check(False, "signature_missing")
    return _hex(header, body, secrets)


def whatsapp(body: bytes, header: str | None, secrets: Iterable[bytes]) -> Check:
    """`X-Hub-Signature-256: sha256=<hex>` with the Meta app secret, over the bytes as sent (escaped non-ASCII)."""
    if not header:
        return Check(False, "signature_missing")
    scheme, _, digest = header.strip().partition("=")
    if scheme != "sha256":
        return Check(False, "signature_malformed")
    return _hex(digest, body, secrets)


def stripe(
    body: bytes,
    header: str | None,
    secrets: Iterable[bytes],
    now_s: float,
    tolerance_s: float | None = STRIPE_TOLERANCE_S,
) -> Check:
    """`Stripe-Signature: t=...,v1=...[,v1=...][,v0=...]`: hex of HMAC-SHA256 of `t.body`.

    The key is the whole `whsec_...` string as text. Several v1 stand there while Stripe rolls the secret; v0 and
    unknown schemes are ignored. `tolerance_s` None skips the age (a replay of what was verified when it came).
    """
    if not header:
        return Check(False, "signature_missing")
    timestamps: list[str] = []
    digests: list[bytes] = []
    secrets = tuple(secrets)
    for part in header.split(","):
        name, _, value = part.strip().partition("=")
        if name == "t":
            timestamps.append(value)
        elif name == "v1" and _HEX_64.match(value):
            digests.append(bytes.fromhex(value))
    if len(timestamps) != 1 or not _TIMESTAMP.match(timestamps[0]) or not digests:
        return Check(False, "signature_malformed")
    signed = timestamps[0].encode() + b"." + body
    checks = [_any_matches(given, signed, secrets) for given in digests]
    check = next((check for check in checks if check.ok), checks[0])
    if check.ok and tolerance_s is not None and abs(now_s - int(timestamps[0])) > tolerance_s:
        return Check(False, "signature_too_old")
    return check


def typeform(body: bytes, header: str | None, secrets: Iterable[bytes]) -> Check:
    """`Typeform-Signature: sha256=<base64>` of HMAC-SHA256 of the body."""
    if not header:
        return Check(False, "signature_missing")
    scheme, _, digest = header.strip().partition("=")
    given = _from_base64(digest) if scheme == "sha256" else None
    if given is None:
        return Check(False, "signature_malformed")
    return _any_matches(given, body, secrets)


def token(given: str | None, secrets: Iterable[bytes]) -> Check:
    """A shared token: nothing is signed, whoever knows it is the sender."""
    if not given:
        return Check(False, "token_missing")
    plain = given.encode("utf-8", "replace")
    # Hashed, so that the comparison takes as long whatever the lengths.
    matches = [hmac.compare_digest(_sha256(_KEY, plain), _sha256(_KEY, secret)) for secret in secrets if secret]
    if not matches:
        return Check(False, "secret_unset")
    return OK if any(matches) else Check(False, "token_mismatch")


def waha(
    body: bytes,
    header: str | None,
    algorithm: str | None,
    timestamp_ms: str | None,
    secrets: Iterable[bytes],
    now_s: float | None,
    tolerance_s: float = WAHA_TOLERANCE_S,
) -> Check:
    """`X-Webhook-Hmac`: hex of HMAC-SHA512 of the body; `X-Webhook-Hmac-Algorithm` must not say another one.

    `X-Webhook-Timestamp` (ms) is not signed: it proves nothing, and is only held against our clock where it stands.
    `now_s` None skips that.
    """
    if not header:
        return Check(False, "signature_missing")
    given = header.strip().lower()
    if not _HEX_128.match(given):
        return Check(False, "signature_malformed")
    if algorithm is not None and algorithm.strip().lower() != "sha512":
        return Check(False, "algorithm_unknown")
    check = _any_matches(bytes.fromhex(given), body, secrets, "sha512")
    if check.ok and timestamp_ms is not None and now_s is not None:
        if not _TIMESTAMP_MS.match(timestamp_ms.strip()):
            return Check(False, "timestamp_malformed")
        if abs(now_s - int(timestamp_ms) / 1000) > tolerance_s:
            return Check(False, "timestamp_too_old")
    return check


def jwt_hs256(given: str | None, secrets: Iterable[bytes], now_s: float, leeway_s: float = JWT_LEEWAY_S) -> Check:
    """A JSON Web Token signed with HMAC-SHA256, which must say when it ends (`exp`).

    It is signed for nobody's body in particular. Any other algorithm, "none" above all, is no signature.
    """
    if not given:
        return Check(False, "token_missing")
    signed, _, signature = given.strip().rpartition(".")
    head, _, claims = signed.partition(".")
    header, payload, digest = _json_part(head), _json_part(claims), _from_base64url(signature)
    if header is None or payload is None or digest is None:
        return Check(False, "token_malformed")
    if header.get("alg") != "HS256" or "crit" in header:
        return Check(False, "algorithm_unknown")
    check = _any_matches(digest, signed.encode("ascii"), secrets)
    if not check.ok:
        return Check(False, "token_mismatch") if check.reason == "signature_mismatch" else check
    expires, begins = payload.get("exp"), payload.get("nbf", 0)
    if not _is_moment(expires) or not _is_moment(begins):
        return Check(False, "token_malformed")
    if now_s > expires + leeway_s:
        return Check(False, "token_too_old")
    return Check(False, "token_too_new") if now_s < begins - leeway_s else check


def verify_token(given: str | None, tokens: Iterable[bytes]) -> bool:
    """WhatsApp's set-up: is this `hub.verify_token` ours?"""
    if not given:
        return False
    return any([hmac.compare_digest(given.encode("utf-8", "replace"), token) for token in tokens if token])


def _hex(given: str, body: bytes, secrets: Iterable[bytes]) -> Check:
    if not _HEX_64.match(given.strip().lower()):
        return Check(False, "signature_malformed")
    return _any_matches(bytes.fromhex(given.strip()), body, secrets)


def _any_matches(given: bytes, signed: bytes, secrets: Iterable[bytes], algorithm: str = "sha256") -> Check:
    # A list, not a generator: how long this takes must not say which secret fitted. An empty secret is none.
    matches = [hmac.compare_digest(given, hmac.digest(secret, signed, algorithm)) for secret in secrets if secret]
    if not matches:
        return Check(False, "secret_unset")
    return OK if any(matches) else Check(False, "signature_mismatch")


def _sha256(secret: bytes, signed: bytes) -> bytes:
    return hmac.digest(secret, signed, "sha256")


def _json_part(text: str) -> dict[str, Any] | None:
    """One of the first two parts of a token."""
    raw = _from_base64url(text)
    try:
        value = json.loads(raw) if raw else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _is_moment(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e12


def _from_base64url(text: str) -> bytes | None:
    if not _BASE64URL.match(text):
        return None
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except (binascii.Error, ValueError):
        return None


def _from_base64(text: str) -> bytes | None:
    try:
        return base64.b64decode(text.strip(), validate=True)
    except (binascii.Error, ValueError):
        return None
