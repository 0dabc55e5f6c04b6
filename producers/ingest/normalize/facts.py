"""What a delivery can say. Values only; `webhook-normalize-worker` writes them down."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, Literal

from producers.ingest.normalize import phone as phones
from producers.ingest.normalize.keywords import StopWord

MAX_EMAIL = 320


@dataclass(frozen=True)
class Context:
    """What a normaliser knows besides the bytes."""

    topic: str
    received_at: datetime
    test_channel: bool = False
    """The connection takes the sender's test deliveries; a live one does not count them."""
    country: str = phones.BRAZIL
    """Where a phone without a country code is dialled."""
    resource: Mapping[str, Any] | None = None
    """What a thin webhook pointed to, as fetched; None if it is gone (404) or was not fetched."""
    fetched: bool = False
    """Whether it was asked for."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The connection's own: how a generic sender's fields are to be read."""


@dataclass(frozen=True)
class Identity:
    """One name of a person, in the form used for matching."""

    kind: Literal["phone", "email", "external"]
    value: str
    source: str = ""
    as_received: str | None = None


@dataclass(frozen=True)
class Person:
    """Who a fact is about. The most telling identity comes first: it decides when they name different contacts."""

    identities: tuple[Identity, ...]
    name: str | None = None

    def __bool__(self) -> bool:
        return bool(self.identities)


@dataclass(frozen=True)
class OrderReference:
    """An order by what a delivery knows of it. Its contact counts before the one that the delivery itself names."""

    value: str
    by: Literal["id", "number", "tracking"] = "id"
    """`number`: as people see it, with or without its '#'. `tracking`: the number of its shipment."""
    source: str | None = None
    """The sender of the order. None: by id the sender of the delivery, else any."""
    waits: bool = True
    """Whether the fact waits for an order that is not here yet."""


@dataclass(frozen=True)
class ContactEvent:
    """A fact about a contact: one row of contact_events, by its contact event type, its metric, or both."""

    fact: str
    source_id: str
    event_type: str | None
    metric: str | None
    occurred_at: datetime
    entity_type: str | None = None
    entity_id: str | None = None
    object_id_ref: str | None = None
    value: Decimal | None = None
    currency: str | None = None
    properties: Mapping[str, Any] = field(default_factory=dict)
    of_order: OrderReference | None = None
    """The order whose contact it is about."""
    of_payment: str | None = None
    """Likewise, the payment (object_id_ref) of a fact recorded before."""
    of_person: Person | None = None
    """Whom it is about, when one delivery is about several people."""

    @property
    def external_id(self) -> str:
        return f"{self.fact}:{self.source_id}"


@dataclass(frozen=True)
class OrderLine:
    """One line of an order; amounts in the order's currency."""

    external_id: str
    product_id: str | None
    variant_id: str | None
    name: str | None
    sku: str | None
    quantity: Decimal
    unit_price: Decimal | None


OrderStatus = Literal["open", "cancelled", "closed"]
FinancialStatus = Literal["pending", "authorized", "paid", "partially_paid", "partially_refunded", "refunded", "voided"]
FulfillmentStatus = Literal["unfulfilled", "partial", "fulfilled"]


@dataclass(frozen=True)
class OrderState:
    """An order as the sender saw it at `updated_at`. An older state never overwrites a newer one."""

    external_id: str
    number: str | None
    status: OrderStatus
    financial_status: FinancialStatus
    fulfillment_status: FulfillmentStatus
    currency: str
    total: Decimal
    payment_method: str | None
    placed_at: datetime | None
    paid_at: datetime | None
    fulfilled_at: datetime | None
    cancelled_at: datetime | None
    cancel_reason: str | None
    updated_at: datetime
    tracking: Mapping[str, Any] | None = None
    lines: tuple[OrderLine, ...] = ()
    of_person: Person | None = None
    """Whose it is, when one delivery is about several people."""
    checkout_token: str | None = None
    cart_token: str | None = None
    """What it came of: a checkout that became an order is not left."""


@dataclass(frozen=True)
class CheckoutState:
    """A checkout as the sender saw it at `updated_at`; left, if nothing happens for `left_after`."""

    token: str
    cart_token: str | None
    value: Decimal | None
    currency: str | None
    product_ids: tuple[str, ...]
    stage: str
    updated_at: datetime
    completed_at: datetime | None
    left_after: timedelta


@dataclass(frozen=True)
class OrderEvent:
    """A domain event about the order of the same delivery (`nuvemshop.order_paid`), emitted once for each order."""

    event_type: str
    order_id: str
    payload: Mapping[str, Any]
    """Without order_id and contact_id: those are our rows'."""
    with_contact: bool = False


@dataclass(frozen=True)
class CartAbandoned:
    """A cart was left with goods in it."""

    cart_id: str
    value_minor: int
    abandoned_at: datetime


@dataclass(frozen=True)
class ProductSynced:
    """A product changed at the sender."""

    product_id: str
    action: Literal["created", "updated", "deleted"]


@dataclass(frozen=True)
class IncomingMessage:
    """A person wrote."""

    person: Person
    wamid: str
    """The message's name at the sender; other messages' facts find it by that."""
    kind: str
    body: str | None
    media: tuple[Mapping[str, Any], ...]
    reply_to: tuple[str, ...]
    """The names that the answered message may have."""
    content: Mapping[str, Any]
    """What the type carries besides text: a location, a reply's id, an ad's referral."""
    occurred_at: datetime
    stop_word: StopWord | None = None
    other_names: tuple[str, ...] = ()
    """Names that the same message may have come under before."""


@dataclass(frozen=True)
class OutgoingMessage:
    """The business wrote: from the phone itself, or by a call whose answer may still be on its way (an echo)."""

    person: Person
    wamid: str
    kind: str
    body: str | None
    content: Mapping[str, Any]
    occurred_at: datetime
    through_api: bool = False
    """The gateway also echoes what was sent by its API: this may be a message of ours that has no name yet."""


@dataclass(frozen=True)
class MessageChange:
    """A person changed or took back what it wrote, or reacted to a message: something that happened to `wamid`."""

    person: Person
    wamid: str
    change_id: str
    kind: Literal["edited", "revoked", "reaction"]
    content: Mapping[str, Any]
    occurred_at: datetime
    other_names: tuple[str, ...] = ()
    """Names that the changed message may have instead."""
    of_known_only: bool = False
    """Makes no contact of the person: it did nothing that says so."""


@dataclass(frozen=True)
class MessageStatus:
    """What became of a message of ours. Statuses come in any order; the furthest one counts."""

    person: Person
    wamid: str
    status: Literal["sent", "delivered", "read", "played", "failed", "deleted", "warning"]
    occurred_at: datetime
    error_code: str | None = None
    error_message: str | None = None
    retryable: bool = False


@dataclass(frozen=True)
class Preference:
    """A person wants marketing messages, or no more of them."""

    person: Person
    consent_type: str
    granted: bool
    occurred_at: datetime


@dataclass(frozen=True)
class NumberChanged:
    """A person has a new number, or a new id at the sender: `person` names the old one."""

    person: Person
    new_identity: Identity
    occurred_at: datetime


@dataclass(frozen=True)
class PersonNamed:
    """What the address book of a phone calls somebody. Makes no contact: most of them never wrote."""

    person: Person


@dataclass(frozen=True)
class SessionChanged:
    """A gateway's connection to WhatsApp has this status since `occurred_at`."""

    session: str
    status: str
    occurred_at: datetime


@dataclass(frozen=True)
class PrivacyRequest:
    """The person asks for its data, or to be erased. An unknown person is a success, recorded."""

    request_type: Literal["access", "redact"]
    request_id: str
    person: Person
    customer_id: str | None


@dataclass(frozen=True)
class ChannelUninstalled:
    """The sender ended the connection."""


Fact = (
    ContactEvent
    | OrderState
    | CheckoutState
    | OrderEvent
    | CartAbandoned
    | ProductSynced
    | IncomingMessage
    | OutgoingMessage
    | MessageChange
    | MessageStatus
    | Preference
    | NumberChanged
    | PersonNamed
    | SessionChanged
    | PrivacyRequest
    | ChannelUninstalled
)


@dataclass(frozen=True)
class Normalized:
    """The outcome of one delivery. `reason` names it: the same word for the same kind of delivery, never data."""

    status: Literal["processed", "ignored", "unrecognised"]
    reason: str
    person: Person | None = None
    """Made a contact if it is none yet; the events without a person of their own are about it."""
    facts: tuple[Fact, ...] = ()
    source: str | None = None
    """The name that the facts are recorded under, when it is not the sender's: a generic connection has its own."""


def processed(reason: str, *facts: Fact, person: Person | None = None) -> Normalized:
    return Normalized("processed", reason, person or None, facts)


def ignored(reason: str) -> Normalized:
    """Understood, and nothing for us."""
    return Normalized("ignored", reason)


def unrecognised(reason: str) -> Normalized:
    """Not understood: kept, shown, and to be replayed once it is."""
    return Normalized("unrecognised", reason)


def fact_id(*parts: str) -> str:
    """A source id made of several: short enough to name a fact, however long they are."""
    text = ":".join(parts)
    return text if len(text) <= 200 else f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def phone_identity(text: str | None, country: str = phones.BRAZIL) -> Identity | None:
    number = phones.canonical(text, country)
    return Identity("phone", number, as_received=text.strip()[:MAX_EMAIL]) if number and text else None


def email_identity(text: str | None) -> Identity | None:
    """An e-mail in lower case; None for what has no @ in the right place."""
    value = (text or "").strip().lower()
    local, _, domain = value.rpartition("@")
    if not local or "." not in domain or any(c.isspace() for c in value) or len(value) > MAX_EMAIL:
        return None
    return Identity("email", value, as_received=(text or "").strip())


def external_identity(source: str, value: str | None) -> Identity | None:
    return Identity("external", value, source=source) if value else None


def tax_identity(text: str | None) -> Identity | None:
    """A CPF or CNPJ by its digits: shops match customers by it."""
    digits = "".join(c for c in text or "" if c.isascii() and c.isdigit())
    return Identity("external", digits, source="cpf_cnpj") if len(digits) in (11, 14) else None


def person(*identities: Identity | None, name: str | None = None) -> Person:
    """A person by these identities: the first of each kind and source counts."""
    found: dict[tuple[str, str], Identity] = {}
    for identity in identities:
        if identity is not None:
            found.setdefault((identity.kind, identity.source), identity)
    cleaned = " ".join((name or "").split())[:255]
    return Person(tuple(found.values()), cleaned or None)
