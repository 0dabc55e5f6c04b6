"""campaign.*: a template goes out to many contacts."""

from schemas.events.base import Instant, Payload


class Scheduled(Payload):
    """A campaign will start at scheduled_at."""

    campaign_id: str
    scheduled_at: Instant
    recipients: int | None = None


class Started(Payload):
    """A campaign began to send."""

    campaign_id: str
    recipients: int


class RecipientQueued(Payload):
    """One recipient's message waits to be sent."""

    campaign_id: str
    recipient_id: str
    contact_id: str
    template_id: str | None = None
    message_id: str | None = None


class Paused(Payload):
    """A campaign stopped for now."""

    campaign_id: str
    reason: str
    paused_by: str | None = None


class Cancelled(Payload):
    """A campaign stopped for good."""

    campaign_id: str
    reason: str | None = None
    cancelled_by: str | None = None


class Completed(Payload):
    """Every recipient of a campaign has an outcome."""

    campaign_id: str
    sent: int
    failed: int
    skipped: int


EVENTS: dict[str, type[Payload]] = {
    "campaign.scheduled": Scheduled,
    "campaign.started": Started,
    "campaign.recipient_queued": RecipientQueued,
    "campaign.paused": Paused,
    "campaign.cancelled": Cancelled,
    "campaign.completed": Completed,
}
