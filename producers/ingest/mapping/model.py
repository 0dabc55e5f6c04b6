"""The declarative mapping of a generic sender: how it proves itself, where its fields stand, which facts they make.

Data, not a program: paths, tables and lists of alternatives. Nothing here searches, repeats or matches patterns, so no
mapping and no payload can make it slow: a mapping is bounded in size, a path in length, a list in how much of it is
read. A mapping is checked whole when the connection is made; what it says of a payload is worked out by `reading`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self
from zoneinfo import ZoneInfo

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    PlainSerializer,
    StringConstraints,
    model_validator,
)

from producers.ingest.mapping.paths import Path, parse
from producers.ingest.sources import COMMON_HEADERS
from schemas.contact_events import CONTACT_EVENT_TYPES, SCHEDULE_TRIGGER_METRIC, WEBHOOK_TRIGGER_METRIC, metric_of

MAX_RULES, MAX_FACTS, MAX_CONDITIONS, MAX_TOPICS = 100, 10, 20, 100
MAX_ALTERNATIVES, MAX_TABLE, MAX_PROPERTIES = 10, 200, 60
MAX_NESTING = 4
# Names that our own facts carry: a sender must not write under them.
RESERVED_SOURCES = frozenset(
    {
        "generic", "shopify", "stripe", "nuvemshop", "whatsapp", "hotmart", "typeform", "waha", "evolution",
        "automation", "campaign", "tracking", "afluente", "api", "import", "messaging_service", "dispatch_service",
        "ai_agents_service", "billing_service", "ticketing_service", "web", "instagram", "cpf_cnpj",
    }
)  # fmt: skip
# Headers that may prove who sends, and are therefore never read as data nor kept.
SECRET_HEADERS = frozenset({"authorization", "proxy-authorization", "cookie", "x-hotmart-hottok"})

_PLACEHOLDER = re.compile(r"\{(body|timestamp|header:[a-z0-9-]{1,100})\}")


def _header(text: str) -> str:
    return text.strip().lower()


def _no_secret(name: str) -> str:
    if name in SECRET_HEADERS:
        raise ValueError("this header may hold a secret: it is not read as data")
    return name


def _zone(name: str) -> str:
    try:
        ZoneInfo(name)
    except (ValueError, OSError, KeyError):
        raise ValueError("is no time zone; for instance America/Sao_Paulo") from None
    return name


def _source(name: str) -> str:
    if name in RESERVED_SOURCES:
        raise ValueError("this name belongs to a sender or a part of Afluente: choose another")
    return name


def _metric(name: str) -> str:
    if name in (WEBHOOK_TRIGGER_METRIC, SCHEDULE_TRIGGER_METRIC):
        raise ValueError("this name is a trigger's, not a metric")
    return name


def _contact_event_type(name: str) -> str:
    if name not in CONTACT_EVENT_TYPES:
        raise ValueError(f"one of {', '.join(CONTACT_EVENT_TYPES)}")
    return name


HeaderName = Annotated[
    str, BeforeValidator(lambda v: _header(v) if isinstance(v, str) else v),
    StringConstraints(pattern=r"^[a-z0-9-]{1,100}$"),
]  # fmt: skip
DataHeader = Annotated[HeaderName, AfterValidator(_no_secret)]
Zone = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_+/-]{1,64}$"), AfterValidator(_zone)]
SourceName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,49}$"), AfterValidator(_source)]
FactName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,49}$")]
Topic = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Text = Annotated[str, StringConstraints(max_length=500)]
Short = Annotated[str, StringConstraints(min_length=1, max_length=100)]
Scalar = bool | int | Text
AnyPath = Annotated[
    InstanceOf[Path], BeforeValidator(lambda v: parse(v) if isinstance(v, str) else v),
    PlainSerializer(lambda path: path.text),
]  # fmt: skip


class Strict(BaseModel):
    """Unknown fields are mistakes: a misspelt one would be silently without effect."""

    model_config = ConfigDict(extra="forbid", frozen=True)


# How it proves itself


class Timestamp(Strict):
    """When the delivery was signed: an old one is refused."""

    header: HeaderName
    unit: Literal["s", "ms"] = "s"
    tolerance_s: Annotated[int, Field(ge=1, le=86_400)] = 300


class Hmac(Strict):
    """A signature over the raw body."""

    by: Literal["hmac"]
    header: HeaderName
    algorithm: Literal["sha1", "sha256", "sha384", "sha512"] = "sha256"
    encoding: Literal["hex", "base64", "base64url"] = "hex"
    prefix: Text = Field("", description="what stands before the signature, like sha256= or v1,")
    separator: Literal["", " ", ",", ";"] = Field("", description="between several signatures; any of them may fit")
    key: Literal["text", "base64", "hex"] = Field(
        "text", description="how the secret becomes the key; whsec_ before base64 is left out"
    )
    timestamp: Timestamp | None = None
    signed: Text = Field("{body}", description="what is signed; {timestamp} and {header:name} may stand before {body}")

    @model_validator(mode="after")
    def _check(self) -> Self:
        pieces = self.pieces()
        names = [name for is_place, name in pieces if is_place]
        if names.count("body") != 1 or pieces[-1] != (True, "body"):
            raise ValueError("signed: must hold {body} once, at its end")
        if "timestamp" in names and self.timestamp is None:
            raise ValueError("signed: {timestamp} needs timestamp.header")
        return self

    def pieces(self) -> list[tuple[bool, str]]:
        """`signed` in parts: (whether it is a place to fill, its name or the text)."""
        parts = _PLACEHOLDER.split(self.signed)
        return [(place % 2 == 1, part) for place, part in enumerate(parts) if part]

    def headers(self) -> Iterator[str]:
        """The headers it reads: kept with the delivery, so that one can see what was signed."""
        yield self.header
        if self.timestamp is not None:
            yield self.timestamp.header
        yield from (name.removeprefix("header:") for is_place, name in self.pieces() if is_place and ":" in name)


class Token(Strict):
    """A shared token, equal in every request. Nothing is signed: use it only where the sender can do no better."""

    by: Literal["token"]
    header: HeaderName = "authorization"
    scheme: Annotated[str, StringConstraints(pattern=r"^[A-Za-z]{0,20}$")] = Field(
        "Bearer", description="the word before the token; empty when there is none"
    )

    def headers(self) -> Iterator[str]:
        """None of them is kept."""
        return iter(())


# Where a value comes from


class Value(Strict):
    """Where a value comes from: exactly one of path, header, const, first, join. A text alone is a path."""

    path: AnyPath | None = None
    header: DataHeader | None = None
    const: Scalar | None = None
    first: Annotated[tuple[Value, ...], Field(min_length=1, max_length=MAX_ALTERNATIVES)] | None = Field(
        None, description="the first of these that is there"
    )
    join: Annotated[tuple[Value, ...], Field(min_length=1, max_length=MAX_ALTERNATIVES)] | None = Field(
        None, description="all of these that are there, in one text"
    )
    between: Annotated[str, StringConstraints(max_length=10)] = Field(" ", description="stands between the joined ones")
    map: Annotated[dict[Text, Scalar], Field(max_length=MAX_TABLE)] | None = Field(
        None, description="the sender's words to ours; a word that is not in it is taken as absent"
    )
    default: Scalar | None = Field(None, description="when there is no value")

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, given: Any) -> Any:
        return {"path": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        origins = (self.path, self.header, self.const, self.first, self.join)
        if sum(origin is not None for origin in origins) != 1:
            raise ValueError("give exactly one of path, header, const, first, join")
        if self.nesting() > MAX_NESTING:
            raise ValueError(f"first and join stand at most {MAX_NESTING} deep in each other")
        return self

    def nesting(self) -> int:
        return 1 + max((inner.nesting() for inner in (*(self.first or ()), *(self.join or ()))), default=0)


class Time(Value):
    """A time. Without an offset of its own (`local`) it is of `zone`, or of the zone that `zone_from` names."""

    form: Literal["iso", "epoch_s", "epoch_ms", "local"] = "iso"
    zone: Zone | None = None
    zone_from: Value | None = None

    @model_validator(mode="after")
    def _has_zone(self) -> Self:
        if self.form == "local" and self.zone is None:
            raise ValueError("zone: a local time needs one (also where zone_from names it, for when that is absent)")
        if self.form != "local" and (self.zone is not None or self.zone_from is not None):
            raise ValueError("zone: only for form local")
        return self


class Money(Value):
    """An amount: in units of the currency ("297.90"), or in whole minor units (29790)."""

    unit: Literal["units", "minor"] = "units"
    decimal_comma: bool = Field(False, description='the sender writes "R$ 1.234,56"')


class Property(Value):
    """A property of a fact."""

    kind: Literal["text", "number", "amount", "boolean", "time", "list"] = Field(
        "text",
        alias="as",
        description="amount: a decimal as text; time: ISO 8601 in UTC; list: all that the path finds",
    )


# Who, and what


class PersonFields(Strict):
    """Who a fact is about. Several phones may be given with `first`: the first that can be read counts."""

    external_id: Value | None = Field(None, description="the person's id at this sender")
    email: Value | None = None
    document: Value | None = Field(None, description="CPF or CNPJ")
    phone: Value | None = None
    country: Value | None = Field(None, description="ISO code: where a phone without a country's code is dialled")
    name: Value | None = None

    @model_validator(mode="after")
    def _somebody(self) -> Self:
        if not (self.external_id or self.email or self.document or self.phone):
            raise ValueError("give at least one of external_id, email, document, phone")
        return self


class Condition(Strict):
    """One test of one value; all of a list must hold. Texts are compared as they are, numbers as text too."""

    value: Value
    equals: Scalar | None = None
    one_of: Annotated[tuple[Scalar, ...], Field(min_length=1, max_length=MAX_TABLE)] | None = None
    starts_with: Annotated[str, StringConstraints(min_length=1, max_length=200)] | None = None
    more_than: int | None = Field(None, description="the value is a number, and more than this")
    exists: bool | None = Field(None, description="whether the value is there and not empty")
    negate: bool = Field(False, alias="not")

    @model_validator(mode="before")
    @classmethod
    def _path_beside(cls, given: Any) -> Any:
        """`{"path": "status", "equals": "paid"}` for `{"value": "status", ...}`."""
        if isinstance(given, dict) and "path" in given and "value" not in given:
            return {**{name: value for name, value in given.items() if name != "path"}, "value": given["path"]}
        return given

    @model_validator(mode="after")
    def _one_test(self) -> Self:
        tests = (self.equals, self.one_of, self.starts_with, self.more_than, self.exists)
        if sum(test is not None for test in tests) != 1:
            raise ValueError("give exactly one of equals, one_of, starts_with, more_than, exists")
        return self


Conditions = Annotated[tuple[Condition, ...], Field(max_length=MAX_CONDITIONS)]


class Lines(Strict):
    """The lines of an order, or the items of a purchase. Paths in it begin at the line (`@.sku`)."""

    each: AnyPath
    id: Value | None = None
    product_id: Value | None = None
    variant_id: Value | None = None
    name: Value | None = None
    sku: Value | None = None
    quantity: Value | None = None
    unit_price: Money | None = None


class OrderOfAnother(Strict):
    """The order that a fact is about, when the delivery does not say whose it is: its buyer is the contact."""

    value: Value
    by: Literal["id", "number", "tracking"] = Field(
        "id", description="the order's id, its number as people see it, or the number of its shipment"
    )
    source: Short | None = Field(None, description="the sender of the order; by number or tracking: any, if not given")
    wait: bool = Field(True, description="whether the fact waits for an order that is not here yet")


class Fact(Strict):
    """One fact about a contact: its contact event type, its metric, or both."""

    fact: FactName = Field(description="its name; with `id` it is unique, so twins of one fact count once")
    id: Value = Field(description="the sender's id of what it is a fact of")
    event_type: Annotated[str, AfterValidator(_contact_event_type)] | None = None
    metric: Annotated[Short, AfterValidator(_metric)] | None = Field(
        None, description="one of the 32, or any other name: its category is then custom"
    )
    at: Time | None = Field(None, description="when it happened; when it came, if not given or not there")
    value: Money | None = None
    currency: Value | None = None
    entity: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,49}$")] | None = None
    entity_id: Value | None = Field(None, description="`id`, if not given")
    object_id_ref: Value | None = None
    of_order: OrderOfAnother | None = None
    items: Lines | None = Field(None, description="the lines of a purchase_completed")
    properties: Annotated[dict[Short, Property], Field(max_length=MAX_PROPERTIES)] = Field(default_factory=dict)
    when: Conditions = ()

    @model_validator(mode="after")
    def _fits_the_catalogue(self) -> Self:
        if self.event_type is None and self.metric is None:
            raise ValueError("give event_type, metric or both")
        paired = metric_of(self.event_type) if self.event_type else None
        if paired is not None and self.metric not in (None, paired):
            raise ValueError(f"metric: a {self.event_type} is {paired!r} (one fact, one row, both columns)")
        if self.items is not None and self.event_type != "purchase_completed":
            raise ValueError("items: only for event_type purchase_completed")
        return self


class Tracking(Strict):
    """The shipment of an order."""

    number: Value
    url: Value | None = None
    carrier: Value | None = None


class Order(Strict):
    """An order as the sender sees it now. An older state never overwrites a newer one: `updated_at` decides."""

    id: Value
    total: Money
    updated_at: Time
    number: Value | None = None
    currency: Value | None = Field(None, description="BRL, if not given")
    status: Value | None = Field(None, description="open, cancelled or closed; open, if not given")
    financial_status: Value | None = Field(
        None,
        description="pending, authorized, paid, partially_paid, partially_refunded, refunded or voided",
    )
    fulfillment_status: Value | None = Field(None, description="unfulfilled, partial or fulfilled; unfulfilled, if not")
    payment_method: Value | None = None
    placed_at: Time | None = None
    paid_at: Time | None = None
    fulfilled_at: Time | None = None
    cancelled_at: Time | None = None
    cancel_reason: Value | None = None
    tracking: Tracking | None = None
    lines: Lines | None = None


class Rule(Strict):
    """What deliveries of some topics and conditions mean. The first rule that fits is the one that counts."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,60}$")] = Field(
        description="one word for people who look at deliveries"
    )
    topics: Annotated[tuple[Topic, ...], Field(max_length=MAX_TOPICS)] = Field(
        (), description="the sender's topics, each whole or with * at its end; none: all"
    )
    when: Conditions = ()
    ignore: bool = Field(False, description="understood, and nothing for us")
    person: PersonFields | None = Field(None, description="instead of the mapping's person")
    facts: Annotated[tuple[Fact, ...], Field(max_length=MAX_FACTS)] = ()
    order: Order | None = None

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        if self.ignore and (self.facts or self.order or self.person):
            raise ValueError("ignore: a rule that ignores has no facts, order or person")
        if any("*" in topic[:-1] for topic in self.topics):
            raise ValueError("topics: * stands at the end only")
        return self

    def takes(self, topic: str) -> bool:
        """Whether a topic is one of its own."""
        return not self.topics or any(
            topic.startswith(own[:-1]) if own.endswith("*") else topic == own for own in self.topics
        )


class Mapping(Strict):
    """All of it."""

    source: SourceName = Field(description="the sender's name: facts, orders and ids are recorded under it")
    description: Annotated[str, StringConstraints(max_length=1000)] = ""
    verify: Annotated[Hmac | Token, Field(discriminator="by")]
    topic: Value = Field(description="what a delivery is about, in the sender's words")
    delivery_id: Value | None = Field(
        None,
        description="equal for repeats of one delivery, different for all else; without it equal bytes are a repeat",
    )
    test: Conditions = Field((), description="what is a test delivery: it counts on a test connection only")
    each: AnyPath | None = Field(None, description="a list whose items (`@`) are each read by the rules")
    person: PersonFields | None = None
    rules: Annotated[tuple[Rule, ...], Field(min_length=1, max_length=MAX_RULES)]

    @model_validator(mode="after")
    def _reads_what_is_there(self) -> Self:
        if isinstance(self.verify, Token) and self.verify.header in self.data_headers():
            raise ValueError("verify.header: the header of the token is not read as data")
        if isinstance(self.verify, Token) and self.verify.header in COMMON_HEADERS:
            raise ValueError("verify.header: this header is kept and logged: a token cannot stand in it")
        if self.each is None:
            for place, value in _values(self):
                if value.path is not None and value.path.of_item:
                    raise ValueError(f"{place}: @ is an item of `each`, and this mapping has none")
        return self

    def data_headers(self) -> frozenset[str]:
        """The headers that values are read from."""
        return frozenset(value.header for _, value in _values(self, lines=True) if value.header is not None)

    def kept_headers(self) -> frozenset[str]:
        """The headers stored with a delivery: never one that holds a secret."""
        kept = self.data_headers() | frozenset(self.verify.headers())
        return kept - SECRET_HEADERS


def _values(model: BaseModel, place: str = "", *, lines: bool = False) -> Iterator[tuple[str, Value]]:
    """Every value in a model and where it stands. Those of lines, whose `@` is the line, only when asked for."""
    for name in type(model).model_fields:
        given = getattr(model, name)
        here = f"{place}.{name}" if place else name
        found: list[tuple[str, Any]] = [(here, given)]
        if isinstance(given, dict):
            found = [(f"{here}.{key}", inner) for key, inner in given.items()]
        elif isinstance(given, tuple):
            found = [(f"{here}[{number}]", inner) for number, inner in enumerate(given)]
        for where, inner in found:
            if isinstance(inner, Value):
                yield where, inner
            if isinstance(inner, BaseModel) and (lines or not isinstance(inner, Lines)):
                yield from _values(inner, where, lines=lines)
