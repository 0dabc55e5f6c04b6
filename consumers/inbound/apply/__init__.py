"""Facts into rows and events, in the delivery's own transaction: one module for each kind of thing that is written.

What must stay true:
- applying the same facts again changes nothing and emits nothing: every fact has a name, and its name is unique;
- an older state never overwrites a newer one;
- a contact event without a contact is not recorded, and says so; the order it is about is kept all the same.

Contacts come first: `upsert_contact` holds the locks of a person's identities to the end of the transaction, so what
follows for that person (is the message known? is a conversation open?) is asked and answered without a race.
"""

from __future__ import annotations

from typing import assert_never

from consumers.inbound.apply.checkouts import Checkouts
from consumers.inbound.apply.contact_events import ContactEvents
from consumers.inbound.apply.contacts import Contacts
from consumers.inbound.apply.messages import Messages
from consumers.inbound.apply.orders import Orders, OrderUnknown
from consumers.inbound.apply.privacy import Privacy
from consumers.inbound.apply.sessions import Sessions
from consumers.inbound.apply.writing import Applied, Part, Writing
from consumers.worker import Context, Delivery
from producers.ingest.normalize import facts as f

__all__ = ["Applied", "OrderUnknown", "Part", "apply"]


async def apply(
    normalized: f.Normalized, part: Part, delivery: Delivery, ctx: Context, *, wait_for_orders: bool = True
) -> Applied:
    """Write all facts of one delivery. NotYet, to be rolled back, when `wait_for_orders` and an order or a payment is
    missing."""
    writing = Writing(part, delivery, ctx)
    orders = Orders(writing, wait_for_orders)
    events = ContactEvents(writing, orders)
    checkouts = Checkouts(writing, events)
    contacts = Contacts(writing, events)
    messages = Messages(writing, contacts, events, wait_for_orders)
    privacy = Privacy(writing, contacts)

    contact_id = await contacts.of(normalized.person)
    for fact in normalized.facts:
        match fact:
            case f.ContactEvent():
                await events.write(fact, await contacts.of(fact.of_person) if fact.of_person else contact_id)
            case f.OrderState():
                await orders.write(fact, await contacts.of(fact.of_person) if fact.of_person else contact_id)
                await checkouts.completed(fact)
            case f.CheckoutState():
                await checkouts.seen(fact)
            case f.OrderEvent():
                await orders.event(fact, contact_id)
            case f.CartAbandoned():
                await orders.cart_abandoned(fact, contact_id)
            case f.ProductSynced():
                await orders.product(fact)
            case f.IncomingMessage():
                await messages.incoming(fact)
            case f.OutgoingMessage():
                await messages.outgoing(fact)
            case f.MessageChange():
                await messages.change(fact)
            case f.MessageStatus():
                await messages.status(fact)
            case f.Preference():
                await contacts.preference(fact)
            case f.NumberChanged():
                await contacts.number_changed(fact)
            case f.PersonNamed():
                await contacts.named(fact)
            case f.SessionChanged():
                await Sessions(writing).changed(fact)
            case f.PrivacyRequest():
                await privacy.request(fact)
            case f.ChannelUninstalled():
                await privacy.uninstalled()
            case _:
                assert_never(fact)
    return writing.applied
