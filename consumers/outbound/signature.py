"""Signatures of outgoing webhooks: what is signed, with which bytes of the secret, in which header.

Two header sets travel side by side, so that a receiver may use either:

* ours, ``X-Webhook-Signature: t=<unix s>,v1=<hex>``: HMAC-SHA256 over ``<t>.<delivery id>.<raw body>``, keyed by the
  secret as the subscriber was shown it, the ``whsec_`` included;
* Standard Webhooks 1.0.0, ``webhook-signature: v1,<base64>``: HMAC-SHA256 over ``<id>.<timestamp>.<raw body>``, keyed
  by the bytes that the base64 after ``whsec_`` stands for.

While a secret is being rotated both secrets sign, and both signatures are in both lists. The body is signed as the
bytes that are sent; nothing here serialises. A signature belongs to one attempt: its time is the attempt's, so a
retry is signed anew.
"""

import base64
import binascii
import hashlib
import hmac
import secrets as random
from collections.abc import Sequence

PREFIX = "whsec_"
# Standard Webhooks asks for 24 to 64 random bytes.
SECRET_BYTES = 32


class SecretError(ValueError):
    """A secret is not ``whsec_`` and base64. Rotate the subscription's secret to get a good one."""


def new_secret() -> str:
    """A fresh secret in the form it is shown to the subscriber, once: ``whsec_<base64 of 32 random bytes>``."""
    return PREFIX + base64.b64encode(random.token_bytes(SECRET_BYTES)).decode()


def secret_bytes(shown: str) -> bytes:
    """The key of Standard Webhooks: the decoded bytes of a shown secret. Raises SecretError."""
    try:
        if shown.startswith(PREFIX) and len(shown) > len(PREFIX):
            return base64.b64decode(shown.removeprefix(PREFIX), validate=True)
    except binascii.Error:
        pass
    # The secret itself stays out of the message: messages reach logs.
    raise SecretError("the secret is not of the form whsec_<base64>")


def webhook_signature(shown: Sequence[str], delivery_id: str, timestamp: int, body: bytes) -> str:
    """``t=<unix s>,v1=<hex>`` with one ``v1`` for each secret, the newest first. ``timestamp`` in seconds."""
    signed = b"%d.%s." % (timestamp, delivery_id.encode()) + body
    digests = (hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest() for secret in shown)
    return ",".join([f"t={timestamp}", *(f"v1={digest}" for digest in digests)])


def standard_signature(shown: Sequence[str], message_id: str, timestamp: int, body: bytes) -> str:
    """The value of ``webhook-signature``: ``v1,<base64>`` for each secret, with a space between. Raises SecretError."""
    signed = b"%s.%d." % (message_id.encode(), timestamp) + body
    digests = (hmac.new(secret_bytes(secret), signed, hashlib.sha256).digest() for secret in shown)
    return " ".join("v1," + base64.b64encode(digest).decode() for digest in digests)


def headers(
    shown: Sequence[str], *, delivery_id: str, event_type: str, attempt: int, timestamp: int, body: bytes
) -> dict[str, str]:
    """Every header that says what a delivery is, for one attempt at ``timestamp`` (unix seconds).

    ``shown`` are the subscription's valid secrets, the newest first; there is always one.
    """
    if not shown:
        raise SecretError("a delivery is always signed, and this subscription has no valid secret")
    return {
        "X-Webhook-Event": event_type,
        "X-Webhook-Delivery": delivery_id,
        "X-Webhook-Attempt": str(attempt),
        "X-Webhook-Timestamp": str(timestamp),
        "X-Webhook-Signature": webhook_signature(shown, delivery_id, timestamp, body),
        "webhook-id": delivery_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": standard_signature(shown, delivery_id, timestamp, body),
    }
