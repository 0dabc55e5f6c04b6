"""What is kept in Postgres comes back when it is due; this process says that it lives, and takes over from the dead."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psycopg
from psycopg_pool import PoolClosed, PoolTimeout

import schemas
from consumers.runtime import control, records
from consumers.runtime.control import Pause
from consumers.runtime.core import Core
from consumers.runtime.deliveries import Connection
from consumers.runtime.judging import kind
from consumers.runtime.outgoing import RecordRefused
from consumers.runtime.records import Record

_KEEPER_S = 1.0


class Keeping:
    """`loop`, `look_loop` and `renew_loop` run as long as the worker."""

    def __init__(self, core: Core, resumed: Callable[[], None]) -> None:
        """`resumed` is called when a pause has ended."""
        self._core = core
        self._resumed = resumed
        self._pause_said_at = 0.0

    async def register(self, conn: Connection) -> None:
        await self._core.deliveries.register(conn, self._core.worker.event_types)
        await self._core.deliveries.renew(conn, socket.gethostname(), os.getpid())
        self._obey(await control.look(conn, self._core.name))

    async def look_loop(self) -> None:
        """Every second: is the worker paused? And, now and then, a word about what was done."""
        while True:
            now_s = time.monotonic()
            self._core.figures.turn(now_s)
            self.say_done()
            await asyncio.sleep(control.LOOK_EVERY_S)
            try:
                async with asyncio.timeout(control.LOOK_WITHIN_S), self._core.connection() as conn:
                    pause = await control.look(conn, self._core.name)
            except (TimeoutError, psycopg.Error, PoolTimeout, PoolClosed):
                continue  # what was seen last holds
            self._obey(pause)

    def say_done(self, *, last: bool = False) -> None:
        if not self._core.says_each and (done := self._core.figures.said(time.monotonic(), last=last)) is not None:
            self._core.report("worker.delivered", **done)

    def _obey(self, pause: Pause | None) -> None:
        before, self._core.paused = self._core.paused, pause
        now_s = time.monotonic()
        if pause is not None and (pause != before or now_s - self._pause_said_at >= control.SAY_EVERY_S):
            self._pause_said_at = now_s
            self._core.say(
                "worker.paused", level="warning", by=pause.by, since=pause.since.isoformat(), reason=pause.reason
            )
        elif pause is None and before is not None:
            self._core.say("worker.resumed")
            self._resumed()

    async def loop(self) -> None:
        while True:
            try:
                async with asyncio.timeout(_KEEPER_S):
                    await self._core.keep_work.wait()
            except TimeoutError:
                pass
            self._core.keep_work.clear()
            # Not into a topic while paused: its records expire, what is kept here does not.
            while self._core.may_begin and await self._produce_due():
                pass

    async def _produce_due(self) -> int:
        """Due deliveries whose bytes are kept go to retry.now; they stay locked until the broker has them."""
        produced = 0

        async def work(conn: Connection) -> None:
            nonlocal produced
            rows = await self._core.deliveries.due_kept(conn, self._core.clock.now(), 200)
            produced = len(rows)
            if not rows:
                return
            letters = await asyncio.gather(*(self._produce_kept(row) for row in rows))
            places = [(row[0], row[1], row[2]) for row in rows]
            produced_at = [place for place, letter in zip(places, letters, strict=True) if letter is None]
            await self._core.deliveries.no_longer_kept(conn, produced_at)
            for place, letter in zip(places, letters, strict=True):
                if letter is not None:
                    await self._core.deliveries.bury_kept(conn, place, *letter, self._core.clock.now())

        await self._core.transaction(work)
        return produced

    async def _produce_kept(self, row: tuple[Any, ...]) -> tuple[str, str, tuple[int, int]] | None:
        """Back to retry.now. What that topic refuses becomes a dead letter: (error class, error, where it is)."""
        (_, event_id, target, _, attempts, generation, due, key, value, kept_headers, first_failure_at, *rest) = row
        error_class, error, origin_topic, origin_partition, origin_offset = rest
        topic = self._core.topics.retry(self._core.name, "now")
        record = Record(
            "event_log", 0, 0, 0, bytes(key), bytes(value), records.headers_from_json(kept_headers), ours=True
        )
        origin = records.origin_of(record)
        if origin_topic is not None:
            origin = records.Origin(origin_topic, origin_partition, origin_offset, origin.timestamp_ms)
        marked = partial(
            records.marked_headers,
            record.headers,
            worker=self._core.name,
            origin=origin,
            event_id=event_id,
            target=target,
            generation=generation,
            first_failure=first_failure_at,
        )
        try:
            headers = marked(attempt=attempts + 1, due=due, error_class=error_class, error=error)
            await self._core.outgoing.retry(topic, record, headers)
            return None
        except RecordRefused as refused:
            headers = marked(attempt=max(attempts, 1), error_class=kind(refused), error=str(refused))
            dead = await self._core.outgoing.dead_letter(
                self._core.topics.dead_letter(self._core.name), record, headers
            )
            return kind(refused), str(refused), dead

    async def renew_loop(self) -> None:
        """Say that this process lives; take over what those that do not have left."""
        while True:
            await asyncio.sleep(self._core.options.renew_s)
            await self._core.transaction(
                lambda conn: self._core.deliveries.renew(conn, socket.gethostname(), os.getpid())
            )
            if self._core.external:
                await self._core.transaction(self._reap)

    async def _reap(self, conn: Connection) -> None:
        for row in await self._core.deliveries.orphaned(conn, 100):
            (
                created_at,
                event_id,
                target,
                claimed_by,
                seq,
                organization_id,
                event_type,
                entity_kind,
                entity_id,
                payload,
                metadata,
            ) = row
            if seq is None:
                continue  # not from event_log: its record comes again to whoever has its partition
            event_row = schemas.Row(
                seq,
                event_id,
                organization_id,
                event_type,
                entity_kind,
                entity_id,
                payload.encode(),
                metadata.encode(),
                created_at,
            )
            try:
                value = schemas.encode(event_row)
            except schemas.SchemaError as error:
                self._core.say(
                    "worker.claim_stuck", level="error", event_id=str(event_id), target=target, error=str(error)
                )
                continue
            await self._core.deliveries.take_over(
                conn,
                (created_at, event_id, target),
                str(organization_id).encode(),
                value,
                [(name, value) for name, value in schemas.headers(event_row)],
                self._core.clock.now(),
            )
            self._core.say(
                "worker.claim_taken_over",
                level="warning",
                event_id=str(event_id),
                target=target,
                process=str(claimed_by),
            )
            self._core.keep_work.set()
