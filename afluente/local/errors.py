"""What can go wrong with the local stack.

AfluenteError
└── LocalError          a server cannot be had or does not come up; `log` names its log file
    └── Missing         a tool is not installed, or no engine answers: trying again does not help
"""

from __future__ import annotations

from pathlib import Path

from afluente.errors import AfluenteError


class LocalError(AfluenteError):
    """A server cannot be started, stopped or found."""

    def __init__(self, message: str, *, hint: str | None = None, log: Path | None = None) -> None:
        if log is not None:
            message = f"{message} (log: {log})"
        super().__init__(message, hint=hint)
        self.log = log


class Missing(LocalError):
    """Nothing on this machine can run the server. The hint says what to install or to set."""
