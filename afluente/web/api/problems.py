"""What a request is answered that is not carried out: problem+json (RFC 9457), each kind in one table.

What must stay true: a problem says what is wrong with the request and what to do about it, in our words. Nothing of the
database's (statements, constraint names, its messages) and nothing that looks like personal data gets into one: answers
to batches are kept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from pydantic import ValidationError

from afluente.telemetry.redact import redact_text
from producers.errors import (
    EmitError,
    EventTypeError,
    IdempotencyKeyReusedError,
    PayloadError,
    TooLargeError,
    translate,
)

MEDIA_TYPE: Final = "application/problem+json"
TYPES_AT: Final = "/v1/docs#problem-"
MAX_ERRORS: Final = 20
MAX_DETAIL: Final = 500


@dataclass(frozen=True)
class Kind:
    """One kind of problem: `type` is TYPES_AT and the slug, `meaning` is for the documentation."""

    slug: str
    status: int
    title: str
    meaning: str


def _kinds(*kinds: Kind) -> Mapping[str, Kind]:
    return {kind.slug: kind for kind in kinds}


# fmt: off
KINDS: Final = _kinds(
    Kind("malformed-body", 400, "The body cannot be read",
         "Not JSON in UTF-8, cut short, nested deeper than 100 levels, or with a number that no double holds."),
    Kind("malformed-header", 400, "A header cannot be read", "Idempotency-Key is 1 to 255 printable ASCII characters."),
    Kind("unauthorized", 401, "No valid API key",
         "Send `Authorization: Bearer afl_...`. The detail says whether the key is unknown, revoked or expired."),
    Kind("forbidden", 403, "The key lacks a scope", "`scope` in WWW-Authenticate names the one that is needed."),
    Kind("not-found", 404, "There is nothing here", "No such path, or nothing of that id in the key's organization."),
    Kind("method-not-allowed", 405, "The method is not allowed here", "`Allow` names those that are."),
    Kind("body-too-slow", 408, "The body came too slowly", "Send it within 10 seconds."),
    Kind("request-in-progress", 409, "A request with this idempotency key is being carried out",
         "Send the same request again after `Retry-After` seconds: it is answered as the first one was."),
    Kind("body-too-large", 413, "The body is too large", "At most 3 MiB; divide the batch."),
    Kind("unsupported-media-type", 415, "The body is not JSON", "Send `Content-Type: application/json`."),
    Kind("invalid-request", 422, "The request does not fit its schema", "`errors` names each field by JSON pointer."),
    Kind("event-type-refused", 422, "Events of this type are not emitted here",
         "webhook.* and contact_event.* tell of rows that only their own writers make; contact events have a path."),
    Kind("event-refused", 422, "The event does not fit its type",
         "`errors` names the field; GET /v1/event-types/{event_type} has the schema."),
    Kind("too-large", 422, "The event is too large", "A payload has at most 256 KiB of JSON text."),
    Kind("contact-unknown", 422, "There is no such contact",
         "contact_id is not one of the key's organization, or no identity of `contact` can be read."),
    Kind("idempotency-key-reused", 422, "The idempotency key was used for something else",
         "A key names one request (or one event). Give this one its own."),
    Kind("batch-refused", 422, "The batch was refused as a whole",
         "`all_or_nothing` was asked for and `results` names the items that are wrong; nothing was written."),
    Kind("rate-limited", 429, "The key's rate is used up", "Wait for `Retry-After` seconds."),
    Kind("internal", 500, "An error of ours",
         "Nothing was written, or with an idempotency key the same request finds out. Tell us the request_id."),
    Kind("unavailable", 503, "The database is away, or too much is in flight",
         "Send the same request again after `Retry-After` seconds, with an idempotency key so that it happens once."),
)
# fmt: on


class Problem(Exception):
    """A refusal. `errors` are (JSON pointer, what is wrong there); `extra` are further members of the answer."""

    def __init__(
        self,
        slug: str,
        detail: str,
        *,
        hint: str | None = None,
        errors: Sequence[tuple[str, str]] = (),
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(f"{slug}: {detail}")
        self.kind = KINDS[slug]
        self.detail = redact_text(detail)[:MAX_DETAIL]
        self.hint = hint
        # The name of a field that nobody knows is the sender's text too.
        self.errors = [
            (redact_text(pointer)[:MAX_DETAIL], redact_text(what)[:MAX_DETAIL]) for pointer, what in errors[:MAX_ERRORS]
        ]
        self.headers = dict(headers or {})
        self.extra = dict(extra or {})

    def body(self, request_id: str | None = None) -> dict[str, Any]:
        """The members of the answer."""
        members: dict[str, Any] = {
            "type": TYPES_AT + self.kind.slug,
            "title": self.kind.title,
            "status": self.kind.status,
            "detail": self.detail,
        }
        if self.hint is not None:
            members["hint"] = self.hint
        if self.errors:
            members["errors"] = [{"pointer": pointer, "detail": what} for pointer, what in self.errors]
        if request_id is not None:
            members["request_id"] = request_id
        return members | self.extra


def invalid(error: ValidationError) -> Problem:
    """The problem for what does not fit a model of `requests`."""
    errors = [
        (_pointer(found["loc"]), str(found["msg"]).removeprefix("Value error, "))
        for found in error.errors(include_url=False, include_input=False, include_context=False)
    ]
    pointer, what = errors[0]
    detail = f"{pointer or 'the body'}: {what}" + (f" (and {len(errors) - 1} more)" if len(errors) > 1 else "")
    return Problem("invalid-request", detail, errors=errors)


def refused(error: EmitError) -> Problem:
    """The problem for an event that `emit_event` refuses, or would."""
    text = str(error)
    match error:
        case PayloadError():
            hint = (error.hint or "").replace("afluente schemas show ", "GET /v1/event-types/").strip() or None
            if error.field is None:
                return Problem("event-refused", text, hint=hint)
            return Problem(
                "event-refused", text, hint=hint, errors=[(_path_pointer(error.field), text.partition(": ")[2] or text)]
            )
        case EventTypeError():
            return Problem("event-refused", text, hint=error.hint)
        case TooLargeError():
            return Problem("too-large", text, hint=error.hint)
        case IdempotencyKeyReusedError():
            # the server's words name the first event, and the key is the sender's own
            return Problem("idempotency-key-reused", text, hint=error.hint)
    # No organization, a foreign or an unknown one, a sealed month: nothing a request of a valid key can bring about.
    return Problem("internal", "the event could not be written")


def of_database(error: psycopg.Error) -> Problem | None:
    """The problem for what the server says of a statement of ours; None when it is no matter of the request's."""
    if (typed := translate(error)) is not None:
        return refused(typed)
    if error.sqlstate == "AF010":
        return Problem("contact-unknown", "contact_id is not a contact of the key's organization")
    if isinstance(error, psycopg.errors.LockNotAvailable):
        return in_progress()
    return None


def in_progress() -> Problem:
    return Problem(
        "request-in-progress",
        "another request with this idempotency key has not finished yet",
        headers={"retry-after": "1"},
    )


def _pointer(location: tuple[int | str, ...]) -> str:
    return "".join(f"/{str(part).replace('~', '~0').replace('/', '~1')}" for part in location)


_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")


def _path_pointer(field: str) -> str:
    """`payload.items[2].price` as `/payload/items/2/price`."""
    return _pointer(tuple(name or number for name, number in _STEP.findall(field)))
