"""The marks of what is parked, written for the poll thread in the order in which it asks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import orjson

import sql
from consumers.runtime.core import Core
from consumers.runtime.deliveries import Connection
from consumers.runtime.parking import Parked
from consumers.runtime.places import Place

Found: TypeAlias = list[tuple[bytes, int, int]]
"""Of one partition: (key, from which offset on, how many were passed over)."""


class Marks:
    """`loop` runs as long as the worker; the rest is the poll thread's to call, and returns at once."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._asked: asyncio.Queue[tuple[str, dict[str, Any], Callable[[], None] | None]] = asyncio.Queue()
        self._sql = sql.queries("parking")

    async def loop(self) -> None:
        while True:
            name, parameters, done = await self._asked.get()

            async def write(conn: Connection, name: str = name, parameters: dict[str, Any] = parameters) -> None:
                await conn.execute(self._sql[name], parameters)

            await self._core.transaction(write)
            if done is not None:
                done()

    def park(self, parked: Parked) -> None:
        self._core.say_soon(
            "worker.parked",
            topic=parked.topic,
            partition=parked.partition,
            organization_id=str(parked.organization_id),
            offset=parked.at,
        )
        self._ask("park", parked, lambda: self._core.poller.marked(parked), from_offset=parked.at)

    def move(self, parked: Parked, mark: int, passed_over: int) -> None:
        self._ask("move", parked, from_offset=mark, passed_over=passed_over)

    def unpark(self, parked: Parked) -> None:
        self._core.say_soon(
            "worker.unparked",
            topic=parked.topic,
            partition=parked.partition,
            organization_id=str(parked.organization_id),
        )
        self._ask("unpark", parked)

    def load(self, places: Sequence[Place]) -> None:
        """The marks of partitions that have just come: `Poller.found_marks` gets them."""
        self._core.call_soon(lambda: self._core.spawn(None, self._load(places)))

    async def _load(self, places: Sequence[Place]) -> None:
        found: dict[tuple[str, int], Found] = {}

        async def take(conn: Connection) -> None:
            found.clear()
            asked = orjson.dumps([{"topic": place.topic, "partition": place.partition} for place in places]).decode()
            cursor = await conn.execute(self._sql["take_marks"], self._ours | {"places": asked})
            for topic, partition, organization_id, at, passed_over in await cursor.fetchall():
                found.setdefault((topic, partition), []).append((str(organization_id).encode(), at, passed_over))

        await self._core.transaction(take)
        for place in places:
            self._core.poller.found_marks(place, found.get((place.topic, place.partition), []))

    @property
    def _ours(self) -> dict[str, Any]:
        return {"worker": self._core.name, "process": self._core.process}

    def _ask(self, name: str, parked: Parked, done: Callable[[], None] | None = None, **more: Any) -> None:
        parameters = self._ours | {
            "topic": parked.topic,
            "partition": parked.partition,
            "organization_id": parked.organization_id,
            **more,
        }
        self._core.call_soon(lambda: self._asked.put_nowait((name, parameters, done)))
