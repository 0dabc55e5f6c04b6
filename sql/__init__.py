"""What Postgres holds: migrations, functions and named queries, found inside the installed package.

Nothing here talks to a server (`sql.migrate` does). Three homes, three lifetimes: `migrations/` run once and are not
edited afterwards, `functions/` are applied again at every run, `queries/` are read by Python.
"""

import functools
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType

__all__ = ["Function", "Migration", "functions", "migrations", "queries"]

_MIGRATION_FILE = re.compile(r"^(?P<version>\d{4})_(?P<name>[a-z0-9_]+)\.up\.sql$")
_NEEDS = re.compile(r"^-- needs: (?P<version>\d{4})\b")
_QUERY_NAME = re.compile(r"^-- name: (?P<name>[a-z][a-z0-9_]*)[ \t]*$", re.MULTILINE)
_NO_TRANSACTION = "-- no-transaction"


@dataclass(frozen=True, slots=True)
class Migration:
    """One step of the schema: `0003_event_log.up.sql` and its `.down.sql`."""

    version: int
    name: str
    up: str
    down: str

    @property
    def label(self) -> str:
        """The name people see: `0003_event_log`."""
        return f"{self.version:04d}_{self.name}"

    @property
    def checksum(self) -> str:
        """sha256 of the up file, so that an edit of an applied file is noticed."""
        return hashlib.sha256(self.up.encode()).hexdigest()

    @property
    def in_transaction(self) -> bool:
        """False for a file that opens with `-- no-transaction` (CREATE INDEX CONCURRENTLY and its like)."""
        return not self.up.startswith(_NO_TRANSACTION)

    @property
    def down_in_transaction(self) -> bool:
        return not self.down.startswith(_NO_TRANSACTION)


@dataclass(frozen=True, slots=True)
class Function:
    """One file of `functions/`; its first line, `-- needs: 0003`, names the migration it builds on."""

    name: str
    needs: int
    text: str


@functools.cache
def migrations() -> tuple[Migration, ...]:
    """All migrations in the order of their numbers.

    Raises ValueError for two files with one number, and FileNotFoundError for an up file without its down file.
    """
    found: dict[int, Migration] = {}
    folder = files(__name__) / "migrations"
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        match = _MIGRATION_FILE.match(entry.name)
        if match is None:
            continue
        version = int(match["version"])
        if version in found:
            raise ValueError(f"two migrations have the number {version:04d}: {found[version].label} and {entry.name}")
        down = folder / f"{match['version']}_{match['name']}.down.sql"
        found[version] = Migration(version, match["name"], entry.read_text("utf-8"), down.read_text("utf-8"))
    return tuple(found[version] for version in sorted(found))


@functools.cache
def functions() -> tuple[Function, ...]:
    """All function files, by the migration they need and then by name.

    Raises ValueError for a file whose first line is not `-- needs: NNNN`.
    """
    found = []
    for entry in (files(__name__) / "functions").iterdir():
        if not entry.name.endswith(".sql"):
            continue
        text = entry.read_text("utf-8")
        match = _NEEDS.match(text)
        if match is None:
            raise ValueError(f"sql/functions/{entry.name}: the first line must be `-- needs: NNNN` (a migration)")
        found.append(Function(entry.name.removesuffix(".sql"), int(match["version"]), text))
    return tuple(sorted(found, key=lambda function: (function.needs, function.name)))


@functools.cache
def queries(table: str) -> Mapping[str, str]:
    """The named statements of `queries/<table>.sql`: name -> text (its comment stays in, the server ignores it).

    Raises FileNotFoundError when there is no such file, ValueError when a name is there twice.
    """
    text = (files(__name__) / "queries" / f"{table}.sql").read_text("utf-8")
    found: dict[str, str] = {}
    starts = list(_QUERY_NAME.finditer(text))
    for start, following in zip(starts, [*starts[1:], None], strict=True):
        name = start["name"]
        if name in found:
            raise ValueError(f"sql/queries/{table}.sql: the name {name} is there twice")
        found[name] = text[start.end() : following.start() if following else len(text)].strip().removesuffix(";")
    return MappingProxyType(found)
