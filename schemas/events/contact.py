"""contact.*: a person becomes known, is merged, blocked, or forgotten."""

from typing import Literal

from schemas.events.base import Payload


class Created(Payload):
    """A person became a contact of the organization."""

    phone: str | None
    name: str | None = None
    source: str


class Merged(Payload):
    """Two contacts turned out to be one person; into_contact_id is the one that stays."""

    from_contact_id: str
    into_contact_id: str
    merged_fields: list[str]


class Blocked(Payload):
    """Nothing may be sent to the contact any more: it said stop, or somebody blocked it."""

    reason: Literal["stop", "manual"]
    actor_id: str | None = None


class Anonymized(Payload):
    """The personal data of a contact was removed."""

    lgpd_request_id: str
    anonymized_fields: list[str]


EVENTS: dict[str, type[Payload]] = {
    "contact.created": Created,
    "contact.merged": Merged,
    "contact.blocked": Blocked,
    "contact.anonymized": Anonymized,
}
