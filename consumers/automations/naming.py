"""The fields that an automation names, and whether there are such: one with a typo is never true, and fills in
nothing.

Asked when a definition is written, not when it is read: what was stored stays as good as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from consumers.automations import conditions, text
from consumers.automations.definition import Definition, EventTrigger, ScheduleTrigger, WebhookTrigger
from consumers.automations.errors import BadDefinition

# What `facts` puts there. The event of a trigger by metric or contact event is contact_event.recorded; any other's has
# what its type has.
CONTACT = ("id", "name", "first_name", "phone", "email", "source", "subscriber_state", "created_at", "tags")
MESSAGE = ("text", "type", "direction", "conversation_id")
WEBHOOK = ("source", "topic", "channel_id", "body")
SCHEDULE = ("due_at",)
CONTACT_EVENT = (
    "name",
    "contact_event_id",
    "contact_id",
    "contact_event_type",
    "metric_name",
    "category",
    "source_type",
    "source",
    "external_event_id",
    "unique_event_id",
    "object_id",
    "object_id_ref",
    "entity_type",
    "entity_id",
    "value",
    "currency",
    "occurred_at",
    "received_at",
    "properties",
)


def check(definition: Definition) -> None:
    """Raises BadDefinition for fields that there never are."""
    there: dict[str, tuple[str, ...] | None] = {"contact": CONTACT}
    match definition.trigger:
        case ScheduleTrigger():
            there |= {"schedule": SCHEDULE}
        case WebhookTrigger():
            there |= {"event": None, "webhook": WEBHOOK}
        case EventTrigger():
            there |= {"event": None, "message": MESSAGE}
        case _:
            there |= {"event": CONTACT_EVENT, "message": MESSAGE}
    problems = []
    for place, path in _named(definition):
        first, _, rest = path.partition(".")
        names = there.get(first, ()) if rest else ()
        second = rest.partition(".")[0]
        if names is None or second in names:
            continue
        known = [f"{one}.{name}" for one, of in there.items() for name in (("*",) if of is None else of)]
        near = get_close_matches(path, known, 1) or [f"{first}.{name}" for name in names] or known
        problems.append((place, f"there is no field {path[:200]!r} here: {', '.join(near)}"))
    if problems:
        raise BadDefinition(list(dict.fromkeys(problems)))


def _named(definition: Definition) -> Iterator[tuple[str, str]]:
    """Each field with the place it is named at."""
    if definition.conditions is not None:
        yield from (("conditions", path) for path in _of_condition(definition.conditions))
    for number, step in enumerate(definition.steps):
        place = f"steps[{number}]"
        if step.when is not None:
            yield from ((f"{place}.when", path) for path in _of_condition(step.when))
        for name in ("body", "parameters", "note", "instructions", "data"):
            yield from ((f"{place}.{name}", path) for path in _of_texts(getattr(step, name, None)))


def _of_condition(condition: conditions.Condition) -> Iterator[str]:
    match condition:
        case conditions.Test():
            yield condition.field
        case conditions.Several():
            for part in condition.parts:
                yield from _of_condition(part)
        case conditions.Not():
            yield from _of_condition(condition.part)


def _of_texts(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield from (part.path for part in text.parse(value) if isinstance(part, text.Field))
        case Mapping():
            for each in value.values():
                yield from _of_texts(each)
        case list():
            for each in value:
                yield from _of_texts(each)
