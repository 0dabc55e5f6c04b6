"""Rows of ``event_log`` to record values and back. The one place that imports fastavro.

Framing: Confluent's wire format, a zero byte, the schema id as four bytes, the Avro body. What must stay true:

- decode(encode(row)) equals the row: ids, microseconds, payload and metadata equal as JSON. Whatever a typed field
  cannot hold to the letter (a field nobody declared, an explicit null where the field may be missing, a moment not
  written in our form, an amount given as a number) travels as JSON text in ``extra`` and wins when the payload is put
  together again.
- A row that does not fit is refused before a byte is produced, with the field in the error.
- Decoding goes by the schema that the record names, never by today's models.

Which schema of a type is used: the major that ``metadata.schema_version`` states; without one, the newest major that
the payload fits. An older major is accepted until 30 days after the next was published, judged by the row's
created_at, so that a replay of an old row does not fail.
"""

import json
import math
import re
import struct
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from io import BytesIO
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import fastavro
import orjson

from schemas import published, writers
from schemas.envelope import Event, RawRow, Row, major_of
from schemas.errors import DecodeError, EncodeError, SchemaError, UnknownSchemaError
from schemas.published import COMMITTED_IDS_FROM, CONTACT_EVENT, CUSTOM, Published

CONTENT_TYPE = b"application/vnd.confluent.avro"

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
# orjson reads integers beyond 64 bits as floats, silently. 19 digits in a row are where that may begin.
_LONG_DIGITS = re.compile(rb"\d{19}")
_AMOUNT = re.compile(r"-?\d{1,38}(\.\d{1,38})?")
_HEADER_LENGTH = 5
_MISSING: Any = object()

Kept = TypeVar("Kept")
Headers = list[tuple[str, bytes]]
Json = dict[str, Any]
Schema = dict[str, Any]


class Registry(Protocol):
    """A schema registry, when one is configured (``afluente.kafka.schema_registry``)."""

    def id_of(self, entry: Published) -> int:
        """The registry's id of a published schema; below 0x40000000."""

    def schema_of(self, schema_id: int) -> str | None:
        """The text of a schema, None when the registry does not know the id."""


# ---------------------------------------------------------------------------------------------------------------------
# The public functions


_registry: Registry | None = None


def use_registry(registry: Registry | None) -> None:
    """From now on, write new records with this registry's ids (None: the committed ones). Call it before encoding."""
    global _registry
    _registry = registry
    _writers.clear()
    _types.clear()
    for schema_id in [i for i in _readers if i < COMMITTED_IDS_FROM]:
        del _readers[schema_id]


def encode(row: Row) -> bytes:
    """The value of the record that a row becomes. Raises EncodeError naming the field; trying again is no use."""
    payload = _object(row.payload, "payload")
    metadata = _object(row.metadata, "metadata")
    if row.created_at.tzinfo is None:
        raise EncodeError("created_at", "has no time zone; event times are never naive")
    problem: EncodeError | None = None
    for writer in _writers_for(row, payload, metadata):
        out = bytearray(writer.header)
        try:
            _write_envelope(out, row)
            if writer.payload is None:
                _write_bytes(out, row.payload)
            else:
                writer.payload(payload, out, {}, "")
        except _Misfit as misfit:
            problem = problem or EncodeError(misfit.field("payload"), misfit.reason)
            continue
        return bytes(out)
    assert problem is not None
    raise problem


class Encoded(NamedTuple):
    """What a row is as a record: the organization's id as text, and what `encode` and `headers` give."""

    key: bytes
    value: bytes
    headers: Headers


def record(row: Row | RawRow) -> Encoded:
    """`encode` and `headers` in one go, much faster for a row that holds what is usual. Raises EncodeError."""
    return Encoded(*parts(row))


def parts(row: Row | RawRow) -> tuple[bytes, bytes, Headers]:
    """`record` without a name for what it gives, for the one who makes another tuple of it for each row."""
    try:
        return _plain_parts(row if isinstance(row, RawRow) else RawRow.of(row))
    except Exception:  # not plain: the walk along the schema writes it, or says why not
        walked = row.row() if isinstance(row, RawRow) else row
    return str(walked.organization_id).encode(), encode(walked), headers(walked)


def decode(value: bytes) -> Event:
    """The event in a record value. Raises DecodeError for anything that is not one."""
    return read(value).read(metadata=True)


def read(value: bytes) -> Event:
    """The same, with payload and metadata left until they are asked for (`Event.read`), when they may raise
    DecodeError too. For who has many in hand, or may not want this one."""
    reader = _reader(schema_id_of(value))
    try:
        return _read_envelope(value, reader)
    except Exception:  # not as we write it: the schema says what it is
        return _decode_by_schema(value)


def type_of(value: bytes | None) -> bytes | None:
    """The event type that a value of ours names, quickly; None when it is not plain to see. It proves nothing about the
    rest."""
    if value is None or len(value) < 100 or value[5] != 72 or value[42] != 72:
        return None
    return value[80 : 80 + (value[79] >> 1)]


def _decode_by_schema(value: bytes) -> Event:
    reader, record = _read(value)
    try:
        payload = record["payload"]
        return Event(
            id=record["id"],
            organization_id=record["organization_id"],
            event_type=record["event_type"],
            entity_kind=record["entity_kind"],
            entity_id=record["entity_id"],
            payload=_loads(payload.encode()) if reader.payload is None else reader.payload(payload),
            metadata=_loads(record["metadata"].encode()),
            created_at=record["created_at"],
        )
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise DecodeError(f"not an event: {type(error).__name__}: {error}") from error


def _read_envelope(value: bytes, reader: "_Reader") -> Event:
    """By its bytes, as `_plain_parts` writes them; any exception for all others."""
    if not reader.plain or value[5] != 72 or value[42] != 72:
        raise ValueError("not plain")
    if _IDS.fullmatch(value, 6, 79) is None:
        raise ValueError("not plain")
    kind_at = 81 + (length := value[79] >> 1)
    at = kind_at + (kind_length := value[kind_at - 1] >> 1)
    if length >= 64 or kind_length >= 64 or (value[79] | value[kind_at - 1]) & 1:
        raise ValueError("not plain")
    entity: str | None = None
    if value[at] == 2:
        if value[at + 1] != 72 or _ID.fullmatch(value, at + 2, at + 38) is None:
            raise ValueError("not plain")
        entity = value[at + 2 : at + 38].decode()
        at += 38
    elif value[at] == 0:
        at += 1
    else:
        raise ValueError("not plain")
    # Eight bytes of seven bits each, the least first; all but the last say that more follow. Pressed together by pairs.
    (number,) = _EIGHT_BYTES.unpack_from(value, at)
    if number & 0x8080808080808080 != 0x0080808080808080 or number & 1:
        raise ValueError("not a moment of eight bytes after 1970")
    number = number & 0x007F007F007F007F | (number & 0x7F007F007F007F00) >> 1
    number = number & 0x00003FFF00003FFF | (number & 0x3FFF00003FFF0000) >> 2
    number = number & 0x000000000FFFFFFF | (number & 0x0FFFFFFF00000000) >> 4
    at += 8

    def rest() -> tuple[Json, bytes]:
        body = BytesIO(value)
        body.seek(at)
        try:
            metadata = fastavro.schemaless_reader(body, "bytes", None)
            payload = fastavro.schemaless_reader(body, reader.payload_schema, None)
        except Exception as error:  # as in _read
            raise DecodeError(f"the bytes do not fit their schema: {type(error).__name__}: {error}") from error
        if body.tell() != len(value):
            raise DecodeError(f"{len(value) - body.tell()} bytes are left over after the record")
        try:
            return (
                _loads(payload.encode()) if reader.payload is None else reader.payload(payload),  # type: ignore[union-attr]
                cast(bytes, metadata),
            )
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise DecodeError(f"not an event: {type(error).__name__}: {error}") from error

    return Event.unread(
        value[6:42].decode(),
        value[43:79].decode(),
        value[80 : 80 + length].decode(),
        value[kind_at : kind_at + kind_length].decode(),
        entity,
        _EPOCH + timedelta(microseconds=number >> 1),
        rest,
        _read_metadata,
    )


def _read_metadata(text: bytes) -> Json:
    try:
        return cast(Json, _loads(text))
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"not an event: {type(error).__name__}: {error}") from error


def decode_record(value: bytes) -> tuple[str, dict[str, Any]]:
    """The event type and the raw Avro record (envelope, payload with its ``extra`` maps still apart), for hot paths.

    Moments are datetimes in UTC, ids of the envelope are UUIDs, amounts are text, JSON is text. Raises DecodeError.
    """
    _, record = _read(value)
    event_type = record.get("event_type")
    if not isinstance(event_type, str):
        raise DecodeError("not an event: it has no event_type")
    return event_type, record


def headers(row: Row) -> Headers:
    """The headers of a row's record: CloudEvents in binary form, the trace, the request and the relay's ``seq``."""
    result = [
        ("ce_specversion", b"1.0"),
        ("ce_id", str(row.id).encode()),
        ("ce_type", row.event_type.encode()),
        ("ce_source", f"/organizations/{row.organization_id}".encode()),
        ("ce_time", row.created_at.astimezone(UTC).isoformat(timespec="microseconds").encode()),
        ("ce_subject", f"{row.entity_kind}/{row.entity_id}".encode() if row.entity_id else row.entity_kind.encode()),
        ("content-type", CONTENT_TYPE),
    ]
    metadata = _object(row.metadata, "metadata")
    for key, name in (("traceparent", "traceparent"), ("request_id", "x-request-id")):
        text = metadata.get(key)
        if isinstance(text, str) and text:
            result.append((name, text.encode()))
    # Rows of EventProducer have no place in event_log and say so with a seq of 0; verification tells them by the lack
    # of it.
    if row.seq:
        result.append(("seq", str(row.seq).encode()))
    return result


def schema_id_of(value: bytes) -> int:
    """The schema id in a record's framing. Raises DecodeError when there is no framing."""
    if len(value) < _HEADER_LENGTH or value[0] != 0:
        raise DecodeError("the value does not begin with a zero byte and a schema id")
    return int.from_bytes(value[1:_HEADER_LENGTH], "big")


def parse_schema(text: str) -> Schema:
    """An Avro schema as fastavro wants it; raises SchemaError when it is not one."""
    try:
        return cast(Schema, fastavro.parse_schema(json.loads(text), named_schemas={}))
    except (ValueError, KeyError, TypeError, fastavro.schema.SchemaParseException) as error:
        raise SchemaError(f"not an Avro schema: {error}") from error


# ---------------------------------------------------------------------------------------------------------------------
# Which schema


class _Writer:
    """One schema that new records can be written with; ``payload`` is None where the payload is carried as text.

    ``plain`` writes what is usual, fast; with ``floats`` it must not see integers that orjson has made floats of.
    """

    __slots__ = ("floats", "header", "payload", "plain")

    def __init__(self, entry: Published) -> None:
        schema_id = entry.schema_id if _registry is None else _registry.id_of(entry)
        self.header = b"\0" + schema_id.to_bytes(4, "big")
        schema = entry.schema()
        # The envelope is written by hand, so it has to be the one that the hand knows.
        if [field["name"] for field in schema["fields"]] != _ENVELOPE:
            raise SchemaError(f"{entry.file} has another envelope than this release writes")
        self.payload = _payload_writer(schema)
        kind, named = _payload_type(schema), dict[str, _Put]()
        self.plain: writers.Write | None = None
        if self.payload:
            self.plain = writers.writer(kind, lambda inner: _put(inner, named), _SMALL, _PRESENT_SMALL)
        self.floats = writers.may_hold_floats(kind)


class _Reader:
    """How records of one schema are read. `plain`: the envelope is ours, so it can be read by its bytes."""

    __slots__ = ("payload", "payload_schema", "plain", "schema")

    def __init__(self, text: str) -> None:
        plain = json.loads(text)
        self.schema = parse_schema(text)
        try:
            self.payload = _payload_reader(plain)
            self.plain = [field["name"] for field in plain["fields"]] == _ENVELOPE
            self.payload_schema = parse_schema(json.dumps(_payload_type(plain)))
        except (KeyError, TypeError, AttributeError, StopIteration) as error:
            raise DecodeError("the schema of the record is not that of an event") from error


_writers: dict[int, _Writer] = {}
_readers: dict[int, _Reader] = {}


def _writer(entry: Published) -> _Writer:
    writer = _writers.get(entry.number)
    if writer is None:
        writer = _writers[entry.number] = _Writer(entry)
    return writer


def _reader(schema_id: int) -> _Reader:
    reader = _readers.get(schema_id)
    if reader is not None:
        return reader
    # The range decides, before any registry is asked: a committed id must mean the same wherever it is read.
    if schema_id >= COMMITTED_IDS_FROM:
        entry = published.by_number().get(schema_id - COMMITTED_IDS_FROM)
        if entry is None:
            raise UnknownSchemaError(schema_id, "it was published by a newer release; upgrade this process")
        reader = _Reader(entry.text())
    elif _registry is None:
        raise UnknownSchemaError(schema_id, "it is a registry's and none is configured (SCHEMA_REGISTRY_URL)")
    else:
        text = _registry.schema_of(schema_id)
        if text is None:
            raise UnknownSchemaError(schema_id, "the configured registry does not know it either")
        reader = _Reader(text)
    _readers[schema_id] = reader
    return reader


def check_properties(contact_event_type: str | None, properties: Json) -> None:
    """Raise EncodeError when contact_event.recorded of this type cannot carry these properties: what `encode` would
    say, for those who have many facts and no rows yet. Strings are taken to be text that UTF-8 and Postgres can hold.
    """
    put = _properties.get(contact_event_type)
    if put is None:
        variant = contact_event_type or ""
        entries = published.current(CONTACT_EVENT, variant) or published.current(CONTACT_EVENT, "")
        payload = _payload_type(entries[0].schema())
        kind = next(field["type"] for field in payload["fields"] if field["name"] == "properties")
        put = _keep(_properties, contact_event_type, _put(kind, {}))
    try:
        put(properties, bytearray(), {}, "properties")
    except _Misfit as misfit:
        raise EncodeError(misfit.field("properties"), misfit.reason) from None


_properties: dict[str | None, "_Put"] = {}


def _writers_for(row: Row, payload: Json, metadata: Json) -> Iterable[_Writer]:
    event_type, variant = row.event_type, ""
    if event_type not in published.event_types():
        event_type = CUSTOM
    elif event_type == CONTACT_EVENT:
        variant = payload.get("contact_event_type") or ""
        if not isinstance(variant, str):
            raise EncodeError("payload.contact_event_type", "must be text or null")
    entries = published.current(event_type, variant)
    if not entries and variant:
        # A type that a newer release or a tenant knows: free properties, the type still in its field.
        variant = ""
        entries = published.current(event_type, variant)
    if len(entries) == 1 and "schema_version" not in metadata:
        return (_writer(entries[0]),)
    if event_type == CUSTOM:
        return (_writer(entries[0]),)
    try:
        stated = major_of(metadata)
    except ValueError as error:
        raise EncodeError("metadata.schema_version", str(error)) from None
    if stated is not None:
        entries = tuple(entry for entry in entries if entry.major == stated)
        if not entries:
            raise EncodeError("metadata.schema_version", f"{event_type} has no major {stated}")
    accepted = []
    for entry in entries:
        until = published.accepted_until(event_type, variant, entry.major)
        if until is None or row.created_at <= until:
            accepted.append(_writer(entry))
    if not accepted:
        until = published.accepted_until(event_type, variant, entries[0].major)
        raise EncodeError(
            "metadata.schema_version",
            f"major {entries[0].major} of {event_type} was accepted until {until}; emit the newer one",
        )
    return accepted


# ---------------------------------------------------------------------------------------------------------------------
# JSON in


def _object(text: bytes, field: str) -> Json:
    """A JSON object from its text. Raises EncodeError naming the place of what JSON, or Avro's text, cannot hold."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        value = _reread(text, field, error)
    if type(value) is not dict:
        raise EncodeError(field, f"must be a JSON object, not {_kind(value)}")
    if _LONG_DIGITS.search(text) is not None:
        try:
            value = json.loads(text)
        except RecursionError:
            raise EncodeError(field, "is nested too deeply") from None
    if b"\\u0000" in text:
        _refuse_unfit_text(value, field)
    return cast(Json, value)


def _loads(text: bytes) -> Any:
    return json.loads(text) if _LONG_DIGITS.search(text) is not None else orjson.loads(text)


def _dumps(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except TypeError:  # an integer beyond 64 bits
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _reread(text: bytes, field: str, error: Exception) -> Any:
    """orjson says where in the text, a person wants to know which field: read it again, forgivingly, and look.

    What is left when nothing is wrong are integers too long for orjson, which jsonb holds.
    """
    try:
        value = json.loads(text.decode())  # decoded here: of bytes it would take UTF-16 too
    except (ValueError, RecursionError):
        raise EncodeError(field, f"is not JSON in UTF-8: {error}") from None
    _refuse_unfit_text(value, field)
    return value


def _refuse_unfit_text(value: Any, path: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise EncodeError(path, f"{value} is not a JSON number")
    if isinstance(value, str):
        if "\0" in value:
            raise EncodeError(path, "has a NUL character, which Postgres cannot store")
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise EncodeError(path, "has a lone surrogate, which is not text in UTF-8")
    elif isinstance(value, dict):
        for key, inner in value.items():
            _refuse_unfit_text(key, f"{path}.{ascii(key)[1:-1]}")
            _refuse_unfit_text(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _refuse_unfit_text(inner, f"{path}[{index}]")


_KINDS = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return _KINDS.get(type(value), type(value).__name__)


# ---------------------------------------------------------------------------------------------------------------------
# JSON to Avro, by the schema


class _Misfit(Exception):
    """A value that does not fit; the path grows from the inside out while the error travels."""

    def __init__(self, reason: str, *path: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path = list(path)

    def field(self, root: str) -> str:
        return root + "".join(reversed(self.path))


# (value, where to, the extra map of the record around it, its name there): checks and writes in one walk. The relay
# does this for every row, and Avro's bytes are simple; a dict for fastavro, which then looks for the branch of each
# union again, took three times as long.
_Put = Callable[[Any, bytearray, dict[str, str], str], None]
_Take = Callable[[Any], Any]

_ENVELOPE = ["id", "organization_id", "event_type", "entity_kind", "entity_id", "created_at", "metadata", "payload"]


def _varint(number: int) -> bytes:
    """A long as Avro writes it: zigzag, seven bits a byte, the least first."""
    number = (number << 1) ^ (number >> 63)
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


_SMALL = [_varint(number) for number in range(8192)]  # lengths of nearly every text, list and map
_DOUBLE = struct.Struct("<d").pack
_NULL, _PRESENT = _varint(0), _varint(1)  # the branches of ["null", T]
_PRESENT_SMALL = [_PRESENT + length for length in _SMALL]
_END = _varint(0)  # of a list or a map


def _length(number: int) -> bytes:
    return _SMALL[number] if number < 8192 else _varint(number)


def _write_bytes(out: bytearray, data: bytes) -> None:
    out += _length(len(data))
    out += data


def _write_envelope(out: bytearray, row: Row) -> None:
    try:
        for text in (str(row.id), str(row.organization_id), row.event_type, row.entity_kind):
            _write_bytes(out, text.encode())
    except (AttributeError, UnicodeEncodeError) as error:
        raise EncodeError("row", f"{type(error).__name__}: {error}") from error
    if row.entity_id is None:
        out += _NULL
    else:
        out += _PRESENT
        _write_bytes(out, str(row.entity_id).encode())
    out += _varint((row.created_at - _EPOCH) // _MICROSECOND)
    _write_bytes(out, row.metadata)


class _Type(NamedTuple):
    """How plain rows of an event type are written. `write` is None where the payload is carried as text; `after`: only
    rows created later (counted as in RawRow), as older ones might be of an older major."""

    write: writers.Write | None
    floats: bool
    front: bytes
    event_type: bytes
    header: tuple[str, bytes]
    after: int


# What rows have in common. Emptied when full, as tenants make up types and organizations come without end.
_types: dict[bytes, tuple[_Type, dict[str | None, _Type] | None]] = {}
_organizations: dict[bytes, tuple[bytes, tuple[str, bytes]]] = {}
_entity_kinds: dict[bytes, tuple[bytes, bytes]] = {}
_KEPT = 65_536
_latest_second = (-1, b"")

_SPECVERSION_HEADER = ("ce_specversion", b"1.0")
_CONTENT_TYPE_HEADER = ("content-type", CONTENT_TYPE)
_36 = _length(36)  # of a UUID as text
_ENTITY = _PRESENT + _36
_BACKSLASH = 92
_POSTGRES_EPOCH = datetime(2000, 1, 1)
_POSTGRES_EPOCH_MICROS = 946_684_800_000_000
_THOUSANDTHS = [b"%03d" % number for number in range(1_000)]
_LAST_DIGITS = [b"%03d+00:00" % number for number in range(1_000)]
_EIGHT_BYTES = struct.Struct("<Q")
_as_eight_bytes = _EIGHT_BYTES.pack
_UUID_TEXT = rb"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_ID, _IDS = re.compile(_UUID_TEXT), re.compile(_UUID_TEXT + b"H" + _UUID_TEXT)  # H: 72, the length before the second


def _plain_parts(row: RawRow) -> tuple[bytes, bytes, Headers]:
    """Key, value and headers of a row with nothing unusual in it; any exception for all others.

    The longest stretch of Python that a row goes through: what is cheaper to look up is not made again.
    """
    global _latest_second
    seq, event_id, key, event_type, entity_kind, entity_id, text, correlation, created_at = row
    # Most have no backslash at all, which is found out faster.
    if (_BACKSLASH in text and b"\\u0000" in text) or (_BACKSLASH in correlation and b"\\u0000" in correlation):
        raise ValueError("not plain")
    payload, metadata = orjson.loads(text), orjson.loads(correlation)
    known, variants = _types.get(event_type) or _learn_type(event_type)
    if variants is not None:
        known = variants.get(payload.get("contact_event_type"), known)
    if type(payload) is not dict or "schema_version" in metadata or created_at <= known.after:
        raise ValueError("not plain")
    if known.floats and _LONG_DIGITS.search(text) is not None:
        raise ValueError("not plain")
    organization, source = _organizations.get(key) or _learn_organization(key)
    kind, subject = _entity_kinds.get(entity_kind) or _learn_entity_kind(entity_kind)
    if entity_id is None:
        entity, subject = _NULL, entity_kind
    else:
        entity, subject = _ENTITY + entity_id, subject + entity_id
    number = (created_at + _POSTGRES_EPOCH_MICROS) << 1
    if not 0 < number >> 49 < 0x80:
        raise ValueError("not a number of eight bytes: the years before 1979 and after 3110")
    # A long's seven bits a byte, drawn apart by pairs: quicker than tables too large for the processor's cache.
    number = number & 0x000000000FFFFFFF | (number & 0x00FFFFFFF0000000) << 4
    number = number & 0x00003FFF00003FFF | (number & 0x0FFFC0000FFFC000) << 2
    number = number & 0x007F007F007F007F | (number & 0x3F803F803F803F80) << 1
    front = [
        known.front,
        event_id,
        organization,
        known.event_type,
        kind,
        entity,
        _as_eight_bytes(number | 0x0080808080808080),
        _SMALL[len(correlation)],
        correlation,
    ]
    if known.write is None:
        front += (_length(len(text)), text)
        value = b"".join(front)
    else:
        value = known.write(front, payload)
    second, micros = divmod(created_at, 1_000_000)
    latest, time = _latest_second
    if latest != second:
        time = (_POSTGRES_EPOCH + timedelta(seconds=second)).isoformat().encode() + b"."
        _latest_second = (second, time)
    found = [
        _SPECVERSION_HEADER,
        ("ce_id", event_id),
        known.header,
        source,
        ("ce_time", time + _THOUSANDTHS[micros // 1_000] + _LAST_DIGITS[micros % 1_000]),
        ("ce_subject", subject),
        _CONTENT_TYPE_HEADER,
    ]
    if type(trace := metadata.get("traceparent")) is str and trace:
        found.append(("traceparent", trace.encode()))
    if type(request := metadata.get("request_id")) is str and request:
        found.append(("x-request-id", request.encode()))
    if seq:
        found.append(("seq", b"%d" % seq))
    return key, value, found


def _learn_type(event_type: bytes) -> tuple[_Type, dict[str | None, _Type] | None]:
    name = event_type.decode()
    variants: dict[str | None, _Type] | None = None
    if name not in published.event_types():
        found = _type(event_type, published.current(CUSTOM, ""))
    else:
        found = _type(event_type, published.current(name, ""))
        if name == CONTACT_EVENT:
            variants = {
                entry.variant: _type(event_type, published.current(name, entry.variant))
                for entry in published.all_published()
                if entry.event_type == name
            }
    return _keep(_types, event_type, (found, variants))


def _type(event_type: bytes, entries: tuple[Published, ...]) -> _Type:
    newest, after = entries[0], -_INT64_MAX
    for entry in entries[1:]:
        until = published.accepted_until(newest.event_type, newest.variant, entry.major)
        if until is None:
            raise ValueError("several majors, for ever")
        after = max(after, (until - _EPOCH) // _MICROSECOND - _POSTGRES_EPOCH_MICROS)
    writer, length = _writer(newest), _length(len(event_type))
    return _Type(
        writer.plain,
        writer.floats and writer.plain is not None,
        writer.header + _36,
        length + event_type,
        ("ce_type", event_type),
        after,
    )


def _learn_organization(organization: bytes) -> tuple[bytes, tuple[str, bytes]]:
    return _keep(_organizations, organization, (_36 + organization, ("ce_source", b"/organizations/" + organization)))


def _learn_entity_kind(kind: bytes) -> tuple[bytes, bytes]:
    return _keep(_entity_kinds, kind, (_length(len(kind)) + kind, kind + b"/"))


def _keep(place: dict[Any, Any], key: Any, value: Kept) -> Kept:
    if len(place) >= _KEPT:
        place.clear()
    place[key] = value
    return value


def _payload_writer(schema: Schema) -> _Put | None:
    kind = _payload_type(schema)
    return None if isinstance(kind, dict) and kind.get("logicalType") == "json" else _put(kind, {})


def _payload_reader(schema: Schema) -> _Take | None:
    kind = _payload_type(schema)
    return None if isinstance(kind, dict) and kind.get("logicalType") == "json" else _take(kind, {})


def _payload_type(schema: Schema) -> Any:
    return next(field["type"] for field in schema["fields"] if field["name"] == "payload")


def _put(kind: Any, named: dict[str, _Put]) -> _Put:
    match kind:
        case str() if kind in named:
            return named[kind]
        case "string":
            return _put_string
        case "boolean":
            return _put_boolean
        case "long":
            return _put_long
        case "double":
            return _put_double
        case {"logicalType": "timestamp-micros"}:
            return _put_instant
        case {"logicalType": "decimal-text"}:
            return _put_amount
        case {"logicalType": "json"}:
            return _put_json
        case {"type": "array", "items": items}:
            return _put_array(_put(items, named))
        case {"type": "map", "values": values}:
            return _put_map(_put(values, named))
        case {"type": "enum"}:
            put = named[kind["name"]] = _put_enum(kind)
            return put
        case {"type": "record"}:
            return _put_record(kind, named)
    raise SchemaError(f"no way to write {kind!r}")


def _put_string(value: Any, out: bytearray, extra: dict[str, str], name: str) -> None:
    if type(value) is not str:
        raise _Misfit(f"must be text, not {_kind(value)}")
    _write_bytes(out, value.encode())


def _put_boolean(value: Any, out: bytearray, extra: dict[str, str], name: str) -> None:
    if type(value) is not bool:
        raise _Misfit(f"must be true or false, not {_kind(value)}")
    out.append(value)


def _put_long(value: Any, out: bytearray, extra: dict[str, str], name: str) -> None:
    if type(value) is not int:
        # 3.0 is not taken for 3: the reader would get another JSON text than was sent.
        raise _Misfit(f"must be a whole number, not {_kind(value) if type(value) is not float else value}")
    if not _INT64_MIN <= value <= _INT64_MAX:
        raise _Misfit(f"{value} is beyond 64 bits")
    out += _varint(value)


def _put_double(value: Any, out: bytearray, extra: dict[str, str], name: str) -> None:
    if type(value) is not float:
        value = _whole_as_double(value)
    out += _DOUBLE(value)


def _whole_as_double(value: Any) -> float:
    if type(value) is not int:
        raise _Misfit(f"must be a number, not {_kind(value)}")
    try:
        held = float(value)
    except OverflowError:
        raise _Misfit(f"{value} is beyond a double") from None
    if held != value:
        raise _Misfit(f"{value} has more digits than a double holds")
    return held


def _put_instant(value: Any, out: bytearray, extra: dict[str, str], name: str) -> None:
    if type(value) is not str:
        raise _Misfit(f"must be a moment as ISO 8601 text, not {_kind(value)}")
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise _Misfit(f"{value!r} is not a moment in ISO 8601") from None
    if moment.tzinfo is None:
        raise _Misfit(f"{value!r} has no offset from UTC; moments are never naive")
    try:
        moment = moment.astimezone(UTC)
    except OverflowError:
        raise _Misfit(f"{value!r} is outside the years 1 to 9999 in UTC") from None
    if moment.isoformat(timespec="microseconds") != value:
        extra[name] = _dumps(value)
    out += _varint((moment - _EPOCH) // _MICROSECOND)


def _put_amount(value: Any, out: bytearray, extra: dict[str, str], name: str) -> None:
    if type(value) is str:
        if _AMOUNT.fullmatch(value) is None:
            raise _Misfit(f"{value!r} is not a decimal such as '297.90'")
        text = value
    elif type(value) in (int, float):
        text = format(Decimal(repr(value)), "f")
        if _AMOUNT.fullmatch(text) is None:
            raise _Misfit(f"{value} has too many digits for an amount")
        extra[name] = _dumps(value)
    else:
        raise _Misfit(f"must be a decimal as text, not {_kind(value)}")
    _write_bytes(out, text.encode())


def _put_json(value: Any, out: bytearray, extra: dict[str, str], name: str) -> None:
    _write_bytes(out, _dumps(value).encode())


def _put_array(item: _Put) -> _Put:
    def put(value: Any, out: bytearray, extra: dict[str, str], name: str) -> None:
        if type(value) is not list:
            raise _Misfit(f"must be a list, not {_kind(value)}")
        if value:
            out += _length(len(value))
            for index, inner in enumerate(value):
                try:
                    item(inner, out, extra, name)
                except _Misfit as misfit:
                    misfit.path.append(f"[{index}]")
                    raise
        out += _END

    return put


def _put_map(item: _Put) -> _Put:
    def put(value: Any, out: bytearray, extra: dict[str, str], name: str) -> None:
        if type(value) is not dict:
            raise _Misfit(f"must be an object, not {_kind(value)}")
        if value:
            out += _length(len(value))
            for key, inner in value.items():
                _write_bytes(out, key.encode())
                try:
                    item(inner, out, extra, name)
                except _Misfit as misfit:
                    misfit.path.append(f".{key}")
                    raise
        out += _END

    return put


def _put_enum(kind: Schema) -> _Put:
    # The default is what a reader makes of symbols it does not know; nobody says it.
    places = {symbol: _varint(place) for place, symbol in enumerate(kind["symbols"]) if symbol != kind.get("default")}
    choices = ", ".join(places)

    def put(value: Any, out: bytearray, extra: dict[str, str], name: str) -> None:
        if type(value) is not str or value not in places:
            raise _Misfit(f"must be one of {choices}, not {value!r}")
        out += places[value]

    return put


def _put_record(kind: Schema, named: dict[str, _Put]) -> _Put:
    # (name, may be missing, may be null, is free JSON, how)
    fields: list[tuple[str, bool, bool, bool, _Put]] = []

    def put(value: Any, out: bytearray, extra: dict[str, str], name: str) -> None:
        if type(value) is not dict:
            raise _Misfit(f"must be an object, not {_kind(value)}")
        own: dict[str, str] = {}
        found = 0
        for field, optional, nullable, free, convert in fields:
            inner = value.get(field, _MISSING)
            if inner is _MISSING:
                if not optional:
                    raise _Misfit("is required and missing", f".{field}")
                out += _NULL
                continue
            found += 1
            if inner is None and not free:
                if not nullable:
                    raise _Misfit("must not be null", f".{field}")
                out += _NULL
                if optional:
                    own[field] = "null"  # else it would come back as missing
                continue
            if nullable:
                out += _PRESENT
            try:
                convert(inner, out, own, field)
            except _Misfit as misfit:
                misfit.path.append(f".{field}")
                raise
        if found != len(value):
            for key, inner in value.items():
                if key not in declared:
                    own[key] = _dumps(inner)
        if own:
            out += _length(len(own))
            for key, text in own.items():
                _write_bytes(out, key.encode())
                _write_bytes(out, text.encode())
        out += _END

    named[kind["name"]] = put
    for field in kind["fields"][:-1]:
        inner = field["type"]
        nullable = isinstance(inner, list)
        if nullable:
            inner = inner[1]
        free = isinstance(inner, dict) and inner.get("logicalType") == "json"
        fields.append((field["name"], "default" in field, nullable, free, _put(inner, named)))
    if kind["fields"][-1]["name"] != "extra":
        raise SchemaError(f"the last field of {kind['name']} is not extra")
    declared = frozenset(field[0] for field in fields)
    return put


# ---------------------------------------------------------------------------------------------------------------------
# Avro to JSON, by the schema


def _take(kind: Any, named: dict[str, _Take]) -> _Take:
    match kind:
        case str() if kind in named:
            return named[kind]
        case {"logicalType": "timestamp-micros"}:
            return _take_instant
        case {"logicalType": "json"}:
            return _take_json
        case {"type": "array", "items": items}:
            item = _take(items, named)
            return _as_it_is if item is _as_it_is else lambda value: [item(inner) for inner in value]
        case {"type": "map", "values": values}:
            item = _take(values, named)
            return _as_it_is if item is _as_it_is else lambda value: {key: item(inner) for key, inner in value.items()}
        case {"type": "record"}:
            return _take_record(kind, named)
        case {"type": "enum"}:
            named[kind["name"]] = _as_it_is
    return _as_it_is


def _as_it_is(value: Any) -> Any:
    return value


def _take_instant(value: Any) -> Any:
    return value.isoformat(timespec="microseconds")


def _take_json(value: Any) -> Any:
    return _loads(value.encode())


def _take_record(kind: Schema, named: dict[str, _Take]) -> _Take:
    """Made as Python source, as the writers are: a payload has a dozen fields, and each would be asked what it is."""
    names: dict[str, Any] = {"loads": _loads, "as_it_is": _as_it_is}
    always: list[str] = []
    steps: list[str] = []
    named[kind["name"]] = lambda record: names["take"](record)
    for number, field in enumerate(kind["fields"]):
        if field["name"] == "extra":
            continue
        name, inner = repr(field["name"]), field["type"]
        nullable = isinstance(inner, list)
        convert = _take(inner[1] if nullable else inner, named)
        as_it_is = convert is _as_it_is
        names[f"c{number}"] = convert
        if nullable and "default" in field:  # null: it is missing; what was an explicit null is in `extra`
            value = "value" if as_it_is else f"c{number}(value)"
            steps += [f"value = record[{name}]", f"if value is not None: found[{name}] = {value}"]
        elif as_it_is:
            always.append(f"{name}: record[{name}]")
        elif nullable:
            always.append(f"{name}: None if record[{name}] is None else c{number}(record[{name}])")
        else:
            always.append(f"{name}: c{number}(record[{name}])")
    code = [
        "def take(record):",
        f"    found = {{{', '.join(always)}}}",
        *(f"    {step}" for step in steps),
        "    if extra := record['extra']:",
        "        for key, text in extra.items(): found[key] = loads(text.encode())",
        "    return found",
    ]
    exec("\n".join(code), names)
    made: _Take = names["take"]
    named[kind["name"]] = made
    return made


def _read(value: bytes) -> tuple[_Reader, dict[str, Any]]:
    reader = _reader(schema_id_of(value))
    body = BytesIO(value)
    body.seek(_HEADER_LENGTH)
    try:
        record = fastavro.schemaless_reader(body, reader.schema, None)
    except Exception as error:  # random bytes make fastavro raise anything from EOFError to OverflowError
        raise DecodeError(f"the bytes do not fit their schema: {type(error).__name__}: {error}") from error
    if body.tell() != len(value):
        raise DecodeError(f"{len(value) - body.tell()} bytes are left over after the record")
    return reader, cast(dict[str, Any], record)
