"""producers.record_contact_event and emit_metric_event: what they write, what they refuse before anything is sent."""

import json
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from uuid import uuid4

import psycopg
import pytest
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from afluente import postgres as connections
from producers import (
    Causation,
    emit_metric_event,
    emit_metric_event_async,
    record_contact_event,
    record_contact_event_async,
)
from producers.errors import (
    ContactError,
    ContactUnknownError,
    ForeignOrganizationError,
    NoOrganizationError,
    PayloadError,
    translate,
)
from schemas.contact_events import CONTACT_EVENT_TYPES, METRICS, contact_event_type_of, metric_of
from schemas.events.contact_event import PROPERTIES, ProductViewed, PurchaseCompleted
from tests.fixtures.postgres import clone


@pytest.fixture(scope="module")
def database(postgres, template):
    """One for all: every test has an organization of its own in it."""
    with clone(postgres, template) as database:
        yield database


@pytest.fixture
def organization(database):
    return database.organization("Mine")


@pytest.fixture
def contact(database, organization):
    return make_contact(database, organization)


def make_contact(database, organization, phone=None):
    with connections.connect(database.url) as conn:
        given = (
            [{"kind": "phone", "value": phone}]
            if phone
            else [{"kind": "external", "source": "t", "value": str(uuid4())}]
        )
        return conn.execute(
            "SELECT contact_id FROM upsert_contact(%s, %s, 'Ana', 'test')", [organization, Jsonb(given)]
        ).fetchone()[0]


@pytest.fixture
def conn(database, organization):
    """As an application of the organization, in a transaction."""
    with connections.connect(database.url, role="afluente_app") as conn:
        conn.execute("SELECT set_config('app.organization_id', %s, false)", [str(organization)])
        conn.commit()
        yield conn
        conn.rollback()


@pytest.fixture(params=["sync", "async"])
def call(request, conn, database, organization):
    """The two forms of each function behind one face."""
    if request.param == "sync":

        async def sync(function, *arguments, **given):
            return {"record": record_contact_event, "emit": emit_metric_event}[function](conn, *arguments, **given)

        yield sync
        return

    async def asynchronous(function, *arguments, **given):
        forms = {"record": record_contact_event_async, "emit": emit_metric_event_async}
        async with await connections.connect_async(database.url, role="afluente_app") as other:
            await other.execute("SELECT set_config('app.organization_id', %s, false)", [str(organization)])
            return await forms[function](other, *arguments, **given)

    yield asynchronous


def stored(conn, event_id):
    cursor = conn.cursor(row_factory=dict_row)
    return cursor.execute("SELECT * FROM contact_events WHERE id = %s", [event_id]).fetchone()


def recorded(conn):
    """(payload, metadata) of the organization's contact_event.recorded, in order."""
    return conn.execute(
        "SELECT payload, metadata FROM event_log WHERE event_type = 'contact_event.recorded' ORDER BY seq"
    ).fetchall()


# -------------------- what is written


async def test_purchase_is_one_row_with_both_columns(call, conn, contact):
    at = datetime(2026, 11, 20, 10, tzinfo=UTC)
    given = {
        "source": "pos", "event_type": "purchase_completed", "source_type": "EXTERNAL",
        "external_event_id": "order_paid:1", "entity_type": "order", "entity_id": "1", "value": Decimal("297.90"),
        "occurred_at": at, "request_id": "r-1", "causation": Causation(uuid4(), 3),
    }  # fmt: skip
    properties = PurchaseCompleted(productId="11", amount=Decimal("297.90"), coupon="NOV")
    first = await call("record", contact, properties=properties, **given)
    assert await call("record", contact, properties=properties, **given) == first
    row = stored(conn, first)
    assert (row["event_type"], row["metric_name"]) == ("purchase_completed", "Order Paid")
    assert (row["value"], row["currency"], row["occurred_at"]) == (Decimal("297.90"), "BRL", at)
    assert row["unique_event_id"] == "pos:order:order_paid:1"
    assert row["properties"] == {"productId": "11", "amount": "297.90", "coupon": "NOV"}
    ((payload, metadata),) = recorded(conn)
    assert payload["contact_event_id"] == str(first)
    assert (metadata["source"], metadata["request_id"], metadata["causation_depth"]) == ("pos", "r-1", 3)


async def test_metric_is_the_seeds_emit_event(call, conn, contact):
    given = {"source": "whatsapp", "entity_type": "message", "properties": {"phone": "x"}}
    first = await call("emit", contact, "Message Received", source_id="received:wamid.X", **given)
    assert await call("emit", contact, "Message Received", source_id="received:wamid.X", **given) == first
    row = stored(conn, first)
    assert (row["unique_event_id"], row["source_type"]) == ("whatsapp:message:received:wamid.X", "INTERNAL")
    assert (row["event_type"], row["currency"], row["value"]) == (None, None, None)
    # without a name two calls are two facts
    assert await call("emit", contact, "Loyalty", **given) != await call("emit", contact, "Loyalty", **given)
    assert conn.execute("SELECT name, category, is_system FROM metrics ORDER BY name").fetchall() == [
        ("Loyalty", "custom", False), ("Message Received", "messaging", True),
    ]  # fmt: skip
    # the twin of a metric goes along
    paid = await call("emit", contact, "Order Paid", source="shop", value=Decimal("10"), properties={"total": "10"})
    assert (stored(conn, paid)["event_type"], stored(conn, paid)["currency"]) == ("purchase_completed", "BRL")


async def test_no_contact_is_a_warning_and_nothing(call, conn, caplog):
    with caplog.at_level("WARNING"):
        assert await call("record", None, source="shop", metric_name="Order Placed") is None
        assert await call("emit", None, "Order Placed", source="shop") is None
    assert recorded(conn) == []


async def test_contacts_and_organizations_of_others_are_refused_by_type(call, conn, database, contact):
    theirs = database.organization("Theirs")
    foreign = make_contact(database, theirs)
    with pytest.raises(ContactUnknownError) as refused:
        await call("record", foreign, source="shop", metric_name="Order Placed")
    assert refused.value.hint
    conn.rollback()
    with pytest.raises(ForeignOrganizationError):
        await call("emit", contact, "Order Placed", source="shop", organization_id=theirs)
    conn.rollback()
    assert recorded(conn) == []


def test_session_without_an_organization_is_refused_by_type(database, contact):
    with connections.connect(database.url) as conn, pytest.raises(NoOrganizationError):
        emit_metric_event(conn, contact, "Order Placed", source="shop")


def test_every_contact_event_type_and_metric_is_taken(conn, contact):
    for name, model in PROPERTIES.items():
        sample = model.model_construct(**{field: None for field in model.model_fields})
        event = record_contact_event(conn, contact, source="s", event_type=name, properties=sample)
        assert (stored(conn, event)["event_type"], stored(conn, event)["metric_name"]) == (name, metric_of(name))
    for name in METRICS:
        event = emit_metric_event(conn, contact, name, source="s")
        assert (stored(conn, event)["event_type"], stored(conn, event)["metric_name"]) == (
            contact_event_type_of(name), name,
        )  # fmt: skip
    assert len(recorded(conn)) == len(CONTACT_EVENT_TYPES) + len(METRICS) == 52


# -------------------- what is refused before anything is sent


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"event_type": None}, "event_type"),
        ({"event_type": "purchase_completed", "properties": {"amount": "a lot"}}, "payload.properties.amount"),
        ({"event_type": "ticket_opened", "properties": {"ticketId": 5}}, "payload.properties.ticketId"),
        ({"properties": {"x": float("nan")}}, "properties.x"),
        ({"properties": {"x": "\x00"}}, "properties.x"),
        ({"source": "x" * 101}, "source"),
        ({"source": ""}, "source"),
        ({"event_type": "x" * 101}, "event_type"),
        ({"metric_name": ""}, "metric_name"),
        ({"external_event_id": "x" * 256}, "external_event_id"),
        ({"object_id": "x" * 256}, "object_id"),
        ({"object_id_ref": "x" * 256}, "object_id_ref"),
        ({"entity_id": 5}, "entity_id"),
        ({"source_type": "OTHER"}, "source_type"),
        ({"currency": "reais"}, "currency"),
        ({"value": 1.5}, "value"),
        ({"value": Decimal("NaN")}, "value"),
        ({"occurred_at": datetime(2026, 1, 1)}, "payload.occurred_at"),
        ({"occurred_at": datetime(9999, 12, 31, 23, tzinfo=timezone(-timedelta(hours=12)))}, "payload.occurred_at"),
    ],
)
def test_what_the_table_or_the_schema_refuses_is_refused_here(conn, contact, given, field):
    with pytest.raises(PayloadError) as refused:
        record_contact_event(conn, contact, **{"source": "s", "event_type": "product_viewed"} | given)
    assert refused.value.field == field
    # the transaction is as it was
    assert record_contact_event(conn, contact, source="s", event_type="product_viewed", properties=ProductViewed())


def test_too_large_and_unknown_words_are_refused(conn, contact):
    from producers.errors import TooLargeError

    with pytest.raises(TooLargeError):
        record_contact_event(conn, contact, source="s", metric_name="m", properties={"x": "x" * 262_144})
    with pytest.raises(TypeError, match="ammount"):
        record_contact_event(conn, contact, source="s", **{"metric_name": "m", "ammount": 1})


def test_errors_of_contacts_have_their_types(conn, contact):
    for statement in (
        "SELECT merge_contacts(%(c)s, %(c)s, 'me', 'why')",
        "SELECT merge_contacts(%(c)s, uuidv7(), '', '')",
    ):
        with pytest.raises(psycopg.Error) as refused, conn.transaction():
            conn.execute(statement, {"c": contact})
        assert isinstance(translate(refused.value), ContactError)


# -------------------- many at once


def batch(conn, *items, create=False):
    cursor = conn.cursor(row_factory=dict_row)
    text = json.dumps([{"n": n, "source": "legacy", **item} for n, item in enumerate(items)])
    return cursor.execute("SELECT * FROM record_contact_events(%s, %s)", [text, create]).fetchall()


def placed(number, **who):
    return {"metric_name": "Order Placed", "external_event_id": f"order_placed:{number}", "entity_type": "order", **who}


def test_batch_resolves_contacts_and_says_what_became_of_each(conn, database, organization):
    ana = make_contact(database, organization, "+5511987654321")
    foreign = make_contact(database, database.organization("Theirs"), "+5511900000000")
    found = batch(
        conn,
        placed(1, contact_id=str(ana), value="10.50", occurred_at="2026-01-02T03:04:05-03:00", properties={"a": 1}),
        placed(2, phone="+5511987654321"),
        placed(2, phone="+5511987654321"),
        placed(3, phone="+5511900000000"),
        placed(4, contact_id=str(foreign)),
        placed(5),
        {"external_event_id": "x:1", "contact_id": str(ana)},
        placed(6, contact_id=str(ana), event_type="purchase_completed", metric_name=None),
        placed(7, contact_id=str(ana), properties={"x": "y" * 270_000}),
        # told on the bus it would be no moment, and no client could read its row
        placed(9, contact_id=str(ana), occurred_at="9999-12-31T23:59:59-12:00"),
        placed(10, contact_id=str(ana), occurred_at="-infinity"),
    )
    assert [(row["n"], row["outcome"], row["reason"]) for row in found] == [
        (0, "recorded", None), (1, "recorded", None), (2, "duplicate", None), (3, "rejected", "unknown_contact"),
        (4, "rejected", "unknown_contact"), (5, "rejected", "no_contact"), (6, "rejected", "no_type"),
        (7, "recorded", None), (8, "rejected", "too_large"), (9, "rejected", "bad_time"), (10, "rejected", "bad_time"),
    ]  # fmt: skip
    assert found[2]["contact_event_id"] == found[1]["contact_event_id"]
    first = stored(conn, found[0]["contact_event_id"])
    assert (first["contact_id"], first["value"], first["currency"]) == (ana, Decimal("10.50"), "BRL")
    assert (first["source_type"], first["unique_event_id"]) == ("EXTERNAL", "legacy:order:order_placed:1")
    assert stored(conn, found[7]["contact_event_id"])["metric_name"] == "Order Paid"
    assert len(recorded(conn)) == 3
    again = batch(conn, placed(1, contact_id=str(ana)), placed(8, contact_id=str(ana)))
    assert [row["outcome"] for row in again] == ["duplicate", "recorded"]
    assert again[0]["contact_event_id"] == found[0]["contact_event_id"]


def test_batch_emits_what_one_call_emits(conn, contact):
    one = record_contact_event(
        conn, contact, source="legacy", source_type="EXTERNAL", metric_name="Order Placed",
        external_event_id="order_placed:1", entity_type="order", entity_id="1", value=Decimal("1.50"),
        occurred_at=datetime(2026, 1, 1, tzinfo=UTC), received_at=datetime(2026, 1, 2, tzinfo=UTC),
        properties={"á": [1, {"b": None}]},
    )  # fmt: skip
    (row,) = batch(
        conn,
        placed(
            2, contact_id=str(contact), entity_id="1", value="1.50", occurred_at="2026-01-01T00:00:00Z",
            received_at="2026-01-02T00:00:00Z", properties={"á": [1, {"b": None}]},
        ),
    )  # fmt: skip
    (single, _), (many, metadata) = recorded(conn)
    assert many.pop("contact_event_id") == str(row["contact_event_id"])
    assert single.pop("contact_event_id") == str(one)
    text = json.dumps(single).replace("order_placed:1", "order_placed:2")
    assert many == json.loads(text)
    assert set(metadata) == {"emitted_at"}


def test_batch_makes_contacts_only_when_asked_and_each_once(conn, organization):
    people = [
        placed(1, phone="+5511987650001", email="a@x.br", name="Ana"),
        placed(2, email="a@x.br"),
        placed(3, contact_external_id="77"),
        placed(4, contact_external_id="77", contact_source="legacy"),
    ]
    assert {row["reason"] for row in batch(conn, *people)} == {"unknown_contact"}
    found = batch(conn, *people, create=True)
    assert [row["outcome"] for row in found] == ["recorded"] * 4
    assert sum(row["contact_created"] for row in found) == 2
    contacts = conn.execute("SELECT name, phone_e164, email, source FROM contacts ORDER BY name").fetchall()
    assert contacts == [("Ana", "+5511987650001", "a@x.br", "legacy"), (None, None, None, "legacy")]
    types = "SELECT event_type, count(*) FROM event_log GROUP BY 1 ORDER BY 1"
    assert conn.execute(types).fetchall() == [("contact.created", 2), ("contact_event.recorded", 6)]


def test_batch_refuses_another_organization(conn, database, contact):
    with pytest.raises(psycopg.Error) as refused, conn.transaction():
        conn.execute("SELECT * FROM record_contact_events('[]', false, %s)", [database.organization("Theirs")])
    assert refused.value.sqlstate == "AF002"
    with connections.connect(database.url) as other, pytest.raises(psycopg.Error) as refused:
        batch(other, placed(1, contact_id=str(contact)))
    assert refused.value.sqlstate == "AF001"
