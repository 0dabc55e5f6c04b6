"""Transactions as the brokers see them: which are open in a partition, what their coordinators know, and ending one.

librdkafka has no call for any of it. aiokafka has the connections (TLS, SASL, metadata) and a codec with the compact
types; the four requests are defined here, in the oldest version that Kafka 4 still answers.

What must stay true: nothing is asked of a partition but of its leader, and nothing of a transaction but of its
coordinator; a broker that cannot answer is Unavailable, never an empty answer. That something is open is told by
DescribeProducers alone: a transaction's coordinator may have forgotten it.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from aiokafka import errors
from aiokafka.client import AIOKafkaClient, CoordinationType
from aiokafka.protocol.api import RequestStruct, Response
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.offset import OffsetRequest
from aiokafka.protocol.types import (
    Boolean,
    CompactArray,
    CompactString,
    Int16,
    Int32,
    Int64,
    Schema,
    TaggedFields,
)
from aiokafka.record.control_record import ControlRecord
from aiokafka.record.default_records import DefaultRecordBatch
from aiokafka.structs import TopicPartition

from afluente.errors import AfluenteError, NotAllowed, Refused, Unavailable
from afluente.settings import KafkaSettings, SecurityProtocol

REQUEST_TIMEOUT_S = 10.0
ANSWER_WITHIN_S = 30.0  # a leader or a coordinator that is moving answers "not me" for a while
ASK_AGAIN_S = 0.1
FETCH_BYTES = 4 * 1024 * 1024
_NOT_FOUND = 105  # TRANSACTIONAL_ID_NOT_FOUND

# A coordinator in one of these will still end the transaction itself.
UNDER_WAY = frozenset({"Ongoing", "PrepareCommit", "PrepareAbort", "PrepareEpochFence"})


class Place(NamedTuple):
    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]"


@dataclass(frozen=True, slots=True)
class ProducerState:
    """One producer in one partition. `start_offset`: where its open transaction begins, None when none is open.

    `last_timestamp`: of its last batch, in ms; the producer's clock, unless the topic takes the broker's.
    """

    producer_id: int
    epoch: int
    coordinator_epoch: int
    last_timestamp: int
    start_offset: int | None


@dataclass(frozen=True, slots=True)
class Known:
    """What a coordinator has of a transactional id now, the partitions of its transaction with it."""

    transactional_id: str
    producer_id: int
    state: str
    timeout_ms: int
    places: frozenset[Place]

    def will_end(self, place: Place) -> bool:
        """Whether the coordinator itself is going to end what is open in `place`."""
        return self.state in UNDER_WAY and place in self.places


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of records, or the marker that ends a transaction (`commit` is True or False then, else None).

    `key`: of its first record, when keys were asked for.
    """

    offset: int
    next_offset: int
    producer_id: int
    epoch: int
    max_timestamp: int
    commit: bool | None
    key: bytes | None = None


class Transactions:
    """One session with the cluster; see `connect`."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def partitions(self, topics: Iterable[str]) -> dict[str, int]:
        """How many partitions each of the topics has; those that do not exist are left out."""
        await self._client.force_metadata_update()  # of all topics: to ask for one may create it
        found = {topic: self._client.cluster.partitions_for_topic(topic) for topic in topics}
        return {topic: len(numbers) for topic, numbers in found.items() if numbers}

    async def producers(self, places: Iterable[Place]) -> dict[Place, list[ProducerState]]:
        """Every producer that the partitions' leaders keep a state of (for a day after its last record)."""
        found: dict[Place, list[ProducerState]] = {}

        async def ask() -> list[tuple[Place, int]]:
            failed = []
            for leader, led in self._by_leader(wanted - found.keys()).items():
                answer = await self._client.send(leader, _Question(_DescribeProducers, (_by_topic(led),)))
                for topic, partitions, _ in answer.topics:
                    for partition, code, _message, states, _tags in partitions:
                        place = Place(topic, partition)
                        if code:
                            failed.append((place, code))
                        else:
                            found[place] = [_producer_state(*state) for state in states]
            return failed

        wanted = set(places)
        await self._until_answered(ask)
        return found

    async def known(self, producer_ids: Iterable[int], names: Iterable[str] = ()) -> dict[int, Known]:
        """What the coordinators know of these producer ids; those they do not know are left out.

        A coordinator that has just started lists nothing, without a word, until it knows what it is to coordinate.
        Asked for a transactional id by name it says that: what nobody knows is certain for `names` only.
        """
        wanted, named = sorted(set(producer_ids)), sorted(set(names))
        found: dict[int, Known] = {}

        async def ask() -> list[tuple[str, int]]:
            found.clear()
            failed = []
            by_coordinator: dict[int, list[str]] = {}
            for broker in self._brokers():
                listed = await self._client.send(broker, _Question(_ListTransactions, ([], wanted)))
                if listed.error_code:
                    failed.append((f"coordinator {broker}", listed.error_code))
                by_coordinator[broker] = [name for name, *_ in listed.states if name not in named]
            for name in named:
                coordinator = await self._client.coordinator_lookup(CoordinationType.TRANSACTION, name)
                by_coordinator.setdefault(coordinator, []).append(name)
            for coordinator, ids in by_coordinator.items():
                if not ids:
                    continue
                answer = await self._client.send(coordinator, _Question(_DescribeTransactions, (ids,)))
                for code, name, state, timeout_ms, _started, producer_id, _epoch, topics, _ in answer.states:
                    if code == _NOT_FOUND:
                        continue  # it has expired
                    if code:
                        failed.append((name, code))
                        continue
                    places = frozenset(Place(topic, number) for topic, numbers, _ in topics for number in numbers)
                    found[producer_id] = Known(name, producer_id, state, timeout_ms, places)
            return failed

        if wanted or named:
            await self._until_answered(ask)
        return {producer_id: known for producer_id, known in found.items() if producer_id in wanted}

    async def end(self, place: Place, state: ProducerState, *, commit: bool) -> None:
        """Write the marker that ends `state`'s open transaction in this one partition, as its coordinator would.

        Nothing asks whether that is right: not the coordinator, nor the producer, if it lives. NotAllowed without the
        right ClusterAction or Alter on the cluster.
        """
        # A marker from an older epoch of the coordinator is refused, so it is the one that the partition knows; a
        # transaction that is its producer's first has none yet (-1), and Kafka's own tool takes 0 then as well.
        marker: tuple[Any, ...]
        marker = (state.producer_id, state.epoch, commit, _by_topic([place]), max(state.coordinator_epoch, 0), {})

        async def ask() -> list[tuple[Place, int]]:
            (leader,) = self._by_leader([place])
            answer = await self._client.send(leader, _Question(_WriteTxnMarkers, ([marker],)))
            codes = [code for _, topics, _ in answer.markers for _, parts, _ in topics for _, code, _ in parts]
            return [(place, code) for code in codes if code]

        await self._until_answered(ask)

    async def batches(self, place: Place, start: int, *, keys: bool = False) -> AsyncIterator[Batch]:
        """What the partition holds from the offset `start` to its high watermark as it is when it gets there,
        undecided or not."""
        while True:
            high, data = await self._fetch(place, start)
            before = start
            for batch in _batches(data, keys):
                start = batch.next_offset
                yield batch
            if start >= high:
                return
            if start == before:
                raise Unavailable(f"{place} cannot be read at offset {start}")

    async def offset_at(self, place: Place, timestamp: int) -> int:
        """The offset of the first record that is not older than `timestamp` (ms); -2 asks for the first there is. The
        end when all are older."""
        found = -1

        async def ask() -> list[tuple[Place, int]]:
            nonlocal found
            (leader,) = self._by_leader([place])
            codes = []
            for wanted in (timestamp, -1):
                request = OffsetRequest(-1, 0, [(place.topic, [(place.partition, wanted)])])
                answer = await self._client.send(leader, request)
                ((_, ((_, code, _, found),)),) = answer.topics
                codes.append((place, code))
                if found >= 0 or code:
                    break
            return [failed for failed in codes if failed[1]]

        await self._until_answered(ask)
        return found

    async def _fetch(self, place: Place, offset: int) -> tuple[int, bytes]:
        """The high watermark, and the batches from the one that holds `offset`."""
        high, data = 0, b""

        async def ask() -> list[tuple[Place, int]]:
            nonlocal high, data
            (leader,) = self._by_leader([place])
            wanted = [(place.topic, [(place.partition, offset, FETCH_BYTES)])]
            answer = await self._client.send(leader, FetchRequest(100, 0, FETCH_BYTES, 0, wanted))
            (((_, ((_, code, high, *_, data),)),),) = (answer.topics,)
            return [(place, code)] if code else []

        await self._until_answered(ask)
        return high, data or b""

    def _brokers(self) -> list[int]:
        return [broker.nodeId for broker in self._client.cluster.brokers()]

    def _by_leader(self, places: Iterable[Place]) -> dict[int, list[Place]]:
        led: dict[int, list[Place]] = {}
        for place in sorted(places):
            leader = self._client.cluster.leader_for_partition(TopicPartition(*place))
            if leader is None or leader < 0:
                raise errors.LeaderNotAvailableError(f"{place} has no leader")
            led.setdefault(leader, []).append(place)
        return led

    async def _until_answered(self, ask: Callable[[], Awaitable[list[tuple[Any, int]]]]) -> None:
        """Ask again while what went wrong may pass: (what, error code) of each thing that did."""
        deadline = time.monotonic() + ANSWER_WITHIN_S
        while True:
            try:
                if not (failed := await ask()):
                    return
                what, code = failed[0]
                error = errors.for_code(code)(f"{what}: {errors.for_code(code).__name__}")
            except errors.KafkaError as raised:
                error = raised
            if not error.retriable or time.monotonic() > deadline:
                raise _explained(error) from error
            await asyncio.sleep(ASK_AGAIN_S)
            await self._client.force_metadata_update()


@asynccontextmanager
async def connect(settings: KafkaSettings) -> AsyncIterator[Transactions]:
    """A session, closed at the end. Unavailable when no broker answers."""
    client = AIOKafkaClient(
        bootstrap_servers=[server.strip() for server in settings.bootstrap_servers.split(",")],
        client_id="afluente",
        request_timeout_ms=int(REQUEST_TIMEOUT_S * 1000),
        **_security(settings),
    )
    try:
        try:
            await client.bootstrap()
        except errors.KafkaError as error:
            raise _explained(error) from error
        yield Transactions(client)
    finally:
        await client.close()


def _security(settings: KafkaSettings) -> dict[str, Any]:
    given: dict[str, Any] = {"security_protocol": settings.security_protocol.value}
    if settings.security_protocol in (SecurityProtocol.SSL, SecurityProtocol.SASL_SSL):
        context = ssl.create_default_context(cafile=settings.ssl_ca_location)
        if settings.ssl_certificate_location:
            context.load_cert_chain(settings.ssl_certificate_location, settings.ssl_key_location)
        given["ssl_context"] = context
    if settings.security_protocol in (SecurityProtocol.SASL_PLAINTEXT, SecurityProtocol.SASL_SSL):
        given |= {
            "sasl_mechanism": settings.sasl_mechanism or "PLAIN",
            "sasl_plain_username": settings.sasl_username or "",
            "sasl_plain_password": settings.sasl_password.get_secret_value() if settings.sasl_password else "",
        }
    return given


def _explained(error: errors.KafkaError) -> AfluenteError:
    if isinstance(error, errors.ClusterAuthorizationFailedError):
        return NotAllowed(f"Kafka: {error}", hint="the login needs the right Alter or ClusterAction on the cluster")
    if isinstance(error, (errors.TopicAuthorizationFailedError, errors.TransactionalIdAuthorizationFailed)):
        return NotAllowed(
            f"Kafka: {error}", hint="the login needs Read on the topics and Describe on the transactional ids"
        )
    kind = Unavailable if error.retriable else Refused
    return kind(f"Kafka: {error}", hint="afluente doctor")


def _by_topic(places: Iterable[Place]) -> list[tuple[str, list[int], Mapping[int, bytes]]]:
    """Topics with their partitions, as the requests list them."""
    numbers: dict[str, list[int]] = {}
    for place in places:
        numbers.setdefault(place.topic, []).append(place.partition)
    return [(topic, partitions, {}) for topic, partitions in numbers.items()]


def _producer_state(
    producer_id: int, epoch: int, _sequence: int, timestamp: int, coordinator_epoch: int, start: int, _tags: Any
) -> ProducerState:
    return ProducerState(producer_id, epoch, coordinator_epoch, timestamp, start if start >= 0 else None)


_HEADER = struct.Struct(">qiibIhiqqqhii")  # a batch of format 2, which every transactional one is
_LENGTH_COVERS_FROM = struct.calcsize(">qi")
_CONTROL = 0x20


def _batches(data: bytes, keys: bool) -> Iterator[Batch]:
    """The whole batches in `data`; the last one is often cut off."""
    at = 0
    while len(data) - at >= _HEADER.size:
        (offset, length, _, _, _, attributes, last, _, newest, producer_id, epoch, _, _) = _HEADER.unpack_from(data, at)
        end = at + _LENGTH_COVERS_FROM + length
        if end > len(data):
            return
        key, commit = None, None
        if keys or attributes & _CONTROL:
            key = next(iter(DefaultRecordBatch(data[at:end]))).key
        if attributes & _CONTROL:
            commit = ControlRecord.parse(key or b"\0\0\0\0").type_ == 1
        yield Batch(offset, offset + last + 1, producer_id, epoch, newest, commit, key)
        at = end


# The requests. aiokafka's connections ask of a request no more than `prepare`.


@dataclass(frozen=True, slots=True)
class _Question:
    request: Any
    values: tuple[Any, ...]

    def prepare(self, versions: Mapping[int, tuple[int, int]]) -> Any:
        lowest, highest = versions.get(self.request.API_KEY, (0, -1))
        if not lowest <= self.request.API_VERSION <= highest:
            raise errors.IncompatibleBrokerVersion(
                f"this broker does not know {self.request.__name__} v{self.request.API_VERSION}"
            )
        return self.request(*self.values, {})


_TAGS = ("tags", TaggedFields)
_NAME = CompactString()
_TOPICS = ("topics", CompactArray(("name", _NAME), ("partitions", CompactArray(Int32)), _TAGS))


def _request(name: str, api_key: int, api_version: int, asked: list[Any], answered: list[Any]) -> Any:
    """A request as aiokafka defines its own: a class for it, and one for its answer."""
    numbers = {"API_KEY": api_key, "API_VERSION": api_version}
    answer = type(f"{name}Response", (Response,), {**numbers, "SCHEMA": Schema(*answered, _TAGS)})
    own = {"FLEXIBLE_VERSION": True, "RESPONSE_TYPE": answer, "SCHEMA": Schema(*asked, _TAGS)}
    return type(name, (RequestStruct,), {**numbers, **own})


_DescribeProducers = _request(
    "DescribeProducers",
    61,
    0,
    [_TOPICS],
    [
        ("throttle_time_ms", Int32),
        (
            "topics",
            CompactArray(
                ("name", _NAME),
                (
                    "partitions",
                    CompactArray(
                        ("partition", Int32),
                        ("error_code", Int16),
                        ("error_message", CompactString()),
                        (
                            "active_producers",
                            CompactArray(
                                ("producer_id", Int64),
                                ("producer_epoch", Int32),
                                ("last_sequence", Int32),
                                ("last_timestamp", Int64),
                                ("coordinator_epoch", Int32),
                                ("current_txn_start_offset", Int64),
                                _TAGS,
                            ),
                        ),
                        _TAGS,
                    ),
                ),
                _TAGS,
            ),
        ),
    ],
)

_ListTransactions = _request(
    "ListTransactions",
    66,
    0,
    [("state_filters", CompactArray(_NAME)), ("producer_id_filters", CompactArray(Int64))],
    [
        ("throttle_time_ms", Int32),
        ("error_code", Int16),
        ("unknown_state_filters", CompactArray(_NAME)),
        (
            "states",
            CompactArray(("transactional_id", _NAME), ("producer_id", Int64), ("transaction_state", _NAME), _TAGS),
        ),
    ],
)

_DescribeTransactions = _request(
    "DescribeTransactions",
    65,
    0,
    [("transactional_ids", CompactArray(_NAME))],
    [
        ("throttle_time_ms", Int32),
        (
            "states",
            CompactArray(
                ("error_code", Int16),
                ("transactional_id", _NAME),
                ("transaction_state", _NAME),
                ("transaction_timeout_ms", Int32),
                ("transaction_start_time_ms", Int64),
                ("producer_id", Int64),
                ("producer_epoch", Int16),
                _TOPICS,
                _TAGS,
            ),
        ),
    ],
)

# Version 2 names the version of the transaction, and from it follows which epoch a marker must have. Version 1 leaves
# it open, and takes the transaction's own epoch: the one thing that is known here.
_WriteTxnMarkers = _request(
    "WriteTxnMarkers",
    27,
    1,
    [
        (
            "markers",
            CompactArray(
                ("producer_id", Int64),
                ("producer_epoch", Int16),
                ("transaction_result", Boolean),
                _TOPICS,
                ("coordinator_epoch", Int32),
                _TAGS,
            ),
        )
    ],
    [
        (
            "markers",
            CompactArray(
                ("producer_id", Int64),
                (
                    "topics",
                    CompactArray(
                        ("name", _NAME),
                        ("partitions", CompactArray(("partition", Int32), ("error_code", Int16), _TAGS)),
                        _TAGS,
                    ),
                ),
                _TAGS,
            ),
        )
    ],
)
