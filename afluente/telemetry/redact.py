"""Keeps personal data and secrets out of the logs: by the field's name, and by the shape of what is in a text. What is
left of a stranger's text is made plain: it tells no terminal anything.

A pure function; errors of handlers quote payloads, so texts are searched too. Ids, topics, offsets and times pass.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "[redacted]"

# Fields that hold nothing but personal data or secrets, whatever their value looks like.
HIDDEN_FIELDS = frozenset(
    {
        "phone", "phone_e164", "email", "cpf", "document", "address", "contact_name", "customer_name", "first_name",
        "last_name", "body", "text", "raw_body", "payload", "password", "secret", "secrets", "token", "api_key",
        "authorization", "cookie", "signature", "sealed", "private_key",
    }
)  # fmt: skip

_PATTERNS = (
    # user:password@ of a connection string
    (re.compile(r"(?<=://)([^\s:/@]*):([^\s@/]+)@"), r"\1:" + MASK + "@"),
    (re.compile(r"(?i)\b(password|secret|token|api[_-]?key|authorization)(\s*[=:]\s*)(\S+)"), r"\1\2" + MASK),
    (re.compile(r"\bwhsec_[A-Za-z0-9+/=]+"), MASK),
    # an API key: what follows its prefix
    (re.compile(r"\b(afl_[A-Za-z0-9]{10})_[A-Za-z0-9]+"), r"\1_" + MASK),
    # begun at the beginning of a word only: a text of one long word is read once, not once for each of its letters
    (re.compile(r"(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)+"), MASK),
    # +55 11 98765-4321 and the like: a plus sign and ten digits or more
    (re.compile(r"\+\d[\d ().-]{8,}\d"), MASK),
    # Brazilian mobile without the plus, as WhatsApp ids have it; and CPF
    (re.compile(r"(?<![\w-])55\d{10,11}(?![\w-])"), MASK),
    (re.compile(r"(?<![\w-])\d{3}\.\d{3}\.\d{3}-\d{2}(?![\w-])"), MASK),
)
# Control characters, and letters that turn the direction of what follows.
TURNING = r"\u2028-\u202e\u2066-\u2069"
_CONTROL = re.compile(rf"[\x00-\x08\x0b-\x1f\x7f-\x9f{TURNING}]")
# Something of this is in whatever one of them fits: a text without is spared eight searches.
_SUSPECT = re.compile(r"[@=:+]|whsec_|afl_|55\d{10}|\d\.\d")


def redact(key: str, value: Any) -> Any:
    """`value` as it may be logged under `key`: masked whole, searched, or as it is."""
    if key.lower() in HIDDEN_FIELDS and value not in (None, "", b""):
        return MASK
    if isinstance(value, str):
        return printable(redact_text(value))
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if isinstance(value, Mapping):
        return {inner: redact(str(inner), item) for inner, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [redact(key, item) for item in value]
    if isinstance(value, BaseException):
        return printable(redact_text(f"{type(value).__name__}: {value}"))
    return value


def printable(text: str) -> str:
    """`text` with what would tell a terminal something shown instead of sent to it; lines and tabs stay."""
    return text if text.isprintable() else _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def redact_text(text: str) -> str:
    """`text` with what looks like an e-mail address, a phone number, a CPF or a credential masked."""
    if _SUSPECT.search(text) is None:
        return text
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text
