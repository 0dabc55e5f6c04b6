"""`afluente relay`: run the relay, and say how far it is."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
from datetime import UTC, datetime
from types import FrameType
from typing import Annotated, Any

import typer

from afluente.cli.output import Format, FormatOption, show
from afluente.cli.registry import use_registry

STOP_WITHIN_S = 9.0

app = typer.Typer(help="Publish committed events to Kafka.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def run(
    take_over: Annotated[
        bool, typer.Option("--take-over", help="do not wait for the owner: take the lane, and the owner ends")
    ] = False,
    log_records: Annotated[
        bool, typer.Option("--log-records", envvar="AFLUENTE_RELAY_LOG_RECORDS", help="one log line for each record")
    ] = False,
    chunk_rows: Annotated[
        int, typer.Option("--chunk-rows", min=1, max=50_000, help="rows in one Kafka transaction at most")
    ] = 2_500,
) -> None:
    """Publish what is committed to event_log, exactly once, until SIGTERM or SIGINT.

    A second instance stands by and takes over when the first one ends or is silent for 8 s. Exit status 3: another
    instance took over. Ends within 10 s of a signal.

    \b
    Examples:
      afluente relay run
      afluente relay run --take-over --log-records
    """
    from afluente.settings import RelaySettings
    from producers.relay.service import Options, Relay

    settings = RelaySettings.read(os.environ)
    use_registry(settings.kafka.topic_prefix, writes=True)
    # Chunks are small objects by the hundred thousand that form no cycles: looking for some took a fifth of the time.
    # Beyond what is ever in hand at once, it is looked for after all.
    gc.freeze()
    gc.set_threshold(500_000, 10, 10)
    options = Options(take_over=take_over, log_records=log_records, chunk_rows=chunk_rows)
    relay = Relay(settings.kafka, settings.postgres.dsn, options)

    def stop(number: int, frame: FrameType | None) -> None:
        relay.stop()
        # A client library that hangs must not hold the stop: the position in Kafka makes any end a clean one. Where it
        # hung is said.
        faulthandler.dump_traceback_later(STOP_WITHIN_S, exit=True)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    try:
        relay.run()
    finally:
        faulthandler.cancel_dump_traceback_later()


@app.command()
def status(format: FormatOption = Format.text) -> None:
    """Show the position, how many committed rows wait, who owns the lane, and how many rows are dead letters.

    JSON keys: lane, owner, owner_since, owner_silent_s, takeovers, lag_rows, lag_rows_at_least, lag_seconds, published,
    dead_lettered, number, written_at, written_by, position {s1, t1, s2, t2, last}, database, kafka_cluster.

    \b
    Examples:
      afluente relay status
      afluente relay status --format json
    """
    from afluente import kafka
    from afluente.settings import RelaySettings
    from producers.relay.service import look

    settings = RelaySettings.read(os.environ)
    # The admin client is silent: of a Kafka that is away there is one sentence, not the client's hundred lines.
    kafka.admin(settings.kafka).list_topics(timeout=kafka.METADATA_TIMEOUT_S)
    state = look(settings.kafka, settings.postgres.dsn)
    data: dict[str, Any] = {
        "lane": state.name,
        "owner": state.owner,
        "owner_since": state.owner_since,
        "owner_silent_s": None if state.owner_silent_s is None else round(state.owner_silent_s, 1),
        "takeovers": state.takeovers,
        "lag_rows": state.waiting.rows,
        "lag_rows_at_least": state.waiting.at_least,
        "lag_seconds": 0.0,
        "published": 0,
        "dead_lettered": 0,
        "number": None,
        "written_at": None,
        "written_by": None,
        "position": None,
        "database": None,
        "kafka_cluster": None,
    }
    if state.waiting.oldest is not None:
        data["lag_seconds"] = round((datetime.now(UTC) - state.waiting.oldest).total_seconds(), 3)
    if (position := state.position) is not None:
        entry = position.entries[0]
        place: dict[str, Any] = {"s1": str(entry.s1), "t1": entry.t1}
        if entry.window is not None:
            place |= {"s2": str(entry.window.s2), "t2": entry.window.t2, "last": entry.window.last}
        data |= {
            "published": position.published,
            "dead_lettered": position.dead_lettered,
            "number": position.number,
            "written_at": position.written_at,
            "written_by": position.instance,
            "position": place,
            "database": position.identity.database.name,
            "kafka_cluster": position.identity.kafka.cluster_id,
        }
    show(data, format)
