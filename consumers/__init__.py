"""Events out of Kafka: everything the author of a worker needs."""

from consumers.worker import (
    ALL_BUT_WEBHOOK,
    BACKOFF_S,
    BatchWorker,
    Breaker,
    Context,
    Delivery,
    ExternalWorker,
    NotMade,
    Policy,
    Rate,
    Reject,
    RetryAfter,
    Snooze,
    TransactionalWorker,
    Unknown,
    Worker,
)

__all__ = [
    "ALL_BUT_WEBHOOK",
    "BACKOFF_S",
    "BatchWorker",
    "Breaker",
    "Context",
    "Delivery",
    "ExternalWorker",
    "NotMade",
    "Policy",
    "Rate",
    "Reject",
    "RetryAfter",
    "Snooze",
    "TransactionalWorker",
    "Unknown",
    "Worker",
]
