"""`afluente dlq`: dead letters, listed, shown, reprocessed and discarded."""

from __future__ import annotations

import os
import re
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from afluente.cli.exits import Exit
from afluente.cli.output import Format, FormatOption, say, show
from afluente.cli.registry import use_registry
from afluente.cli.who import who
from afluente.errors import AfluenteError, Unavailable

if TYPE_CHECKING:
    from consumers.dead_letters import Filter, Letter, Outcome, RelayLetter, Undecodable

    AnyLetter = Letter | Undecodable | RelayLetter

app = typer.Typer(help="List, show, retry and discard dead letters.", no_args_is_help=True, rich_markup_mode=None)

Worker = Annotated[str | None, typer.Option("--worker", help="only of this worker")]
EventType = Annotated[str | None, typer.Option("--event-type", help="only of events of this type")]
EntityKind = Annotated[str | None, typer.Option("--entity-kind", help="only of events about this kind of entity")]
Org = Annotated[str | None, typer.Option("--org", help="only of this organization: its id, slug or name")]
Error = Annotated[str | None, typer.Option("--error", help="only with this in the error's class or text")]
Since = Annotated[str | None, typer.Option("--since", help="dead since: ISO time, 2h, 3d, yesterday")]
Until = Annotated[str | None, typer.Option("--until", help="dead before: the same")]
Ids = Annotated[list[str] | None, typer.Argument(help="ids as listed, or event ids", metavar="[ID]...")]
All = Annotated[bool, typer.Option("--all", help="every dead letter there is")]
Limit = Annotated[int, typer.Option("--limit", min=1, help="at most so many")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="show what would be done, do nothing")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="do not ask")]
Reason = Annotated[str, typer.Option("--reason", help="why, for the audit log")]
OfRelay = Annotated[bool, typer.Option("--relay", help="rows the relay could not publish, instead")]

_RELAY_TIMEOUT_S = 3.0  # the list of the workers' letters is there without Kafka
_COLUMNS = ("id", "event_type", "attempts", "error", "dead_at")


class UnknownLetter(AfluenteError):
    """No dead letter of that id."""

    exit_status = Exit.FOUND


@app.command("list")
def list_(
    worker: Worker = None,
    event_type: EventType = None,
    entity_kind: EntityKind = None,
    org: Org = None,
    error: Error = None,
    since: Since = None,
    until: Until = None,
    state: Annotated[
        list[str] | None,
        typer.Option(
            "--state", help="dead, needs_review, discarded; of the relay also requested, published, gone; repeatable"
        ),
    ] = None,
    relay: OfRelay = False,
    limit: Limit = 100,
    format: FormatOption = Format.text,
) -> None:
    """List dead letters, the newest first. Exit status 3 when there is none.

    JSON keys: id, kind (delivery, undecodable, relay), worker, event_id, target, organization_id, event_type, state,
    attempts, generation, error_class, error, first_failure_at, dead_at, origin {topic, partition, offset},
    dead_letter {partition, offset}; of the relay also decision {id, state, by, at, reason, answered_at, outcome}.
    The relay's that are not settled: dead, requested (it is to publish them again), gone (it could not: no row).

    \b
    Examples:
      afluente dlq list --worker webhook-dispatch-worker --since 2h
      afluente dlq list --relay --format json
    """
    from dataclasses import replace

    from afluente.settings import KafkaSettings
    from consumers import dead_letters

    relay = relay or worker == dead_letters.relay.WORKER
    with _connect() as conn:
        wanted = _filter(conn, worker, event_type, entity_kind, org, error, since, until, limit)
        if relay:
            wanted = replace(wanted, worker=None)
            states = tuple(state or dead_letters.relay.OPEN)
            found = dead_letters.relay.find(conn, KafkaSettings.read(os.environ), wanted, states=states)
            rows = [_relay_row(letter) for letter in found]
        else:
            if state:
                wanted = replace(wanted, states=tuple(state))
            rows = [_row(letter) for letter in dead_letters.find(conn, wanted)]
            rows += [_row(letter) for letter in dead_letters.find_undecodable(conn, wanted)]
            rows = sorted(rows, key=lambda row: row["dead_at"], reverse=True)[:limit]
    columns = (*_COLUMNS, "state") if relay else _COLUMNS
    show(_short(rows) if format == Format.text else rows, format, columns if format == Format.text else None)
    more = ""
    if not (relay or state or worker or event_type or entity_kind or org or error or since or until) and (
        of_the_relay := _of_the_relay()
    ):
        more = f", and {of_the_relay} of the relay: afluente dlq list --relay"
    if not rows:
        say("no dead letters" + (" of workers" if more else "") + more)
        raise typer.Exit(Exit.FOUND)
    limited = " (the limit)" if len(rows) == limit else ""
    say(f"{len(rows)} dead letter{'s' if len(rows) > 1 else ''}{limited}{more}")
    say(f"next: afluente dlq show {rows[0]['id']}")


@app.command("show")
def show_(
    id: Annotated[str, typer.Argument(help="an id as listed, or an event id", metavar="ID")],
    format: FormatOption = Format.text,
) -> None:
    """Show one dead letter with its event, or with its bytes when they are no event.

    JSON keys: those of `list`, and headers, event {…} or value_hex; of the relay's the row {…} or null, and decisions.

    \b
    Examples:
      afluente dlq show webhook-normalize-worker:0199c0de-0000-7000-8000-000000000000
      afluente dlq show relay@relay.dead-letter/0/12 --format json
    """
    import schemas
    from afluente.settings import KafkaSettings
    from consumers import dead_letters

    use_registry(KafkaSettings.read(os.environ).topic_prefix)
    with _connect() as conn:
        letters = _named(conn, [id], None)
        rows = []
        for letter in letters:
            if isinstance(letter, dead_letters.RelayLetter):
                rows.append(_shown_of_relay(conn, letter))
                continue
            row = _row(letter)
            record = dead_letters.record_of(KafkaSettings.read(os.environ), conn, letter)
            row["headers"] = {
                name: (value or b"").decode("utf-8", "replace") for name, value in (record.headers if record else ())
            }
            row["event"] = row["value_hex"] = None
            if record is not None:
                try:
                    row["event"] = schemas.decode(record.value or b"")
                except schemas.SchemaError:
                    row["value_hex"] = (record.value or b"").hex()
            rows.append(row)
    if format == Format.text:
        for number, row in enumerate(rows):
            print("\n" * (number > 0), end="")
            _print(row)
    else:
        show(rows[0] if len(rows) == 1 else rows, format)
    say(f"next: afluente dlq retry {rows[0]['id']} --dry-run")


def _shown_of_relay(conn: Any, letter: RelayLetter) -> dict[str, Any]:
    from afluente.settings import KafkaSettings
    from consumers import dead_letters

    settings = KafkaSettings.read(os.environ)
    return _relay_row(letter) | {
        "row": dead_letters.relay.value_of(settings, letter).get("row"),
        "decisions": dead_letters.relay.history_of(conn, settings, letter),
    }


def _print(row: dict[str, Any]) -> None:
    """One letter for a person to read: what happened, each header on a line, the event as JSON."""
    if row["kind"] == "relay":
        show({name: value for name, value in row.items() if name not in ("row", "decisions", "decision")})
        print("\ndecisions")
        show(row["decisions"], columns=["state", "by", "at", "reason", "outcome"])
        print("\nrow" if row["row"] is not None else "\nthe letter holds no row, only where it is: in event_log")
        if row["row"] is not None:
            show(row["row"], Format.json)
        return
    event, headers = row["event"], row["headers"]
    show({name: value for name, value in row.items() if name not in ("event", "headers", "value_hex")})
    print("\nheaders")
    width = max(map(len, headers), default=0)
    for name, value in headers.items():
        print(f"  {name:<{width}}  {' '.join(value.split())}".rstrip())
    if event is not None:
        print("\nevent")
        show(event, Format.json)
    elif row["value_hex"] is not None:
        print(f"\nvalue (hex)\n{row['value_hex']}")
    else:
        print("\nits record is neither in Kafka nor in event_log")


def _of_the_relay(limit: int = 1000) -> str:
    """How many letters of the relay are not settled; '' for none, or when Kafka does not say it soon."""
    from confluent_kafka import KafkaException

    from afluente import kafka
    from afluente.errors import SettingsError
    from afluente.settings import KafkaSettings
    from consumers.dead_letters import Filter, relay
    from schemas.topics import Topics

    try:
        settings = KafkaSettings.read(os.environ)
        topic = Topics(settings.topic_prefix).relay_dead_letter
        if topic not in kafka.admin(settings).list_topics(timeout=_RELAY_TIMEOUT_S).topics:
            return ""
        with _connect() as conn:
            count = len(relay.find(conn, settings, Filter(limit=limit), stall_s=_RELAY_TIMEOUT_S))
    except (SettingsError, Unavailable, KafkaException):
        return ""
    return "" if not count else f"{count:,}" if count < limit else f"{limit:,} or more"


@app.command()
def retry(
    ids: Ids = None,
    worker: Worker = None,
    event_type: EventType = None,
    entity_kind: EntityKind = None,
    org: Org = None,
    error: Error = None,
    since: Since = None,
    until: Until = None,
    relay: OfRelay = False,
    all_: All = False,
    limit: Limit = 10_000,
    dry_run: DryRun = False,
    yes: Yes = False,
    reason: Reason = "",
    format: FormatOption = Format.text,
) -> None:
    """Give dead letters to the worker and target that failed, and to no one else; attempts count from 1 again.

    Those of the relay are published again, once, with today's code and limits: by the relay, within a second when it
    runs. A row that fails again is a dead letter again.

    Exit status: 3 when nothing matched, 5 when some could not be given (see `failed`). JSON keys: action, applied,
    count, organizations, workers, ids, failed [{id, error}].

    \b
    Examples:
      afluente dlq retry --worker webhook-dispatch-worker --since 2h --dry-run
      afluente dlq retry --worker webhook-dispatch-worker --error 503 --reason "receiver is back" --yes
      afluente dlq retry --relay --event-type lead.created --reason "schema mended"
    """
    from afluente.settings import KafkaSettings
    from consumers import dead_letters

    with _connect(autocommit=True) as conn:
        wanted = _filter(conn, worker, event_type, entity_kind, org, error, since, until, limit)
        letters = _choose(conn, ids, wanted, all_, relay)
        _agree("retry", letters, dry_run, yes)
        outcome = None
        if not dry_run:
            settings = KafkaSettings.read(os.environ)
            now = datetime.now(UTC)
            of_workers, of_relay = _divided(letters)
            outcome = dead_letters.reprocess(conn, settings, of_workers, actor=who(), reason=reason, now=now)
            asked = dead_letters.relay.retry(conn, settings, of_relay, actor=who(), reason=reason)
            outcome.done, outcome.failed = outcome.done + asked.done, outcome.failed + asked.failed
    _report("retry", letters, outcome, reason, format)


@app.command()
def discard(
    ids: Ids = None,
    worker: Worker = None,
    event_type: EventType = None,
    entity_kind: EntityKind = None,
    org: Org = None,
    error: Error = None,
    since: Since = None,
    until: Until = None,
    relay: OfRelay = False,
    all_: All = False,
    limit: Limit = 10_000,
    dry_run: DryRun = False,
    yes: Yes = False,
    reason: Reason = "",
    format: FormatOption = Format.text,
) -> None:
    """Close dead letters for good: they are not tried again. More than one: the worker's name is asked for.

    Exit status and JSON keys as for `retry`.

    \b
    Examples:
      afluente dlq discard webhook-normalize-worker:0199c0de-0000-7000-8000-000000000000 --reason "test data"
      afluente dlq discard --worker webhook-dispatch-worker --until 30d --yes --reason "too old to matter"
    """
    from afluente.settings import KafkaSettings
    from consumers import dead_letters

    with _connect(autocommit=True) as conn:
        wanted = _filter(conn, worker, event_type, entity_kind, org, error, since, until, limit)
        letters = _choose(conn, ids, wanted, all_, relay)
        _agree("discard", letters, dry_run, yes)
        outcome = None
        if not dry_run:
            of_workers, of_relay = _divided(letters)
            outcome = dead_letters.discard(conn, of_workers, actor=who(), reason=reason)
            if of_relay:
                settings = KafkaSettings.read(os.environ)
                noted = dead_letters.relay.discard(conn, settings, of_relay, actor=who(), reason=reason)
                outcome.done, outcome.failed = outcome.done + noted.done, outcome.failed + noted.failed
    _report("discard", letters, outcome, reason, format)


def parse_time(text: str | None, now: datetime) -> datetime | None:
    """ISO time (local unless it says otherwise), `2h` ago, `yesterday`. typer.BadParameter for anything else."""
    if text is None:
        return None
    if text in ("today", "yesterday"):
        midnight = now.astimezone().replace(hour=0, minute=0, second=0, microsecond=0)
        return midnight - timedelta(days=1 if text == "yesterday" else 0)
    try:
        if match := re.fullmatch(r"(\d{1,6})(s|m|h|d)", text):
            unit = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}[match[2]]
            return now - timedelta(**{unit: int(match[1])})
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no time: 2026-11-29T20:00, 2h, 3d, yesterday") from None
    except OverflowError:
        raise typer.BadParameter(f"{text!r} is no time that a calendar has") from None
    try:
        return moment.astimezone(UTC).astimezone()  # a naive one is the person's local time
    except (OverflowError, ValueError):  # near the ends of the calendar, in another zone beyond them
        raise typer.BadParameter(f"{text!r} is no time that a calendar has") from None


def _connect(autocommit: bool = False) -> Any:
    from afluente import postgres
    from afluente.settings import PostgresSettings

    settings = PostgresSettings.read(os.environ)
    return postgres.connect(settings.dsn, application_name="afluente dlq", autocommit=autocommit)


def _filter(
    conn: Any,
    worker: str | None,
    event_type: str | None,
    entity_kind: str | None,
    org: str | None,
    error: str | None,
    since: str | None,
    until: str | None,
    limit: int,
) -> Filter:
    from consumers.dead_letters import Filter
    from producers import organizations

    now = datetime.now(UTC)
    return Filter(
        worker=worker,
        event_type=event_type,
        entity_kind=entity_kind,
        organization_id=organizations.identify(conn, org) if org else None,
        error=error,
        since=parse_time(since, now),
        until=parse_time(until, now),
        limit=limit,
    )


def _uuid(text: str, what: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise typer.BadParameter(f"{what}: {text!r} is not an id") from None


def _choose(conn: Any, ids: list[str] | None, wanted: Filter, all_: bool, relay: bool) -> list[AnyLetter]:
    """The letters named, or those that the filters find. Everything there is must be asked for with --all: every
    letter of workers, or with --relay of the relay."""
    from dataclasses import replace

    from afluente.settings import KafkaSettings
    from consumers import dead_letters

    if wanted.worker == dead_letters.relay.WORKER:
        relay, wanted = True, replace(wanted, worker=None)
        all_ = all_ or (not wanted.about_events and not any((wanted.error, wanted.since, wanted.until)))
    filtered = wanted.about_events or any((wanted.worker, wanted.error, wanted.since, wanted.until))
    if ids and (filtered or all_):
        raise typer.BadParameter("give ids or filters, not both")
    if ids:
        return _named(conn, ids, wanted.limit, relay)
    if not filtered and not all_:
        raise typer.BadParameter("say which: ids, filters, or --all")
    found: list[AnyLetter]
    if relay:
        found = [*dead_letters.relay.find(conn, KafkaSettings.read(os.environ), wanted, states=("dead",))]
    else:
        found = [*dead_letters.find(conn, wanted), *dead_letters.find_undecodable(conn, wanted)]
        found = found[: wanted.limit]
    if not found:
        say("no dead letter matches")
        raise typer.Exit(Exit.FOUND)
    return found


def _named(conn: Any, ids: list[str], limit: int | None, relay: bool = False) -> list[AnyLetter]:
    """A bare event id means the letters of workers; when there are none, or with `relay`, the relay's."""
    from afluente.settings import KafkaSettings
    from consumers import dead_letters
    from consumers.dead_letters import Filter

    def of_relay(wanted: Filter, place: tuple[int, int] | None = None) -> list[RelayLetter]:
        settings = KafkaSettings.read(os.environ)
        return dead_letters.relay.find(conn, settings, wanted, states=dead_letters.relay.ALL, place=place)

    found: list[AnyLetter] = []
    for id in ids:
        here: list[AnyLetter]
        if match := re.fullmatch(r"relay@(.+)/(\d+)/(\d+)", id):
            here = [*of_relay(Filter(), (int(match[2]), int(match[3])))]
            here = [letter for letter in here if getattr(letter, "topic", None) == match[1]]
        elif match := re.fullmatch(r"([a-z0-9-]+)@(.+)/(\d+)/(\d+)", id):
            place = (match[2], int(match[3]), int(match[4]))
            here = [*dead_letters.find_undecodable(conn, Filter(worker=match[1]), place)]
        elif ":" in id:
            worker, event_id, target = (*id.split(":", 2), "")[:3]
            wanted = Filter(worker=worker, event_id=_uuid(event_id, "ID"), target=target)
            here = [*dead_letters.find(conn, wanted)]
        else:
            wanted = Filter(event_id=_uuid(id, "ID"))
            here = [] if relay else [*dead_letters.find(conn, wanted)]
            try:
                here = here or [*of_relay(wanted)]
            except Unavailable as error:
                if relay:
                    raise
                say(str(error))
        if not here:
            raise UnknownLetter(f"no dead letter {id}", hint="afluente dlq list")
        found += here
    return found[:limit]


def _divided(letters: list[AnyLetter]) -> tuple[list[Letter | Undecodable], list[RelayLetter]]:
    """Those of workers, and those of the relay."""
    from consumers.dead_letters import RelayLetter

    return (
        [letter for letter in letters if not isinstance(letter, RelayLetter)],
        [letter for letter in letters if isinstance(letter, RelayLetter)],
    )


def _agree(action: str, letters: list[AnyLetter], dry_run: bool, yes: bool) -> None:
    """Ask, with the count and the target. Nobody there to answer: exit 2, nothing done."""
    if dry_run or yes:
        return
    workers = sorted({letter.worker for letter in letters})
    organizations = _organizations(letters)
    question = (
        f"{action} {len(letters):,} dead letter{'s' if len(letters) > 1 else ''} of {', '.join(workers)}"
        f" in {organizations} organization{'s' if organizations != 1 else ''}?"
    )
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        say(f"{question} Nobody is there to answer: add --yes, or --dry-run to see them")
        raise typer.Exit(Exit.USAGE)
    if action == "discard" and len(letters) > 1:
        agreed = typer.prompt(f"{question} Type {workers[0]} to confirm", default="", err=True) == workers[0]
    else:
        agreed = typer.confirm(question, err=True)
    if not agreed:
        say("nothing done")
        raise typer.Exit(Exit.FAILED)


def _report(action: str, letters: list[AnyLetter], outcome: Outcome | None, reason: str, format: Format) -> None:
    failed = outcome.failed if outcome else []
    result = {
        "action": action,
        "applied": outcome is not None,
        "count": len(outcome.done) if outcome else len(letters),
        "organizations": _organizations(letters),
        "workers": sorted({letter.worker for letter in letters}),
        "reason": reason,
        "ids": outcome.done if outcome else [letter.id for letter in letters],
        "failed": failed,
    }
    show(result, format)
    if outcome is None:
        say("this was a dry run: nothing was done")
    elif failed:
        raise typer.Exit(Exit.PARTLY if outcome.done else Exit.FAILED)
    elif action == "retry":
        say("next: afluente dlq list" + " --relay" * (result["workers"] == ["relay"]))


def _organizations(letters: list[AnyLetter]) -> int:
    return len({organization for letter in letters if (organization := getattr(letter, "organization_id", None))})


def _row(letter: Letter | Undecodable) -> dict[str, Any]:
    from consumers.dead_letters import Letter

    event = isinstance(letter, Letter)
    return {
        "id": letter.id,
        "kind": "delivery" if event else "undecodable",
        "worker": letter.worker,
        "event_id": getattr(letter, "event_id", None),
        "target": getattr(letter, "target", None),
        "organization_id": getattr(letter, "organization_id", None),
        "event_type": getattr(letter, "event_type", None),
        "state": letter.state,
        "attempts": getattr(letter, "attempts", 0),
        "generation": getattr(letter, "generation", 0),
        "error_class": letter.error_class,
        "error": letter.error,
        "first_failure_at": getattr(letter, "first_failure_at", None),
        "dead_at": letter.dead_at,
        "origin": {
            "topic": letter.origin_topic if isinstance(letter, Letter) else letter.topic,
            "partition": letter.origin_partition if isinstance(letter, Letter) else letter.partition,
            "offset": letter.origin_offset if isinstance(letter, Letter) else letter.record_offset,
        },
        "dead_letter": {"partition": letter.dead_partition, "offset": letter.dead_offset},
    }


def _relay_row(letter: RelayLetter) -> dict[str, Any]:
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
        "error_class": letter.error_class,
        "error": letter.error,
        "first_failure_at": letter.first_failure_at,
        "dead_at": letter.dead_at,
        "origin": {"topic": letter.topic, "partition": letter.partition, "offset": letter.offset},
        "dead_letter": {"partition": letter.partition, "offset": letter.offset},
        "decision": letter.decision,
    }


def _short(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For a terminal: the error on one line, within reason."""
    return [row | {"error": " ".join(f"{row['error_class']}: {row['error']}".split())[:100]} for row in rows]
