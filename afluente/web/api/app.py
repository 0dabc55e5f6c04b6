"""A request through its steps: who asks, may they, how often, what do they say; then the operation, then the answer.

Each step ends the request with a problem or hands it on; what costs nothing comes first, and nothing of a body is read
before its sender is known. Every answer carries the request's id, taken over from `X-Request-Id` if that can be one.

What is logged of a request: its route, status, duration, key prefix, organization and id. No path, query or body: they
may hold what is personal.
"""

from __future__ import annotations

import re
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol
from uuid import UUID, uuid4

import orjson
import psycopg
from psycopg.rows import dict_row
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

import sql
from afluente.bounds import Busy, Memory
from afluente.clock import Clock, SystemClock
from afluente.postgres import AWAY
from afluente.telemetry import get_logger
from afluente.web.api import body as bodies
from afluente.web.api import call as calls
from afluente.web.api import catalogue, contact_events, docs, events, idempotency, keys, openapi
from afluente.web.api.call import Call, Pool
from afluente.web.api.idempotency import Answer
from afluente.web.api.keys import Authenticator, Key
from afluente.web.api.problems import MEDIA_TYPE, Problem, in_progress, of_database
from afluente.web.api.rate import Limiter, Slice

log = get_logger(__name__)

PREFIX: Final = "/v1"
# More would only wait for a connection; and one key does not keep the others waiting.
MAX_IN_FLIGHT: Final = 64
MAX_KEY_IN_FLIGHT: Final = 24

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,100}\Z")
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}\Z")


class Observer(Protocol):
    """Hears what was logged. Tests wait on it; in production nobody listens."""

    def __call__(self, name: str, /, **fields: Any) -> None: ...


def ignore(name: str, /, **fields: Any) -> None:
    """The observer of production."""


@dataclass(frozen=True)
class Operation:
    """What is done at one method of one path, and the scope it takes (None: any valid key)."""

    method: str
    path: str
    scope: str | None
    run: Callable[[Call], Awaitable[Answer]]


OPERATIONS: Final = (
    Operation("POST", "/events", "events:write", events.post),
    Operation("GET", "/events/{id}", "events:read", events.get),
    Operation("DELETE", "/events/{id}", "events:write", events.delete),
    Operation("POST", "/contact-events", "contact-events:write", contact_events.post),
    Operation("GET", "/contact-events", "contact-events:read", contact_events.get),
    Operation("GET", "/contact-events/{id}", "contact-events:read", contact_events.get_one),
    Operation("GET", "/event-types", None, catalogue.get),
    Operation("GET", "/event-types/{event_type}", None, catalogue.get_one),
)


class Api:
    """REST v1. One for each process; `pool` connects as afluente_worker and is opened by its owner."""

    def __init__(self, pool: Pool, *, clock: Clock | None = None, observer: Observer = ignore) -> None:
        self._pool = pool
        self._clock = clock or SystemClock()
        self._observe = observer
        self._authenticator = Authenticator(self._clock)
        self._limiter = Limiter(self._take_tokens, self._clock)
        self._memory = Memory()
        self._in_flight: Counter[UUID] = Counter()

    def app(self) -> ASGIApp:
        """Everything under /v1, with its own words for what is not there."""
        paths: dict[str, dict[str, Operation]] = {}
        for operation in OPERATIONS:
            paths.setdefault(PREFIX + operation.path, {})[operation.method] = operation
        routes = [Route(path, self._endpoint(methods), methods=list(methods)) for path, methods in paths.items()]
        routes += [
            Route(f"{PREFIX}/openapi.json", self._public(openapi.answer), methods=["GET"]),
            Route(f"{PREFIX}/docs", self._public(docs.answer), methods=["GET"]),
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: self._no_route})
        app.router.redirect_slashes = False
        return app

    def _endpoint(self, methods: Mapping[str, Operation]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            return await self._handle(request, methods["GET" if request.method == "HEAD" else request.method])

        return endpoint

    def _public(self, answer: Callable[[], Response]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            response = answer()
            response.headers["x-request-id"] = _request_id(request)
            return response

        return endpoint

    async def _no_route(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "")
            problem = Problem("method-not-allowed", "the path has other methods", headers={"allow": allowed})
        else:
            problem = Problem("not-found", "there is no such path", hint="GET /v1/docs has those that are")
        return _refusal(problem, _request_id(request))

    async def _handle(self, request: Request, operation: Operation) -> Response:
        """One request, from its head to its answer."""
        begun = time.perf_counter()
        request_id, key = _request_id(request), None
        headers: dict[str, str] = {}
        try:
            key = await self._authenticate(request)
            keys.require(key, operation.scope)
            await self._limiter.admit(key)
            answer = await self._run(request, operation, key, request_id)
            response = _response(answer)
        except Problem as problem:
            response = _refusal(problem, request_id)
        except Busy:
            response = _refusal(_busy(), request_id)
        except AWAY as error:
            log.warning("api.unavailable", error=type(error).__name__, request_id=request_id)
            response = _refusal(_unavailable(), request_id)
        except Exception as error:
            # Our fault, and told as such. Where, not what: an error may quote what it failed on.
            where = "".join(traceback.format_tb(error.__traceback__)[-8:])
            sqlstate = error.sqlstate if isinstance(error, psycopg.Error) else None
            log.error("api.failed", error=type(error).__name__, sqlstate=sqlstate, where=where, request_id=request_id)
            response = _refusal(Problem("internal", "the request could not be carried out"), request_id)
        if key is not None:
            headers = self._limiter.standing(key).headers()
        for name, value in headers.items():
            response.headers.setdefault(name, value)
        response.headers["x-request-id"] = request_id
        fields = {
            "route": f"{operation.method} {PREFIX}{operation.path}",
            "status": response.status_code,
            "duration_ms": round((time.perf_counter() - begun) * 1000, 1),
            "key": key.prefix if key else None,
            "organization_id": str(key.organization_id) if key else None,
            "request_id": request_id,
        }
        log.info("api.request", **fields)
        self._observe("api.request", **fields)
        return response

    async def _authenticate(self, request: Request) -> Key:
        """Whose key it is. Raises Problem (401)."""
        text, prefix = keys.bearer(request.headers.get("authorization"))
        known, row = self._authenticator.remembered(prefix)
        if not known:
            async with self._pool.connection(timeout=calls.CONNECTION_WITHIN_S) as conn:
                row = await self._authenticator.look_up(conn, prefix)
        return self._authenticator.judge(text, row)

    async def _take_tokens(self, key: Key, spent: float, wanted: int) -> Slice:
        given = {
            "organization_id": key.organization_id,
            "api_key_id": key.id,
            "rate": key.rate_per_s,
            "burst": key.burst,
            "spent": spent,
            "wanted": wanted,
        }
        async with self._pool.connection(timeout=calls.CONNECTION_WITHIN_S) as conn:
            cursor = await conn.cursor(row_factory=dict_row).execute(_TAKE, given)
            row = await cursor.fetchone()
        assert row is not None
        return Slice(row["granted"], row["level"])

    async def _run(self, request: Request, operation: Operation, key: Key, request_id: str) -> Answer:
        with self._memory.of(key.id, each=bodies.MAX_KEY_BYTES, total=bodies.MAX_HELD_BYTES) as hold:
            body = await bodies.read(request, hold) if operation.method == "POST" else None
            # Who sends slowly takes nobody's place: it is taken once the body is here.
            with self._place(key):
                value = None if body is None else bodies.parse(body)
                call = self._call(request, operation, key, request_id, value)
                try:
                    return await operation.run(call)
                except psycopg.errors.LockNotAvailable:
                    if call.idempotency_key is None:
                        raise
                    raise in_progress() from None
                except psycopg.Error as error:
                    if (problem := of_database(error)) is None:
                        raise
                    raise problem from None

    @contextmanager
    def _place(self, key: Key) -> Iterator[None]:
        """One of the places for what is in flight. Raises Busy."""
        if self._in_flight.total() >= MAX_IN_FLIGHT or self._in_flight[key.id] >= MAX_KEY_IN_FLIGHT:
            raise Busy
        self._in_flight[key.id] += 1
        try:
            yield
        finally:
            self._in_flight[key.id] -= 1
            if not self._in_flight[key.id]:
                del self._in_flight[key.id]

    def _call(self, request: Request, operation: Operation, key: Key, request_id: str, value: Any) -> Call:
        traceparent = request.headers.get("traceparent", "")
        writes = operation.method == "POST"
        return Call(
            key=key,
            method=operation.method,
            path=PREFIX + operation.path,
            request_id=request_id,
            pool=self._pool,
            charge=lambda tokens: self._limiter.charge(key, tokens),
            traceparent=traceparent if _TRACEPARENT.match(traceparent) else None,
            idempotency_key=idempotency.key_of(request.headers.get("idempotency-key")) if writes else None,
            parameters=request.path_params,
            query=dict(request.query_params),
            body=value,
        )


def _request_id(request: Request) -> str:
    given = request.headers.get("x-request-id", "")
    return given if _REQUEST_ID.match(given) else str(uuid4())


def _busy() -> Problem:
    return Problem("unavailable", "too much is in flight", headers={"retry-after": "1"})


def _unavailable() -> Problem:
    return Problem(
        "unavailable",
        "the database does not answer",
        hint="send the same request again, with an Idempotency-Key so that it happens once",
        headers={"retry-after": "5"},
    )


def _response(answer: Answer) -> Response:
    if answer.content is None:
        return Response(status_code=answer.status, headers=_COMMON | answer.headers)
    return Response(orjson.dumps(answer.content), answer.status, _COMMON | answer.headers, "application/json")


def _refusal(problem: Problem, request_id: str) -> Response:
    content = orjson.dumps(problem.body(request_id))
    headers = _COMMON | problem.headers | {"x-request-id": request_id}
    return Response(content, problem.kind.status, headers, MEDIA_TYPE)


_COMMON: Final = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
_TAKE = sql.queries("api_keys")["take_tokens"]
