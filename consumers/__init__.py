"""Events out of Kafka: everything the author of a worker needs."""

from consumers.worker import (
    ALL_BUT_WEBHOOK,
    BACKOFF_S,
    BatchWorker,
    Context,
    Delivery,
    ExternalWorker,
    Policy,
    Reject,
    RetryAfter,
    Snooze,
    TransactionalWorker,
    Worker,
)

__all__ = [
    "ALL_BUT_WEBHOOK",
    "BACKOFF_S",
    "BatchWorker",
    "Context",
    "Delivery",
    "ExternalWorker",
    "Policy",
    "Reject",
    "RetryAfter",
    "Snooze",
    "TransactionalWorker",
    "Worker",
]
