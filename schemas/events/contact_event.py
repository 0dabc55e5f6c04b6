"""contact_event.recorded: an append-only fact about one contact, one schema for each contact event type.

``Recorded`` is what all of them have; ``properties`` differs. A property is optional in every type: a fact comes from
whichever system knows it, and what a system can fill is its own matter (an abandoned Hotmart cart has no price). Facts
without a contact event type (most metrics) have free properties.

Property names are the seed's, as they are stored.
"""

from typing import TYPE_CHECKING, Literal

from schemas.events.base import Amount, Instant, Json, Payload


class Item(Payload):
    """One line of an order."""

    productId: str | None = None
    productName: str | None = None
    category: str | None = None
    variantId: str | None = None
    sku: str | None = None
    quantity: float | None = None
    price: Amount | None = None
    amount: Amount | None = None


class PurchaseCompleted(Payload):
    """A purchase was paid. The product fields are those of the first line; items has every line."""

    productId: str | None = None
    productName: str | None = None
    category: str | None = None
    amount: Amount | None = None
    currency: str | None = None
    paymentMethod: str | None = None
    items: list[Item] | None = None


class PurchaseAbandoned(Payload):
    """A cart or checkout was left at a stage (cart, contact, shipping, payment ...)."""

    productIds: list[str] | None = None
    cartValue: Amount | None = None
    currency: str | None = None
    stageAbandoned: str | None = None


class ProductViewed(Payload):
    """A product was looked at."""

    productId: str | None = None
    productName: str | None = None
    category: str | None = None


class ProductAsked(Payload):
    """A question about a product."""

    productId: str | None = None
    question: str | None = None
    channel: str | None = None


class InterestDetected(Payload):
    """An interest was noticed; confidence is between 0 and 1."""

    category: str | None = None
    productId: str | None = None
    confidence: float | None = None


class SentimentDetected(Payload):
    """A mood was noticed in what the contact wrote."""

    score: float | None = None
    label: str | None = None
    context: str | None = None


class TicketOpened(Payload):
    """A support ticket was opened."""

    ticketId: str | None = None
    subject: str | None = None
    productId: str | None = None
    priority: str | None = None


class TicketResolved(Payload):
    """A support ticket was resolved."""

    ticketId: str | None = None
    resolution: str | None = None
    satisfactionScore: float | None = None


class ConversationStarted(Payload):
    """A conversation began on a channel."""

    channel: str | None = None
    context: str | None = None


class ConversationEnded(Payload):
    """A conversation ended after durationSeconds."""

    channel: str | None = None
    durationSeconds: float | None = None
    messageCount: int | None = None
    sentimentScore: float | None = None


class CampaignDelivered(Payload):
    """A campaign's message reached the contact."""

    campaignId: str | None = None
    campaignName: str | None = None
    productId: str | None = None
    channel: str | None = None


class CampaignEngaged(Payload):
    """The contact reacted to a campaign (read, reply, click ...)."""

    campaignId: str | None = None
    engagementType: str | None = None


class CampaignIgnored(Payload):
    """The contact did not react to a campaign for daysSinceDelivery days."""

    campaignId: str | None = None
    daysSinceDelivery: float | None = None


class SubscriptionCreated(Payload):
    """A subscription began."""

    planId: str | None = None
    planName: str | None = None
    amount: Amount | None = None
    currency: str | None = None


class SubscriptionCancelled(Payload):
    """A subscription ended or will end."""

    planId: str | None = None
    reason: str | None = None


class FormSubmitted(Payload):
    """A form was filled in; each response is as the form's system gives it."""

    formId: str | None = None
    formName: str | None = None
    responses: list[Json] | None = None


class DiscountRequested(Payload):
    """The contact asked for a discount."""

    context: str | None = None
    productId: str | None = None


class DiscountAccepted(Payload):
    """The contact took a discount of discountPercent percent."""

    discountPercent: float | None = None
    productId: str | None = None


class AgentInsight(Payload):
    """An AI agent noticed something worth keeping."""

    insightType: str | None = None
    content: str | None = None
    confidence: float | None = None


class ObjectionRaised(Payload):
    """The contact named a reason not to buy."""

    type: str | None = None
    context: str | None = None
    productId: str | None = None


class Metric(Payload):
    """Properties of a fact without a contact event type: whatever its source says."""


class Recorded(Payload):
    """A fact about a contact was recorded. value is the fact's amount in currency; occurred_at when it happened,
    received_at when we learnt it."""

    contact_event_id: str
    contact_id: str
    contact_event_type: str | None
    metric_name: str | None
    category: str | None
    source_type: Literal["EXTERNAL", "INTERNAL", "DIRECT"]
    source: str
    external_event_id: str | None
    unique_event_id: str | None
    object_id: str | None
    object_id_ref: str | None
    entity_type: str | None
    entity_id: str | None
    value: Amount | None
    currency: str | None
    occurred_at: Instant
    received_at: Instant

    if TYPE_CHECKING:
        # Given by the contact event type: schemas.catalogue makes the model of each, schemas.generate its schema.
        properties: Payload


# In the order of the seed's table.
PROPERTIES: dict[str, type[Payload]] = {
    "purchase_completed": PurchaseCompleted,
    "purchase_abandoned": PurchaseAbandoned,
    "product_viewed": ProductViewed,
    "product_asked": ProductAsked,
    "interest_detected": InterestDetected,
    "sentiment_detected": SentimentDetected,
    "ticket_opened": TicketOpened,
    "ticket_resolved": TicketResolved,
    "conversation_started": ConversationStarted,
    "conversation_ended": ConversationEnded,
    "campaign_delivered": CampaignDelivered,
    "campaign_engaged": CampaignEngaged,
    "campaign_ignored": CampaignIgnored,
    "subscription_created": SubscriptionCreated,
    "subscription_cancelled": SubscriptionCancelled,
    "form_submitted": FormSubmitted,
    "discount_requested": DiscountRequested,
    "discount_accepted": DiscountAccepted,
    "agent_insight": AgentInsight,
    "objection_raised": ObjectionRaised,
}
