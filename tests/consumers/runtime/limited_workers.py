"""External workers with a rate, with breakers, and with calls that must not be made twice; also run by the real command
as `tests.consumers.runtime.limited_workers:Class`."""

import asyncio
import os
import time
from pathlib import Path

from consumers import Breaker, ExternalWorker, NotMade, Policy, Rate, Unknown
from tests.consumers.runtime.workers import RECEIVED, write_effect


def note(variable, text):
    """A line in a file that a crash cannot take back."""
    if path := os.environ.get(variable):
        with open(path, "a") as lines:
            lines.write(f"{text}\n")


class Metered(ExternalWorker):
    """Notes when it calls, and for whom; a body of "fail" fails at its first attempt."""

    name = "metered-worker"
    event_types = RECEIVED
    policy = Policy(rate=Rate(20, 1.0), timeout_s=5)
    calls: list[tuple[float, str, str]]

    def __init__(self):
        self.calls = []

    async def call(self, delivery, prepared):
        self.calls.append((time.monotonic(), str(delivery.organization_id), str(delivery.event.id)))
        note("CALLS_FILE", f"{time.monotonic()!r} {delivery.organization_id} {delivery.event.id}")
        if delivery.payload.get("body") == "fail" and delivery.attempt == 1:
            raise RuntimeError("asked to")

    async def record(self, delivery, result, ctx):
        await write_effect(ctx.connection, delivery, self.key(delivery.event, delivery.target))


class Patched(Metered):
    """The destination is the message's body; `down` says which do not answer."""

    name = "patched-worker"
    policy = Policy(breaker=Breaker(failures=3, open_s=0.4, max_open_s=0.8), timeout_s=5)

    def __init__(self):
        super().__init__()
        self.down = set()

    def destination(self, event, target):
        return event.payload["body"]

    async def call(self, delivery, prepared):
        self.calls.append((time.monotonic(), delivery.payload["body"], str(delivery.event.id)))
        if delivery.payload["body"] in self.down:
            raise ConnectionError("no answer")


class Delicate(ExternalWorker):
    """Its receiver takes a second call for a new one. What it was asked is in a file; `lookup` reads it there, and the
    body says what `lookup` can tell."""

    name = "delicate-worker"
    event_types = RECEIVED
    resend = "lookup"
    policy = Policy(timeout_s=5, attempts=3)

    async def call(self, delivery, prepared):
        note("CALLS_FILE", delivery.event.id)
        if delivery.payload["body"].startswith("hang") and "GATE" in os.environ:
            while not os.path.exists(os.environ["GATE"]):
                await asyncio.sleep(0.02)
        if delivery.payload["body"] == "unknown at first" and delivery.attempt == 1:
            raise Unknown("the connection broke in the middle")
        return "called"

    async def lookup(self, delivery, prepared):
        note("LOOKUPS_FILE", delivery.event.id)
        match delivery.payload["body"]:
            case "hang, not made":
                raise NotMade
            case "hang, cannot be told":
                raise Unknown("the receiver keeps no list")
            case "hang, nobody answers":
                raise ConnectionError("no answer")
        if str(delivery.event.id) not in Path(os.environ["CALLS_FILE"]).read_text():
            raise NotMade  # the process had claimed it, and died before it came to it
        return "looked up"

    async def record(self, delivery, result, ctx):
        await write_effect(ctx.connection, delivery, result)


class Once(Delicate):
    """There is nothing to look it up in."""

    name = "once-worker"
    resend = "never"  # type: ignore[assignment]
