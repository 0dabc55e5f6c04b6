"""Contacts by their identities, and what a person says about itself: its new number, whether it wants messages.

What must stay true: identities that name two contacts merge nothing silently, a person is asked, unless WhatsApp itself
says whose a hidden number is; a person's newest word counts, and an older one that comes late changes nothing.
"""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from psycopg.types.json import Jsonb

from consumers.inbound.apply.contact_events import ContactEvents
from consumers.inbound.apply.writing import Writing
from producers.ingest.normalize import facts as f
from producers.ingest.normalize.jids import LID_SOURCE
from producers.ingest.normalize.keywords import StopWord


class Contacts:
    def __init__(self, writing: Writing, events: ContactEvents) -> None:
        self._writing = writing
        self._events = events

    async def of(self, person: f.Person | None) -> UUID | None:
        """The person's contact, made if there is none; None for nobody. Holds the locks of its identities."""
        if not person:
            return None
        source = self._writing.part.source
        row = await self._writing.one("upsert_contact", identities=_identities(person), name=person.name, source=source)
        assert row is not None
        contact_id, created, conflict = row
        if created:
            await self._created(contact_id, person)
        if conflict:
            unmasked = await self._unmasked(person)
            if unmasked is not None:
                return unmasked
            await self._conflict(person)
        return UUID(str(contact_id))

    async def _unmasked(self, person: f.Person) -> UUID | None:
        """WhatsApp itself says whose a hidden number is: who was known by nothing else is merged into the phone's
        contact, and that one returned. None when it is not as clear as that."""
        lid = next((i.value for i in person.identities if i.source == LID_SOURCE), None)
        phone = next((i.value for i in person.identities if i.kind == "phone"), None)
        row = await self._writing.one("hidden_contact", lid=lid, phone=phone) if lid and phone else None
        if row is None:
            return None
        merged = await self._writing.one(
            "merge_hidden",
            from_contact_id=row[0],
            into_contact_id=row[1],
            actor_id=self._writing.delivery.worker,
            metadata=self._writing.metadata(),
        )
        return None if merged is None else UUID(str(merged[0]))

    async def find(self, person: f.Person) -> UUID | None:
        """The person's contact if there is one."""
        if not person:
            return None
        row = await self._writing.one("find_contact", identities=_identities(person))
        return None if row is None else row[0]

    async def _created(self, contact_id: UUID, person: f.Person) -> None:
        part = self._writing.part
        self._writing.counts["contacts"] += 1
        phone = next((i.value for i in person.identities if i.kind == "phone"), None)
        await self._writing.emit(
            "contact.created",
            entity_kind="contact",
            entity_id=contact_id,
            payload={"phone": phone, "name": person.name, "source": part.source},
        )
        await self._events.record(
            contact_id,
            fact=f"contact_created:{contact_id}",
            event_type=None,
            metric="Contact Created",
            occurred_at=part.received_at,
            entity_type="contact",
            entity_id=str(contact_id),
        )

    async def _conflict(self, person: f.Person) -> None:
        """One person of a delivery is several contacts: nothing is merged silently, somebody is asked."""
        rows = await self._writing.rows("contacts_of", identities=_identities(person))
        stays, *others = [str(row[0]) for row in rows]
        await self._writing.alert(
            "contact_conflict",
            title="Two contacts may be one person",
            audience="operators",
            dedupe_key=f"contact_conflict:{stays}",
            details={
                "contact_ids": [stays, *others],
                "webhook_event_id": str(self._writing.part.id),
                "commands": [
                    f"afluente contact merge {other} --into {stays} --org {self._writing.delivery.organization_id}"
                    " --reason 'one person'"
                    for other in others
                ],
            },
        )

    async def number_changed(self, fact: f.NumberChanged) -> None:
        contact_id = await self.of(fact.person)
        if contact_id is None:
            return
        new = fact.new_identity
        row = await self._writing.one(
            "add_identity",
            kind=new.kind,
            value=new.value,
            source=new.source,
            contact_id=contact_id,
            as_received=new.as_received,
        )
        if row is None:
            await self._conflict(f.Person((*fact.person.identities, new)))
            return
        is_phone = new.kind == "phone"
        if is_phone:
            await self._writing.execute("set_phone", contact_id=contact_id, phone=new.value, at=fact.occurred_at)
        await self._events.record(
            contact_id,
            # Named by what happened, and not by our contact: that may be another one by the time it is told again.
            fact=f"{'number' if is_phone else 'user_id'}_changed:{new.value}:{fact.occurred_at:%Y%m%dT%H%M%S}",
            event_type=None,
            metric="Contact Updated",
            occurred_at=fact.occurred_at,
            entity_type="contact",
            entity_id=str(contact_id),
        )

    async def stopped(self, contact_id: UUID, said: StopWord, at: datetime) -> None:
        """The person wrote a word that ends all messages to it."""
        if not await self._set_state(contact_id, "blocked", at):
            return
        await self._writing.emit(
            "system.contact_blocked_by_stop",
            entity_kind="contact",
            entity_id=contact_id,
            payload={"contact_id": str(contact_id), "keyword": said.keyword, "word": said.word},
        )
        await self._blocked(contact_id)

    async def named(self, fact: f.PersonNamed) -> None:
        """A name for somebody who is a contact already."""
        if await self.find(fact.person) is not None:
            await self.of(fact.person)

    async def preference(self, fact: f.Preference) -> None:
        contact_id = await self.of(fact.person)
        if contact_id is None:
            return
        state = "subscribed" if fact.granted else "unsubscribed"
        if not await self._set_state(contact_id, state, fact.occurred_at):
            return
        await self._writing.emit(
            "lgpd.consent_changed",
            entity_kind="contact",
            entity_id=contact_id,
            payload={
                "contact_id": str(contact_id),
                "consent_type": fact.consent_type,
                "granted": fact.granted,
                "source": self._writing.part.source,
            },
        )
        if not fact.granted:
            await self._blocked(contact_id)

    async def _set_state(self, contact_id: UUID, state: str, at: datetime) -> bool:
        """Whether this word is the newest and makes the state another one."""
        row = await self._writing.one("set_subscriber_state", contact_id=contact_id, state=state, at=at)
        return row is not None and row[0]

    async def _blocked(self, contact_id: UUID) -> None:
        await self._writing.emit(
            "contact.blocked", entity_kind="contact", entity_id=contact_id, payload={"reason": "stop"}
        )


def _identities(person: f.Person) -> Jsonb:
    return Jsonb(
        [
            {"kind": i.kind, "source": i.source, "value": i.value, "as_received": i.as_received}
            for i in person.identities
        ]
    )
