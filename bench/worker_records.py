"""Topics for the bench of the workers, filled as the relay fills them: typed records of the catalogue with their
headers, under the organization's key, in transactions. Not by the relay itself, which would need the rows first.

The same on every machine and in every round: organizations and entities come of a fixed seed, event ids are in order of
time as `uuidv7()` gives them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from random import Random
from uuid import UUID

import schemas
from afluente import kafka
from afluente.settings import KafkaSettings
from bench.rows import BODY, ENTITY_KIND, EVENT_TYPE
from schemas import Row
from schemas.envelope import RawRow
from schemas.partitioner import partition_for

PARTITIONS = 6
ORGANIZATIONS = 200
ENTITIES = 5_000
BAD_BODY = "bad"
"""What no effect table of the bench takes."""

_BODIES = 140
_TRANSACTION_RECORDS, _TRANSACTION_BYTES = 5_000, 8_000_000
_FILL_TIMEOUT_S = 60.0


def organizations(count: int = ORGANIZATIONS, partition: int | None = None) -> list[UUID]:
    """The first `count` organizations; with `partition` those whose records go there."""
    chance = Random(f"organizations of {partition}")
    found: list[UUID] = []
    while len(found) < count:
        candidate = UUID(int=chance.getrandbits(128), version=4)
        if partition is None or partition_for(str(candidate).encode(), PARTITIONS) == partition:
            found.append(candidate)
    return found


def rows(
    count: int,
    of: Sequence[UUID],
    *,
    entities: int = ENTITIES,
    first: int = 0,
    body: Callable[[int], str | None] | None = None,
) -> Iterator[RawRow]:
    """`count` events, going round the organizations `of`; each entity belongs to one of them. `first` keeps the ids of
    several calls apart. `body` gives the text of the n-th; None leaves the usual one."""
    chance = Random("entities")
    of_entity = [UUID(int=chance.getrandbits(128), version=4) for _ in range(entities)]
    began_at = datetime.now(UTC)
    template = RawRow.of(Row(1, UUID(int=0), UUID(int=0), EVENT_TYPE, ENTITY_KIND, UUID(int=0), b"{}", b"{}", began_at))
    keys = [str(organization).encode() for organization in of]
    entity_texts = [str(entity).encode() for entity in of_entity]
    milliseconds = time.time_ns() // 1_000_000
    for number in range(count):
        place = first + number
        # an entity is always the same organization's: the number of entities is a multiple of theirs, or theirs is 1
        entity = place % entities
        yield template._replace(
            seq=place + 1,
            id=_event_id(milliseconds + place // 1_000, place),
            organization_id=keys[entity % len(keys)],
            entity_id=entity_texts[entity],
            payload=_payload(place % _BODIES, body(place) if body else None),
            metadata=_metadata(place % _BODIES),
            created_at=template.created_at + place,
        )


def fill(settings: KafkaSettings, topic: str, events: Iterable[RawRow], *, by_entity: bool = False) -> None:
    """Write them and wait until all are committed. `by_entity`: the key is the entity, for who orders by keys only."""
    producer = kafka.producer(settings, transactional_id=f"fill-{topic}", linger_ms=20)
    producer.init_transactions(_FILL_TIMEOUT_S)
    records = size = 0
    for event in events:
        if records == 0:
            producer.begin_transaction()
        key, value, headers = schemas.record(event)
        if by_entity:
            key = event.entity_id or key
        while True:
            try:
                producer.produce(topic, value, key, headers=list(headers))
                break
            except BufferError:
                producer.poll(0.1)
        records, size = records + 1, size + len(value)
        if records >= _TRANSACTION_RECORDS or size >= _TRANSACTION_BYTES:
            producer.commit_transaction(_FILL_TIMEOUT_S)
            records = size = 0
    if records:
        producer.commit_transaction(_FILL_TIMEOUT_S)


def _event_id(milliseconds: int, number: int) -> bytes:
    text = f"{milliseconds:012x}7{number >> 48 & 0xFFF:03x}8{number & 0xFFF_FFFF_FFFF_FFFF:015x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}".encode()


def message(number: int, body: str | None = None) -> dict[str, str]:
    """A payload of 383 bytes, if `body` makes it no longer; there are 140 different ones."""
    number %= _BODIES
    chance = Random(number)
    return {
        "direction": "in",
        "conversation_id": str(UUID(int=chance.getrandbits(128), version=4)),
        "contact_id": str(UUID(int=chance.getrandbits(128), version=4)),
        "body": body if body is not None else (BODY * 2)[number : number + 134],
        "waha_message_id": f"false_55199{10_000_000 + number}@c.us_{number}",
        "message_id": str(UUID(int=chance.getrandbits(128), version=4)),
    }


@lru_cache(maxsize=4 * _BODIES)
def _payload(number: int, body: str | None) -> bytes:
    return json.dumps(message(number, body), ensure_ascii=False).encode()


@lru_cache(maxsize=_BODIES)
def _metadata(number: int) -> bytes:
    request = UUID(int=Random(number).getrandbits(128), version=4)
    return json.dumps({"request_id": str(request), "source": "waha", "emitted_at": 1_790_000_000.25}).encode()
