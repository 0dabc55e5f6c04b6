"""What an automation is: its trigger, its conditions, its steps. Read from JSON, checked whole, and kept as given.

What must stay true: what `read` takes can be carried out, as far as that can be known beforehand; a definition that was
stored is read again with the same outcome, so checks are only ever loosened.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit
from uuid import UUID

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from consumers.automations import conditions, text, times
from consumers.automations.errors import BadDefinition
from schemas.contact_events import (
    CONTACT_EVENT_TYPES,
    SCHEDULE_TRIGGER_METRIC,
    TRIGGER_TO_METRIC,
    WEBHOOK_TRIGGER_METRIC,
)

MAX_STEPS = 50
MAX_BODY = 4096
MAX_BYTES, MAX_DATA_DEPTH = 128 * 1024, 30
SIGNING = "signing"

# Events of the bus that may start an automation besides contact events: those that the catalogue gives to automations.
EVENT_TRIGGERS = (
    "lead.stage_changed",
    "lead.won",
    "lead.lost",
    "message.received",
    "nuvemshop.order_paid",
    "nuvemshop.cart_abandoned",
    "system.window_24h_expired",
)

_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}\Z")
_HEADER_VALUE = re.compile(r"[!-~]([ -~]{0,2000}[!-~])?\Z")
_SECRET = re.compile(r"[a-z][a-z0-9_]{0,62}\Z")
# Said by us, or they would say where the call goes and how long it is.
_OWN_HEADERS = (
    "host",
    "content-length",
    "content-type",
    "transfer-encoding",
    "connection",
    "accept-encoding",
    "expect",
)


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


def _checked_text(value: str) -> str:
    text.parse(value)
    return value


def _without_links(value: str) -> str:
    if any(isinstance(part, text.Link) for part in text.parse(value)):
        raise ValueError("a link has its place in the body of send_message only")
    return value


Text = Annotated[str, AfterValidator(_checked_text)]
PlainText = Annotated[str, AfterValidator(_without_links)]
ConditionField = Annotated[Any, BeforeValidator(lambda raw: None if raw is None else conditions.parse(raw))]
Cron = Annotated[str, AfterValidator(lambda value: (times.Cron.parse(value), value)[1])]
Zone = Annotated[str, AfterValidator(lambda value: (times.zone(value), value)[1])]
Span = Annotated[str, AfterValidator(lambda value: (times.span(value), value)[1])]
Until = Annotated[str, AfterValidator(lambda value: (times.check_until(value), value)[1])]


class NamedTrigger(_Model):
    """One of the metrics seed's trigger types that a metric stands for."""

    type: Literal[
        "order_created",
        "order_paid",
        "checkout_created",
        "cart_abandoned",
        "tracking_updated",
        "message_received",
        "new_contact",
        "tag_added",
    ]


class MetricTrigger(_Model):
    """A contact event with this metric; any name, since tenants have metrics of their own."""

    type: Literal["metric"]
    metric: Annotated[str, Field(min_length=1, max_length=100)]

    @model_validator(mode="after")
    def _a_metric(self) -> MetricTrigger:
        if self.metric in (WEBHOOK_TRIGGER_METRIC, SCHEDULE_TRIGGER_METRIC):
            raise ValueError(f"{self.metric} is no metric: write the type {self.metric.strip('_')}")
        return self


class ContactEventTrigger(_Model):
    """A contact event of this type."""

    type: Literal["contact_event"]
    event_type: str

    @model_validator(mode="after")
    def _known(self) -> ContactEventTrigger:
        if self.event_type not in CONTACT_EVENT_TYPES:
            raise ValueError(f"there is no contact event type {self.event_type!r}: {', '.join(CONTACT_EVENT_TYPES)}")
        return self


class EventTrigger(_Model):
    """An event of the bus, such as lead.stage_changed."""

    type: Literal["event"]
    event_type: Literal[EVENT_TRIGGERS]  # type: ignore[valid-type]  # a tuple of literals, which mypy does not read


class ContactPaths(_Model):
    """Where a webhook's body says whom it is about. Only contacts that are known are found."""

    phone: str | None = None
    email: str | None = None


class WebhookTrigger(_Model):
    """A delivery that came in, from one connection or of one source, and of one topic if that is said."""

    type: Literal["webhook"]
    channel: UUID | None = None
    source: str | None = None
    topic: str | None = None
    contact: ContactPaths = ContactPaths()

    @model_validator(mode="after")
    def _one_sender(self) -> WebhookTrigger:
        if self.channel is None and self.source is None:
            raise ValueError("a webhook trigger has a channel or a source: every delivery of every sender is too many")
        return self


class Audience(_Model):
    """The contacts that have a tag."""

    tag: Annotated[str, Field(min_length=1, max_length=100)]


class ScheduleTrigger(_Model):
    """The times of a cron expression, in the organization's time zone or another. One run for nobody, or one for each
    contact of the audience that the conditions hold for."""

    type: Literal["schedule"]
    cron: Cron
    timezone: Zone | None = None
    audience: Literal["none", "contacts"] | Audience = "none"


Trigger = Annotated[
    NamedTrigger | MetricTrigger | ContactEventTrigger | EventTrigger | WebhookTrigger | ScheduleTrigger,
    Field(discriminator="type"),
]


class _Step(_Model):
    name: Annotated[str, Field(max_length=100)] | None = None
    when: ConditionField = None
    """The step is skipped unless it holds at that moment."""


class SendMessage(_Step):
    """Queue a message to the contact. `{{ link: https://... }}` becomes a tracked link."""

    type: Literal["send_message"]
    body: Annotated[Text, Field(min_length=1, max_length=MAX_BODY)]
    channel: UUID | None = None


class SendTemplate(_Step):
    """Queue an approved template to the contact."""

    type: Literal["send_template"]
    template: Annotated[str, Field(min_length=1, max_length=255)]
    language: str = "pt_BR"
    parameters: Annotated[list[PlainText], Field(max_length=50)] = []
    channel: UUID | None = None


class AddTag(_Step):
    type: Literal["add_tag"]
    tag: Annotated[str, Field(min_length=1, max_length=100)]


class RemoveTag(_Step):
    type: Literal["remove_tag"]
    tag: Annotated[str, Field(min_length=1, max_length=100)]


class CloseConversation(_Step):
    """Resolve the contact's open conversations."""

    type: Literal["close_conversation"]
    note: Annotated[PlainText, Field(max_length=1000)] | None = None


class AiRespond(_Step):
    """Ask the bot to answer in the contact's conversation."""

    type: Literal["ai_respond"]
    instructions: Annotated[PlainText, Field(max_length=MAX_BODY)] | None = None
    channel: UUID | None = None


class Secret(_Model):
    """A header's value that is kept sealed, by its name."""

    secret: str

    @model_validator(mode="after")
    def _named(self) -> Secret:
        if not _SECRET.match(self.secret) or self.secret == SIGNING:
            raise ValueError(f"a secret's name is of a-z, 0-9 and _, and not {SIGNING!r}")
        return self


class CallWebhook(_Step):
    """POST to an address outside, signed as outgoing webhooks are. on_error: what the run does once it has failed for
    good."""

    type: Literal["call_webhook"]
    url: Annotated[str, Field(max_length=2048)]
    headers: dict[str, str | Secret] = {}
    data: Any = None
    on_error: Literal["stop", "continue"] = "stop"

    @model_validator(mode="after")
    def _callable(self) -> CallWebhook:
        if not re.match(r"https?://[^/\s]", self.url):
            raise ValueError("the url begins with https:// (or http://, where that is called)")
        urlsplit(self.url)  # its host is asked for when the step runs: raises ValueError for "http://[::1"
        for name, value in self.headers.items():
            lower = name.lower()
            if not _HEADER.match(name):
                raise ValueError(f"{name!r} is no name of a header")
            if lower in _OWN_HEADERS or lower.startswith(("webhook-", "x-webhook-")):
                raise ValueError(f"the header {name} is ours to set")
            if isinstance(value, str) and not _HEADER_VALUE.match(value):
                raise ValueError(f"the header {name} has a value that is not one line of printable ASCII")
        if _depth(self.data) > MAX_DATA_DEPTH:
            raise ValueError(f"the data is nested deeper than {MAX_DATA_DEPTH} levels")
        for found in _texts(self.data):
            _without_links(found)
        return self


class Wait(_Step):
    """Go on after a span ("2h", "1d12h"), or at a time ("09:00", "2026-12-24T09:00") in the organization's zone."""

    type: Literal["wait"]
    span: Span | None = Field(None, alias="for")
    until: Until | None = None

    @model_validator(mode="after")
    def _one(self) -> Wait:
        if (self.span is None) == (self.until is None):
            raise ValueError("a wait has 'for' or 'until', one of them")
        return self


Step = Annotated[
    SendMessage | SendTemplate | AddTag | RemoveTag | CloseConversation | AiRespond | CallWebhook | Wait,
    Field(discriminator="type"),
]


class Definition(_Model):
    """An automation as people write it."""

    name: Annotated[str, Field(min_length=1, max_length=100)]
    description: Annotated[str, Field(max_length=1000)] = ""
    trigger: Trigger
    conditions: ConditionField = None
    steps: Annotated[list[Step], Field(min_length=1, max_length=MAX_STEPS)]

    @model_validator(mode="after")
    def _fits(self) -> Definition:
        if isinstance(self.trigger, ScheduleTrigger) and self.trigger.audience == "none":
            for i, step in enumerate(self.steps):
                if not isinstance(step, CallWebhook | Wait):
                    raise ValueError(
                        f"steps[{i}] ({step.type}) needs a contact, and the schedule has no audience: give the trigger "
                        '"audience": "contacts" or {"tag": "..."}'
                    )
        return self

    @property
    def keys(self) -> tuple[str | None, str | None]:
        """(trigger_metric, trigger_event_type): what automations are found by; one of them is None."""
        match self.trigger:
            case NamedTrigger(type=name):
                return TRIGGER_TO_METRIC[name], None
            case MetricTrigger(metric=metric):
                return metric, None
            case ContactEventTrigger() | EventTrigger():
                return None, self.trigger.event_type
            case WebhookTrigger():
                return WEBHOOK_TRIGGER_METRIC, None
            case ScheduleTrigger():
                return SCHEDULE_TRIGGER_METRIC, None

    @property
    def secrets(self) -> set[str]:
        """The names of the secrets that its headers carry."""
        return {
            value.secret
            for step in self.steps
            if isinstance(step, CallWebhook)
            for value in step.headers.values()
            if isinstance(value, Secret)
        }

    @property
    def calls(self) -> bool:
        """Whether it calls anybody outside."""
        return any(isinstance(step, CallWebhook) for step in self.steps)


def read(raw: Any) -> Definition:
    """The definition that JSON is. BadDefinition lists everything that is wrong, each with its place."""
    if not isinstance(raw, Mapping):
        raise BadDefinition([("", "a definition is an object with name, trigger and steps")])
    try:
        size = len(json.dumps(raw, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        raise BadDefinition([("", "is no JSON that can be kept: it holds NaN or is nested too deeply")]) from None
    if size > MAX_BYTES:
        raise BadDefinition([("", f"is {size} bytes long; at most {MAX_BYTES}")])
    try:
        return Definition.model_validate(raw)
    except ValidationError as error:
        problems = []
        for detail in error.errors(include_input=False, include_url=False):
            what = str(detail["msg"]).removeprefix("Value error, ")
            if detail["type"] == "extra_forbidden":
                what = "is not known here"
            elif detail["type"] == "missing":
                what = "is missing"
            elif detail["type"] == "union_tag_invalid":
                given = detail["ctx"]
                what = f"{given['tag']!r} is not one of {given['expected_tags']}"
            problems.append((_place(detail["loc"]), what))
        raise BadDefinition(problems) from None


def _place(location: tuple[int | str, ...]) -> str:
    """`steps[2].url`: pydantic's places, without the names of the alternatives it tried."""
    place = ""
    for before, part in zip(("", *location), location, strict=False):
        if isinstance(part, int):
            place += f"[{part}]"
        elif isinstance(before, int) or before == "trigger":
            continue  # the discriminator's value
        elif part not in ("str", "Secret", "Audience") and "[" not in part:
            place += f".{part}" if place else part
    return place


def _depth(value: Any) -> int:
    """How deep lists and objects stand in each other."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, Mapping | list)]:
        depth += 1
        level = [inner for each in level for inner in (each.values() if isinstance(each, Mapping) else each)]
    return depth


def _texts(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case Mapping():
            for each in value.values():
                yield from _texts(each)
        case list():
            for each in value:
                yield from _texts(each)
