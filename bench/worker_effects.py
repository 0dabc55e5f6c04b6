"""What workers of the benches leave behind, ours and the peers': effects, and who has done what. And whether it is all.

A peer has `bench_inbox` for its idempotency rows, the usual two columns; ours has its `event_delivery`, which does more
and costs more. `began_at` is the transaction's time and `created_at` the statement's, both by the server's clock: rates
are counted from them, so that what a peer says of itself counts for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg

from bench.errors import BenchError

_TABLES = """
CREATE TABLE bench_effect (
    id               bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    worker           text,
    event_id         uuid NOT NULL,
    organization_id  uuid NOT NULL,
    contact_id       text NOT NULL,
    body             text NOT NULL CHECK (body <> 'bad'),
    emitted_at       timestamptz,
    began_at         timestamptz NOT NULL DEFAULT now(),
    created_at       timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE TABLE bench_inbox (
    worker      text NOT NULL,
    event_id    uuid NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (worker, event_id)
);
GRANT SELECT, INSERT ON bench_effect TO afluente_worker, afluente_app;
"""
STEADY_AFTER = 5
"""The first fifth of the effects is a warm-up, for everyone: a JVM compiles, a group assigns, caches fill."""


@dataclass(frozen=True)
class Timing:
    """Seconds since 1970 by the server's clock: of the effect a fifth of the way, and of the last. Effects in between,
    and how many shared a transaction."""

    steady_at: float
    last_at: float
    steady_effects: int
    per_transaction: float


def make(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute(_TABLES)


def written(conn: psycopg.Connection[Any], wanted: int) -> int:
    """How many there are, exactly once it may be all of them: counting costs, and rolled back ones leave gaps."""
    (last,) = conn.execute("SELECT coalesce(max(id), 0) FROM bench_effect").fetchone() or (0,)
    if last < wanted:
        return int(last)
    (count,) = conn.execute("SELECT count(*) FROM bench_effect").fetchone() or (0,)
    return int(count)


def timing(conn: psycopg.Connection[Any]) -> Timing:
    row = conn.execute(
        """
        WITH numbered AS (
            SELECT created_at, began_at, row_number() OVER (ORDER BY created_at) AS n, count(*) OVER () AS total
              FROM bench_effect
        )
        SELECT extract(epoch FROM min(created_at) FILTER (WHERE n > total / %(after)s))::float8,
               extract(epoch FROM max(created_at))::float8,
               count(*) FILTER (WHERE n > total / %(after)s),
               count(*)::float8 / count(DISTINCT began_at)
          FROM numbered
        """,
        {"after": STEADY_AFTER},
    ).fetchone()
    if row is None or row[0] is None:
        raise BenchError("no effects were written")
    return Timing(*row)


def check(conn: psycopg.Connection[Any], name: str, events: int, bad: int, worker: str | None) -> None:
    """BenchError unless each event has its effect once, and its row that says so; the `bad` ones none, and an attempt.

    `worker`: ours, whose rows are in event_delivery; None for a peer, whose rows are in bench_inbox.
    """
    good = events - bad
    effects, distinct = conn.execute("SELECT count(*), count(DISTINCT event_id) FROM bench_effect").fetchone() or (0, 0)
    problems = {"effects": effects - good, "distinct effects": distinct - good}
    if worker is None:
        (rows,) = conn.execute("SELECT count(*) FROM bench_inbox").fetchone() or (0,)
        problems["idempotency rows"] = rows - good
    else:
        states = dict(
            conn.execute(
                "SELECT state, count(*) FROM event_delivery WHERE worker = %s GROUP BY state", [worker]
            ).fetchall()
        )
        problems["deliveries done"] = states.pop("done", 0) - good
        tried = "SELECT count(*) FROM event_delivery WHERE worker = %s AND state = 'waiting' AND attempts > 0"
        (waiting,) = conn.execute(tried, [worker]).fetchone() or (0,)
        problems["deliveries with a failed attempt"] = waiting - bad
        problems["deliveries in other states"] = sum(states.values()) - waiting
    if any(problems.values()):
        found = ", ".join(f"{what}: {number:+d}" for what, number in problems.items() if number)
        raise BenchError(f"{name} did not do the work on {events} events: {found}")
