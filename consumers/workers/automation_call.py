"""``automation-call-worker``: makes the calls outside of automations' steps (`call_webhook`), as signed HTTP.

What must stay true:

* A call's id follows from run and step: the same in every attempt, after a restart and when it is reprocessed. The
  receiver dedupes on it.
* The address is the tenant's, so it is called as outgoing webhooks are: closed to our network, by `consumers.outbound`.
* The run goes on by an event of the transaction that records the last word about the call. A run that was ended
  meanwhile is not called for, and does not go on.

It is a consumer group of its own: a receiver that hangs holds up no automation but those that call it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar
from uuid import UUID

from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

import sql
from afluente import faults
from afluente.secrets import SecretError
from consumers.automations import book
from consumers.automations.definition import SIGNING, CallWebhook, Secret, read
from consumers.automations.facts import DUE
from consumers.automations.steps import CALL_REQUESTED, effect_id
from consumers.outbound import signature
from consumers.outbound.addresses import TargetRefused
from consumers.outbound.client import CallFailed
from consumers.outbound.sending import TIMEOUT_S, SendingWorker, document, put_off_s
from consumers.worker import Breaker, Context, Delivery, Policy, RetryAfter, Snooze
from schemas import Event

PAUSED_S = 60.0
EVENT = "automation.step"

# Answers that another attempt may change; every other 4xx says that this call is wrong.
_RETRYABLE_4XX = (408, 409, 425, 429)
_SQL = sql.queries("automations")


@dataclass(frozen=True)
class Call:
    """A call to be made. Secrets are kept out of every representation."""

    id: UUID
    url: str
    body: bytes
    attempt: int
    headers: Mapping[str, str] = field(repr=False)
    secrets: tuple[str, ...] = field(repr=False)


@dataclass(frozen=True)
class NotCallable:
    """Why the call cannot be made, and whether it ever can."""

    reason: str
    is_final: bool


class Unsuccessful(Exception):
    """The receiver was not reached or did not say 2xx: the backoff says when it is asked again."""


class Unready(Exception):
    """It cannot be made now, which says nothing about the receiver."""


class Hopeless(Exception):
    """Asking again cannot help."""


class AutomationCallWorker(SendingWorker):
    """One delivery is one call of one step of a run."""

    name: ClassVar[str] = "automation-call-worker"
    event_types: ClassVar[frozenset[str]] = frozenset({CALL_REQUESTED})
    policy: ClassVar[Policy] = Policy(
        timeout_s=TIMEOUT_S, reject_on=(Hopeless,), breaker=Breaker(failures=10, errors=(Unsuccessful,))
    )

    def destination(self, event: Event, target: str) -> str | None:
        # The organization's own: what one tenant's definitions bring about closes no host to another.
        host = event.payload.get("host")
        return f"{event.organization_id}:{host}" if isinstance(host, str) else None

    async def prepare(self, delivery: Delivery, ctx: Context) -> Call | NotCallable | None:
        """What to send; None when the run does not wait for it any more."""
        due = delivery.data
        run_id, number = UUID(due.run_id), due.step
        parameters = {"organization_id": delivery.organization_id, "run_id": run_id, "step": number}
        async with ctx.connection.cursor(row_factory=dict_row) as cursor:
            row = await (await cursor.execute(_SQL["call"], parameters)).fetchone()
        if row is None or row["position"] != number or row["step_state"] not in ("calling", "failed"):
            return None
        if row["state"] not in ("calling", "held", "failed") or row["status"] == "disabled":
            return None
        if row["status"] == "paused":
            raise Snooze(timedelta(seconds=PAUSED_S), "the automation is paused")
        step = read(row["definition"]).steps[number]
        assert isinstance(step, CallWebhook)
        # What is wrong with the secrets is said by the call, so that the run hears of it.
        try:
            opened = await self._open(delivery.organization_id, UUID(due.automation_id), step, ctx)
        except SecretError as error:
            return NotCallable(str(error), is_final=False)
        if missing := ({SIGNING} | {v.secret for v in step.headers.values() if isinstance(v, Secret)}) - opened.keys():
            return NotCallable(f"not set: the secret {', '.join(sorted(missing))} (afluente automation secret)", True)
        own_id, happened_at = effect_id(run_id, number), delivery.event.created_at
        return Call(
            id=own_id,
            url=step.url,
            body=document(EVENT, own_id, happened_at, happened_at, row["details"].get("data")),
            attempt=delivery.attempt,
            headers={
                name: opened[value.secret] if isinstance(value, Secret) else value
                for name, value in step.headers.items()
            },
            secrets=(opened[SIGNING],),
        )

    async def _open(
        self, organization_id: UUID, automation_id: UUID, step: CallWebhook, ctx: Context
    ) -> dict[str, str]:
        """The secrets that the step needs, in clear."""
        names = [SIGNING, *(value.secret for value in step.headers.values() if isinstance(value, Secret))]
        async with ctx.as_worker():
            found = await ctx.connection.execute(
                _SQL["secrets"], {"organization_id": organization_id, "automation_id": automation_id, "names": names}
            )
            rows = await found.fetchall()
        return {
            name: self._keyring.open(
                sealed, organization_id=organization_id, purpose=book.purpose(automation_id, name)
            ).decode()
            for name, sealed in rows
        }

    async def call(self, delivery: Delivery, prepared: Call | NotCallable | None) -> dict[str, Any] | None:
        if prepared is None:
            return None
        if isinstance(prepared, NotCallable):
            raise (Hopeless if prepared.is_final else Unready)(prepared.reason)

        def headers() -> dict[str, str]:
            return {
                **prepared.headers,
                **signature.headers(
                    prepared.secrets,
                    delivery_id=str(prepared.id),
                    event_type=EVENT,
                    attempt=prepared.attempt,
                    timestamp=int(datetime.now(UTC).timestamp()),
                    body=prepared.body,
                ),
            }

        try:
            answer = await self._post(prepared.url, prepared.body, headers)
        except TargetRefused as refused:
            raise Hopeless(f"refused: {refused}") from None
        except CallFailed as failed:
            raise Unsuccessful(f"{failed.kind}: {failed}") from None
        faults.point("automation.after_call")
        if answer.is_success:
            return {"status_code": answer.status, "answer": answer.snippet}
        said = f"the receiver answered {answer.status}"
        if 400 <= answer.status < 500 and answer.status not in _RETRYABLE_4XX:
            raise Hopeless(said)
        if (seconds := put_off_s(answer)) is not None:
            raise RetryAfter(seconds, said)
        raise Unsuccessful(said)

    async def record(self, delivery: Delivery, result: dict[str, Any] | None, ctx: Context) -> None:
        if result is not None:
            await self._end(delivery, ctx, "done", None, result)

    async def failed(self, delivery: Delivery, prepared: Any, error: BaseException, ctx: Context) -> None:
        """Where people look, it says that it is being tried; after the last attempt the run goes on, or fails."""
        said = str(error)[:1000] or type(error).__name__
        if ctx.next_attempt_at is None or isinstance(error, Hopeless):
            await self._end(delivery, ctx, "failed", said, {})
        else:
            due = delivery.data
            await ctx.connection.execute(
                _SQL["call_failed"],
                {
                    "organization_id": delivery.organization_id,
                    "run_id": UUID(due.run_id),
                    "step": due.step,
                    "error": said,
                },
            )

    async def _end(
        self, delivery: Delivery, ctx: Context, state: str, error: str | None, details: dict[str, Any]
    ) -> None:
        due, now = delivery.data, ctx.now()
        ended = await ctx.connection.execute(
            _SQL["end_call"],
            {
                "organization_id": delivery.organization_id,
                "run_id": UUID(due.run_id),
                "step": due.step,
                "state": state,
                "error": error,
                "details": Jsonb(details),
                "now": now,
            },
        )
        if await ended.fetchone() is not None:
            await ctx.emit(
                DUE,
                entity_kind="automation_run",
                entity_id=UUID(due.run_id),
                payload={
                    "automation_id": due.automation_id,
                    "run_id": due.run_id,
                    "step": due.step,
                    "contact_id": due.contact_id,
                    "due_at": now,
                },
            )
