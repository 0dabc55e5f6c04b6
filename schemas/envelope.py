"""What every event carries, whatever its type.

``Row`` is an event as ``event_log`` holds it, on the way out; ``Event`` is one as a consumer gets it. An event read
from a topic equals the row it was made of: same ids, same microseconds, payload and metadata equal as JSON.
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID, SafeUUID

if TYPE_CHECKING:
    from schemas.events.base import Payload

FIRST_MAJOR = 1

_POSTGRES_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_new, _set = object.__new__, object.__setattr__  # a UUID lets nobody else


class Row(NamedTuple):
    """One row of ``event_log``; ``payload`` and ``metadata`` are the UTF-8 text of the JSON columns."""

    seq: int
    id: UUID
    organization_id: UUID
    event_type: str
    entity_kind: str
    entity_id: UUID | None
    payload: bytes
    metadata: bytes
    created_at: datetime


class RawRow(NamedTuple):
    """A ``Row`` as Postgres gives it in binary form: all texts as UTF-8, ids as their text, ``created_at`` counted in
    microseconds since 2000. For the relay: nothing is made of it that would only be written as bytes again."""

    seq: int
    id: bytes
    organization_id: bytes
    event_type: bytes
    entity_kind: bytes
    entity_id: bytes | None
    payload: bytes
    metadata: bytes
    created_at: int

    @classmethod
    def of(cls, row: Row) -> "RawRow":
        """The same row. Raises TypeError for a created_at without a time zone."""
        return cls(
            row.seq,
            str(row.id).encode(),
            str(row.organization_id).encode(),
            row.event_type.encode(),
            row.entity_kind.encode(),
            None if row.entity_id is None else str(row.entity_id).encode(),
            row.payload,
            row.metadata,
            (row.created_at - _POSTGRES_EPOCH) // _MICROSECOND,
        )

    def row(self) -> Row:
        """The same row, for everybody else."""
        return Row(
            self.seq,
            UUID(self.id.decode()),
            UUID(self.organization_id.decode()),
            self.event_type.decode(),
            self.entity_kind.decode(),
            None if self.entity_id is None else UUID(self.entity_id.decode()),
            self.payload,
            self.metadata,
            _POSTGRES_EPOCH + timedelta(microseconds=self.created_at),
        )


class Event:
    """One event from a topic. ``created_at`` is in UTC with microseconds.

    What ``schemas.read`` gives has its payload and metadata read when they are asked for first: then they may raise
    DecodeError. The ids are there as text too (``id_text``, ...), which costs less to make and to compare.
    """

    __slots__ = (
        "_entity_id",
        "_id",
        "_metadata",
        "_organization_id",
        "_payload",
        "_read_metadata",
        "_unread",
        "created_at",
        "entity_kind",
        "entity_text",
        "event_type",
        "id_text",
        "organization_text",
    )
    __hash__ = None  # type: ignore[assignment]

    id_text: str
    organization_text: str
    event_type: str
    entity_kind: str
    entity_text: str | None
    created_at: datetime
    _id: UUID | None
    _organization_id: UUID | None
    _entity_id: UUID | None
    _payload: dict[str, Any] | None
    _metadata: dict[str, Any] | bytes | None
    _unread: "Callable[[], tuple[dict[str, Any], bytes]] | None"
    _read_metadata: "Callable[[bytes], dict[str, Any]]"

    def __init__(
        self,
        id: UUID,
        organization_id: UUID,
        event_type: str,
        entity_kind: str,
        entity_id: UUID | None,
        payload: dict[str, Any],
        metadata: dict[str, Any],
        created_at: datetime,
    ) -> None:
        self._id, self._organization_id, self._entity_id = id, organization_id, entity_id
        self.id_text, self.organization_text = str(id), str(organization_id)
        self.entity_text = None if entity_id is None else str(entity_id)
        self.event_type, self.entity_kind, self.created_at = event_type, entity_kind, created_at
        self._payload, self._metadata, self._unread = payload, metadata, None

    @classmethod
    def unread(
        cls,
        id: str,
        organization_id: str,
        event_type: str,
        entity_kind: str,
        entity_id: str | None,
        created_at: datetime,
        rest: "Callable[[], tuple[dict[str, Any], bytes]]",
        read_metadata: "Callable[[bytes], dict[str, Any]]",
    ) -> "Event":
        """An event whose payload, and metadata as text, `rest` reads. The ids are canonical texts."""
        event = cls.__new__(cls)
        event.id_text, event.organization_text, event.entity_text = id, organization_id, entity_id
        event.event_type, event.entity_kind, event.created_at = event_type, entity_kind, created_at
        event._id = event._organization_id = event._entity_id = event._payload = event._metadata = None
        event._unread, event._read_metadata = rest, read_metadata
        return event

    def read(self, *, metadata: bool = False) -> "Event":
        """Itself, its payload read, and its metadata. Raises DecodeError."""
        if self._unread is not None:
            self._payload, self._metadata = self._unread()
            self._unread = None
        if metadata and isinstance(self._metadata, bytes):
            self._metadata = self._read_metadata(self._metadata)
        return self

    @property
    def id(self) -> UUID:
        if self._id is None:
            self._id = _uuid(self.id_text)
        return self._id

    @property
    def organization_id(self) -> UUID:
        if self._organization_id is None:
            self._organization_id = _uuid(self.organization_text)
        return self._organization_id

    @property
    def entity_id(self) -> UUID | None:
        if self._entity_id is None and self.entity_text is not None:
            self._entity_id = _uuid(self.entity_text)
        return self._entity_id

    @property
    def payload(self) -> dict[str, Any]:
        if self._unread is not None:
            self.read()
        return self._payload  # type: ignore[return-value]

    @property
    def metadata(self) -> dict[str, Any]:
        return self.read(metadata=True)._metadata  # type: ignore[return-value]

    def __eq__(self, other: object) -> bool:
        return self._all() == other._all() if isinstance(other, Event) else NotImplemented

    def __repr__(self) -> str:
        return f"Event({self.event_type}, id={self.id_text}, organization_id={self.organization_text})"

    def _all(self) -> tuple[Any, ...]:
        ids = (self.id_text, self.organization_text, self.entity_text)
        return (*ids, self.event_type, self.entity_kind, self.created_at, self.payload, self.metadata)

    @property
    def data(self) -> "Payload":
        """The payload as its model, brought to the newest major. Raises ``pydantic.ValidationError`` if it is unfit.

        Events outside the catalogue give a model without declared fields: everything is in ``model_extra``.
        """
        # Imported here: the models cost 100 ms that a relay, which only moves bytes, need not pay.
        from schemas.catalogue import model_of

        return model_of(self)


def _uuid(text: str) -> UUID:
    """The UUID of a canonical text. UUID's own constructor takes every way to write one, and four times as long."""
    made = _new(UUID)
    _set(made, "int", int(text.replace("-", ""), 16))
    _set(made, "is_safe", SafeUUID.unknown)
    return made


def major_of(metadata: dict[str, Any]) -> int | None:
    """The major of ``metadata.schema_version`` (semver), or None when it is not stated.

    Raises ValueError when it is stated and is not semver: guessing would pick a wrong schema.
    """
    stated = metadata.get("schema_version")
    if stated is None:
        return None
    if isinstance(stated, str):
        parts = stated.split(".")
        if len(parts) == 3 and parts[0].isdecimal() and parts[1].isdecimal():
            return int(parts[0])
    raise ValueError(f"schema_version {stated!r} is not semver such as '1.0.0'")
