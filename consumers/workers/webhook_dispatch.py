"""``webhook-dispatch-worker``: tells an organization's subscribers about its events, by signed HTTP.

What must stay true:

* Each subscription is a target with deliveries of its own: a dead one is felt by nobody else.
* The delivery's id and body are the same in every attempt, after a restart and when reprocessed: the id is a UUID v5
  of event and subscription, ``occurred_at`` is when the delivery was first seen. Time, attempt number and signature
  are each attempt's own.
* Every call that was made is in ``webhook_delivery_attempts``, and every failed one is a ``webhook.delivery_failed``.
  Events of the webhook family are never dispatched: they would feed themselves.
* Ten failed attempts in a row disable the subscription, once: that is its circuit breaker. What waits for it is dead
  at once, with that reason, and `afluente webhook recover` brings it back.

The receiver honours the delivery id as its key, so a call whose outcome a crash took is simply made again.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, ClassVar
from uuid import UUID

from psycopg import AsyncConnection

import sql
from afluente import faults
from consumers.outbound import signature
from consumers.outbound.addresses import TargetRefused
from consumers.outbound.client import CallFailed
from consumers.outbound.sending import TIMEOUT_S, SendingWorker, document, put_off_s
from consumers.outbound.subscriptions import purpose
from consumers.worker import (
    ALL_BUT_WEBHOOK,
    Context,
    Delivery,
    Policy,
    Reject,
    RetryAfter,
)
from schemas import Event
from schemas.consumption import is_dispatched

FAILURES_TO_DISABLE = 10
DISABLED_BY_FAILURES = "10_consecutive_failures"
DISABLED_BY_RECEIVER = "receiver_answered_410"

ERROR_CHARS = 1000

_DELIVERIES = UUID("0c9d3a52-6f0e-5f0b-9f5b-7f1f3a6b6c1e")
_SQL = sql.queries("webhook_subscriptions")


def delivery_id(event_id: UUID, subscription_id: UUID) -> UUID:
    """The id that a receiver dedupes on: the same for the same two, on every machine and in every attempt."""
    return uuid.uuid5(_DELIVERIES, f"{event_id}:{subscription_id}")


def body(event: Event, delivery: UUID, occurred_at: datetime) -> bytes:
    """The bytes that are signed and sent. Nothing is put in that differs from one attempt to the next."""
    # A fact about a contact carries the time it happened; other events are written in the transaction that makes them
    # happen.
    stated = event.payload.get("occurred_at") if event.event_type.startswith("contact_event.") else None
    happened_at = datetime.fromisoformat(stated) if isinstance(stated, str) else event.created_at
    return document(event.event_type, delivery, occurred_at, happened_at, event.payload)


@dataclass(frozen=True)
class Prepared:
    """One attempt, before it is made."""

    subscription_id: UUID
    delivery_id: UUID
    url: str
    attempt: int
    body: bytes
    # Kept out of every representation: those reach logs and tracebacks.
    secrets: tuple[str, ...] = field(repr=False)


@dataclass(frozen=True)
class Attempt:
    """One attempt, after it was made. ``error`` is None for a success."""

    started_at: datetime
    duration_ms: int
    status_code: int | None = None
    error: str | None = None
    snippet: str = ""


class AttemptFailed(Exception):
    """The receiver was not reached or did not say 2xx: the backoff says when it is asked again."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(attempt.error)
        self.attempt = attempt


class AttemptPutOff(RetryAfter):
    """The receiver did not take it and said when it will."""

    def __init__(self, attempt: Attempt, seconds: float) -> None:
        super().__init__(seconds, attempt.error or "")
        self.attempt = attempt


class AttemptHopeless(Exception):
    """Asking again cannot help: the target is not one we call, or the receiver said that it is gone."""

    def __init__(self, attempt: Attempt, *, disable: bool = False) -> None:
        super().__init__(attempt.error)
        self.attempt = attempt
        self.disable = disable


class WebhookDispatchWorker(SendingWorker):
    """One delivery is one event for one subscription."""

    name: ClassVar[str] = "webhook-dispatch-worker"
    event_types: ClassVar[frozenset[str]] = ALL_BUT_WEBHOOK
    policy: ClassVar[Policy] = Policy(timeout_s=TIMEOUT_S, reject_on=(AttemptHopeless,))

    def key(self, event: Event, target: str) -> str:
        return target or str(event.id)

    async def targets(self, event: Event, conn: AsyncConnection[Any]) -> Sequence[str]:
        if not is_dispatched(event.event_type):
            return ()
        found = await conn.execute(
            _SQL["targets"], {"organization_id": event.organization_id, "event_type": event.event_type}
        )
        return [str(row[0]) for row in await found.fetchall()]

    async def prepare(self, delivery: Delivery, ctx: Context) -> Prepared:
        event = delivery.event
        subscription_id = UUID(delivery.target)
        own_id = delivery_id(event.id, subscription_id)
        async with ctx.as_worker():
            found = await ctx.connection.execute(
                _SQL["prepare"],
                {
                    "organization_id": event.organization_id,
                    "subscription_id": subscription_id,
                    "delivery_id": own_id,
                    "event_id": event.id,
                    "event_created_at": event.created_at,
                    "worker": self.name,
                    "target": delivery.target,
                    "now": ctx.now(),
                },
            )
            row = await found.fetchone()
        if row is None:
            raise Reject("the subscription is gone")
        url, enabled, disabled_reason, first_seen_at, attempts, sealed = row
        if not enabled:
            raise Reject(_disabled(disabled_reason))
        secrets = tuple(
            self._keyring.open(text, organization_id=event.organization_id, purpose=purpose(subscription_id)).decode()
            for text in sealed
        )
        return Prepared(
            subscription_id=subscription_id,
            delivery_id=own_id,
            url=url,
            attempt=attempts + 1,
            body=body(event, own_id, first_seen_at or ctx.now()),
            secrets=secrets,
        )

    async def call(self, delivery: Delivery, prepared: Prepared) -> tuple[Prepared, Attempt]:
        began = time.monotonic()
        attempt = Attempt(started_at=datetime.now(UTC), duration_ms=0)

        def headers() -> dict[str, str]:
            nonlocal began, attempt
            began = time.monotonic()
            attempt = replace(attempt, started_at=datetime.now(UTC))
            return signature.headers(
                prepared.secrets,
                delivery_id=str(prepared.delivery_id),
                event_type=delivery.event.event_type,
                attempt=prepared.attempt,
                timestamp=int(attempt.started_at.timestamp()),
                body=prepared.body,
            )

        def ended(**outcome: Any) -> Attempt:
            return replace(attempt, duration_ms=int((time.monotonic() - began) * 1000), **outcome)

        try:
            answer = await self._post(prepared.url, prepared.body, headers)
        except TargetRefused as refused:
            raise AttemptHopeless(ended(error=f"refused: {refused}")) from None
        except CallFailed as failed:
            raise AttemptFailed(ended(error=f"{failed.kind}: {failed}")) from None
        faults.point("dispatch.after_call")
        if answer.is_success:
            return prepared, ended(status_code=answer.status, snippet=answer.snippet)
        unsuccessful = ended(
            status_code=answer.status, snippet=answer.snippet, error=f"the receiver answered {answer.status}"
        )
        if answer.status == 410:
            raise AttemptHopeless(unsuccessful, disable=True)
        if (seconds := put_off_s(answer)) is not None:
            raise AttemptPutOff(unsuccessful, seconds)
        raise AttemptFailed(unsuccessful)

    async def record(self, delivery: Delivery, result: tuple[Prepared, Attempt], ctx: Context) -> None:
        prepared, attempt = result
        await self._log(delivery, prepared, attempt, ctx)
        await ctx.connection.execute(
            _SQL["succeeded"],
            {
                "organization_id": delivery.organization_id,
                "subscription_id": prepared.subscription_id,
                "started_at": attempt.started_at,
            },
        )

    async def failed(self, delivery: Delivery, prepared: Prepared | None, error: BaseException, ctx: Context) -> None:
        if prepared is None:
            # Nothing was called: the subscription is gone or disabled, or its secret does not open.
            return
        if isinstance(error, AttemptFailed | AttemptPutOff | AttemptHopeless):
            attempt = error.attempt
        else:
            attempt = Attempt(started_at=ctx.now(), duration_ms=0, error=type(error).__name__)
        await self._log(delivery, prepared, attempt, ctx)
        payload: dict[str, Any] = {
            "subscription_id": str(prepared.subscription_id),
            "event_id": str(delivery.event.id),
            "attempt": prepared.attempt,
            "error": attempt.error,
        }
        if attempt.status_code is not None:
            payload["status_code"] = attempt.status_code
        await ctx.emit(
            "webhook.delivery_failed",
            entity_kind="webhook_subscription",
            entity_id=prepared.subscription_id,
            payload=payload,
        )
        await self._count(delivery, prepared, attempt, ctx, gone=isinstance(error, AttemptHopeless) and error.disable)

    async def _count(
        self, delivery: Delivery, prepared: Prepared, attempt: Attempt, ctx: Context, *, gone: bool
    ) -> None:
        """Count the failure, and disable the subscription if it was one too many: then nothing that waits for it may
        run."""
        reason = DISABLED_BY_RECEIVER if gone else DISABLED_BY_FAILURES
        counted = await ctx.connection.execute(
            _SQL["failed"],
            {
                "organization_id": delivery.organization_id,
                "subscription_id": prepared.subscription_id,
                "limit": 1 if gone else FAILURES_TO_DISABLE,
                "reason": reason,
                "error": attempt.error,
                "started_at": attempt.started_at,
            },
        )
        row = await counted.fetchone()
        if row is None:
            raise Reject("the subscription was disabled or removed meanwhile")
        if row[0]:
            return
        await ctx.emit(
            "webhook.subscription_disabled",
            entity_kind="webhook_subscription",
            entity_id=prepared.subscription_id,
            payload={"subscription_id": str(prepared.subscription_id), "reason": reason, "last_error": attempt.error},
        )
        await ctx.reject_waiting(_disabled(reason))
        raise Reject(_disabled(reason))

    async def _log(self, delivery: Delivery, prepared: Prepared, attempt: Attempt, ctx: Context) -> None:
        await ctx.connection.execute(
            _SQL["log_attempt"],
            {
                "organization_id": delivery.organization_id,
                "subscription_id": prepared.subscription_id,
                "delivery_id": prepared.delivery_id,
                "event_id": delivery.event.id,
                "event_type": delivery.event.event_type,
                "attempt": prepared.attempt,
                "started_at": attempt.started_at,
                "duration_ms": attempt.duration_ms,
                "status_code": attempt.status_code,
                "error": None if attempt.error is None else attempt.error[:ERROR_CHARS],
                "snippet": attempt.snippet,
            },
        )


def _disabled(reason: str) -> str:
    return f"the subscription is disabled: {reason}"
