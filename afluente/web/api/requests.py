"""The bodies that requests may have: the models that validate them, and that the OpenAPI document shows.

What must stay true: nothing is coerced (a number is no text, a time without an offset is no time), and a field that
nobody declared is refused, so that a mistyped name is told and not ignored. Only `payload` and `properties` are free
here; their schemas are the catalogue's.
"""

from __future__ import annotations

import re
from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)

from producers.ingest.normalize import facts, phone
from schemas.contact_events import CONTACT_EVENT_TYPES

MAX_BATCH = 500
MAX_UNKNOWN = 20

_AMOUNT = re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,12})?\Z")
_WORD = r"^[a-z][a-z0-9_]*$"
_TYPE = r"^[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*$"


def _storable(value: str) -> str:
    if "\0" in value or (not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value)):
        raise ValueError("has a NUL or half a character, which Postgres cannot keep")
    return value


def _canonical_id(value: Any) -> Any:
    """UUIDs in the one form that we write: not in braces, not as urn:uuid."""
    if not isinstance(value, str) or len(value) != 36:
        raise ValueError("must be a UUID as text, such as 0198c2a4-5f3e-7d61-9c0b-1f6f0d3b8a52")
    return value


def _moment(value: Any) -> Any:
    # pydantic would take numbers, and texts of numbers, for seconds
    if not isinstance(value, str) or "T" not in value.upper():
        raise ValueError("must be a time in ISO 8601 with its offset, such as 2026-11-30T12:00:00-03:00")
    return value


def _within_years(value: datetime) -> datetime:
    if not 1970 <= value.year <= 2200:
        raise ValueError("must lie between 1970 and 2200")
    return value


def _amount(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError('must be a decimal, as text ("297.90") or a number')
    if isinstance(value, str) and _AMOUNT.match(value) is None:
        raise ValueError('must be a decimal, as text ("297.90") or a number')
    return repr(value) if isinstance(value, float) else value


Id = Annotated[UUID, BeforeValidator(_canonical_id), WithJsonSchema({"type": "string", "format": "uuid"})]
Moment = Annotated[
    AwareDatetime,
    BeforeValidator(_moment),
    AfterValidator(_within_years),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
Amount = Annotated[
    Decimal,
    BeforeValidator(_amount),
    Field(max_digits=30, decimal_places=12, allow_inf_nan=False),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": r"^-?[0-9]{1,18}(\.[0-9]{1,12})?$"},
                {"type": "number"},
            ]
        }
    ),
]


Text100 = Annotated[str, Field(min_length=1, max_length=100), AfterValidator(_storable)]
Text255 = Annotated[str, Field(min_length=1, max_length=255), AfterValidator(_storable)]
Free = Annotated[dict[str, Any], Field(description="a JSON object; its schema is the event type's")]
Key = Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[\x21-\x7e]+$")]


def _given(name: str, kind: str) -> dict[str, Any]:
    """The JSON schema of: this field is there, and not null."""
    return {"required": [name], "properties": {name: {"type": kind}}}


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _is_mostly_known(cls, value: Any) -> Any:
        # Each field that nobody knows is a complaint of its own: of a hundred thousand one is enough.
        if isinstance(value, dict) and len(value) > len(cls.model_fields) + MAX_UNKNOWN:
            raise ValueError(f"has {len(value)} fields; there are {len(cls.model_fields)}")
        return value


class CausedBy(Model):
    """What led to an event: the event whose handling emits it, and the number of such steps."""

    event_id: Annotated[Id, Field(description="the id of that event")]
    depth: Annotated[int, Field(strict=True, ge=1, le=100)] = 1


class EventIn(Model):
    """A fact to be committed to event_log, under the API key's organization."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "event_type": "loyalty.points_earned",
                    "entity_kind": "loyalty_account",
                    "entity_id": "0198c2a4-5f3e-7d61-9c0b-1f6f0d3b8a52",
                    "payload": {"points": 120, "reason": "order 1001"},
                    "source": "loyalty-service",
                }
            ]
        }
    )

    event_type: Annotated[
        str,
        Field(max_length=100, pattern=_TYPE, description="{entity}.{action}; a type of the catalogue, or your own"),
    ]
    entity_kind: Annotated[str, Field(max_length=100, pattern=_WORD, description="what the event is about")]
    entity_id: Annotated[Id | None, Field(description="its id")] = None
    payload: Free = {}
    source: Annotated[Text100 | None, Field(description="the service that says so; default: api")] = None
    actor_id: Annotated[Text255 | None, Field(description="who did it; default: the API key")] = None
    schema_version: Annotated[
        str | None,
        Field(
            max_length=50,
            pattern=r"^[0-9]{1,9}\.[0-9]{1,9}\.[0-9]{1,9}$",
            description="of the payload; default: the newest that it fits",
        ),
    ] = None
    caused_by: Annotated[CausedBy | None, Field(description="what led to it")] = None
    deliver_at: Annotated[
        Moment | None, Field(description="keep the event until then; DELETE /v1/events/{id} takes it back before")
    ] = None
    idempotency_key: Annotated[
        Key | None,
        Field(description="names this fact: emitted once, whichever request brings it, and whoever emits it in SQL"),
    ] = None


class EventBatch(Model):
    """Several events, emitted in this order in one transaction."""

    events: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_BATCH)]
    all_or_nothing: Annotated[
        bool, Field(strict=True, description="true: one refused item refuses all, and nothing is written")
    ] = False


class ContactRef(Model):
    """A contact by what it is known by; made if there is none. The first of phone, email and external_id that names a
    contact decides."""

    model_config = ConfigDict(
        json_schema_extra={"anyOf": [_given(name, "string") for name in ("phone", "email", "external_id")]}
    )

    phone: Annotated[
        str | None,
        Field(max_length=40, description="E.164, or as dialled in Brazil; kept as E.164 with the ninth digit"),
    ] = None
    email: Annotated[
        str | None,
        Field(max_length=320, description="kept in lower case"),
    ] = None
    external_id: Annotated[Text255 | None, Field(description="the contact's id at `source`")] = None
    name: Annotated[Text255 | None, Field(description="taken where none is known")] = None

    @model_validator(mode="after")
    def _names_somebody(self) -> ContactRef:
        if self.phone is None and self.email is None and self.external_id is None:
            raise ValueError("has none of phone, email and external_id")
        if self.phone is not None and phone.canonical(self.phone) is None:
            raise ValueError("phone is no phone number; write it as +5511987654321")
        if self.email is not None and facts.email_identity(self.email) is None:
            raise ValueError("email is no e-mail address")
        for text in (self.phone, self.email):
            _storable(text or "")
        return self


class ContactEventIn(Model):
    """A fact about one contact."""

    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [
                {"oneOf": [_given("contact_id", "string"), _given("contact", "object")]},
                {"anyOf": [_given("event_type", "string"), _given("metric", "string")]},
            ],
            "examples": [
                {
                    "contact": {"phone": "+5511987654321", "name": "Maria"},
                    "event_type": "purchase_completed",
                    "source": "pos",
                    "external_event_id": "order_paid:1001",
                    "value": "297.90",
                    "currency": "BRL",
                    "occurred_at": "2026-11-30T12:00:00-03:00",
                    "properties": {"productId": "sku-7", "paymentMethod": "pix"},
                }
            ],
        }
    )

    contact_id: Annotated[Id | None, Field(description="the contact's id here; this or `contact`")] = None
    contact: Annotated[ContactRef | None, Field(description="the contact by phone, e-mail or external id")] = None
    event_type: Annotated[
        Text100 | None,
        Field(
            description="a contact event type; with its metric where one names the same fact",
            json_schema_extra={"enum": [*CONTACT_EVENT_TYPES, None]},
        ),
    ] = None
    metric: Annotated[Text100 | None, Field(description='a metric by its name, such as "Order Paid"')] = None
    source: Annotated[Text100, Field(description="the system that knows the fact")] = "api"
    source_type: Literal["EXTERNAL", "INTERNAL", "DIRECT"] = "EXTERNAL"
    external_event_id: Annotated[
        Text255 | None,
        Field(
            description="names the fact at its source, `<fact>:<id>`: recorded once. Without one, twice is two facts"
        ),
    ] = None
    object_id: Text255 | None = None
    object_id_ref: Text255 | None = None
    entity_type: Text100 | None = None
    entity_id: Text255 | None = None
    value: Annotated[Amount | None, Field(description="an amount in `currency`")] = None
    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")] | None = None
    occurred_at: Annotated[Moment | None, Field(description="when it happened; default: now")] = None
    properties: Free = {}

    @model_validator(mode="after")
    def _is_a_fact_about_somebody(self) -> ContactEventIn:
        if (self.contact_id is None) == (self.contact is None):
            raise ValueError("has to name its contact: contact_id or contact, one of them")
        if self.event_type is None and self.metric is None:
            raise ValueError("has neither event_type nor metric")
        return self


class ContactEventBatch(Model):
    """Several contact events, recorded in this order in one transaction."""

    contact_events: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_BATCH)]
    all_or_nothing: Annotated[
        bool, Field(strict=True, description="true: one refused item refuses all, and nothing is written")
    ] = False
