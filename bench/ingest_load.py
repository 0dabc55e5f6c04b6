"""The load generator, a process of its own: so many connections, each sends its next request when it has its answer.

Requests are whole bytes, made before the clock runs. It reads answers as far as their status and sends nothing twice.
Says {"event": "load.warm"} once the warm-up is answered, and {"event": "load.done", ...} at the end.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httptools
import uvloop


@dataclass
class Load:
    """What is sent and what came of it."""

    requests: list[bytes]
    next: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    latencies_s: list[float] = field(default_factory=list)
    lost: int = 0


class Sender(asyncio.Protocol):
    """One connection."""

    def __init__(self, load: Load, done: asyncio.Future[None]) -> None:
        self._load, self._done = load, done
        self._began = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        self._load.latencies_s.append(time.perf_counter() - self._began)
        self._load.statuses[self._parser.get_status_code()] += 1
        self._send()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._load.lost += 1
            self._done.set_result(None)

    def _send(self) -> None:
        load = self._load
        if load.next == len(load.requests):
            if not self._done.done():
                self._done.set_result(None)
            self._transport.close()
            return
        request = load.requests[load.next]
        load.next += 1
        self._parser = httptools.HttpResponseParser(self)
        self._began = time.perf_counter()
        self._transport.write(request)


async def send(host: str, port: int, requests: list[bytes], connections: int) -> tuple[Load, float]:
    """All requests; returns what came and the seconds it took."""
    loop = asyncio.get_running_loop()
    load = Load(requests)
    ends: list[asyncio.Future[None]] = [loop.create_future() for _ in range(connections)]
    began = time.perf_counter()
    for end in ends:
        await loop.create_connection(lambda end=end: Sender(load, end), host, port)  # type: ignore[misc]
    await asyncio.gather(*ends)
    return load, time.perf_counter() - began


async def run(host: str, port: int, path: Path, connections: int, warm_up: int) -> dict[str, Any]:
    # Our own file, written a moment ago by the bench that started this process.
    requests = pickle.loads(path.read_bytes())
    warm, _ = await send(host, port, requests[:warm_up], connections)
    print(json.dumps({"event": "load.warm"}), flush=True)
    load, seconds = await send(host, port, requests[warm_up:], connections)
    times = sorted(load.latencies_s)
    return {
        "event": "load.done",
        "seconds": seconds,
        "answered": len(times),
        "statuses": dict(warm.statuses + load.statuses),
        "lost": warm.lost + load.lost,
        "p50_ms": times[len(times) // 2] * 1000,
        "p99_ms": times[int(len(times) * 0.99)] * 1000,
        "max_ms": times[-1] * 1000,
    }


def main() -> None:
    host, port, path, connections, warm_up = sys.argv[1:]
    print(json.dumps(uvloop.run(run(host, int(port), Path(path), int(connections), int(warm_up)))), flush=True)


if __name__ == "__main__":
    main()
