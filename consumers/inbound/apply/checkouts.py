"""Checkouts that are left: no shop says so, a time without a change and without an order does.

What must stay true: a checkout has one timer on its way at most, an event that comes when it is due; one that became an
order by then is not left, whichever came first, order or checkout; each is found left once.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from uuid import UUID

import sql
from consumers.inbound.apply.contact_events import ContactEvents
from consumers.inbound.apply.orders import Orders
from consumers.inbound.apply.writing import Part, Writing, cut
from consumers.worker import Context, Delivery
from producers import Causation, emit_async
from producers.ingest.normalize import facts as f
from producers.ingest.normalize.money import as_text

QUERIES = sql.queries("inbound")

DUE = "webhook.checkout_due"
# What is older when it is first heard of is history: a replay, a shop connected late. Nobody waits for it.
HISTORY = timedelta(days=7)


class Checkouts:
    def __init__(self, writing: Writing, events: ContactEvents) -> None:
        self._writing = writing
        self._events = events

    async def seen(self, checkout: f.CheckoutState) -> None:
        """A checkout began or changed: its newest state is kept, and a timer is set if none is on its way."""
        part = self._writing.part
        row = await self._writing.one(
            "checkout_seen",
            source=part.source,
            token=checkout.token,
            channel_id=part.channel_id,
            cart_token=cut(checkout.cart_token, 255),
            webhook_event_id=part.id,
            value=checkout.value,
            currency=checkout.currency,
            product_ids=[text[:255] for text in checkout.product_ids],
            stage=checkout.stage,
            source_updated_at=checkout.updated_at,
            completed_at=checkout.completed_at,
        )
        if row is None or row[0] is None:
            return
        due_at = checkout.updated_at + checkout.left_after
        if checkout.updated_at > self._writing.ctx.now() - HISTORY:
            await self._set_timer(part.source, checkout.token, due_at, checkout.left_after)

    async def completed(self, order: f.OrderState) -> None:
        """An order came of checkouts. Those found left before are recovered."""
        if order.checkout_token is None and order.cart_token is None:
            return
        part = self._writing.part
        at = order.placed_at or order.updated_at
        rows = await self._writing.rows(
            "checkout_completed",
            source=part.source,
            token=cut(order.checkout_token, 255),
            cart_token=cut(order.cart_token, 255),
            channel_id=part.channel_id,
            completed_at=at,
        )
        for (token,) in rows:
            contact_id = await self._whose(token)
            await self._events.record(
                contact_id,
                fact=f"checkout_recovered:{token}",
                event_type=None,
                metric="Checkout Recovered",
                occurred_at=at,
                entity_type="checkout",
                entity_id=token,
                object_id_ref=order.external_id,
                value=order.total,
                currency=order.currency,
                properties={"order_number": order.number},
            )

    async def left(self, token: str, left_after: timedelta) -> None:
        """The timer has come: left, if nothing happened since; else it is set again, or over."""
        writing = self._writing
        row = await writing.one("checkout_due", source=writing.part.source, token=token)
        if row is None:
            return
        updated_at, value, currency, product_ids, stage = row
        due_at = updated_at + left_after
        if due_at > writing.ctx.now():
            await self._set_timer(writing.part.source, token, due_at, left_after)
            return
        contact_id = await self._whose(token)
        await writing.execute(
            "checkout_left",
            source=writing.part.source,
            token=token,
            # Without a contact nothing is recorded; one that gives its name later sets another timer.
            abandoned_at=updated_at if contact_id else None,
        )
        await self._events.record(
            contact_id,
            fact=f"checkout_abandoned:{token}",
            event_type="purchase_abandoned",
            metric=None,
            occurred_at=updated_at,
            entity_type="checkout",
            entity_id=token,
            object_id_ref=token,
            value=value,
            currency=currency,
            properties={
                "productIds": product_ids,
                "cartValue": as_text(value) if value is not None else None,
                "currency": currency,
                "stageAbandoned": stage,
            },
        )

    async def _set_timer(self, source: str, token: str, due_at: datetime, left_after: timedelta) -> None:
        await self._writing.execute("checkout_timer", source=source, token=token, due_at=due_at)
        event = self._writing.delivery.event
        cause = Causation.of(event)
        if event.event_type == DUE:
            # A timer that is set again is the same step of the chain: a long visit to a shop is no loop.
            cause = replace(cause, depth=max(cause.depth - 1, 1))
        await emit_async(
            self._writing.ctx.connection,
            DUE,
            entity_kind="checkout",
            payload={"source": source, "token": token, "left_after_s": int(left_after.total_seconds())},
            organization_id=event.organization_id,
            source=self._writing.delivery.worker,
            deliver_at=due_at,
            causation=cause,
        )

    async def _whose(self, token: str) -> UUID | None:
        """The contact of the fact that the checkout began."""
        row = await self._writing.one(
            "contact_of_fact", source=self._writing.part.source, external_event_id=f"checkout_started:{token}"
        )
        return None if row is None else UUID(str(row[0]))


async def due(delivery: Delivery, ctx: Context) -> None:
    """`webhook.checkout_due`: is it left? A checkout that was erased since, or is an order, is not."""
    payload = delivery.event.payload
    source, token = str(payload["source"]), str(payload["token"])
    cursor = await ctx.connection.execute(
        QUERIES["checkout"], {"organization_id": delivery.organization_id, "source": source, "token": token}
    )
    row = await cursor.fetchone()
    if row is None:
        return
    channel_id, webhook_event_id = row
    writing = Writing(Part(webhook_event_id, channel_id, source, ctx.now()), delivery, ctx)
    events = ContactEvents(writing, Orders(writing, wait_for_orders=False))
    await Checkouts(writing, events).left(token, timedelta(seconds=int(payload["left_after_s"])))
