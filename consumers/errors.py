"""Errors of the worker runtime and of the dead letters.

AfluenteError
└── Refused
    ├── UnknownWorker       no worker of that name
    └── BadWorker           a worker class that cannot run; the message says what to change
UndecodableRecord           (internal) the bytes of a record are no event: dead letter with its bytes
"""

from __future__ import annotations

import difflib

from afluente.errors import Refused


class UnknownWorker(Refused):
    """No worker of that name; `close` is the nearest one there is."""

    exit_status = 2  # a mistyped name is wrong usage

    def __init__(self, name: str, known: list[str]) -> None:
        self.name = name
        self.close = next(iter(difflib.get_close_matches(name, known, n=1)), None)
        super().__init__(
            f"no worker is called {name!r}" + (f"; did you mean {self.close}?" if self.close else ""),
            hint=f"one of {', '.join(known)}, or module:Class",
        )


class BadWorker(Refused):
    """A worker class that cannot run as it is."""


class UndecodableRecord(Exception):
    """The record's bytes are not an event of ours."""

    def __init__(self, error_class: str, message: str) -> None:
        self.error_class = error_class
        self.message = message
        super().__init__(f"{error_class}: {message}")
