"""How processes reach Postgres: connections with a role, a pool, and acting for one organization inside a transaction.

Every connection starts as `afluente_worker` unless told otherwise, set in the connection's options so that no statement
runs before it holds. `act_for` narrows a transaction to one tenant: the role `afluente_app`, and `app.organization_id`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from uuid import UUID

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus
from psycopg_pool import AsyncConnectionPool

WORKER_ROLE = "afluente_worker"
APP_ROLE = "afluente_app"
CONNECT_TIMEOUT_S = 10

# What says that Postgres is not to be reached, or too slow: whoever asked may ask again. Holds the pool's errors, too.
AWAY = (psycopg.OperationalError, TimeoutError)

_REFUSED_LOGIN = ("permission denied to set role", "password authentication failed")

# Left to right within one SELECT: the old values are read before the new ones are set.
_ACT = """
SELECT current_setting('role'), coalesce(current_setting('app.organization_id', true), ''),
       set_config('role', %s, true), set_config('app.organization_id', %s, true)
"""
_ACT_BACK = "SELECT set_config('role', %s, true), set_config('app.organization_id', %s, true)"


def conninfo(
    url: str,
    *,
    role: str | None = WORKER_ROLE,
    application_name: str | None = None,
    idle_in_transaction_s: float | None = None,
) -> str:
    """`url` with the role (None: the login itself), the application name and a connect timeout put in.

    `idle_in_transaction_s`: the server ends a connection that stands idle in a transaction for so long.
    """
    options = conninfo_to_dict(url)
    given = str(options.get("options") or "")
    settings: dict[str, Any] = {"connect_timeout": options.get("connect_timeout") or CONNECT_TIMEOUT_S}
    if role is not None:
        given = f"{given} -c role={role}".strip()
    if idle_in_transaction_s is not None:
        given = f"{given} -c idle_in_transaction_session_timeout={int(idle_in_transaction_s * 1000)}".strip()
    if given:
        settings["options"] = given
    if application_name is not None:
        settings["application_name"] = application_name[:63]
    return make_conninfo(url, **settings)


def refuses_login(error: BaseException) -> bool:
    """Whether a failed connection is one that waiting does not mend. By the words, in English: what fails before there
    is a connection has no SQLSTATE to go by."""
    return isinstance(error, psycopg.OperationalError) and any(words in str(error) for words in _REFUSED_LOGIN)


def connect(
    url: str, *, role: str | None = WORKER_ROLE, application_name: str | None = None, autocommit: bool = False
) -> psycopg.Connection[tuple[Any, ...]]:
    """Open a connection. psycopg.OperationalError when the server is away."""
    return psycopg.connect(conninfo(url, role=role, application_name=application_name), autocommit=autocommit)


async def connect_async(
    url: str, *, role: str | None = WORKER_ROLE, application_name: str | None = None, autocommit: bool = False
) -> psycopg.AsyncConnection[tuple[Any, ...]]:
    """The same, for asyncio."""
    return await psycopg.AsyncConnection.connect(
        conninfo(url, role=role, application_name=application_name), autocommit=autocommit
    )


def pool_async(
    url: str,
    *,
    role: str | None = WORKER_ROLE,
    min_size: int = 1,
    max_size: int = 10,
    application_name: str | None = None,
    autocommit: bool = False,
    idle_in_transaction_s: float | None = None,
) -> AsyncConnectionPool[psycopg.AsyncConnection[tuple[Any, ...]]]:
    """A closed pool: open it with `async with pool:`. A connection is checked before it is handed out, so that a server
    that was restarted costs one reconnect and no failed transaction."""
    return AsyncConnectionPool(
        conninfo(url, role=role, application_name=application_name, idle_in_transaction_s=idle_in_transaction_s),
        min_size=min_size,
        max_size=max_size,
        open=False,
        kwargs={"autocommit": autocommit},
        check=AsyncConnectionPool.check_connection,
        name=application_name,
    )


@asynccontextmanager
async def act_for(
    conn: psycopg.AsyncConnection[Any], organization_id: UUID | str, *, role: str = APP_ROLE
) -> AsyncIterator[None]:
    """Inside a transaction: be `role` for that organization, and at the end what one was before.

    RuntimeError outside a transaction, where the settings would vanish at once. After an error that aborted the
    transaction nothing is set back: the rollback does it.
    """
    _require_transaction(conn)
    cursor = await conn.execute(_ACT, (role, str(UUID(str(organization_id)))))
    before = await cursor.fetchone()
    assert before is not None
    try:
        yield
    finally:
        # ACTIVE: in a pipeline, with answers on their way.
        if conn.info.transaction_status in (TransactionStatus.INTRANS, TransactionStatus.ACTIVE):
            await conn.execute(_ACT_BACK, before[:2])


@contextmanager
def act_for_sync(conn: psycopg.Connection[Any], organization_id: UUID | str, *, role: str = APP_ROLE) -> Iterator[None]:
    """`act_for` without asyncio."""
    _require_transaction(conn)
    before = conn.execute(_ACT, (role, str(UUID(str(organization_id))))).fetchone()
    assert before is not None
    try:
        yield
    finally:
        if conn.info.transaction_status == TransactionStatus.INTRANS:
            conn.execute(_ACT_BACK, before[:2])


def _require_transaction(conn: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    # Without autocommit psycopg opens the transaction with the first statement.
    if conn.autocommit and conn.info.transaction_status == TransactionStatus.IDLE:
        raise RuntimeError("act_for needs a transaction: outside of one its settings end with the statement")
