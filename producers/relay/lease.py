"""Who owns a lane: a row in Postgres that its owner renews, so that a second instance stands by instead of fencing.

An owner is known to be alive in two ways, and either may end it:
- its session holds an advisory lock of its own; a killed process loses it at once, and the next one takes over at once;
- it renews the row; a process that is stopped or cut off keeps its lock, and is taken over when the row is 8 s old.

The lease saves trouble, it does not keep anything exact: that is Kafka's fencing. So it may err (Postgres restarts;
the clock is Postgres's own), and an owner that cannot renew because Postgres is away goes on.
"""

from __future__ import annotations

import secrets
import threading
import time
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import sql
from afluente import postgres
from afluente.telemetry import get_logger, heartbeat
from producers.relay.errors import OnStandby, Superseded

RENEW_EVERY_S = 2.0
EXPIRES_AFTER_S = 8.0  # four renewals missed; with the look every half second a stopped owner is replaced within 10 s
LOOK_EVERY_S = 0.5
CONNECT_TIMEOUT_S = 2  # the owner also renews while it waits for Kafka: that must not take long

_log = get_logger(__name__)
_QUERIES = sql.queries("relay")


class Lease:
    """One instance's claim on one lane. Not thread-safe."""

    def __init__(self, url: str, name: str, instance: str) -> None:
        given = conninfo_to_dict(url).get("connect_timeout")
        self._url = make_conninfo(url, connect_timeout=given or CONNECT_TIMEOUT_S)
        self._name, self._instance = name, instance
        self._liveness_key = secrets.randbits(63)
        self._conn: psycopg.Connection[Any] | None = None
        self._renewed_at = 0.0

    def acquire(self, stop: threading.Event, *, take_over: bool = False) -> bool:
        """Stand by until the lane is ours; False when `stop` was set first. `take_over` does not wait for the owner."""
        told: str | None = None
        while not stop.is_set():
            heartbeat.beat()
            try:
                owner = self._try(take_over)
            except psycopg.OperationalError as error:
                self._disconnect()
                if postgres.refuses_login(error):
                    raise
                _log.warning("relay.postgres_away", lane=self._name, error=str(error).strip())
                stop.wait(1.0)
                continue
            if owner is None:
                return True
            if told != owner:
                _log.info("relay.standing_by", lane=self._name, instance=self._instance, owner=owner)
                told = owner
            stop.wait(LOOK_EVERY_S)
        return False

    def renew(self) -> None:
        """To be called often; does something every 2 s. Raises Superseded when another instance took the lane."""
        if (now := time.monotonic()) - self._renewed_at < RENEW_EVERY_S:
            return
        self._renewed_at = now
        try:
            conn = self._connected()
            parameters = {"name": self._name, "instance": self._instance}
            if conn.execute(_query("renew_lane"), parameters).rowcount == 0:
                row = conn.execute(_query("lane"), parameters).fetchone()
                raise Superseded(self._name, str(row[0] or "another instance") if row else "a dropped and remade table")
        except psycopg.OperationalError as error:
            self._disconnect()
            _log.warning("relay.postgres_away", lane=self._name, error=str(error).strip())

    def release(self) -> None:
        """Give the lane up, so that the one standing by need not wait."""
        try:
            if self._conn is not None:
                self._conn.execute(_query("give_up_lane"), {"name": self._name, "instance": self._instance})
        except psycopg.Error:
            pass  # then the lost connection says it
        self._disconnect()

    def _try(self, take_over: bool) -> str | None:
        """Take the lane if it is free: None. Else its owner."""
        conn = self._connected()
        name = {"name": self._name}
        conn.execute(_query("add_lane"), name)
        with conn.transaction():
            row = conn.execute(_query("lane_for_update"), name).fetchone()
            assert row is not None
            owner, key, silent_s = row
            if owner not in (None, self._instance):
                why = self._why_free(conn, key, silent_s, take_over)
                if why is None:
                    return str(owner)
                _log.warning("relay.taking_over", lane=self._name, instance=self._instance, owner=owner, reason=why)
            taken = {**name, "instance": self._instance, "liveness_key": self._liveness_key}
            conn.execute(_query("take_lane"), taken)
        self._renewed_at = time.monotonic()
        return None

    @staticmethod
    def _why_free(conn: psycopg.Connection[Any], key: int, silent_s: float, take_over: bool) -> str | None:
        if take_over:
            return "--take-over"
        if silent_s > EXPIRES_AFTER_S:
            return f"silent for {silent_s:.1f} s"
        row = conn.execute("SELECT pg_try_advisory_xact_lock(%s)", (key,)).fetchone()
        return "its session has ended" if row is not None and row[0] else None

    def _connected(self) -> psycopg.Connection[Any]:
        if self._conn is None:
            conn = postgres.connect(self._url, application_name="afluente-relay-lease", autocommit=True)
            try:
                row = conn.execute("SELECT pg_is_in_recovery(), pg_advisory_lock(%s)", (self._liveness_key,)).fetchone()
                if row is not None and row[0]:
                    raise OnStandby()
            except BaseException:
                conn.close()
                raise
            self._conn = conn
        return self._conn

    def _disconnect(self) -> None:
        if self._conn is not None:
            self._conn.close()
            self._conn = None


def _query(name: str) -> str:
    return _QUERIES[name]
