"""Evolution API: events of a linked phone, in the words of the Baileys library.

`data` is one object or a list of them, for the same event. Events come dotted or in capitals; the receiver has written
their name one way (`messages.upsert`), and it is the delivery's topic.

`date_time` says Z and means the gateway's local time: beside a message's own time in the samples it is three hours off.
Statuses have no time of their own; they are taken to have happened when they came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime

from producers.ingest.normalize import baileys, gateways, jids, moments
from producers.ingest.normalize.document import Document
from producers.ingest.normalize.facts import Context, Normalized, PersonNamed, SessionChanged
from producers.ingest.normalize.gathered import Gathered

_STATUSES: Mapping[str, gateways.Status] = {
    "0": "failed", "2": "sent", "3": "delivered", "4": "read", "5": "played",
    "ERROR": "failed", "SERVER_ACK": "sent", "DELIVERY_ACK": "delivered", "READ": "read", "PLAYED": "played",
}  # fmt: skip
# 'DELETED' is what Evolution calls every update that has no status.
_NO_STATUS = ("1", "PENDING", "DELETED")
_REVOKED_STUBS = ("1", "REVOKE")
_REVOKED_TYPES = ("0", "REVOKE")
# Which ends of a connection come back by themselves, and which need a person: logged out, forbidden, another device
# took the place, the keys are broken.
_NEEDS_A_PERSON = frozenset({401, 403, 411, 440, 500})
# Events about no message of a person's, by the first word of their name; sets are what the phone knew before.
_PASSED_OVER: Mapping[str, str] = {
    "presence": "presence",
    "chats": "chat",
    "groups": "group",
    "group": "group",
    "call": "call",
    "labels": "label",
    "qrcode": "qr_code",
    "application": "gateway_started",
    "instance": "instance",
    "status": "instance",
    "typebot": "bot",
}
_HISTORY = frozenset({"messages.set", "contacts.set", "chats.set", "messaging.history.set"})


def normalize(document: Document, headers: Mapping[str, str], context: Context) -> Normalized:
    """The facts of one event."""
    found = Gathered()
    first = context.topic.partition(".")[0]
    if context.topic in _HISTORY:
        found.nothing("history")
    elif context.topic in _HANDLERS:
        items = list(_items(document))
        if not items:
            found.unknown("data")
        for item in items:
            _HANDLERS[context.topic](item, document, context, found)
    elif context.topic in _ENDED:
        _session(document, "STOPPED", context, found)
    elif first in _PASSED_OVER:
        found.nothing(_PASSED_OVER[first])
    else:
        found.unknown(context.topic[:100])
    return found.outcome("data")


def _items(document: Document) -> Iterator[Document]:
    """The things that `data` is: one, a list, or a list under `messages` as Baileys itself has it."""
    if isinstance(document.raw("data"), list):
        yield from document.children("data")
        return
    data = document.child("data")
    if isinstance(data.raw("messages"), list):
        yield from data.children("messages")
    elif data.value:
        yield data


def _upsert(item: Document, document: Document, context: Context, found: Gathered) -> None:
    envelope = _envelope(item, document, context)
    if envelope is None:
        found.unknown("message")
        return
    said = baileys.read(item.child("message"))
    if isinstance(said, baileys.Said) and said.reply_to is None:
        answered = item.child("contextInfo").identifier("stanzaId")
        said = baileys.Said(said.kind, said.body, said.media, said.content, answered)
    gateways.message(envelope, said, found)


def _update(item: Document, document: Document, context: Context, found: Gathered) -> None:
    """What became of a message. Three forms: `keyId` and `status`, `key` and `status`, `key` and `update`."""
    key, update = item.child("key"), item.child("update")
    message_id = item.identifier("keyId") or key.identifier("id")
    if message_id is None:
        found.unknown("status")
        return
    if update.identifier("messageStubType") in _REVOKED_STUBS:
        _deleted(item, document, context, found)
        return
    if update.child("message").value:
        _changed_content(item, update.child("message"), document, context, found)
        return
    stated = update.identifier("status") or item.identifier("status")
    if stated is None or stated.upper() in _NO_STATUS:
        found.nothing("update_without_status")
    elif stated.upper() not in _STATUSES:
        found.unknown("status")
    elif (item.raw("fromMe") if "fromMe" in item else key.raw("fromMe")) is False:
        found.nothing("read_by_us")
    else:
        chat = jids.chat(item.text("remoteJid"), key.text("remoteJid"), *_hidden(item))
        gateways.status(chat, message_id, _STATUSES[stated.upper()], context.received_at, found)


def _edited(item: Document, document: Document, context: Context, found: Gathered) -> None:
    """The protocol's own message, or a key with the new content."""
    if item.child("editedMessage").value:
        _changed_content(item, Document({"protocolMessage": item.value}), document, context, found)
    elif item.identifier("type") in _REVOKED_TYPES:
        _deleted(item, document, context, found)
    else:
        _changed_content(item, item.child("message"), document, context, found)


def _changed_content(item: Document, message: Document, document: Document, context: Context, found: Gathered) -> None:
    envelope, said = _envelope(item, document, context), baileys.read(message)
    if envelope is None or said is None:
        found.unknown("edited")
        return
    if envelope.nobody == "own_chat":
        # The protocol's own message names the chat as its writer sees it: then it is with us, and does not say whose.
        found.unknown("edited_in_an_unnamed_chat")
        return
    content = {"type": said.kind, "body": said.body} if isinstance(said, baileys.Said) else dict(said.content)
    names = jids.named(envelope.message_id, envelope.chat, envelope.from_me)
    again = gateways.digest(content.get("body"), item.raw("timestampMs"), item.raw("messageTimestamp"))
    gateways.changed(envelope, "edited", names, content, found, again)


def _deleted(item: Document, document: Document, context: Context, found: Gathered) -> None:
    envelope = _envelope(item, document, context)
    if envelope is None:
        found.unknown("revoked")
        return
    names = jids.named(envelope.message_id, envelope.chat, envelope.from_me)
    gateways.changed(envelope, "revoked", names, {}, found, "revoked")


def _contact(item: Document, document: Document, context: Context, found: Gathered) -> None:
    """The phone's address book: a name for somebody who wrote, and nobody else."""
    chat = jids.chat(item.text("remoteJid", "id"), item.text("lid"), *_hidden(item))
    who = chat.person(item.text("pushName", "name", "notify"))
    if why := chat.nobody:
        found.nothing(why)
    elif who.name is None:
        found.nothing("address_book")
    else:
        found.fact("contact", PersonNamed(who))


def _connection(item: Document, document: Document, context: Context, found: Gathered) -> None:
    state = item.text("state", "connection")
    if state == "open":
        _session(document, "WORKING", context, found)
    elif state == "connecting":
        _session(document, "STARTING", context, found)
    elif state in ("close", "closed", "refused"):
        needs_a_person = state == "refused" or item.integer("statusReason") in _NEEDS_A_PERSON
        _session(document, "FAILED" if needs_a_person else "STOPPED", context, found)
    elif state is None:
        found.unknown("session")
    else:
        _session(document, state.upper()[:100], context, found)


def _session(document: Document, status: str, context: Context, found: Gathered) -> None:
    instance = document.text("instance") or document.child("data").text("instance", "instanceName")
    if instance is None:
        found.unknown("session")
        return
    at = moments.from_local_marked_utc(document.text("date_time"), context.received_at)
    at = moments.occurred(at, context.received_at)
    found.fact("session", SessionChanged(session=instance[:255], status=status, occurred_at=at))


_HANDLERS: Mapping[str, Callable[[Document, Document, Context, Gathered], None]] = {
    "messages.upsert": _upsert,
    "send.message": _upsert,
    "messages.update": _update,
    "messages.edited": _edited,
    "messages.delete": _deleted,
    "contacts.upsert": _contact,
    "contacts.update": _contact,
    "connection.update": _connection,
}
_ENDED = frozenset({"logout.instance", "remove.instance"})


def _envelope(item: Document, document: Document, context: Context) -> gateways.Envelope | None:
    """None when the message has no id. Its key stands in `key`, or is the item itself."""
    key = item.child("key") if "key" in item else item
    message_id = key.identifier("id") or item.identifier("keyId")
    if message_id is None:
        return None
    from_me = key.flag("fromMe") or item.flag("fromMe")
    return gateways.Envelope(
        chat=jids.chat(key.text("remoteJid"), item.text("remoteJid"), *_hidden(item)),
        from_me=from_me,
        message_id=message_id,
        provider_id=message_id,
        at=_moment(item, context),
        name=None if from_me else item.text("pushName"),
        own_number=(document.text("sender") or "").partition("@")[0].partition(":")[0] or None,
    )


def _hidden(item: Document) -> list[str | None]:
    """Other addresses of the same chat: the phone behind a hidden number, or the other way round."""
    names = ("remoteJidAlt", "senderPn", "senderLid", "previousRemoteJid")
    return [place.text(name) for place in (item.child("key"), item) for name in names]


def _moment(item: Document, context: Context) -> datetime:
    stated = moments.from_epoch_long_s(item.raw("messageTimestamp"))
    stated = stated or moments.from_epoch_ms(item.raw("timestampMs"))
    return moments.occurred(stated, context.received_at)
