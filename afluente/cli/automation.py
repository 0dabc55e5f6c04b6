"""`afluente automation`: what an organization has done by itself, and what it did.

Keys of the JSON: list gives `id, organization_id, name, status, version, trigger_type, trigger_metric,
trigger_event_type, next_due_at, open_runs, bad_runs, last_run_at`; show adds `description, definition, created_at,
updated_at`; create and edit give `id, version, signing_secret, unset_secrets`; enable, pause and disable `id, status,
runs`; runs gives `id, automation_id, automation, version, state, reason, contact_id, position, wake_at,
trigger_event_id, trigger_event_type, started_at, finished_at, steps`; test gives `triggered, why, holds, conditions,
contact_id, state, reason, steps, emits`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from uuid import UUID

import typer

from afluente.cli import files
from afluente.cli.exits import Exit
from afluente.cli.output import Format, FormatOption, printable, say, show

if TYPE_CHECKING:
    from psycopg import Connection

    from afluente.settings import AutomationSettings
    from consumers.automations.book import Status

app = typer.Typer(help="Write, try and switch automations, and see their runs.", no_args_is_help=True)

AutomationArgument = Annotated[str, typer.Argument(metavar="AUTOMATION", help="its id, or its name")]
FileArgument = Annotated[str, typer.Argument(metavar="FILE", help="the definition as JSON; - reads it from stdin")]
OrganizationOption = Annotated[str | None, typer.Option("--org", help="only this organization's: its id, slug or name")]

_LIST = ["id", "name", "status", "version", "trigger_type", "next_due_at", "open_runs", "bad_runs", "last_run_at"]
_RUNS = ["id", "automation", "version", "state", "reason", "contact_id", "wake_at", "started_at", "finished_at"]
_STEPS = ["step", "type", "state", "reason", "attempt", "error", "outcome", "wake_at"]


@app.command("list")
def list_(organization: OrganizationOption = None, format: FormatOption = Format.text) -> None:
    """List automations: what starts them, whether they are on, how many runs are open, and went wrong in 30 days.

    Exit 3 when there are none.

    \b
    Examples:
      afluente automation list
      afluente automation list --org "Loja Azul" --format json
    """
    from consumers.automations import book

    with _connected() as conn:
        rows = book.listed(conn, _organization(conn, organization))
    show(rows, format, _LIST)
    if not rows:
        raise typer.Exit(Exit.FOUND)


@app.command("show")
def show_(
    automation: AutomationArgument, organization: OrganizationOption = None, format: FormatOption = Format.text
) -> None:
    """Show one automation with its definition, which `edit` takes back.

    \b
    Examples:
      afluente automation show "Obrigado pela compra" --org ORG
      afluente automation show 0198c2a4-... --format json
    """
    from consumers.automations import book

    with _connected() as conn:
        found = book.find(conn, automation, _organization(conn, organization))
    definition = found.pop("definition")
    if format == Format.text:
        show(found, format)
        show(definition, Format.json)
    else:
        show(found | {"definition": definition}, format)


@app.command()
def create(
    file: FileArgument,
    organization: Annotated[str, typer.Option("--org", help="whose it is: its id, slug or name")],
    enable: Annotated[bool, typer.Option("--enable", help="switch it on at once")] = False,
    format: FormatOption = Format.text,
) -> None:
    """Write an automation down. It is off until it is enabled; `test` tries it before.

    A definition, whole. Conditions and `when` may be left out.

    \b
      {"name": "Obrigado pela compra",
       "trigger": {"type": "order_paid"},
       "conditions": {"all": [
         {"field": "event.value", "op": "gte", "value": 100},
         {"not": {"field": "contact.tags", "op": "contains", "value": "vip"}}]},
       "steps": [
         {"type": "add_tag", "tag": "vip"},
         {"type": "send_message",
          "body": "Oi {{ contact.first_name | tudo bem }}! {{ link: https://loja.example/vip }}"},
         {"type": "wait", "for": "2d"},
         {"type": "send_template", "template": "novidades", "parameters": ["{{ contact.first_name }}"],
          "when": {"field": "contact.subscriber_state", "op": "eq", "value": "subscribed"}},
         {"type": "call_webhook", "url": "https://erp.example/vip",
          "headers": {"Authorization": {"secret": "erp"}}, "on_error": "continue"}]}
    \b
    Triggers
      order_created order_paid checkout_created cart_abandoned tracking_updated message_received
      new_contact tag_added                       the metric of that name in the seed's map
      {"type": "metric", "metric": NAME}          any other metric
      {"type": "contact_event", "event_type": T}  such as form_submitted
      {"type": "event", "event_type": T}          such as lead.stage_changed
      {"type": "webhook", "channel": ID, "source": S, "topic": T, "contact": {"phone": PATH}}
                                                  S: shopify, or the source in a generic one's mapping
      {"type": "schedule", "cron": "0 9 * * mon-fri", "audience": "contacts" | {"tag": T}}
    \b
    Steps
      send_message(body, channel) send_template(template, language, parameters, channel) add_tag(tag) remove_tag(tag)
      close_conversation(note) ai_respond(instructions, channel) call_webhook(url, headers, data, on_error)
      wait(for: 10s, 2h, 1d12h | until: 09:00, 2026-12-24T09:00)
    channel: id of a WhatsApp connection; left out: that of the contact's conversation, else the only one there is
    \b
    Fields: event.value event.currency event.properties.* contact.name contact.tags message.text webhook.body.* ...
    Ops: eq ne gt gte lt lte in not_in contains not_contains starts_with ends_with exists

    \b
    Examples:
      afluente automation create obrigado.json --org "Loja Azul"
      afluente automation create - --org ORG --enable < obrigado.json
    """
    from datetime import UTC, datetime

    from consumers.automations import book

    source = files.read_json(file)
    _check_calls(source)
    with _connected() as conn:
        organization_id = _organization(conn, organization)
        assert organization_id is not None
        written = book.create(conn, _settings().secrets.keyring, organization_id, source)
        if enable:
            book.set_status(conn, book.find(conn, str(written.id)), "enabled", datetime.now(UTC))
    _say_written(written, format)
    say(f"next: afluente automation test {written.id} --event EVENT" + ("" if enable else f"; enable {written.id}"))


@app.command()
def edit(
    automation: AutomationArgument,
    file: FileArgument,
    organization: OrganizationOption = None,
    format: FormatOption = Format.text,
) -> None:
    """Give an automation a new version. Runs that are under way go on with the version they began with.

    \b
    Examples:
      afluente automation edit "Obrigado pela compra" obrigado.json --org ORG
    """
    from datetime import UTC, datetime

    from consumers.automations import book

    source = files.read_json(file)
    _check_calls(source)
    with _connected() as conn:
        found = book.find(conn, automation, _organization(conn, organization))
        written = book.edit(conn, _settings().secrets.keyring, found, source, datetime.now(UTC))
    _say_written(written, format)


@app.command()
def enable(
    automation: AutomationArgument, organization: OrganizationOption = None, format: FormatOption = Format.text
) -> None:
    """Switch an automation on: for what happens from now on. What was held while it was paused goes on. Exit 3 when it
    was on already.

    \b
    Example:
      afluente automation enable "Obrigado pela compra" --org ORG
    """
    _switch(automation, organization, "enabled", format)


@app.command()
def pause(
    automation: AutomationArgument, organization: OrganizationOption = None, format: FormatOption = Format.text
) -> None:
    """Stop an automation for a while: nothing begins, and runs that wake up are held until it is enabled.

    Exit 3 when it is paused already.

    \b
    Example:
      afluente automation pause "Obrigado pela compra" --org ORG
    """
    _switch(automation, organization, "paused", format)


@app.command()
def disable(
    automation: AutomationArgument, organization: OrganizationOption = None, format: FormatOption = Format.text
) -> None:
    """Switch an automation off: nothing begins, and runs that wait are cancelled. Exit 3 when it is off already.

    \b
    Example:
      afluente automation disable "Obrigado pela compra" --org ORG
    """
    _switch(automation, organization, "disabled", format)


@app.command()
def secret(
    automation: AutomationArgument,
    name: Annotated[str, typer.Argument(help="the name that its headers use")],
    organization: OrganizationOption = None,
) -> None:
    """Keep a secret that a call's headers carry, sealed. Its value is read from a line of stdin.

    \b
    Example:
      afluente automation secret "Obrigado pela compra" erp --org ORG < token.txt
    """
    from afluente.errors import Refused
    from consumers.automations import book

    value = sys.stdin.readline().strip()
    if not value or not value.isascii() or not value.isprintable():
        raise Refused("a secret is one line of printable ASCII on stdin")
    keyring = _settings().secrets.keyring
    if keyring is None:
        raise Refused("there is no key to seal it with", hint="set AFLUENTE_SECRETS_KEY")
    with _connected() as conn:
        found = book.find(conn, automation, _organization(conn, organization))
        book.set_secret(conn, keyring, found, name, value.encode())
    say(f"kept, sealed: {name} of {found['name']}")


@app.command()
def runs(
    automation: Annotated[
        str | None, typer.Argument(metavar="[AUTOMATION]", help="only this one's: its id or name")
    ] = None,
    organization: OrganizationOption = None,
    state: Annotated[
        Literal["waiting", "calling", "held", "done", "failed", "stopped", "cancelled"] | None,
        typer.Option(help="only these"),
    ] = None,
    contact: Annotated[UUID | None, typer.Option(help="only this contact's")] = None,
    run: Annotated[UUID | None, typer.Option(help="only this run, with its steps")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="at most so many, the newest first")] = 50,
    format: FormatOption = Format.text,
) -> None:
    """Show runs, the newest first; in JSON each with its steps. Exit 3 when there are none.

    stopped: the chain of causes was too deep, or came back to the same automation (`reason`).

    \b
    Examples:
      afluente automation runs "Obrigado pela compra" --org ORG --state waiting
      afluente automation runs --run 0198c2a4-...
    """
    from consumers.automations import book

    with _connected() as conn:
        organization_id = _organization(conn, organization)
        found = None if automation is None else book.find(conn, automation, organization_id)
        rows = book.runs(
            conn,
            automation_id=None if found is None else found["id"],
            organization_id=organization_id,
            state=state,
            contact_id=contact,
            run_id=run,
            limit=limit,
        )
    show(rows, format, _RUNS)
    if run is not None and format == Format.text:
        for row in rows:
            print()
            show(row["steps"], format, _STEPS)
    if not rows:
        raise typer.Exit(Exit.FOUND)


@app.command("test")
def try_(
    automation: Annotated[str, typer.Argument(metavar="AUTOMATION|FILE", help="its id or name, or a definition")],
    event: Annotated[UUID | None, typer.Option(help="try it against this event, or contact event, by its id")] = None,
    payload: Annotated[
        str | None, typer.Option(help="or against a payload that you make up: a file of JSON, or - for stdin")
    ] = None,
    contact: Annotated[UUID | None, typer.Option(help="whom a made-up payload is about")] = None,
    organization: OrganizationOption = None,
    format: FormatOption = Format.text,
) -> None:
    """Show what would come of an event: the truth of each condition, and each step as it would be carried out.

    Nothing is kept: the run is rolled back; waits are passed and calls are not made. Exit 3 when it would not begin.

    \b
    Examples:
      afluente automation test "Obrigado pela compra" --org ORG --event 0198c2a4-...
      echo '{"value": "250.00"}' | afluente automation test new.json --org ORG --payload - --contact 0198c2a4-...
    """
    import asyncio
    from datetime import UTC, datetime

    from afluente import postgres
    from afluente.errors import Refused
    from consumers.automations import book, trial
    from consumers.automations.definition import read

    if (event is None) == (payload is None):
        raise typer.BadParameter("give --event or --payload, one of them")
    settings = _settings()
    with _connected() as conn:
        organization_id = _organization(conn, organization)
        if Path(automation).is_file() or automation == "-":
            source = files.read_json(automation)
        else:
            found = book.find(conn, automation, organization_id)
            source, organization_id = found["definition"], found["organization_id"]
    made_up = None if payload is None else files.read_json(payload)

    async def attempt() -> trial.Tried:
        async with await postgres.connect_async(
            settings.postgres.dsn, application_name="afluente automation", autocommit=True
        ) as conn:
            owner = organization_id
            if event is not None:
                tried = await trial.find_event(conn, event)
                owner = owner or tried.organization_id
                if owner != tried.organization_id:
                    raise Refused(f"the event {event} belongs to another organization")
            elif owner is None:
                raise Refused("whose automation would it be?", hint="add --org")
            else:
                tried = trial.made_up(read(source), owner, made_up or {}, contact)
            return await trial.attempt(
                conn,
                owner,
                source,
                tried,
                now=datetime.now(UTC),
                links_url=settings.links.url or "https://links.example",
            )

    result = asyncio.run(attempt())
    if format == Format.text:
        _show_tried(result)
    else:
        show(result, format)
    if not (result.triggered and result.holds):
        raise typer.Exit(Exit.FOUND)


def _show_tried(tried: Any) -> None:
    print(f"trigger     {'yes' if tried.triggered else 'no: ' + tried.why}")
    print(f"conditions  {'hold' if tried.holds else 'do not hold'}")
    if tried.conditions is not None:
        for line in _lines(tried.conditions, 1):
            print(printable(line))
    if tried.state is not None:
        print(f"run         {tried.state}{f' ({tried.reason})' if tried.reason else ''}")
        rows = [{**step, "details": json.dumps(step["details"], ensure_ascii=False)} for step in tried.steps]
        print()
        show(rows, Format.text, ["step", "type", "state", "reason", "error", "wake_at", "details"])
        print()
        for emitted in tried.emits:
            print(printable(f"emits       {emitted}"))
    say("this was a trial: nothing was kept, nobody was called or written to")


def _lines(judged: dict[str, Any], depth: int) -> Iterator[str]:
    found = judged.get("found")
    said = "" if found is None else f"   found: {json.dumps(found, ensure_ascii=False, default=str)}"
    yield f"{'  ' * depth}{'yes' if judged['holds'] else 'no '} {judged['condition']}{said}"
    for part in judged.get("parts", ()):
        yield from _lines(part, depth + 1)


def _switch(automation: str, organization: str | None, status: Status, format: Format) -> None:
    from datetime import UTC, datetime

    from consumers.automations import book

    with _connected() as conn:
        found = book.find(conn, automation, _organization(conn, organization))
        count = 0 if found["status"] == status else book.set_status(conn, found, status, datetime.now(UTC))
    show({"id": found["id"], "status": status, "runs": count}, format)
    if found["status"] == status:
        say(f"it was {status} already")
        raise typer.Exit(Exit.FOUND)
    if count:
        say(f"{count:,} runs {'go on' if status == 'enabled' else 'were cancelled'}")


def _say_written(written: Any, format: Format) -> None:
    row = {"id": written.id, "version": written.version, "signing_secret": written.signing_secret}
    show(row | {"unset_secrets": list(written.unset)}, format)
    if written.signing_secret:
        say("its calls are signed with that secret, which is not shown again")
    for name in written.unset:
        say(f"next: afluente automation secret {written.id} {name} < FILE    (a header asks for it)")


def _check_calls(source: Any) -> None:
    """Refuse an address that would never be called, before anything waits for it."""
    from consumers.automations.definition import CallWebhook, read
    from consumers.automations.errors import BadDefinition
    from consumers.outbound.addresses import TargetRefused, parse_target

    settings = _settings()
    problems = []
    for number, step in enumerate(read(source).steps):
        if isinstance(step, CallWebhook):
            try:
                parse_target(
                    step.url,
                    https_only=settings.environment.environment == "production",
                    allowed=settings.outbound.allow_networks,
                )
            except TargetRefused as refused:
                problems.append((f"steps[{number}].url", f"would never be called: {refused}"))
    if problems:
        raise BadDefinition(problems, hint="AFLUENTE_WEBHOOK_ALLOW_NETWORKS opens a network, for tests only")


def _settings() -> AutomationSettings:
    from afluente.settings import AutomationSettings

    return AutomationSettings.read(os.environ)


@contextmanager
def _connected() -> Iterator[Connection[Any]]:
    from afluente import postgres

    with postgres.connect(_settings().postgres.dsn, application_name="afluente automation") as conn:
        yield conn


def _organization(conn: Connection[Any], word: str | None) -> UUID | None:
    from producers import organizations

    return None if word is None else organizations.find(conn, word)
