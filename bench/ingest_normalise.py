"""How many payloads the normalisers read in a second: pure functions, in this process, by its CPU time.

Over the deliveries of the demo's senders, bytes in and facts out, but for those that only say where to look. Beside it
json.loads of the same bytes: reading them at all, without exact decimals and without asking what they mean.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from afluente.local import senders
from bench.errors import BenchError
from producers.ingest.normalize import needs_fetch, normalize
from producers.ingest.normalize.facts import Context
from producers.ingest.sources import registered

ACCOUNTS = {
    "shopify": "loja.myshopify.com",
    "stripe": "",
    "nuvemshop": "1679854",
    "whatsapp": "106540352249002",
}


@dataclass(frozen=True)
class Payload:
    """One delivery as the worker gets it."""

    source: str
    body: bytes
    headers: Mapping[str, str]
    context: Context


@dataclass(frozen=True)
class Run:
    """One run of both over the same payloads, `times` times."""

    payloads: int
    times: int
    mean_bytes: float
    normalise_per_s: float
    json_loads_per_s: float

    def as_row(self) -> dict[str, Any]:
        return {name: round(value) if isinstance(value, float) else value for name, value in asdict(self).items()}


def payloads() -> list[Payload]:
    channels = [senders.Channel(source, "http://x/", "secret", "", account) for source, account in ACCOUNTS.items()]
    now = datetime.now(UTC)
    found = []
    for post in senders.story(channels, now):
        headers = {name.lower(): value for name, value in post.headers.items()}
        for part in registered()[post.channel.source].route(post.body, headers, None):
            if post.expect_status == 200 and not needs_fetch(post.channel.source, part.topic):
                body = part.body or post.body
                found.append(Payload(post.channel.source, body, headers, Context(part.topic, now)))
    return found


def measure(times: int) -> Run:
    """BenchError when the payloads are not what they are taken for."""
    given = payloads()
    outcomes = [normalize(item.source, item.body, item.headers, item.context).status for item in given]
    if {item.source for item in given} != set(ACCOUNTS) or outcomes.count("processed") < len(given) * 0.8:
        raise BenchError(f"{outcomes.count('processed')} of {len(given)} payloads are processed")

    def ours() -> None:
        for item in given:
            normalize(item.source, item.body, item.headers, item.context)

    def limit() -> None:
        for item in given:
            json.loads(item.body)

    ours()
    limit()
    return Run(
        payloads=len(given),
        times=times,
        mean_bytes=sum(len(item.body) for item in given) / len(given),
        normalise_per_s=len(given) / _seconds(ours, times),
        json_loads_per_s=len(given) / _seconds(limit, times),
    )


def _seconds(run: Callable[[], None], times: int) -> float:
    began = time.process_time()
    for _ in range(times):
        run()
    return (time.process_time() - began) / times
