"""Many items in one request: each is accepted, a duplicate, or refused with its own problem.

What is accepted is committed in one transaction, in the order of the items. An item that is refused takes nothing with
it, unless `all_or_nothing` was asked for: then nothing is written, and the answer is the problem `batch-refused`.
200 says that nothing was refused, 207 that something was.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, TypeVar
from uuid import UUID

import psycopg
from pydantic import BaseModel, ValidationError

from afluente.web.api.call import Connection
from afluente.web.api.idempotency import Answer
from afluente.web.api.problems import Problem, invalid, of_database

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

NOT_WRITTEN = "not_written"


def model(kind: type[M], value: Any) -> M:
    """`value` as `kind`. Raises Problem (422)."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise invalid(error) from None


def one(value: Any, name: str) -> Any:
    """The body that is one item. Raises Problem (422) for a bare list, which says nothing of itself."""
    if isinstance(value, list):
        raise Problem("invalid-request", "the body: is a list", hint=f'several go as {{"{name}": [...]}}')
    return value


def prepared(values: Sequence[Any], prepare: Callable[[Any], T]) -> list[T | Problem]:
    """Each item ready to be written, or what is wrong with it."""
    found: list[T | Problem] = []
    for value in values:
        try:
            found.append(prepare(value))
        except Problem as problem:
            found.append(problem)
    return found


async def written(
    conn: Connection,
    items: Sequence[T | Problem],
    write: Callable[[Connection, list[T]], Awaitable[list[UUID]]],
    *,
    all_or_nothing: bool,
) -> list[UUID | Problem]:
    """Write what is not refused; ids, and problems where the server refuses. Raises Problem (`batch-refused`)."""
    require_all(items, all_or_nothing)
    wanted = [item for item in items if not isinstance(item, Problem)]
    outcomes = iter(await _each(conn, wanted, write))
    found = [item if isinstance(item, Problem) else next(outcomes) for item in items]
    require_all(found, all_or_nothing)
    return found


async def _each(
    conn: Connection, items: list[T], write: Callable[[Connection, list[T]], Awaitable[list[UUID]]]
) -> list[UUID | Problem]:
    """All in one statement; when the server refuses one of them, one after the other, each behind a savepoint. That is
    the rare case: done always, it would cost every batch a round trip and a transaction number for each item."""
    if not items:
        return []
    try:
        async with conn.transaction():
            return list(await write(conn, items))
    except psycopg.Error as error:
        if _of_item(error) is None:
            raise
    found: list[UUID | Problem] = []
    for item in items:
        try:
            async with conn.transaction():
                found += await write(conn, [item])
        except psycopg.Error as error:
            if (problem := _of_item(error)) is None:
                raise
            found.append(problem)
    return found


def _of_item(error: psycopg.Error) -> Problem | None:
    """The problem, when one item is what brought the error about."""
    return None if isinstance(error, psycopg.OperationalError) else of_database(error)


def answer(outcomes: Sequence[UUID | Problem], new: Collection[UUID]) -> Answer:
    """The answer to a batch. `new`: the ids that were not there before."""
    results: list[dict[str, Any]] = []
    unseen = set(new)
    for index, outcome in enumerate(outcomes):
        if isinstance(outcome, Problem):
            results.append({"index": index, "status": "refused", "problem": outcome.body()})
        else:
            # twice in one batch: the first one is the new one
            status = "accepted" if outcome in unseen else "duplicate"
            unseen.discard(outcome)
            results.append({"index": index, "status": status, "id": str(outcome)})
    counts = {
        status: sum(result["status"] == status for result in results) for status in ("accepted", "duplicate", "refused")
    }
    return Answer(207 if counts["refused"] else 200, {**counts, "results": results})


def require_all(outcomes: Sequence[Any], all_or_nothing: bool) -> None:
    """Raises Problem (`batch-refused`) when all or nothing was asked for and something is refused."""
    refused = sum(isinstance(outcome, Problem) for outcome in outcomes)
    if not all_or_nothing or refused == 0:
        return
    results = [
        {"index": index, "status": "refused", "problem": outcome.body()}
        if isinstance(outcome, Problem)
        else {"index": index, "status": NOT_WRITTEN}
        for index, outcome in enumerate(outcomes)
    ]
    raise Problem(
        "batch-refused",
        f"{refused} of {len(outcomes)} items are refused, and all or nothing was asked for",
        extra={"results": results},
    )
