"""What can stop or restart the relay.

    RelayError
    ├── PositionError        a position that cannot be read, or a step that would break its rules
    ├── PositionRefused      the position belongs elsewhere, or is gone: nothing is published until a person decides
    ├── OnStandby            the Postgres we were sent to is no primary
    ├── UndecidedError       the broker left confirmed transactions undecided: repair before anything is published
    ├── LanesChanged         the lane is of a layout that is over: begin anew with the present one
    ├── Superseded           another instance owns the lane now: this one ends (exit status 3)
    └── SessionLost          this producer is to be thrown away; a new session reads the position and goes on

Errors of librdkafka and psycopg pass through as they are: `service` treats every error of a session like SessionLost.
"""

from __future__ import annotations

from collections.abc import Sequence

from afluente.errors import AfluenteError, Refused


class RelayError(AfluenteError):
    """Base of the relay's own errors."""


class PositionError(RelayError):
    """The position cannot be read, or would become a wrong one."""


class PositionRefused(RelayError, Refused):
    """Publishing from here would lose or repeat events. `reasons` are sentences for a person."""

    HINT = (
        "stop every relay, then `afluente relay reposition`: it says what it would do, and does it with --yes. "
        "Another database needs an AFLUENTE_TOPIC_PREFIX of its own"
    )

    def __init__(self, lane: str, reasons: Sequence[str], *, hint: str = HINT) -> None:
        self.lane = lane
        self.reasons = tuple(reasons)
        super().__init__(
            f"{lane}: the position does not belong to what is here, so nothing is published: {'; '.join(reasons)}",
            hint=hint,
        )


class OnStandby(RelayError, Refused):
    """A standby's snapshots do not list the transactions that run on the primary: their rows would be lost."""

    def __init__(self) -> None:
        super().__init__(
            "this Postgres is a standby: its snapshots do not list what is running, and rows would be lost",
            hint="point DATABASE_URL at the primary (target_session_attrs=primary)",
        )


class UndecidedError(RelayError):
    """`partitions` hold transactions that stay open for ever: readers of committed records stop there."""

    def __init__(self, partitions: Sequence[tuple[str, int, int]]) -> None:
        self.partitions = tuple(partitions)
        places = ", ".join(f"{topic}[{partition}] from offset {offset}" for topic, partition, offset in partitions)
        super().__init__(
            f"undecided transactions: {places}",
            hint="stop every relay, then: afluente relay repair",
        )


class LanesChanged(RelayError):
    """The layout is `layout` now, with so many `lanes`. Exit status 75: start again."""

    exit_status = 75

    def __init__(self, layout: int, lanes: int) -> None:
        self.layout, self.lanes = layout, lanes
        super().__init__(f"the relay has {lanes} lane{'s' * (lanes != 1)} now (layout {layout})")


class Superseded(RelayError):
    """`rival` is the instance that owns the lane now."""

    exit_status = 3

    def __init__(self, lane: str, rival: str) -> None:
        self.rival = rival
        super().__init__(f"{lane} was taken over by {rival}: this instance ends, having published nothing since")


class SessionLost(RelayError):
    """`code` is librdkafka's error code when there is one (a delivery report's), else None."""

    def __init__(self, reason: str, code: int | None = None) -> None:
        self.code = code
        super().__init__(reason)
