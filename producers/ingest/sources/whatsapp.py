"""WhatsApp Cloud API: one POST holds many changes, of several numbers and even several accounts.

Each change names its number (`metadata.phone_number_id`) and goes to the channel of that number, whoever's address it
was posted to; a change without a number names the account (`waba:<id>`). A part holds the changes of one number, in
the sender's envelope. Its key is a hash over what is in it: a wamid carries the person's phone number.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from producers.ingest import signature
from producers.ingest.sources import UNKNOWN, Part, Source, read_object, sha256, topic_of

HEADER = "x-hub-signature-256"
ACCOUNT_PREFIX = "waba:"
MAX_ENVELOPE = 200


def route(body: bytes, headers: Mapping[str, str], url_topic: str | None) -> list[Part]:
    try:
        parts = _parts(read_object(body) or {})
    except RecursionError:
        # Nested just so deeply that it can be read but not written again.
        parts = []
    return parts or [Part(topic=UNKNOWN, dedupe_key=f"body-{sha256(body)}")]


def _parts(document: dict[str, Any]) -> list[Part]:
    numbers: dict[str | None, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for entry, change in _changes(document):
        numbers.setdefault(_number(entry, change), []).append((entry, change))
    return [_part(document, number, found, whole=len(numbers) == 1) for number, found in numbers.items()]


def _part(
    document: dict[str, Any], number: str | None, found: list[tuple[dict[str, Any], dict[str, Any]]], whole: bool
) -> Part:
    counts: Counter[str] = Counter()
    items: list[str] = []
    for _, change in found:
        for kind, name in _items(change):
            counts[kind] += 1
            items.append(name)
    fields = {topic_of(change.get("field")) for _, change in found}
    own = None if whole else json.dumps({**_envelope(document), "entry": _entries(found)}).encode()
    return Part(
        topic=fields.pop() if len(fields) == 1 else "mixed",
        dedupe_key="sha256:" + sha256("\n".join(sorted(items)).encode("utf-8", "replace")),
        external_id=number,
        body=own,
        summary=dict(counts),
    )


def _changes(document: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    entries = document.get("entry")
    for entry in entries if isinstance(entries, list) else []:
        changes = entry.get("changes") if isinstance(entry, dict) else None
        for change in changes if isinstance(changes, list) else []:
            if isinstance(change, dict):
                yield entry, change


def _entries(found: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[dict[str, Any]]:
    """The changes in their entries again, other numbers' left out."""
    entries: dict[int, dict[str, Any]] = {}
    for entry, change in found:
        entries.setdefault(id(entry), {**_envelope(entry), "changes": []})["changes"].append(change)
    return list(entries.values())


def _envelope(around: dict[str, Any]) -> dict[str, Any]:
    """What each part repeats: `object`, an entry's `id` and `time`. Short, or many parts would be many times a body."""
    return {
        name: value
        for name in ("object", "id", "time")
        if isinstance(value := around.get(name), str | int) and len(str(value)) <= MAX_ENVELOPE
    }


def _number(entry: dict[str, Any], change: dict[str, Any]) -> str | None:
    value = change.get("value")
    metadata = value.get("metadata") if isinstance(value, dict) else None
    number = metadata.get("phone_number_id") if isinstance(metadata, dict) else None
    if isinstance(number, str) and number:
        return number
    account = entry.get("id")
    return f"{ACCOUNT_PREFIX}{account}" if isinstance(account, str) and account else None


def _items(change: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What a change holds: kind, and a name that is the same each time Meta sends it."""
    value, field = change.get("value"), change.get("field")
    # The same message told as history, or as an echo, is another thing that is said of it.
    told_as = "" if field == "messages" else f"{field}:"
    named = False
    if isinstance(value, dict):
        for kind in ("messages", "message_echoes", "statuses"):
            items = value.get(kind)
            for item in items if isinstance(items, list) else []:
                if isinstance(item, dict) and isinstance(item.get("id"), str):
                    named = True
                    yield kind, f"{told_as}{kind}:{item['id']}:{item.get('status', '')}"
    if not named:
        yield "other", f"{change.get('field')}:{sha256(json.dumps(change, sort_keys=True).encode())}"


SOURCE = Source(
    name="whatsapp",
    kind="whatsapp",
    verify=lambda body, headers, secrets, now_s: signature.whatsapp(body, headers.get(HEADER), secrets),
    verify_again=lambda body, headers, secrets: signature.whatsapp(body, headers.get(HEADER), secrets),
    route=route,
    kept_headers=frozenset({HEADER}),
    shared=True,
    challenged=True,
)
