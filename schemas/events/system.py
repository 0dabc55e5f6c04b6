"""system.*: the runtime about itself; these need no entity."""

from typing import Literal

from schemas.events.base import Instant, Payload


class ContactBlockedByStop(Payload):
    """A contact wrote the word that stops everything."""

    contact_id: str
    keyword: Literal["STOP", "SAIR"]


class SendBlocked(Payload):
    """Something was not sent, on purpose."""

    contact_id: str
    reason: str
    attempted_message_id: str | None = None


class Window24hExpired(Payload):
    """24 hours since the contact's last message: only templates may be sent now."""

    conversation_id: str
    contact_id: str
    expired_at: Instant


class SessionChanged(Payload):
    """A WhatsApp session has another status than the one we knew (WORKING, STOPPED, FAILED ...)."""

    session: str
    from_status: str | None = None
    to_status: str
    channel_id: str | None = None


EVENTS: dict[str, type[Payload]] = {
    "system.contact_blocked_by_stop": ContactBlockedByStop,
    "system.send_blocked": SendBlocked,
    "system.window_24h_expired": Window24hExpired,
    "system.session_changed": SessionChanged,
}
