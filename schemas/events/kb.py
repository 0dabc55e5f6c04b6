"""kb.*: the knowledge base that the bot reads."""

from typing import Literal

from schemas.events.base import Payload


class DocumentChangedV1(Payload):
    """A document of the knowledge base was edited or deleted."""

    document_id: str
    change: Literal["edit", "delete"]


class DocumentChanged(Payload):
    """A document of the knowledge base changed; the words are those of nuvemshop.product_synced."""

    document_id: str
    action: Literal["created", "updated", "deleted"]
    content_hash: str | None = None


def document_changed_v1_to_v2(payload: dict[str, object]) -> dict[str, object]:
    """Version 1 did not tell a new document from an edited one: both mean that it has to be indexed again."""
    newer = {name: value for name, value in payload.items() if name != "change"}
    newer["action"] = {"edit": "updated", "delete": "deleted"}[str(payload["change"])]
    return newer


EVENTS: dict[str, type[Payload]] = {"kb.document_changed": DocumentChanged}
