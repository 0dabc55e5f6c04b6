"""Any sender with a mapping: its fields become facts as the connection's mapping says.

The first rule that takes the topic and whose conditions hold decides what a delivery (or each item of it) means. What
no rule takes is kept as unrecognised, to be replayed once the mapping has one. A value that is not there, or not what
it must be, is absent; only a fact's id is needed, and an order's id, total and time. What a fact holds fits the schema
of its type, or the delivery is kept with the name of the field that does not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Any, get_args

from pydantic import ValidationError

from producers.ingest import mapping as mappings
from producers.ingest.mapping import model
from producers.ingest.mapping.reading import Reading, as_number, as_text
from producers.ingest.normalize import facts as f
from producers.ingest.normalize import moments
from producers.ingest.normalize.document import Document, Malformed
from producers.ingest.normalize.money import as_text as amount_text
from producers.ingest.normalize.money import currency_code
from schemas.contact_events import metric_of
from schemas.events.contact_event import PROPERTIES

DEFAULT_CURRENCY = "BRL"
_PAID = frozenset({"paid", "partially_refunded", "refunded"})
MAX_ITEMS, MAX_LINES = 100, 200
# An event holds 256 KiB.
MAX_PROPERTIES_BYTES = 128 * 1024


def normalize(document: Document, headers: Mapping[str, str], context: f.Context) -> f.Normalized:
    """The facts of one delivery, by the mapping in `context.settings`."""
    mapping = mappings.kept(context.settings)
    if mapping is None:
        return f.unrecognised("mapping_unusable")
    return apply(mapping, Reading(document.value, headers), context)


def apply(mapping: model.Mapping, reading: Reading, context: f.Context) -> f.Normalized:
    """The facts that a mapping makes of a delivery. Raises Malformed with the place in the mapping."""
    if mapping.test and reading.holds(mapping.test) and not context.test_channel:
        return f.ignored("test_delivery")
    if mapping.each is None:
        return _Rules(mapping, context).apply(reading)
    results = [_Rules(mapping, context).apply(reading.of(item)) for item in reading.items(mapping.each, MAX_ITEMS)]
    return _joined(mapping, results)


def _joined(mapping: model.Mapping, results: list[f.Normalized]) -> f.Normalized:
    """Several items as one outcome. Items of several people: each fact names its own."""
    taken = [result for result in results if result.status == "processed"]
    if not taken:
        unknown = next((result for result in results if result.status == "unrecognised"), None)
        return unknown or (results[0] if results else f.ignored("no_items"))
    reasons = "+".join(sorted({result.reason for result in taken if result.reason}))[:200]
    if len(taken) < len([result for result in results if result.status != "ignored"]):
        reasons += "+unrecognised_items"
    facts = [fact for result in taken for fact in result.facts]
    people = {result.person for result in taken}
    if len(people) == 1:
        return f.Normalized("processed", reasons, people.pop(), tuple(facts), source=mapping.source)
    named = [_of(result.person, fact) for result in taken for fact in result.facts]
    return f.Normalized("processed", reasons, None, tuple(named), source=mapping.source)


def _of(person: f.Person | None, fact: f.Fact) -> f.Fact:
    return replace(fact, of_person=person) if isinstance(fact, f.ContactEvent | f.OrderState) else fact


class _Rules:
    """The rules of a mapping over one delivery, or one item of it."""

    def __init__(self, mapping: model.Mapping, context: f.Context) -> None:
        self._mapping = mapping
        self._context = context

    def apply(self, reading: Reading) -> f.Normalized:
        topic = reading.text(self._mapping.topic) or ""
        for number, rule in enumerate(self._mapping.rules):
            if rule.takes(topic) and reading.holds(rule.when):
                return self._ruled(rule, f"rules[{number}]", reading)
        return f.unrecognised("unknown_topic" if topic else "no_topic")

    def _ruled(self, rule: model.Rule, place: str, reading: Reading) -> f.Normalized:
        if rule.ignore:
            return f.ignored(rule.name)
        facts: list[f.Fact] = []
        if rule.order is not None:
            facts.append(self._order(rule.order, f"{place}.order", reading))
        for number, fact in enumerate(rule.facts):
            if reading.holds(fact.when):
                facts.append(self._fact(fact, f"{place}.facts[{number}]", reading))
        who = self._person(rule.person or self._mapping.person, reading)
        return f.Normalized("processed", rule.name, who or None, tuple(facts), source=self._mapping.source)

    # Who

    def _person(self, fields: model.PersonFields | None, reading: Reading) -> f.Person:
        if fields is None:
            return f.person()
        country = (reading.text(fields.country) or self._context.country).upper()
        external = reading.text(fields.external_id)
        emails = (f.email_identity(as_text(found)) for found in reading.every(fields.email))
        documents = (f.tax_identity(as_text(found)) for found in reading.every(fields.document))
        phones = (f.phone_identity(as_text(found), country) for found in reading.every(fields.phone))
        return f.person(
            f.external_identity(self._mapping.source, f.fact_id(external) if external else None),
            next(filter(None, emails), None),
            next(filter(None, documents), None),
            next(filter(None, phones), None),
            name=reading.text(fields.name),
        )

    # Facts

    def _fact(self, fact: model.Fact, place: str, reading: Reading) -> f.ContactEvent:
        identifier = reading.text(fact.id)
        if identifier is None:
            raise Malformed(f"{place}.id")
        currency = currency_code(reading.text(fact.currency)) or DEFAULT_CURRENCY
        value = reading.amount(fact.value, currency)
        entity_id = reading.text(fact.entity_id) or identifier
        reference = reading.text(fact.object_id_ref) or entity_id
        event = f.ContactEvent(
            fact=fact.fact,
            source_id=f.fact_id(identifier),
            event_type=fact.event_type,
            metric=fact.metric or (metric_of(fact.event_type) if fact.event_type else None),
            occurred_at=moments.occurred(reading.time(fact.at), self._context.received_at),
            entity_type=fact.entity,
            entity_id=f.fact_id(entity_id) if fact.entity else None,
            object_id_ref=f.fact_id(reference),
            value=value,
            currency=currency if value is not None else None,
            properties=self._properties(fact, reading, value, currency),
            of_order=self._order_of_another(fact.of_order, reading),
        )
        _check(event, place)
        return event

    def _properties(self, fact: model.Fact, reading: Reading, value: Decimal | None, currency: str) -> dict[str, Any]:
        found = {name: reading.property(wanted) for name, wanted in fact.properties.items()}
        if fact.event_type == "purchase_completed":
            # What the columns say, unless the mapping says it in another way.
            lines = list(self._lines(fact.items, reading, currency)) if fact.items is not None else []
            own: dict[str, Any] = {
                "productId": lines[0].product_id if lines else None,
                "productName": lines[0].name if lines else None,
                "amount": amount_text(value) if value is not None else None,
                "currency": currency if value is not None else None,
            }
            if fact.items is not None:
                own["items"] = [_item(line) for line in lines]
            found = own | found
        return {name: said for name, said in found.items() if said is not None}

    def _order_of_another(self, order: model.OrderOfAnother | None, reading: Reading) -> f.OrderReference | None:
        said = None if order is None else reading.text(order.value)
        if order is None or said is None:
            return None
        return f.OrderReference(said, by=order.by, source=order.source, waits=order.wait)

    # Orders

    def _order(self, order: model.Order, place: str, reading: Reading) -> f.OrderState:
        identifier = reading.text(order.id)
        currency = currency_code(reading.text(order.currency)) or DEFAULT_CURRENCY
        total = reading.amount(order.total, currency)
        updated_at = reading.time(order.updated_at)
        if identifier is None or total is None or total < 0 or updated_at is None:
            missing = "id" if identifier is None else "updated_at" if updated_at is None else "total"
            raise Malformed(f"{place}.{missing}")
        financial = _one_of(f.FinancialStatus, reading.text(order.financial_status), "pending")
        fulfillment = _one_of(f.FulfillmentStatus, reading.text(order.fulfillment_status), "unfulfilled")
        status = _one_of(f.OrderStatus, reading.text(order.status), "open")
        tracking = order.tracking
        number = reading.text(tracking.number) if tracking is not None else None
        shipment = None
        if tracking is not None and number is not None:
            shipment = {"number": number, "url": reading.text(tracking.url), "carrier": reading.text(tracking.carrier)}
        return f.OrderState(
            external_id=f.fact_id(identifier),
            number=reading.text(order.number),
            status=status,
            financial_status=financial,
            fulfillment_status=fulfillment,
            currency=currency,
            total=total,
            payment_method=reading.text(order.payment_method),
            placed_at=reading.time(order.placed_at),
            # Few senders say when; it is so now.
            paid_at=reading.time(order.paid_at) or (updated_at if financial in _PAID else None),
            fulfilled_at=reading.time(order.fulfilled_at) or (updated_at if fulfillment == "fulfilled" else None),
            cancelled_at=reading.time(order.cancelled_at) or (updated_at if status == "cancelled" else None),
            cancel_reason=reading.text(order.cancel_reason),
            updated_at=moments.occurred(updated_at, self._context.received_at),
            tracking=shipment,
            lines=tuple(self._lines(order.lines, reading, currency)) if order.lines is not None else (),
        )

    def _lines(self, lines: model.Lines, reading: Reading, currency: str) -> Iterator[f.OrderLine]:
        for number, line in enumerate(reading.items(lines.each, MAX_LINES), start=1):
            at = reading.of(line)
            quantity = at.decimal(lines.quantity)
            yield f.OrderLine(
                external_id=at.text(lines.id) or str(number),
                product_id=at.text(lines.product_id),
                variant_id=at.text(lines.variant_id),
                name=at.text(lines.name),
                sku=at.text(lines.sku),
                quantity=quantity if quantity is not None else Decimal(1),
                unit_price=at.amount(lines.unit_price, currency),
            )


def _item(line: f.OrderLine) -> dict[str, Any]:
    price = line.unit_price
    item = {
        "productId": line.product_id,
        "productName": line.name,
        "variantId": line.variant_id,
        "sku": line.sku,
        "quantity": as_number(line.quantity),
        "price": amount_text(price) if price is not None else None,
        "amount": amount_text(price * line.quantity) if price is not None else None,
    }
    return {name: said for name, said in item.items() if said is not None}


def _one_of(statuses: Any, said: str | None, otherwise: Any) -> Any:
    """A status of ours, or the one to take for what is none."""
    return said if said in get_args(statuses) else otherwise


def _check(event: f.ContactEvent, place: str) -> None:
    """Refuse what the worker could not write down: properties of the wrong type, or too many."""
    if event.event_type is not None:
        try:
            PROPERTIES[event.event_type].model_validate(dict(event.properties))
        except ValidationError as error:
            where = ".".join(str(step) for step in error.errors()[0]["loc"])
            raise Malformed(f"{place}.properties.{where}"[:200]) from None
    if len(json.dumps(event.properties, default=str)) > MAX_PROPERTIES_BYTES:
        raise Malformed(f"{place}.properties:too_large")
