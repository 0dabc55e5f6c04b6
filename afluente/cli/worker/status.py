"""`afluente worker status`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from afluente.cli.output import Format, FormatOption, printable, say, show
from afluente.cli.worker.names import named

if TYPE_CHECKING:
    from psycopg import Connection

    from consumers.runtime.status import Deliveries, WorkerState


def status(
    name: Annotated[
        str | None, typer.Argument(help="a worker's name, or module:Class; none: all", metavar="NAME")
    ] = None,
    over: Annotated[
        float, typer.Option("--over", min=0, max=60, help="seconds between two looks, for the rate; 0: one look")
    ] = 2.0,
    format: FormatOption = Format.text,
) -> None:
    """Show how a worker stands, or all: processes, lag, rate, time to clear, what waits, who paused it.

    Asked of Kafka and Postgres, not of the worker's processes. JSON: an object for NAME, a list of them without, with
    the keys worker, state (working, idle, standing still, paused, not running), paused {by, since, reason} or null,
    processes [{id, host, pid, started_at, silent_s}], group {state, protocol, members [{id, client_id, host,
    instance_id, partitions}]}, lag (records that are not finished, to the end that a read_committed reader sees; of
    the event topics and retry.now), parked {organizations, records, since} (what of the lag was passed over, about),
    lag_s (since the oldest of them was written; null: not known), rate_per_s and net_rate_per_s (over rate_over_s;
    net: by how much the lag fell), time_to_clear_s (null: the lag does not fall), oldest_unfinished {topic, partition,
    offset (null: nothing is committed yet), written_at} or null, waiting, waiting_due, next_due, claimed, blocked,
    dead, counts_at_least (true: there are more than were counted), open_breakers [{destination, until, times, probing,
    error}] (destinations that fail and are left alone until then), partitions [{topic, partition, committed, end, lag,
    member, oldest_at}] (for NAME all, else those with lag).

    \b
    Examples:
      afluente worker status
      afluente worker status webhook-dispatch-worker
      afluente worker status webhook-dispatch-worker --over 10 --format json
    """
    from afluente import postgres
    from afluente.settings import ToolSettings
    from consumers.runtime.status import look

    settings = ToolSettings.read(os.environ)
    with postgres.connect(settings.postgres.dsn, application_name="afluente worker status", autocommit=True) as conn:
        chosen = _all(conn) if name is None else {(worker := named(name, conn)): _types(conn, worker, name)}
        states = look(settings.kafka, conn, chosen, over_s=over)
    data = [described(state, whole=name is not None) for state in states]
    if format is not Format.text:
        show(data if name is None else data[0], format)
    elif name is None:
        _print_all(data)
    else:
        _print_one(data[0])


def _all(conn: Connection[Any]) -> dict[str, Iterable[str]]:
    from consumers.runtime import control
    from consumers.workers import REGISTRY

    return {worker: _types(conn, worker, worker) for worker in sorted({*REGISTRY, *control.known(conn)})}


def _types(conn: Connection[Any], worker: str, name: str) -> Iterable[str]:
    """Its event types: of a class at hand its own, else what it told the database."""
    from consumers.workers import REGISTRY, load

    if name in REGISTRY or ":" in name:
        return load(name).event_types
    return {t for (t,) in conn.execute("SELECT event_type FROM worker_event_types WHERE worker = %s", [worker])}


def described(state: WorkerState, *, whole: bool) -> dict[str, Any]:
    """`state` under the keys that the command documents."""
    from consumers.runtime.status import COUNT_ROWS, Deliveries

    def of(name: str) -> Deliveries:
        return state.deliveries.get(name, Deliveries())

    going_on = sum(of(name).count for name in ("claimed", "waiting", "blocked"))
    dead = of("dead").count + of("needs_review").count
    oldest = state.oldest
    return {
        "worker": state.worker,
        "state": state.words,
        "paused": None
        if state.pause is None
        else {"by": state.pause.by, "since": state.pause.since, "reason": state.pause.reason or None},
        "processes": [
            {
                "id": str(process.id),
                "host": process.host,
                "pid": process.pid,
                "started_at": process.started_at,
                "silent_s": round(process.silent_s, 1),
            }
            for process in state.processes
        ],
        "group": {
            "state": state.group_state,
            "protocol": state.group_protocol,
            "members": [
                {
                    "id": member.id,
                    "client_id": member.client_id,
                    "host": member.host,
                    "instance_id": member.instance_id,
                    "partitions": member.partitions,
                }
                for member in state.members
            ],
        },
        "lag": state.lag,
        "parked": {
            "organizations": state.parked.organizations,
            "records": state.parked.records,
            "since": state.parked.since,
        },
        "lag_s": _rounded(state.lag_s),
        "rate_per_s": _rounded(state.rate_per_s),
        "net_rate_per_s": _rounded(state.net_per_s),
        "rate_over_s": state.rate_over_s,
        "time_to_clear_s": _rounded(state.time_to_clear_s),
        "oldest_unfinished": None
        if oldest is None
        else {
            "topic": oldest.topic,
            "partition": oldest.partition,
            "offset": oldest.committed,
            "written_at": oldest.oldest_at,
        },
        "waiting": of("waiting").count,
        "waiting_due": of("waiting").due,
        "next_due": of("waiting").next_due,
        "claimed": of("claimed").count,
        "blocked": of("blocked").count,
        "dead": dead,
        "counts_at_least": going_on >= COUNT_ROWS or dead >= COUNT_ROWS,
        "open_breakers": [
            {
                "destination": breaker.destination,
                "until": breaker.until,
                "times": breaker.times,
                "probing": breaker.probing,
                "error": f"{breaker.error_class}: {breaker.error}",
            }
            for breaker in state.breakers
        ],
        "partitions": [
            {
                "topic": partition.topic,
                "partition": partition.partition,
                "committed": partition.committed,
                "end": partition.end,
                "lag": partition.lag,
                "member": partition.member,
                "oldest_at": partition.oldest_at,
            }
            for partition in state.partitions
            if whole or partition.lag
        ],
    }


def _print_all(data: list[dict[str, Any]]) -> None:
    for row in data:
        row["processes"] = len(row["processes"])
        row["lag"] = f"{row['lag']:,}"
        row["rate_per_s"] = "" if row["rate_per_s"] is None else f"{row['rate_per_s']:,}"
        row["time_to_clear"] = _clears(row)
    standing = ("worker", "state", "processes", "lag", "lag_s", "rate_per_s", "time_to_clear")
    show(data, columns=[*standing, "waiting", "blocked", "dead"])
    say("next: afluente worker status NAME")


def _print_one(row: dict[str, Any]) -> None:
    """For a person: the whole first, then processes and members, then the partitions that are behind."""
    paused, oldest = row["paused"], row["oldest_unfinished"]
    more = " or more" if row["counts_at_least"] else ""
    since = "" if paused is None else paused["since"].astimezone().strftime("%Y-%m-%d %H:%M:%S%z")
    why = "" if paused is None or not paused["reason"] else f": {printable(paused['reason'])}"
    rate = "not looked at" if row["rate_per_s"] is None else f"{row['rate_per_s']:,} records a second"
    due = f", {row['waiting_due']:,} of them due" if row["waiting_due"] else ""
    behind = "not known for how long" if row["lag_s"] is None else f"{row['lag_s']} s"
    parked = f", {row['parked']['records']:,} of them parked" if row["parked"]["records"] else ""
    lines = {
        "worker": row["worker"],
        "state": row["state"],
        "paused": "no" if paused is None else f"by {printable(paused['by'])} since {since}{why}",
        "lag": f"{row['lag']:,} records{parked}, {behind}",
        "rate": f"{rate} over {row['rate_over_s']} s" if row["rate_per_s"] is not None else rate,
        "time to clear": _clears(row),
        "oldest unfinished": None if oldest is None else "{topic}[{partition}], offset {offset}".format(**oldest),
        "waiting": f"{row['waiting']:,}{more}{due}",
        "next due": row["next_due"],
        "claimed": f"{row['claimed']:,}{more}",
        "blocked": f"{row['blocked']:,}{more}",
        "dead": f"{row['dead']:,}{more}",
        "group": ", ".join(filter(None, (row["group"]["state"], row["group"]["protocol"]))) or "no members",
    }
    show({key: value for key, value in lines.items() if value not in ("", None)})
    for title, rows, columns in (
        ("processes", row["processes"], ("host", "pid", "started_at", "silent_s")),
        ("members", row["group"]["members"], ("id", "client_id", "host", "instance_id", "partitions")),
        ("destinations left alone", [_printable(breaker) for breaker in row["open_breakers"]], None),
        ("partitions behind", [p for p in row["partitions"] if p["lag"]], None),
    ):
        if rows:
            print(f"\n{title}")
            show(rows, columns=columns)
    say("next: afluente dlq list" if row["dead"] else "next: afluente worker status --format json")


def _printable(row: dict[str, Any]) -> dict[str, Any]:
    return {key: printable(value) if isinstance(value, str) else value for key, value in row.items()}


def _clears(row: dict[str, Any]) -> str:
    if not row["lag"] or row["lag"] == "0":
        return "nothing to clear"
    seconds = row["time_to_clear_s"]
    if seconds is None:
        return "not looked at" if row["net_rate_per_s"] is None else "never, at this rate"
    return f"{seconds:,.0f} s"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
