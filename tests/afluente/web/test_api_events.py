"""POST, GET and DELETE of events: what is committed, what is answered, what is refused and with which words."""

import asyncio
import contextlib
import json
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import aiohttp
import pytest
from psycopg.types.json import Jsonb

from afluente import postgres as connections
from afluente.web.api import body as bodies
from tests.afluente.web.conftest import event

DEEP = b'{"event_type": "a.b", "entity_kind": "a", "payload": {"a": ' + b"[" * 150 + b"]" * 150 + b"}}"
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


async def test_an_event_is_committed_as_emit_event_commits_it(api, organization, events_of, make_key):
    entity = str(uuid4())
    cause = str(uuid4())
    answer = await api.post(
        "/v1/events",
        event(
            entity_id=entity, source="shop", caused_by={"event_id": cause, "depth": 3}, payload={"big": 2**70, "é": 1.5}
        ),
        x_request_id="req-1",
        traceparent=TRACE,
    )
    assert (answer.status, answer.content["status"]) == (201, "accepted")
    assert answer.headers["location"] == f"/v1/events/{answer.content['id']}"
    assert answer.headers["x-request-id"] == "req-1"
    (row,) = events_of(organization)
    assert str(row["id"]) == answer.content["id"]
    assert (row["event_type"], row["entity_kind"], str(row["entity_id"])) == ("loyalty.earned", "loyalty", entity)
    assert row["payload"] == {"big": 2**70, "é": 1.5}
    assert row["metadata"].pop("emitted_at") > 0
    assert row["metadata"].pop("actor_id").startswith("api_key:")
    assert row["metadata"] == {
        "source": "shop",
        "request_id": "req-1",
        "trace_id": TRACE.split("-")[1],
        "traceparent": TRACE,
        "causation_id": cause,
        "causation_depth": 3,
    }

    read = await api.get(answer.headers["location"])
    assert read.status == 200
    assert read.content["payload"] == {"big": 2**70, "é": 1.5}
    assert (read.content["status"], read.content["deliveries"]) == ("done", [])


async def test_what_became_of_an_event_is_read_back(api, organization, database):
    event_id = (await api.post("/v1/events", event())).content["id"]
    for worker, target, state, columns in (
        ("automation-worker", "", "done", {"finished_at": datetime.now(UTC)}),
        ("webhook-dispatch-worker", "sub-1", "waiting", {"next_attempt_at": datetime.now(UTC)}),
    ):
        values = {"attempts": 2, "last_error": "Maria said 555", **columns}
        database.execute(
            f"INSERT INTO event_delivery (event_created_at, worker, event_id, target, organization_id, event_type, key,"
            f" state, {', '.join(values)}) SELECT created_at, %s, id, %s, organization_id, event_type, '', %s,"
            f" {', '.join(['%s'] * len(values))} FROM event_log WHERE id = %s",
            [worker, target, state, *values.values(), event_id],
        )
    read = (await api.get(f"/v1/events/{event_id}")).content
    assert read["status"] == "pending"
    assert [(d["worker"], d["target"], d["state"], d["attempts"]) for d in read["deliveries"]] == [
        ("automation-worker", "", "done", 2),
        ("webhook-dispatch-worker", "sub-1", "waiting", 2),
    ]
    assert "Maria" not in json.dumps(read)


@pytest.mark.parametrize(
    ("given", "problem", "pointer"),
    [
        ({"event_type": "webhook.received"}, "event-type-refused", None),
        ({"event_type": "contact_event.recorded"}, "event-type-refused", None),
        ({"event_type": "message.queued"}, "event-type-refused", None),
        ({"event_type": "lgpd.data_request_received"}, "event-type-refused", None),
        ({"event_type": "Lead"}, "invalid-request", "/event_type"),
        ({"event_type": 7}, "invalid-request", "/event_type"),
        ({"entity_id": "{0198c2a4-5f3e-7d61-9c0b-1f6f0d3b8a52}"}, "invalid-request", "/entity_id"),
        ({"deliver_at": "2026-12-01T10:00:00"}, "invalid-request", "/deliver_at"),
        ({"deliver_at": 1764590400}, "invalid-request", "/deliver_at"),
        ({"payload": ["x"]}, "invalid-request", "/payload"),
        ({"paylod": {}}, "invalid-request", "/paylod"),
        ({"event_type": "lead_activity.recorded", "payload": {"lead_id": 7}}, "event-refused", None),
        ({"payload": {"text": "a\0b"}}, "event-refused", "/payload/text"),
        ({"payload": {"text": "\ud800"}}, "event-refused", "/payload/text"),
        ({"payload": {"items": [{"x": "y" * 262_200}]}}, "too-large", None),
        ({"schema_version": "9.0.0", "event_type": "lead_activity.recorded"}, "event-refused", None),
    ],
)
async def test_what_emit_event_would_refuse_is_refused_with_the_place(
    api, organization, events_of, given, problem, pointer
):
    answer = await api.post("/v1/events", event(**given))
    assert (answer.status, answer.problem) == (422, problem)
    if pointer is not None:
        assert [error["pointer"] for error in answer.content["errors"]] == [pointer]
    assert "SELECT" not in json.dumps(answer.content)
    assert events_of(organization) == []


async def test_a_field_that_does_not_fit_its_type_is_named_and_personal_data_is_not_repeated(api):
    answer = await api.post(
        "/v1/events",
        event(event_type="nuvemshop.cart_abandoned", payload={"cart_id": "1", "value_cents": "maria@example.com"}),
    )
    assert answer.problem == "event-refused"
    assert "maria" not in json.dumps(answer.content)
    assert answer.content["hint"].startswith("GET /v1/event-types/nuvemshop.cart_abandoned")
    answer = await api.post("/v1/events", event(**{"maria@example.com": 1}))
    assert answer.problem == "invalid-request"
    assert "maria" not in json.dumps(answer.content)


@pytest.mark.parametrize(
    ("body", "problem", "status"),
    [
        (b"", "malformed-body", 400),
        (b'{"event_type": "a.b"', "malformed-body", 400),
        (b'{"a": 1, "a": 2}', "malformed-body", 400),
        (b'{"a": NaN}', "malformed-body", 400),
        (b'{"a": 1e999}', "malformed-body", 400),
        (b'{"a": 0.12345678901234567890123}', "malformed-body", 400),
        (b'{"a": ' + b"9" * 5000 + b"}", "malformed-body", 400),
        (b'{"a": "\xff"}', "malformed-body", 400),
        (b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "malformed-body", 400),
        (DEEP, "event-refused", 422),
        (b"[]", "invalid-request", 422),
        (b"null", "invalid-request", 422),
        (b" " * (bodies.MAX_BODY_BYTES + 1), "body-too-large", 413),
    ],
    ids=range(13),
)  # fmt: skip
async def test_a_body_that_cannot_be_taken_is_told_so(api, organization, events_of, body, problem, status):
    answer = await api("POST", "/v1/events", body=body)
    assert (answer.status, answer.problem) == (status, problem)
    assert events_of(organization) == []


async def test_a_body_of_unknown_length_is_cut_off_at_the_bound(api, heard):
    async def endless():
        while True:
            yield b" " * 65_536

    with contextlib.suppress(aiohttp.ClientError):  # it may not have read the answer before it was cut off
        await api("POST", "/v1/events", body=endless(), x_request_id="endless")
    assert (await heard.of("api.request", request_id="endless"))["status"] == 413


async def test_other_bodies_than_json_are_not_read(api):
    answer = await api("POST", "/v1/events", body=b"a=b", content_type="application/x-www-form-urlencoded")
    assert (answer.status, answer.problem) == (415, "unsupported-media-type")


async def test_paths_and_methods_that_are_not_there_are_problems_too(api):
    assert (await api.get("/v1")).problem == "not-found"
    assert (await api.get("/v1/nothing")).problem == "not-found"
    assert (await api.get("/v1/event-types/a%0Ab")).problem == "not-found"
    assert (await api.get("/v1/a%0Ab")).problem == "not-found"
    assert (await api.get("/v1/events/")).problem == "not-found"
    assert (await api.get("/v1/events/not-an-id")).problem == "not-found"
    assert (await api.get(f"/v1/events/{uuid4()}")).problem == "not-found"
    answer = await api("PUT", "/v1/events", {})
    assert (answer.status, answer.problem, answer.headers["allow"]) == (405, "method-not-allowed", "POST")


async def test_a_batch_answers_item_by_item_in_order(api, organization, events_of):
    named = event(idempotency_key="fact-1")
    items = [
        event(payload={"n": 0}),
        event(event_type="webhook.received"),
        named,
        "no object",
        named,
        named | {"payload": {"points": 6}},
        event(payload={"n": 6}),
    ]
    answer = await api.post("/v1/events", {"events": [i for i in items if isinstance(i, dict)]})
    assert answer.status == 207
    assert [r["status"] for r in answer.content["results"]] == [
        "accepted", "refused", "accepted", "duplicate", "refused", "accepted",
    ]  # fmt: skip
    assert [r["index"] for r in answer.content["results"]] == list(range(6))
    refusals = [r["problem"]["type"].rpartition("-")[2] for r in answer.content["results"] if r["status"] == "refused"]
    assert refusals == ["refused", "reused"]
    assert (answer.content["accepted"], answer.content["duplicate"], answer.content["refused"]) == (3, 1, 2)
    assert [e["payload"] for e in events_of(organization)] == [{"n": 0}, {"points": 5}, {"n": 6}]

    again = await api.post("/v1/events", {"events": [named]})
    assert (again.status, again.content["results"][0]["status"]) == (200, "duplicate")
    single = await api.post("/v1/events", named)
    assert (single.status, single.content["status"]) == (200, "duplicate")
    assert (await api.post("/v1/events", {"events": items})).problem == "invalid-request"  # text among the items


@pytest.mark.parametrize("wrong", [event(event_type="webhook.received"), event(idempotency_key="k", payload={})])
async def test_all_or_nothing_writes_nothing_when_one_is_refused(api, organization, events_of, wrong):
    assert (await api.post("/v1/events", event(idempotency_key="k"))).status == 201
    answer = await api.post("/v1/events", {"events": [event(), wrong, event()], "all_or_nothing": True})
    assert (answer.status, answer.problem) == (422, "batch-refused")
    assert [r["status"] for r in answer.content["results"]] == ["not_written", "refused", "not_written"]
    assert len(events_of(organization)) == 1


@pytest.mark.parametrize(("path", "name"), [("/v1/events", "events"), ("/v1/contact-events", "contact_events")])
async def test_a_bare_list_is_told_how_several_are_sent(api, path, name):
    answer = await api.post(path, [{}, {}])
    assert answer.problem == "invalid-request"
    assert f'{{"{name}": [...]}}' in answer.content["hint"]


async def test_a_batch_is_bounded(api):
    assert (await api.post("/v1/events", {"events": []})).problem == "invalid-request"
    assert (await api.post("/v1/events", {"events": [event()] * 501})).problem == "invalid-request"
    assert (await api.post("/v1/events", {"events": [event()] * 500})).content["accepted"] == 500


async def test_an_event_that_waits_for_its_time_is_seen_and_taken_back(api, organization, events_of):
    later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    answer = await api.post("/v1/events", event(deliver_at=later, idempotency_key="later"))
    assert answer.content["status"] == "accepted"
    path = answer.headers["location"]
    read = (await api.get(path)).content
    assert (read["status"], read["deliveries"]) == ("scheduled", [])
    assert datetime.fromisoformat(read["deliver_at"]) == datetime.fromisoformat(later)
    assert (await api("DELETE", path)).status == 204
    assert (await api("DELETE", path)).problem == "not-found"
    assert (await api.get(path)).problem == "not-found"
    assert events_of(organization) == []
    emitted = (await api.post("/v1/events", event())).headers["location"]
    assert (await api("DELETE", emitted)).problem == "not-found"


# -------------------- happening once


async def test_a_repeat_is_answered_as_the_first_and_does_nothing(api, organization, events_of):
    first = await api.post("/v1/events", event(), idempotency_key="k-1")
    again = await api.post("/v1/events", event(), idempotency_key='"k-1"', x_request_id="another")
    assert (first.status, again.status) == (201, 201)
    assert first.content == again.content
    assert again.headers["location"] == first.headers["location"]
    assert again.headers["idempotency-replayed"] == "true"
    assert "idempotency-replayed" not in first.headers
    (row,) = events_of(organization)
    assert row["metadata"]["idempotency_key"] == "k-1"

    other = await api.post("/v1/events", event(payload={"points": 6}), idempotency_key="k-1")
    assert (other.status, other.problem) == (422, "idempotency-key-reused")
    elsewhere = await api.post("/v1/contact-events", event(), idempotency_key="k-1")
    assert elsewhere.status == 422
    assert (await api.post("/v1/events", event(), idempotency_key="a b")).problem == "malformed-header"


async def test_a_key_used_in_sql_names_the_same_fact(api, organization, database):
    with connections.connect(database.url) as conn:
        ((event_id,),) = conn.execute(
            "SELECT emit_event_for(%s, 'loyalty.earned', 'loyalty', NULL, %s, %s)",
            [organization, Jsonb({"points": 5}), Jsonb({"idempotency_key": "of-both"})],
        ).fetchall()
    answer = await api.post("/v1/events", event(), idempotency_key="of-both")
    assert (answer.status, answer.content) == (200, {"id": str(event_id), "status": "duplicate"})
    other = await api.post("/v1/events", event(payload={}), idempotency_key="of-both")
    assert other.problem == "idempotency-key-reused"


async def test_a_batch_is_repeated_with_the_same_answer_refusals_included(api, organization, events_of):
    given = {"events": [event(), event(event_type="webhook.received"), event(payload={"points": 7})]}
    first = await api.post("/v1/events", given, idempotency_key="batch")
    again = await api.post("/v1/events", given, idempotency_key="batch")
    assert (first.status, first.content) == (again.status, again.content)
    assert len(events_of(organization)) == 2


async def test_requests_of_one_key_at_once_are_one_event_and_one_answer(api, organization, events_of):
    answers = await asyncio.gather(*(api.post("/v1/events", event(), idempotency_key="k") for _ in range(12)))
    assert {answer.status for answer in answers} == {201}
    assert len({answer.content["id"] for answer in answers}) == 1
    assert sum("idempotency-replayed" in answer.headers for answer in answers) == 11
    assert len(events_of(organization)) == 1


async def test_a_request_that_was_refused_may_come_again_mended(api, organization, events_of):
    assert (await api.post("/v1/events", event(event_type="webhook.x"), idempotency_key="k")).status == 422
    assert (await api.post("/v1/events", event(), idempotency_key="k")).status == 201


async def test_while_the_first_runs_a_repeat_is_told_to_come_again(api, organization, database, monkeypatch):
    monkeypatch.setattr("afluente.web.api.idempotency.LOCK_TIMEOUT_MS", 50)
    with connections.connect(database.url, role=None) as conn:
        conn.execute(
            "INSERT INTO api_idempotency (organization_id, key, request_hash) VALUES (%s, 'k', %s)",
            [organization, bytes(32)],
        )
        answer = await api.post("/v1/events", event(), idempotency_key="k")
        assert (answer.status, answer.problem, answer.headers["retry-after"]) == (409, "request-in-progress", "1")
        conn.rollback()
    assert (await api.post("/v1/events", event(), idempotency_key="k")).status == 201
