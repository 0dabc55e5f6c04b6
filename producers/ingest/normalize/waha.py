"""WAHA: one event a delivery. The same message comes in the words of several engines, under WAHA's own fields.

The envelope's time is in milliseconds, a message's in seconds, at times with a fraction. `message` (what came in) and
`message.any` (everything) are about the same message, by the same id. What an engine knows besides stands in `_data`:
it is read for the type, the name, and a phone behind a hidden number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from producers.ingest.normalize import baileys, gateways, jids, moments
from producers.ingest.normalize.document import Document
from producers.ingest.normalize.facts import Context, Normalized, SessionChanged
from producers.ingest.normalize.gathered import Gathered

# Events about no message of a person's, by the first word of their name.
_PASSED_OVER: Mapping[str, str] = {
    "presence": "presence",
    "group": "group",
    "chat": "chat",
    "call": "call",
    "label": "label",
    "poll": "poll_vote",
    "event": "event_answer",
    "engine": "engine_event",
    "state": "engine_state",
}
_ACKS: Mapping[str, gateways.Status] = {
    "-1": "failed", "1": "sent", "2": "delivered", "3": "read", "4": "played",
    "ERROR": "failed", "SERVER": "sent", "DEVICE": "delivered", "READ": "read", "PLAYED": "played",
}  # fmt: skip
_PENDING = ("0", "PENDING")
# WEBJS's types of a message.
_TYPES: Mapping[str, str] = {
    "chat": "text",
    "image": "image",
    "video": "video",
    "audio": "audio",
    "ptt": "audio",
    "ptv": "video",
    "document": "document",
    "sticker": "sticker",
    "location": "location",
    "vcard": "contacts",
    "multi_vcard": "contacts",
    "buttons_response": "interactive",
    "list_response": "interactive",
    "template_button_reply": "button",
    "order": "order",
    "product": "product",
    "poll_creation": "poll",
}
_NOTICES = frozenset(
    {
        "e2e_notification", "notification", "notification_template", "gp2", "group_notification", "call_log",
        "protocol", "broadcast_notification", "debug", "ciphertext", "revoked", "reaction", "pinned_message",
    }
)  # fmt: skip
_MEDIA = ("image", "video", "audio", "document", "sticker")
_CARD_NAME = re.compile(r"(?m)^FN[^:\n]{0,100}:([^\n]{1,255})")


def normalize(document: Document, headers: Mapping[str, str], context: Context) -> Normalized:
    """The facts of one event."""
    found = Gathered()
    event = document.text("event") or "unknown"
    first = event.partition(".")[0]
    if event in _HANDLERS:
        _HANDLERS[event](document, context, found)
    elif first in _PASSED_OVER:
        found.nothing(_PASSED_OVER[first])
    else:
        found.unknown(event[:100])
    return found.outcome("payload")


def _message(document: Document, context: Context, found: Gathered) -> None:
    payload = document.child("payload")
    envelope = _envelope(document, payload, context)
    if envelope is None:
        found.unknown("message")
    else:
        gateways.message(envelope, _said(payload), found)


def _reaction(document: Document, context: Context, found: Gathered) -> None:
    payload = document.child("payload")
    envelope, reaction = _envelope(document, payload, context), payload.child("reaction")
    if envelope is None:
        found.unknown("reaction")
        return
    names = jids.named(reaction.identifier("messageId"), envelope.chat, from_me=True)
    gateways.changed(envelope, "reaction", names, {"emoji": reaction.text("text")}, found)


def _edited(document: Document, context: Context, found: Gathered) -> None:
    payload = document.child("payload")
    envelope, target = _envelope(document, payload, context), payload.identifier("editedMessageId")
    if envelope is None:
        found.unknown("edited")
        return
    body = payload.text("body")
    # WEBJS gives every edit the id of the message: two edits are told apart by what they say, and when.
    again = gateways.digest(body, payload.raw("timestamp")) if target == envelope.message_id else None
    names = jids.named(target, envelope.chat, envelope.from_me)
    content = {"type": _kind(payload) or "text", "body": body[: baileys.MAX_BODY] if body else None}
    gateways.changed(envelope, "edited", names, content, found, again)


def _revoked(document: Document, context: Context, found: Gathered) -> None:
    payload = document.child("payload")
    after, before = payload.child("after"), payload.child("before")
    envelope = _envelope(document, after, context) or _envelope(document, before, context)
    if envelope is None:
        found.unknown("revoked")
        return
    target = payload.identifier("revokedMessageId") or before.identifier("id") or after.identifier("id")
    names = jids.named(target, envelope.chat, envelope.from_me)
    # A message is taken back once; the engines do not agree on the id and the time of doing so.
    gateways.changed(replace(envelope, at=_received(document, context)), "revoked", names, {}, found, "revoked")


def _ack(document: Document, context: Context, found: Gathered) -> None:
    payload = document.child("payload")
    whole = jids.serialized(payload.identifier("id"))
    ack = str(payload.raw("ack")) if "ack" in payload else payload.text("ackName") or ""
    from_me = whole[0] if whole else payload.flag("fromMe")
    message_id = whole[2] if whole else payload.identifier("id")
    if message_id is None or (ack not in _ACKS and ack not in _PENDING):
        found.unknown("ack")
    elif not from_me:
        found.nothing("read_by_us")
    elif ack in _PENDING:
        found.nothing("pending")
    else:
        # Without a whole id, `from` is the chat or the business itself, by engine.
        chat = jids.chat(whole[1], *_hidden(payload)) if whole else jids.chat(payload.text("to"))
        gateways.status(chat, message_id, _ACKS[ack], _received(document, context), found)


def _session(document: Document, context: Context, found: Gathered) -> None:
    payload = document.child("payload")
    status, session = payload.text("status"), document.text("session")
    if status is None or session is None:
        found.unknown("session")
        return
    # The newest of the statuses that it went through says since when.
    since = [one.raw("timestamp") for one in payload.children("statuses") if one.text("status") == status]
    at = moments.from_epoch_ms(since[-1]) if since else None
    at = moments.occurred(at, _received(document, context))
    found.fact("session", SessionChanged(session=session[:255], status=status[:100], occurred_at=at))


def _waiting(document: Document, context: Context, found: Gathered) -> None:
    found.nothing("not_decrypted_yet")


_HANDLERS: Mapping[str, Callable[[Document, Context, Gathered], None]] = {
    "message": _message,
    "message.any": _message,
    "message.reaction": _reaction,
    "message.edited": _edited,
    "message.revoked": _revoked,
    "message.ack": _ack,
    "message.ack.group": _ack,
    "message.waiting": _waiting,
    "session.status": _session,
}


def _envelope(document: Document, payload: Document, context: Context) -> gateways.Envelope | None:
    """None when the message has no id."""
    provider_id = payload.identifier("id")
    if provider_id is None:
        return None
    whole = jids.serialized(provider_id)
    from_me = whole[0] if whole else payload.flag("fromMe")
    other = payload.text("to") if from_me else payload.text("from")
    data = payload.child("_data")
    name = data.text("notifyName", "pushName") or data.child("Info").text("PushName")
    return gateways.Envelope(
        chat=jids.chat(whole[1] if whole else None, other, *_hidden(payload)),
        from_me=from_me,
        message_id=whole[2] if whole else provider_id,
        provider_id=provider_id,
        at=moments.occurred(moments.from_epoch_long_s(payload.raw("timestamp")), context.received_at),
        name=None if from_me else name,
        through_api=payload.text("source") != "app",
        own_number=(document.child("me").text("id") or "").partition("@")[0].partition(":")[0] or None,
    )


def _hidden(payload: Document) -> list[str | None]:
    """Other addresses of the same chat: the phone behind a hidden number, or the other way round."""
    data = payload.child("_data")
    key, info = data.child("key"), data.child("Info")
    alt = info.text("RecipientAlt") if info.flag("IsFromMe") else info.text("SenderAlt")
    return [key.text("remoteJidAlt"), key.text("senderPn"), key.text("senderLid"), alt]


def _received(document: Document, context: Context) -> datetime:
    return moments.occurred(moments.from_epoch_ms(document.raw("timestamp")), context.received_at)


def _said(payload: Document) -> baileys.Said | baileys.Change | None:
    """What the message says: WAHA's own fields first, the engine's for what they leave open."""
    data = payload.child("_data")
    inner = data.child("message") if "message" in data else data.child("Message")
    engine = baileys.read(inner) if inner.value else None
    if isinstance(engine, baileys.Change):
        return engine
    kind = _kind(payload) or (engine.kind if engine else None)
    body = payload.text("body") or (engine.body if engine else None)
    if data.text("type") in _NOTICES or (kind is None and body is None):
        return None
    kind = kind or "text"
    content: dict[str, Any] = dict(engine.content) if engine else {}
    place = payload.child("location")
    if place.value:
        content["location"] = {name: value for name, value in place.value.items() if name != "thumbnail"}
    if cards := payload.texts("vCards"):
        content["contacts"] = [{"vcard": card} for card in cards]
    # Some engines have a picture of the map, or the whole card, where other messages have their text.
    if kind == "location":
        body = place.text("name", "description", "title", "address") or (engine.body if engine else None)
    elif kind == "contacts":
        names = [found[1].strip() for card in cards if (found := _CARD_NAME.search(card))]
        body = ", ".join(names) or (engine.body if engine else None)
    if data.flag("isForwarded"):
        content["forwarded"] = True
    media = _media(payload, kind) or (engine.media if engine else ())
    answered = payload.child("replyTo").identifier("id") or (engine.reply_to if engine else None)
    return baileys.Said(kind, body[: baileys.MAX_BODY] if body else None, media, content, answered)


def _kind(payload: Document) -> str | None:
    """The type, as far as WAHA's own fields and WEBJS say it."""
    stated = _TYPES.get(payload.child("_data").text("type") or "")
    if stated is not None:
        return stated
    if payload.child("location").value:
        return "location"
    if payload.texts("vCards"):
        return "contacts"
    if payload.flag("hasMedia"):
        mime = (payload.child("media").text("mimetype") or "").lower()
        first = mime.partition("/")[0]
        return first if first in _MEDIA else "document" if mime else None
    return None


def _media(payload: Document, kind: str) -> tuple[Mapping[str, Any], ...]:
    """`hasMedia` without a url is normal: what is not downloaded can be asked for by the message's id."""
    if not payload.flag("hasMedia"):
        return ()
    media = payload.child("media")
    given = {
        "type": kind,
        "url": media.text("url"),
        "mime_type": media.text("mimetype"),
        "filename": media.text("filename"),
        "voice": True if payload.child("_data").text("type") == "ptt" else None,
    }
    return ({name: value for name, value in given.items() if value is not None},)
