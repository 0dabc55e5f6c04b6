"""conversation.*: a conversation is opened, given to somebody, resolved."""

from typing import Literal

from schemas.events.base import Payload


class Opened(Payload):
    """A conversation began."""

    conversation_id: str
    contact_id: str
    channel: str


class Assigned(Payload):
    """A conversation went to a person."""

    from_user_id: str | None = None
    to_user_id: str
    mode: Literal["manual", "round_robin"]


class Resolved(Payload):
    """A conversation was resolved after duration_s seconds."""

    resolved_by: str
    resolution_note: str | None = None
    duration_s: float


class Reopened(Payload):
    """A resolved conversation goes on."""

    reopened_by: str
    reason: str | None = None


EVENTS: dict[str, type[Payload]] = {
    "conversation.opened": Opened,
    "conversation.assigned": Assigned,
    "conversation.resolved": Resolved,
    "conversation.reopened": Reopened,
}
