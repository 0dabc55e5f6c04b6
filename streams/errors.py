"""Errors of the stream application.

AfluenteError
├── Unreadable     one record cannot be folded: it becomes a dead letter, and the next one is taken
│   └── BadHeaders the name of one of its headers is not UTF-8; the workers bury it for that as well
├── Fenced         another process has claimed the partitions: nothing was written, this process must end
├── Abandoned      the write was given up because the partitions are being handed over: nothing was written
└── Unfit          the set-up is one that would lose or double events: the application does not start (a Refused)
"""

from __future__ import annotations

from afluente.errors import AfluenteError, Refused


class Unreadable(AfluenteError):
    """The record's bytes or values do not make a fact. `str(error)` is kept as the reason."""


class BadHeaders(Unreadable):
    """Nobody can say what its headers are."""


class Fenced(AfluenteError):
    """The fence is not where this process left it, or belongs to somebody else."""


class Abandoned(AfluenteError):
    """The caller asked to stop waiting for Postgres."""


class Unfit(Refused):
    """The stream application must not run like this; the hint says what to change."""
