"""Where the embedded stack keeps what it fetched or prepared once: the user's cache folder, made under a lock.

The one place besides the command line that looks at the environment: XDG_CACHE_HOME is the system's, not a setting of
ours.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

COMPLETE = "complete"


def root() -> Path:
    """The folder of all our caches."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "afluente"


def prepared(name: str, prepare: Callable[[Path], None], base: Path | None = None) -> Path:
    """The folder `name` of the cache, filled by `prepare(folder)` when no complete one is there.

    One process prepares, others wait. A preparation that was cut short has no marker and is done again.
    """
    base = base or root()
    base.mkdir(parents=True, exist_ok=True)
    folder = base / name
    with open(base / f"{name}.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / COMPLETE).exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            prepare(folder)
            (folder / COMPLETE).touch()
    return folder
