"""What workers have in common that POST signed documents to addresses of tenants: keys, client, document, and what the
client's failures mean.

What must stay true: a document's bytes are the same in every attempt; a host with no room is nobody's failure and uses
no attempt; what a receiver asks for with Retry-After is kept between bounds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Self
from uuid import UUID

from afluente.secrets import Keyring
from consumers.outbound.client import DEADLINE_S, Answer, HostBusy, OutboundClient
from consumers.worker import ExternalWorker, Snooze

if TYPE_CHECKING:
    from afluente.settings import WorkerSettings

# Room for a turn at a busy host before the call's own seconds begin.
TIMEOUT_S = 2 * DEADLINE_S + 5
BUSY_S = 5.0
# What a receiver may ask for with Retry-After: never at once, never out of sight.
_RETRY_AFTER_S = (1.0, 86_400.0)


class SendingWorker(ExternalWorker):
    def __init__(self, keyring: Keyring, client: OutboundClient) -> None:
        self._keyring = keyring
        self._client = client

    @classmethod
    def configure(cls, settings: WorkerSettings) -> Self:
        return cls(
            settings.secrets.need_keyring("it opens the secrets that sign what is sent"),
            OutboundClient(
                https_only=settings.environment.environment == "production",
                allowed=settings.outbound.allow_networks,
            ),
        )

    async def open(self) -> None:
        await self._client.__aenter__()

    async def close(self) -> None:
        await self._client.__aexit__()

    async def _post(self, url: str, body: bytes, headers: Callable[[], Mapping[str, str]]) -> Answer:
        """TargetRefused, CallFailed; Snooze while the host has no room. `headers` is asked when the call's turn has
        come: its time is that, whatever it waited."""
        try:
            return await self._client.post(url, body, headers)
        except HostBusy:
            raise Snooze(timedelta(seconds=BUSY_S), "the host has as many calls under way as it may") from None


def put_off_s(answer: Answer) -> float | None:
    """When the receiver asked to be asked again; None when it did not say."""
    if answer.retry_after_s is None:
        return None
    least, most = _RETRY_AFTER_S
    return min(max(answer.retry_after_s, least), most)


def document(event: str, delivery_id: UUID, occurred_at: datetime, happened_at: datetime, data: Any) -> bytes:
    """The bytes that are signed and sent. Text stays UTF-8."""
    return json.dumps(
        {
            "event": event,
            "occurred_at": _milliseconds(occurred_at),
            "happened_at": _milliseconds(happened_at),
            "delivery_id": str(delivery_id),
            "data": data,
        },
        ensure_ascii=False,
        separators=(",", ":"),
        allow_nan=False,
    ).encode()


def _milliseconds(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
