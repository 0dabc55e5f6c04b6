"""One dead letter tried, and what came of it: whether the cause is mended, before a thousand others are tried too."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from psycopg import Connection

import schemas
import sql
from afluente.settings import KafkaSettings
from consumers.dead_letters.actions import reprocess
from consumers.dead_letters.letters import Letter, Undecodable, record_of
from consumers.dead_letters.sending import Outcome

_ASK_EVERY_S = 0.2
_QUERIES = sql.queries("dead_letters")

Standing = Literal["delivered", "failed", "unknown"]


@dataclass(frozen=True, slots=True)
class Answer:
    """`unknown`: there was none in time (the worker does not run, is paused, or is busy); the letter is given all the
    same, or `error` says why it was not."""

    id: str
    outcome: Standing
    attempts: int
    error: str | None
    waited_s: float


def probe(
    conn: Connection[Any],
    settings: KafkaSettings,
    letter: Letter | Undecodable,
    *,
    actor: str,
    reason: str,
    now: datetime,
    timeout_s: float,
    stop: threading.Event,
) -> tuple[Outcome, Answer]:
    """Reprocess this letter, and wait for the end of its first attempt. `conn` is autocommit.

    Failed is a letter that is dead again, and one that waits for another attempt; a record that is no event with this
    release's schemas is not even sent.
    """
    event: schemas.Event | None = None
    if isinstance(letter, Undecodable):
        record = record_of(settings, conn, letter)
        try:
            event = schemas.decode((record.value if record else None) or b"")
        except schemas.SchemaError as unread:
            return Outcome(left=1), Answer(letter.id, "failed", 0, f"is still no event: {unread}", 0.0)
    began = time.monotonic()
    outcome = reprocess(conn, settings, [letter], actor=actor, reason=reason, now=now)
    if not outcome.done:
        return outcome, Answer(letter.id, "failed", 0, outcome.failed[0]["error"], 0.0)
    while True:
        standing, attempts, error = _look(conn, letter, event, outcome.places[letter.id])
        waited_s = time.monotonic() - began
        if standing != "unknown" or waited_s >= timeout_s or stop.wait(min(_ASK_EVERY_S, timeout_s - waited_s)):
            return outcome, Answer(letter.id, standing, attempts, error, round(waited_s, 1))


def _look(
    conn: Connection[Any], letter: Letter | Undecodable, event: schemas.Event | None, place: tuple[str, int, int]
) -> tuple[Standing, int, str | None]:
    if isinstance(letter, Letter):
        created_at, event_id, target = letter.event_created_at, letter.event_id, letter.target
    else:
        assert event is not None
        created_at, event_id, target = event.created_at, event.id, None
        again = {"worker": letter.worker, "topic": place[0], "partition": place[1], "offset": place[2]}
        if (found := conn.execute(_QUERIES["is_undecodable"], again).fetchone()) is not None:
            return "failed", 0, f"{found[0]}: {found[1]}"
    parameters = {"event_created_at": created_at, "worker": letter.worker, "event_id": event_id, "target": target}
    rows = conn.execute(_QUERIES["standing"], parameters).fetchall()
    for state, _, attempts, error_class, error, next_attempt_at in rows:
        if state in ("dead", "needs_review", "discarded"):
            return "failed", attempts, f"{error_class}: {error}"
        if state == "waiting" and attempts:
            return "failed", attempts, f"{error_class}: {error} (tried again at {next_attempt_at.isoformat()})"
    if rows and all(state in ("done", "skipped") for state, *_ in rows):
        return "delivered", max(row[2] for row in rows), None
    return "unknown", 0, None
