"""What a sender asks of us: a person's data or its erasure, and the end of the connection.

What must stay true: a request about somebody who is not here is a success, and recorded as one.
"""

from __future__ import annotations

from consumers.inbound.apply.contacts import Contacts
from consumers.inbound.apply.writing import Writing, cut
from producers.ingest.normalize import facts as f


class Privacy:
    def __init__(self, writing: Writing, contacts: Contacts) -> None:
        self._writing = writing
        self._contacts = contacts

    async def request(self, fact: f.PrivacyRequest) -> None:
        source = self._writing.part.source
        key = f"{source}:{self._writing.part.channel_id}:{fact.request_type}:{fact.request_id}"
        if source == "nuvemshop" and fact.request_type == "redact" and fact.customer_id:
            await self._writing.emit(
                "nuvemshop.customer_redact_received",
                entity_kind="customer",
                payload={"ns_customer_id": fact.customer_id, "ns_request_id": fact.request_id},
                idempotency_key=cut(f"ns_redact:{key}", 255),
            )
        contact_id = await self._contacts.find(fact.person)
        if contact_id is None:
            # Nobody of that name is here: nothing to give out or to erase, and that is the answer.
            self._writing.counts["customer_unknown"] += 1
            return
        await self._writing.emit(
            "lgpd.data_request_received",
            entity_kind="contact",
            entity_id=contact_id,
            payload={
                "request_id": fact.request_id,
                "request_type": fact.request_type,
                "contact_id": str(contact_id),
                "channel": source,
            },
            idempotency_key=cut(f"lgpd:{key}", 255),
        )
        self._writing.counts["domain_events"] += 1

    async def uninstalled(self) -> None:
        part = self._writing.part
        await self._writing.execute("uninstall_channel", channel_id=part.channel_id)
        await self._writing.alert(
            "channel_uninstalled",
            title=f"{part.source} ended the connection",
            audience="admins",
            dedupe_key=f"channel_uninstalled:{part.channel_id}",
            details={"channel_id": str(part.channel_id)},
        )
