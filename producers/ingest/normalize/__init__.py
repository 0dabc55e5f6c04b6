"""What a stored delivery means: raw body and headers in, facts out.

Pure functions, one module for each sender; no clock, no I/O. Every delivery ends in a named outcome: `processed` with
its facts, `ignored` (understood, and nothing for us), or `unrecognised` (kept, shown, replayable). A shape that is
not understood never raises: `normalize` turns it into `unrecognised`.

What must stay true: only the few fields that a mapping needs are required; unknown extra fields, new enum values and
absent optional ones are normal. Amounts come from text or integers, never through a float.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping

from producers.ingest.normalize.document import Document, Malformed, read_document
from producers.ingest.normalize.facts import ContactEvent, Context, Normalized, unrecognised

_MODULES: Mapping[str, str] = {
    name: f"producers.ingest.normalize.{name}"
    for name in ("shopify", "stripe", "nuvemshop", "whatsapp", "waha", "evolution", "hotmart", "typeform", "generic")
}

# An event holds 256 KiB. Bodies below the first bound cannot lead there: each field stands in a fact at most twice.
LARGE_BYTES, MAX_PROPERTIES_BYTES = 32 * 1024, 192 * 1024

FETCHED_TOPICS = ("order/", "customer/")

Normalizer = Callable[[Document, Mapping[str, str], Context], Normalized]


def needs_fetch(source: object, topic: object) -> bool:
    """Whether a delivery only says where to look: its facts are at the sender's API."""
    return source == "nuvemshop" and isinstance(topic, str) and topic.startswith(FETCHED_TOPICS)


def normalize(source: str, body: bytes, headers: Mapping[str, str], context: Context) -> Normalized:
    """The facts of one delivery. `headers` are lower-case; `context` says which connection it came through, when."""
    module = _MODULES.get(source)
    if module is None:
        return unrecognised("unknown_source")
    found: Normalizer = importlib.import_module(module).normalize
    document = read_document(body)
    if document is None:
        return unrecognised("not_json")
    try:
        result = found(document, headers, context)
        return unrecognised("too_large") if len(body) > LARGE_BYTES and _too_large(result) else result
    except Malformed as problem:
        return unrecognised(f"unknown_shape:{problem.path}"[:255])
    except RecursionError:
        # Nested just so deeply that it can be read but not written again.
        return unrecognised("nested_too_deeply")


def _too_large(result: Normalized) -> bool:
    """Whether a fact is too much for an event, whatever its sender put into it."""
    return any(
        isinstance(fact, ContactEvent) and len(json.dumps(fact.properties, default=str)) > MAX_PROPERTIES_BYTES
        for fact in result.facts
    )
