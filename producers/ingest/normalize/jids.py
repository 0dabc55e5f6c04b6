"""WhatsApp's own addresses (JIDs) and the names of messages, as the gateways (WAHA, Evolution) write them.

`5511900010001@s.whatsapp.net` is a person by its number, with `:90` for one of its devices; `@c.us` is the same domain
under its old name. `@lid` is a person by a hidden number: those digits are never a phone. Groups, broadcast lists,
status and newsletters are nobody.

A message is named by who wrote it, the chat, and the id that the writer's device gave it. Our own are unique without
the chat, which the gateways name now by number and now by hidden number: `true_<id>`. Others' ids are unique in their
chat only: `false_<number>@c.us_<id>`, the number with its ninth digit. In the
ledger the connection's id follows (`ledger_id`). Whoever sends through a gateway writes the same name down, and the
acknowledgements find it.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Literal
from uuid import UUID

from producers.ingest.normalize import phone as phones
from producers.ingest.normalize.facts import Identity, Person, external_identity, person

LID_SOURCE = "whatsapp_lid"
"""Hidden numbers are the same for every business: one person, whichever gateway says so."""
NOT_A_PERSON = "not_a_person"
MAX_ID = 120

_JID = re.compile(r"(?P<user>[0-9A-Za-z.-]{1,64})(?:_[0-9]+)?(?::(?P<device>[0-9]+))?@(?P<server>[a-z.]{1,40})\Z")
_PHONE_SERVERS = frozenset({"s.whatsapp.net", "c.us", "hosted"})
_LID_SERVERS = frozenset({"lid", "hosted.lid"})
_NOBODY = {"g.us": "group", "broadcast": "broadcast", "newsletter": "newsletter"}
_SERIALIZED = re.compile(r"(true|false)_([^_]+@[a-z.]+)_([^_]+)(?:_(.+))?\Z")

JidKind = Literal["phone", "lid", "group", "broadcast", "newsletter", "other"]


@dataclass(frozen=True)
class Jid:
    """One address. `user` is without the device."""

    kind: JidKind
    user: str
    as_received: str

    @property
    def is_person(self) -> bool:
        return self.kind in ("phone", "lid")


def parse(text: str | None) -> Jid | None:
    """An address, or None for what is none. WhatsApp's own account (0) is nobody: 'other'."""
    if not text:
        return None
    found = _JID.match(text.strip())
    if found is None:
        return None
    user, server = found["user"], found["server"]
    kind: JidKind = "other"
    if server in _PHONE_SERVERS and phones.whatsapp(user):
        kind = "phone"
    elif server in _LID_SERVERS and user.isdigit():
        kind = "lid"
    elif server in _NOBODY:
        kind = _NOBODY[server]  # type: ignore[assignment]  # the three of them are literals of the kind
    return Jid(kind, user, text.strip())


@dataclass(frozen=True)
class Chat:
    """Who is at the other end, by every address that a delivery gives."""

    addresses: tuple[Jid, ...]

    @property
    def nobody(self) -> str | None:
        """Why this chat is with nobody in particular ('group', ...); None when it is with a person."""
        first = self.addresses[0].kind if self.addresses else "other"
        if first in _NOBODY.values():
            return first
        return None if any(jid.is_person for jid in self.addresses) else NOT_A_PERSON

    @property
    def sent_to(self) -> str | None:
        """The address as received: answers go there."""
        return self.addresses[0].as_received if self.addresses else None

    def person(self, name: str | None = None) -> Person:
        """The person, by hidden number and phone. The number in the form that WhatsApp knows is kept for sending."""
        return person(*(_identity(jid) for jid in self.addresses if jid.is_person), name=name)

    def names(self, from_me: bool, message_id: str) -> tuple[str, ...]:
        """The names of a message of this chat, the best first."""
        if from_me:
            return (own_name(message_id),)
        people = sorted((jid for jid in self.addresses if jid.is_person), key=lambda jid: jid.kind != "phone")
        return tuple(dict.fromkeys(f"false_{_written(jid)}_{_short(message_id)}" for jid in people))


def chat(*texts: str | None) -> Chat:
    """The chat of these addresses; the first is the one the gateway calls it by."""
    return Chat(tuple(jid for text in texts if (jid := parse(text)) is not None))


def own_name(message_id: str) -> str:
    """The name of a message that the business sent, through us or from the phone."""
    return f"true_{_short(message_id)}"


def ledger_id(name: str, channel_id: UUID) -> str:
    """A message's id in the ledger (`messages.waha_message_id`): ids are unique only inside one linked phone."""
    return f"{name}:{channel_id}"


def tail(ledger_name: str) -> str | None:
    """What follows the chat in another's message's name; None for one of ours, which has no chat."""
    kind, _, rest = ledger_name.partition("_")
    chat_name, underscore, name = rest.partition("_")
    return f"_{name}" if kind == "false" and underscore and "@" in chat_name else None


def serialized(text: str | None) -> tuple[bool, str, str] | None:
    """WAHA's id of a message as (from us, chat's address, bare id); None for a bare id or none at all."""
    found = _SERIALIZED.match(text.strip()) if text else None
    return None if found is None else (found[1] == "true", found[2], found[3])


def named(text: str | None, where: Chat, from_me: bool = False) -> tuple[str, ...]:
    """Every name that the message may have which is called `text` in this chat, by a whole id or by a bare one.

    `from_me` is who most likely wrote it; it is not always known, and not always said right.
    """
    if not text or not text.strip():
        return ()
    whole = serialized(text)
    if whole is None:
        ours, theirs = (own_name(text.strip()),), where.names(False, text.strip())
        return (*ours, *theirs) if from_me else (*theirs, *ours)
    from_me, address, message_id = whole
    return Chat((*chat(address).addresses, *where.addresses)).names(from_me, message_id)


def _identity(jid: Jid) -> Identity | None:
    if jid.kind == "lid":
        return external_identity(LID_SOURCE, jid.user)
    number = phones.whatsapp(jid.user)
    return Identity("phone", number, as_received=jid.user) if number else None


def _written(jid: Jid) -> str:
    if jid.kind == "lid":
        return f"{jid.user}@lid"
    return f"{(phones.whatsapp(jid.user) or jid.user).removeprefix('+')}@c.us"


def _short(message_id: str) -> str:
    """An id as it is, unless it is odd: then a hash of all of it, so that two never become one."""
    if len(message_id) <= MAX_ID and message_id.isascii() and message_id.isprintable():
        return message_id
    return hashlib.sha256(message_id.encode("utf-8", "replace")).hexdigest()
