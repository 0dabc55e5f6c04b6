"""The OpenAPI 3.1 document of REST v1: made from the models that validate requests and the table of problems.

What must stay true: the same code gives the same bytes (`openapi.json` is committed, and a test compares), and what the
document promises is what happens: schemathesis calls every operation by it.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any, Final

from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from afluente.web.api.keys import DEFAULT_BURST, DEFAULT_RATE_PER_S, REMEMBERED_S, SCOPES
from afluente.web.api.problems import KINDS, MEDIA_TYPE, TYPES_AT
from afluente.web.api.requests import MAX_BATCH, ContactEventBatch, ContactEventIn, EventBatch, EventIn

DOCUMENT_FILE: Final = "openapi.json"

_ID: Final = "0198c2a4-5f3e-7d61-9c0b-1f6f0d3b8a52"
_UUID: Final = {"type": "string", "format": "uuid", "examples": [_ID]}
_TIME: Final = {"type": "string", "format": "date-time"}
_OPTIONAL_TIME: Final = {"type": ["string", "null"], "format": "date-time"}
_OPTIONAL_TEXT: Final = {"type": ["string", "null"]}
_COUNT: Final = {"type": "integer", "minimum": 0}

_DESCRIPTION: Final = f"""\
Emit events and record facts about contacts from services that have no connection to the database, and read back what
became of them. Everything is done for the organization of the API key.

**Keys.** `Authorization: Bearer afl_...`, made by `afluente api-key create --org ORG --scope events:write`. A key is
shown once. It ends when it expires or is revoked, in every process within {REMEMBERED_S:g} seconds. While a key is
rotated both are valid.

**Happening once.** Send `Idempotency-Key` with every POST. A repeat, after whatever became of the connection, is
answered as the first request was (`Idempotency-Replayed: true`) and does nothing; the same key with another request is
422, and while the first one still runs 409. Keys are the organization's and are kept for 30 days. Beyond the request,
an event has an `idempotency_key` of its own and a contact event its `external_event_id`: what is there already is
`duplicate`.

**Batches.** Up to {MAX_BATCH} items in a POST, written in one transaction in their order. Each is answered for itself:
`accepted`, `duplicate` or `refused` with its problem. An item that is refused does not keep the others from being
written (207); with `all_or_nothing: true` it does (422, nothing is written).

**Limits.** A token for each item written and each request that reads; {DEFAULT_RATE_PER_S:g} come in a second and
{DEFAULT_BURST} are kept, unless the key has limits of its own. The limit holds over all web processes together. What a
batch takes beyond what is left is paid for before the next request. A body has at most 3 MiB, a payload 256 KiB.

**Refusals** are `application/problem+json` (RFC 9457); `type` points into the documentation, `errors` at the fields.
"""


@cache
def document() -> dict[str, Any]:
    """The document as JSON."""
    _, definitions = models_json_schema(
        [(model, "validation") for model in (EventIn, EventBatch, ContactEventIn, ContactEventBatch)],
        ref_template="#/components/schemas/{model}",
    )
    schemas = {**_without_titles(definitions["$defs"]), **_ANSWERS}
    # Whatever an object in a batch is, it is answered by itself: the request stays well formed.
    for batch, items, item in (
        ("EventBatch", "events", "EventIn"),
        ("ContactEventBatch", "contact_events", "ContactEventIn"),
    ):
        schemas[batch]["properties"][items]["items"] = {
            "anyOf": [{"$ref": f"#/components/schemas/{item}"}, {"type": "object"}]
        }
        schemas[batch]["examples"] = [{items: schemas[item]["examples"]}]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Afluente REST",
            "version": "1.0.0",
            "summary": "Events and contact events over HTTP",
            "description": _DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/", "description": "wherever this document was fetched"}],
        "security": [{"apiKey": []}],
        "tags": [
            {"name": "events", "description": "Facts of the organization's systems, for Kafka and the workers."},
            {"name": "contact events", "description": "Append-only facts about contacts."},
            {"name": "catalogue", "description": "The event types and their schemas."},
        ],
        "paths": _paths(),
        "components": {
            "securitySchemes": {
                "apiKey": {
                    "type": "http",
                    "scheme": "bearer",
                    "bearerFormat": "afl_<10>_<38>",
                    "description": "An API key; scopes: " + "; ".join(f"`{s}` {what}" for s, what in SCOPES.items()),
                }
            },
            "schemas": schemas,
            "headers": _HEADERS,
            "responses": {
                str(status): {
                    "description": "; ".join(kind.title for kind in KINDS.values() if kind.status == status),
                    "headers": _headers(*(["Retry-After"] if status in (409, 429, 503) else [])),
                    "content": {
                        MEDIA_TYPE: {
                            "schema": {"$ref": "#/components/schemas/Problem"},
                            "examples": {
                                kind.slug: {"summary": kind.meaning, "value": _problem_example(kind.slug)}
                                for kind in KINDS.values()
                                if kind.status == status
                            },
                        }
                    },
                }
                for status in sorted({kind.status for kind in KINDS.values()})
            },
        },
    }


def render() -> str:
    """The bytes of the committed file, as text."""
    return json.dumps(document(), indent=2, ensure_ascii=False) + "\n"


def answer() -> Response:
    """GET /v1/openapi.json."""
    headers = {"cache-control": "public, max-age=300", "x-content-type-options": "nosniff"}
    return Response(render(), 200, headers, "application/json")


_HEADERS: Final = {
    "X-Request-Id": {"description": "the request's id: yours, if it came with one", "schema": {"type": "string"}},
    "RateLimit-Policy": {"description": 'the key\'s quota: `"key";q=1000;w=10`', "schema": {"type": "string"}},
    "RateLimit": {"description": 'what is left of it: `"key";r=988;t=1`', "schema": {"type": "string"}},
    "Retry-After": {"description": "seconds to wait", "schema": {"type": "integer", "minimum": 1}},
    "Idempotency-Replayed": {"description": "true: the answer of an earlier request", "schema": {"type": "string"}},
    "Location": {"description": "where to read it", "schema": {"type": "string"}},
    "Link": {"description": 'the next page, `rel="next"`', "schema": {"type": "string"}},
}


def _headers(*more: str) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in ("X-Request-Id", *more)}


_READ = (401, 403, 422, 429, 500, 503)
_WRITE = (400, 401, 403, 408, 409, 413, 415, 422, 429, 500, 503)


def _refusals(*statuses: int) -> dict[str, Any]:
    return {str(status): {"$ref": f"#/components/responses/{status}"} for status in sorted(statuses)}


def _reads(name: str, description: str, *, headers: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "200": {
            "description": description,
            "headers": _headers("RateLimit-Policy", "RateLimit", *headers),
            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}},
        }
    }


def _written(what: str) -> dict[str, Any]:
    """The answers to a POST that writes."""
    one = {"$ref": "#/components/schemas/Written"}
    many = {"$ref": "#/components/schemas/BatchAnswer"}
    headers = ("RateLimit-Policy", "RateLimit", "Idempotency-Replayed")
    return {
        "200": {
            "description": f"A batch without a refusal; or one {what} that was there already (`duplicate`).",
            "headers": _headers(*headers, "Location"),
            "content": {"application/json": {"schema": {"oneOf": [one, many]}}},
        },
        "201": {
            "description": f"The {what} is committed.",
            "headers": _headers(*headers, "Location"),
            "content": {"application/json": {"schema": one}},
        },
        "207": {
            "description": "A batch of which something was refused; the rest is committed.",
            "headers": _headers(*headers),
            "content": {"application/json": {"schema": many}},
        },
    }


_REQUEST_HEADERS: Final = [
    {
        "name": "Idempotency-Key",
        "in": "header",
        "description": "names this request: 1 to 255 printable ASCII characters, such as a UUID",
        "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!#-~]+$"},
        "example": "8e03978e-40d5-43dd-bc93-6894a57f9324",
    },
    {
        "name": "X-Request-Id",
        "in": "header",
        "description": "taken over as the request id of everything that is written",
        "schema": {"type": "string"},
    },
    {
        "name": "traceparent",
        "in": "header",
        "description": "W3C trace context, taken over to Kafka",
        "schema": {"type": "string"},
        "example": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    },
]


def _posts(one: str, many: str) -> dict[str, Any]:
    schemas = [{"$ref": f"#/components/schemas/{name}"} for name in (one, many)]
    return {"required": True, "content": {"application/json": {"schema": {"oneOf": schemas}}}}


def _scoped(scope: str) -> str:
    return f"Scope: `{scope}`."


def _id_parameter(what: str) -> dict[str, Any]:
    return {"name": "id", "in": "path", "required": True, "description": f"the {what}'s id", "schema": _UUID}


def _query(name: str, description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "description": description, "schema": schema}


def _paths() -> dict[str, Any]:
    name = {"type": "string", "minLength": 1, "maxLength": 100}
    return {
        "/v1/events": {
            "post": {
                "operationId": "emitEvents",
                "tags": ["events"],
                "summary": "Emit an event, or a batch of them",
                "description": "Committed to event_log as `emit_event` does it; a type of the catalogue has to fit its "
                "schema (GET /v1/event-types). webhook.* and contact_event.* are refused. " + _scoped("events:write"),
                "parameters": _REQUEST_HEADERS,
                "requestBody": _posts("EventIn", "EventBatch"),
                "responses": _written("event") | _refusals(*_WRITE),
            }
        },
        "/v1/events/{id}": {
            "parameters": [_id_parameter("event")],
            "get": {
                "operationId": "getEvent",
                "tags": ["events"],
                "summary": "Read an event and what became of it",
                "description": "`status` is `scheduled` before its time, `pending` or `processing` while a worker that "
                "takes its type has not finished, `dead` when one has given up, else `done`. " + _scoped("events:read"),
                "responses": _reads("Event", "The event") | _refusals(404, *_READ),
            },
            "delete": {
                "operationId": "cancelEvent",
                "tags": ["events"],
                "summary": "Take back an event that waits for its `deliver_at`",
                "description": _scoped("events:write"),
                "responses": {"204": {"description": "It will not be emitted.", "headers": _headers()}}
                | _refusals(404, *_READ),
            },
        },
        "/v1/contact-events": {
            "post": {
                "operationId": "recordContactEvents",
                "tags": ["contact events"],
                "summary": "Record a fact about a contact, or a batch of them",
                "description": "Properties of a contact event type of the catalogue have to fit its schema; other "
                "types and metrics are free. " + _scoped("contact-events:write"),
                "parameters": _REQUEST_HEADERS,
                "requestBody": _posts("ContactEventIn", "ContactEventBatch"),
                "responses": _written("contact event") | _refusals(*_WRITE),
            },
            "get": {
                "operationId": "listContactEvents",
                "tags": ["contact events"],
                "summary": "List contact events, newest first",
                "description": "Of a contact's merged contacts, too. " + _scoped("contact-events:read"),
                "parameters": [
                    _query("contact_id", "of this contact", _UUID),
                    _query("event_type", "of this contact event type", name),
                    _query("metric", "of this metric", name),
                    _query("since", "that happened at or after", _TIME),
                    _query("until", "that happened before", _TIME),
                    _query(
                        "limit", "so many in a page", {"type": "integer", "minimum": 1, "maximum": 200, "default": 50}
                    ),
                    _query("cursor", "`next_cursor` of the page before", {"type": "string"}),
                ],
                "responses": _reads("ContactEventPage", "A page", headers=("Link",)) | _refusals(*_READ),
            },
        },
        "/v1/contact-events/{id}": {
            "parameters": [_id_parameter("contact event")],
            "get": {
                "operationId": "getContactEvent",
                "tags": ["contact events"],
                "summary": "Read a contact event",
                "description": _scoped("contact-events:read"),
                "responses": _reads("ContactEvent", "The contact event") | _refusals(404, *_READ),
            },
        },
        "/v1/event-types": {
            "get": {
                "operationId": "listEventTypes",
                "tags": ["catalogue"],
                "summary": "The event types, contact event types and metrics",
                "description": "Each type with the JSON schema of its payload. Any valid key.",
                "responses": _reads("Catalogue", "The catalogue") | _refusals(401, 429, 500, 503),
            }
        },
        "/v1/event-types/{event_type}": {
            "parameters": [
                {
                    "name": "event_type",
                    "in": "path",
                    "required": True,
                    "description": "an event type or a contact event type",
                    "schema": name,
                    "example": "lead.stage_changed",
                }
            ],
            "get": {
                "operationId": "getEventType",
                "tags": ["catalogue"],
                "summary": "One event type or contact event type",
                "description": "Any valid key.",
                "responses": _reads("EventType", "The event type") | _refusals(401, 404, 429, 500, 503),
            },
        },
    }


def _object(properties: dict[str, Any], *, optional: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, **more}


_LABELS: Final = _object({"pt-BR": {"type": "string"}, "en": {"type": "string"}, "es": {"type": "string"}})
_EVENT_TYPE: Final = _object(
    {
        "name": {"type": "string"},
        "description": {"type": "string"},
        "schema": {"type": "object", "description": "JSON schema (2020-12) of the payload, or of the properties"},
        "schema_version": {"type": "string", "description": "(event types) the newest"},
        "topic": {"type": "string", "description": "(event types) where the relay publishes it"},
        "emitted_here": {"type": "boolean", "description": "(event types) whether POST /v1/events takes it"},
        "category": {"type": "string", "description": "(contact event types)"},
        "metric": {**_OPTIONAL_TEXT, "description": "(contact event types) the metric that names the same facts"},
        "labels": _LABELS,
    },
    optional=("schema_version", "topic", "emitted_here", "category", "metric", "labels"),
)
_CONTACT_EVENT: Final = _object(
    {
        "id": _UUID,
        "contact_id": _UUID,
        "event_type": _OPTIONAL_TEXT,
        "metric": _OPTIONAL_TEXT,
        "source_type": {"type": "string", "enum": ["EXTERNAL", "INTERNAL", "DIRECT"]},
        "source": {"type": "string"},
        "external_event_id": _OPTIONAL_TEXT,
        "unique_event_id": _OPTIONAL_TEXT,
        "object_id": _OPTIONAL_TEXT,
        "object_id_ref": _OPTIONAL_TEXT,
        "entity_type": _OPTIONAL_TEXT,
        "entity_id": _OPTIONAL_TEXT,
        "value": {**_OPTIONAL_TEXT, "description": "a decimal as text"},
        "currency": _OPTIONAL_TEXT,
        "properties": {"type": "object"},
        "occurred_at": _TIME,
        "received_at": _TIME,
    }
)
_ANSWERS: Final[dict[str, Any]] = {
    "Written": _object(
        {"id": _UUID, "status": {"type": "string", "enum": ["accepted", "duplicate"]}},
        examples=[{"id": _ID, "status": "accepted"}],
        additionalProperties=False,
    ),
    "BatchAnswer": _object(
        {
            "accepted": _COUNT,
            "duplicate": _COUNT,
            "refused": _COUNT,
            "results": {
                "type": "array",
                "description": "one for each item, in their order",
                "items": _object(
                    {
                        "index": _COUNT,
                        "status": {"type": "string", "enum": ["accepted", "duplicate", "refused"]},
                        "id": _UUID,
                        "problem": {"$ref": "#/components/schemas/Problem"},
                    },
                    optional=("id", "problem"),
                ),
            },
        },
        additionalProperties=False,
    ),
    "Event": _object(
        {
            "id": _UUID,
            "event_type": {"type": "string"},
            "entity_kind": {"type": "string"},
            "entity_id": {"type": ["string", "null"], "format": "uuid"},
            "payload": {"type": "object"},
            "metadata": {"type": "object"},
            "created_at": _TIME,
            "deliver_at": {**_TIME, "description": "(scheduled) when it will be emitted"},
            "status": {"type": "string", "enum": ["scheduled", "pending", "processing", "done", "dead"]},
            "attempts": _COUNT,
            "deliveries": {
                "type": "array",
                "description": "what each worker has done with it, for each of its targets",
                "items": _object(
                    {
                        "worker": {"type": "string"},
                        "target": {"type": "string"},
                        "state": {
                            "type": "string",
                            "enum": [
                                "claimed",
                                "waiting",
                                "blocked",
                                "done",
                                "skipped",
                                "dead",
                                "needs_review",
                                "discarded",
                            ],
                        },
                        "attempts": _COUNT,
                        "next_attempt_at": _OPTIONAL_TIME,
                        "finished_at": _OPTIONAL_TIME,
                        "updated_at": _TIME,
                    }
                ),
            },
        },
        optional=("deliver_at",),
    ),
    "ContactEvent": _CONTACT_EVENT,
    "ContactEventPage": _object(
        {
            "data": {"type": "array", "items": {"$ref": "#/components/schemas/ContactEvent"}},
            "next_cursor": {**_OPTIONAL_TEXT, "description": "null: this is the last page"},
        }
    ),
    "EventType": _EVENT_TYPE,
    "Catalogue": _object(
        {
            "event_types": {"type": "array", "items": {"$ref": "#/components/schemas/EventType"}},
            "contact_event_types": {"type": "array", "items": {"$ref": "#/components/schemas/EventType"}},
            "metrics": {
                "type": "array",
                "items": _object(
                    {
                        "name": {"type": "string"},
                        "category": {"type": "string"},
                        "contact_event_type": _OPTIONAL_TEXT,
                        "labels": _LABELS,
                    }
                ),
            },
        }
    ),
    "Problem": _object(
        {
            "type": {"type": "string", "format": "uri-reference", "enum": [TYPES_AT + slug for slug in KINDS]},
            "title": {"type": "string"},
            "status": {"type": "integer", "minimum": 400, "maximum": 599},
            "detail": {"type": "string"},
            "hint": {"type": "string", "description": "what to do about it"},
            "request_id": {"type": "string"},
            "errors": {
                "type": "array",
                "items": _object(
                    {
                        "pointer": {
                            "type": "string",
                            "description": "JSON pointer into the body, or ?name in the query",
                        },
                        "detail": {"type": "string"},
                    }
                ),
            },
            "results": {"type": "array", "items": {"type": "object"}, "description": "(batch-refused) by item"},
        },
        optional=("hint", "request_id", "errors", "results"),
        description="RFC 9457",
    ),
}


def _problem_example(slug: str) -> dict[str, Any]:
    kind = KINDS[slug]
    return {
        "type": TYPES_AT + slug,
        "title": kind.title,
        "status": kind.status,
        "detail": "says what is wrong with this request",
        "request_id": "5f0c1a1e-6d7b-4a7e-9b1e-0f6f0d3b8a52",
    }


def _without_titles(value: Any, *, names: bool = False) -> Any:
    """Without the titles that pydantic makes of names; `names`: the keys are names of fields."""
    if isinstance(value, dict):
        return {
            key: _without_titles(item, names=not names and key in ("properties", "$defs"))
            for key, item in value.items()
            if names or key != "title" or not isinstance(item, str)
        }
    return [_without_titles(item) for item in value] if isinstance(value, list) else value
