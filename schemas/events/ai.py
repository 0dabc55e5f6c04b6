"""ai.*: what the bot said, cost and noticed."""

from typing import Literal

from pydantic import Field

from schemas.events.base import Instant, Payload


class Responded(Payload):
    """The bot answered. Costs are in cents and can be fractions of one; latency is in milliseconds."""

    conversation_id: str
    message_id: str
    model: str
    tokens_in: int
    tokens_out: int
    cost_cents: float
    latency_ms: float


class HandoffTriggered(Payload):
    """The bot gave the conversation to a person."""

    conversation_id: str
    reason: str
    from_: Literal["bot"] = Field(alias="from")
    to_user_id: str | None = None


class SentimentAlert(Payload):
    """A contact is angry or frustrated."""

    conversation_id: str
    sentiment: Literal["angry", "frustrated"]
    score: float


class BudgetWarning(Payload):
    """The day's budget for AI is nearly used; pct_used is in percent."""

    pct_used: float
    daily_budget_cents: float
    current_cents: float


class BudgetThrottled(Payload):
    """The day's budget for AI is used; the bot is silent until throttle_until."""

    daily_budget_cents: float
    current_cents: float
    throttle_until: Instant


class ResponseRequested(Payload):
    """The bot is asked to answer in a conversation without a message that calls for it: by a step of an automation.
    instructions are what to say, or how. What it says is an ai.responded caused by this."""

    conversation_id: str
    contact_id: str
    instructions: str | None = None
    automation_run: str | None = None


EVENTS: dict[str, type[Payload]] = {
    "ai.responded": Responded,
    "ai.response_requested": ResponseRequested,
    "ai.handoff_triggered": HandoffTriggered,
    "ai.sentiment_alert": SentimentAlert,
    "ai.budget_warning": BudgetWarning,
    "ai.budget_throttled": BudgetThrottled,
}
