"""Facts into rows and events, in the delivery's own transaction.

What must stay true:
- applying the same facts again changes nothing and emits nothing: every fact has a name, and its name is unique;
- an older state never overwrites a newer one;
- a contact event without a contact is not recorded, and says so; the order it is about is kept all the same.

Contacts come first: `upsert_contact` holds the locks of a person's identities to the end of the transaction, so what
follows for that person (is the message known? is a conversation open?) is asked and answered without a race.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Any, assert_never
from uuid import UUID

from psycopg.types.json import Jsonb

import sql
from consumers.worker import Context, Delivery
from producers import Causation
from producers.emit import to_json
from producers.ingest.normalize import facts as f
from producers.ingest.normalize.money import to_minor
from schemas.contact_events import metric_of
from schemas.events.contact_event import PROPERTIES

_SQL = sql.queries("inbound")

_SOURCE_TYPES = {"whatsapp": "DIRECT"}
# Statuses as the ledger knows them; 'played' is a voice message that was listened to, a reading of its own kind.
_STATUS_KINDS = {"sent": "sent", "delivered": "delivered", "read": "read", "played": "read", "failed": "failed"}
_STATUS_METRICS = {"delivered": "Message Delivered", "read": "Message Read", "failed": "Message Failed"}
_TEMPLATE_METRICS = {"delivered": "Template Delivered", "read": "Template Read"}
WINDOW_EXPIRED_CODE = "131047"


class OrderUnknown(Exception):
    """A fact names an order that is not here yet: it may be on its way. A failed attempt: the backoff waits for it."""

    def __init__(self) -> None:
        super().__init__("the order is not known yet")


@dataclass
class Applied:
    """What was written: counts by kind, for people who look at deliveries."""

    counts: Counter[str] = field(default_factory=Counter)

    def summary(self) -> dict[str, int]:
        return dict(self.counts)


@dataclass(frozen=True)
class Part:
    """The stored part that the facts are from."""

    id: UUID
    channel_id: UUID
    source: str
    received_at: datetime


async def apply(
    normalized: f.Normalized, part: Part, delivery: Delivery, ctx: Context, *, wait_for_orders: bool = True
) -> Applied:
    """Write all facts of one delivery. OrderUnknown, to be rolled back, when `wait_for_orders` and one is missing."""
    return await _Writer(part, delivery, ctx, wait_for_orders).write(normalized)


class _Writer:
    def __init__(self, part: Part, delivery: Delivery, ctx: Context, wait_for_orders: bool) -> None:
        self._part = part
        self._delivery = delivery
        self._ctx = ctx
        self._wait_for_orders = wait_for_orders
        self._organization_id = delivery.organization_id
        self._applied = Applied()
        self._orders: dict[str, UUID] = {}

    async def write(self, normalized: f.Normalized) -> Applied:
        contact_id = await self._contact(normalized.person)
        for fact in normalized.facts:
            match fact:
                case f.ContactEvent():
                    await self._contact_event(fact, contact_id)
                case f.OrderState():
                    await self._order(fact, contact_id)
                case f.OrderEvent():
                    await self._order_event(fact, contact_id)
                case f.CartAbandoned():
                    await self._cart_abandoned(fact, contact_id)
                case f.ProductSynced():
                    await self._product(fact)
                case f.IncomingMessage():
                    await self._incoming(fact)
                case f.OutgoingMessage():
                    await self._outgoing(fact)
                case f.MessageChange():
                    await self._message_change(fact)
                case f.MessageStatus():
                    await self._message_status(fact)
                case f.Preference():
                    await self._preference(fact)
                case f.NumberChanged():
                    await self._number_changed(fact)
                case f.PrivacyRequest():
                    await self._privacy(fact)
                case f.ChannelUninstalled():
                    await self._uninstalled()
                case _:
                    assert_never(fact)
        return self._applied

    # Contacts

    async def _contact(self, person: f.Person | None) -> UUID | None:
        """The person's contact, made if there is none; None for nobody."""
        if not person:
            return None
        row = await self._one(
            "upsert_contact",
            identities=_identities(person),
            name=person.name,
            source=self._part.source,
        )
        assert row is not None
        contact_id, created, conflict = row
        if created:
            await self._created(contact_id, person)
        if conflict:
            await self._conflict(contact_id)
        return UUID(str(contact_id))

    async def _created(self, contact_id: UUID, person: f.Person) -> None:
        self._applied.counts["contacts"] += 1
        phone = next((i.value for i in person.identities if i.kind == "phone"), None)
        await self._ctx.emit(
            "contact.created",
            entity_kind="contact",
            entity_id=contact_id,
            payload={"phone": phone, "name": person.name, "source": self._part.source},
        )
        await self._record(
            contact_id,
            fact=f"contact_created:{contact_id}",
            event_type=None,
            metric="Contact Created",
            occurred_at=self._part.received_at,
            entity_type="contact",
            entity_id=str(contact_id),
        )

    async def _conflict(self, contact_id: UUID) -> None:
        """Identities of one delivery name two contacts: nothing is merged silently, a person is asked."""
        await self._execute(
            "alert",
            kind="contact_conflict",
            severity="warning",
            audience="operators",
            title="Two contacts may be one person",
            details=Jsonb({"contact_id": str(contact_id), "webhook_event_id": str(self._part.id)}),
            dedupe_key=f"contact_conflict:{contact_id}",
            event_id=self._delivery.event.id,
        )

    async def _find(self, person: f.Person) -> UUID | None:
        if not person:
            return None
        row = await self._one("find_contact", identities=_identities(person))
        return None if row is None else row[0]

    # Contact events

    async def _contact_event(self, fact: f.ContactEvent, contact_id: UUID | None) -> None:
        if fact.of_order is not None:
            contact_id = await self._buyer_of(fact.of_order) or contact_id
        if fact.of_payment is not None and contact_id is None:
            names = [f"{name}:{fact.of_payment}" for name in ("order_paid", "order_placed")]
            row = await self._one("contact_of_payment", source=self._part.source, external_event_ids=names)
            contact_id = None if row is None else row[0]
        await self._record(
            contact_id,
            fact=fact.external_id,
            event_type=fact.event_type,
            metric=fact.metric,
            occurred_at=fact.occurred_at,
            entity_type=fact.entity_type,
            entity_id=fact.entity_id,
            object_id=str(found) if fact.entity_id and (found := self._orders.get(fact.entity_id)) else None,
            object_id_ref=fact.object_id_ref,
            value=fact.value,
            currency=fact.currency,
            properties=fact.properties,
        )

    async def _buyer_of(self, order_id: str) -> UUID | None:
        row = await self._one("contact_of_order", source=self._part.source, external_id=order_id)
        if row is None and self._wait_for_orders:
            raise OrderUnknown()
        return None if row is None else row[0]

    async def _record(
        self,
        contact_id: UUID | None,
        *,
        fact: str,
        event_type: str | None,
        metric: str | None,
        occurred_at: datetime,
        entity_type: str | None = None,
        entity_id: str | None = None,
        object_id: str | None = None,
        object_id_ref: str | None = None,
        value: Decimal | None = None,
        currency: str | None = None,
        properties: Mapping[str, Any] | None = None,
    ) -> None:
        if contact_id is None:
            self._applied.counts["without_contact"] += 1
        if event_type is not None:
            # The relay would set a row aside that does not fit; here the delivery fails, where somebody looks.
            PROPERTIES[event_type].model_validate(dict(properties or {}))
            metric = metric or metric_of(event_type)
        row = await self._one(
            "record_contact_event",
            contact_id=contact_id,
            event_type=event_type,
            metric_name=metric,
            source=self._part.source,
            source_type=_SOURCE_TYPES.get(self._part.source, "EXTERNAL"),
            external_event_id=fact,
            object_id=object_id,
            object_id_ref=object_id_ref,
            entity_type=entity_type,
            entity_id=entity_id,
            value=value,
            currency=currency,
            occurred_at=occurred_at,
            received_at=self._part.received_at,
            properties=to_json(properties or {}, "properties"),
            integration_id=self._part.channel_id,
            webhook_event_id=self._part.id,
            metadata=to_json(self._metadata(), "metadata"),
        )
        if row is not None and row[0] is not None:
            self._applied.counts["contact_events"] += 1

    def _metadata(self) -> dict[str, Any]:
        """What `ctx.emit` would give: the request, and what led here."""
        event = self._delivery.event
        causation = Causation.of(event)
        found: dict[str, Any] = {
            "source": self._delivery.worker,
            "causation_id": causation.event_id,
            "causation_depth": causation.depth,
            "traceparent": causation.traceparent,
            "request_id": event.metadata.get("request_id"),
            "trace_id": event.metadata.get("trace_id"),
        }
        return {name: value for name, value in found.items() if value is not None}

    # Orders and products

    async def _order(self, order: f.OrderState, contact_id: UUID | None) -> None:
        parameters = {
            "contact_id": contact_id,
            "channel_id": self._part.channel_id,
            "source": self._part.source,
            "external_id": order.external_id,
            "ns_order_id": order.external_id if self._part.source == "nuvemshop" else None,
            "order_number": _cut(order.number, 255),
            "status": order.status,
            "financial_status": order.financial_status,
            "fulfillment_status": order.fulfillment_status,
            "total_cents": to_minor(order.total, order.currency),
            "currency": order.currency,
            "payment_method": _cut(order.payment_method, 100),
            "cancel_reason": _cut(order.cancel_reason, 255),
            "tracking": Jsonb(dict(order.tracking)) if order.tracking else None,
            "placed_at": order.placed_at,
            "paid_at": order.paid_at,
            "cancelled_at": order.cancelled_at,
            "fulfilled_at": order.fulfilled_at,
            "source_updated_at": order.updated_at,
        }
        row = await self._one("upsert_order", **parameters)
        if row is not None:
            await self._lines(order, row[0])
            self._applied.counts["orders"] += 1
        else:
            row = await self._one("order", source=self._part.source, external_id=order.external_id)
        assert row is not None
        self._orders[order.external_id] = row[0]

    async def _lines(self, order: f.OrderState, order_id: UUID) -> None:
        content = []
        for line_no, line in enumerate((line for line in order.lines if line.quantity > 0), start=1):
            price = max(line.unit_price or Decimal(0), Decimal(0))
            content.append(
                {
                    "line_no": line_no,
                    "external_id": _cut(line.external_id, 255),
                    "product_external_id": _cut(line.product_id, 255),
                    "sku": _cut(line.sku, 255),
                    "name": _cut(line.name, 1000) or "",
                    "quantity": line.quantity,
                    "unit_price_cents": to_minor(price, order.currency),
                    "total_cents": to_minor(price * line.quantity, order.currency),
                }
            )
        text = to_json({"lines": content}, "lines")
        await self._execute("replace_lines", order_id=order_id, lines=len(content), content=text)

    async def _order_event(self, fact: f.OrderEvent, contact_id: UUID | None) -> None:
        order_id = self._orders[fact.order_id]
        payload = {"order_id": str(order_id), **fact.payload}
        if fact.with_contact:
            payload["contact_id"] = str(contact_id) if contact_id else None
        await self._ctx.emit(
            fact.event_type,
            entity_kind="order",
            entity_id=order_id,
            payload=payload,
            # Once for each order, whichever delivery saw it first.
            idempotency_key=f"{fact.event_type}:{order_id}",
        )
        self._applied.counts["domain_events"] += 1

    async def _cart_abandoned(self, fact: f.CartAbandoned, contact_id: UUID | None) -> None:
        await self._ctx.emit(
            f"{self._part.source}.cart_abandoned",
            entity_kind="cart",
            payload={
                "cart_id": fact.cart_id,
                "contact_id": str(contact_id) if contact_id else None,
                "value_cents": fact.value_minor,
                "abandoned_at": fact.abandoned_at,
            },
            idempotency_key=_cut(f"cart_abandoned:{self._part.channel_id}:{fact.cart_id}", 255),
        )
        self._applied.counts["domain_events"] += 1

    async def _product(self, fact: f.ProductSynced) -> None:
        await self._ctx.emit(
            f"{self._part.source}.product_synced",
            entity_kind="product",
            payload={"product_id": fact.product_id, "action": fact.action},
        )
        self._applied.counts["domain_events"] += 1

    # Messages

    async def _incoming(self, message: f.IncomingMessage) -> None:
        contact_id = await self._contact(message.person)
        if contact_id is None or await self._known(message.wamid):
            return
        conversation_id = await self._conversation(contact_id, message.occurred_at, message.content.get("referral"))
        urls = [url for item in message.media if isinstance(url := item.get("url"), str)]
        message_id = await self._insert_message(
            conversation_id,
            contact_id,
            direction="in",
            status="received",
            message_type=message.kind,
            body=message.body,
            media_urls=urls,
            reply_to=message.reply_to,
            waha_message_id=message.wamid,
            metadata={**message.content, **({"media": list(message.media)} if message.media else {})},
            occurred_at=message.occurred_at,
        )
        await self._ctx.emit(
            "message.received",
            entity_kind="message",
            entity_id=message_id,
            payload={
                "direction": "in",
                "conversation_id": str(conversation_id),
                "contact_id": str(contact_id),
                "body": message.body,
                "media_urls": urls or None,
                "waha_message_id": message.wamid,
                "message_id": str(message_id),
            },
        )
        await self._message_fact(
            contact_id, "received", "Message Received", message.wamid, message_id, message.occurred_at
        )
        if message.stop_word is not None:
            await self._stopped(contact_id, message.stop_word, message.occurred_at)

    async def _outgoing(self, message: f.OutgoingMessage) -> None:
        contact_id = await self._contact(message.person)
        if contact_id is None or await self._known(message.wamid):
            return
        conversation_id = await self._conversation(contact_id, message.occurred_at, None)
        message_id = await self._insert_message(
            conversation_id,
            contact_id,
            direction="out",
            status="sent",
            message_type=message.kind,
            body=message.body,
            media_urls=[],
            reply_to=None,
            waha_message_id=message.wamid,
            metadata=dict(message.content),
            occurred_at=message.occurred_at,
        )
        await self._sent(message_id, conversation_id, contact_id, message.body, message.wamid)
        await self._message_fact(contact_id, "sent", "Message Sent", message.wamid, message_id, message.occurred_at)

    async def _known(self, wamid: str) -> bool:
        return await self._one("message", waha_message_id=wamid) is not None

    async def _conversation(self, contact_id: UUID, at: datetime, referral: Any) -> UUID:
        """The open conversation, opened by this message if there is none."""
        row = await self._one(
            "open_conversation",
            contact_id=contact_id,
            channel_id=self._part.channel_id,
            context=Jsonb({"referral": referral} if referral else {}),
        )
        assert row is not None
        conversation_id: UUID = row[0]
        if row[1]:
            await self._ctx.emit(
                "conversation.opened",
                entity_kind="conversation",
                entity_id=conversation_id,
                payload={
                    "conversation_id": str(conversation_id),
                    "contact_id": str(contact_id),
                    "channel": "whatsapp",
                },
            )
            await self._record(
                contact_id,
                fact=f"conversation_opened:{conversation_id}",
                event_type="conversation_started",
                metric=None,
                occurred_at=at,
                entity_type="conversation",
                entity_id=str(conversation_id),
                object_id=str(conversation_id),
                properties={"channel": "whatsapp", "context": "ad" if referral else None},
            )
        return conversation_id

    async def _insert_message(
        self, conversation_id: UUID, contact_id: UUID, *, metadata: Mapping[str, Any], **values: Any
    ) -> UUID:
        row = await self._one(
            "insert_message",
            conversation_id=conversation_id,
            contact_id=contact_id,
            metadata=to_json(metadata, "metadata"),
            **values,
        )
        assert row is not None  # `_known` said no, and this person's locks are ours
        self._applied.counts["messages"] += 1
        return UUID(str(row[0]))

    async def _sent(
        self, message_id: UUID, conversation_id: UUID, contact_id: UUID, body: str | None, wamid: str
    ) -> None:
        await self._ctx.emit(
            "message.sent",
            entity_kind="message",
            entity_id=message_id,
            payload={
                "direction": "out",
                "conversation_id": str(conversation_id),
                "contact_id": str(contact_id),
                "channel": "whatsapp",
                "body": body,
                "message_id": str(message_id),
                "waha_message_id": wamid,
            },
        )

    async def _message_change(self, change: f.MessageChange) -> None:
        await self._contact(change.person)
        row = await self._one("message", waha_message_id=change.wamid)
        stored = await self._one(
            "insert_message_event",
            message_id=None if row is None else row[0],
            waha_message_id=change.wamid,
            kind=change.kind,
            source=self._part.source,
            external_id=f"{change.kind}:{change.change_id}",
            error_code=None,
            error_message=None,
            retryable=None,
            details=to_json(change.content, "details"),
            occurred_at=change.occurred_at,
        )
        self._applied.counts["message_events"] += stored is not None

    async def _message_status(self, status: f.MessageStatus) -> None:
        kind = _STATUS_KINDS.get(status.status)
        if kind is None:  # 'deleted' and 'warning' of old versions: nothing becomes of them
            return
        row = await self._one("message", waha_message_id=status.wamid)
        message_id, conversation_id, contact_id, before, template_id, body = row or (None,) * 6
        stored = await self._one(
            "insert_message_event",
            message_id=message_id,
            waha_message_id=status.wamid,
            kind=kind,
            source=self._part.source,
            # 'played' after 'read' is one reading
            external_id=f"{kind}:{status.wamid}",
            error_code=_cut(status.error_code, 100),
            error_message=_cut(status.error_message, 1000),
            retryable=status.retryable if kind == "failed" else None,
            details=Jsonb({}),
            occurred_at=status.occurred_at,
        )
        if stored is None:
            return
        self._applied.counts["message_events"] += 1
        if message_id is not None and contact_id is not None:
            await self._status_event(status, kind, message_id, conversation_id, contact_id, before, body)
        contact_id = contact_id or await self._find(status.person)
        metrics = _STATUS_METRICS | (_TEMPLATE_METRICS if template_id is not None else {})
        if kind in metrics:
            await self._message_fact(
                contact_id, kind, metrics[kind], status.wamid, message_id, status.occurred_at, status.error_code
            )

    async def _status_event(
        self,
        status: f.MessageStatus,
        kind: str,
        message_id: UUID,
        conversation_id: UUID,
        contact_id: UUID,
        before: str,
        body: str | None,
    ) -> None:
        """The domain event of a status. 'sent' is emitted by whoever sent; here only if that was never recorded."""
        payload: dict[str, Any] = {"message_id": str(message_id)}
        if kind == "sent":
            if before in ("queued", "sending"):
                await self._sent(message_id, conversation_id, contact_id, body, status.wamid)
            return
        if kind == "failed":
            payload |= {
                "error_code": status.error_code or "unknown",
                "error_message": status.error_message or "",
                "retryable": status.retryable,
            }
        else:
            payload[f"{kind}_at"] = status.occurred_at
        await self._ctx.emit(f"message.{kind}", entity_kind="message", entity_id=message_id, payload=payload)
        if status.error_code == WINDOW_EXPIRED_CODE:
            await self._ctx.emit(
                "system.window_24h_expired",
                entity_kind="conversation",
                entity_id=conversation_id,
                payload={
                    "conversation_id": str(conversation_id),
                    "contact_id": str(contact_id),
                    "expired_at": status.occurred_at,
                },
            )

    async def _message_fact(
        self,
        contact_id: UUID | None,
        fact: str,
        metric: str,
        wamid: str,
        message_id: UUID | None,
        at: datetime,
        error_code: str | None = None,
    ) -> None:
        await self._record(
            contact_id,
            fact=f"{fact}:{wamid}",
            event_type=None,
            metric=metric,
            occurred_at=at,
            entity_type="message",
            entity_id=wamid,
            object_id=str(message_id) if message_id else None,
            object_id_ref=wamid,
            properties={"error_code": error_code} if error_code else {},
        )

    # What a person wants

    async def _stopped(self, contact_id: UUID, keyword: str, at: datetime) -> None:
        if await self._one("set_subscriber_state", contact_id=contact_id, state="blocked", at=at) is None:
            return
        await self._ctx.emit(
            "system.contact_blocked_by_stop",
            entity_kind="contact",
            entity_id=contact_id,
            payload={"contact_id": str(contact_id), "keyword": keyword},
        )
        await self._blocked(contact_id)

    async def _blocked(self, contact_id: UUID) -> None:
        await self._ctx.emit("contact.blocked", entity_kind="contact", entity_id=contact_id, payload={"reason": "stop"})

    async def _preference(self, fact: f.Preference) -> None:
        contact_id = await self._contact(fact.person)
        if contact_id is None:
            return
        state = "subscribed" if fact.granted else "unsubscribed"
        if await self._one("set_subscriber_state", contact_id=contact_id, state=state, at=fact.occurred_at) is None:
            return
        await self._ctx.emit(
            "lgpd.consent_changed",
            entity_kind="contact",
            entity_id=contact_id,
            payload={
                "contact_id": str(contact_id),
                "consent_type": fact.consent_type,
                "granted": fact.granted,
                "source": self._part.source,
            },
        )
        if not fact.granted:
            await self._blocked(contact_id)

    async def _number_changed(self, fact: f.NumberChanged) -> None:
        contact_id = await self._contact(fact.person)
        if contact_id is None:
            return
        new = fact.new_identity
        row = await self._one(
            "add_identity",
            kind=new.kind,
            value=new.value,
            source=new.source,
            contact_id=contact_id,
            as_received=new.as_received,
        )
        if row is None:
            await self._conflict(contact_id)
            return
        await self._execute("set_phone", contact_id=contact_id, phone=new.value)
        await self._record(
            contact_id,
            fact=f"number_changed:{contact_id}:{new.value}",
            event_type=None,
            metric="Contact Updated",
            occurred_at=fact.occurred_at,
            entity_type="contact",
            entity_id=str(contact_id),
        )

    async def _privacy(self, fact: f.PrivacyRequest) -> None:
        source = self._part.source
        key = f"{source}:{self._part.channel_id}:{fact.request_type}:{fact.request_id}"
        if source == "nuvemshop" and fact.request_type == "redact" and fact.customer_id:
            await self._ctx.emit(
                "nuvemshop.customer_redact_received",
                entity_kind="customer",
                payload={"ns_customer_id": fact.customer_id, "ns_request_id": fact.request_id},
                idempotency_key=_cut(f"ns_redact:{key}", 255),
            )
        contact_id = await self._find(fact.person)
        if contact_id is None:
            # Nobody of that name is here: nothing to give out or to erase, and that is the answer.
            self._applied.counts["customer_unknown"] += 1
            return
        await self._ctx.emit(
            "lgpd.data_request_received",
            entity_kind="contact",
            entity_id=contact_id,
            payload={
                "request_id": fact.request_id,
                "request_type": fact.request_type,
                "contact_id": str(contact_id),
                "channel": source,
            },
            idempotency_key=_cut(f"lgpd:{key}", 255),
        )
        self._applied.counts["domain_events"] += 1

    async def _uninstalled(self) -> None:
        await self._execute("uninstall_channel", channel_id=self._part.channel_id)
        await self._execute(
            "alert",
            kind="channel_uninstalled",
            severity="warning",
            audience="admins",
            title=f"{self._part.source} ended the connection",
            details=Jsonb({"channel_id": str(self._part.channel_id)}),
            dedupe_key=f"channel_uninstalled:{self._part.channel_id}",
            event_id=self._delivery.event.id,
        )

    # The connection

    async def _one(self, query: str, /, **parameters: Any) -> tuple[Any, ...] | None:
        given = {"organization_id": self._organization_id, **parameters}
        cursor = await self._ctx.connection.execute(_SQL[query], given)
        row: tuple[Any, ...] | None = await cursor.fetchone()
        return row

    async def _execute(self, query: str, /, **parameters: Any) -> None:
        await self._ctx.connection.execute(_SQL[query], {"organization_id": self._organization_id, **parameters})


def _identities(person: f.Person) -> Jsonb:
    return Jsonb(
        [
            {"kind": i.kind, "source": i.source, "value": i.value, "as_received": i.as_received}
            for i in person.identities
        ]
    )


def _cut(text: str | None, length: int) -> str | None:
    return None if text is None else text[:length]
