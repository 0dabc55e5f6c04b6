"""Runs the Faust app as a process: starts it, stops it within a deadline, and ends at once when it cannot go on.

Exit statuses: 0 stopped by a signal, 70 an error nobody can wait out (or the partitions are another's), 71 work
waiting and no progress. The process always ends by `os._exit`: Faust's own stop can wait for ever, and the fences in
Postgres make any end safe.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from confluent_kafka import KafkaError, KafkaException, TopicCollection

import sql
from afluente import kafka as clients
from afluente import postgres, telemetry
from afluente.errors import Unavailable
from afluente.settings import KafkaSettings
from afluente.signals import stopped_by_signals
from streams import app as faust_app
from streams.consumer import Folding
from streams.errors import Unfit
from streams.summaries.sink import Sink
from streams.watchdog import PATIENCE_S, Watchdog

STOP_WITHIN_S = 10.0
FAILED = 70
TOPIC_TIMEOUT_S = 10.0

log = telemetry.get_logger(__name__)


def run(
    kafka: KafkaSettings,
    database_url: str,
    *,
    topic: str,
    partitions: int,
    member_id: str,
    web_port: int | None = None,
    patience_s: float = PATIENCE_S,
) -> None:
    """Fold `topic` into the summaries until a signal comes. Does not return: the process ends.

    Unfit or Unavailable before anything is started when the set-up is not one to run with.
    """
    topic_id = check_topic(kafka, topic, partitions)
    check_database(database_url)
    abandon = threading.Event()
    sink = Sink(
        database_url,
        topic_ids={topic: topic_id},
        application_name=f"{faust_app.APP_ID}/{member_id}",
        abandon=abandon,
    )
    folding = Folding(sink=sink, topic=topic, exit=end, abandon=abandon)
    app = faust_app.build(kafka, folding, member_id=member_id, web_port=web_port)
    watchdog = Watchdog(
        waiting=lambda: folding.behind() + folding.in_hand,
        progress=lambda: folding.moves,
        exit=end,
        patience_s=patience_s,
    )
    with stop_on_signals(app.loop) as stop:
        watchdog.start()
        app.loop.run_until_complete(_serve(app, stop))


def check_topic(kafka: KafkaSettings, topic: str, partitions: int) -> str:
    """Kafka's id of the topic. Unfit when it is not there, or has another number of partitions than declared."""
    admin = clients.admin(kafka)
    try:
        futures = admin.describe_topics(TopicCollection([topic]), request_timeout=TOPIC_TIMEOUT_S)
        found = futures[topic].result(TOPIC_TIMEOUT_S + 1)
    except KafkaException as error:
        if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            raise Unfit(f"topic {topic} does not exist", hint="afluente topics apply") from error
        raise Unavailable(f"Kafka does not answer: {error.args[0].str()}", hint="afluente doctor") from error
    if len(found.partitions) != partitions:
        raise Unfit(
            f"topic {topic} has {len(found.partitions)} partitions, but {partitions} are declared: "
            "organizations would not be where they are looked for",
            hint="afluente topics plan",
        )
    return str(found.topic_id)


def check_database(database_url: str) -> None:
    """Unfit, or psycopg's UndefinedTable, when the summaries' tables are not there.

    A server that is away is waited for later.
    """
    try:
        with postgres.connect(database_url, application_name=faust_app.APP_ID, autocommit=True) as conn:
            live = conn.execute(sql.queries("summaries")["live_generation"]).fetchone()
    except psycopg.OperationalError as error:
        log.warning("stream.retrying", error=str(error).strip())
        return
    if live is None:
        raise Unfit("no generation of the summaries is live", hint="afluente migrate status")


@contextmanager
def stop_on_signals(loop: asyncio.AbstractEventLoop, within_s: float = STOP_WITHIN_S) -> Iterator[asyncio.Event]:
    """An event that SIGTERM and SIGINT set. `within_s` after the signal the process ends, whatever it is doing."""
    stop = asyncio.Event()

    def begin_to_stop() -> None:
        # Armed first: the event loop may be what hangs.
        deadline = threading.Timer(within_s, end, (0, f"not stopped within {within_s:g} s"))
        deadline.daemon = True
        deadline.start()
        log.info("process.stopping")
        loop.call_soon_threadsafe(stop.set)

    with stopped_by_signals(begin_to_stop):
        yield stop


def end(status: int, reason: str) -> None:
    """End the process now."""
    if status:
        log.error("process.failed", status=status, error=reason)
    else:
        log.info("stream.stopped", reason=reason)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


async def _serve(app: Any, stop: asyncio.Event) -> None:
    stopped = asyncio.ensure_future(stop.wait())
    # start() returns when the first assignment is complete, which may be never.
    started = asyncio.ensure_future(app.start())
    crashed = asyncio.ensure_future(app._crashed.wait())
    try:
        await asyncio.wait({stopped, started, crashed}, return_when=asyncio.FIRST_COMPLETED)
        if not stopped.done() and not crashed.done():
            await started
            await asyncio.wait({stopped, crashed}, return_when=asyncio.FIRST_COMPLETED)
    except Exception as error:
        log.exception("process.failed", error=f"{type(error).__name__}: {error}")
        end(FAILED, f"{type(error).__name__}: {error}")
    if not stopped.done():
        reason = app.crash_reason
        log.error("process.failed", error=repr(reason), exc_info=reason)
        end(FAILED, f"Faust crashed: {reason!r}")
    await app.stop()
    # What is being written is given up, and taken up by whoever has the partitions next.
    app.folding.sink.interrupt()
    app.folding.executor.shutdown(wait=True)
    app.folding.sink.close()
    end(0, "stopped by a signal")
