"""WhatsApp Cloud API: messages, what became of ours, preferences, changed numbers.

One part holds many changes of one number; each message is a fact of its own, found by its wamid. What is new (a type,
a status) does not stop the rest: a message of unknown type is still a message, anything else is counted as not
understood.

Types of a message: text, image, video, audio (also voice), document, sticker, location, contacts, interactive
(button_reply, list_reply, nfm_reply), button, order, unsupported and unknown with their errors; reaction, edit and
revoke are about an earlier message; system is a new number, a new id, or a new device. Fields: messages,
smb_message_echoes, user_preferences, user_id_update; history, address book, calls and groups are passed over, and what
is about the account.

A message names its sender twice, by number and, in newer shapes, by a business-scoped id; users with user names have no
number. Times are text with epoch seconds, in preferences a number.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Literal

from producers.ingest.normalize import moments
from producers.ingest.normalize import phone as phones
from producers.ingest.normalize.document import Document
from producers.ingest.normalize.facts import (
    Context,
    Identity,
    IncomingMessage,
    MessageChange,
    MessageStatus,
    Normalized,
    NumberChanged,
    OutgoingMessage,
    Person,
    Preference,
    external_identity,
    person,
)
from producers.ingest.normalize.gathered import Gathered
from producers.ingest.normalize.keywords import STOPPING_KINDS, stop_word

SOURCE = "whatsapp"
MAX_BODY = 65536

# Trying again can help: rate limits and what the provider calls temporary. All else fails the same way next time.
RETRYABLE_CODES = frozenset({"130429", "131056", "131048", "80007", "131000", "131016", "1", "2"})

_STATUSES: Mapping[str, Literal["sent", "delivered", "read", "played", "failed", "deleted", "warning"]] = {
    "sent": "sent",
    "delivered": "delivered",
    "read": "read",
    "played": "played",
    "failed": "failed",
    "deleted": "deleted",
    "warning": "warning",
}
_MEDIA = ("image", "video", "audio", "document", "sticker")
_NEW_NUMBER, _NEW_USER_ID = ("user_changed_number", "customer_changed_number"), "user_changed_user_id"
_CHANGES = frozenset({"edit", "revoke", "reaction"})
_CONSENT = {"stop": False, "resume": True, "signup": True}
_ABOUT_ACCOUNTS = (
    "account_", "business_", "phone_number_", "message_template_", "template_", "security", "flows", "payment_",
)  # fmt: skip
# Old chats of a number that was on the phone app, its address book; calls; groups, which are nobody.
_PASSED_OVER: Mapping[str, str] = {
    "history": "history",
    "smb_app_state_sync": "address_book",
    "calls": "call",
    "group_lifecycle_update": "group",
    "group_participants_update": "group",
    "group_settings_update": "group",
    "group_status_update": "group",
}


def normalize(document: Document, headers: Mapping[str, str], context: Context) -> Normalized:
    """The facts of one number's changes."""
    found = Gathered()
    about_accounts: set[str] = set()
    for entry in document.children("entry"):
        for change in entry.children("changes"):
            field = change.text("field") or "unknown"
            handler = _FIELDS.get(field)
            if handler is not None:
                handler(change.child("value"), context, found)
            elif field.startswith(_ABOUT_ACCOUNTS):
                about_accounts.add(field)
            elif field in _PASSED_OVER:
                found.nothing(_PASSED_OVER[field])
            else:
                found.unknown(field)
    if about_accounts:
        found.nothing(f"about_the_account:{','.join(sorted(about_accounts))}")
    return found.outcome("entry")


def _messages(value: Document, context: Context, found: Gathered) -> None:
    names = _Names(value)
    beside = [error.value for error in value.children("errors")]
    for message in value.children("messages"):
        _message(message, names, beside, context, found)
    for echo in value.children("message_echoes"):
        _echo(echo, context, found)
    for status in value.children("statuses"):
        known = _status(status, names, context)
        found.fact("status", known) if known is not None else found.unknown("status")
    if not any(isinstance(value.raw(name), list) for name in ("messages", "message_echoes", "statuses")):
        if beside:
            # Errors alone are about the number or the app, not about a message of anybody's.
            codes = sorted({str(error.get("code")) for error in beside})
            found.nothing(f"provider_errors:{','.join(codes)}")
        else:
            found.unknown("value")


def _preferences(value: Document, context: Context, found: Gathered) -> None:
    names = _Names(value)
    for preference in value.children("user_preferences"):
        granted = _CONSENT.get((preference.text("value") or "").lower())
        who = names.person(preference.identifier("wa_id"), preference.identifier("user_id"))
        if granted is None or not who:
            found.unknown("preference")
            continue
        found.fact(
            "preference",
            Preference(
                person=who,
                consent_type=preference.text("category") or "marketing_messages",
                granted=granted,
                occurred_at=moments.occurred(moments.from_epoch_s(preference.raw("timestamp")), context.received_at),
            ),
        )


def _user_ids(value: Document, context: Context, found: Gathered) -> None:
    """With a new number comes a new business-scoped id: this says which one it was before."""
    for update in value.children("user_id_update"):
        ids = update.child("user_id")
        old, new = (external_identity(SOURCE, ids.identifier(name)) for name in ("previous", "current"))
        if old is None or new is None:
            found.unknown("user_id_update")
            continue
        at = moments.occurred(moments.from_epoch_s(update.raw("timestamp")), context.received_at)
        found.fact("user_id_changed", NumberChanged(person=person(old), new_identity=new, occurred_at=at))


_FIELDS: Mapping[str, Callable[[Document, Context, Gathered], None]] = {
    "messages": _messages,
    "smb_message_echoes": _messages,
    "user_preferences": _preferences,
    "user_id_update": _user_ids,
}


class _Names:
    """Who the `contacts` beside the messages say these people are."""

    def __init__(self, value: Document) -> None:
        self._by_number: dict[str, Document] = {}
        self._by_user: dict[str, Document] = {}
        self._all = list(value.children("contacts"))
        for contact in self._all:
            if number := contact.identifier("wa_id"):
                self._by_number[number] = contact
            if user := contact.identifier("user_id"):
                self._by_user[user] = contact

    def person(self, number: str | None, user_id: str | None) -> Person:
        contact = self._by_number.get(number or "") or self._by_user.get(user_id or "")
        if contact is None and number is None and user_id is None and len(self._all) == 1:
            contact = self._all[0]
        if contact is not None:
            number = number or contact.identifier("wa_id")
            user_id = user_id or contact.identifier("user_id")
        return person(
            external_identity(SOURCE, user_id),
            _phone(number),
            name=contact.child("profile").text("name") if contact is not None else None,
        )


def _phone(wa_id: str | None) -> Identity | None:
    number = phones.whatsapp(wa_id)
    return Identity("phone", number, as_received=wa_id) if number else None


def _message(message: Document, names: _Names, beside: list[Any], context: Context, found: Gathered) -> None:
    kind = message.text("type") or "unknown"
    wamid = message.identifier("id")
    who = names.person(message.identifier("from"), message.identifier("from_user_id"))
    if "group_id" in message:
        found.nothing("group")
        return
    if kind == "system" and not who and message.child("system").text("type") == _NEW_USER_ID:
        # Without the old id this names nobody; `user_id_update` says both.
        found.nothing("user_id_changed")
        return
    if wamid is None or not who:
        found.unknown("message")
        return
    at = moments.occurred(moments.from_epoch_s(message.raw("timestamp")), context.received_at)
    if kind == "system":
        _system(message.child("system"), who, at, found)
        return
    if kind in _CHANGES:
        _change(kind, message, who, wamid, at, found)
        return
    body, media, content = _said(kind, message)
    if beside and kind in ("unsupported", "unknown") and not content.get("errors"):
        content["errors"] = beside
    replied = message.child("context")
    if referral := message.child("referral").value:
        content["referral"] = referral
    for flag in ("forwarded", "frequently_forwarded"):
        if replied.flag(flag):
            content[flag] = True
    found.fact(
        "message",
        IncomingMessage(
            person=who,
            wamid=wamid,
            kind=kind[:100],
            body=body,
            media=media,
            reply_to=(answered,) if (answered := replied.identifier("id")) else (),
            content=content,
            occurred_at=at,
            stop_word=stop_word(body) if kind in STOPPING_KINDS else None,
        ),
    )


def _said(kind: str, message: Document) -> tuple[str | None, tuple[Mapping[str, Any], ...], dict[str, Any]]:
    """A message's text, its media, and what else its type carries."""
    part = message.child(kind)
    body: str | None = None
    media: tuple[Mapping[str, Any], ...] = ()
    content: dict[str, Any] = {}
    if kind == "text":
        body = part.text("body")
    elif kind in _MEDIA:
        kept = ("id", "mime_type", "sha256", "url", "filename", "voice", "animated")
        media = ({"type": kind} | {name: part.raw(name) for name in kept if name in part},)
        body = part.text("caption")
    elif kind == "button":
        body = part.text("text")
        content["payload"] = part.text("payload")
    elif kind == "interactive":
        body, content["interactive"] = _interactive(part)
    elif kind == "location":
        body = part.text("name", "address")
        content["location"] = part.value
    elif kind == "contacts":
        shared = list(message.children("contacts"))
        body = ", ".join(name for one in shared if (name := one.child("name").text("formatted_name"))) or None
        content["contacts"] = [one.value for one in shared]
    elif kind == "order":
        body = part.text("text")
        content["order"] = part.value
    elif kind == "unsupported":
        content["errors"] = [error.value for error in message.children("errors")]
    else:
        content["not_understood"] = kind[:100]
    return (body[:MAX_BODY] if body else None), media, content


def _interactive(part: Document) -> tuple[str | None, dict[str, Any]]:
    kind = part.text("type") or "unknown"
    reply = part.child(kind)
    content: dict[str, Any] = {"type": kind, **reply.value}
    if kind == "nfm_reply":
        # The answers of a form are JSON text inside JSON.
        try:
            content["response"] = json.loads(reply.text("response_json") or "null")
        except (ValueError, RecursionError):
            content["response"] = None
    return reply.text("title", "body"), content


def _change(kind: str, message: Document, who: Person, wamid: str, at: datetime, found: Gathered) -> None:
    part = message.child(kind)
    target = part.identifier("message_id") if kind == "reaction" else part.identifier("original_message_id")
    if target is None:
        found.unknown(kind)
        return
    content: dict[str, Any] = {}
    named: Literal["edited", "revoked", "reaction"]
    if kind == "reaction":
        named = "reaction"
        # An empty emoji, or none, takes the reaction back.
        content["emoji"] = part.text("emoji")
    elif kind == "edit":
        named = "edited"
        edited = part.child("message")
        inner = edited.text("type") or "text"
        content = {"type": inner, "body": edited.child(inner).text("body", "caption")}
    else:
        named = "revoked"
    change = MessageChange(person=who, wamid=target, change_id=wamid, kind=named, content=content, occurred_at=at)
    found.fact(kind, change)


def _system(system: Document, who: Person, at: datetime, found: Gathered) -> None:
    """The person has a new number, a new id, or a new device ("identity"), which changes nothing here."""
    kind = system.text("type") or ""
    phone = _phone(system.identifier("wa_id") or system.identifier("new_wa_id"))
    user_id = external_identity(SOURCE, system.identifier("user_id"))
    new = [identity for identity in (phone, user_id) if identity is not None]
    if new and (kind == _NEW_USER_ID or (kind in _NEW_NUMBER and phone is not None)):
        for identity in new:
            found.fact("number_changed", NumberChanged(person=who, new_identity=identity, occurred_at=at))
    elif kind in ("customer_identity_changed", "user_identity_changed"):
        found.nothing("identity_changed")
    else:
        found.unknown("system")


def _echo(echo: Document, context: Context, found: Gathered) -> None:
    """The business wrote from the phone app: sent, not received."""
    wamid = echo.identifier("id")
    who = person(external_identity(SOURCE, echo.identifier("to_user_id")), _phone(echo.identifier("to")))
    if "group_id" in echo:
        found.nothing("group")
        return
    if wamid is None or not who:
        found.unknown("echo")
        return
    kind = echo.text("type") or "unknown"
    at = moments.occurred(moments.from_epoch_s(echo.raw("timestamp")), context.received_at)
    if kind in _CHANGES:
        _change(kind, echo, who, wamid, at, found)
        return
    body, media, content = _said(kind, echo)
    if media:
        content["media"] = list(media)
    found.fact(
        "echo",
        OutgoingMessage(person=who, wamid=wamid, kind=kind[:100], body=body, content=content, occurred_at=at),
    )


def _status(status: Document, names: _Names, context: Context) -> MessageStatus | None:
    known = _STATUSES.get(status.text("status") or "")
    wamid = status.identifier("id")
    if known is None or wamid is None:
        return None
    error = next(status.children("errors"), Document({}))
    code = error.identifier("code")
    return MessageStatus(
        person=names.person(status.identifier("recipient_id"), status.identifier("recipient_user_id")),
        wamid=wamid,
        status=known,
        occurred_at=moments.occurred(moments.from_epoch_s(status.raw("timestamp")), context.received_at),
        error_code=code,
        error_message=error.child("error_data").text("details") or error.text("message", "title"),
        retryable=code in RETRYABLE_CODES,
    )
