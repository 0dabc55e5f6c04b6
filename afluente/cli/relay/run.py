"""`afluente relay run`."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from afluente import memory
from afluente.cli.registry import use_registry
from afluente.cli.relay.supervise import Lanes, stop_with_supervisor
from afluente.errors import Refused
from afluente.signals import STOPPING, stopped_by_signals

if TYPE_CHECKING:
    from afluente.settings import RelaySettings
    from producers.relay.service import Options, Relay

STOP_WITHIN_S = 9.0
AGAIN_AFTER_S = 1.0


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
    lanes: Annotated[
        int | None,
        typer.Option("--lanes", min=1, max=64, help="so many, each a process; default: as many as there are"),
    ] = None,
    lane: Annotated[
        int | None, typer.Option("--lane", min=0, max=63, help="only this one, counted from 0, in this process")
    ] = None,
    supervised: Annotated[int | None, typer.Option("--supervised", min=2, hidden=True)] = None,  # one of so many
) -> None:
    """Publish what is committed to event_log, exactly once, until SIGTERM or SIGINT.

    A second instance stands by and takes over when the first one ends or is silent for 8 s. Exit status 3: another
    instance took over. Ends within 10 s of a signal.

    The organizations are divided among lanes, one unless told otherwise. `--lanes N` makes it N lanes when there is
    another number of them and no relay is running (`afluente relay lanes N` does it under running ones), and runs them
    all. To spread them over machines, give each process one of them by `--lane`: exit status 75 says that the number of
    lanes has changed. With several lanes here, AFLUENTE_METRICS is the port before that of lane 0.

    \b
    Examples:
      afluente relay run
      afluente relay run --take-over --log-records
      afluente relay run --lanes 4
    """
    from afluente.settings import RelaySettings
    from producers.relay.service import Options

    memory.use_few_heaps()
    if lane is not None and lanes is not None:
        raise typer.BadParameter("give --lanes or --lane, not both")
    settings = RelaySettings.read(os.environ)
    process = _Process(settings, Options(take_over=take_over, log_records=log_records, chunk_rows=chunk_rows))
    signals = STOPPING
    if supervised is not None:
        # Ctrl-C reaches the whole group; the supervisor says when to end.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signals = (signal.SIGTERM,)
        stop_with_supervisor(process.stop)
    with stopped_by_signals(process.stop, signals):
        try:
            if lane is not None:
                process.run_lane(lane, of=supervised)
            else:
                process.run_all(lanes)
        finally:
            faulthandler.cancel_dump_traceback_later()


class _Process:
    """This process, whichever relays it makes in its time."""

    def __init__(self, settings: RelaySettings, options: Options) -> None:
        self._settings, self._options = settings, options
        self._stop = threading.Event()
        self._relay: Relay | None = None
        self._serving = False

    def stop(self) -> None:
        self._stop.set()
        if (relay := self._relay) is not None:
            relay.stop()
            # A client library that hangs must not hold the stop: the position in Kafka makes any end a clean one. Where
            # it hung is said.
            faulthandler.dump_traceback_later(STOP_WITHIN_S, exit=True)

    def run_lane(self, lane: int, *, of: int | None = None) -> None:
        from producers.relay.service import Relay

        use_registry(self._settings.kafka.topic_prefix, writes=True)
        memory.expect_no_cycles(500_000)
        options = replace(self._options, numbers=self._serve_metrics())
        self._relay = Relay(self._settings.kafka, self._settings.postgres.dsn, options, lane=lane, lanes=of)
        if not self._stop.is_set():
            self._relay.run()

    def _serve_metrics(self) -> bool:
        """Listen where the settings say, once in this process; False when they say nothing."""
        from afluente.telemetry import get_logger, metrics

        if (address := self._settings.metrics.address) is None:
            return False
        if not self._serving:
            try:
                port = metrics.serve(*address)
            except OSError as error:
                raise Refused(f"AFLUENTE_METRICS={self._settings.metrics.listen}: {error}") from error
            get_logger(__name__).info("process.metrics", address=address[0], port=port)
            self._serving = True
        return True

    def run_all(self, lanes: int | None) -> None:
        """All lanes, however many there come to be. A lane that is alone needs no process of its own."""
        from afluente.errors import AfluenteError
        from producers.relay.errors import LanesChanged

        while (found := self._settle(lanes)) is not None:
            if found == 1:
                try:
                    return self.run_lane(0, of=1)
                except LanesChanged as changed:
                    if lanes not in (None, changed.lanes):
                        raise
            else:
                status = Lanes(found, self._arguments(), os.environ).watch(self._stop)
                if status != LanesChanged.exit_status or lanes is not None:
                    raise typer.Exit(status)
            lanes = None
        if not self._stop.is_set():
            raise AfluenteError("the number of lanes is not known")

    def _settle(self, lanes: int | None) -> int | None:
        """How many lanes there are, having made it so many as asked for; None when stopped first."""
        from afluente import postgres
        from afluente.clock import SystemClock
        from afluente.errors import AfluenteError
        from afluente.telemetry import get_logger, heartbeat
        from producers.relay.lanes import settle_lanes
        from producers.relay.service import instance_name

        while not self._stop.is_set():
            heartbeat.beat()
            try:
                return settle_lanes(
                    self._settings.kafka,
                    self._settings.postgres.dsn,
                    lanes,
                    instance=instance_name(),
                    clock=SystemClock(),
                    heartbeat=heartbeat.beat,
                ).lanes
            except AfluenteError:
                raise
            except Exception as error:  # Kafka or Postgres is away
                if postgres.refuses_login(error):
                    raise
                words = f"{type(error).__name__}: {str(error).strip()}"
                get_logger(__name__).warning("relay.servers_away", error=words, again_in_s=AGAIN_AFTER_S)
                self._stop.wait(AGAIN_AFTER_S)
        return None

    def _arguments(self) -> list[str]:
        options = self._options
        flags = [("--take-over", options.take_over), ("--log-records", options.log_records)]
        return [*(flag for flag, wanted in flags if wanted), "--chunk-rows", str(options.chunk_rows)]
