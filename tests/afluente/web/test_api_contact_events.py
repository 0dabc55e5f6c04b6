"""POST and GET of contact events, and the catalogue: one fact is one row, and everybody reads their own."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from uuid import uuid4

from afluente import postgres as connections
from afluente.web.api import contact_events
from tests.afluente.web.conftest import fact


async def test_a_fact_is_recorded_once_about_a_contact_that_is_made_once(api, organization, events_of, database):
    at = "2026-11-30T12:00:00.123456-03:00"
    given = fact(
        external_event_id="order_paid:1001",
        occurred_at=at,
        contact={"phone": "(11) 8765-4321", "email": "Maria@Example.com", "name": " Maria  Silva "},
        entity_type="order",
        entity_id="1001",
    )
    answer = await api.post("/v1/contact-events", given, x_request_id="r-1")
    assert (answer.status, answer.content["status"]) == (201, "accepted")
    read = (await api.get(answer.headers["location"])).content
    assert read["properties"] == {"productId": "p"}
    assert (read["event_type"], read["metric"], read["value"], read["currency"]) == (
        "purchase_completed", "Order Paid", "297.90", "BRL",
    )  # fmt: skip
    assert read["unique_event_id"] == "pos:order:order_paid:1001"
    assert datetime.fromisoformat(read["occurred_at"]) == datetime.fromisoformat(at)
    ((phone, email, name),) = database.execute(
        "SELECT phone_e164, email, name FROM contacts WHERE organization_id = %s", [organization]
    )
    assert (phone, email, name) == ("+5511987654321", "maria@example.com", "Maria Silva")
    recorded = events_of(organization, "contact_event.recorded")
    assert [e["payload"]["metric_name"] for e in recorded] == ["Contact Created", "Order Paid"]
    assert {e["metadata"]["request_id"] for e in recorded} == {"r-1"}
    assert len(events_of(organization, "contact.created")) == 1

    again = await api.post("/v1/contact-events", given | {"value": 300})
    assert (again.status, again.content) == (200, {"id": answer.content["id"], "status": "duplicate"})
    by_id = await api.post("/v1/contact-events", fact(contact=None, contact_id=read["contact_id"], value=1.5))
    assert by_id.status == 201
    assert len(events_of(organization, "contact_event.recorded")) == 3


async def test_facts_that_do_not_fit_are_refused_with_the_place(api, organization, events_of):
    for given, problem, pointer in (
        ({"contact": None}, "invalid-request", ""),
        ({"contact": {}}, "invalid-request", "/contact"),
        ({"contact": {"phone": "12"}}, "invalid-request", "/contact"),
        ({"contact": {"email": "nobody"}}, "invalid-request", "/contact"),
        ({"contact_id": str(uuid4())}, "invalid-request", ""),
        ({"contact": None, "contact_id": str(uuid4())}, "contact-unknown", None),
        ({"event_type": None}, "invalid-request", ""),
        ({"properties": {"productId": 7}}, "event-refused", "/properties/productId"),
        ({"event_type": None, "metric": "Order Paid", "properties": {"productId": 7}}, "event-refused", None),
        ({"properties": {"x": "a\0"}}, "event-refused", "/properties/x"),
        ({"properties": {"x": "y" * 300_000}}, "too-large", None),
        ({"value": "1e5000"}, "invalid-request", "/value"),
        ({"value": "NaN"}, "invalid-request", "/value"),
        ({"value": "1_0"}, "invalid-request", "/value"),
        ({"value": "1E+3"}, "invalid-request", "/value"),
        ({"value": "\u0661"}, "invalid-request", "/value"),
        ({"value": True}, "invalid-request", "/value"),
        ({"currency": "reais"}, "invalid-request", "/currency"),
        ({"source": "x" * 101}, "invalid-request", "/source"),
        ({"source": "a\0b"}, "invalid-request", "/source"),
        ({"external_event_id": ""}, "invalid-request", "/external_event_id"),
        ({"occurred_at": "yesterday"}, "invalid-request", "/occurred_at"),
        ({"occurred_at": "0001-01-01T00:00:00Z"}, "invalid-request", "/occurred_at"),
    ):
        answer = await api.post("/v1/contact-events", fact(**given))
        assert (answer.status, answer.problem) == (422, problem), given
        if pointer is not None:
            assert answer.content["errors"][0]["pointer"] == pointer, given
    assert events_of(organization) == []


async def test_a_batch_of_facts_answers_item_by_item(api, organization, database):
    other = database.organization("Other")
    insert = "INSERT INTO contacts (organization_id, source) VALUES (%s, 'x') RETURNING id"
    ((foreign,),) = database.execute(insert, [other])
    items = [
        fact(external_event_id="order_paid:1"),
        fact(external_event_id="order_paid:1"),
        fact(contact=None, contact_id=str(foreign)),
        fact(event_type=None),
        fact(external_event_id="order_paid:2", contact={"external_id": "c-7"}),
    ]
    answer = await api.post("/v1/contact-events", {"contact_events": items}, idempotency_key="b")
    assert answer.status == 207
    assert [r["status"] for r in answer.content["results"]] == [
        "accepted", "duplicate", "refused", "refused", "accepted",
    ]  # fmt: skip
    assert answer.content["results"][0]["id"] == answer.content["results"][1]["id"]
    again = await api.post("/v1/contact-events", {"contact_events": items}, idempotency_key="b")
    assert again.content == answer.content
    none = await api.post("/v1/contact-events", {"contact_events": [fact(event_type=None)] * 2})
    assert (none.status, none.content["refused"]) == (207, 2)
    for wrong in (items[2], items[3]):
        whole = {"contact_events": [fact(external_event_id="order_paid:3"), wrong], "all_or_nothing": True}
        refused = await api.post("/v1/contact-events", whole)
        assert refused.problem == "batch-refused"
    count = database.execute("SELECT count(*) FROM contact_events WHERE organization_id = %s", [organization])
    assert count == [(4,)]  # two contacts created, two orders paid


async def test_the_same_facts_at_once_are_recorded_once(api, organization, database):
    batches = [
        {"contact_events": [fact(external_event_id=f"order_paid:{n}", contact={"phone": f"+551198765{4000 + n}"})
                            for n in order]}
        for order in (range(20), reversed(range(20)), range(0, 20, 2), range(19, 0, -3))
    ]  # fmt: skip
    answers = await asyncio.gather(*(api.post("/v1/contact-events", given) for given in batches * 2))
    assert {answer.status for answer in answers} == {200}
    assert sum(answer.content["accepted"] for answer in answers) == 20
    (counts,) = database.execute(
        "SELECT (SELECT count(*) FROM contacts WHERE organization_id = %(o)s),"
        " (SELECT count(*) FROM contact_events WHERE organization_id = %(o)s AND event_type IS NOT NULL)",
        {"o": organization},
    )
    assert counts == (20, 20)


async def test_pages_walk_all_facts_once_newest_first(api, make_key, organization, database):
    at = datetime(2026, 11, 1, tzinfo=UTC)
    people = [{"phone": "+5511987650001"}, {"phone": "+5511987650002"}]
    items = [
        fact(
            contact=people[n % 2],
            occurred_at=(at + timedelta(hours=n // 3)).isoformat(),  # several at one moment
            event_type=("product_viewed", "purchase_completed")[n % 3 == 0],
            external_event_id=f"f:{n}",
            properties={},
        )
        for n in range(25)
    ]
    written = await api.post("/v1/contact-events", {"contact_events": items})
    ids = [r["id"] for r in written.content["results"]]
    one = (await api.get(f"/v1/contact-events/{ids[0]}")).content["contact_id"]

    async def walk(query):
        found, path = [], f"/v1/contact-events?{query}"
        while path:
            page = await api.get(path)
            assert page.status == 200, page.content
            found += page.content["data"]
            link = page.headers.get("link")
            assert (link is None) == (page.content["next_cursor"] is None)
            path = link and link.partition(">")[0][1:]
        return found

    everything = await walk("limit=4&metric=Order Paid&since=2026-10-01T00:00:00Z")
    assert [e["id"] for e in everything] == [ids[n] for n in range(24, -1, -3)]
    all_of_one = await walk(f"contact_id={one}&limit=3&until=2026-11-20T00:00:00Z")
    keys = [(e["occurred_at"], e["id"]) for e in all_of_one]
    assert keys == sorted(keys, reverse=True)
    assert {e["id"] for e in all_of_one} == set(ids[::2])
    since = (at + timedelta(hours=2)).isoformat()  # its plus sign is not escaped
    some = await walk(f"contact_id={one}&event_type=product_viewed&since={since}&until=2026-11-01T04:00:00Z")
    assert {e["id"] for e in some} == {ids[n] for n in range(6, 12, 2) if n % 3}

    stranger = api.of(make_key(database.organization("Stranger")).text)
    assert (await stranger.get(f"/v1/contact-events?contact_id={one}")).content["data"] == []
    assert (await stranger.get(f"/v1/contact-events/{ids[0]}")).problem == "not-found"


async def test_facts_of_merged_contacts_are_read_as_one_persons(api, organization, database):
    found = [
        (await api.post("/v1/contact-events", fact(contact={"phone": f"+551198765000{n}"}))).headers["location"]
        for n in (1, 2)
    ]
    stays, goes = [(await api.get(path)).content["contact_id"] for path in found]
    with connections.connect(database.url) as conn, connections.act_for_sync(conn, organization):
        conn.execute("SELECT merge_contacts(%s, %s, %s, %s)", [goes, stays, "test", "one person"])
    page = await api.get(f"/v1/contact-events?contact_id={stays}&event_type=purchase_completed")
    assert {e["contact_id"] for e in page.content["data"]} == {stays, goes}
    late = await api.post("/v1/contact-events", fact(contact=None, contact_id=goes))
    assert (await api.get(late.headers["location"])).content["contact_id"] == stays


async def test_a_page_is_found_by_an_index(api, organization, database):
    recorded = await api.post("/v1/contact-events", fact(occurred_at="2026-11-01T00:00:00Z"))
    contact_id = (await api.get(recorded.headers["location"])).content["contact_id"]
    database.execute(
        """
        WITH people AS (
            INSERT INTO contacts (organization_id, source) SELECT %s, 'x' FROM generate_series(1, 500) RETURNING *
        )
        INSERT INTO contact_events (organization_id, contact_id, source_type, source, event_type, occurred_at)
        SELECT p.organization_id, p.id, 'EXTERNAL', 'x',
               CASE WHEN mod(n, 10) = 0 THEN 'product_viewed' ELSE 'product_asked' END,
               timestamptz '2026-10-01' + n * interval '1 h'
          FROM people p, generate_series(1, 20) n
        """,
        [organization],
    )
    database.execute("ANALYZE contacts, contact_events")
    for asked, index in (
        ({}, "contact_events_period_idx"),
        ({"since": datetime(2026, 10, 2, tzinfo=UTC)}, "contact_events_period_idx"),
        ({"event_type": "purchase_completed"}, "contact_events_type_period_idx"),
        ({"metric": "Order Paid"}, "contact_events_metric_period_idx"),
        ({"contact_id": contact_id}, "contact_events_contact_idx"),
        ({"contact_id": contact_id, "event_type": "product_viewed"}, "contact_events_type_idx"),
    ):
        with database.connect() as conn, connections.act_for_sync(conn, organization):
            statement = "EXPLAIN " + contact_events.statement(asked)
            plan = "\n".join(row[0] for row in conn.execute(statement, {**asked, "rows": 51}))
        assert index in plan, plan
        assert "Seq Scan on contact_events" not in plan, plan
        assert "contact_ids" not in plan.partition("->  Index")[2], plan  # nothing is called for each row


async def test_parameters_that_are_wrong_are_named(api):
    for query in (
        "limit=0", "limit=201", "limit=x", "cursor=x", "cursor=AAAA", "contact_id=7", "since=today", "until=2026-01-01",
        "event_type=", "color=red",
    ):  # fmt: skip
        answer = await api.get(f"/v1/contact-events?{query}")
        assert (answer.status, answer.problem) == (422, "invalid-request"), query
        assert answer.content["errors"][0]["pointer"] == "?" + query.partition("=")[0]


async def test_the_catalogue_has_every_type_with_its_schema(api):
    whole = (await api.get("/v1/event-types")).content
    names = {entry["name"]: entry for entry in whole["event_types"]}
    assert names["lead.stage_changed"]["schema"]["type"] == "object"
    assert names["lead.stage_changed"]["topic"] == "events.lead"
    assert not names["webhook.received"]["emitted_here"]
    assert not names["contact_event.recorded"]["emitted_here"]
    assert len(whole["contact_event_types"]) == 20
    assert len(whole["metrics"]) == 32
    one = (await api.get("/v1/event-types/purchase_completed")).content
    assert (one["metric"], one["labels"]["pt-BR"]) == ("Order Paid", "Compra concluída")
    assert "productId" in json.dumps(one["schema"])
    assert (await api.get("/v1/event-types/nothing.here")).problem == "not-found"
