"""Every event type, its majors and their models; the models of the contact events.

What must stay true: each type's newest major is what new code emits; every older major still listed has an upcaster to
the next one. ``schemas.generate`` makes the committed ``.avsc`` files from here.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import create_model

from schemas.envelope import FIRST_MAJOR, Event, major_of
from schemas.errors import UnknownEventType
from schemas.events import (
    ai,
    campaign,
    contact,
    contact_event,
    conversation,
    kb,
    lead,
    lgpd,
    message,
    nuvemshop,
    system,
    webhook,
)
from schemas.events.base import Payload
from schemas.published import CONTACT_EVENT

Upcaster = Callable[[dict[str, Any]], dict[str, Any]]

_FAMILIES = (lead, contact, message, conversation, ai, nuvemshop, lgpd, system, webhook, kb, campaign)

# Event type -> its newest model.
EVENTS: dict[str, type[Payload]] = {
    **{event_type: model for family in _FAMILIES for event_type, model in family.EVENTS.items()},
    CONTACT_EVENT: contact_event.Recorded,
}

# Event type -> the models of all its majors, oldest first; types that are not here have had one.
MAJORS: dict[str, tuple[type[Payload], ...]] = {
    "kb.document_changed": (kb.DocumentChangedV1, kb.DocumentChanged),
}

# (event type, major) -> how its payload is brought to the next major.
UPCASTERS: dict[tuple[str, int], Upcaster] = {
    ("kb.document_changed", 1): kb.document_changed_v1_to_v2,
}


@dataclass(frozen=True, slots=True)
class Contract:
    """One schema to be had: an event type in one major, for contact events in one variant ('' is the generic one)."""

    event_type: str
    variant: str
    major: int
    model: type[Payload]
    properties: type[Payload] | None


def majors(event_type: str) -> tuple[type[Payload], ...]:
    """The models of an event type, major 1 first. Raises UnknownEventType."""
    if event_type in MAJORS:
        return MAJORS[event_type]
    if event_type in EVENTS:
        return (EVENTS[event_type],)
    raise UnknownEventType(f"{event_type!r} is not in the catalogue; it travels as a custom event")


def contracts() -> Iterator[Contract]:
    """Every schema of the catalogue, in a stable order; new ones go where they belong, numbers are kept elsewhere."""
    for event_type in EVENTS:
        for major, model in enumerate(majors(event_type), FIRST_MAJOR):
            if event_type == CONTACT_EVENT:
                yield Contract(event_type, "", major, model, contact_event.Metric)
                for variant, properties in contact_event.PROPERTIES.items():
                    yield Contract(event_type, variant, major, model, properties)
            else:
                yield Contract(event_type, "", major, model, None)


def upcast(event_type: str, payload: dict[str, Any], major: int) -> dict[str, Any]:
    """The payload as the newest major has it; the given one is not changed."""
    for step in range(major, len(majors(event_type))):
        payload = UPCASTERS[event_type, step](payload)
    return payload


def model_of(event: Event) -> Payload:
    """The typed payload of an event, see ``Event.data``."""
    if event.event_type not in EVENTS:
        return Payload.model_validate(event.payload)
    stated = major_of(event.metadata)
    known = majors(event.event_type)
    if stated is None:
        stated = next((m for m in range(len(known), 1, -1) if _fits(known[m - 1], event.payload)), FIRST_MAJOR)
    payload = upcast(event.event_type, event.payload, stated)
    if event.event_type == CONTACT_EVENT:
        return _recorded(payload.get("contact_event_type")).model_validate(payload)
    return EVENTS[event.event_type].model_validate(payload)


@cache
def _recorded(contact_event_type: str | None) -> type[Payload]:
    """``Recorded`` with the properties of one contact event type."""
    properties = contact_event.PROPERTIES.get(contact_event_type or "", contact_event.Metric)
    return create_model("Recorded", __base__=contact_event.Recorded, properties=(properties, ...))


def _fits(model: type[Payload], payload: dict[str, Any]) -> bool:
    required = {f.alias or name for name, f in model.model_fields.items() if f.is_required()}
    return required <= payload.keys()
