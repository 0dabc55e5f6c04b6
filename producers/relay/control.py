"""What people tell a running relay: to pause and to resume, and that dead letters wait to be published again.

A process has one `Watch`, a thread that looks a few times a second, so that the lanes' loops only read what it saw.
What must stay true: until the first look has succeeded nothing is published, since the relay may be paused; after that
a Postgres that is away changes nothing.
"""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg

import sql
from afluente import postgres
from afluente.telemetry import get_logger, metrics

LOOK_EVERY_S = 0.25  # a pause is to be obeyed within 2 s
AGAIN_S = 1.0  # after Postgres did not answer
SAY_EVERY_S = 60.0  # that it is still paused

_log = get_logger(__name__)
_QUERIES = sql.queries("relay_control")


@dataclass(frozen=True, slots=True)
class Pause:
    """Who paused the relay, when, and why ('' when they did not say)."""

    by: str
    since: datetime
    reason: str


def paused(conn: psycopg.Connection[Any], topic_prefix: str) -> Pause | None:
    """The pause that is in force for the relay of this topic prefix."""
    return _look(conn, topic_prefix)[0]


def pause(conn: psycopg.Connection[Any], topic_prefix: str, *, by: str, reason: str) -> tuple[Pause, bool]:
    """Pause the relay: the pause that is in force now, and whether it is this one. An older one stays as it is."""
    parameters = {"prefix": topic_prefix, "by": by[:255], "reason": reason[:1000]}
    while True:
        if (row := conn.execute(_QUERIES["pause"], parameters).fetchone()) is not None:
            return Pause(*row), True
        if (found := paused(conn, topic_prefix)) is not None:  # None: ended in between
            return found, False


def resume(conn: psycopg.Connection[Any], topic_prefix: str, *, by: str) -> Pause | None:
    """End the pause and return what it was; None when there was none."""
    row = conn.execute(_QUERIES["resume"], {"prefix": topic_prefix, "by": by[:255]}).fetchone()
    return None if row is None else Pause(*row)


class Watch:
    """What Postgres says to the relay of this topic prefix, as of a moment ago. Read from any thread."""

    def __init__(self, url: str, topic_prefix: str) -> None:
        self._url, self._prefix = url, topic_prefix
        self._pause: Pause | None = None
        self._known = False
        self._requested = 0
        self._failed: psycopg.ProgrammingError | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relay-control", daemon=True)

    def start(self) -> None:
        if not self._thread.is_alive() and not self._stop.is_set():
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(AGAIN_S)

    @property
    def halted(self) -> bool:
        """Must nothing be published now? Raises what Postgres said when a table or a right is missing."""
        if self._failed is not None:
            raise self._failed
        return not self._known or self._pause is not None

    @property
    def pause(self) -> Pause | None:
        return self._pause

    @property
    def requested(self) -> int:
        """The highest id of a request to publish a dead letter again; 0: there never was one."""
        return self._requested

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with closing(
                    postgres.connect(self._url, application_name="afluente-relay-control", autocommit=True)
                ) as conn:
                    self._follow(conn)
            except psycopg.ProgrammingError as error:
                self._failed = error
                return
            except psycopg.Error as error:
                _log.debug("relay.watch_failed", error=f"{type(error).__name__}: {str(error).strip()}")
                self._stop.wait(AGAIN_S)

    def _follow(self, conn: psycopg.Connection[Any]) -> None:
        gauge, unsaid_s = metrics.gauge("afluente_relay_paused"), 0.0
        while not self._stop.is_set():
            pause, self._requested = _look(conn, self._prefix)
            if pause != self._pause or (pause is not None and unsaid_s >= SAY_EVERY_S):
                unsaid_s = 0.0
                if pause is not None:
                    _log.warning("relay.paused", by=pause.by, since=pause.since.isoformat(), reason=pause.reason)
                else:
                    _log.info("relay.resumed")
            gauge.set(pause is not None)
            self._pause, self._known = pause, True
            self._stop.wait(LOOK_EVERY_S)
            unsaid_s += LOOK_EVERY_S


def _look(conn: psycopg.Connection[Any], topic_prefix: str) -> tuple[Pause | None, int]:
    row = conn.execute(_QUERIES["control"], {"prefix": topic_prefix}).fetchone()
    assert row is not None
    by, since, reason, requested = row
    return (None if by is None else Pause(by, since, reason)), requested
