"""What a peer in Python says: that it has its partitions, once. Imports nothing of ours: any environment runs it."""

from __future__ import annotations

import json
from datetime import datetime, timezone

_said: list[bool] = []


def ready() -> None:
    if not _said:
        _said.append(True)
        print(json.dumps({"event": "peer.ready", "timestamp": datetime.now(timezone.utc).isoformat()}), flush=True)  # noqa: UP017
