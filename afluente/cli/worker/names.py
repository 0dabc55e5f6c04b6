"""Which worker a command means."""

from __future__ import annotations

from typing import Any

from psycopg import Connection


def named(name: str, conn: Connection[Any]) -> str:
    """The worker's own name, for a name or a module:Class. UnknownWorker when neither this installation nor the
    database knows it; BadWorker for a class that is none."""
    from consumers.errors import UnknownWorker
    from consumers.runtime import control
    from consumers.workers import REGISTRY, load

    if ":" in name:
        return load(name).name
    known = {*REGISTRY, *control.known(conn)}
    if name not in known:
        raise UnknownWorker(name, sorted(known))
    return name
