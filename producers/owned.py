"""Which event types a table owns, and so may not be produced past it.

An event type is owned when the fact it tells is a row of ours, or a change of one. Then only the transaction that
writes the row may tell it (`emit`, or the SQL function): a record without its row is a claim that summaries, replays
and erasure know nothing of, and a row without its record is a fact that nobody is told. What no table holds may be
produced directly; so may every type outside the catalogue, which is the producing service's own word.
"""

from collections.abc import Mapping
from types import MappingProxyType

# Event type -> the table whose rows it tells of. Each type of the catalogue is here or in UNOWNED; a test sees to it.
TABLE_OF: Mapping[str, str] = MappingProxyType(
    {
        "ai.handoff_triggered": "conversations",
        "ai.responded": "messages",
        "ai.sentiment_alert": "messages",
        "campaign.cancelled": "campaigns",
        "campaign.completed": "campaigns",
        "campaign.paused": "campaigns",
        "campaign.recipient_queued": "campaign_recipients",
        "campaign.scheduled": "campaigns",
        "campaign.started": "campaigns",
        "contact.anonymized": "contacts",
        "contact.blocked": "contacts",
        "contact.created": "contacts",
        "contact.merged": "contacts",
        "contact_event.recorded": "contact_events",
        "conversation.assigned": "conversations",
        "conversation.opened": "conversations",
        "conversation.reopened": "conversations",
        "conversation.resolved": "conversations",
        "lead.assigned": "leads",
        "lead.created": "leads",
        "lead.deleted": "leads",
        "lead.lost": "leads",
        "lead.stage_changed": "leads",
        "lead.updated": "leads",
        "lead.won": "leads",
        "lgpd.consent_changed": "contacts",
        "lgpd.data_request_received": "lgpd_requests",
        "lgpd.export_generated": "lgpd_requests",
        "lgpd.redact_applied": "lgpd_requests",
        "message.delivered": "message_events",
        "message.failed": "message_events",
        "message.queued": "messages",
        "message.read": "message_events",
        "message.received": "messages",
        "message.sent": "message_events",
        "nuvemshop.customer_redact_received": "lgpd_requests",
        "nuvemshop.order_cancelled": "orders",
        "nuvemshop.order_created": "orders",
        "nuvemshop.order_fulfilled": "orders",
        "nuvemshop.order_paid": "orders",
        "system.automation_call_requested": "automation_runs",
        "system.automation_due": "automation_runs",
        "system.contact_blocked_by_stop": "contacts",
        "webhook.checkout_due": "checkouts",
        "webhook.delivery_failed": "webhook_delivery_attempts",
        "webhook.received": "webhook_events",
        "webhook.subscription_disabled": "webhook_subscriptions",
    }
)

# Facts of the catalogue that come from outside of Postgres, or from a clock.
UNOWNED = frozenset(
    {
        "ai.budget_throttled",
        "ai.budget_warning",
        "ai.response_requested",
        "kb.document_changed",
        "lead_activity.recorded",
        "nuvemshop.cart_abandoned",
        "nuvemshop.full_resync",
        "nuvemshop.product_synced",
        "system.send_blocked",
        "system.session_changed",
        "system.window_24h_expired",
    }
)


def table_of(event_type: str) -> str | None:
    """The table that owns an event type, or None when it may be produced directly.

    The whole families of contact events and webhooks are owned, types that nobody catalogued included.
    """
    if event_type.startswith("contact_event."):
        return "contact_events"
    if event_type.startswith("webhook."):
        return TABLE_OF.get(event_type, "webhook_events")
    return TABLE_OF.get(event_type)
