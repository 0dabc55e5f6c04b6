"""What can go wrong between an event and its bytes.

SchemaError
├── EncodeError           the row does not fit the contract: to relay.dead-letter, never retried
├── DecodeError           the bytes are not an event of ours: to the dead letters, never retried
│   └── UnknownSchemaError    the framing is right, the schema id is not known here
├── UnknownEventType      nobody declared this event type
└── IncompatibleSchema    a model changed in a way that old readers or old records do not survive
"""


class SchemaError(Exception):
    """Root of everything this package raises on purpose."""


class EncodeError(SchemaError):
    """The row does not fit its schema. ``field`` is a path such as ``payload.items[2].productId``, or ``row``."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class DecodeError(SchemaError):
    """The value is not a record in our framing, or not one of our events."""


class UnknownSchemaError(DecodeError):
    """The schema id of the record is neither a committed one nor known to the configured registry."""

    def __init__(self, schema_id: int, hint: str) -> None:
        super().__init__(f"schema id {schema_id} ({schema_id:#x}) is unknown here; {hint}")
        self.schema_id = schema_id


class UnknownEventType(SchemaError):
    """The catalogue has no model for this event type."""


class IncompatibleSchema(SchemaError):
    """A change to a published schema that needs a new major. ``problems`` has one sentence for each."""

    def __init__(self, name: str, problems: list[str]) -> None:
        super().__init__(f"{name}: {'; '.join(problems)}. Make a new major with an upcaster, or undo the change")
        self.name = name
        self.problems = problems
