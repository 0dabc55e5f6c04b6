"""What WAHA and Evolution have in common: both speak for a linked phone, in the words of WhatsApp's own protocol.

A message of ours comes back to us (`fromMe`): sent by a call of the gateway's API, or typed on the phone. It is never
`received`. Groups, broadcasts and newsletters make no contact, and neither does the business's own number.

Answers go to the chat's address as received; it is kept with the message, beside the id that the gateway knows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from producers.ingest.normalize import baileys, jids
from producers.ingest.normalize import phone as phones
from producers.ingest.normalize.facts import (
    IncomingMessage,
    MessageChange,
    MessageStatus,
    OutgoingMessage,
)
from producers.ingest.normalize.gathered import Gathered
from producers.ingest.normalize.keywords import STOPPING_KINDS, stop_word

# What the protocol calls an error is a message that WhatsApp's server refused: the account is restricted, or the other
# side cannot be reached. The same message again does not help, and costs the number.
ERROR_CODE = "error"

Status = Literal["sent", "delivered", "read", "played", "failed"]


@dataclass(frozen=True)
class Envelope:
    """What stands around the message itself."""

    chat: jids.Chat
    from_me: bool
    message_id: str
    """The bare id that the writer's device gave it."""
    provider_id: str
    """The id as the gateway writes it: its API takes this one."""
    at: datetime
    name: str | None = None
    through_api: bool = True
    own_number: str | None = None

    @property
    def nobody(self) -> str | None:
        """Why this is about nobody."""
        if why := self.chat.nobody:
            return why
        own = phones.whatsapp(self.own_number)
        if own and any(jid.kind == "phone" and phones.whatsapp(jid.user) == own for jid in self.chat.addresses):
            return "own_chat"
        return None


def message(envelope: Envelope, said: baileys.Said | baileys.Change | None, found: Gathered) -> None:
    """One message, or what it does to an earlier one."""
    if not envelope.chat.addresses:
        found.unknown("message")
    elif why := envelope.nobody:
        found.nothing(why)
    elif said is None:
        found.nothing("no_content")
    elif isinstance(said, baileys.Change):
        _change(envelope, said, found)
    elif envelope.from_me:
        _outgoing(envelope, said, found)
    else:
        _incoming(envelope, said, found)


def _incoming(envelope: Envelope, said: baileys.Said, found: Gathered) -> None:
    name, *others = envelope.chat.names(False, envelope.message_id)
    found.fact(
        "message",
        IncomingMessage(
            person=envelope.chat.person(envelope.name),
            wamid=name,
            other_names=tuple(others),
            kind=said.kind,
            body=said.body,
            media=said.media,
            reply_to=jids.named(said.reply_to, envelope.chat, from_me=True),
            content=_content(envelope, said),
            occurred_at=envelope.at,
            stop_word=stop_word(said.body) if said.kind in STOPPING_KINDS else None,
        ),
    )


def _outgoing(envelope: Envelope, said: baileys.Said, found: Gathered) -> None:
    content = _content(envelope, said)
    if said.media:
        content["media"] = list(said.media)
    found.fact(
        "echo",
        OutgoingMessage(
            person=envelope.chat.person(),
            wamid=jids.own_name(envelope.message_id),
            kind=said.kind,
            body=said.body,
            content=content,
            occurred_at=envelope.at,
            through_api=envelope.through_api,
        ),
    )


def _content(envelope: Envelope, said: baileys.Said) -> dict[str, Any]:
    return {**said.content, "chat": envelope.chat.sent_to, "provider_id": envelope.provider_id}


def _change(envelope: Envelope, change: baileys.Change, found: Gathered) -> None:
    """A reaction says whose message it is about; an edit and a taking back are about the writer's own."""
    from_me = change.key.flag("fromMe") if change.kind == "reaction" else envelope.from_me
    names = jids.named(change.key.identifier("id"), envelope.chat, from_me)
    changed(envelope, change.kind, names, change.content, found)


def changed(
    envelope: Envelope,
    kind: Literal["edited", "revoked", "reaction"],
    names: tuple[str, ...],
    content: Mapping[str, Any],
    found: Gathered,
    again: str | None = None,
) -> None:
    """Something that happens to the message of these names.

    It is named by the envelope's own id; where that is the changed message's, `again` tells one change from the next.
    """
    if not names or not envelope.chat.addresses:
        found.unknown(kind)
        return
    if why := envelope.nobody:
        found.nothing(why)
        return
    target, *others = names
    if again is not None:
        change_id = f"{target}:{again}"
    else:
        change_id = envelope.chat.names(envelope.from_me, envelope.message_id)[0]
    found.fact(
        kind,
        MessageChange(
            person=envelope.chat.person(envelope.name),
            wamid=target,
            other_names=tuple(others),
            change_id=change_id,
            kind=kind,
            content={**content, "from_me": True} if kind == "reaction" and envelope.from_me else content,
            occurred_at=envelope.at,
            # Who takes a message back, or is written to by us, does not become a contact by that.
            of_known_only=kind == "revoked" or envelope.from_me,
        ),
    )


def digest(*values: object) -> str:
    """Sixteen digits that tell these values from others, for names of facts."""
    return hashlib.sha256(repr(values).encode("utf-8", "replace")).hexdigest()[:16]


def status(chat: jids.Chat, message_id: str, kind: Status, at: datetime, found: Gathered) -> None:
    """What became of a message of ours: it is found without knowing who it went to, as long as that was no group."""
    if (why := chat.nobody) and why != jids.NOT_A_PERSON:
        found.nothing(why)
        return
    failed = kind == "failed"
    found.fact(
        "status",
        MessageStatus(
            person=chat.person(),
            wamid=jids.own_name(message_id),
            status=kind,
            occurred_at=at,
            error_code=ERROR_CODE if failed else None,
            error_message="WhatsApp did not take the message" if failed else None,
        ),
    )
