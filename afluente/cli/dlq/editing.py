"""`afluente dlq edit`."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from afluente.cli import files
from afluente.cli.dlq.choosing import DryRun, Reason, Yes, checked_text, confirm, connect, named
from afluente.cli.exits import Exit
from afluente.cli.output import Format, FormatOption, say, show
from afluente.cli.registry import use_registry
from afluente.cli.who import is_interactive, who
from afluente.errors import Refused

if TYPE_CHECKING:
    from consumers.dead_letters.editing import Edition


def edit(
    id: Annotated[str, typer.Argument(help="an id as listed, or an event id", metavar="ID")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="a value of the payload, as JSON or else as text; repeatable", metavar="PATH=VALUE"),
    ] = None,
    unset: Annotated[
        list[str] | None, typer.Option("--unset", help="take this out of the payload; repeatable", metavar="PATH")
    ] = None,
    payload_file: Annotated[
        str | None, typer.Option("--payload-file", help="the whole payload: a JSON file, - for stdin", metavar="FILE")
    ] = None,
    value_file: Annotated[
        str | None,
        typer.Option("--value-file", help="of a letter that is no event: bytes that are one", metavar="FILE"),
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    reason: Reason = "",
    format: FormatOption = Format.text,
) -> None:
    """Change the payload of a dead letter and give it to the worker and target that failed, and to no one else.

    The event in event_log and the records that others read stay as they are; for this delivery the edited one counts
    from now on. It is checked first against the schema of its type and version: what does not fit is refused, and
    nothing is done. The audit log keeps who, why, which fields, and the digests before and after.

    Exit status: 1 when it does not fit, 3 when nothing would change. JSON keys: action, applied, id, worker, target,
    organization_id, event_id, event_type, changed [{path, before, after}], before_sha256, after_sha256, reason, failed.

    \b
    Examples:
      afluente dlq edit crm-sync-worker:0199c0de-0000-7000-8000-000000000000 --set contact.email=null --dry-run
      afluente dlq edit ID --set 'items[0].price="19.90"' --unset items[0].discount --reason "price was a number" --yes
      afluente dlq edit ID --payload-file mended.json --reason "rebuilt from the order"
      afluente dlq edit rag-indexer-worker@events.kb/3/1207 --value-file record.bin --reason "framing was lost"
    """
    from afluente.settings import KafkaSettings
    from consumers import dead_letters
    from consumers.dead_letters import editing

    given = [bool(set_ or unset), payload_file is not None, value_file is not None]
    if sum(given) != 1:
        raise typer.BadParameter("say how, by --set and --unset, by --payload-file, or by --value-file")
    settings = KafkaSettings.read(os.environ)
    use_registry(settings.topic_prefix, writes=True)
    with connect(autocommit=True) as conn:
        letters = named(conn, [id])
        if len(letters) > 1:
            raise Refused(f"{len(letters)} dead letters are meant by {id}", hint=f"name one: {letters[0].id}")
        letter = letters[0]
        if isinstance(letter, dead_letters.RelayLetter):
            raise Refused(
                "a letter of the relay is a row of event_log, which nobody edits",
                hint="discard it, and emit the event as it should be",
            )
        if isinstance(letter, dead_letters.Undecodable):
            if value_file is None:
                raise typer.BadParameter("this letter is no event: it has no payload. --value-file gives it new bytes")
            edition = editing.with_bytes(settings, conn, letter, _read(value_file, "--value-file"))
        else:
            if value_file is not None:
                raise typer.BadParameter("--value-file is for letters that are no event; edit this one's payload")
            change = _change(set_ or [], unset or [], payload_file)
            edition = editing.edited(settings, conn, letter, change)
        outcome = None
        if not dry_run:
            reason = _agree(edition, yes, reason)
            outcome = editing.give_edited(conn, settings, edition, actor=who(), reason=reason, now=datetime.now(UTC))
    failed = outcome.failed if outcome else []
    _report(edition, outcome is not None, failed, reason, format)
    if dry_run:
        say("this was a dry run: nothing was done")
    if failed:
        raise typer.Exit(Exit.FAILED)
    if not dry_run:
        say(f"next: afluente dlq list --worker {letter.worker}")


def _change(set_: list[str], unset: list[str], payload_file: str | None) -> Any:
    """What makes the new payload of the old one."""
    from consumers.dead_letters import editing

    if payload_file is not None:
        payload = _json(_read(payload_file, "--payload-file"))
        if not isinstance(payload, dict):
            raise typer.BadParameter("--payload-file: a payload is a JSON object")
        return lambda before: payload
    pairs = []
    for text in set_:
        path, equals, value = text.partition("=")
        if not equals or not path:
            raise typer.BadParameter(f"--set {text[:40]!r}: say PATH=VALUE")
        pairs.append((checked_text(path, "--set"), _value(value)))
    for path in unset:
        checked_text(path, "--unset")

    def change(payload: dict[str, Any]) -> dict[str, Any]:
        for path, value in pairs:
            editing.put(payload, path, value)
        for path in unset:
            editing.drop(payload, path)
        return payload

    return change


def _value(text: str) -> Any:
    try:
        return files.as_json(text, "the value")
    except Refused:
        return text


def _read(path: str, option: str) -> bytes:
    try:
        return files.read(path)
    except Refused as error:
        raise typer.BadParameter(f"{option}: {error}") from None


def _json(data: bytes) -> Any:
    try:
        return files.as_json(data, "--payload-file")
    except Refused as error:
        raise typer.BadParameter(str(error)) from None


def _agree(edition: Edition, yes: bool, reason: str) -> str:
    if not yes and is_interactive():
        for change in edition.changed[:50]:
            say(f"  {change.path}: {json.dumps(change.before)} -> {json.dumps(change.after)}")
    what = f"{len(edition.changed)} changes" if edition.before else f"event {edition.event.id} in its place"
    return confirm(f"give {edition.letter.id} to {edition.letter.worker} with {what}?", yes, reason)


def _report(edition: Edition, applied: bool, failed: list[dict[str, str]], reason: str, format: Format) -> None:
    result = {
        "action": "edit",
        "applied": applied and not failed,
        "id": edition.letter.id,
        "worker": edition.letter.worker,
        "target": getattr(edition.letter, "target", None),
        "organization_id": edition.event.organization_id,
        "event_id": edition.event.id,
        "event_type": edition.event.event_type,
        "changed": edition.changed,
        "before_sha256": edition.before_sha256,
        "after_sha256": edition.after_sha256,
        "reason": reason,
        "failed": failed,
    }
    if format == Format.text:
        show([change for change in edition.changed], format, ["path", "before", "after"])
        print()
        result.pop("changed")
    show(result, format)
