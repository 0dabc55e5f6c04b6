"""The seeds' lists, to the letter, and the table that says which of them name the same fact."""

import pytest

from schemas.contact_events import (
    CONTACT_EVENT_TYPES,
    LANGUAGES,
    METRIC_CATEGORIES,
    METRIC_TO_TRIGGER,
    METRICS,
    TRIGGER_TO_METRIC,
    contact_event_type_of,
    metric_category,
    metric_label,
    metric_of,
)
from schemas.events.contact_event import PROPERTIES

SEED_METRICS = {
    "ecommerce": [
        "Order Placed", "Order Paid", "Order Cancelled", "Order Fulfilled", "Order Refunded", "Checkout Started",
        "Checkout Abandoned", "Checkout Recovered", "Customer Created",
    ],
    "messaging": [
        "Message Received", "Message Sent", "Message Delivered", "Message Read", "Message Failed", "Template Sent",
        "Template Delivered", "Template Read", "Campaign Sent", "AI Response Sent",
    ],
    "tracking": [
        "Shipment Created", "Shipment In Transit", "Shipment Out For Delivery", "Shipment Delivered",
        "Shipment Exception",
    ],
    "engagement": ["Link Clicked"],
    "contact": [
        "Contact Created", "Contact Updated", "Tag Added", "Tag Removed", "Conversation Opened", "Conversation Closed",
        "Conversation Assigned",
    ],
}  # fmt: skip

SEED_TYPES = {
    "purchase_completed": ["productId", "productName", "category", "amount", "currency", "paymentMethod"],
    "purchase_abandoned": ["productIds", "cartValue", "stageAbandoned"],
    "product_viewed": ["productId", "productName", "category"],
    "product_asked": ["productId", "question", "channel"],
    "interest_detected": ["category", "productId", "confidence"],
    "sentiment_detected": ["score", "label", "context"],
    "ticket_opened": ["ticketId", "subject", "productId", "priority"],
    "ticket_resolved": ["ticketId", "resolution", "satisfactionScore"],
    "conversation_started": ["channel", "context"],
    "conversation_ended": ["channel", "durationSeconds", "messageCount", "sentimentScore"],
    "campaign_delivered": ["campaignId", "campaignName", "productId", "channel"],
    "campaign_engaged": ["campaignId", "engagementType"],
    "campaign_ignored": ["campaignId", "daysSinceDelivery"],
    "subscription_created": ["planId", "planName", "amount"],
    "subscription_cancelled": ["planId", "reason"],
    "form_submitted": ["formId", "formName", "responses"],
    "discount_requested": ["context", "productId"],
    "discount_accepted": ["discountPercent", "productId"],
    "agent_insight": ["insightType", "content", "confidence"],
    "objection_raised": ["type", "context", "productId"],
}


def test_metrics_and_categories_are_the_seeds():
    assert {category: [m.name for m in METRICS.values() if m.category == category] for category in SEED_METRICS} == (
        SEED_METRICS
    )
    assert len(METRICS) == 32
    assert {*SEED_METRICS, "custom"} == set(METRIC_CATEGORIES)
    assert metric_category("Order Paid") == "ecommerce"
    assert metric_category("Points Earned") == "custom"


def test_contact_event_types_and_their_fields_are_the_seeds():
    assert set(CONTACT_EVENT_TYPES) == set(PROPERTIES) == set(SEED_TYPES)
    assert len(CONTACT_EVENT_TYPES) == 20
    for name, fields in SEED_TYPES.items():
        assert set(fields) <= set(PROPERTIES[name].model_fields), name


def test_a_pair_is_a_pair_from_both_sides():
    for name, contact_event_type in CONTACT_EVENT_TYPES.items():
        if contact_event_type.metric is not None:
            assert contact_event_type_of(contact_event_type.metric) == name
    for name, metric in METRICS.items():
        if metric.contact_event_type is not None:
            assert metric_of(metric.contact_event_type) == name
    assert metric_of("purchase_completed") == "Order Paid"
    assert contact_event_type_of("Order Placed") is None
    assert metric_of("no_such_type") is None


def test_triggers_are_the_seeds():
    assert TRIGGER_TO_METRIC == {
        "order_created": "Order Placed",
        "order_paid": "Order Paid",
        "checkout_created": "Checkout Started",
        "cart_abandoned": "Checkout Abandoned",
        "tracking_updated": "Shipment In Transit",
        "message_received": "Message Received",
        "new_contact": "Contact Created",
        "tag_added": "Tag Added",
        "webhook": "__webhook__",
        "schedule": "__schedule__",
    }
    assert METRIC_TO_TRIGGER == {
        "Order Placed": "order_created",
        "Order Paid": "order_paid",
        "Checkout Started": "checkout_created",
        "Checkout Abandoned": "cart_abandoned",
        "Shipment In Transit": "tracking_updated",
        "Message Received": "message_received",
        "Contact Created": "new_contact",
        "Tag Added": "tag_added",
    }


@pytest.mark.parametrize("language", LANGUAGES)
def test_everything_has_a_label_in_each_language(language):
    for labels in [m.labels for m in METRICS.values()] + [t.labels for t in CONTACT_EVENT_TYPES.values()]:
        assert labels.of(language).strip()
    shown = [metric.labels.of(language) for metric in METRICS.values()]
    assert len(set(shown)) == len(shown)


def test_labels_are_the_seeds_where_it_gives_them():
    assert metric_label("Order Placed", "pt-BR") == "Pedido Criado"
    assert metric_label("Order Placed", "en") == "Order Placed"
    assert metric_label("Order Placed", "es") == "Pedido Creado"
    assert metric_label("Points Earned", "es") == "Points Earned"
