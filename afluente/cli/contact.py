"""`afluente contact`: the people of an organization.

Keys of the JSON: list `id, name, phone, email, subscriber_state, source, created_at, anonymized_at`; show the same and
`subscriber_state_at, updated_at, merged_ids, identities, tags, metrics`; timeline as `contact-events list`; merge
`applied, contact_id, merged, merged_fields, moved`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal
from uuid import UUID

import typer

from afluente.cli.exits import Exit
from afluente.cli.output import Format, FormatOption, say, show
from afluente.cli.who import agree, who

app = typer.Typer(help="Find, show and merge contacts.", no_args_is_help=True)

Organization = Annotated[str, typer.Option("--org", help="the organization: its id, slug or name")]
Contact = Annotated[UUID, typer.Argument(help="id of the contact; one that was merged stands for the one that stayed")]


@app.command("list")
def list_(
    organization: Organization,
    search: Annotated[
        str | None, typer.Option(help="part of a name; or a whole phone, e-mail or id of a sender")
    ] = None,
    tag: Annotated[str | None, typer.Option(help="only with this tag")] = None,
    limit: Annotated[int, typer.Option(help="at most so many, newest first", min=1, max=10_000)] = 50,
    before: Annotated[
        UUID | None, typer.Option(help="only older ones than this: the last id of the page before")
    ] = None,
    format: FormatOption = Format.text,
) -> None:
    """Show contacts, without those merged into others. Exit 3 when there is none.

    \b
    Examples:
      afluente contact list --org "Loja Azul" --search "11 98765-4321"
      afluente contact list --org "Loja Azul" --tag vip --format jsonl
    """
    from producers import contacts

    with acting(organization, "list") as (conn, organization_id):
        rows = contacts.found(conn, organization_id, search=search, tag=tag, before=before, limit=limit)
    show(rows, format, ["id", "name", "phone", "email", "subscriber_state", "created_at"])
    if not rows:
        say("no contact of that kind")
        raise typer.Exit(Exit.FOUND)
    if len(rows) == limit:
        say(f"older ones: --before {rows[-1]['id']}")


@app.command("show")
def show_(contact: Contact, organization: Organization, format: FormatOption = Format.text) -> None:
    """Show a contact: identities, tags, what was merged into it, and its metrics (all ids of the person together).

    \b
    Example:
      afluente contact show 0199b2a4-... --org "Loja Azul"
    """
    from producers import contacts

    with acting(organization, "show") as (conn, organization_id):
        found = contacts.shown(conn, organization_id, contact)
    if format in (Format.json, Format.jsonl):
        show(found, format)
        return
    lists = {name: found.pop(name) for name in ("identities", "metrics")}
    show({**found, "tags": ", ".join(found["tags"]), "merged_ids": ", ".join(map(str, found["merged_ids"]))}, format)
    if format is Format.text:
        for name, rows in lists.items():
            if rows:
                print(f"\n{name}")
                show(rows, format)
    say(f"next: afluente contact timeline {found['id']} --org {organization!r}")


@app.command()
def timeline(
    contact: Contact,
    organization: Organization,
    category: Annotated[
        Literal["ecommerce", "messaging", "tracking", "engagement", "contact", "custom"] | None,
        typer.Option(help="only of metrics of this category"),
    ] = None,
    source: Annotated[str | None, typer.Option(help="only from this source, such as shopify")] = None,
    since: Annotated[str | None, typer.Option(help="happened since: ISO time, 2h, 30d, yesterday")] = None,
    until: Annotated[str | None, typer.Option(help="happened before")] = None,
    limit: Annotated[int, typer.Option(help="at most so many, newest first", min=1, max=10_000)] = 50,
    format: FormatOption = Format.text,
) -> None:
    """Show what happened to a contact, newest first: under all ids that were merged. Exit 3 when there is nothing.

    \b
    Example:
      afluente contact timeline 0199b2a4-... --org "Loja Azul" --since 30d
    """
    from datetime import UTC, datetime

    from afluente.cli.dlq import parse_time
    from producers import contacts

    now = datetime.now(UTC)
    with acting(organization, "timeline") as (conn, organization_id):
        contacts.shown(conn, organization_id, contact)  # there is one
        rows = contacts.events(
            conn,
            organization_id,
            contact_id=contact,
            source=source,
            since=parse_time(since, now),
            until=parse_time(until, now),
            category=category,
            limit=limit,
        )
    show(rows, format, ["occurred_at", "event_type", "metric_name", "value", "currency", "source", "id"])
    if not rows:
        say("nothing of that kind happened")
        raise typer.Exit(Exit.FOUND)


@app.command()
def merge(
    contact: Annotated[UUID, typer.Argument(help="the contact that goes")],
    into: Annotated[UUID, typer.Option("--into", help="the contact that stays")],
    organization: Organization,
    reason: Annotated[str, typer.Option("--reason", help="why they are one person; goes to the audit log")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show what would be moved")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
    format: FormatOption = Format.text,
) -> None:
    """Say that two contacts are one person. There is no way back.

    Identities, tags, conversations, messages, orders, leads, automation runs and links go to the one that stays;
    contact events keep the id they were recorded with and count for it. What still comes for the other one lands there
    too. Exit 3 when they are one already.

    \b
    Examples:
      afluente contact merge 0199b2a4-... --into 0199b2a5-... --org "Loja Azul" --reason "same phone" --dry-run
      afluente contact merge 0199b2a4-... --into 0199b2a5-... --org "Loja Azul" --reason "same phone" --yes
    """
    from producers import contacts

    with acting(organization, "merge", keep=False) as (conn, _):
        found = {"applied": False, **contacts.merge(conn, contact, into, actor=who(), reason=reason)}
    if found["merged"] and not dry_run:
        agree(f"merge {contact} into {found['contact_id']}, with {_words(found['moved'])}?", yes)
        with acting(organization, "merge") as (conn, _):
            found = {"applied": True, **contacts.merge(conn, contact, into, actor=who(), reason=reason)}
    show(found, format)
    if not found["merged"]:
        say("they are one contact already: nothing done")
        raise typer.Exit(Exit.FOUND)
    if dry_run:
        say("this was a dry run: nothing was done")
        return
    say(f"next: afluente contact show {found['contact_id']} --org {organization!r}")


def _words(moved: dict[str, int]) -> str:
    return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in moved.items() if count) or "nothing to move"


@contextmanager
def acting(organization: str, command: str, *, keep: bool = True) -> Iterator[tuple[Any, UUID]]:
    """A transaction of an application of the organization; `keep`: it is committed."""
    from afluente import postgres
    from afluente.settings import MigrateSettings
    from producers import organizations

    settings = MigrateSettings.read(os.environ)
    with postgres.connect(settings.postgres.dsn, application_name=f"afluente {command}") as conn:
        organization_id = organizations.find(conn, organization)
        with conn.transaction(force_rollback=not keep), postgres.act_for_sync(conn, organization_id):
            yield conn, organization_id
