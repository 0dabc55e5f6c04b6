"""``webhook-fetch-worker``: asks the sender what a thin webhook points to, and writes that down.

Nuvemshop says "order 1001 was paid" and no more. The question is a call outside any transaction, with retries of its
own, so it is not `webhook-normalize-worker`'s work: a shop whose API is slow or refuses holds up nobody else. Asking
twice is harmless, so a call whose outcome a crash took is simply made again.

Repeats are collapsed: a second "order 1001 was updated" is not asked for when the order was fetched after it came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar, Self
from uuid import UUID

from psycopg import AsyncConnection

import sql
from afluente.secrets import Keyring
from consumers.inbound import nuvemshop, part
from consumers.worker import Context, Delivery, ExternalWorker, Policy, Reject, RetryAfter
from producers.ingest import store
from producers.ingest.normalize import facts as f
from producers.ingest.normalize import needs_fetch
from producers.ingest.normalize.document import read_document
from schemas import Event

if TYPE_CHECKING:
    from afluente.settings import WorkerSettings

_SQL = sql.queries("webhook_events")


@dataclass(frozen=True)
class Question:
    """What to ask, and of whom. The token is never logged."""

    store_id: str
    resource: str
    identifier: str
    token: str

    def __repr__(self) -> str:
        return f"Question({self.resource} {self.identifier} of {self.store_id})"


@dataclass(frozen=True)
class Answer:
    """The resource, None if it is gone; and when it was asked for."""

    resource: Mapping[str, Any] | None
    asked_at: datetime


class WebhookFetchWorker(ExternalWorker):
    """Thin webhooks: the body says where to look."""

    name: ClassVar[str] = "webhook-fetch-worker"
    event_types: ClassVar[frozenset[str]] = frozenset({"webhook.received"})
    # The API gives a store two requests a second; who asks faster is refused.
    policy: ClassVar[Policy] = Policy(concurrency=50, organization_concurrency=2, timeout_s=nuvemshop.TIMEOUT_S + 5)

    def __init__(self, keyring: Keyring, api_url: str) -> None:
        self._keyring = keyring
        self._api_url = api_url
        self._client: nuvemshop.Client | None = None

    @classmethod
    def configure(cls, settings: WorkerSettings) -> Self:
        return cls(settings.secrets.need_keyring("it opens the access tokens"), settings.senders.nuvemshop_api_url)

    async def open(self) -> None:
        self._client = nuvemshop.Client(self._api_url)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def targets(self, event: Event, conn: AsyncConnection[Any]) -> Sequence[str]:
        return ("",) if needs_fetch(event.payload.get("source"), event.payload.get("topic")) else ()

    async def prepare(self, delivery: Delivery, ctx: Context) -> Question | None:
        """What to ask; None when nothing need be asked."""
        stored = await self._read(delivery, ctx)
        if stored is None or stored.subject is None or await self._collapsed(stored, delivery, ctx):
            return None
        async with ctx.as_worker():
            channel = await store.find_channel(
                ctx.connection, self._keyring, stored.source, stored.channel_id, ctx.now()
            )
        tokens = channel.secrets[store.API_TOKEN] if channel is not None else ()
        if channel is None or channel.external_id is None or not tokens:
            raise Reject("the channel has no store id or no api_token: set it, then retry this dead letter")
        resource, _, identifier = stored.subject.partition(":")
        return Question(channel.external_id, resource, identifier, tokens[-1].decode())

    async def call(self, delivery: Delivery, prepared: Question | None) -> Answer | None:
        if prepared is None:
            return None
        assert self._client is not None
        asked_at = datetime.now(UTC)
        try:
            body = await self._client.get(prepared.store_id, prepared.resource, prepared.identifier, prepared.token)
        except nuvemshop.TooMany as refused:
            raise RetryAfter(refused.wait_s, "the store's rate limit is used up") from None
        if body is None:
            return Answer(None, asked_at)
        document = read_document(body)
        if document is None:
            raise nuvemshop.ApiError("the answer is no JSON object")
        return Answer(document.value, asked_at)

    async def record(self, delivery: Delivery, result: Answer | None, ctx: Context) -> None:
        stored = await self._read(delivery, ctx)
        if stored is None:
            return
        if result is not None:
            context = stored.context(result.resource, fetched=True)
            await part.digest(stored, context, delivery, ctx, fetched_at=result.asked_at)
        elif stored.subject is None:
            await part.note(stored, delivery, ctx, f.unrecognised("unknown_shape:id"))
        else:
            await part.note(stored, delivery, ctx, f.ignored("fetched_since_it_came"))

    async def failed(self, delivery: Delivery, prepared: Any, error: BaseException, ctx: Context) -> None:
        """Where people look, it says that it is being tried, or that it is over."""
        stored = await self._read(delivery, ctx)
        if stored is not None:
            last = ctx.next_attempt_at is None
            await ctx.connection.execute(
                _SQL["failed_attempt"],
                {
                    "id": stored.id,
                    "organization_id": delivery.organization_id,
                    "status": "failed" if last else "received",
                    "reason": "sender_refuses" if isinstance(error, nuvemshop.NotAllowed) else "sender_not_reached",
                },
            )

    async def _read(self, delivery: Delivery, ctx: Context) -> part.StoredPart | None:
        return await part.read(ctx.connection, delivery.organization_id, UUID(delivery.data.webhook_event_id))

    async def _collapsed(self, stored: part.StoredPart, delivery: Delivery, ctx: Context) -> bool:
        """Whether what it points to was fetched after it came. What happens once is always looked at."""
        if not stored.topic.endswith(part.COLLAPSED_ACTIONS):
            return False
        cursor = await ctx.connection.execute(
            _SQL["fetched_since"],
            {
                "organization_id": delivery.organization_id,
                "channel_id": stored.channel_id,
                "subject": stored.subject,
                "received_at": stored.received_at,
            },
        )
        return await cursor.fetchone() is not None
