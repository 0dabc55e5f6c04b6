"""The catalogue as an AsyncAPI 3 document: a channel for each topic, a message for each schema.

Made from the committed schemas and the topic declaration, never by hand. What must stay true: the same inputs give the
same bytes; every payload is a reference to a committed ``.avsc``, so that the document cannot say anything else than
the wire does.
"""

import json
from typing import Any

from schemas import published
from schemas.consumption import CONSUMED_BY
from schemas.contact_events import CONTACT_EVENT_TYPES
from schemas.published import CONTACT_EVENT, CUSTOM, Published
from schemas.topics import FAMILIES, family_of

DOCUMENT_FILE = "asyncapi.json"

_AVRO = "application/vnd.apache.avro+json;version=1.9.0"

_FAMILY_DOC = {
    "lead": "Deals in a pipeline.",
    "lead-activity": "What is done about a deal.",
    "contact": "Persons: known, merged, blocked, forgotten.",
    "message": "What is said on WhatsApp, and what became of it.",
    "conversation": "Conversations: opened, given, resolved.",
    "ai": "What the bot said, cost and noticed.",
    "nuvemshop": "A connected shop's orders, carts and products.",
    "lgpd": "Consent and the requests of the data subject.",
    "system": "The runtime about itself.",
    "webhook": "Deliveries that came in, and those that could not go out.",
    "kb": "The knowledge base that the bot reads.",
    "campaign": "Templates that go out to many contacts.",
    "contact-event": "Append-only facts about contacts, by contact event type.",
    "custom": "Event types that the catalogue does not know.",
}


def document() -> dict[str, Any]:
    """The whole document as JSON."""
    newest = [entry for entry in published.all_published() if entry in _of_its_kind(entry)]
    channels: dict[str, Any] = {}
    for family in FAMILIES:
        entries = [entry for entry in newest if _family(entry) == family]
        channels[family] = {
            "address": f"events.{family}",
            "title": f"events.{family}",
            "description": f"{_FAMILY_DOC[family]} Key: the organization id as text.",
            "messages": {_key(entry): {"$ref": f"#/components/messages/{_key(entry)}"} for entry in entries},
            "bindings": {"kafka": {"topic": f"events.{family}", "bindingVersion": "0.5.0"}},
        }
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Afluente",
            "version": "1.0.0",
            "description": (
                "Every event that is committed to event_log and published by the relay. Values are Avro in Confluent's "
                "wire format; the schema id is 0x40000000 plus x-schema-number unless a schema registry is configured."
            ),
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/vnd.confluent.avro",
        "channels": channels,
        "operations": {
            f"publish-{family}": {
                "action": "send",
                "channel": {"$ref": f"#/channels/{family}"},
                "summary": "The relay publishes committed rows, once and in causal order.",
            }
            for family in FAMILIES
        },
        "components": {
            "messages": {_key(entry): _message(entry) for entry in newest},
            "messageTraits": {"cloudEvent": {"headers": _HEADERS}},
        },
    }


def render() -> str:
    """The bytes of the committed file, as text."""
    return json.dumps(document(), indent=2, ensure_ascii=False) + "\n"


_HEADERS = {
    "type": "object",
    "required": ["ce_specversion", "ce_id", "ce_type", "ce_source", "ce_time", "ce_subject"],
    "properties": {
        "ce_specversion": {"type": "string", "const": "1.0"},
        "ce_id": {"type": "string", "format": "uuid"},
        "ce_type": {"type": "string", "description": "the event type"},
        "ce_source": {"type": "string", "description": "/organizations/<organization id>"},
        "ce_time": {"type": "string", "format": "date-time", "description": "when the row was committed, microseconds"},
        "ce_subject": {"type": "string", "description": "<entity kind>/<entity id>, or the kind alone"},
        "content-type": {"type": "string", "const": "application/vnd.confluent.avro"},
        "traceparent": {"type": "string", "description": "W3C trace context, when the emitter had one"},
        "x-request-id": {"type": "string"},
        "seq": {"type": "string", "description": "place in event_log; only on records of the relay"},
    },
}


def _message(entry: Published) -> dict[str, Any]:
    schema = entry.schema()
    message: dict[str, Any] = {
        "name": entry.name,
        "title": " ".join(part for part in (entry.event_type, entry.variant) if part),
        "summary": schema["doc"],
        "contentType": "application/vnd.confluent.avro",
        "traits": [{"$ref": "#/components/messageTraits/cloudEvent"}],
        "payload": {"schemaFormat": _AVRO, "schema": {"$ref": f"avro/{entry.file}"}},
        "x-event-type": entry.event_type,
        "x-schema-version": entry.version,
        "x-schema-number": entry.number,
        "x-consumed-by": [f"{name}-worker" for name in CONSUMED_BY.get(entry.event_type, ("webhook-dispatch",))],
    }
    until = published.accepted_until(entry.event_type, entry.variant, entry.major)
    if until is not None:
        message["x-accepted-until"] = until.isoformat()
    if entry.event_type == CONTACT_EVENT and entry.variant:
        known = CONTACT_EVENT_TYPES[entry.variant]
        message["x-contact-event-category"] = known.category
        if known.metric is not None:
            message["x-metric"] = known.metric
    return message


def _of_its_kind(entry: Published) -> tuple[Published, ...]:
    return published.current(entry.event_type, entry.variant)


def _family(entry: Published) -> str:
    return "custom" if entry.event_type == CUSTOM else family_of(entry.event_type)


def _key(entry: Published) -> str:
    """The last two parts of the version are left out: a message keeps its place when its schema grows."""
    name = ".".join(part for part in (entry.event_type, entry.variant) if part)
    return f"{name}.v{entry.major}"
