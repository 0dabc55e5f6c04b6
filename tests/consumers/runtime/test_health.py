"""Alive, ready, and in numbers: what a process answers over HTTP, broken on purpose."""

import asyncio
import json
import time
import urllib.error
import urllib.request
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from confluent_kafka import TopicPartition

from afluente.errors import Refused
from afluente.settings import GroupProtocol
from afluente.telemetry import metrics
from consumers.runtime import control
from consumers.runtime.control import Pause
from consumers.runtime.figures import EVENT_TYPES, Figures
from consumers.runtime.health import Health, Signs
from consumers.runtime.process import check_client
from tests.consumers.runtime.support import MESSAGE, ROOT, create_topics, produce, row, states, until
from tests.consumers.runtime.test_parking import LIMITS, Slow, numbered
from tests.consumers.runtime.workers import Plain

WELL = Signs(
    worker="plain-worker",
    began=True,
    poll_age_s=0.1,
    partitions=3,
    ready=True,
    stopping=False,
    paused=None,
    stalled=(),
)


def asked(health, path):
    status, body = health.pages[path]()
    return int(status.split()[0]), json.loads(body)


@pytest.mark.parametrize(
    ("signs", "live", "ready"),
    [
        (WELL, 200, 200),
        (replace(WELL, began=False, ready=False, partitions=0), 200, 503),
        (replace(WELL, poll_age_s=61.0), 503, 200),
        (replace(WELL, stalled=("t[0] has not moved",)), 503, 200),
        (replace(WELL, stopping=True), 200, 503),
        (replace(WELL, began=False, stopping=True, poll_age_s=99.0), 200, 503),
        (replace(WELL, paused=Pause("ana", datetime.now(UTC), "why")), 200, 200),
    ],
)
def test_what_the_signs_mean(signs, live, ready):
    health = Health([lambda: WELL, lambda: signs], stalled_s=60.0)
    code, said = asked(health, "/livez")
    assert (code, said["ok"], bool(said["problems"])) == (live, live == 200, live != 200)
    assert asked(health, "/readyz")[0] == ready
    if signs.paused:
        assert said["workers"]["plain-worker"]["paused"]["by"] == "ana"


def test_old_clients_are_refused_for_the_new_protocol():
    check_client(GroupProtocol.consumer, "2.15.0")
    check_client(GroupProtocol.classic, "2.14.1")
    with pytest.raises(Refused, match=r"needs librdkafka 2\.15, and here is 2\.14\.1"):
        check_client(GroupProtocol.consumer, "2.14.1")


def test_figures_are_bounded_and_the_fail_rate_is_of_the_last_minutes():
    figures = Figures()
    figures.turn(0.0)
    assert figures.fail_rate == 0.0
    figures.add_done(["a"] * 3)
    figures.retried += 1
    assert figures.fail_rate == 0.25
    assert figures.said(1.0) == {"count": 3, "failed": 1, "handler_seconds": 0.0}
    assert figures.said(9.0) is None  # nothing new
    figures.turn(100.0)
    figures.dead += 1
    assert figures.said(2.0) is None  # too soon
    assert figures.said(2.0, last=True) == {"count": 0, "failed": 1, "handler_seconds": 0.0}
    figures.turn(350.0)
    assert figures.fail_rate == 1.0
    figures.add_done(f"custom.{n}" for n in range(2 * EVENT_TYPES))
    assert len(figures.done) == EVENT_TYPES + 1
    assert figures.done_count == 3 + 2 * EVENT_TYPES
    figures.lateness_s.add(0.3)
    figures.lateness_s.add(9999.0)
    buckets = dict(figures.lateness_s.buckets())
    assert (buckets["0.25"], buckets["0.5"], buckets["1800.0"], buckets["+Inf"]) == (0, 1, 1, 2)


class Scraped:
    """The HTTP side of a worker's process."""

    def __init__(self, process):
        self.base = f"http://127.0.0.1:{process.wait_for('process.metrics')['port']}"

    def get(self, path):
        try:
            with urllib.request.urlopen(self.base + path, timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refused:
            return refused.code, refused.read().decode()

    def numbers(self):
        lines = self.get("/metrics")[1].splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


@pytest.mark.usefixtures("effects_table")
def test_a_blocked_loop_is_dead_and_one_that_turns_again_is_alive(database, topics, processes, tmp_path):
    create_topics(topics, "blocking-worker", "plain-worker")
    gate = tmp_path / "gate"
    env = {"PYTHONPATH": ROOT, "GATE": gate, "AFLUENTE_METRICS": "127.0.0.1:0", "AFLUENTE_STALLED_S": "1"}
    names = [f"tests.consumers.runtime.workers:{name}" for name in ("Blocking", "Plain")]
    process = processes.start("worker", "run", *names, env=env, log_records=False)
    http = Scraped(process)
    process.wait_for("worker.ready", count=2)
    assert http.get("/readyz")[0] == 200
    organization = database.organization()
    produce(topics, [row(organization)], transactional=True)
    process.wait_for("test.blocking")
    until(lambda: http.get("/livez")[0] == 503, timeout=60)
    assert "the event loop has not turned for" in http.get("/livez")[1]
    assert http.get("/metrics")[0] == 200

    gate.touch()
    process.wait_for_total("worker.delivered", "count", 2)  # one line for many
    until(lambda: http.get("/livez")[0] == 200, timeout=60)
    produce(topics, [row(organization, payload=MESSAGE | {"body": "reject"})])
    process.wait_for("worker.dead")

    def done():
        found = http.numbers()
        dead = found.get('afluente_event_log_dlq_size{event_type="message.received",worker="plain-worker"}')
        lags = [value for name, value in found.items() if name.startswith("afluente_worker_lag_records")]
        # the markers of transactions count as nothing: lag reaches 0
        return dead == 1 and lags and not any(lags)

    until(done, timeout=60)
    found = http.numbers()
    assert found['afluente_event_log_consumed_total{event_type="message.received",worker="plain-worker"}'] == 1
    assert found['afluente_worker_outcomes_total{outcome="dead",worker="plain-worker"}'] == 1
    assert found['afluente_event_log_fail_rate{worker="plain-worker"}'] == 0.5
    assert found['afluente_worker_handler_seconds_count{worker="plain-worker"}'] >= 2
    assert found['afluente_worker_handler_seconds_sum{worker="blocking-worker"}'] > 0.5
    assert found['afluente_worker_in_hand_records{due="now",worker="plain-worker"}'] == 0
    said = {name.partition("{")[0] for name in found}
    missing = {name for name in metrics.COLLECTED if not said & {name, f"{name}_count"}}
    assert missing == set()
    assert process.terminate() == 0


class Unsure(Plain):
    """Of some events it cannot say whom they are for: they are asked about again in half a minute."""

    async def targets(self, event, conn):
        if event.payload["body"] == "unsure":
            raise LookupError("not now")
        return ("",)


@pytest.mark.faults_long
async def test_a_partition_that_is_no_longer_fetched_is_found(database, topics, running):
    """And one that only waits, for people or for its time, is left alone."""
    organization = database.organization()
    async with running(Unsure(), stalled_s=0.5, watch_every_s=60.0) as worker:
        service = worker.service
        poller, watching = service._poller, service._watching

        async def looks(within_s):
            """Until something has stalled, or so long."""
            end = time.monotonic() + within_s
            while True:
                await watching.look()
                if (found := service.signs().stalled) or time.monotonic() > end:
                    return found
                await asyncio.sleep(0.2)

        lost = asyncio.Event()

        def lose_sight():
            """What has happened to others' clients: the partition is assigned, and nobody fetches it."""
            poller._consumer.pause([TopicPartition(place.topic, place.partition) for place in poller.places])
            poller._balance = balance
            loop.call_soon_threadsafe(lost.set)

        # until all has come, partitions are held and let go
        await asyncio.to_thread(until, lambda: not any(place.loading or place.paused for place in poller.places))
        balance, loop = poller._balance, asyncio.get_running_loop()
        poller._balance = lose_sight
        await lost.wait()
        produce(topics, [row(organization)])
        [stalled] = await looks(within_s=20)
        assert "1 records behind" in stalled
        assert (await worker.of("worker.stalled", timeout=1))["lag"] == 1
        health = Health([service.signs], stalled_s=60.0)
        assert asked(health, "/livez")[1]["problems"] == [f"plain-worker: {stalled}"]
        counted = [v for n, labels, v in service.samples() if n == "afluente_worker_partitions" and "stalled" in labels]
        assert counted == [1]

        with database.connect(autocommit=True) as conn:
            control.pause(conn, "plain-worker", by="ana", reason="")
            await worker.of("worker.paused")
            assert await looks(within_s=0) == ()
            control.resume(conn, "plain-worker", by="ana")
        await worker.of("worker.resumed")

        def see_again():
            poller._consumer.resume([TopicPartition(place.topic, place.partition) for place in poller.places])
            poller._balance = balance

        poller._balance = see_again
        await worker.of("worker.delivered")

        # the other way to stand still: deliveries that may begin, and nothing begins them
        taken, service._handling.take = service._handling.take, list
        produce(topics, [row(organization)])
        await asyncio.to_thread(until, lambda: len(service._core.lanes) == 1)
        [stalled] = await looks(within_s=20)
        assert "(1 in hand, 0 running)" in stalled
        service._handling.take = taken
        service._core.work.set()
        await worker.of("worker.delivered", count=2)

        # in hand, behind, and right to wait
        produce(topics, [row(organization, payload=MESSAGE | {"body": "unsure"})])
        await worker.of("worker.targets_failed")
        assert await looks(within_s=0.8) == ()

        # a retry topic is watched, too: what it holds is to be read ahead
        poller._balance, lost = lose_sight, asyncio.Event()
        await lost.wait()
        tier = topics.retry("plain-worker", 7200)
        produce(topics, [row(organization)], topic=tier)
        assert tier in str(await looks(within_s=20))


@pytest.mark.parametrize("protocol", ["consumer", pytest.param("classic", marks=pytest.mark.faults_long)])
async def test_a_static_member_comes_back_to_its_partitions(database, topics, running, protocol):
    organization = database.organization()
    for _ in range(2):
        async with running(Plain(), group_protocol=protocol, group_instance_id="pod-0") as worker:
            produce(topics, [row(organization)])
            await worker.of("worker.delivered")
            # it alone has all: had the first one left a member behind, the second would have to wait for its end
            assert worker.service.signs().partitions == 30


async def test_a_member_that_no_partition_is_left_for_is_ready(database, topics, running):
    """It stands by: a deployment with more members than partitions would never be done rolling out."""
    create_topics(topics, "plain-worker", partitions=1)
    organization = database.organization()
    async with running(Plain(), watch_every_s=0.1) as first, running(Plain(), watch_every_s=0.1) as second:
        members = [first.service, second.service]
        assert sorted(member.signs().partitions for member in members) == [0, 10]
        produce(topics, [row(organization)])
        await asyncio.to_thread(until, lambda: states(database, "plain-worker") == {"done": 1})


@pytest.mark.faults_long
async def test_what_is_parked_and_no_longer_read_is_found(database, topics, running):
    organization = database.organization()
    create_topics(topics, "slow-worker")
    produce(topics, numbered(organization, 2_000))
    slow = Slow()
    async with running(slow, limits=LIMITS, stalled_s=0.5, watch_every_s=60.0) as worker:
        await worker.of("worker.parked", organization_id=str(organization))
        surplus = worker.service._poller._surplus
        read, surplus.read = surplus.read, lambda room: []
        slow.hurry.set()

        async def looks():
            while not (found := worker.service.signs().stalled):
                await worker.service._watching.look()
                await asyncio.sleep(0.2)
            return found

        async with asyncio.timeout(30):
            [stalled] = await looks()
        assert "of what is parked" in stalled
        surplus.read = read
        await worker.of("worker.unparked", organization_id=str(organization))
        await asyncio.to_thread(until, lambda: states(database, "slow-worker") == {"done": 2_000})
        await worker.service._watching.look()
        assert worker.service.signs().stalled == ()
