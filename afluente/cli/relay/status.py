"""`afluente relay status`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from afluente.cli.output import Format, FormatOption, printable, say, show

if TYPE_CHECKING:
    from producers.relay.position import Entry
    from producers.relay.status import EntryState, LaneState, State, Transaction


def status(format: FormatOption = Format.text) -> None:
    """Show how the relay stands: lag, rate, owners, positions, dead letters, and the transaction that holds rows back.

    JSON keys: state (running, paused, not running, partly running, standing still, refused, undecided), paused {by,
    since, reason} or null, lag_rows, lag_rows_at_least, lag_seconds, rows_per_s, published, dead_lettered,
    dead_letters_open, takeovers, layout, lanes [{lane, name, owner, owner_since, owner_silent_s, takeovers, lag_rows,
    lag_rows_at_least, lag_seconds, rows_per_s, rate_over_s, published, dead_lettered, number, written_at, written_by,
    closing, entries [{slots, organization, without, s1, t1, s2, t2, last, reprocessed, lag_rows}]}], organizations
    [{organization_id, lag_rows, lag_seconds, own_entry}], blocker {tx_id, pid, gid, database, user, application, state,
    since, age_s, writes_events, rows_waiting_at_most, at_least, rows_meanwhile, months_held, ids_behind} or null,
    open_transactions [those of blocker], undecided [{topic, partition, offset}], refusals, remarks [{kind, severity,
    found, fix}], database, kafka_cluster.

    lag_seconds: since the oldest waiting row was committed, as far as that can be told: since it was written, or since
    the position that did not show it, whichever is later.
    `blocker`: the oldest open transaction that has written events, else the oldest open one. The relay does not wait
    for it; rows_waiting_at_most are rows that its commit alone will show.

    \b
    Examples:
      afluente relay status
      afluente relay status --format json
    """
    from afluente import kafka
    from afluente.settings import RelaySettings
    from producers.relay.status import look

    settings = RelaySettings.read(os.environ)
    # The admin client is silent: of a Kafka that is away there is one sentence, not the client's hundred lines.
    kafka.admin(settings.kafka).list_topics(timeout=kafka.METADATA_TIMEOUT_S)
    state = look(settings.kafka, settings.postgres.dsn)
    data = described(state, _open_letters(settings))
    if format is Format.text:
        _print(data)
    else:
        show(data, format)


def described(state: State, dead_letters_open: int | None) -> dict[str, Any]:
    """`state` under the keys that the command documents."""
    from producers.relay.status import remarks

    position = state.position
    apart = {e.entry.organization for lane in state.lanes for e in lane.entries}
    return {
        "state": state.words,
        "paused": None
        if state.pause is None
        else {"by": state.pause.by, "since": state.pause.since, "reason": state.pause.reason or None},
        "lag_rows": state.waiting.rows,
        "lag_rows_at_least": state.waiting.at_least,
        "lag_seconds": round(state.lag_s, 3),
        "rows_per_s": _rounded(state.rows_per_s),
        "published": state.published,
        "dead_lettered": state.dead_lettered,
        "dead_letters_open": dead_letters_open,
        "takeovers": state.takeovers,
        "layout": state.layout,
        "lanes": [_lane(lane, state) for lane in state.lanes],
        "organizations": [
            {
                "organization_id": organization,
                "lag_rows": rows,
                "lag_seconds": round(max(0.0, (state.at - oldest).total_seconds()), 3),
                "own_entry": organization in apart,
            }
            for organization, rows, oldest in state.organizations
        ],
        "blocker": None if state.blocker is None else _transaction(state.blocker),
        "open_transactions": [_transaction(each) for each in state.transactions],
        "undecided": [{"topic": topic, "partition": p, "offset": offset} for topic, p, offset in state.undecided],
        "refusals": state.refusals,
        "remarks": [remark for remark in remarks(state)],
        "database": position.identity.database.name if position is not None else None,
        "kafka_cluster": position.identity.kafka.cluster_id if position is not None else None,
    }


def _lane(lane: LaneState, state: State) -> dict[str, Any]:
    position, waiting = lane.position, lane.waiting
    late = 0.0 if waiting.oldest is None else max(0.0, (state.at - waiting.oldest).total_seconds())
    return {
        "lane": lane.number,
        "name": lane.name,
        "owner": lane.owner,
        "owner_since": lane.owner_since,
        "owner_silent_s": _rounded(lane.owner_silent_s),
        "takeovers": lane.takeovers,
        "lag_rows": waiting.rows,
        "lag_rows_at_least": waiting.at_least,
        "lag_seconds": round(late, 3),
        "rows_per_s": _rounded(lane.rows_per_s),
        "rate_over_s": _rounded(lane.rate_over_s),
        "published": position.published if position is not None else 0,
        "dead_lettered": position.dead_lettered if position is not None else 0,
        "number": position.number if position is not None else None,
        "written_at": position.written_at if position is not None else None,
        "written_by": position.instance if position is not None else None,
        "closing": None
        if position is None or position.closing is None
        else {"layout": position.closing.layout, "lanes": position.closing.lanes},
        "entries": [_entry(each) for each in lane.entries] if position is not None else [],
    }


def _entry(state: EntryState) -> dict[str, Any]:
    entry: Entry = state.entry
    window = entry.window
    return {
        "slots": [list(pair) for pair in entry.slots],
        "organization": entry.organization,
        "without": sorted(map(str, entry.without)),
        "s1": str(entry.s1),
        "t1": entry.t1,
        "s2": None if window is None else str(window.s2),
        "t2": None if window is None else window.t2,
        "last": None if window is None else window.last,
        "reprocessed": entry.reprocessed,
        "lag_rows": state.waiting.rows,
    }


def _transaction(transaction: Transaction) -> dict[str, Any]:
    return {
        "tx_id": transaction.tx_id,
        "pid": transaction.pid,
        "gid": transaction.gid,
        "database": transaction.database,
        "user": transaction.user,
        "application": transaction.application,
        "state": transaction.state,
        "since": transaction.since,
        "age_s": _rounded(transaction.age_s),
        "writes_events": transaction.writes_events,
        "rows_waiting_at_most": transaction.rows_at_most,
        "at_least": transaction.at_least,
        "rows_meanwhile": transaction.rows_meanwhile,
        "months_held": transaction.months_held,
        "ids_behind": transaction.ids_behind,
    }


def _open_letters(settings: Any) -> int | None:
    """Dead letters of the relay that nobody has decided about; None when that cannot be read now."""
    from afluente import postgres
    from afluente.errors import Unavailable
    from consumers.dead_letters import Filter, relay

    try:
        with postgres.connect(settings.postgres.dsn, application_name="afluente relay status") as conn:
            found = relay.find(conn, settings.kafka, Filter(limit=100_000), states=("dead",), stall_s=3.0)
        return len(found)
    except Unavailable:
        return None


def _print(data: dict[str, Any]) -> None:
    """For a person: the whole first, then each lane, then what holds rows back, then what to know and do."""
    lag = f"{data['lag_rows']:,}{' or more' if data['lag_rows_at_least'] else ''} rows, {data['lag_seconds']} s"
    letters = data["dead_letters_open"]
    show(
        {
            "state": data["state"],
            "paused": _pause_words(data["paused"]),
            "lag": lag,
            "rate": "not known yet" if data["rows_per_s"] is None else f"{data['rows_per_s']:,} rows a second",
            "published": data["published"],
            "dead letters": f"{data['dead_lettered']} in all, " + ("?" if letters is None else f"{letters} open"),
            "takeovers": data["takeovers"],
            "database": data["database"],
            "kafka cluster": data["kafka_cluster"],
        }
    )
    for lane in data["lanes"]:
        print(f"\nlane {lane['name']}")
        keys = ("owner", "owner_since", "owner_silent_s", "lag_rows", "lag_seconds", "rows_per_s", "written_at")
        show({f"  {key.replace('_', ' ')}": lane[key] for key in (*keys, "closing") if lane[key] is not None})
        for entry in lane["entries"]:
            whose = entry["organization"] or ("slots " + ",".join("-".join(map(str, pair)) for pair in entry["slots"]))
            window = "" if entry["s2"] is None else f", window to {entry['t2']} ({entry['s2']}) at {entry['last']}"
            print(f"  {whose}: t1 {entry['t1']}, s1 {entry['s1']}{window}; {entry['lag_rows']:,} rows wait")
    if data["lag_rows"]:
        print("\nwaiting, by organization")
        show(data["organizations"], columns=["organization_id", "lag_rows", "lag_seconds", "own_entry"])
    # One of a moment ago that writes something else is no news.
    if (blocker := data["blocker"]) is not None and (blocker["writes_events"] or (blocker["age_s"] or 0.0) >= 1.0):
        print("\nopen transaction")
        show({f"  {key.replace('_', ' ')}": value for key, value in blocker.items() if value is not None})
    for remark in data["remarks"]:
        print(f"\n{remark.severity}: {remark.found}\n  {remark.fix}")
    say("next: afluente relay status --format json, afluente doctor")


def _pause_words(paused: dict[str, Any] | None) -> str:
    if paused is None:
        return "no"
    since = paused["since"].astimezone().strftime("%Y-%m-%d %H:%M:%S%z")
    return f"by {paused['by']} since {since}" + (f": {printable(paused['reason'])}" if paused["reason"] else "")


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
