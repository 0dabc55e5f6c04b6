"""`afluente bench`: measure on this machine, beside what people would pick instead."""

from __future__ import annotations

import os
import signal
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from afluente.cli.exits import Exit
from afluente.cli.output import Format, FormatOption, say, show

if TYPE_CHECKING:
    from bench.report import Result

app = typer.Typer(
    help="Measure on this machine, beside other ways to do it.", no_args_is_help=True, rich_markup_mode=None
)

RunsOption = Annotated[int, typer.Option("--runs", min=1, help="of each measurement; the median counts")]
StateDirOption = Annotated[Path, typer.Option("--state-dir", help="where its servers and logs are while it runs")]
KeepOption = Annotated[bool, typer.Option("--keep", help="leave the data and logs there")]
ReportOption = Annotated[Path | None, typer.Option("--report", help="also write everything to this file as Markdown")]

Word = TypeVar("Word", bound=StrEnum)


@app.callback()
def _group() -> None:
    """Measure on this machine, beside other ways to do it."""


@app.command()
def relay(
    against: Annotated[
        list[str] | None, typer.Option("--against", metavar="raw|debezium|all", help="also measure these; repeat it")
    ] = None,
    part: Annotated[
        list[str] | None,
        typer.Option(
            "--part", metavar="drain|latency|emission|poll|memory", help="only these; memory is never by itself"
        ),
    ] = None,
    rows: Annotated[int, typer.Option("--rows", min=1_000, help="rows to drain")] = 200_000,
    runs: RunsOption = 3,
    seconds: Annotated[float, typer.Option("--seconds", min=2, help="of each latency and emission run")] = 15.0,
    backlog_rows: Annotated[int, typer.Option("--backlog-rows", min=1_000, help="of the part memory")] = 5_000_000,
    state_dir: StateDirOption = Path(".afluente/bench"),
    keep: KeepOption = False,
    report: ReportOption = None,
    format: FormatOption = Format.text,
) -> None:
    """Measure the relay: drain, delay, what it costs the writers, an empty poll.

    On a broker and a Postgres of its own. Checks what every peer has written and fails when one did less than the work.
    Debezium's jars come by Maven. JSON keys: bench, machine, versions, settings, figures {flat}, runs {by part},
    began_at, took_s.

    \b
    Examples:
      afluente bench relay --rows 20000 --runs 1
      afluente bench relay --against raw --against debezium --format json
    """
    from bench import relay as bench

    peers = tuple(bench.Against) if "all" in (against or ()) else _chosen(bench.Against, against, "--against")
    parts = _chosen(bench.Part, part, "--part") or bench.DEFAULT_PARTS
    plan = bench.Plan(
        folder=state_dir.absolute() / str(os.getpid()),
        rows=rows - rows % 10,
        runs=runs,
        parts=parts,
        against=peers,
        seconds=seconds,
        backlog_rows=backlog_rows,
        keep=keep,
    )
    _end_with_it()
    _tell(bench.run(plan, dict(os.environ), say), report, format)


@app.command()
def worker(
    against: Annotated[
        list[str] | None,
        typer.Option("--against", metavar="none|loop|faststream|spring|parallel|all", help="also measure; repeat it"),
    ] = None,
    part: Annotated[
        list[str] | None,
        typer.Option("--part", metavar="transactional|external|bad-record|memory|fairness|retry", help="only these"),
    ] = None,
    events: Annotated[int, typer.Option("--events", min=1_000, help="of the transactional part")] = 100_000,
    runs: RunsOption = 3,
    behind: Annotated[
        list[int] | None,
        typer.Option(
            "--behind", min=1, help="fairness: events of one organization before another's; [default: 50000 1000000]"
        ),
    ] = None,
    big_records: Annotated[int, typer.Option("--big-records", min=10, help="memory: records of 100 kB")] = 3_000,
    failures: Annotated[int, typer.Option("--failures", min=100, help="retry: events that fail at once")] = 10_000,
    state_dir: StateDirOption = Path(".afluente/bench"),
    keep: KeepOption = False,
    report: ReportOption = None,
    format: FormatOption = Format.text,
) -> None:
    """Measure workers: in transactions, with outside calls, with a bad record, memory, fairness, retries.

    On a broker and a Postgres of its own. Checks the effects of every peer and fails when one did less than the work.
    Peers come by Maven (a JDK is needed) and pip, once. JSON keys: bench, machine, versions, settings, figures {flat},
    runs {by part}, began_at, took_s.

    \b
    Examples:
      afluente bench worker --events 5000 --runs 1 --behind 5000
      afluente bench worker --against all --format json
    """
    from bench import worker as bench

    words = against or ["none"]
    if "none" in words and len(words) > 1:
        raise typer.BadParameter("none goes with no other", param_hint="--against")
    peers: tuple[bench.Against, ...] = ()
    if "all" in words:
        peers = tuple(bench.Against)
    elif words != ["none"]:
        peers = _chosen(bench.Against, words, "--against")
    plan = bench.Plan(
        folder=state_dir.absolute() / str(os.getpid()),
        events=events,
        runs=runs,
        parts=_chosen(bench.Part, part, "--part") or tuple(bench.Part),
        against=peers,
        big_records=big_records,
        behind=tuple(behind or bench.Plan.behind),
        failures=failures,
        keep=keep,
    )
    _end_with_it()
    _tell(bench.run(plan, dict(os.environ), say), report, format)


@app.command()
def load(
    rate: Annotated[int, typer.Option("--rate", min=60, help="events a minute")] = 10_000,
    minutes: Annotated[float, typer.Option("--minutes", min=0.05, help="for so long")] = 10.0,
    max_lag_s: Annotated[float, typer.Option("--max-lag-s", min=1, help="more than this is too much")] = 30.0,
    state_dir: StateDirOption = Path(".afluente/bench"),
    keep: KeepOption = False,
    report: ReportOption = None,
    format: FormatOption = Format.text,
) -> None:
    """Emit at a steady rate, publish, and let three workers keep up; shows their lag meanwhile.

    On a broker and a Postgres of its own, each command a process. Exit status 3: a worker's lag was over the limit, or
    an event had no effect, or two. JSON keys: bench, machine, versions, settings, figures {flat}, runs {workers, lag},
    began_at, took_s.

    \b
    Examples:
      afluente bench load
      afluente bench load --rate 10000 --minutes 1 --format json
    """
    from bench import load as bench

    plan = bench.Plan(state_dir.absolute() / str(os.getpid()), rate, minutes, max_lag_s, keep)
    _end_with_it()
    result = bench.run(plan, dict(os.environ), say)
    _tell(result, report, format)
    if not bench.is_well(plan, result.figures):
        raise typer.Exit(Exit.FOUND)


@app.command()
def ingest(
    part: Annotated[
        list[str] | None,
        typer.Option("--part", metavar="receiver|normalise|worker|import", help="only these; repeat it"),
    ] = None,
    posts: Annotated[int, typer.Option("--posts", min=100, help="of each receiver run")] = 10_000,
    connections: Annotated[int, typer.Option("--connections", min=1, max=256, help="that post at once")] = 32,
    deliveries: Annotated[int, typer.Option("--deliveries", min=100, help="for the normalise worker")] = 2_000,
    rows: Annotated[int, typer.Option("--rows", min=1_000, help="contact events to import")] = 1_000_000,
    runs: RunsOption = 3,
    state_dir: StateDirOption = Path(".afluente/bench"),
    keep: KeepOption = False,
    report: ReportOption = None,
    format: FormatOption = Format.text,
) -> None:
    """Measure ingest: the receiver beside a bare endpoint, normalising, the normalise worker, imports beside COPY.

    On a Postgres of its own, and a broker for the worker; endpoint and load generator are processes. Counts every row
    and fails when one side did less than the work. JSON keys: bench, machine, versions, settings, figures {flat}, runs
    {by part}, began_at, took_s.

    \b
    Examples:
      afluente bench ingest --part receiver --posts 2000 --runs 1
      afluente bench ingest --format json
    """
    from bench import ingest as bench

    plan = bench.Plan(
        folder=state_dir.absolute() / str(os.getpid()),
        posts=posts,
        connections=connections,
        deliveries=deliveries,
        rows=rows,
        runs=runs,
        parts=_chosen(bench.Part, part, "--part") or tuple(bench.Part),
        keep=keep,
    )
    _end_with_it()
    _tell(bench.run(plan, dict(os.environ), say), report, format)


def _tell(result: Result, report: Path | None, format: Format) -> None:
    from bench.report import judged, markdown

    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(markdown(result))
    if format is not Format.text:
        show(asdict(result), format)
        return
    for name, found in result.runs.items():
        print(f"{name}:")
        show(found)
        print()
    show(judged(result.figures, result.bench))
    print("\n" + ", ".join(f"{name} {value}" for name, value in {**result.machine, **result.versions}.items()))


def _end_with_it() -> None:
    """Its servers must not outlive it, however it is ended; one started with `&` in a script would not hear SIGINT."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _chosen(kind: type[Word], words: list[str] | None, option: str) -> tuple[Word, ...]:
    try:
        return tuple(kind(word) for word in words or ())
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
