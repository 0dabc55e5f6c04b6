"""The errors that more than one package treats in its own way.

    AfluenteError               everything of ours; `hint` says what to do next
    ├── SettingsError           the environment is wrong: names the variable and its value
    ├── Unavailable             a dependency is away: try again (exit 75)
    ├── NotAllowed              the caller lacks a right (exit 4)
    └── Refused                 a request that would do harm, or does not fit the state of things (exit 1)

Each package has an `errors.py` with its own tree on top of these; the command line maps them to exit codes.
"""

from __future__ import annotations


class AfluenteError(Exception):
    """Base of every error raised on purpose. `str(error)` is a sentence for a person; `hint` names the next step."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


_SERVERS = ("DATABASE_URL", "KAFKA_BOOTSTRAP_SERVERS")


class SettingsError(AfluenteError):
    """One or more settings cannot be used. `problems` holds (variable, value as given or None, what is wrong)."""

    def __init__(self, problems: list[tuple[str, str | None, str]]) -> None:
        self.problems = problems
        lines = [
            f"{variable}: {what}" if value is None else f"{variable}={value!r}: {what}"
            for variable, value, what in problems
        ]
        hint = "`afluente doctor --settings` lists every setting and where its value came from"
        if any(variable in _SERVERS and not value for variable, value, _ in problems):
            hint = f"`afluente up && source .afluente/env` starts servers of your own; {hint}"
        super().__init__("; ".join(lines), hint=hint)


class Unavailable(AfluenteError):
    """Kafka, Postgres or another service does not answer. Nothing was done, or what was done can be done again."""


class NotAllowed(AfluenteError):
    """The login or role has no right to do this."""


class Refused(AfluenteError):
    """The request was understood and is not carried out; the message says why."""
