"""The event types that there are, each with the JSON schema of its payload; the contact event types and metrics.

Made from the models that everything else is made from. The same for every organization, and as long as the process
lives.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from afluente.web.api.call import Call
from afluente.web.api.idempotency import Answer
from afluente.web.api.problems import Problem
from producers.owned import table_of
from schemas import catalogue, published
from schemas.contact_events import CONTACT_EVENT_TYPES, METRICS, Labels
from schemas.events.base import Payload
from schemas.events.contact_event import PROPERTIES
from schemas.topics import Topics


async def get(call: Call) -> Answer:
    """All of it."""
    return Answer(200, whole())


async def get_one(call: Call) -> Answer:
    """One event type, or one contact event type."""
    name = call.parameters["event_type"]
    for entry in [*whole()["event_types"], *whole()["contact_event_types"]]:
        if entry["name"] == name:
            return Answer(200, entry)
    raise Problem(
        "not-found",
        f"the catalogue has no event type {name[:100]!r}",
        hint="GET /v1/event-types lists them; types outside the catalogue may be emitted, and have no schema",
    )


@cache
def whole() -> dict[str, Any]:
    """The catalogue as JSON."""
    return {
        "event_types": [
            {
                "name": name,
                "description": _described(model),
                "schema_version": published.current(name, "")[0].version,
                "topic": Topics().event(name),
                "emitted_here": table_of(name) is None,
                "schema": _schema(model),
            }
            for name, model in catalogue.EVENTS.items()
        ],
        "contact_event_types": [
            {
                "name": name,
                "description": _described(model),
                "category": CONTACT_EVENT_TYPES[name].category,
                "metric": CONTACT_EVENT_TYPES[name].metric,
                "labels": _labels(CONTACT_EVENT_TYPES[name].labels),
                "schema": _schema(model),
            }
            for name, model in PROPERTIES.items()
        ],
        "metrics": [
            {
                "name": metric.name,
                "category": metric.category,
                "contact_event_type": metric.contact_event_type,
                "labels": _labels(metric.labels),
            }
            for metric in METRICS.values()
        ],
    }


def _schema(model: type[Payload]) -> dict[str, Any]:
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **model.model_json_schema(mode="validation")}


def _described(model: type[Payload]) -> str:
    return " ".join((model.__doc__ or "").split())


def _labels(labels: Labels) -> dict[str, str]:
    return {"pt-BR": labels.pt_br, "en": labels.en, "es": labels.es}
