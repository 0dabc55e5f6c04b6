"""What can be wrong with an emission.

Each is raised before the statement is sent when the client can tell, and from the SQLSTATE of `emit_event` when only
the server can; then the caller's transaction is aborted, as after any database error.

EmitError (an AfluenteError)     nothing was written; `sqlstate` is the server's code for it
├── NoOrganizationError          AF001  the session has no organization and none was given
├── ForeignOrganizationError     AF002  the organization is not the session's
├── EventTypeError               AF003  event_type or entity_kind is malformed
├── PayloadError                 AF004  payload or metadata cannot be kept as they are; `field` says where
├── TooLargeError                AF005  payload over 256 KiB, metadata over 16 KiB
├── IdempotencyKeyReusedError    AF006  the key named another event or payload before
├── UnknownOrganizationError     AF007  there is no such organization
├── SealedMonthError             AF008  created_at lies in a month that is published and closed
├── ContactUnknownError          AF010  the contact is not one of the session's organization
├── ContactError                 AF020-AF023  a merge or a change of a contact that makes no sense
└── OwnedByTableError            (EventProducer) the event type is a table's to tell: emit it with the row

NotDeliveredError (an Unavailable)  (EventProducer) events that are not known to be in their topics; `failed` says why
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar
from uuid import UUID

import psycopg

from afluente.errors import AfluenteError, Unavailable

__all__ = [
    "ContactError",
    "ContactUnknownError",
    "EmitError",
    "EventTypeError",
    "ForeignOrganizationError",
    "IdempotencyKeyReusedError",
    "NoOrganizationError",
    "NotDeliveredError",
    "OwnedByTableError",
    "PayloadError",
    "SealedMonthError",
    "TooLargeError",
    "UnknownOrganizationError",
    "translate",
]


class EmitError(AfluenteError):
    """An event was refused. Trying the same again gives the same answer: mend the call."""

    sqlstate: ClassVar[str] = ""


class NoOrganizationError(EmitError):
    sqlstate = "AF001"


class ForeignOrganizationError(EmitError):
    sqlstate = "AF002"


class EventTypeError(EmitError):
    sqlstate = "AF003"


class PayloadError(EmitError):
    """`field` is a path such as `payload.items[2].price`, or None when the server did not say."""

    sqlstate = "AF004"

    def __init__(self, message: str, *, hint: str | None = None, field: str | None = None) -> None:
        super().__init__(message if field is None else f"{field}: {message}", hint=hint)
        self.field = field


class TooLargeError(EmitError):
    sqlstate = "AF005"


class IdempotencyKeyReusedError(EmitError):
    sqlstate = "AF006"


class UnknownOrganizationError(EmitError):
    sqlstate = "AF007"


class SealedMonthError(EmitError):
    sqlstate = "AF008"


class ContactUnknownError(EmitError):
    sqlstate = "AF010"


class ContactError(EmitError):
    """A contact cannot be merged or changed like this: with itself (AF020), once it was erased (AF021), without who and
    why (AF022), to a phone or e-mail that names another one (AF023)."""

    sqlstate = "AF020"


class OwnedByTableError(EmitError):
    """An event of this type tells of a row: a record without it would be a claim that nothing stands behind."""

    def __init__(self, event_type: str, table: str) -> None:
        super().__init__(
            f"{event_type} tells of rows of {table} and is not produced directly",
            hint="producers.emit (or emit_event in SQL), in the transaction that writes the row",
        )
        self.event_type = event_type
        self.table = table


class NotDeliveredError(Unavailable):
    """`failed`: event id -> what the client said. They may be in their topics all the same: produce them again under
    the
    same ids."""

    def __init__(self, failed: Mapping[UUID, str]) -> None:
        first = next(iter(failed.items()))
        super().__init__(
            f"{len(failed)} events are not known to be in their topics, the first one {first[0]}: {first[1]}",
            hint="produce them again under the same event_id",
        )
        self.failed = dict(failed)


_BY_SQLSTATE: dict[str, type[EmitError]] = {
    kind.sqlstate: kind
    for kind in (
        NoOrganizationError,
        ForeignOrganizationError,
        EventTypeError,
        PayloadError,
        TooLargeError,
        IdempotencyKeyReusedError,
        UnknownOrganizationError,
        SealedMonthError,
        ContactUnknownError,
        ContactError,
    )
}
_BY_SQLSTATE |= {state: ContactError for state in ("AF021", "AF022", "AF023")}


def translate(error: psycopg.Error) -> EmitError | None:
    """The typed error for one that `emit_event` raised, or None: not ours, let it through."""
    kind = _BY_SQLSTATE.get(error.sqlstate or "")
    if kind is not None:
        return kind(error.diag.message_primary or str(error), hint=error.diag.message_hint)
    # jsonb's own refusals of what came past the client's checks: \u0000, lone surrogates, numbers beyond numeric.
    if isinstance(
        error,
        psycopg.errors.UntranslatableCharacter
        | psycopg.errors.InvalidTextRepresentation
        | psycopg.errors.NumericValueOutOfRange,
    ):
        return PayloadError(f"Postgres cannot keep it: {error.diag.message_primary}", hint=error.diag.message_detail)
    return None
