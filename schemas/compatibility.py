"""May a reader with one schema read what was written with the other, and mean the same by it?

Both directions count: new readers meet old records (replay, a topic's backlog), old readers meet new records (a deploy
is never at one moment everywhere). So a change is compatible when the old and the new schema can each read what the
other wrote, and nothing changes its meaning in silence.
"""

import json
from typing import Any

Schema = dict[str, Any]


def breaking_changes(older: Schema, newer: Schema) -> list[str]:
    """Why ``newer`` must not follow ``older`` within a major, one sentence each with a path; empty when it may."""
    # A development dependency: schemas change on a developer's machine and in CI, not where they are used.
    from avro.compatibility import ReaderWriterCompatibilityChecker, SchemaCompatibilityType
    from avro.schema import parse

    problems: list[str] = []
    old, new = parse(json.dumps(older)), parse(json.dumps(newer))
    for reader, writer, who in ((new, old, "a new reader of old records"), (old, new, "an old reader of new records")):
        checker = ReaderWriterCompatibilityChecker()  # type: ignore[no-untyped-call]  # avro types it half-way
        result = checker.get_compatibility(reader, writer)
        if result.compatibility is not SchemaCompatibilityType.compatible:
            problems.append(f"{who}: {', '.join(sorted(result.messages))} at {', '.join(sorted(result.locations))}")
    return problems
