"""`afluente relay replay`."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal
from uuid import UUID, uuid4

import typer

from afluente.cli.dlq import parse_time
from afluente.cli.exits import Exit
from afluente.cli.output import Format, FormatOption, say, show
from afluente.cli.progress import bar
from afluente.cli.registry import use_registry
from afluente.cli.who import agree, who
from afluente.signals import stopped_by_signals

if TYPE_CHECKING:
    from consumers.replay import Addressing, Plan
    from producers.relay.replay.selection import Part, Progress, Selection
    from producers.relay.replay.sources import Sources

PLAN_ROWS = 1_000
NOTE_EVERY_S = 1.0
FAILURES_SHOWN = 100
LISTED = 100
EPOCH, FAR = datetime(1970, 1, 2, tzinfo=UTC), datetime(9999, 1, 1, tzinfo=UTC)


class SourceOption(StrEnum):
    table = "table"
    topic = "topic"
    archive = "archive"


def replay(
    topic: Annotated[str | None, typer.Option("--topic", help="an event topic, with --from-offset")] = None,
    from_offset: Annotated[
        str | None, typer.Option("--from-offset", help="its first offsets, by partition", metavar="P:N[,P:N]")
    ] = None,
    since: Annotated[str | None, typer.Option("--since", help="written since: ISO time, 2h, 3d, yesterday")] = None,
    from_position: Annotated[
        str | None, typer.Option("--from-position", help="what a relay at this position had before it: S1/T1 or JSON")
    ] = None,
    event_id: Annotated[list[str] | None, typer.Option("--event-id", help="this event; repeatable")] = None,
    until: Annotated[str | None, typer.Option("--until", help="written before: as --since")] = None,
    org: Annotated[
        list[str] | None, typer.Option("--org", help="only of this organization: id, slug or name; repeatable")
    ] = None,
    type_: Annotated[list[str] | None, typer.Option("--type", help="only of this event type; repeatable")] = None,
    to: Annotated[
        str | None, typer.Option("--to", help="a worker, `all` workers, or a topic that is none of ours")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="workers do once more what they have done")] = False,
    source: Annotated[
        SourceOption | None, typer.Option("--source", help="read from there only; default: whichever has it")
    ] = None,
    archive: Annotated[str | None, typer.Option("--archive", help="the archive, for what the table lost")] = None,
    rate: Annotated[float | None, typer.Option("--rate", min=0.01, help="events a second at most")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="count what would be done, do nothing")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
    reason: Annotated[str, typer.Option("--reason", help="why, for the record")] = "",
    resume: Annotated[str | None, typer.Option("--resume", help="go on with this replay", metavar="ID")] = None,
    list_: Annotated[bool, typer.Option("--list", help="show the replays there were, and how far they are")] = False,
    format: FormatOption = Format.text,
) -> None:
    """Deliver events again from a place in the past, to a worker, to all workers that take them, or to a topic.

    Workers skip what they have done, unless --again. The events come from the table while it has them, then from the
    topics, or the archive. The relay goes on meanwhile, and its position is not touched. A replay that was interrupted,
    or killed, is resumed where it stood: nothing is sent twice, nothing left out.

    Exit status: 3 when nothing matched, or nothing is to do; 5 when some events could not be sent (see `failures`);
    130 when interrupted. JSON keys (of --list: replay_id, created_at, actor, reason, to, events, read, sent, skipped,
    failed, progress_at, finished_at): action, applied, replay_id, source, to, again, finished, events, organizations,
    untaken, done, dead, open, to_do, counts [{event_type, to, done, dead, open, to_do}], and of a run read, sent,
    skipped, failed, failures [{event, error}]. `done`, `dead`, `open` are deliveries as they stand; `to_do` is what the
    replay makes workers do; `dead` is for `afluente dlq`, and done again with --again.

    \b
    Examples:
      afluente relay replay --since 2h --to webhook-dispatch-worker --dry-run
      afluente relay replay --since 2026-11-29T08:00 --until 2026-11-29T09:00 --type order.paid --to all --yes
      afluente relay replay --topic events.lead --from-offset 0:1200,1:980 --to audit-copy --rate 500
      afluente relay replay --resume 0199c0de-0000-7000-8000-000000000000
    """
    from afluente.settings import RelaySettings
    from producers.relay.replay.selection import parse_offsets, parse_position

    settings = RelaySettings.read(os.environ)
    use_registry(settings.kafka.topic_prefix, writes=True)
    wanted = {"--from-offset": from_offset, "--since": since, "--from-position": from_position, "--event-id": event_id}
    given = [name for name, value in wanted.items() if value]
    if list_:
        if given or to or resume:
            raise typer.BadParameter("--list shows what there is, and takes nothing else")
        _list(settings, format)
        return
    if resume is not None:
        if given or to or org or type_ or until or topic or source or archive or again or dry_run:
            raise typer.BadParameter("--resume goes on with what the replay was asked to do: give --rate at most")
        _resume(settings, _uuid(resume, "--resume"), rate, format)
        return
    if len(given) != 1:
        raise typer.BadParameter(f"say from where, by one of {', '.join(wanted)}")
    if (topic is None) != (from_offset is None):
        raise typer.BadParameter("--topic and --from-offset go together")
    if to is None:
        raise typer.BadParameter("--to says who gets the events: a worker, all, or a topic")
    if from_offset is not None and source not in (None, SourceOption.topic):
        raise typer.BadParameter("offsets are a topic's: --source can only be topic")
    if from_position is not None and source not in (None, SourceOption.table):
        raise typer.BadParameter("only the table can tell what a position means: --source can only be table")
    if again and not (to == "all" or to.endswith("-worker")):
        raise typer.BadParameter("--again is for workers: a topic gets every event as it is")
    if source == SourceOption.archive and archive is None:
        raise typer.BadParameter("--source archive needs --archive DIR")
    if from_position is not None:
        _usage(parse_position, from_position)
    now = datetime.now(UTC)
    asked = _Asked(
        topic=topic,
        offsets=None if from_offset is None else _usage(parse_offsets, from_offset),
        since=_time(since, now),
        position=from_position,
        ids=_ids(event_id or []),
        until=_time(until, now),
        force=None if source is None else source.value,
        archive=archive,
    )
    if asked.since is not None and asked.until is not None and asked.until <= asked.since:
        raise typer.BadParameter("--until is not after --since: there is nothing between them")
    _begin(settings, asked, org or [], type_ or [], to, again, rate, dry_run, yes, reason, format)


@dataclass
class _Asked:
    """From where, as a person said it, and checked as far as that goes without looking."""

    topic: str | None
    offsets: dict[int, int] | None
    since: datetime | None
    position: str | None
    ids: list[UUID]
    until: datetime | None
    force: Literal["table", "topic", "archive"] | None
    archive: str | None

    def parts(self, sources: Sources) -> tuple[Part, ...]:
        from producers.relay.replay.selection import parse_position

        if self.since is not None:
            return sources.since(self.since, self.until, self.force, self.archive)
        if self.ids:
            return sources.named(self.ids, self.until, self.force, self.archive)
        if self.offsets is not None:
            assert self.topic is not None
            return (sources.from_offsets(self.topic, self.offsets, self.until),)
        assert self.position is not None
        return (sources.from_position(parse_position(self.position), self.position, self.until),)


def _begin(
    settings: Any,
    asked: _Asked,
    orgs: list[str],
    types: list[str],
    to: str,
    again: bool,
    rate: float | None,
    dry_run: bool,
    yes: bool,
    reason: str,
    format: Format,
) -> None:
    import orjson

    import sql
    from consumers import replay as addressing
    from producers import organizations
    from producers.relay.replay.selection import MAX_FILTERS, Selection
    from producers.relay.replay.sources import Sources

    if rate is not None and not math.isfinite(rate):
        raise typer.BadParameter(f"--rate: {rate} is no number of events a second")
    if max(len(orgs), len(types)) > MAX_FILTERS:
        raise typer.BadParameter(f"at most {MAX_FILTERS} organizations, and as many types")
    replay_id = uuid4()
    sources = Sources(settings.kafka, settings.postgres.dsn, f"replay-{replay_id}")
    try:
        targets = addressing.find_targets(sources.conn, settings.kafka, to)
        chosen = frozenset(organizations.identify(sources.conn, word) for word in orgs)
        wanted = Selection(asked.parts(sources), chosen, frozenset(types))
        for remark in sources.remarks[:10]:
            say(remark)
        plan = _plan(sources, wanted, addressing.Addressing(sources.conn, targets, again=again))
        result = {"action": "replay", "applied": False, "replay_id": None, "source": wanted.source, "to": to}
        result |= {"again": again, "finished": False} | _counts(plan)
        if not plan.events:
            show(result, format, _COLUMNS if format == Format.text else None)
            say(f"no event matches (looked in: {wanted.source})")
            raise typer.Exit(Exit.FOUND)
        _require_known(plan, again)
        if dry_run:
            _report(result, format)
            say("this was a dry run: nothing is sent")
        to_send = plan.total.to_do + plan.total.open
        if not to_send:
            if not dry_run:
                _report(result, format)
            say("nothing to do: all of it is over" + ("" if again else "; --again does it once more"))
            raise typer.Exit(Exit.FOUND)
        if dry_run:
            return
        _agree(plan, wanted, to, again, yes)
        arguments = {
            "selection": wanted.to_json(),
            "to": to,
            "targets": [
                {"name": t.name, "topic": t.topic, "worker": t.worker, "event_types": sorted(t.event_types)}
                for t in targets
            ],
            "again": again,
            "rate": rate,
            "result": result,
        }
        row = sources.conn.execute(
            sql.queries("replay")["begin"],
            {
                "id": replay_id,
                "arguments": orjson.dumps(arguments).decode(),
                "actor": who()[:255],
                "reason": reason[:1_000],
            },
        ).fetchone()
        assert row is not None
        _run(settings, sources, replay_id, row[0], arguments, rate, True, format)
    finally:
        sources.close()


def _list(settings: Any, format: Format) -> None:
    import sql
    from afluente import postgres

    rows = []
    with postgres.connect(settings.postgres.dsn, application_name="afluente relay replay") as conn:
        for row in conn.execute(sql.queries("replay")["recent"], {"limit": LISTED}):
            replay_id, created_at, actor, reason, to, progress, progress_at, finished_at = row
            counts = {name: progress.get(name, 0) for name in ("events", "read", "sent", "skipped", "failed")}
            about = {"replay_id": replay_id, "created_at": created_at, "actor": actor, "reason": reason, "to": to}
            rows.append(about | counts | {"progress_at": progress_at, "finished_at": finished_at})
    show(rows, format)
    if not rows:
        say("there was no replay")
        raise typer.Exit(Exit.FOUND)


def _resume(settings: Any, replay_id: UUID, rate: float | None, format: Format) -> None:
    import sql
    from afluente.errors import Refused
    from producers.relay.replay.sources import Sources

    sources = Sources(settings.kafka, settings.postgres.dsn, f"replay-{replay_id}")
    try:
        row = sources.conn.execute(sql.queries("replay")["replay"], {"id": replay_id}).fetchone()
        if row is None:
            raise Refused(f"there is no replay {replay_id}", hint="afluente relay replay --list")
        number, arguments, progress, _, finished_at, is_young = row
        if finished_at is not None:
            say(f"this replay was finished at {finished_at.isoformat()}")
            raise typer.Exit(Exit.FOUND)
        is_new = is_young and not progress.get("read")
        _run(settings, sources, replay_id, number, arguments, rate or arguments["rate"], is_new, format)
    finally:
        sources.close()


def _run(
    settings: Any,
    sources: Sources,
    replay_id: UUID,
    number: int,
    arguments: dict[str, Any],
    rate: float | None,
    is_new: bool,
    format: Format,
) -> None:
    import orjson

    import sql
    from consumers import replay as addressing
    from producers.relay.replay.run import Replay
    from producers.relay.replay.selection import Selection

    targets = [
        addressing.Target(t["name"], t["topic"], t["worker"], frozenset(t["event_types"])) for t in arguments["targets"]
    ]
    wanted, result = Selection.from_json(arguments["selection"]), dict(arguments["result"])
    addressed = addressing.Addressing(sources.conn, targets, again=arguments["again"])
    failures: list[dict[str, str]] = []
    noted_at = 0.0

    def note(progress: Progress, finished: bool) -> None:
        text = orjson.dumps(progress.counts() | {"events": result["events"]}).decode()
        sources.conn.execute(
            sql.queries("replay")["note_progress"], {"id": replay_id, "progress": text, "finished": finished}
        )

    def fail(what: str, why: str) -> None:
        say(f"not sent: {what}: {' '.join(why.split())[:200]}")
        if len(failures) < FAILURES_SHOWN:
            failures.append({"event": what, "error": why[:500]})

    def told(progress: Progress) -> None:
        nonlocal noted_at
        advance(progress.read)
        if time.monotonic() - noted_at >= NOTE_EVERY_S:
            note(progress, False)
            noted_at = time.monotonic()

    say(f"replay {replay_id}; if it is interrupted: afluente relay replay --resume {replay_id}")
    with bar("replaying", result["events"]) as advance:
        run = Replay(
            settings.kafka,
            replay_id,
            wanted,
            sources,
            lambda events: addressed.records(events, replay_id, number),
            addressing.limits_of(settings.kafka, targets),
            place=(targets[0].topic, 0),
            rate=rate,
            is_new=is_new,
            told=told,
            failed=fail,
            lost=lambda why: say(f"Kafka: {why}; going on from where the replay stands there"),
        )
        with stopped_by_signals(run.stop):
            progress = run.run()
    finished = progress.part == len(wanted.parts)
    note(progress, finished)
    result |= {"applied": True, "replay_id": str(replay_id), "finished": finished} | progress.counts()
    _report(result | {"failures": failures}, format)
    if not finished:
        say(f"interrupted; go on with: afluente relay replay --resume {replay_id}")
        raise typer.Exit(Exit.INTERRUPTED)
    run.forget()
    following = "; next: afluente worker list" if targets[0].worker else ""
    say(f"{progress.sent:,} records sent for {progress.read:,} events{following}")
    if progress.failed:
        raise typer.Exit(Exit.PARTLY)


def _plan(sources: Sources, wanted: Selection, addressed: Addressing) -> Plan:
    """Read all of it once, and count: what the question shows, and what a dry run is."""
    from consumers.replay import Plan

    plan = Plan()
    with bar("counting", None) as advance:
        for part in wanted.parts:
            cursor: list[Any] | None = []
            while cursor is not None:
                page = sources.page(wanted, part, cursor, PLAN_ROWS)
                addressed.count(page.events, plan)
                advance(plan.events)
                cursor = page.after
    return plan


def _require_known(plan: Plan, again: bool) -> None:
    from afluente.errors import Refused

    if plan.unknown_months and not again:
        months = sorted(f"{month:%Y-%m}" for month in plan.unknown_months)
        raise Refused(
            f"what workers have done with the events of {', '.join(months[:6])} is no longer known: a month's rows of "
            "event_delivery are dropped 400 days after its end",
            hint="--again does all of them once more; or begin later, with --since",
        )


def _agree(plan: Plan, wanted: Selection, to: str, again: bool, yes: bool) -> None:
    total, organizations = plan.total, len(plan.organizations)
    question = (
        f"replay {plan.events:,} event{'s' * (plan.events != 1)} of {organizations:,} organization"
        f"{'s' * (organizations != 1)} to {to}, from the {wanted.source}: {total.to_do:,} to do, {total.done:,} done"
        f" already{' and done again' if again else ''}?"
    )
    agree(question, yes, typed=to if again else None)


_COLUMNS = ("source", "to", "events", "organizations", "untaken", "done", "dead", "open", "to_do")
_RAN = ("replay_id", "finished", "read", "sent", "skipped", "failed")


def _report(result: dict[str, Any], format: Format) -> None:
    if format == Format.text:
        show(result["counts"], format, ("event_type", "to", "done", "dead", "open", "to_do"))
        print()
        show(result, format, _COLUMNS + (_RAN if result["applied"] else ()))
    elif format == Format.csv:
        show(result["counts"], format)
    else:
        show(result, format)


def _counts(plan: Plan) -> dict[str, Any]:
    def columns(counts: Any) -> dict[str, int]:
        return {"done": counts.done, "dead": counts.dead, "open": counts.open, "to_do": counts.to_do}

    return {
        "events": plan.events,
        "organizations": len(plan.organizations),
        "untaken": plan.untaken,
        **columns(plan.total),
        "counts": [
            {"event_type": event_type, "to": to, **columns(counts)}
            for (event_type, to), counts in sorted(plan.counts.items())
        ],
    }


def _time(text: str | None, now: datetime) -> datetime | None:
    """Since the epoch: no event is older, and times near the ends of what datetime holds have no neighbours."""
    moment = parse_time(text, now)
    return None if moment is None else min(max(moment, EPOCH), FAR)


def _ids(texts: list[str]) -> list[UUID]:
    from producers.relay.replay.selection import MAX_IDS

    if len(texts) > MAX_IDS:
        raise typer.BadParameter(f"at most {MAX_IDS:,} events by their ids; --since takes any number")
    return [_uuid(text, "--event-id") for text in texts]


def _uuid(text: str, option: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise typer.BadParameter(f"{option}: {text[:80]!r} is not an id") from None


def _usage(parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
