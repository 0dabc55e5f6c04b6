"""Events into Kafka. A service that has a Postgres transaction needs `emit` and nothing else.

`EventProducer`, for those that have none, is loaded when it is asked for: `emit` needs no Kafka client.
"""

from typing import TYPE_CHECKING, Any

from producers.contact_events import (
    emit_metric_event,
    emit_metric_event_async,
    record_contact_event,
    record_contact_event_async,
)
from producers.emit import Causation, emit, emit_async
from producers.errors import EmitError

if TYPE_CHECKING:
    from producers.event_producer import EventProducer

__all__ = [
    "Causation",
    "EmitError",
    "EventProducer",
    "emit",
    "emit_async",
    "emit_metric_event",
    "emit_metric_event_async",
    "record_contact_event",
    "record_contact_event_async",
]


def __getattr__(name: str) -> Any:
    if name == "EventProducer":
        from producers.event_producer import EventProducer

        return EventProducer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
