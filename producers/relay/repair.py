"""Mending what a broker left undecided: transactions that are open in a partition while nobody is going to end them.

A broker of 4.3.0 to 4.4.0 that crashes between the commit of a transaction and its markers can forget it (KAFKA-20734):
its coordinator has written "complete" and the partitions never hear of it. Readers of committed records stop there for
ever, and the relay refuses to start (`UndecidedError`). Here each such partition is sent the marker that it lacks.

What must stay true:
- a transaction is ended in all its partitions in the same way. If any of them had its marker before the crash, that one
  decides; if none had, it is aborted: its rows and its position vanish together, and are published again;
- events first, then dead letters, positions last. While the position is undecided no relay starts, so whatever a crash
  leaves in between is found and finished by the next run. The other way round a relay could start from the position
  before while its events are still to be decided, and publish them twice;
- nothing that its coordinator may still end is touched, nor what is too young to tell, nor (unless asked for) another
  producer's. No relay may run: one could end its lane's transaction while we do.

Which of a partition's batches are the lost transaction's is told by the broker's clock (our topics have LogAppendTime):
they are newer than the marker before them in the lane's partition of the positions, which lies between two transactions
by a few round trips. Brokers whose clocks differ by more than that would need an eye on it: `afluente relay verify`.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import psycopg

import sql
from afluente import faults
from afluente.errors import Refused
from afluente.kafka.transactions import Batch, Known, Place, ProducerState, Transactions, connect
from afluente.settings import KafkaSettings
from afluente.telemetry import get_logger
from producers.relay.lease import EXPIRES_AFTER_S
from producers.relay.publish import TRANSACTION_TIMEOUT_MS
from schemas.topics import Topics

CLEANUP_INTERVAL_S = 10.0  # the broker's transaction.abort.timed.out.transaction.cleanup.interval.ms
FOREIGN_TIMEOUT_MS = 900_000  # the broker's transaction.max.timeout.ms: nobody's transaction may take longer
LOOK_BACK = 1_000  # offsets before the end of a lane's positions in which its last transactions are
LOOK_AGAIN_S = 0.5
WAIT_AT_MOST_S = 60.0
# A partition's leader forgets producers a day after their last record (producer.id.expiration.ms), open ones excepted.
REMEMBERED_S = 12 * 3600.0

_QUERIES = sql.queries("relay_repair")
_log = get_logger(__name__)


class State(StrEnum):
    hanging = "hanging"  # for ever: to be repaired
    young = "young"  # its coordinator does not know it, but it may be about to
    under_way = "under way"  # its coordinator will end it
    foreign = "foreign"  # hanging, and not the relay's


@dataclass(frozen=True, slots=True)
class Undecided:
    """One transaction that is open in one partition from `start_offset` on. `commit`: how a repair ends it."""

    place: Place
    producer: ProducerState
    start_offset: int
    transactional_id: str | None
    age_s: float
    decided_after_s: float  # at this age its coordinator would have ended it
    state: State
    commit: bool = False
    applied: bool = False


@dataclass(frozen=True, slots=True)
class Owner:
    """An instance that owns a lane and seems to live: its session holds its lock, or its lease was just renewed."""

    lane: str
    instance: str
    silent_s: float | None


def living_owners(conn: psycopg.Connection[Any], topic_prefix: str) -> list[Owner]:
    """The relays that run on this database for these topics; one that was killed is among them for 8 s."""
    rows = conn.execute(_QUERIES["living_owners"], {"expires_after_s": EXPIRES_AFTER_S}).fetchall()
    ours = _lane_pattern(topic_prefix)
    return [Owner(*row) for row in rows if ours.fullmatch(row[0])]


def require_no_owner(conn: psycopg.Connection[Any], topic_prefix: str) -> None:
    """Raises Refused, naming the instances that run."""
    if owners := living_owners(conn, topic_prefix):
        named = ", ".join(f"{owner.lane} is owned by {owner.instance}" for owner in owners)
        raise Refused(f"a relay runs: {named}", hint="stop every relay, also what restarts it; then run this again")


def find(settings: KafkaSettings, *, any_producer: bool = False, older_than_s: float | None = None) -> list[Undecided]:
    """Every transaction that is open in the relay's topics, in the order of a repair. Changes nothing.

    `older_than_s` takes the place of the age at which a transaction is called hanging (its timeout and the broker's
    interval of looking for timed-out ones); what a coordinator says holds whatever the age. Raises Unavailable when
    the cluster cannot tell, Refused when a topic is missing or a transaction has been ended both ways.
    """

    async def look() -> list[Undecided]:
        async with connect(settings) as transactions:
            return await _find(transactions, settings.topic_prefix, any_producer, older_than_s)

    return asyncio.run(look())


def repair(
    settings: KafkaSettings,
    require_safe: Callable[[], None],
    *,
    any_producer: bool = False,
    older_than_s: float | None = None,
    progress: Callable[[Undecided, int], None] = lambda done, left: None,
    waiting: Callable[[float], None] = lambda seconds: None,
) -> list[Undecided]:
    """End what hangs; returns everything that was found, `applied` where a marker was written.

    Waits for transactions that are too young to tell (20 s for the relay's own; a minute at most for others', which are
    left then). `require_safe` is called before each marker, and stops the repair by raising. `progress` gets what was
    ended and how many are left, `waiting` the seconds. Killed anywhere, it is finished by another run.
    """

    async def mend() -> list[Undecided]:
        async with connect(settings) as transactions:
            ended: dict[tuple[Place, int], Undecided] = {}
            while True:
                found = await _find(transactions, settings.topic_prefix, any_producer, older_than_s)
                hanging = [item for item in found if item.state is State.hanging]
                waits_s = [item.decided_after_s - item.age_s for item in found if item.state is State.young]
                if waits_s and min(waits_s) < WAIT_AT_MOST_S:
                    waiting(min(waits_s))
                    await asyncio.sleep(min(LOOK_AGAIN_S, max(min(waits_s), 0.0)))
                    continue
                if not hanging:
                    return [*ended.values(), *found]
                if again := [item for item in hanging if (item.place, item.producer.producer_id) in ended]:
                    raise Refused(f"{again[0].place} took the marker and is undecided still", hint="afluente doctor")
                for number, item in enumerate(hanging, start=1):
                    require_safe()
                    faults.point("relay.repair.before_marker")
                    await transactions.end(item.place, item.producer, commit=item.commit)
                    faults.point("relay.repair.after_marker")
                    ended[item.place, item.producer.producer_id] = done = replace(item, applied=True)
                    _log.warning(
                        "relay.transaction_ended",
                        topic=item.place.topic,
                        partition=item.place.partition,
                        offset=item.start_offset,
                        producer_id=item.producer.producer_id,
                        outcome="commit" if item.commit else "abort",
                    )
                    progress(done, len(hanging) - number)
                # Looked at once more: only the leaders can say that it is done.

    return asyncio.run(mend())


def order(topics: Topics, place: Place) -> tuple[int, Place]:
    """Sorts places for a repair: events, dead letters, positions."""
    return {topics.relay_dead_letter: 1, topics.positions: 2}.get(place.topic, 0), place


async def _find(
    transactions: Transactions, prefix: str, any_producer: bool, older_than_s: float | None
) -> list[Undecided]:
    """1. who is in our partitions, 2. what their coordinators know, 3. is it still open, 4. whose, and how old."""
    topics = Topics(prefix)
    wanted = [*topics.families(), topics.relay_dead_letter, topics.positions]
    partitions = await transactions.partitions(wanted)
    if missing := [topic for topic in wanted if topic not in partitions]:
        raise Refused(f"topic {missing[0]} does not exist", hint="afluente topics apply")
    # 1
    states = await transactions.producers(Place(topic, n) for topic in wanted for n in range(partitions[topic]))
    opened = {place: [s for s in found if s.start_offset is not None] for place, found in states.items()}
    opened = {place: found for place, found in opened.items() if found}
    if not opened:
        return []
    producers = {state.producer_id for found in opened.values() for state in found}
    lanes = await _lanes(transactions, topics, producers, states)
    # 2. After 1: a coordinator knows a transaction before any partition does, so what it does not know here it has
    # forgotten, unless that has ended in between.
    names = {prefix + lane.key for lane in lanes.values()}
    known = await transactions.known(producers, names)
    # 3
    still = await transactions.producers(opened)
    now = time.time()
    # 4
    ours = _lane_pattern(prefix)
    items = []
    for place, found in opened.items():
        for state in found:
            if not any(_same(state, other) for other in still[place]):
                continue
            at = known.get(state.producer_id)
            own = state.producer_id in lanes or (at is not None and ours.fullmatch(at.transactional_id) is not None)
            items.append(_judged(place, state, at, own, now, any_producer, older_than_s))
    items = _whole(items)
    hanging = {item.producer.producer_id for item in items if item.state is State.hanging}
    pieces = {number: [item for item in items if item.producer.producer_id == number] for number in hanging}
    committed = {
        number
        for number in hanging & lanes.keys()
        if await _is_committed(transactions, pieces[number], lanes[number], states)
    }
    items = [replace(item, commit=item.producer.producer_id in committed) for item in items]
    return sorted(items, key=lambda item: order(topics, item.place))


def _judged(
    place: Place,
    state: ProducerState,
    known: Known | None,
    own: bool,
    now: float,
    any_producer: bool,
    older_than_s: float | None,
) -> Undecided:
    age_s = now - state.last_timestamp / 1000
    timeout_ms = known.timeout_ms if known is not None else TRANSACTION_TIMEOUT_MS if own else FOREIGN_TIMEOUT_MS
    limit_s = older_than_s if older_than_s is not None else timeout_ms / 1000 + CLEANUP_INTERVAL_S
    if known is not None and known.will_end(place):
        judged = State.under_way
    elif not own and not any_producer:
        judged = State.foreign if age_s > limit_s else State.under_way
    else:
        judged = State.hanging if age_s > limit_s else State.young
    assert state.start_offset is not None
    return Undecided(
        place=place,
        producer=state,
        start_offset=state.start_offset,
        transactional_id=known.transactional_id if known is not None else None,
        age_s=age_s,
        decided_after_s=limit_s,
        state=judged,
    )


def _whole(items: Sequence[Undecided]) -> list[Undecided]:
    """A producer's transaction is one in all its partitions: what its coordinator will yet end in one of them decides
    for the rest, and none is of age before all are."""
    for state in (State.young, State.under_way):
        producers = {item.producer.producer_id for item in items if item.state is state}
        items = [replace(item, state=state) if item.producer.producer_id in producers else item for item in items]
    return list(items)


def _same(one: ProducerState, other: ProducerState) -> bool:
    return (one.producer_id, one.start_offset) == (other.producer_id, other.start_offset)


def _lane_pattern(prefix: str) -> re.Pattern[str]:
    """The transactional ids of the relays of these topics, which are the names of their lanes."""
    return re.compile(re.escape(prefix) + r"relay-\d+-\d+")


# How the lost transaction was decided, as far as any of its partitions knows.


@dataclass(frozen=True, slots=True)
class _Lane:
    """The partition of the positions that a producer writes, the key it uses, and its batches there, the last ones."""

    place: Place
    key: str
    written: Sequence[Batch]


async def _lanes(
    transactions: Transactions,
    topics: Topics,
    producers: Iterable[int],
    states: Mapping[Place, Sequence[ProducerState]],
) -> dict[int, _Lane]:
    """The relays among the producers: those that write positions, as nobody else does."""
    wanted, lanes = set(producers), dict[int, _Lane]()
    listed = {
        state.producer_id for place, found in states.items() if place.topic == topics.positions for state in found
    }
    for place, found in states.items():
        if place.topic != topics.positions:
            continue
        # One that is in no list may have been forgotten there: then every lane's partition is looked through.
        sought = {state.producer_id for state in found} & wanted | (wanted - listed)
        if not sought:
            continue
        end = await transactions.offset_at(place, -1)
        begin = max(await transactions.offset_at(place, -2), end - LOOK_BACK)
        written = [batch async for batch in transactions.batches(place, begin, keys=True)]
        for producer_id in sought:
            own = [batch for batch in written if batch.producer_id == producer_id]
            if keys := [batch.key for batch in own if batch.commit is None and batch.key]:
                lanes[producer_id] = _Lane(place, keys[-1].decode(errors="replace"), own)
    return lanes


async def _is_committed(
    transactions: Transactions,
    pieces: Sequence[Undecided],
    lane: _Lane,
    states: Mapping[Place, Sequence[ProducerState]],
) -> bool:
    """Whether another part of the transaction whose undecided parts are `pieces` is committed."""
    open_at = {piece.place: piece.start_offset for piece in pieces}
    producer_id = pieces[0].producer.producer_id
    if lane.place not in open_at:
        # Its position was sent last: if it is there at all, then its marker is newer than the undecided events.
        newest = max(piece.producer.last_timestamp for piece in pieces)
        ends = [batch.commit for batch in lane.written if batch.commit is not None and batch.max_timestamp >= newest]
        return bool(ends) and ends[0] is True
    markers = [b.max_timestamp for b in lane.written if b.commit is not None and b.offset < open_at[lane.place]]
    if not markers:
        return False  # its producer's first transaction: a claim, which has no events
    is_forgotten = max(piece.age_s for piece in pieces) > REMEMBERED_S
    outcomes: dict[bool, Place] = {}
    for place, found in states.items():
        if place in open_at or place == lane.place:
            continue
        if is_forgotten or any(state.producer_id == producer_id for state in found):
            begin = await transactions.offset_at(place, markers[-1] + 1)
            batches = [batch async for batch in transactions.batches(place, begin) if batch.producer_id == producer_id]
            if (commit := _ended(batches, markers[-1])) is not None:
                outcomes[commit] = place
    if len(outcomes) > 1:
        raise Refused(
            f"a transaction of producer {producer_id} is committed in {outcomes[True]} and aborted in "
            f"{outcomes[False]}: somebody ended a part of it by hand",
            hint=f"end it as you judge right (kafka-transactions.sh abort) in {', '.join(map(str, open_at))}, then: "
            "afluente relay verify",
        )
    return True in outcomes


def _ended(batches: Iterable[Batch], after: int) -> bool | None:
    """How the transaction ended whose batches are newer than `after`; None when it is not in this partition."""
    has_begun = False
    for batch in batches:
        if batch.commit is None:
            has_begun = has_begun or batch.max_timestamp > after
        elif has_begun:
            return batch.commit
    return None
