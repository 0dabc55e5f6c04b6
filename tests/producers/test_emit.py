"""producers.emit: what it writes, what it refuses before the transaction is harmed, the server's refusals by type."""

import json
import threading
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from types import SimpleNamespace
from uuid import UUID, uuid4

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg.rows import dict_row

import schemas
from afluente import postgres
from afluente.errors import AfluenteError
from producers import Causation, EmitError, emit, emit_async
from producers.emit import MAX_PAYLOAD_BYTES, to_json
from producers.errors import (
    EventTypeError,
    ForeignOrganizationError,
    IdempotencyKeyReusedError,
    NoOrganizationError,
    PayloadError,
    SealedMonthError,
    TooLargeError,
    UnknownOrganizationError,
    translate,
)
from tests.fixtures.postgres import clone


class Colour(Enum):
    RED = "red"


@pytest.fixture(scope="module")
def database(postgres, template):
    """One for all: every test has an organization of its own in it."""
    with clone(postgres, template) as database:
        yield database


@pytest.fixture
def conn(database):
    conn = database.connect()
    yield conn
    conn.close()


@pytest.fixture
def organization(database):
    return database.organization("Mine")


def stored(conn, organization):
    """(event_type, entity_kind, entity_id, payload, metadata without emitted_at) of the organization's only event."""
    (row,) = conn.execute(
        "SELECT event_type, entity_kind, entity_id, payload, metadata - 'emitted_at' FROM event_log"
        " WHERE organization_id = %s",
        [organization],
    ).fetchall()
    return row


def count(conn, organization):
    return conn.execute("SELECT count(*) FROM event_log WHERE organization_id = %s", [organization]).fetchone()[0]


def custom(conn, organization, payload, **rest):
    return emit(conn, "shop.tested", entity_kind="shop", payload=payload, organization_id=organization, **rest)


# -------------------- what is written


def test_everything_given_is_written_and_nothing_is_committed(database, conn, organization):
    entity, cause = uuid4(), uuid4()
    emit(
        conn,
        "shop.opened",
        entity_kind="shop",
        entity_id=entity,
        payload={"name": "Loja São João 🛍"},
        organization_id=organization,
        request_id="r-1",
        actor_id=UUID(int=7),
        source="api",
        trace_id="t-1",
        idempotency_key="k-1",
        schema_version="1.2.3",
        causation=Causation(cause, depth=2, traceparent="00-1-2-01"),
    )
    assert stored(conn, organization) == (
        "shop.opened",
        "shop",
        entity,
        {"name": "Loja São João 🛍"},
        {
            "request_id": "r-1",
            "actor_id": str(UUID(int=7)),
            "source": "api",
            "trace_id": "t-1",
            "idempotency_key": "k-1",
            "schema_version": "1.2.3",
            "causation_id": str(cause),
            "causation_depth": 2,
            "traceparent": "00-1-2-01",
        },
    )
    conn.rollback()
    assert count(conn, organization) == 0


async def test_async_does_the_same(database, organization):
    async with await database.connect_async() as conn:
        event_id = await emit_async(
            conn, "shop.opened", entity_kind="shop", payload={"n": 1}, organization_id=organization, request_id="r"
        )
        with pytest.raises(PayloadError):
            await emit_async(conn, "shop.opened", entity_kind="shop", payload={"n": float("nan")})
        with pytest.raises(UnknownOrganizationError):
            await emit_async(conn, "shop.opened", entity_kind="shop", payload={}, organization_id=uuid4())
        await conn.rollback()
        event_id = await emit_async(
            conn, "shop.opened", entity_kind="shop", payload={"n": 1}, organization_id=organization, request_id="r"
        )
        await conn.commit()
    assert database.execute("SELECT id, request_id FROM event_log WHERE organization_id = %s", [organization]) == [
        (event_id, "r")
    ]


def test_values_that_json_lacks_are_kept_exactly(conn, organization):
    brasilia = timezone(timedelta(hours=-3))
    custom(
        conn,
        organization,
        {
            "price": Decimal("297.90"),
            "tiny": Decimal("1E-30"),
            "id": UUID(int=1),
            "at": datetime(2026, 11, 29, 9, 30, 0, 1, tzinfo=brasilia),
            "day": date(2026, 11, 29),
            "colour": Colour.RED,
            "list": (1, [2, {"deep": None}]),
            "big": 2**200,
            "float": 0.1,
            "beyond": 1.924535665292087e16,
            "flag": True,
        },
    )
    assert stored(conn, organization)[3] == {
        "price": "297.90",
        "tiny": "1E-30",
        "id": "00000000-0000-0000-0000-000000000001",
        "at": "2026-11-29T09:30:00.000001-03:00",
        "day": "2026-11-29",
        "colour": "red",
        "list": [1, [2, {"deep": None}]],
        "big": 2**200,
        "float": 0.1,
        "beyond": 1.924535665292087e16,
        "flag": True,
    }


def test_a_pydantic_model_is_emitted_by_the_names_on_the_wire(conn, organization):
    from schemas.events.lead import Change, Updated

    change = Change.model_validate({"from": "a", "to": Decimal("1.50")})
    emit(
        conn,
        "lead.updated",
        entity_kind="lead",
        payload=Updated(changes={"value": change}),
        organization_id=organization,
    )
    assert stored(conn, organization)[3] == {"changes": {"value": {"from": "a", "to": "1.50"}}}


def test_the_row_factory_of_the_connection_does_not_matter(database, organization):
    with psycopg.connect(database.url, row_factory=dict_row, options="-c role=afluente_worker") as conn:
        assert isinstance(custom(conn, organization, {}), UUID)


def test_causation_counts_the_steps(organization):
    event = SimpleNamespace(id=uuid4(), metadata={})
    first = Causation.of(event)
    assert (first.event_id, first.depth) == (event.id, 1)
    assert Causation.of(SimpleNamespace(id=event.id, metadata={"causation_depth": 7})).depth == 8


def test_a_deferred_event_waits(conn, organization):
    event_id = custom(conn, organization, {}, deliver_at=datetime.now(UTC) + timedelta(days=1))
    assert conn.execute("SELECT id FROM deferred_event").fetchall() == [(event_id,)]
    assert count(conn, organization) == 0


# -------------------- whose event it is


def test_an_application_emits_for_its_own_organization(database, organization):
    conn = database.connect(autocommit=True)
    with conn.transaction(), postgres.act_for_sync(conn, organization):
        emit(conn, "shop.opened", entity_kind="shop", payload={})
        custom(conn, organization, {})
    assert count(conn, organization) == 2


def test_an_application_cannot_emit_for_another(database, organization):
    conn = database.connect(autocommit=True)
    with conn.transaction(), postgres.act_for_sync(conn, organization):
        with pytest.raises(ForeignOrganizationError) as caught, conn.transaction():
            custom(conn, database.organization("Theirs"), {})
        assert caught.value.hint
    assert isinstance(caught.value, (EmitError, AfluenteError))
    assert isinstance(caught.value.__cause__, psycopg.Error)


def test_without_an_organization_nothing_is_emitted(conn):
    with pytest.raises(NoOrganizationError):
        emit(conn, "shop.opened", entity_kind="shop", payload={})


def test_an_unknown_organization_is_named(conn):
    unknown = uuid4()
    with pytest.raises(UnknownOrganizationError, match=str(unknown)):
        custom(conn, unknown, {})


# -------------------- refused before anything is sent


@pytest.mark.parametrize(
    ("payload", "place"),
    [
        ({"a": float("nan")}, "payload.a"),
        ({"a": [1, float("inf")]}, "payload.a[1]"),
        ({"a": -float("inf")}, "payload.a"),
        ({"a": Decimal("NaN")}, "payload.a"),
        ({"a": Decimal("Infinity")}, "payload.a"),
        ({"a": {"b": "nul \x00"}}, "payload.a.b"),
        ({"nul \x00": 1}, "payload (a key)"),
        ({"a": "half \ud83d"}, "payload.a"),
        ({"half \udc00": 1}, "payload (a key)"),
        ({"at": datetime(2026, 11, 29, 9, 30)}, "payload.at"),
        ({"a": b"bytes"}, "payload.a"),
        ({"a": {1, 2}}, "payload.a"),
        ({"a": timedelta(1)}, "payload.a"),
        ({"a": object()}, "payload.a"),
        ({1: "a"}, "payload"),
        ({"a": 10**5000}, "payload"),
        ([1], "payload"),
        ("text", "payload"),
        (None, "payload"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_its_place(organization, payload, place):
    with pytest.raises(PayloadError) as caught:
        custom(_unused(), organization, payload)
    assert caught.value.field == place
    assert str(caught.value).startswith(place)


def test_what_contains_itself_is_refused(organization):
    payload = {}
    payload["me"] = payload
    with pytest.raises(PayloadError, match="levels deep"):
        custom(_unused(), organization, payload)


@pytest.mark.parametrize(
    "event_type", ["Lead.created", "lead", "lead-x.y", "", "lead.created\n", "a." + "b" * 99, None]
)
def test_a_malformed_event_type_is_refused(event_type):
    with pytest.raises(EventTypeError):
        emit(_unused(), event_type, entity_kind="lead", payload={})


@pytest.mark.parametrize("kind", ["Lead", "", "a b", None])
def test_a_malformed_entity_kind_is_refused(kind):
    with pytest.raises(EventTypeError):
        emit(_unused(), "lead.created", entity_kind=kind, payload={})


@pytest.mark.parametrize(
    "metadata",
    [{"request_id": "r" * 256}, {"trace_id": ""}, {"source": "s" * 101}, {"idempotency_key": ""}, {"request_id": 7},
     {"schema_version": "1"}, {"schema_version": 1}, {"actor_id": "a" * 256}, {"request_id": "\x00"}],
)  # fmt: skip
def test_metadata_out_of_its_limits_is_refused(metadata):
    with pytest.raises(PayloadError) as caught:
        emit(_unused(), "shop.opened", entity_kind="shop", payload={}, **metadata)
    assert caught.value.field == f"metadata.{next(iter(metadata))}"


def test_a_naive_deliver_at_is_refused():
    with pytest.raises(PayloadError) as caught:
        custom(_unused(), None, {}, deliver_at=datetime(2030, 1, 1))
    assert caught.value.field == "deliver_at"


def test_what_is_too_large_is_refused_at_the_byte(conn, organization):
    overhead = len('{"text": ""}')
    custom(conn, organization, {"text": "x" * (MAX_PAYLOAD_BYTES - overhead)})
    with pytest.raises(TooLargeError):
        custom(conn, organization, {"text": "x" * (MAX_PAYLOAD_BYTES - overhead + 1)})
    with pytest.raises(TooLargeError):
        custom(conn, organization, {"text": "é" * (MAX_PAYLOAD_BYTES // 2)})
    assert count(conn, organization) == 1


def test_a_payload_that_does_not_fit_its_schema_is_refused_where_somebody_knows_why(conn, organization):
    with pytest.raises(PayloadError, match=r"payload\.stage_id") as caught:
        emit(
            conn,
            "lead.created",
            entity_kind="lead",
            payload={"name": "Ana", "source": "web", "pipeline_id": "p"},
            organization_id=organization,
        )
    assert "afluente schemas show lead.created" in caught.value.hint
    with pytest.raises(PayloadError, match="schema_version"):
        emit(
            conn,
            "lead.created",
            entity_kind="lead",
            payload={"name": "Ana", "source": "web", "pipeline_id": "p", "stage_id": "s"},
            organization_id=organization,
            schema_version="9.0.0",
        )
    emit(
        conn,
        "lead.created",
        entity_kind="lead",
        payload={"name": "Ana", "source": "web", "pipeline_id": "p", "stage_id": "s", "of_ours": [1]},
        organization_id=organization,
    )
    assert stored(conn, organization)[3]["of_ours"] == [1]


def test_a_refusal_here_leaves_the_transaction_as_it_was(conn, organization):
    custom(conn, organization, {"n": 1})
    for payload in ({"n": float("nan")}, {"n": "\x00"}):
        with pytest.raises(PayloadError):
            custom(conn, organization, payload)
    conn.commit()
    assert stored(conn, organization)[3] == {"n": 1}


# -------------------- what only the server knows


def test_numbers_beyond_numeric_are_refused_by_type(conn, organization):
    with pytest.raises(TooLargeError):  # few bytes here, a third of a megabyte as Postgres writes it
        emit_raw(conn, organization, '{"a": 1e131071, "b": 1e131071, "c": 1}')
    conn.rollback()
    with pytest.raises(PayloadError):
        emit_raw(conn, organization, '{"a": 1e999999}')


def emit_raw(conn, organization, text):
    """Past the client's checks."""
    try:
        conn.execute("SELECT emit_event_for(%s, 'a.b', 'a', NULL, %s)", [organization, text])
    except psycopg.Error as error:
        typed = translate(error)
        assert typed is not None
        raise typed from error


@pytest.mark.parametrize("text", ["\\u0000", "\\ud800"])
def test_text_past_the_client_is_refused_by_type(conn, organization, text):
    with pytest.raises(PayloadError, match="Postgres cannot keep it"):
        emit_raw(conn, organization, '{"a": "' + text + '"}')


def test_a_key_used_for_another_payload_is_an_error(conn, organization):
    first = custom(conn, organization, {"n": 1}, idempotency_key="k")
    assert custom(conn, organization, {"n": 1}, idempotency_key="k") == first
    with pytest.raises(IdempotencyKeyReusedError, match=str(first)):
        custom(conn, organization, {"n": 2}, idempotency_key="k")


def test_32_emitters_with_one_key_get_one_id(database, organization):
    barrier = threading.Barrier(32)
    found = []

    def run():
        with postgres.connect(database.url) as conn:
            barrier.wait(30)
            found.append(custom(conn, organization, {"n": 1}, idempotency_key="once"))

    threads = [threading.Thread(target=run) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 32
    assert database.execute("SELECT id FROM event_log WHERE organization_id = %s", [organization]) == [(found[0],)]
    assert set(found) == {found[0]}


def test_other_database_errors_come_through_as_they_are(database, organization):
    conn = database.connect(role="afluente_app")
    conn.execute("SELECT set_config('app.organization_id', %s, false)", [str(organization)])
    with pytest.raises(psycopg.errors.DivisionByZero):
        conn.execute("SELECT 1 / 0")
    with pytest.raises(psycopg.errors.InFailedSqlTransaction):
        custom(conn, organization, {})


def test_every_sqlstate_has_its_type():
    for kind in (
        NoOrganizationError,
        ForeignOrganizationError,
        EventTypeError,
        PayloadError,
        TooLargeError,
        IdempotencyKeyReusedError,
        UnknownOrganizationError,
        SealedMonthError,
    ):
        assert issubclass(kind, EmitError)
        assert kind.sqlstate.startswith("AF00")


# -------------------- any JSON at all


_names = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=10)
_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_names, inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(payload=st.dictionaries(_names, _json, max_size=5))
def test_json_comes_out_of_postgres_and_of_a_record_as_it_went_in(conn, organization, payload):
    with conn.transaction(force_rollback=True):
        event_id = custom(conn, organization, payload)
        row = schemas.Row(
            *conn.execute(
                "SELECT seq, id, organization_id, event_type, entity_kind, entity_id,"
                " convert_to(payload::text, 'UTF8'), convert_to(metadata::text, 'UTF8'), created_at FROM event_log"
                " WHERE organization_id = %s",
                [organization],
            ).fetchone()
        )
    assert row.id == event_id
    assert json.loads(row.payload) == payload
    assert schemas.decode(schemas.encode(row)).payload == payload


def test_to_json_is_one_function_for_everybody():
    assert to_json({"a": Decimal("1.10"), "b": "é"}) == '{"a": "1.10", "b": "é"}'


class _Unused:
    """Stands where a connection would: a refusal must come before it is touched."""

    def __getattr__(self, name):
        raise AssertionError(f"the connection was used: {name}")


def _unused():
    return _Unused()
