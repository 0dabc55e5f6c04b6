"""A schema registry with Confluent's API, for installations that have one: its ids on new records, its schemas for
foreign ids.

What must stay true: the subject is always topic and record name (several event types share a topic), and it is said
explicitly to every client, since a client that is not told asks the registry questions that not every registry answers.
A registry that hands out ids from 0x40000000 up is refused: those are the committed ones, and mean the same everywhere.
Ids are fetched when a process starts, so that the registry can go away afterwards without stopping anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import schemas
from afluente.errors import AfluenteError, Refused, Unavailable
from schemas import published
from schemas.published import COMMITTED_IDS_FROM, CUSTOM, Published
from schemas.topics import Topics

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import SchemaRegistryClient

TIMEOUT_S = 10

NOT_FOUND = 404


@dataclass(frozen=True)
class Registered:
    """One published schema in a registry. ``schema_id`` is None when it is not there."""

    subject: str
    version: str
    name: str
    schema_id: int | None
    new: bool = False


class ConfluentRegistry:
    """What the codec asks for (``schemas.codec.Registry``), over HTTP."""

    def __init__(self, url: str, topics: Topics) -> None:
        self._url = url
        self._topics = topics
        self._client = _client(url)
        self._ids: dict[int, int] = {}

    def close(self) -> None:
        """Close the connections; the ids that were fetched stay known."""
        self._client.close()

    def load(self) -> None:
        """Fetch the ids of everything that new records are written with. Refused when something is not registered."""
        missing = []
        for entry in published.all_published():
            if entry in published.current(entry.event_type, entry.variant):
                schema_id = self.look_up(entry)
                if schema_id is None:
                    missing.append(entry.file)
                else:
                    self._ids[entry.number] = _checked(schema_id, self._url)
        if missing:
            raise Refused(
                f"the registry at {self._url} lacks {len(missing)} schemas, {missing[0]} among them",
                hint="afluente schemas register",
            )

    def id_of(self, entry: Published) -> int:
        return self._ids[entry.number]  # of a process that writes: everything was fetched when it started

    def schema_of(self, schema_id: int) -> str | None:
        try:
            found = self._client.get_schema(schema_id).schema_str
        except Exception as error:
            if _status(error) == NOT_FOUND:
                return None
            raise self._unavailable(error) from error
        return None if found is None else str(found)

    def subject_of(self, entry: Published) -> str:
        """TopicRecordNameStrategy: the topic with its prefix, and the record's full name."""
        topic = self._topics.family("custom") if entry.event_type == CUSTOM else self._topics.event(entry.event_type)
        return f"{topic}-{entry.name}"

    def look_up(self, entry: Published) -> int | None:
        """The registry's id of a schema, None when it is not registered."""
        from confluent_kafka.schema_registry import Schema

        try:
            found = self._client.lookup_schema(self.subject_of(entry), Schema(entry.text(), "AVRO"))
        except Exception as error:
            if _status(error) == NOT_FOUND:
                return None
            raise self._unavailable(error) from error
        return None if found.schema_id is None else int(found.schema_id)

    def register(self, entries: Iterable[Published], *, dry_run: bool = False) -> list[Registered]:
        """Register schemas that are not there yet, oldest version first. Doing it again changes nothing.

        Refused, before a second one is written, when the registry gives an id of the committed range.
        """
        from confluent_kafka.schema_registry import Schema

        outcome = []
        for entry in entries:
            schema_id = self.look_up(entry)
            is_new = schema_id is None
            if schema_id is None and not dry_run:
                try:
                    schema_id = self._client.register_schema(self.subject_of(entry), Schema(entry.text(), "AVRO"))
                except Exception as error:
                    raise self._unavailable(error) from error
            if schema_id is not None:
                _checked(schema_id, self._url)
            outcome.append(Registered(self.subject_of(entry), entry.version, entry.name, schema_id, is_new))
        return outcome

    def _unavailable(self, error: Exception) -> AfluenteError:
        status = _status(error)
        if status is not None and 400 <= status < 500:
            return Refused(f"the registry at {self._url} refuses: {error}")
        return Unavailable(f"the registry at {self._url} does not answer: {error}", hint="check SCHEMA_REGISTRY_URL")


def use(url: str | None, topic_prefix: str, *, writes: bool) -> ConfluentRegistry | None:
    """Write new records of this process with the ids of the registry at ``url``; None: with the committed ones.

    ``writes``: this process encodes records, so everything it may write has to be registered when it starts. Returns
    the registry, for whoever wants to close it before the process ends.
    """
    if url is None:
        schemas.use_registry(None)
        return None
    registry = ConfluentRegistry(url, Topics(topic_prefix))
    try:
        if writes:
            registry.load()
    except BaseException:
        registry.close()
        raise
    schemas.use_registry(registry)
    return registry


def _checked(schema_id: int, url: str) -> int:
    if schema_id >= COMMITTED_IDS_FROM:
        raise Refused(
            f"the registry at {url} hands out the id {schema_id}; from {COMMITTED_IDS_FROM} up are the committed ones",
            hint="give the registry an id range below that, or run without one",
        )
    return schema_id


def _status(error: Exception) -> int | None:
    status = getattr(error, "http_status_code", None)
    return status if isinstance(status, int) else None


def _client(url: str) -> SchemaRegistryClient:
    try:
        from confluent_kafka.schema_registry import SchemaRegistryClient
    except ImportError as error:
        raise Refused(
            f"a schema registry is configured and its client is not installed ({error})",
            hint="pip install 'afluente[registry]'",
        ) from error
    config: dict[str, Any] = {"url": url, "timeout": TIMEOUT_S, "max.retries": 1}
    return SchemaRegistryClient(config)
