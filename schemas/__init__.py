"""What an event is: its types, its bytes, its topics. Imports none of our other packages."""

from schemas.codec import Encoded, decode, encode, headers, read, record, type_of, use_registry
from schemas.envelope import Event, RawRow, Row
from schemas.errors import DecodeError, EncodeError, SchemaError, UnknownSchemaError

__all__ = [
    "DecodeError",
    "EncodeError",
    "Encoded",
    "Event",
    "RawRow",
    "Row",
    "SchemaError",
    "UnknownSchemaError",
    "decode",
    "encode",
    "headers",
    "read",
    "record",
    "type_of",
    "use_registry",
]
