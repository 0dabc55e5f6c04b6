"""What SIGTERM and SIGINT set in motion, outside the handler of the signal.

A handler runs in the middle of whatever the main thread does, which may hold the lock that the handler wants:
`Event.set` in the middle of `Event.wait` waits for itself for ever, and no later signal is heard. So the handler does
nothing; the interpreter writes the signal's number to a pipe, even while the main thread is inside a C library, and a
thread that waits there does the rest.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

STOPPING: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stopped_by_signals(stop: Callable[[], None], signals: Sequence[signal.Signals] = STOPPING) -> Iterator[None]:
    """Call `stop`, in a thread of its own, at each of `signals`. For the main thread."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    threading.Thread(target=_follow, args=(reading, frozenset(signals), stop), name="signals", daemon=True).start()
    woken_before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    handled_before = {number: signal.signal(number, _heard) for number in signals}
    try:
        yield
    finally:
        for number, handler in handled_before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(woken_before)
        os.close(writing)


def _heard(number: int, frame: FrameType | None) -> None:
    pass


def _follow(reading: int, signals: frozenset[int], stop: Callable[[], None]) -> None:
    with open(reading, "rb", buffering=0) as pipe:
        while number := pipe.read(1):
            if number[0] in signals:
                stop()
