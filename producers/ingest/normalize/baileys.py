"""What a WhatsApp message says, in the shape of the Baileys library: Evolution's `message`, WAHA's `_data.message`.

The object has one key that names the type, among others that say nothing to a person (keys of groups, of encryption).
Some types are wrappings around another one. An unknown type is still a message, said to be not understood.

Media lies encrypted at WhatsApp's servers; a gateway that stores it gives its own address (`mediaUrl`). Only that is a
url here. Neither keys of media nor its bytes are kept with the message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from producers.ingest.normalize.document import Document

MAX_BODY = 65536
MAX_WRAPPINGS = 8

_WRAPPINGS = (
    "ephemeralMessage", "viewOnceMessage", "viewOnceMessageV2", "viewOnceMessageV2Extension",
    "documentWithCaptionMessage", "deviceSentMessage", "editedMessage", "groupMentionedMessage", "botInvokeMessage",
    "lottieStickerMessage", "associatedChildMessage", "statusMentionMessage",
)  # fmt: skip
# Beside a message or alone: nothing that a person said.
_SILENT = frozenset(
    {
        "messageContextInfo", "senderKeyDistributionMessage", "fastRatchetKeySenderKeyDistributionMessage",
        "pollUpdateMessage", "encReactionMessage", "keepInChatMessage", "pinInChatMessage", "secretEncryptedMessage",
        "albumMessage", "callLogMesssage", "callLogMessage", "call", "chat", "deviceSyncMessage",
        "stickerSyncRmrMessage", "placeholderMessage", "messageHistoryBundle", "base64", "mediaUrl", "speechToText",
    }
)  # fmt: skip
_MEDIA: Mapping[str, str] = {
    "imageMessage": "image",
    "videoMessage": "video",
    "ptvMessage": "video",
    "audioMessage": "audio",
    "documentMessage": "document",
    "stickerMessage": "sticker",
}
_REVOKE, _EDIT = ("REVOKE", "0"), ("MESSAGE_EDIT", "14")


@dataclass(frozen=True)
class Change:
    """Something that happens to an earlier message. `key` names it, where the message does."""

    kind: Literal["edited", "revoked", "reaction"]
    key: Document
    content: Mapping[str, Any]


@dataclass(frozen=True)
class Said:
    """A message's own content."""

    kind: str
    body: str | None = None
    media: tuple[Mapping[str, Any], ...] = ()
    content: dict[str, Any] = field(default_factory=dict)
    reply_to: str | None = None
    """The bare id of the message that is answered."""


def read(message: Document) -> Said | Change | None:
    """What a message says or changes; None for nothing that a person said."""
    message = _unwrapped(message)
    if "protocolMessage" in message:
        return _protocol(message.child("protocolMessage"))
    if "reactionMessage" in message:
        reaction = message.child("reactionMessage")
        return Change("reaction", reaction.child("key"), {"emoji": reaction.text("text")})
    names = [name for name, value in message.value.items() if name not in _SILENT and value not in (None, "")]
    if not names:
        return None
    name = next((name for name in names if name in _READERS), names[0])
    if name not in _READERS:
        return Said(name[:100], content={"not_understood": name[:100]})
    part = message.child(name)
    kind, body, media, content = _READERS[name](name, message, part)
    context = part.child("contextInfo")
    if (integer := context.integer("forwardingScore")) or context.flag("isForwarded"):
        content["frequently_forwarded" if (integer or 0) >= 5 else "forwarded"] = True
    if advert := context.child("externalAdReply").value:
        content["referral"] = {
            to: advert[of] for of, to in _REFERRAL.items() if isinstance(advert.get(of), str | int | bool)
        }
    return Said(kind, body[:MAX_BODY] if body else None, media, content, context.identifier("stanzaId"))


def _unwrapped(message: Document) -> Document:
    for _ in range(MAX_WRAPPINGS):
        wrapping = next((name for name in _WRAPPINGS if "message" in message.child(name)), None)
        if wrapping is None:
            return message
        message = message.child(wrapping).child("message")
    return message


def _protocol(protocol: Document) -> Change | None:
    """Taken back or edited; all other kinds are between devices."""
    kind = str(protocol.raw("type"))
    if kind in _EDIT or ("editedMessage" in protocol and kind not in _REVOKE):
        said = read(protocol.child("editedMessage"))
        content = {"type": said.kind, "body": said.body} if isinstance(said, Said) else {}
        return Change("edited", protocol.child("key"), content)
    if kind in _REVOKE and "key" in protocol:
        return Change("revoked", protocol.child("key"), {})
    return None


Read = tuple[str, str | None, tuple[Mapping[str, Any], ...], dict[str, Any]]
"""Type, text, media, and what else the type carries."""


def _text(name: str, message: Document, part: Document) -> Read:
    return "text", message.text(name) or part.text("text"), (), {}


def _media(name: str, message: Document, part: Document) -> Read:
    kind = _MEDIA[name]
    given: dict[str, Any] = {
        "type": kind,
        "url": message.text("mediaUrl") or part.text("mediaUrl"),
        "mime_type": part.text("mimetype"),
        "filename": part.text("fileName", "title"),
        "sha256": part.text("fileSha256"),
        "bytes": part.identifier("fileLength"),
        "voice": part.flag("ptt") or None,
        "animated": part.flag("isAnimated") or None,
    }
    return kind, part.text("caption"), ({name: value for name, value in given.items() if value is not None},), {}


def _location(name: str, message: Document, part: Document) -> Read:
    given = {
        "latitude": part.decimal("degreesLatitude"),
        "longitude": part.decimal("degreesLongitude"),
        "name": part.text("name"),
        "address": part.text("address"),
        "url": part.text("url"),
        "live": True if name == "liveLocationMessage" else None,
    }
    location = {name: value for name, value in given.items() if value is not None}
    return "location", part.text("name", "address", "caption"), (), {"location": location}


def _contacts(name: str, message: Document, part: Document) -> Read:
    shared = [part] if name == "contactMessage" else list(part.children("contacts"))
    names = [called for one in shared if (called := one.text("displayName"))]
    cards = [{"name": one.text("displayName"), "vcard": one.text("vcard")} for one in shared]
    return "contacts", ", ".join(names) or None, (), {"contacts": cards}


def _template_button(name: str, message: Document, part: Document) -> Read:
    return "button", part.text("selectedDisplayText"), (), {"payload": part.text("selectedId")}


def _buttons(name: str, message: Document, part: Document) -> Read:
    title = part.text("selectedDisplayText")
    reply = {"type": "button_reply", "id": part.text("selectedButtonId"), "title": title}
    return "interactive", title, (), {"interactive": reply}


def _list(name: str, message: Document, part: Document) -> Read:
    reply = {
        "type": "list_reply",
        "id": part.child("singleSelectReply").text("selectedRowId"),
        "title": part.text("title"),
        "description": part.text("description"),
    }
    return "interactive", part.text("title"), (), {"interactive": reply}


def _interactive(name: str, message: Document, part: Document) -> Read:
    flow = part.child("nativeFlowResponseMessage")
    reply: dict[str, Any] = {"type": "nfm_reply", "name": flow.text("name")}
    # The answers of a form are JSON text inside JSON.
    try:
        reply["response"] = json.loads(flow.text("paramsJson") or "null")
    except (ValueError, RecursionError):
        reply["response"] = None
    return "interactive", part.child("body").text("text"), (), {"interactive": reply}


def _poll(name: str, message: Document, part: Document) -> Read:
    options = [option for one in part.children("options") if (option := one.text("optionName"))]
    return "poll", part.text("name"), (), {"options": options}


def _order(name: str, message: Document, part: Document) -> Read:
    given = {
        "order_id": part.identifier("orderId"),
        "items": part.integer("itemCount"),
        "total_1000": part.identifier("totalAmount1000"),
        "currency": part.text("totalCurrencyCode"),
    }
    return "order", part.text("message", "orderTitle"), (), {"order": {n: v for n, v in given.items() if v is not None}}


def _product(name: str, message: Document, part: Document) -> Read:
    product = part.child("product")
    given = {"id": product.identifier("productId"), "title": product.text("title")}
    return "product", product.text("title"), (), {"product": {n: v for n, v in given.items() if v is not None}}


_READERS: Mapping[str, Callable[[str, Document, Document], Read]] = {
    "conversation": _text,
    "extendedTextMessage": _text,
    **dict.fromkeys(_MEDIA, _media),
    "locationMessage": _location,
    "liveLocationMessage": _location,
    "contactMessage": _contacts,
    "contactsArrayMessage": _contacts,
    "buttonsResponseMessage": _buttons,
    "templateButtonReplyMessage": _template_button,
    "listResponseMessage": _list,
    "interactiveResponseMessage": _interactive,
    "pollCreationMessage": _poll,
    "pollCreationMessageV2": _poll,
    "pollCreationMessageV3": _poll,
    "orderMessage": _order,
    "productMessage": _product,
}
_REFERRAL: Mapping[str, str] = {
    "sourceUrl": "source_url",
    "sourceId": "source_id",
    "sourceType": "source_type",
    "title": "headline",
    "body": "body",
    "ctwaClid": "ctwa_clid",
}
