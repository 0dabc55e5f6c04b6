"""Which workers the catalogue names as the takers of each event type: documentation, checked, and nobody's
subscription.

A worker's own class says what it takes; webhook-dispatch takes everything but webhook.* and `INTERNAL`, and audit and
automation take more than is listed where a tenant asks for it. Names are without the suffix `-worker`.
"""

CONSUMED_BY: dict[str, tuple[str, ...]] = {
    "lead.created": ("webhook-dispatch", "audit", "rag-indexer"),
    "lead.updated": ("webhook-dispatch", "audit", "rag-indexer"),
    "lead.stage_changed": ("automation", "webhook-dispatch", "audit"),
    "lead.won": ("webhook-dispatch", "automation", "analytics-aggregator"),
    "lead.lost": ("webhook-dispatch", "automation"),
    "lead.assigned": ("notification", "webhook-dispatch"),
    "lead.deleted": ("webhook-dispatch", "audit"),
    "lead_activity.recorded": ("analytics-aggregator", "webhook-dispatch"),
    "contact.created": ("rag-indexer", "webhook-dispatch"),
    "contact.merged": ("rag-indexer", "audit", "webhook-dispatch"),
    "contact.blocked": ("send-blocker", "webhook-dispatch"),
    "contact.anonymized": ("webhook-dispatch", "audit"),
    "message.queued": ("whatsapp-send", "webhook-dispatch"),
    "message.received": ("ai-response", "ai-sentiment", "automation", "webhook-dispatch"),
    "message.sent": ("webhook-dispatch", "analytics-aggregator", "automation"),
    "message.delivered": ("analytics-aggregator", "webhook-dispatch"),
    "message.read": ("analytics-aggregator", "webhook-dispatch"),
    "message.failed": ("recovery", "alert", "automation", "webhook-dispatch"),
    "conversation.opened": ("sla-tracker", "webhook-dispatch"),
    "conversation.assigned": ("notification", "webhook-dispatch"),
    "conversation.resolved": ("csat-trigger", "analytics-aggregator", "webhook-dispatch"),
    "conversation.reopened": ("analytics-aggregator", "webhook-dispatch"),
    "ai.responded": ("budget-tracker", "analytics-aggregator", "automation", "webhook-dispatch"),
    "ai.response_requested": ("ai-response", "webhook-dispatch"),
    "ai.handoff_triggered": ("notification", "audit", "webhook-dispatch"),
    "ai.sentiment_alert": ("notification", "webhook-dispatch"),
    "ai.budget_warning": ("notification", "alert", "webhook-dispatch"),
    "ai.budget_throttled": ("ai-response", "alert", "webhook-dispatch"),
    "nuvemshop.order_created": ("nuvemshop-sync", "crm-sync", "webhook-dispatch"),
    "nuvemshop.order_paid": ("nuvemshop-sync", "crm-sync", "automation", "webhook-dispatch"),
    "nuvemshop.order_cancelled": ("nuvemshop-sync", "webhook-dispatch"),
    "nuvemshop.order_fulfilled": ("nuvemshop-sync", "webhook-dispatch", "csat-trigger"),
    "nuvemshop.cart_abandoned": ("automation", "webhook-dispatch"),
    "nuvemshop.customer_redact_received": ("lgpd-redact", "webhook-dispatch"),
    "nuvemshop.product_synced": ("nuvemshop-sync", "rag-indexer", "webhook-dispatch"),
    "nuvemshop.full_resync": ("nuvemshop-sync", "webhook-dispatch"),
    "lgpd.consent_changed": ("webhook-dispatch", "audit"),
    "lgpd.data_request_received": ("lgpd-export", "lgpd-redact", "audit", "webhook-dispatch"),
    "lgpd.export_generated": ("notification", "webhook-dispatch"),
    "lgpd.redact_applied": ("webhook-dispatch", "audit"),
    "system.contact_blocked_by_stop": ("send-blocker", "audit", "webhook-dispatch"),
    "system.send_blocked": ("analytics-aggregator", "alert", "webhook-dispatch"),
    "system.window_24h_expired": ("template-suggester", "automation", "webhook-dispatch"),
    "system.session_changed": ("alert", "webhook-dispatch"),
    "system.automation_due": ("automation",),
    "system.automation_call_requested": ("automation-call",),
    # webhook.* is never dispatched: a subscription that fails would feed itself.
    "webhook.received": ("webhook-normalize", "webhook-fetch", "automation"),
    "webhook.checkout_due": ("webhook-normalize",),
    "webhook.delivery_failed": ("alert",),
    "webhook.subscription_disabled": ("notification", "audit"),
    "kb.document_changed": ("rag-indexer", "webhook-dispatch"),
    "campaign.scheduled": ("campaign-send", "webhook-dispatch"),
    "campaign.started": ("campaign-send", "webhook-dispatch"),
    "campaign.recipient_queued": ("campaign-send", "webhook-dispatch"),
    "campaign.paused": ("campaign-send", "notification", "webhook-dispatch"),
    "campaign.cancelled": ("campaign-send", "notification", "webhook-dispatch"),
    "campaign.completed": ("analytics-aggregator", "notification", "webhook-dispatch"),
    "contact_event.recorded": ("automation", "webhook-dispatch"),
}

INTERNAL = frozenset({"system.automation_due", "system.automation_call_requested"})
"""What a worker of ours says to itself, and nobody outside is told."""


def is_dispatched(event_type: str) -> bool:
    """Whether subscribers outside are told of events of this type."""
    return not event_type.startswith("webhook.") and event_type not in INTERNAL
