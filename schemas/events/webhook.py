"""webhook.*: deliveries that came in, and those that could not go out."""

from schemas.events.base import Payload


class Received(Payload):
    """A delivery of an outside system is stored; the row in webhook_events has its body."""

    webhook_event_id: str
    source: str
    topic: str | None


class DeliveryFailed(Payload):
    """One attempt to deliver an event to a subscription failed; attempt counts from 1."""

    subscription_id: str
    event_id: str
    attempt: int
    error: str
    status_code: int | None = None


class SubscriptionDisabled(Payload):
    """A subscription was switched off; reason is `10_consecutive_failures` unless a person did it."""

    subscription_id: str
    reason: str
    last_error: str | None


class CheckoutDue(Payload):
    """It is time to see whether a checkout was left: nothing happened for left_after_s seconds, or something did."""

    source: str
    token: str
    left_after_s: int


EVENTS: dict[str, type[Payload]] = {
    "webhook.received": Received,
    "webhook.delivery_failed": DeliveryFailed,
    "webhook.subscription_disabled": SubscriptionDisabled,
    "webhook.checkout_due": CheckoutDue,
}
