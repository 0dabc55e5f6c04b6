"""`afluente relay run`."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
from types import FrameType
from typing import Annotated

import typer

from afluente.cli.registry import use_registry

STOP_WITHIN_S = 9.0


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
