"""Which dead letters a command is about: its filters, ids, and the question before something is done to them."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints
from uuid import UUID

import typer

from afluente.cli import who
from afluente.cli.exits import Exit
from afluente.cli.output import say
from afluente.errors import AfluenteError, Unavailable

if TYPE_CHECKING:
    from consumers.dead_letters import Filter, Letter, RelayLetter, Undecodable
    from consumers.dead_letters.sending import Pace

    AnyLetter = Letter | Undecodable | RelayLetter

MAX_LETTERS = 100_000  # held in memory, a kilobyte each
MAX_IDS = 10_000
MAX_TEXT = 1_000

Ids = Annotated[list[str] | None, typer.Argument(help="ids as listed, or event ids", metavar="[ID]...")]
All = Annotated[bool, typer.Option("--all", help="every dead letter there is")]
Limit = Annotated[int, typer.Option("--limit", min=1, max=MAX_LETTERS, help="at most so many")]
Rate = Annotated[float | None, typer.Option("--rate", min=0.01, max=100_000, help="letters a second at most")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="show what would be done, do nothing")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="do not ask")]
Reason = Annotated[str, typer.Option("--reason", help="why, for the audit log; required")]


class UnknownLetter(AfluenteError):
    """No dead letter of that id."""

    exit_status = Exit.FOUND


def _filters(
    worker: Annotated[str | None, typer.Option("--worker", help="only of this worker")] = None,
    event_type: Annotated[str | None, typer.Option("--event-type", help="only of events of this type")] = None,
    entity_kind: Annotated[
        str | None, typer.Option("--entity-kind", help="only of events about this kind of entity")
    ] = None,
    org: Annotated[
        str | None,
        typer.Option("--org", "--organization", help="only of this organization: its id, slug or name"),
    ] = None,
    error: Annotated[str | None, typer.Option("--error", help="only with this in the error's class or text")] = None,
    cause: Annotated[str | None, typer.Option("--cause", help="only of this cause: `afluente dlq causes`")] = None,
    since: Annotated[str | None, typer.Option("--since", help="dead since: ISO time, 2h, 3d, yesterday")] = None,
    until: Annotated[str | None, typer.Option("--until", help="dead before: the same")] = None,
    state: Annotated[
        list[str] | None,
        typer.Option(
            "--state",
            help="dead, needs_review, discarded, reprocessed; of the relay dead, requested, published, gone, discarded;"
            " repeatable",
        ),
    ] = None,
    relay: Annotated[bool, typer.Option("--relay", help="rows the relay could not publish, instead")] = False,
) -> None:
    """Only for its signature: the filters of all commands."""


@dataclass(frozen=True)
class Asked:
    """The filters as they were given."""

    worker: str | None = None
    event_type: str | None = None
    entity_kind: str | None = None
    org: str | None = None
    error: str | None = None
    cause: str | None = None
    since: str | None = None
    until: str | None = None
    state: list[str] | None = None
    relay: bool = False

    @property
    def of_relay(self) -> bool:
        from consumers.dead_letters import relay

        return self.relay or self.worker == relay.WORKER

    @property
    def is_narrow(self) -> bool:
        """Something is asked for."""
        return any(value for name, value in vars(self).items() if name != "relay")

    def filter(self, conn: Any, limit: int, states: tuple[str, ...] | None = None) -> Filter:
        """What the database is asked. `states`: those meant when none is given."""
        from consumers.dead_letters import DEAD, Filter
        from producers import organizations

        self._check()
        now = datetime.now(UTC)
        since, until = parse_time(self.since, now), parse_time(self.until, now)
        if since is not None and until is not None and until <= since:
            raise typer.BadParameter("--until is not after --since: there is nothing between them")
        return Filter(
            worker=None if self.of_relay else self.worker,
            event_type=self.event_type,
            entity_kind=self.entity_kind,
            organization_id=organizations.identify(conn, self.org) if self.org else None,
            error=self.error,
            cause=self.cause,
            since=since,
            until=until,
            states=tuple(self.state or states or DEAD),
            limit=limit,
        )

    def _check(self) -> None:
        """BadParameter for what cannot be, or would find nothing whatever there is."""
        from consumers import dead_letters

        for name, value in vars(self).items():
            if isinstance(value, str):
                checked_text(value, f"--{name.replace('_', '-')}")
        if self.relay and self.worker not in (None, dead_letters.relay.WORKER):
            raise typer.BadParameter(
                f"--relay is about the relay's dead letters: {self.worker} has none of them; leave one of the two out"
            )
        states = dead_letters.relay.ALL if self.of_relay else dead_letters.STATES
        for state in self.state or ():
            if state not in states:
                whose = "the relay's letters" if self.of_relay else "letters of workers (without --relay)"
                raise typer.BadParameter(f"--state {state[:40]}: {whose} are {', '.join(states)}")
        if self.cause is not None and re.fullmatch(r"c\d{1,4}-[0-9a-f]{12}", self.cause) is None:
            raise typer.BadParameter(f"--cause: {self.cause[:40]!r} is no cause; `afluente dlq causes` names them")


def filtered(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the filters; it gets them as `asked`."""
    filters = inspect.signature(_filters).parameters
    types = get_type_hints(command, include_extras=True) | get_type_hints(_filters, include_extras=True)
    own = [parameter for name, parameter in inspect.signature(command).parameters.items() if name != "asked"]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        command(asked=Asked(**{name: given.pop(name) for name in filters}), **given)

    arguments = [p.replace(annotation=types[p.name], kind=p.KEYWORD_ONLY) for p in [*own, *filters.values()]]
    arguments.sort(key=lambda p: p.name != "ids")
    del run.__wrapped__
    run.__signature__ = inspect.Signature(arguments)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in arguments}
    return run


def connect(autocommit: bool = False) -> Any:
    from afluente import postgres
    from afluente.settings import PostgresSettings

    settings = PostgresSettings.read(os.environ)
    return postgres.connect(settings.dsn, application_name="afluente dlq", autocommit=autocommit)


def choose(
    conn: Any, ids: list[str] | None, asked: Asked, all_: bool, limit: int, *, leave_reviews: bool = False
) -> list[AnyLetter]:
    """The letters named, or those that the filters find. Everything there is must be asked for with --all: every
    letter of workers, or with --relay of the relay. `leave_reviews`: those that need review are taken only by name or
    with --state."""
    from afluente.settings import KafkaSettings
    from consumers import dead_letters

    require_some(ids, asked, all_)
    if ids:
        return named(conn, ids, relay=asked.relay)[:limit]
    found: list[AnyLetter]
    if asked.of_relay:
        wanted = asked.filter(conn, limit, ("dead",))
        found = [*dead_letters.relay.find(conn, KafkaSettings.read(os.environ), wanted, states=wanted.states)]
    else:
        wanted = asked.filter(conn, limit, ("dead",) if leave_reviews else None)
        found = [*dead_letters.find(conn, wanted), *dead_letters.find_undecodable(conn, wanted)]
        found = found[:limit]
        if leave_reviews and not asked.state:
            _say_left(conn, wanted)
    if not found:
        say("no dead letter matches")
        raise typer.Exit(Exit.FOUND)
    return found


def require_some(ids: list[str] | None, asked: Asked, all_: bool) -> None:
    if ids and (asked.is_narrow or all_):
        raise typer.BadParameter("give ids or filters, not both")
    if not ids and not asked.is_narrow and not all_:
        raise typer.BadParameter("say which: ids, filters, or --all")


def _say_left(conn: Any, wanted: Filter) -> None:
    """Whether their call was made nobody knows: a bulk retry must not make it twice unseen."""
    from consumers import dead_letters

    if left := len(dead_letters.find(conn, replace(wanted, states=("needs_review",), limit=1000))):
        many = "1,000 or more" if left == 1000 else f"{left:,}"
        say(f"{many} more need review and are left out: look at them, then name them, or --state needs_review")


def named(conn: Any, ids: list[str], *, relay: bool = False, states: tuple[str, ...] | None = None) -> list[AnyLetter]:
    """A bare event id means the letters of workers; when there are none, or with `relay`, the relay's."""
    from afluente.settings import KafkaSettings
    from consumers import dead_letters
    from consumers.dead_letters import Filter

    def of_relay(wanted: Filter, place: tuple[int, int] | None = None) -> list[RelayLetter]:
        settings = KafkaSettings.read(os.environ)
        return dead_letters.relay.find(conn, settings, wanted, states=dead_letters.relay.ALL, place=place)

    if len(ids) > MAX_IDS:
        raise typer.BadParameter(f"at most {MAX_IDS:,} letters by their ids; filters take more")
    any_of = Filter(states=states or dead_letters.DEAD)
    found: list[AnyLetter] = []
    for id in ids:
        checked_text(id, "ID")
        here: list[AnyLetter]
        if match := re.fullmatch(r"relay@(.+)/(\d{1,9})/(\d{1,18})", id):
            here = [*of_relay(Filter(), (int(match[2]), int(match[3])))]
            here = [letter for letter in here if getattr(letter, "topic", None) == match[1]]
        elif match := re.fullmatch(r"([a-z0-9-]+)@(.+)/(\d{1,9})/(\d{1,18})", id):
            place = (match[2], int(match[3]), int(match[4]))
            here = [*dead_letters.find_undecodable(conn, replace(any_of, worker=match[1]), place)]
        elif ":" in id:
            worker, event_id, target = (*id.split(":", 2), "")[:3]
            wanted = replace(any_of, worker=worker, event_id=_uuid(event_id, "ID"), target=target)
            here = [*dead_letters.find(conn, wanted)]
        else:
            wanted = replace(any_of, event_id=_uuid(id, "ID"))
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
    return found


def divided(letters: list[AnyLetter]) -> tuple[list[Letter | Undecodable], list[RelayLetter]]:
    """Those of workers, and those of the relay."""
    from consumers.dead_letters import RelayLetter

    return (
        [letter for letter in letters if not isinstance(letter, RelayLetter)],
        [letter for letter in letters if isinstance(letter, RelayLetter)],
    )


def agree(action: str, letters: list[AnyLetter], yes: bool, reason: str) -> str:
    """Ask, with the count and the target, and for the reason when none is given. Returns the reason."""
    workers = sorted({letter.worker for letter in letters})
    organizations = organizations_of(letters)
    question = (
        f"{action} {len(letters):,} dead letter{'s' if len(letters) > 1 else ''} of {', '.join(workers)}"
        f" in {organizations} organization{'s' if organizations != 1 else ''}?"
    )
    return confirm(question, yes, reason, typed=workers[0] if action == "discard" and len(letters) > 1 else None)


def confirm(question: str, yes: bool, reason: str, *, typed: str | None = None) -> str:
    """Ask as `who.agree` does, and for the reason when none is given. Returns the reason."""
    who.agree(question, yes, typed=typed)
    if not yes and not reason.strip():
        reason = typer.prompt("why, for the audit log", err=True)
    return required_reason(reason)


def required_reason(reason: str) -> str:
    """BadParameter when none is given."""
    if not reason.strip():
        raise typer.BadParameter("--reason: say why, for the audit log")
    return checked_text(reason, "--reason")


def organizations_of(letters: list[AnyLetter]) -> int:
    return len({organization for letter in letters if (organization := getattr(letter, "organization_id", None))})


@contextmanager
def paced(words: str, total: int | None, rate: float | None) -> Iterator[Pace]:
    """Bulk work with its progress on stderr; SIGINT and SIGTERM end it between two batches. What breaks it off is
    raised with a word about what is done."""
    import math
    import threading

    from afluente.cli.progress import bar
    from afluente.signals import stopped_by_signals
    from consumers.dead_letters import Pace

    if rate is not None and not math.isfinite(rate):
        raise typer.BadParameter(f"--rate: {rate} is no number of letters a second")
    stop, behind = threading.Event(), 0

    def told(count: int) -> None:
        nonlocal behind
        behind = count
        advance(count)

    with bar(words, total, lines=True) as advance, stopped_by_signals(stop.set):
        try:
            yield Pace(rate, stop, told)
        except Exception:
            of_all = "" if total is None else f" of {total:,}"
            say(f"broken off after {behind:,}{of_all}; the same command again goes on with the rest")
            raise


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


def checked_text(text: str, option: str) -> str:
    """What a database takes; BadParameter for bytes that are no text, and for more than anybody types."""
    if len(text) > MAX_TEXT:
        raise typer.BadParameter(f"{option}: {len(text):,} characters, of at most {MAX_TEXT:,}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise typer.BadParameter(f"{option}: {text[:40]!r} is no text in UTF-8") from None
    return text


def _uuid(text: str, what: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise typer.BadParameter(f"{what}: {text!r} is not an id") from None
