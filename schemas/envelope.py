"""What every event carries, whatever its type.

``Row`` is an event as ``event_log`` holds it, on the way out; ``Event`` is one as a consumer gets it. An event read
from a topic equals the row it was made of: same ids, same microseconds, payload and metadata equal as JSON.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

if TYPE_CHECKING:
    from schemas.events.base import Payload

FIRST_MAJOR = 1

_POSTGRES_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


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


@dataclass(slots=True)
class Event:
    """One event from a topic. ``created_at`` is in UTC with microseconds."""

    id: UUID
    organization_id: UUID
    event_type: str
    entity_kind: str
    entity_id: UUID | None
    payload: dict[str, Any]
    metadata: dict[str, Any]
    created_at: datetime

    @property
    def data(self) -> "Payload":
        """The payload as its model, brought to the newest major. Raises ``pydantic.ValidationError`` if it is unfit.

        Events outside the catalogue give a model without declared fields: everything is in ``model_extra``.
        """
        # Imported here: the models cost 100 ms that a relay, which only moves bytes, need not pay.
        from schemas.catalogue import model_of

        return model_of(self)


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
