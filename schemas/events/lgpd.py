"""lgpd.*: consent, and the requests of the data subject."""

from typing import Literal

from schemas.events.base import Instant, Payload


class ConsentChanged(Payload):
    """A contact gave or withdrew a consent."""

    contact_id: str
    consent_type: str
    granted: bool
    source: str


class DataRequestReceived(Payload):
    """A contact asks for its data (access, due in 7 days) or for its erasure (redact, due in 15)."""

    request_id: str
    request_type: Literal["access", "redact"]
    contact_id: str
    channel: str


class ExportGenerated(Payload):
    """The data of a contact was put together; the signed link ends at expires_at."""

    request_id: str
    export_url_signed: str
    expires_at: Instant


class RedactApplied(Payload):
    """A contact was erased, here only or in the connected shop too."""

    request_id: str
    contact_id: str
    scope: Literal["crm_only", "crm_and_nuvemshop"]


EVENTS: dict[str, type[Payload]] = {
    "lgpd.consent_changed": ConsentChanged,
    "lgpd.data_request_received": DataRequestReceived,
    "lgpd.export_generated": ExportGenerated,
    "lgpd.redact_applied": RedactApplied,
}
