"""`afluente relay status`."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import Any

from afluente.cli.output import Format, FormatOption, show


def status(format: FormatOption = Format.text) -> None:
    """Show the position, how many committed rows wait, who owns the lane, and how many rows are dead letters.

    JSON keys: lane, owner, owner_since, owner_silent_s, takeovers, lag_rows, lag_rows_at_least, lag_seconds, published,
    dead_lettered, number, written_at, written_by, position {s1, t1, s2, t2, last}, database, kafka_cluster.

    \b
    Examples:
      afluente relay status
      afluente relay status --format json
    """
    from afluente import kafka
    from afluente.settings import RelaySettings
    from producers.relay.service import look

    settings = RelaySettings.read(os.environ)
    # The admin client is silent: of a Kafka that is away there is one sentence, not the client's hundred lines.
    kafka.admin(settings.kafka).list_topics(timeout=kafka.METADATA_TIMEOUT_S)
    state = look(settings.kafka, settings.postgres.dsn)
    data: dict[str, Any] = {
        "lane": state.name,
        "owner": state.owner,
        "owner_since": state.owner_since,
        "owner_silent_s": None if state.owner_silent_s is None else round(state.owner_silent_s, 1),
        "takeovers": state.takeovers,
        "lag_rows": state.waiting.rows,
        "lag_rows_at_least": state.waiting.at_least,
        "lag_seconds": 0.0,
        "published": 0,
        "dead_lettered": 0,
        "number": None,
        "written_at": None,
        "written_by": None,
        "position": None,
        "database": None,
        "kafka_cluster": None,
    }
    if state.waiting.oldest is not None:
        data["lag_seconds"] = round((datetime.now(UTC) - state.waiting.oldest).total_seconds(), 3)
    if (position := state.position) is not None:
        entry = position.entries[0]
        place: dict[str, Any] = {"s1": str(entry.s1), "t1": entry.t1}
        if entry.window is not None:
            place |= {"s2": str(entry.window.s2), "t2": entry.window.t2, "last": entry.window.last}
        data |= {
            "published": position.published,
            "dead_lettered": position.dead_lettered,
            "number": position.number,
            "written_at": position.written_at,
            "written_by": position.instance,
            "position": place,
            "database": position.identity.database.name,
            "kafka_cluster": position.identity.kafka.cluster_id,
        }
    show(data, format)
