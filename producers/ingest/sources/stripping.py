"""Taking out of a JSON body what must not be kept, and leaving every other byte as it came.

Text is replaced where it stands, not parsed and written again: what is kept is what the sender wrote, with a word in
the place of a secret and a digest in the place of a file. The signature is checked before, over the bytes as received.
"""

from __future__ import annotations

import hashlib
import re

REMOVED = b"removed"
# More than any text a person writes or a thumbnail. Media this long belongs in a store of files, not in a row.
LONGEST_BASE64 = 64 * 1024

_VALUE = rb'(?:"(?:[^"\\]|\\.)*"?|[^\s,"{}\[\]]+)'
_BASE64 = re.compile(rb'"((?:data:[a-z0-9.+/;=-]{0,100},)?)([A-Za-z0-9+/_-]{%d,}={0,2})"' % (LONGEST_BASE64,))


def field(name: str) -> re.Pattern[bytes]:
    """A pattern for the text or number in fields of this name, in any case, at any depth; also one that is cut off."""
    return re.compile(rb'(?i)((?<!\\)"' + re.escape(name.encode()) + rb'"\s*:\s*)' + _VALUE)


def without(body: bytes, secret: re.Pattern[bytes]) -> bytes:
    """The body with `removed` for what the field holds."""
    return secret.sub(rb'\1"' + REMOVED + b'"', body)


def without_files(body: bytes) -> bytes:
    """The body with length and SHA-256 in the place of each file in base64."""
    return body if len(body) < LONGEST_BASE64 else _BASE64.sub(_digest, body)


def _digest(found: re.Match[bytes]) -> bytes:
    text = found[2]
    return b'"%sremoved:%d:sha256:%s"' % (found[1], len(text), hashlib.sha256(text).hexdigest().encode())
