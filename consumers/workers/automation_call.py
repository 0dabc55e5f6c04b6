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

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Self
from uuid import UUID

from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

import sql
from afluente import faults
from afluente.errors import SettingsError
from afluente.secrets import Keyring, SecretError
from consumers.automations import book
from consumers.automations.definition import SIGNING, CallWebhook, Secret, read
from consumers.automations.facts import DUE
from consumers.automations.steps import CALL_REQUESTED, effect_id
from consumers.outbound import signature
from consumers.outbound.addresses import TargetRefused
from consumers.outbound.client import DEADLINE_S, CallFailed, HostBusy, OutboundClient
from consumers.worker import Breaker, Context, Delivery, ExternalWorker, Policy, RetryAfter, Snooze
from schemas import Event

if TYPE_CHECKING:
    from afluente.settings import WorkerSettings

RETRY_AFTER_S = (1.0, 86_400.0)
BUSY_S = 5.0
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


class AutomationCallWorker(ExternalWorker):
    """One delivery is one call of one step of a run."""

    name: ClassVar[str] = "automation-call-worker"
    event_types: ClassVar[frozenset[str]] = frozenset({CALL_REQUESTED})
    policy: ClassVar[Policy] = Policy(
        timeout_s=2 * DEADLINE_S + 5, reject_on=(Hopeless,), breaker=Breaker(failures=10, errors=(Unsuccessful,))
    )

    def __init__(self, keyring: Keyring, client: OutboundClient) -> None:
        self._keyring = keyring
        self._client = client

    @classmethod
    def configure(cls, settings: WorkerSettings) -> Self:
        if settings.secrets.keys is None:
            raise SettingsError([("AFLUENTE_SECRETS_KEY", None, "is required: it opens the secrets that sign calls")])
        return cls(
            Keyring.parse(settings.secrets.keys.get_secret_value()),
            OutboundClient(
                https_only=settings.environment.environment == "production",
                allowed=settings.outbound.allow_networks,
            ),
        )

    async def open(self) -> None:
        await self._client.__aenter__()

    async def close(self) -> None:
        await self._client.__aexit__()

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
        own_id = effect_id(run_id, number)
        return Call(
            id=own_id,
            url=step.url,
            body=_body(own_id, row["details"].get("data"), delivery.event.created_at),
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
            # The call's turn has come: its time is now, whatever it waited.
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
            answer = await self._client.post(prepared.url, prepared.body, headers)
        except HostBusy:
            raise Snooze(timedelta(seconds=BUSY_S), "the host has as many calls under way as it may") from None
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
        if answer.retry_after_s is not None:
            least, most = RETRY_AFTER_S
            raise RetryAfter(min(max(answer.retry_after_s, least), most), said)
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


def _body(own_id: UUID, data: Any, happened_at: datetime) -> bytes:
    """The bytes that are signed and sent, the same in each attempt."""
    moment = happened_at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return json.dumps(
        {"event": EVENT, "occurred_at": moment, "happened_at": moment, "delivery_id": str(own_id), "data": data},
        ensure_ascii=False,
        separators=(",", ":"),
        allow_nan=False,
    ).encode()
