"""system.*: the runtime about itself; these need no entity."""

from typing import Literal

from schemas.events.base import Instant, Payload


class ContactBlockedByStop(Payload):
    """A contact wrote a word that stops everything; keyword is the one it counts as."""

    contact_id: str
    keyword: Literal["STOP", "SAIR"]
    word: str | None = None


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


class AutomationDue(Payload):
    """An automation goes on: a wait or a call of a run is over (run_id), or its schedule's time has come: for one
    contact (contact_id), or for the audience, from the contact after after_contact_id on."""

    automation_id: str
    run_id: str | None = None
    step: int | None = None
    due_at: Instant
    contact_id: str | None = None
    after_contact_id: str | None = None


class AutomationCallRequested(Payload):
    """A step of an automation's run calls an address outside; the run waits for what becomes of it."""

    automation_id: str
    run_id: str
    step: int
    contact_id: str | None = None


EVENTS: dict[str, type[Payload]] = {
    "system.contact_blocked_by_stop": ContactBlockedByStop,
    "system.send_blocked": SendBlocked,
    "system.window_24h_expired": Window24hExpired,
    "system.session_changed": SessionChanged,
    "system.automation_due": AutomationDue,
    "system.automation_call_requested": AutomationCallRequested,
}
