"""What a reconciliation found: checks with their figures, and findings that name the id at fault."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One thing that does not add up. ``id``: of the event, delivery or summary at fault."""

    kind: str
    id: str
    detail: str


@dataclass
class Check:
    """One comparison: of what (``published``, ``deliveries``, ``summaries``), for whom (a worker's name, else ''),
    its figures."""

    name: str
    subject: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        return not self.findings


@dataclass
class Report:
    checks: list[Check] = field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        return all(check.is_ok for check in self.checks)

    @property
    def findings(self) -> list[Finding]:
        return [finding for check in self.checks for finding in check.findings]
