"""The relay's numbers for Prometheus that take a question to Postgres, asked in the background every ten seconds or so.

Counts are bounded, so a backlog of millions costs what one of COUNT_ROWS does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta

from afluente import postgres
from afluente.telemetry import metrics
from producers.relay.position import Entry
from producers.relay.source import Source
from producers.relay.status import entry_state, oldest_transaction_s, total

COUNT_ROWS = 100_000

_OF_A_LANE = (
    "afluente_relay_owned",
    "afluente_relay_takeovers",
    "afluente_relay_lag_rows",
    "afluente_relay_lag_seconds",
    "afluente_relay_position_age_seconds",
    "afluente_relay_window_seqs",
    "afluente_relay_organizations_split_off",
)


class Numbers:
    """Those of one lane. A process has one lane at a time: another's values are forgotten."""

    def __init__(self, postgres_url: str, lane: str) -> None:
        self._url, self._lane = postgres_url, lane
        for name in _OF_A_LANE:
            metrics.forget(name)
        for name in ("afluente_relay_organization_lag_rows", "afluente_relay_organization_split_off"):
            metrics.show_highest(name, {})
        self._set("afluente_relay_owned", 0)

    def owned(self) -> None:
        self._set("afluente_relay_owned", 1)

    def show(self, entries: Sequence[Entry], moved_s: float) -> None:
        """Count what `entries`, the lane's as it stands, leave unpublished. `moved_s`: seconds since they last moved.
        Any psycopg.Error: Postgres is away, and the numbers stay as they were."""
        with closing(Source(self._url)) as source:
            source.leave_out_sealed(entries)
            held_at = datetime.now(UTC) - timedelta(seconds=moved_s)
            states = [entry_state(source, entry, COUNT_ROWS, held_at) for entry in entries]
            lane = source.lane(self._lane)
        with closing(postgres.connect(self._url, application_name="afluente-relay-numbers", autocommit=True)) as conn:
            oldest_s = oldest_transaction_s(conn)
        waiting = total(state.waiting for state in states)
        late = (datetime.now(UTC) - waiting.oldest).total_seconds() if waiting.oldest is not None else 0.0
        self._set("afluente_relay_lag_rows", min(waiting.rows, COUNT_ROWS))
        self._set("afluente_relay_lag_seconds", max(0.0, late))
        self._set("afluente_relay_position_age_seconds", moved_s)
        self._set(
            "afluente_relay_window_seqs", sum(e.window.t2 - e.window.last for e in entries if e.window is not None)
        )
        self._set("afluente_relay_takeovers", lane.takeovers if lane is not None else 0)
        apart = [entry.organization for entry in entries if entry.organization is not None]
        self._set("afluente_relay_organizations_split_off", len(apart))
        rows: Counter[str] = Counter()
        for state in states:
            rows.update({str(organization): count for organization, (count, _) in state.organizations.items()})
        metrics.show_highest("afluente_relay_organization_lag_rows", rows)
        metrics.show_highest("afluente_relay_organization_split_off", {str(organization): 1 for organization in apart})
        metrics.gauge("afluente_relay_oldest_transaction_seconds").set(oldest_s)

    def _set(self, name: str, value: float) -> None:
        metrics.gauge(name, lane=self._lane).set(value)
