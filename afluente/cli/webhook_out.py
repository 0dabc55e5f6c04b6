"""The outgoing half of `afluente webhook`: who is told about events, with which secret, and bringing back what died.

Keys of the JSON: subscribe and rotate-secret give `id, secret` (and `url`, `event_types` or `old_valid_until`);
subscriptions gives `id, organization_id, url, event_types, description, enabled, disabled_reason, disabled_at,
consecutive_failures, last_error, last_success_at, created_at`; enable gives `id, organization_id, disabled_at`.
"""

from __future__ import annotations

import os
from datetime import timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit
from uuid import UUID

import typer

from afluente.cli.exits import Exit
from afluente.cli.output import Format, FormatOption, say, show
from afluente.cli.who import agree, who

if TYPE_CHECKING:
    from afluente.settings import SubscriptionSettings

app = typer.Typer()

SubscriptionArgument = Annotated[UUID, typer.Argument(metavar="SUBSCRIPTION", help="its id")]
OrganizationOption = Annotated[str | None, typer.Option("--org", help="only this organization's: its id, slug or name")]


@app.command()
def subscribe(
    url: Annotated[str, typer.Argument(help="where deliveries are posted")],
    organization: Annotated[str, typer.Option("--org", help="whose events: its id, slug or name")],
    event_type: Annotated[
        list[str] | None, typer.Option("--type", help="an event type; may be repeated. Without it: all but webhook.*")
    ] = None,
    description: Annotated[str, typer.Option("--description", help="for people")] = "",
    format: FormatOption = Format.text,
) -> None:
    """Tell a URL about an organization's events. The secret that signs deliveries is shown once, here.

    How the receiver verifies a delivery: by either header, over the body as the bytes that came. While a secret is
    being rotated a header holds one signature for each secret; one that matches is enough.

    \b
      webhook-signature: v1,BASE64    Standard Webhooks, as its libraries verify it
        key      what the base64 after whsec_ decodes to
        message  webhook-id.webhook-timestamp.body
      X-Webhook-Signature: t=SECONDS,v1=HEX
        key      the whole secret as it is shown, whsec_ included
        message  t.X-Webhook-Delivery.body
      both are HMAC-SHA256; refuse a time that is minutes off
    \b
    In Python, with the second one:
      message = b"%s.%s." % (t.encode(), headers["X-Webhook-Delivery"].encode()) + body
      good = hmac.new(secret.encode(), message, hashlib.sha256).hexdigest()
      hmac.compare_digest(good, v1)

    \b
    Examples:
      afluente webhook subscribe https://example.com/hooks --org ORG --type lead.created --type lead.won
      afluente webhook subscribe https://example.com/hooks --org ORG --format json
    """
    from afluente import postgres
    from consumers.outbound import subscriptions
    from consumers.outbound.addresses import TargetRefused, parse_target
    from producers import organizations

    settings = _read()
    keyring = settings.secrets.need_keyring("secrets are stored sealed")
    production = settings.environment.environment == "production"
    try:
        parse_target(url, https_only=production, allowed=settings.outbound.allow_networks)
    except TargetRefused as refused:
        say(f"afluente: {url} would never be called: {refused}")
        if not production and (network := _near_network(url)):
            say(
                f"  try: AFLUENTE_WEBHOOK_ALLOW_NETWORKS={network}, for this command and for webhook-dispatch-worker"
                " (not in production: every tenant could have that network called)"
            )
        raise typer.Exit(Exit.USAGE) from None
    types = event_type or [subscriptions.ALL_EVENTS]
    with postgres.connect(settings.postgres.dsn, application_name="afluente-webhook") as conn:
        organization_id = organizations.identify(conn, organization)
        subscription, secret = subscriptions.create(
            conn, keyring, organization_id=organization_id, url=url, event_types=types, description=description
        )
    show({"id": subscription, "secret": secret, "url": url, "event_types": types}, format)
    say("the secret is not shown again; next: afluente webhook subscriptions")


@app.command(name="subscriptions")
def list_subscriptions(organization: OrganizationOption = None, format: FormatOption = Format.text) -> None:
    """List subscriptions: where they point, whether they are on, and why not. Exit 3 when there are none.

    \b
    Examples:
      afluente webhook subscriptions
      afluente webhook subscriptions --org ORG --format json
    """
    from afluente import postgres
    from consumers.outbound import subscriptions
    from producers import organizations

    with postgres.connect(_read().postgres.dsn, application_name="afluente-webhook") as conn:
        found = subscriptions.listed(conn, organizations.identify(conn, organization) if organization else None)
    columns = ["id", "url", "event_types", "enabled", "disabled_reason", "consecutive_failures", "last_success_at"]
    show(found, format, columns)
    if not found:
        raise typer.Exit(Exit.FOUND)
    if any(not row["enabled"] for row in found):
        say("next: afluente webhook enable SUBSCRIPTION, then afluente webhook recover SUBSCRIPTION --since TIME")


@app.command()
def enable(subscription: SubscriptionArgument, format: FormatOption = Format.text) -> None:
    """Switch a subscription on again, with a clean count of failures. What died meanwhile stays dead until `recover`.

    Exit 3 when it was on already.

    \b
    Examples:
      afluente webhook enable 0198c2a4-...
      afluente webhook enable 0198c2a4-... --format json
    """
    from afluente import postgres
    from consumers.outbound import subscriptions

    with postgres.connect(_read().postgres.dsn, application_name="afluente-webhook") as conn:
        done = subscriptions.enable(conn, subscription)
    show({"id": subscription, "organization_id": done.organization_id, "disabled_at": done.disabled_at}, format)
    if done.disabled_at is None:
        say("it was enabled already; its count of failures is 0 now")
        raise typer.Exit(Exit.FOUND)
    say(f"next: afluente webhook recover {subscription} --since {done.disabled_at.isoformat(timespec='seconds')}")


@app.command(name="rotate-secret")
def rotate_secret(
    subscription: SubscriptionArgument,
    overlap_hours: Annotated[
        float, typer.Option("--overlap-hours", min=0, help="how long the old secret signs beside the new one")
    ] = 24.0,
    format: FormatOption = Format.text,
) -> None:
    """Make a new secret and show it, once. Both sign until the old one ends, so that the receiver can change over.

    \b
    Examples:
      afluente webhook rotate-secret 0198c2a4-...
      afluente webhook rotate-secret 0198c2a4-... --overlap-hours 0    the old one leaked
    """
    from afluente import postgres
    from afluente.clock import SystemClock
    from consumers.outbound import subscriptions

    settings = _read()
    keyring = settings.secrets.need_keyring("secrets are stored sealed")
    now = SystemClock().now()
    overlap = timedelta(hours=overlap_hours)
    with postgres.connect(settings.postgres.dsn, application_name="afluente-webhook") as conn:
        secret = subscriptions.rotate_secret(conn, keyring, subscription, now=now, overlap=overlap)
    show({"id": subscription, "secret": secret, "old_valid_until": now + overlap}, format)
    say("the secret is not shown again")


@app.command()
def recover(
    subscription: SubscriptionArgument,
    since: Annotated[str, typer.Option("--since", help="what died since: ISO time, 2h, 3d, yesterday")],
    limit: Annotated[int, typer.Option("--limit", min=1, help="at most so many, the newest first")] = 10_000,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show what would be done, do nothing")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
    reason: Annotated[str, typer.Option("--reason", help="why, for the audit log")] = "",
    format: FormatOption = Format.text,
) -> None:
    """Deliver again what died for a subscription: the same delivery ids, the attempts counted on.

    The subscription must be enabled. Exit 3 when nothing died since, 5 when some could not be given to the worker (see
    `failed`). JSON keys: applied, count, ids, failed [{id, error}].

    \b
    Examples:
      afluente webhook recover 0198c2a4-... --since 2h --dry-run
      afluente webhook recover 0198c2a4-... --since 2026-11-29T20:00:00Z --yes
    """
    from datetime import UTC, datetime

    from afluente import postgres
    from afluente.cli.dlq import parse_time
    from afluente.settings import KafkaSettings
    from consumers import dead_letters
    from consumers.outbound import subscriptions
    from consumers.workers.webhook_dispatch import WebhookDispatchWorker

    settings = _read()
    kafka = KafkaSettings.read(os.environ)
    now = datetime.now(UTC)
    with postgres.connect(settings.postgres.dsn, application_name="afluente-webhook", autocommit=True) as conn:
        subscriptions.require_enabled(conn, subscription)
        wanted = dead_letters.Filter(
            worker=WebhookDispatchWorker.name, target=str(subscription), since=parse_time(since, now), limit=limit
        )
        letters = dead_letters.find(conn, wanted)
        if not letters:
            say("nothing died for this subscription since then")
            raise typer.Exit(Exit.FOUND)
        if dry_run:
            show(
                {"applied": False, "count": len(letters), "ids": [letter.id for letter in letters], "failed": []},
                format,
            )
            say("this was a dry run: nothing was done")
            return
        agree(f"deliver {len(letters):,} dead letters of this subscription again?", yes)
        done = dead_letters.reprocess(conn, kafka, letters, actor=who(), reason=reason, now=now)
    show({"applied": True, "count": len(done.done), "ids": done.done, "failed": done.failed}, format)
    if done.failed:
        raise typer.Exit(Exit.PARTLY if done.done else Exit.FAILED)
    say("next: afluente webhook subscriptions")


def _near_network(url: str) -> str | None:
    """For a URL on this machine or in a private network: what would have to be opened for it, as CIDR."""
    try:
        host = urlsplit(url).hostname or ""
        address = ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return None
    if address.is_loopback:
        return "127.0.0.0/8" if address.version == 4 else "::1/128"
    # link-local is where cloud machines keep their credentials: nothing to advise
    return f"{address}/{address.max_prefixlen}" if address.is_private and not address.is_link_local else None


def _read() -> SubscriptionSettings:
    from afluente.settings import SubscriptionSettings

    return SubscriptionSettings.read(os.environ)
