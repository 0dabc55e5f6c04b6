"""The schemas that have been published, as the committed files say: ids, versions, bytes of each ``.avsc``.

``avro/ids.json`` fixes a number for each published schema for ever; the id on the wire is 0x40000000 plus it. Nothing
here needs the models or a registry. What must stay true: a number is never given to another schema, a published file
never changes (the digest is checked by the drift test), and the newest entry of a major is what new records are
written with.
"""

import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from importlib.resources import files
from typing import Any

# Above every id a registry hands out in practice; `afluente schemas register` refuses one that gets this far.
COMMITTED_IDS_FROM = 0x4000_0000

OLD_MAJOR_ACCEPTED_FOR = timedelta(days=30)

CUSTOM = "custom.event"  # the schema of event types outside the catalogue; not an event type that anybody emits
CONTACT_EVENT = "contact_event.recorded"


@dataclass(frozen=True, slots=True)
class Published:
    """One published schema. ``variant`` is the contact event type, '' everywhere else; ``version`` is semver."""

    number: int
    name: str
    event_type: str
    variant: str
    version: str
    published: datetime
    sha256: str
    file: str

    @property
    def schema_id(self) -> int:
        return COMMITTED_IDS_FROM + self.number

    @property
    def major(self) -> int:
        return int(self.version.split(".", 1)[0])

    @property
    def order(self) -> tuple[int, ...]:
        return tuple(int(part) for part in self.version.split("."))

    def text(self) -> str:
        """The committed file, byte for byte, as text."""
        return (files("schemas") / "avro" / self.file).read_text("utf-8")

    def schema(self) -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads(self.text())
        return parsed


def read_ids(text: str) -> list[Published]:
    """The entries of an ids file, in the order of their numbers."""
    entries = json.loads(text)["schemas"]
    return [Published(**{**entry, "published": datetime.fromisoformat(entry["published"])}) for entry in entries]


@cache
def all_published() -> tuple[Published, ...]:
    return tuple(read_ids((files("schemas") / "avro" / "ids.json").read_text("utf-8")))


def reload() -> None:
    """Forget what was read: the files have changed under this process, which only `schemas generate` does."""
    for cached in (all_published, by_number, event_types, current, accepted_until):
        cached.cache_clear()


@cache
def by_number() -> dict[int, Published]:
    return {entry.number: entry for entry in all_published()}


@cache
def event_types() -> frozenset[str]:
    """Every event type of the catalogue."""
    return frozenset(entry.event_type for entry in all_published()) - {CUSTOM}


@cache
def current(event_type: str, variant: str) -> tuple[Published, ...]:
    """What new records of this type are written with: the newest version of each major, newest major first."""
    newest: dict[int, Published] = {}
    for entry in all_published():
        if entry.event_type == event_type and entry.variant == variant:
            held = newest.get(entry.major)
            if held is None or held.order < entry.order:
                newest[entry.major] = entry
    return tuple(newest[major] for major in sorted(newest, reverse=True))


@cache
def accepted_until(event_type: str, variant: str, major: int) -> datetime | None:
    """When a major stops being accepted: 30 days after the next one was published. None: no end in sight."""
    later = [
        entry.published
        for entry in all_published()
        if entry.event_type == event_type and entry.variant == variant and entry.major > major
    ]
    return min(later) + OLD_MAJOR_ACCEPTED_FOR if later else None
