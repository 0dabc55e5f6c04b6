"""A delivery of many things: what was understood, what was passed over on purpose, what was not understood.

What is new (a type, a status) does not stop the rest; it is counted, and the outcome says so.
"""

from __future__ import annotations

from collections import Counter

from producers.ingest.normalize.facts import Fact, Normalized, ignored, processed, unrecognised

MAX_REASON = 255


class Gathered:
    """Takes one thing after the other; `outcome` is the delivery's."""

    def __init__(self) -> None:
        self._facts: list[Fact] = []
        self._understood: Counter[str] = Counter()
        self._passed_over: set[str] = set()
        self._unknown: Counter[str] = Counter()

    def fact(self, kind: str, *facts: Fact) -> None:
        self._understood[kind] += 1
        self._facts += facts

    def nothing(self, why: str) -> None:
        """Understood, and nothing for us."""
        self._passed_over.add(why)

    def unknown(self, kind: str) -> None:
        self._unknown[kind] += 1

    def outcome(self, nothing_found: str) -> Normalized:
        """`nothing_found` names the part that was looked for and not there."""
        if self._facts:
            reason = "+".join(sorted(self._understood))
            reason += f",not_understood:{self._unknown.total()}" if self._unknown else ""
            return processed(reason[:MAX_REASON], *self._facts)
        if self._unknown:
            return unrecognised(f"unknown_shape:{','.join(sorted(self._unknown))}"[:MAX_REASON])
        if self._passed_over:
            return ignored(",".join(sorted(self._passed_over))[:MAX_REASON])
        return unrecognised(f"unknown_shape:{nothing_found}")
