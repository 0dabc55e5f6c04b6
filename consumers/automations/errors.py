"""The errors of automations.

Refused
└── BadDefinition           a definition, or a part of it, that could never work; says where and why
"""

from __future__ import annotations

from afluente.errors import Refused


class BadDefinition(Refused):
    """Not a definition. `problems` holds (place, what is wrong), all that were found."""

    def __init__(self, problems: list[tuple[str, str]], *, hint: str | None = None) -> None:
        self.problems = problems
        super().__init__(
            "; ".join(f"{place}: {what}" if place else what for place, what in problems),
            hint=hint or "afluente automation create --help shows a whole definition",
        )
