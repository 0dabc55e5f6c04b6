"""Dead letters of the relay: rows it could not publish, from its own topic, with what was decided about each.

A row that fails again is a letter again, so of an event only the newest letter is one to decide about; the earlier ones
are its attempts. To retry a letter is to ask the relay, which alone publishes rows (`producers.relay.reprocess`); to
discard it is a note. Each letter is decided about once: the database says no to the second who tries.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import orjson
import psycopg
from confluent_kafka import Message
from psycopg import Connection

import sql
from afluente import kafka
from afluente.settings import KafkaSettings
from consumers.dead_letters.causes import Cause, named
from consumers.dead_letters.letters import Filter
from consumers.dead_letters.sending import Outcome, Pace
from schemas.topics import Topics

WORKER = "relay"  # its name among the workers
OPEN = ("dead", "requested", "gone")  # what is not settled
ALL = (*OPEN, "published", "discarded")
STALL_S = 30.0

_QUERIES = sql.queries("relay_control")


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided about a letter, by whom, and what came of it."""

    id: int
    state: str
    by: str
    at: datetime
    reason: str
    answered_at: datetime | None
    outcome: str | None


@dataclass(frozen=True, slots=True)
class RelayLetter:
    """The newest letter of an event. Without `event_id` it is a record that the relay did not write.

    States: dead; requested (the relay is to publish it again); published (it did); gone (asked, but the row is nowhere
    any more); discarded. `attempts` counts the letters of this event.
    """

    topic: str
    partition: int
    offset: int
    dead_at: datetime
    error_class: str
    error: str
    event_id: UUID | None = None
    organization_id: UUID | None = None
    event_type: str | None = None
    entity_kind: str | None = None
    created_at: datetime | None = None
    whole: bool = False
    """The letter holds the row, not only a reference to it."""
    attempts: int = 1
    first_failure_at: datetime | None = None
    decision: Decision | None = None

    worker = WORKER

    @property
    def id(self) -> str:
        return f"{WORKER}@{self.topic}/{self.partition}/{self.offset}"

    @property
    def place(self) -> tuple[int, int]:
        return self.partition, self.offset

    @property
    def state(self) -> str:
        match self.decision:
            case None:
                return "dead"
            case Decision(state="answered"):
                return "published"  # had it failed, there would be a newer letter
            case Decision(state=state):
                return state


def find(
    conn: Connection[Any],
    settings: KafkaSettings,
    wanted: Filter,
    *,
    states: Sequence[str] = OPEN,
    place: tuple[int, int] | None = None,
    stall_s: float = STALL_S,
) -> list[RelayLetter]:
    """Letters that match, the newest first. `place`: partition and offset of one of an event's letters. Unavailable
    when the topic is missing or nothing arrives for `stall_s` seconds."""
    if wanted.worker not in (None, WORKER) or wanted.target:
        return []
    newest: dict[Any, RelayLetter] = {}
    wanted_keys = set()
    for message in kafka.read_topic(settings, Topics(settings.topic_prefix).relay_dead_letter, stall_s=stall_s):
        letter = _letter(message)
        key = letter.event_id or letter.place
        if place == letter.place:
            wanted_keys.add(key)
        newest[key] = _with_history(letter, newest.get(key))
    if place is not None:
        newest = {key: newest[key] for key in wanted_keys}
    found = [letter for letter in newest.values() if _matches(letter, wanted)]
    if wanted.cause is not None:
        ids = [cause for cause, _ in _named(conn, found)]
        found = [letter for letter, cause in zip(found, ids, strict=True) if cause == wanted.cause]
    decisions = _decisions(conn, settings.topic_prefix, found)
    found = [_decided(letter, decisions) for letter in found]
    found = [letter for letter in found if letter.state in states]
    return sorted(found, key=lambda letter: letter.dead_at, reverse=True)[: wanted.limit]


def causes(conn: Connection[Any], letters: Sequence[RelayLetter]) -> list[Cause]:
    """These letters by cause, the most frequent first."""
    groups: dict[tuple[str, str], list[RelayLetter]] = {}
    for letter, cause in zip(letters, _named(conn, letters), strict=True):
        groups.setdefault(cause, []).append(letter)
    found = [
        Cause(
            cause,
            WORKER,
            of_cause[0].event_type,
            of_cause[0].error_class,
            message,
            len(of_cause),
            len({letter.organization_id for letter in of_cause if letter.organization_id}),
            min(letter.first_failure_at or letter.dead_at for letter in of_cause),
            max(letter.dead_at for letter in of_cause),
            max(of_cause, key=lambda letter: letter.dead_at).id,
        )
        for (cause, message), of_cause in groups.items()
    ]
    return sorted(found, key=lambda cause: (-cause.letters, cause.cause))


def _named(conn: Connection[Any], letters: Sequence[RelayLetter]) -> list[tuple[str, str]]:
    return named(conn, [(WORKER, letter.event_type, letter.error_class, letter.error) for letter in letters])


def described(letter: RelayLetter) -> dict[str, Any]:
    """The keys of `letters.described`, and the decision."""
    return {
        "id": letter.id,
        "kind": "relay",
        "worker": letter.worker,
        "event_id": letter.event_id,
        "target": None,
        "organization_id": letter.organization_id,
        "event_type": letter.event_type,
        "state": letter.state,
        "attempts": letter.attempts,
        "generation": 0,
        "edited": False,
        "error_class": letter.error_class,
        "error": letter.error,
        "first_failure_at": letter.first_failure_at,
        "dead_at": letter.dead_at,
        "origin": {"topic": letter.topic, "partition": letter.partition, "offset": letter.offset},
        "dead_letter": {"partition": letter.partition, "offset": letter.offset},
        "decision": letter.decision,
    }


def value_of(settings: KafkaSettings, letter: RelayLetter) -> dict[str, Any]:
    """The letter's content (`row` with all columns, or `reference`), read again from its place."""
    topic = Topics(settings.topic_prefix).relay_dead_letter
    for message in kafka.read_topic(settings, topic):
        if (message.partition(), message.offset()) == letter.place:
            return _about(message.value()) or {}
    return {}


def history_of(conn: Connection[Any], settings: KafkaSettings, letter: RelayLetter) -> list[Decision]:
    """Everything that was decided about letters of this event, the first first."""
    if letter.event_id is None:
        return []
    return [decision for _, decision in _rows(conn, settings.topic_prefix, [letter.event_id])]


def retry(
    conn: Connection[Any],
    settings: KafkaSettings,
    letters: Sequence[RelayLetter],
    *,
    actor: str,
    reason: str,
    pace: Pace | None = None,
) -> Outcome:
    """Ask the relay to publish these rows again; it answers within a second when it runs, and when it is started else.

    `conn` is `afluente_worker`, autocommit. `failed`: those that are not to be decided about any more, or whose row is
    neither in event_log nor in the letter.
    """
    outcome = Outcome()
    ready = _undecided(letters, outcome)
    present = _present(conn, ready)
    copies = _copies(settings, [letter for letter in ready if letter.event_id not in present and letter.whole])
    for batch in (pace or Pace()).batches(ready, outcome):
        for letter in batch:
            copy = None
            if letter.event_id not in present and (copy := copies.get(letter.place)) is None:
                outcome.fail(letter.id, "its row is neither in event_log nor in the dead letter")
                continue
            _decide(conn, settings, letter, "retry", copy, actor, reason, outcome)
    return outcome


def discard(
    conn: Connection[Any],
    settings: KafkaSettings,
    letters: Sequence[RelayLetter],
    *,
    actor: str,
    reason: str,
    pace: Pace | None = None,
) -> Outcome:
    """Note that these are not to be published. `failed`: those that are not to be decided about any more."""
    outcome = Outcome()
    for batch in (pace or Pace()).batches(_undecided(letters, outcome), outcome):
        for letter in batch:
            _decide(conn, settings, letter, "discard", None, actor, reason, outcome)
    return outcome


def export(
    conn: Connection[Any],
    settings: KafkaSettings,
    letters: Sequence[RelayLetter],
    write: Callable[[dict[str, Any]], None],
    *,
    actor: str,
    reason: str,
    pace: Pace | None = None,
) -> Outcome:
    """Give out letters whole: what `described` says, and value_base64. What was given out is written down before it is.
    `conn` is autocommit."""
    outcome, pace = Outcome(), pace or Pace()
    wanted = {letter.place: letter for letter in letters}
    for message in kafka.read_topic(settings, Topics(settings.topic_prefix).relay_dead_letter):
        letter = wanted.get((message.partition() or 0, message.offset() or 0))
        if letter is None:
            continue
        if pace.stop.is_set():
            break
        about: dict[str, Any]
        details = {"worker": WORKER, "error_class": letter.error_class, "reason": reason}
        place = {"topic": letter.topic, "partition": letter.partition, "record_offset": letter.offset}
        if letter.organization_id is not None:
            name, about = "audit", {"organization_id": letter.organization_id, "event_id": letter.event_id}
        else:
            name, about = "audit_undecodable", place | {"worker": WORKER, "record_timestamp": letter.dead_at}
        items = orjson.dumps([about | {"details": details}]).decode()
        parameters = {"items": items, "action": "dead_letter.exported", "actor": actor[:255]}
        conn.execute(sql.queries("dead_letters")[name], parameters)
        value = message.value()
        write(described(letter) | {"value_base64": None if value is None else b64encode(value).decode()})
        outcome.done.append(letter.id)
    outcome.left = len(letters) - len(outcome.done)
    return outcome


def _letter(message: Message) -> RelayLetter:
    at = datetime.fromtimestamp(message.timestamp()[1] / 1000, UTC)
    place = (message.topic() or "", message.partition() or 0, message.offset() or 0)
    about = _about(message.value())
    try:
        if about is None:
            raise ValueError
        row = about["row"]
        return RelayLetter(
            *place,
            at,
            str(about["error_class"]),
            str(about["reason"]),
            UUID(about["event_id"]),
            UUID(about["organization_id"]),
            str(about["event_type"]),
            None if row is None else str(row["entity_kind"]),
            datetime.fromisoformat(about["created_at"]),
            row is not None,
            first_failure_at=at,
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return RelayLetter(*place, at, "Unreadable", "the record is not one that the relay writes")


def _about(value: bytes | None) -> dict[str, Any] | None:
    try:
        about = orjson.loads(value or b"")
    except orjson.JSONDecodeError:
        return None
    return about if isinstance(about, dict) else None


def _with_history(letter: RelayLetter, before: RelayLetter | None) -> RelayLetter:
    """One key is in one partition, so later read is later failed; unless the topic's partitions were raised since."""
    if before is None:
        return letter
    newer, older = (letter, before) if letter.dead_at >= before.dead_at else (before, letter)
    first = min(filter(None, (newer.first_failure_at, older.first_failure_at)))
    return replace(newer, attempts=before.attempts + 1, first_failure_at=first)


def _matches(letter: RelayLetter, wanted: Filter) -> bool:
    words = f"{letter.error_class}: {letter.error}".lower()
    return (
        wanted.event_id in (None, letter.event_id)
        and wanted.event_type in (None, letter.event_type)
        and wanted.entity_kind in (None, letter.entity_kind)
        and wanted.organization_id in (None, letter.organization_id)
        and (wanted.error or "").lower() in words
        and (wanted.since is None or letter.dead_at >= wanted.since)
        and (wanted.until is None or letter.dead_at < wanted.until)
    )


_Decided = tuple[int, int, datetime]  # partition, offset, time of a letter


def _decisions(conn: Connection[Any], prefix: str, letters: Iterable[RelayLetter]) -> dict[_Decided, Decision]:
    events = [letter.event_id for letter in letters if letter.event_id is not None]
    return dict(_rows(conn, prefix, events)) if events else {}


def _rows(conn: Connection[Any], prefix: str, events: list[UUID]) -> list[tuple[_Decided, Decision]]:
    rows = conn.execute(_QUERIES["decisions"], {"prefix": prefix, "events": events}).fetchall()
    return [((row[1], row[2], row[3]), Decision(*row[4:])) for row in rows]


def _decided(letter: RelayLetter, decisions: dict[_Decided, Decision]) -> RelayLetter:
    return replace(letter, decision=decisions.get((*letter.place, letter.dead_at)))


def _undecided(letters: Sequence[RelayLetter], outcome: Outcome) -> list[RelayLetter]:
    ready = []
    for letter in letters:
        if letter.event_id is None:
            outcome.fail(letter.id, f"{letter.error}: nobody knows what it was")
        elif letter.state != "dead":
            outcome.fail(letter.id, f"is {letter.state} already")
        else:
            ready.append(letter)
    return ready


def _present(conn: Connection[Any], letters: Sequence[RelayLetter]) -> set[UUID]:
    ids, times = [letter.event_id for letter in letters], [letter.created_at for letter in letters]
    return {row[0] for row in conn.execute(_QUERIES["present"], {"ids": ids, "times": times})}


def _copies(settings: KafkaSettings, letters: Sequence[RelayLetter]) -> dict[tuple[int, int], dict[str, Any]]:
    """The rows of letters whose month event_log has dropped."""
    places = {letter.place for letter in letters}
    copies: dict[tuple[int, int], dict[str, Any]] = {}
    if places:
        for message in kafka.read_topic(settings, Topics(settings.topic_prefix).relay_dead_letter):
            place = (message.partition() or 0, message.offset() or 0)
            if place in places and (about := _about(message.value())) is not None:
                copies[place] = about["row"]
    return copies


def _decide(
    conn: Connection[Any],
    settings: KafkaSettings,
    letter: RelayLetter,
    action: str,
    copy: dict[str, Any] | None,
    actor: str,
    reason: str,
    outcome: Outcome,
) -> None:
    """In a transaction of its own, with its entry in the audit log: one that fails leaves the others alone."""
    parameters = {
        "prefix": settings.topic_prefix,
        "action": action,
        "organization_id": letter.organization_id,
        "event_id": letter.event_id,
        "created_at": letter.created_at,
        "event_type": letter.event_type,
        "partition": letter.partition,
        "offset": letter.offset,
        "at": letter.dead_at,
        "by": actor[:255],
        "reason": reason[:1000],
        "row": None if copy is None else orjson.dumps(copy).decode(),
    }
    try:
        with conn.transaction():
            row = conn.execute(_QUERIES["request"], parameters).fetchone()
            if row is None or row[0] is None:
                outcome.fail(letter.id, "is decided about already: someone else was faster")
                return
            details = {"worker": WORKER, "error_class": letter.error_class, "reason": reason, "request": row[0]}
            items = [{"organization_id": letter.organization_id, "event_id": letter.event_id, "details": details}]
            done = "reprocessed" if action == "retry" else "discarded"
            conn.execute(
                sql.queries("dead_letters")["audit"],
                {"items": orjson.dumps(items).decode(), "action": f"dead_letter.{done}", "actor": actor[:255]},
            )
    except psycopg.IntegrityError as error:
        outcome.fail(letter.id, f"cannot be noted: {str(error).splitlines()[0]}")
        return
    outcome.done.append(letter.id)
