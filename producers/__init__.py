"""Events into Kafka. A service that has a Postgres transaction needs `emit` and nothing else."""

from producers.emit import Causation, emit, emit_async
from producers.errors import EmitError

__all__ = ["Causation", "EmitError", "emit", "emit_async"]
