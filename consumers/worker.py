"""What the author of a worker writes against: the two kinds of worker, their policy, and the ways out of a handler.

A worker says which events it takes, for which targets, and what it does with one delivery. The runtime does the rest:
once for each (worker, event, target), retries with backoff, order within a key, dead letters. There are four ways out
of a handler: return; raise `Snooze` (come back later, no attempt used); raise `Reject` (dead letter at once); raise
anything else (an attempt is used, the backoff says when the next one comes; `RetryAfter` says it itself).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self
from uuid import UUID

from psycopg import AsyncConnection

from schemas import Event

if TYPE_CHECKING:
    from afluente.settings import WorkerSettings

ALL_BUT_WEBHOOK: frozenset[str] = frozenset({"*"})
"""Takes every event type but those of the webhook family, which workers cause themselves."""

BACKOFF_S: tuple[int, ...] = (30, 60, 120, 300, 600, 1800, 3600, 7200)
"""Waits in seconds after the first, second, ... failed attempt; the last one repeats."""


@dataclass(frozen=True, slots=True)
class Rate:
    """At most `count` calls in any `per_s` seconds, over all members of the group and their restarts."""

    count: int
    per_s: float
    by: Literal["organization", "key"] = "organization"
    """What has the rate: each organization, or each key of each organization."""
    burst: int = 1
    """So many may come at once after a quiet time. They are of the same `count`: the higher, the slower the others."""

    def __post_init__(self) -> None:
        if self.count < 1 or self.per_s <= 0 or not 1 <= self.burst <= self.count:
            raise ValueError("a rate needs a positive count and time, and a burst between 1 and the count")


@dataclass(frozen=True, slots=True)
class Breaker:
    """When a destination (`ExternalWorker.destination`) is left alone for a while, over all members."""

    failures: int = 5
    """In a row: then it is not called for `open_s`, but what waits for it uses no attempt."""
    open_s: float = 30.0
    """Then one call is made to try; if it fails, twice as long, and so on."""
    max_open_s: float = 600.0
    errors: tuple[type[BaseException], ...] = (Exception,)
    """Which errors of a call say something about the destination. `Reject`, `Snooze` and `reject_on` never do."""

    def __post_init__(self) -> None:
        if self.failures < 1 or not 0 < self.open_s <= self.max_open_s:
            raise ValueError("a breaker needs a positive number of failures, and 0 < open_s <= max_open_s")


@dataclass(frozen=True, slots=True)
class Policy:
    """How the runtime treats a worker's deliveries."""

    attempts: int = 8
    """Runs of the handler before a delivery is dead: eight runs have seven waits between them."""
    backoff_s: tuple[int, ...] = BACKOFF_S
    """Each must be one of the retry topics' delays (`schemas.topics.RETRY_DELAYS_S`)."""
    jitter: float = 0.3
    """Each wait grows by a random share of itself between 0 and this."""
    delay: timedelta = timedelta(0)
    """How long after the event's created_at the first run may come. Any length."""
    timeout_s: float = 30.0
    """A handler (or an external call) still running after this is cancelled: an attempt."""
    concurrency: int = 200
    """Calls of an external worker in flight at once, in one process."""
    organization_concurrency: int | None = None
    """At most so many of them for one organization; None: no bound of its own."""
    ordering: Literal["none", "key"] = "none"
    """`key`: later events of a key wait, durably, behind one that waits for its retry. `none`: they pass it."""
    batch: int = 500
    """Deliveries of a transactional worker in one transaction."""
    reject_on: tuple[type[BaseException], ...] = ()
    """Errors of a handler that are dead letters at once, besides `Reject` and undecodable or invalid payloads."""
    rate: Rate | None = None
    """How often an external worker may call. What is over it waits, without an attempt and without a place among the
    calls in flight."""
    breaker: Breaker | None = None
    """When an external worker's destinations are left alone."""

    def __post_init__(self) -> None:
        if self.attempts < 1 or not self.backoff_s or min(self.backoff_s) <= 0:
            raise ValueError("a policy needs at least one attempt and positive waits")
        if not 0 <= self.jitter <= 1 or self.timeout_s <= 0 or self.concurrency < 1 or self.batch < 1:
            raise ValueError("jitter is a share between 0 and 1; timeout, concurrency and batch are positive")


class Snooze(Exception):
    """Come back at `until` (or so many seconds from now). No attempt is used. Any length: it is kept in Postgres."""

    def __init__(self, until: datetime | timedelta | float, reason: str = "") -> None:
        if isinstance(until, datetime) and until.tzinfo is None:
            raise ValueError("Snooze(until) needs a timezone: a naive datetime is a different moment on every machine")
        self.until = until
        self.reason = reason
        super().__init__(reason or f"snoozed until {until}")


class NotMade(Exception):
    """In `lookup`: the call was never made. It is made now."""


class Unknown(Exception):
    """Whether the call was made cannot be told: in `lookup`, people have to see to it (`needs_review`); in `call`, as
    if the process had died in it."""


class Reject(Exception):
    """Can never succeed: dead letter at once, with this reason."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class RetryAfter(Exception):
    """An attempt is used; the next one comes after `seconds` (what a Retry-After header says) instead of the
    backoff."""

    def __init__(self, seconds: float, reason: str) -> None:
        self.seconds = seconds
        self.reason = reason
        super().__init__(reason)


@dataclass(frozen=True, slots=True)
class Delivery:
    """One event for one target of one worker, at one attempt."""

    worker: str
    event: Event
    target: str
    attempt: int
    """From 1."""
    generation: int
    """0; raised by each reprocessing and each replay that asks for it."""

    @property
    def idempotency_key(self) -> str:
        """The same for every run of this delivery: `<worker>:<event id>:<target>`."""
        return f"{self.worker}:{self.event.id}:{self.target}"

    @property
    def organization_id(self) -> UUID:
        return self.event.organization_id

    @property
    def payload(self) -> dict[str, Any]:
        return self.event.payload

    @property
    def data(self) -> Any:
        """The typed payload of the event type. An invalid payload raises here, and is a dead letter at once."""
        try:
            return self.event.data
        except ValueError as error:
            raise Reject(f"invalid payload of {self.event.event_type}: {error}") from error


class Context(Protocol):
    """What a handler may use. Everything here belongs to the transaction that records the delivery."""

    @property
    def connection(self) -> AsyncConnection[Any]:
        """Inside the transaction, as `afluente_app` of the event's organization. Never commit or roll back on it."""
        ...

    @property
    def next_attempt_at(self) -> datetime | None:
        """In `failed`: when the next attempt is due; None when this failure makes the delivery a dead letter."""
        ...

    def now(self) -> datetime:
        """The runtime's clock, UTC."""
        ...

    def as_worker(self) -> AbstractAsyncContextManager[None]:
        """Inside it the connection is `afluente_worker`, which sees every organization: name the organization
        yourself."""
        ...

    async def emit(
        self,
        event_type: str,
        *,
        entity_kind: str,
        entity_id: UUID | None = None,
        payload: Mapping[str, Any],
        idempotency_key: str | None = None,
        deliver_at: datetime | None = None,
        caused_by: Event | None = None,
        organization_id: UUID | None = None,
    ) -> UUID:
        """Emit an event of the same organization, caused by this one. It exists if and only if the delivery is
        recorded.

        A batch handler says which event is the cause (`caused_by`); a periodic hook has none, and says whose the event
        is (`organization_id`).
        """
        ...

    async def reject_waiting(self, reason: str) -> int:
        """Make every other waiting delivery of this worker, organization and target a dead letter. Returns how many."""
        ...


class Worker:
    """Base of the two kinds. One worker is one consumer group, named `name`."""

    name: ClassVar[str]
    """kebab-case, ends in `-worker`; the consumer group and the prefix of its topics."""
    event_types: ClassVar[frozenset[str]]
    policy: ClassVar[Policy] = Policy()
    every: ClassVar[timedelta | None] = None
    """How often `periodic` runs; None: never."""

    @classmethod
    def configure(cls, settings: WorkerSettings) -> Self:
        """Build the worker of a process from its settings. Override when it needs keys, networks or addresses."""
        return cls()

    async def open(self) -> None:
        """Called once before the first delivery, in the event loop: open clients here."""

    async def close(self) -> None:
        """Called once after the last delivery."""

    def key(self, event: Event, target: str) -> str:
        """Deliveries with the same key run one after the other, in order. Default: the entity, else the event
        itself."""
        return str(event.entity_id or event.id)

    async def targets(self, event: Event, conn: AsyncConnection[Any]) -> Sequence[str]:
        """Whom the event is for, decided once, at first sight, in a transaction as `afluente_app` of its organization.

        Each target gets a delivery of its own. None at all: the event is recorded as skipped.
        """
        return ("",)

    async def periodic(self, ctx: Context) -> None:
        """Run once in each interval of `every` by one of the worker's processes, for what no event tells: to look for
        what is late, to clean up.

        `ctx.connection` is `afluente_worker`, which sees every organization: name the organization yourself. What is
        written, and that it ran, are one transaction: a crash undoes both, and it runs again. Bounded by
        `policy.timeout_s`, Postgres only. When it raises it is tried again after 30 s, or `every` if that is shorter.
        Not while the worker is paused.
        """


class TransactionalWorker(Worker):
    """Effects in Postgres only. Many deliveries share one transaction with their records; one that fails is
    separated."""

    async def handle(self, delivery: Delivery, ctx: Context) -> None:
        """Write the effects through `ctx.connection`. May run again for the same delivery only after a rollback."""
        raise NotImplementedError


class BatchWorker(Worker):
    """A transactional worker that takes its deliveries together, for effects written by one statement.

    `ctx.connection` is `afluente_worker`: the statement takes organization_id from each delivery and joins on it.
    """

    async def handle_batch(self, deliveries: Sequence[Delivery], ctx: Context) -> None:
        """Write all effects. When it raises, the batch is split until the failing delivery stands alone."""
        raise NotImplementedError


class ExternalWorker(Worker):
    """Calls the world outside. The claim is committed before the call; the outcome is recorded after it.

    A call may be made again with the same `delivery.idempotency_key` when the process dies between call and record.
    Where the receiver does not tell by that key a second call from the first, `resend` says otherwise.
    """

    resend: ClassVar[Literal["safe", "lookup", "never"]] = "safe"
    """What to do when a call may have been made and its outcome is not known: its process died or was stopped in it,
    it ran into its timeout, its `record` failed, or it raised `Unknown`. `safe`: call again with the same key.
    `lookup`: ask `lookup` first. `never`: leave it to people, as `needs_review` among the dead letters."""

    def destination(self, event: Event, target: str) -> str | None:
        """What the call depends on, for `policy.breaker`: a host, a provider and account. None: nothing that has a
        breaker."""
        return None

    async def prepare(self, delivery: Delivery, ctx: Context) -> Any:
        """In the transaction of the claim: read what the call needs, write what must be known before it."""
        return None

    async def call(self, delivery: Delivery, prepared: Any) -> Any:
        """Outside any transaction, bounded by `policy.timeout_s`. What it returns goes to `record`."""
        raise NotImplementedError

    async def lookup(self, delivery: Delivery, prepared: Any) -> Any:
        """With `resend = "lookup"`: what became of a call that may have been made. Outside any transaction, bounded
        like a call, and not counted by `policy.rate`.

        Return what the call would have returned: it is recorded, and not made again. Raise `NotMade` and it is made
        now; `Unknown` and people have to see to it. Any other error is an attempt, and after the last one people have
        to see to it as well.
        """
        raise NotImplementedError

    async def record(self, delivery: Delivery, result: Any, ctx: Context) -> None:
        """In the transaction that records the delivery as done."""

    async def record_all(self, done: Sequence[tuple[Delivery, Any]], ctx: Context) -> None:
        """The batch form of `record`, in its place: all that came back together, as (delivery, result), for effects
        written by one statement. When it raises, each is recorded by itself.

        `ctx.connection` is `afluente_worker`: the statement takes organization_id from each delivery and joins on it.
        """
        raise NotImplementedError

    async def failed(self, delivery: Delivery, prepared: Any, error: BaseException, ctx: Context) -> None:
        """In the transaction that records a failed attempt. Raise `Reject` to make the delivery a dead letter now; what
        was written before it stays."""
