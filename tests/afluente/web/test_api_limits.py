"""Rates, over several processes; Postgres away; too much in flight; a process killed between commit and answer."""

import asyncio
import contextlib
from decimal import Decimal
from urllib.parse import urlsplit

import aiohttp
import pytest

from afluente import postgres as connections
from afluente.web.api import app as api_app
from afluente.web.api import body as bodies
from afluente.web.api import call as calls
from afluente.web.api.keys import Key
from afluente.web.api.problems import Problem
from afluente.web.api.rate import KEPT_S, Limiter, Slice
from afluente.web.app import Part, build
from tests.afluente.web.conftest import Client, event, fact
from tests.producers.ingest.conftest import running


class Bucket:
    """afluente.take_api_tokens, in memory and by the test's clock."""

    def __init__(self, clock):
        self.clock, self.tokens, self.at, self.calls = clock, None, clock.monotonic(), 0

    async def take(self, key, spent, wanted):
        self.calls += 1
        await asyncio.sleep(0)
        now = self.clock.monotonic()
        level = key.burst if self.tokens is None else self.tokens + (now - self.at) * key.rate_per_s
        level = min(key.burst, level - spent)
        granted = max(0, min(wanted, int(level)))
        self.tokens, self.at = level - granted, now
        return Slice(granted, self.tokens)


def a_key(rate_per_s, burst):
    from uuid import uuid4

    return Key(uuid4(), uuid4(), "afl_x", frozenset(), rate_per_s, burst)


async def admitted(limiter, key, times):
    count = 0
    for _ in range(times):
        with contextlib.suppress(Problem):
            await limiter.admit(key)
            count += 1
    return count


async def test_a_rate_holds_over_processes_and_costs_few_statements(clock):
    key, bucket = a_key(100, 300), Bucket(clock)
    limiters = [Limiter(bucket.take, clock) for _ in range(3)]
    first = sum([await admitted(limiter, key, 1000) for limiter in limiters])
    assert first == 300  # the burst, whoever gets it
    calls = bucket.calls
    for _ in range(50):
        clock.advance(0.2)
        first += sum([await admitted(limiter, key, 50) for limiter in limiters])
    assert 1250 <= first <= 1300  # ten seconds' worth more
    assert bucket.calls - calls <= 50 * 4  # a slice, and what tells each that there is no more
    calls = bucket.calls
    assert await admitted(limiters[0], key, 1000) == 0
    assert bucket.calls - calls <= 1  # who is refused asks nobody


async def test_a_batch_is_paid_for_before_the_next_request(clock):
    key, bucket = a_key(10, 100), Bucket(clock)
    limiter = Limiter(bucket.take, clock)
    await limiter.admit(key)
    limiter.charge(key, 99)
    limiter.charge(key, 50)
    with pytest.raises(Problem) as refused:
        await limiter.admit(key)
    assert refused.value.kind.slug == "rate-limited"
    wait_s = int(refused.value.headers["retry-after"])
    assert 5 <= wait_s <= 6
    clock.advance(wait_s - 1)
    assert await admitted(limiter, key, 1) == 0
    clock.advance(1.2)
    assert await admitted(limiter, key, 1) == 1
    # however much a batch carries, the wait is at most that of a whole burst
    limiter.charge(key, 10**6)
    with pytest.raises(Problem) as refused:
        await limiter.admit(key)
    assert int(refused.value.headers["retry-after"]) <= 11


async def test_what_is_left_of_a_slice_goes_back(clock):
    key, bucket = a_key(100, 100), Bucket(clock)
    one, other = Limiter(bucket.take, clock), Limiter(bucket.take, clock)
    await one.admit(key)
    assert bucket.tokens == 80
    assert await admitted(other, key, 200) == 80
    clock.advance(KEPT_S)
    await one.admit(key)
    assert bucket.tokens == pytest.approx(100 - 20)
    assert one.standing(key).headers()["ratelimit"].startswith('"key";r=99;')


async def test_a_key_beyond_its_rate_is_told_when_to_come_again(api, make_key, organization, database):
    slow = api.of(make_key(organization, rate_per_s=Decimal("0.5"), rate_burst=3).text)
    first = await slow.post("/v1/events", {"events": [event(), event()]})
    assert first.headers["ratelimit-policy"] == '"key";q=3;w=6'
    assert first.headers["ratelimit"].startswith('"key";r=1;t=')
    assert (await slow.get("/v1/event-types")).status == 200
    refused = await slow.post("/v1/events", event())
    assert (refused.status, refused.problem) == (429, "rate-limited")
    assert 1 <= int(refused.headers["retry-after"]) <= 2
    assert refused.headers["ratelimit"].startswith('"key";r=0;')
    # another key of the organization has a rate of its own
    assert (await api.post("/v1/events", event())).status == 201
    used = database.execute("SELECT last_used_at FROM api_keys WHERE prefix = %s", [slow.key[:14]])
    assert used[0][0] is not None


async def test_two_processes_share_a_keys_bucket(database, make_key, organization, signals):
    key = make_key(organization, rate_per_s=Decimal("0.01"), rate_burst=10).text
    async with contextlib.AsyncExitStack() as stack:
        webs = [
            await stack.enter_async_context(running(build(database.url, None, parts={Part.API}, observer=signals)))
            for _ in range(2)
        ]
        clients = [Client(web.url, web.session, key) for web in webs]
        answers = await asyncio.gather(*(client.get("/v1/event-types") for client in clients * 10))
        assert sorted(answer.status for answer in answers) == [200] * 10 + [429] * 10


async def test_while_postgres_is_away_the_answer_is_to_come_again(
    door, key, organization, signals, events_of, monkeypatch
):
    monkeypatch.setattr(calls, "CONNECTION_WITHIN_S", 0.3)
    async with running(build(door.url, None, parts={Part.API}, observer=signals)) as web:
        api = Client(web.url, web.session, key)
        assert (await api.post("/v1/events", event(), idempotency_key="before")).status == 201
        await door.shut()
        for method, path, value in (
            ("POST", "/v1/events", event()),
            ("POST", "/v1/contact-events", fact()),
            ("GET", "/v1/contact-events", None),
        ):
            answer = await api(method, path, value, idempotency_key=path)
            assert (answer.status, answer.problem) == (503, "unavailable")
            assert int(answer.headers["retry-after"]) >= 1
        assert (await web.get("/healthz"))[0] == 200
        await door.open()
        async with asyncio.timeout(30):
            while (again := await api.post("/v1/events", event(), idempotency_key="before")).status == 503:
                pass  # each waits for a connection
        assert (again.status, again.headers["idempotency-replayed"]) == (201, "true")
        assert (await api.post("/v1/events", event(), idempotency_key="/v1/events")).status == 201
        assert len(events_of(organization)) == 2


async def test_one_key_does_not_keep_the_others_waiting(api, make_key, organization, database, monkeypatch):
    monkeypatch.setattr(api_app, "MAX_KEY_IN_FLIGHT", 2)
    with connections.connect(database.url, role=None) as conn:
        # whoever emits under this name waits for this transaction
        conn.execute(
            "INSERT INTO event_idempotency (organization_id, key, event_id, payload_hash) VALUES (%s, 'k', %s, %s)",
            [organization, organization, bytes(32)],
        )
        held = [asyncio.create_task(api.post("/v1/events", event(), idempotency_key="k")) for _ in range(2)]
        async with asyncio.timeout(10):
            while (await api.get("/v1/event-types")).status != 503:
                await asyncio.sleep(0)
        assert (await api.of(make_key(organization).text).post("/v1/events", event())).status == 201
        conn.rollback()
    assert {task.status for task in await asyncio.gather(*held)} == {201}


async def test_a_body_that_drips_takes_no_place(api, key, organization, monkeypatch):
    monkeypatch.setattr(api_app, "MAX_IN_FLIGHT", 1)
    where = urlsplit(api.url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    head = f"POST /v1/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: 1000\r\nExpect: 100-continue\r\n\r\n{{".encode())
    assert b" 100 " in await asyncio.wait_for(reader.readline(), 10)  # it is being read
    assert (await api.post("/v1/events", event())).status == 201
    writer.close()
    await writer.wait_closed()


async def test_bodies_of_one_key_are_bounded_in_memory(api, make_key, organization, monkeypatch):
    monkeypatch.setattr(bodies, "MAX_KEY_BYTES", 100_000)
    large = event(payload={"text": "x" * 120_000})
    answer = await api.post("/v1/events", large)
    assert (answer.status, answer.problem) == (503, "unavailable")
    monkeypatch.undo()
    assert (await api.post("/v1/events", large)).status == 201


@pytest.mark.parametrize(
    "batch", [pytest.param(False, id="event"), pytest.param(True, id="batch", marks=pytest.mark.faults_long)]
)
def test_a_process_killed_between_commit_and_answer_leaves_one_event_and_its_answer(
    batch, processes, database, organization, key, events_of, tmp_path, address
):
    if batch:
        path, value = "/v1/contact-events", {"contact_events": [fact(), fact(event_type=None)]}
    else:
        path, value = "/v1/events", event()

    async def call(url):
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(20)) as session:
            return await Client(url, session, key).post(path, value, idempotency_key="k")

    faults = tmp_path / "faults"
    env = {"DATABASE_URL": database.url, "AFLUENTE_FAULT": "api.committed:1", "AFLUENTE_FAULT_LOG": faults}
    web = processes.start("web", "run", "--only", "api", "--port", "0", env=env)
    with pytest.raises(aiohttp.ClientError):
        asyncio.run(call(web.wait_for("web.ready")["url"]))
    assert faults.read_text().count("KILL") == 1

    again = asyncio.run(call(address))
    assert again.headers["idempotency-replayed"] == "true"
    if batch:
        assert (again.status, again.content["accepted"], again.content["refused"]) == (207, 1, 1)
        recorded = events_of(organization, "contact_event.recorded")
        assert [e["payload"]["metric_name"] for e in recorded] == ["Contact Created", "Order Paid"]
    else:
        assert (again.status, again.content["status"]) == (201, "accepted")
        (row,) = events_of(organization)
        assert str(row["id"]) == again.content["id"]
