"""A dead letter with another payload, or other bytes, for its own worker and target only.

The event in event_log stays what it was, and so does every record that others read. The edited one is a new record in
the worker's retry.now under a generation of its own, and the delivery's row holds the digest of its value: from then on
no other record runs that delivery (`runtime.deliveries`), neither the event's own nor a copy of an edition whose
sender died before the row was opened. Who, why, which fields, and the digests before and after are written down; the
values are not, as the audit log outlives what erasure reaches.

Nothing is written before the whole has been checked: the schema of the event's type and major, then its model, which is
what the worker will read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from hashlib import sha256
from typing import Any

from psycopg import Connection
from pydantic import ValidationError

import schemas
import sql
from afluente import faults
from afluente.errors import Refused
from afluente.settings import KafkaSettings
from consumers.dead_letters.actions import give, give_undecodable
from consumers.dead_letters.letters import Letter, Undecodable, record_of
from consumers.dead_letters.sending import Copies, Outcome
from consumers.errors import UndecodableRecord
from consumers.runtime.intake import decode
from consumers.runtime.records import Record
from producers.emit import MAX_PAYLOAD_BYTES, to_json
from schemas import Event
from schemas.topics import EVENT_MAX_BYTES

MAX_CHANGES = 100  # named in the audit log; more are counted

_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d{1,6})\]")
_MISSING: Any = object()
_QUERIES = sql.queries("dead_letters")

Payload = dict[str, Any]


class BadEdition(Refused):
    """The edited event would not be one."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{message}; nothing was done", hint="afluente dlq show ID has the event as it is")


@dataclass(frozen=True, slots=True)
class Change:
    """What differs at one place of the payload; None: there is nothing there (or null)."""

    path: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class Edition:
    """A letter with the record that is to run in place of its own. `before` is None for bytes that were no event."""

    letter: Letter | Undecodable
    record: Record
    event: Event
    before: Event | None
    before_sha256: str
    after_sha256: str
    changed: list[Change]


def edited(
    settings: KafkaSettings, conn: Connection[Any], letter: Letter, change: Callable[[Payload], Payload]
) -> Edition:
    """The letter with the payload that `change` makes of a copy of its own. BadEdition says what does not fit; Refused:
    its record is gone, or nothing is changed."""
    record = record_of(settings, conn, letter)
    if record is None:
        raise Refused(f"{letter.id} cannot be edited: its record is nowhere any more")
    before = schemas.decode(record.value or b"")
    payload = to_json(change(_copied(before.payload)))
    if (size := len(payload.encode())) > MAX_PAYLOAD_BYTES:
        raise BadEdition(f"payload: has {size} bytes as JSON text; an event takes {MAX_PAYLOAD_BYTES}")
    row = schemas.Row(
        0,
        before.id,
        before.organization_id,
        before.event_type,
        before.entity_kind,
        before.entity_id,
        payload.encode(),
        json.dumps(before.metadata, ensure_ascii=False).encode(),
        before.created_at,
    )
    try:
        value = schemas.encode(row)
    except schemas.EncodeError as error:
        raise BadEdition(str(error)) from None
    after = _checked(value)
    changed = list(_differences("payload", before.payload, after.payload))
    if not changed:
        raise Unchanged(letter.id)
    return Edition(letter, record.with_value(value), after, before, _digest(record.value), _digest(value), changed)


def with_bytes(settings: KafkaSettings, conn: Connection[Any], letter: Undecodable, value: bytes) -> Edition:
    """The letter with bytes that are an event. BadEdition when they are none; Refused when its worker knows that event
    already, and would pass it over."""
    if len(value) > EVENT_MAX_BYTES:
        raise BadEdition(f"{len(value)} bytes are more than an event's topic takes, {EVENT_MAX_BYTES}")
    event = _checked(value)
    known = {"event_created_at": event.created_at, "worker": letter.worker, "event_id": event.id, "target": None}
    if (standing := conn.execute(_QUERIES["standing"], known).fetchone()) is not None:
        raise Refused(f"{letter.worker} knows event {event.id} already: it is {standing[0]}")
    record = record_of(settings, conn, letter)
    row = schemas.Row(
        0, event.id, event.organization_id, event.event_type, event.entity_kind, event.entity_id,
        b"{}", json.dumps(event.metadata).encode(), event.created_at,
    )  # fmt: skip
    of_event = schemas.headers(row)
    kept = [header for header in (record.headers if record else ()) if header[0] not in dict(of_event)]
    key, headers = str(event.organization_id).encode(), [*kept, *of_event]
    new = Record(letter.topic, letter.partition, letter.record_offset, 0, key, value, headers)
    before = _digest(record.value) if record else ""
    return Edition(letter, new, event, None, before, _digest(value), [])


class Unchanged(Refused):
    """An edition that is what the letter is already."""

    exit_status = 3

    def __init__(self, id: str) -> None:
        super().__init__(f"nothing of {id} is changed by this", hint=f"afluente dlq retry {id} gives it as it is")


def give_edited(
    conn: Connection[Any], settings: KafkaSettings, edition: Edition, *, actor: str, reason: str, now: datetime
) -> Outcome:
    """Give the edited record to the letter's worker and target. `conn` is `afluente_worker`, autocommit. KafkaException
    or psycopg.Error: the letter is dead as before, and can be edited or retried again."""
    outcome, letter = Outcome(), edition.letter
    copies = Copies(settings, [letter.worker])
    details: dict[str, Any] = {"before_sha256": edition.before_sha256, "after_sha256": edition.after_sha256}
    if isinstance(letter, Undecodable):
        event = edition.event
        details |= {"event_id": event.id, "event_type": event.event_type, "organization_id": event.organization_id}
        action = "dead_letter.edited"
        give_undecodable(
            conn, settings, copies, [letter], [edition.record], outcome, actor, reason, action=action, details=details
        )
        return outcome
    details["changed"] = [change.path for change in edition.changed[:MAX_CHANGES]]
    details["changes"] = len(edition.changed)
    place = {
        "event_created_at": letter.event_created_at,
        "worker": letter.worker,
        "event_id": letter.event_id,
        "target": letter.target,
        "generation": letter.generation,
    }
    reserved = conn.execute(_QUERIES["reserve_generation"], place).fetchone()
    if reserved is None:
        outcome.fail(letter.id, "is no longer a dead letter: someone else was faster")
        return outcome
    faults.point("dlq.after_reserve")
    give(
        conn,
        settings,
        copies,
        [replace(letter, generation=reserved[0])],
        [edition.record],
        outcome,
        actor,
        reason,
        now,
        generations=0,
        edited=bytes.fromhex(edition.after_sha256),
        action="dead_letter.edited",
        details=details,
    )
    return outcome


def put(payload: Payload, path: str, value: Any) -> None:
    """Set `items[0].sku`, or with `value` left out by `drop` take it away. BadEdition when there is no such place: only
    the last name of a path may be new."""
    *way, last = _steps(path)
    place: Any = payload
    for step in way:
        place = _inner(place, step, path)
    if isinstance(place, dict) and isinstance(last, str):
        if value is _MISSING and last not in place:
            raise BadEdition(f"{path}: is not there")
        place[last] = value
        if value is _MISSING:
            del place[last]
    else:
        _inner(place, last, path)
        place[last] = value
        if value is _MISSING:
            del place[last]


def drop(payload: Payload, path: str) -> None:
    """Take away what is at `path`. BadEdition when there is nothing."""
    put(payload, path, _MISSING)


def _steps(path: str) -> list[str | int]:
    steps: list[str | int] = []
    at = 0
    while at < len(path):
        match = _STEP.match(path, at)
        if match is None:
            break
        steps.append(match[1] if match[1] is not None else int(match[2]))
        at = match.end()
    if at < len(path) or not steps or len(path) > 1000:
        raise BadEdition(f"{path[:100]!r} is no path: contact.name, items[0].sku")
    return steps


def _inner(place: Any, step: str | int, path: str) -> Any:
    fits = isinstance(place, dict) and isinstance(step, str) and step in place
    if fits or (isinstance(place, list) and isinstance(step, int) and step < len(place)):
        return place[step]
    raise BadEdition(f"{path}: there is no {step!r} in it")


def _checked(value: bytes) -> Event:
    """The event in the bytes, as its worker will read it."""
    try:
        event = decode(Record("edited", 0, 0, 0, None, value, []))
        _ = event.data
    except UndecodableRecord as error:
        raise BadEdition(f"{error.error_class}: {error.message}") from None
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise BadEdition(f"payload.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except ValueError as error:  # a schema_version that is none
        raise BadEdition(str(error)) from None
    return event


def _differences(path: str, before: Any, after: Any) -> Iterator[Change]:
    if isinstance(before, dict) and isinstance(after, dict):
        for name in [*before, *(name for name in after if name not in before)]:
            yield from _differences(f"{path}.{name}", before.get(name, _MISSING), after.get(name, _MISSING))
    elif isinstance(before, list) and isinstance(after, list):
        for number in range(max(len(before), len(after))):
            old, new = (items[number] if number < len(items) else _MISSING for items in (before, after))
            yield from _differences(f"{path}[{number}]", old, new)
    elif before is not after and (before != after or type(before) is not type(after)):
        yield Change(path, *(None if value is _MISSING else value for value in (before, after)))


def _copied(payload: Payload) -> Payload:
    copy: Payload = json.loads(json.dumps(payload))
    return copy


def _digest(value: bytes | None) -> str:
    return sha256(value or b"").hexdigest()
