"""`afluente verify`: the reconciliation from topics and tables.

Keys of the JSON: `ok`, and `checks` with `name, subject, ok, figures, finding_count, findings`; a finding has `kind,
id, detail`.
"""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from afluente.cli.exits import Exit
from afluente.cli.output import Format, FormatOption, say, show
from afluente.cli.registry import use_registry

app = typer.Typer()


@app.command()
def verify(
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help="published, deliveries or summaries; may be repeated. Default: all three"),
    ] = None,
    wait: Annotated[
        float, typer.Option("--wait", min=0, help="seconds to wait for committed rows that are not published yet")
    ] = 5.0,
    limit: Annotated[int, typer.Option("--limit", min=1, help="findings to name of each check")] = 100,
    format: FormatOption = Format.text,
) -> None:
    """Compare event_log, the topics, the deliveries and the summaries. Exit 3 when something does not add up.

    It may run beside everything else: it joins no group and commits nothing. It reads all that the topics hold.

    \b
    Examples:
      afluente verify
      afluente verify --only deliveries --format json
    """
    from afluente.clock import SystemClock
    from afluente.settings import ToolSettings
    from afluente.verify import reconcile
    from afluente.verify.reconciliation import CHECKS

    if unknown := sorted(set(only or ()) - set(CHECKS)):
        say(f"afluente: there is no check {', '.join(unknown)}; there are {', '.join(CHECKS)}")
        raise typer.Exit(Exit.USAGE)
    settings = ToolSettings.read(os.environ)
    use_registry(settings.kafka.topic_prefix)
    report = reconcile(
        settings.kafka, settings.postgres.dsn, now=SystemClock().now(), wait_s=wait, checks=only or CHECKS
    )
    checks: list[dict[str, Any]] = [
        {
            "name": check.name,
            "subject": check.subject,
            "ok": check.is_ok,
            "figures": check.figures,
            "finding_count": len(check.findings),
            "findings": [
                {"kind": finding.kind, "id": finding.id, "detail": finding.detail} for finding in check.findings[:limit]
            ],
        }
        for check in report.checks
    ]
    if format == Format.json:
        show({"ok": report.is_ok, "checks": checks}, format)
    else:
        rows = [
            {
                "check": f"{check['name']} {check['subject']}".strip(),
                "result": "ok" if check["ok"] else f"{check['finding_count']} findings",
                "figures": ", ".join(f"{name.replace('_', ' ')} {n}" for name, n in check["figures"].items()),
            }
            for check in checks
        ]
        show(rows, format, ["check", "result", "figures"])
        found = [finding for check in checks for finding in check["findings"]]
        if found:
            print()
            show(found, format, ["kind", "id", "detail"])
    if not report.is_ok:
        say(f"{len(report.findings)} findings; next: afluente doctor")
        raise typer.Exit(Exit.FOUND)
    say("everything adds up")
