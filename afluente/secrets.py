"""Secrets at rest: AES-256-GCM with the tenant and the purpose bound in.

A sealed value is "<key id>.<base64url of nonce + ciphertext>". The organization and the purpose are associated data:
a ciphertext copied to another tenant's row, or to another column, does not open. The key id travels with each value, so
keys can rotate: the first key of the ring seals, every key of the ring opens.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Mapping
from uuid import UUID

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from afluente.errors import AfluenteError

KEY_BYTES = 32
NONCE_BYTES = 12
_KEY_ID = re.compile(r"[A-Za-z0-9_-]{1,32}")


class SecretError(AfluenteError):
    """A key ring that cannot be read, or a value that does not open. Never carries key, plain or sealed bytes."""


class Keyring:
    """The keys of this installation, newest first."""

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        """`keys`: key id to 32 bytes; the first one seals."""
        if not keys:
            raise SecretError("the key ring is empty", hint="set AFLUENTE_SECRETS_KEY to <key id>:<base64 of 32 bytes>")
        for key_id, key in keys.items():
            if not _KEY_ID.fullmatch(key_id):
                raise SecretError(f"key id {key_id!r} is not 1 to 32 of A-Z a-z 0-9 _ -")
            if len(key) != KEY_BYTES:
                raise SecretError(f"key {key_id!r} has {len(key)} bytes, not {KEY_BYTES}")
        self._ciphers = {key_id: AESGCM(key) for key_id, key in keys.items()}
        self._sealing_id = next(iter(keys))

    @classmethod
    def parse(cls, text: str) -> Keyring:
        """Read "<key id>:<base64 of 32 bytes>", several separated by commas, the sealing one first."""
        keys: dict[str, bytes] = {}
        for number, part in enumerate(filter(None, (part.strip() for part in text.split(","))), start=1):
            key_id, colon, encoded = part.partition(":")
            if not colon:
                raise SecretError(f"key number {number} is not <key id>:<base64 of {KEY_BYTES} bytes>")
            if key_id in keys:
                raise SecretError(f"key id {key_id!r} appears twice")
            try:
                keys[key_id] = base64.b64decode(encoded, validate=True)
            except (binascii.Error, ValueError):
                raise SecretError(f"key {key_id!r} is not base64") from None
        return cls(keys)

    @staticmethod
    def generate(key_id: str = "k1") -> str:
        """The text of a ring with one new random key, for `parse`."""
        return f"{key_id}:{base64.b64encode(os.urandom(KEY_BYTES)).decode()}"

    def seal(self, plain: bytes, *, organization_id: UUID | str, purpose: str) -> str:
        """Encrypt `plain` for one organization and one purpose. Two calls give two different texts."""
        nonce = os.urandom(NONCE_BYTES)
        sealed = self._ciphers[self._sealing_id].encrypt(nonce, plain, _bound(organization_id, purpose))
        return f"{self._sealing_id}.{base64.urlsafe_b64encode(nonce + sealed).decode()}"

    def open(self, sealed: str, *, organization_id: UUID | str, purpose: str) -> bytes:
        """The plain bytes. SecretError when the value was changed, or sealed for another organization or purpose."""
        key_id, dot, encoded = sealed.partition(".")
        cipher = self._ciphers.get(key_id)
        if not dot or cipher is None:
            raise SecretError(
                f"the secret was sealed with key {key_id[:32]!r}, which is not in the ring"
                if dot
                else "not a sealed value",
                hint="add the key that sealed it to AFLUENTE_SECRETS_KEY",
            )
        try:
            # altchars with validate: urlsafe_b64decode skips foreign characters, and a changed value must not open
            raw = base64.b64decode(encoded, altchars=b"-_", validate=True)
            return cipher.decrypt(raw[:NONCE_BYTES], raw[NONCE_BYTES:], _bound(organization_id, purpose))
        except (InvalidTag, binascii.Error, ValueError):
            raise SecretError(
                f"a secret for {purpose!r} does not open: changed, or sealed for another organization"
            ) from None


def _bound(organization_id: UUID | str, purpose: str) -> bytes:
    # UUID() makes the text canonical, so that upper case and lower case bind alike
    return f"{UUID(str(organization_id))}\x00{purpose}".encode()
