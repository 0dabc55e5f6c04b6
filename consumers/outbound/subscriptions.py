"""Subscriptions as their owners handle them: make one, change its secret, switch it on again.

What must stay true: a secret is shown once, when it is made, and kept sealed for its subscription; there are at most
two that sign, the one in use and the one before it until its end. The caller's transaction holds everything; nothing
here commits.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from psycopg import Connection
from psycopg.errors import ForeignKeyViolation
from psycopg.rows import dict_row

import sql
from afluente.errors import Refused
from afluente.secrets import Keyring
from consumers.outbound import signature
from schemas.consumption import is_dispatched

ALL_EVENTS = "*"
MAX_OVERLAP = timedelta(days=30)

_EVENT_TYPE = re.compile(r"[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*")
_SQL = sql.queries("webhook_subscriptions")


class BadSubscription(Refused):
    """The subscription cannot be made or found as asked; the message says what to change."""


@dataclass(frozen=True)
class Enabled:
    """What `enable` did. ``disabled_at``: since when it had been off, None if it was on all along."""

    organization_id: UUID
    disabled_at: datetime | None


def purpose(subscription_id: UUID | str) -> str:
    """What a subscription's secrets are sealed for: one does not open as another subscription's."""
    return f"webhook-subscription:{UUID(str(subscription_id))}"


def create(
    conn: Connection[Any],
    keyring: Keyring,
    *,
    organization_id: UUID,
    url: str,
    event_types: Sequence[str],
    description: str = "",
) -> tuple[UUID, str]:
    """Subscribe ``url``, which the caller has checked, and return the subscription's id and its secret to show.

    ``event_types``: names, or `*` for all that is dispatched. Raises BadSubscription for a type that is never
    dispatched.
    """
    wanted = sorted(set(event_types))
    if not wanted:
        raise BadSubscription("a subscription needs at least one event type", hint="name them, or * for all")
    for event_type in wanted:
        if event_type != ALL_EVENTS and not _EVENT_TYPE.fullmatch(event_type):
            raise BadSubscription(f"{event_type!r} is not an event type like lead.created")
        if event_type != ALL_EVENTS and not is_dispatched(event_type):
            raise BadSubscription(f"{event_type} is never dispatched: it would feed itself, or is said to ourselves")
    try:
        row = conn.execute(
            _SQL["create"],
            {"organization_id": organization_id, "url": url, "event_types": wanted, "description": description},
        ).fetchone()
    except ForeignKeyViolation:
        raise BadSubscription(f"there is no organization {organization_id}") from None
    assert row is not None
    subscription_id: UUID = row[0]
    return subscription_id, _add_secret(conn, keyring, organization_id, subscription_id)


def rotate_secret(
    conn: Connection[Any], keyring: Keyring, subscription_id: UUID, *, now: datetime, overlap: timedelta
) -> str:
    """A new secret to show. The one in use goes on signing beside it for ``overlap``, then no more; 0 ends it at
    once."""
    if not timedelta(0) <= overlap <= MAX_OVERLAP:
        raise BadSubscription(f"the old secret may go on signing for 0 to {MAX_OVERLAP.days} days")
    found = _find(conn, subscription_id)
    which = {"organization_id": found["organization_id"], "subscription_id": subscription_id}
    conn.execute(_SQL["drop_ending_secrets"], which)
    conn.execute(_SQL["end_secret"], {**which, "valid_until": now + overlap})
    return _add_secret(conn, keyring, found["organization_id"], subscription_id)


def enable(conn: Connection[Any], subscription_id: UUID) -> Enabled:
    """Switch a subscription on, with a clean count of failures. What died while it was off stays dead until
    recovered."""
    found = _find(conn, subscription_id)
    conn.execute(_SQL["enable"], {"organization_id": found["organization_id"], "subscription_id": subscription_id})
    return Enabled(found["organization_id"], found["disabled_at"])


def require_enabled(conn: Connection[Any], subscription_id: UUID) -> None:
    """Raise BadSubscription unless it is there and enabled: whatever is delivered to a disabled one dies at once."""
    if _find(conn, subscription_id)["disabled_at"] is not None:
        raise BadSubscription(
            f"subscription {subscription_id} is disabled", hint=f"afluente webhook enable {subscription_id}"
        )


def listed(conn: Connection[Any], organization_id: UUID | None = None) -> list[dict[str, Any]]:
    """Every subscription, or one organization's, without secrets."""
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(_SQL["list"], {"organization_id": organization_id}).fetchall()


def _find(conn: Connection[Any], subscription_id: UUID) -> dict[str, Any]:
    with conn.cursor(row_factory=dict_row) as cursor:
        found = cursor.execute(_SQL["find"], {"subscription_id": subscription_id}).fetchone()
    if found is None:
        raise BadSubscription(f"there is no subscription {subscription_id}", hint="afluente webhook subscriptions")
    return found


def _add_secret(conn: Connection[Any], keyring: Keyring, organization_id: UUID, subscription_id: UUID) -> str:
    secret = signature.new_secret()
    conn.execute(
        _SQL["add_secret"],
        {
            "organization_id": organization_id,
            "subscription_id": subscription_id,
            "sealed": keyring.seal(secret.encode(), organization_id=organization_id, purpose=purpose(subscription_id)),
        },
    )
    return secret
