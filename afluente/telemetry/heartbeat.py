"""Liveness of a process without a port: the time of a file says when its loop last turned.

`beat()` stands in each process's main loop. It does nothing until the command line named a file
(AFLUENTE_HEARTBEAT_FILE), and then renews its time every few seconds. A loop that turns while Kafka is away is alive:
restarting it would mend nothing.
"""

from __future__ import annotations

import time
from pathlib import Path

EVERY_S = 5.0

_path: Path | None = None
_next = 0.0


def to_file(path: Path | None) -> None:
    """Name the file, or None for none."""
    global _path, _next
    _path, _next = path, 0.0


def beat() -> None:
    """The loop has come round."""
    global _next
    if _path is not None and (now := time.monotonic()) >= _next:
        _path.touch()
        _next = now + EVERY_S
