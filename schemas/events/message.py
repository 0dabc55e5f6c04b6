"""message.*: what is said on WhatsApp, both ways, and what became of it."""

from typing import Literal

from schemas.events.base import Instant, Payload


class Received(Payload):
    """A contact wrote. body is null for media without a caption; waha_message_id is the provider's id."""

    direction: Literal["in"]
    conversation_id: str
    contact_id: str
    body: str | None
    media_urls: list[str] | None = None
    waha_message_id: str
    message_id: str | None = None


class Queued(Payload):
    """A message waits to be sent; its row in messages has the rest."""

    message_id: str
    conversation_id: str
    contact_id: str
    direction: Literal["out"] | None = None
    channel: Literal["whatsapp"] | None = None
    body: str | None = None
    media_urls: list[str] | None = None
    reply_to: str | None = None


class Sent(Payload):
    """The provider took a message of ours."""

    direction: Literal["out"]
    conversation_id: str
    contact_id: str
    channel: Literal["whatsapp"]
    body: str | None
    message_id: str
    waha_message_id: str | None = None


class Delivered(Payload):
    """A message reached the contact's device."""

    message_id: str
    delivered_at: Instant


class Read(Payload):
    """The contact read a message."""

    message_id: str
    read_at: Instant


class Failed(Payload):
    """A message could not be sent; retryable says whether trying again can help."""

    message_id: str
    error_code: str
    error_message: str
    retryable: bool


EVENTS: dict[str, type[Payload]] = {
    "message.queued": Queued,
    "message.received": Received,
    "message.sent": Sent,
    "message.delivered": Delivered,
    "message.read": Read,
    "message.failed": Failed,
}
