"""What can be wrong with an archive.

    ArchiveError
    ├── MissingDay      a day that is wanted is not archived
    ├── Incomplete      a file without its manifest, or a manifest without its file
    ├── Altered         the bytes are not those that were written: truncated, longer, or changed
    ├── Occupied        the day is archived already, with another content
    └── NotArchivable   a row that does not belong into this day's file, or that its line could not hold
"""

from __future__ import annotations

from datetime import date
from pathlib import Path

from afluente.errors import AfluenteError, Refused


class ArchiveError(AfluenteError):
    """Base. Nothing of a day that raises it may be believed."""


class MissingDay(ArchiveError):
    """`day` is not archived, though it lies among days that are: to go on would leave its events out in silence."""

    def __init__(self, day: date) -> None:
        self.day = day
        super().__init__(f"the archive has no file for {day}", hint="archive that day, or leave it out by naming times")


class Incomplete(ArchiveError):
    """`missing` is not there, and the other file of its day is."""

    def __init__(self, missing: Path) -> None:
        self.missing = missing
        super().__init__(
            f"{missing} is missing, the other file of its day is there: archiving was cut short, or it was deleted",
            hint="write the day again from the table, or restore the file from a copy",
        )


class Altered(ArchiveError):
    """`path` does not hold what was written to it; `reason` says in which way."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"{path} {reason}", hint="restore it from a copy: nothing was read from it")


class Occupied(ArchiveError, Refused):
    """`path` holds the day with another content. Only `rewrite` may change what is archived."""

    def __init__(self, path: Path, difference: str) -> None:
        self.path = path
        super().__init__(f"{path} is there with another content ({difference}), and is left as it is")


class NotArchivable(ArchiveError):
    """A row that cannot be in the file being written."""
