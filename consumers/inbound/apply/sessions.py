"""The sessions of gateways: which status they have, and `system.session_changed` when that is another one.

What must stay true: the newest status by the gateway's time holds, whatever order they come in.
"""

from __future__ import annotations

from consumers.inbound.apply.writing import Writing
from producers.ingest.normalize import facts as f


class Sessions:
    def __init__(self, writing: Writing) -> None:
        self._writing = writing

    async def changed(self, fact: f.SessionChanged) -> None:
        channel_id = self._writing.part.channel_id
        row = await self._writing.one(
            "session_changed", channel_id=channel_id, session=fact.session, status=fact.status, at=fact.occurred_at
        )
        if row is None:
            return
        await self._writing.emit(
            "system.session_changed",
            entity_kind="channel",
            entity_id=channel_id,
            payload={
                "session": fact.session,
                "from_status": row[0],
                "to_status": row[1],
                "channel_id": str(channel_id),
            },
        )
        self._writing.counts["domain_events"] += 1
