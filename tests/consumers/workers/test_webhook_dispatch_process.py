"""webhook-dispatch-worker as its own process: records in, signed HTTP out, and what is left in Postgres and Kafka."""

import asyncio
import json
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import pytest
from confluent_kafka import OFFSET_BEGINNING, TopicPartition

from afluente import kafka
from afluente.local.services.receiver import Receiver
from afluente.secrets import Keyring
from afluente.verify import reconcile
from consumers.outbound import subscriptions
from schemas.topics import RETRY_DELAYS_S
from tests.consumers.runtime import support

WORKER = "webhook-dispatch-worker"
LEAD = {"name": "Ana", "source": "site", "pipeline_id": "p", "stage_id": "s"}


class Dispatcher:
    def __init__(self, database, topics, processes):
        self.database = database
        self.topics = topics
        self.processes = processes
        self.key = Keyring.generate("test")
        self.organization = database.organization()

    def start(self, **env):
        return self.processes.start(
            *("worker", "run", WORKER),
            env={
                "AFLUENTE_SECRETS_KEY": self.key,
                "AFLUENTE_WEBHOOK_ALLOW_NETWORKS": "127.0.0.0/8",
                "AFLUENTE_BACKOFF_SCALE": "0.01",
                **env,
            },
        )

    def run(self, *arguments):
        return self.processes.run(*arguments, env={"AFLUENTE_SECRETS_KEY": self.key})

    def subscribe(self, url, event_types=("lead.created",)):
        with self.database.connect() as conn:
            return subscriptions.create(
                conn, Keyring.parse(self.key), organization_id=self.organization, url=url, event_types=event_types
            )

    def publish(self, count=1, event_type="lead.created"):
        rows = [support.row(self.organization, event_type, payload=LEAD) for _ in range(count)]
        # Produced directly, as far as verification is concerned: there is no relay here.
        return support.produce(self.topics, [row._replace(seq=0) for row in rows])

    def states(self, subscription):
        return dict(
            self.database.execute(
                "SELECT state, count(*) FROM event_delivery WHERE worker = %s AND target = %s GROUP BY state",
                (WORKER, str(subscription)),
            )
        )

    def verify(self):
        return reconcile(
            self.topics.settings, self.database.url, now=datetime.now(UTC), wait_s=0, checks=["deliveries"]
        )


@pytest.fixture
def dispatcher(database, topics, processes):
    topics.create(
        *(topics.families()),
        *(topics.retry(WORKER, delay) for delay in ("now", *RETRY_DELAYS_S)),
        topics.dead_letter(WORKER),
        partitions=1,
    )
    return Dispatcher(database, topics, processes)


class SubscribedReceiver(Receiver):
    """A receiver whose endpoints are subscribed, each with its secret."""

    def __init__(self):
        super().__init__()
        self.subscriptions = {}


async def said(process, name, count=1, **fields):
    """Until the process has said it, without holding up the receiver that it calls."""
    await asyncio.to_thread(process.wait_for, name, 60, count, **fields)


def arrived(topics, topic, count, timeout_s=60):
    """Until so many records are in the topic's one partition."""
    consumer = kafka.consumer(topics.settings, "arrived")
    try:
        consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
        assert len(consumer.consume(count, timeout_s)) == count
    finally:
        consumer.close()


@asynccontextmanager
async def receiver_of(dispatcher, *names):
    async with SubscribedReceiver() as receiver:
        for name in names:
            subscription, secret = dispatcher.subscribe(receiver.url(name))
            receiver.endpoint(name).secrets = [secret]
            receiver.subscriptions[name] = subscription
        yield receiver


async def test_retries_until_it_is_taken_and_leaves_the_other_target_alone(dispatcher):
    async with receiver_of(dispatcher, "flaky", "steady") as receiver:
        receiver.order("flaky", {"do": "answer", "status": 503}, {"do": "cut"})
        (row,) = dispatcher.publish()
        process = dispatcher.start()
        flaky, steady = receiver.subscriptions["flaky"], receiver.subscriptions["steady"]
        await said(process, "worker.delivered", target=str(steady))
        await said(process, "worker.delivered", target=str(flaky))
        await asyncio.to_thread(process.terminate)

        assert dispatcher.states(flaky) == dispatcher.states(steady) == {"done": 1}
        assert receiver.endpoint("steady").calls == 1
        assert [call.attempt for call in receiver.endpoint("flaky").taken] == [1, 3]
        assert len({(call.delivery_id, call.body) for call in receiver.endpoint("flaky").taken}) == 1
        assert support.delivery(dispatcher.database, WORKER, row.id, str(flaky))["attempts"] == 3
        failed = dispatcher.database.execute(
            "SELECT payload ->> 'attempt', metadata ->> 'causation_id' FROM event_log"
            " WHERE event_type = 'webhook.delivery_failed' ORDER BY seq"
        )
        assert failed == [("1", str(row.id)), ("2", str(row.id))]
        assert dispatcher.verify().findings == []


async def test_ten_failures_disable_and_every_waiting_delivery_becomes_a_dead_letter(dispatcher):
    async with receiver_of(dispatcher, "down", "up") as receiver:
        receiver.order("down", then={"do": "answer", "status": 500})
        down, up = receiver.subscriptions["down"], receiver.subscriptions["up"]
        rows = dispatcher.publish(12)
        process = dispatcher.start()
        await said(process, "worker.delivered", 12, target=str(up))
        await asyncio.to_thread(arrived, dispatcher.topics, dispatcher.topics.dead_letter(WORKER), 12)
        topic = dispatcher.topics.dead_letter(WORKER)
        await asyncio.to_thread(process.terminate)

        assert dispatcher.states(down) == {"dead": 12}
        assert receiver.endpoint("down").calls == 10
        assert len(dispatcher.topics.records(topic)) == 12
        (subscription,) = dispatcher.database.execute(
            "SELECT enabled, consecutive_failures, disabled_reason FROM webhook_subscriptions WHERE id = %s", (down,)
        )
        assert subscription == (False, 0, "10_consecutive_failures")
        counts = dict(dispatcher.database.execute("SELECT event_type, count(*) FROM event_log GROUP BY 1"))
        assert counts == {"webhook.delivery_failed": 10, "webhook.subscription_disabled": 1}
        reasons = dispatcher.database.execute("SELECT DISTINCT last_error FROM event_delivery WHERE state = 'dead'")
        assert reasons == [("the subscription is disabled: 10_consecutive_failures",)]
        assert {row.id for row in rows} == {
            row[0] for row in dispatcher.database.execute("SELECT event_id FROM event_delivery WHERE state = 'dead'")
        }
        assert dispatcher.verify().findings == []

        # The receiver is back: enabled, and recovered with the ids that it may have seen before.
        receiver.endpoint("down").then = {"do": "answer"}
        asked = ("webhook", "recover", down, "--since", "1h", "--yes", "--format", "json")
        assert dispatcher.run(*asked).returncode == 1
        enabled = dispatcher.run("webhook", "enable", down)
        assert enabled.returncode == 0, enabled.stderr
        recovered = dispatcher.run(*asked)
        assert recovered.returncode == 0, recovered.stderr
        assert json.loads(recovered.stdout)["count"] == 12
        again = dispatcher.start()
        await said(again, "worker.delivered", 12, target=str(down))
        await asyncio.to_thread(again.terminate)
        calls = receiver.endpoint("down").taken
        assert len({call.delivery_id for call in calls}) == 12
        assert len(calls) == 22
        tried = [call.attempt for call in calls[10:] if call.delivery_id in {call.delivery_id for call in calls[:10]}]
        assert tried
        assert min(tried) == 2
        assert dispatcher.states(down) == {"done": 12}
        assert dispatcher.run(*asked).returncode == 3
        assert dispatcher.verify().findings == []


async def test_what_waits_for_hours_is_a_dead_letter_too_when_its_subscription_goes_off(dispatcher):
    async with receiver_of(dispatcher, "a") as receiver:
        subscription = receiver.subscriptions["a"]
        receiver.order(
            "a", {"do": "answer", "status": 429, "retry_after": "20000"}, then={"do": "answer", "status": 410}
        )
        dispatcher.publish()
        process = dispatcher.start(AFLUENTE_BACKOFF_SCALE="1")
        await said(process, "worker.retried", target=str(subscription))
        dispatcher.publish()
        await asyncio.to_thread(arrived, dispatcher.topics, dispatcher.topics.dead_letter(WORKER), 2)
        await asyncio.to_thread(process.terminate)
        assert dispatcher.states(subscription) == {"dead": 2}
        assert receiver.endpoint("a").calls == 2
        assert dispatcher.verify().findings == []


async def test_killed_between_call_and_record_the_same_delivery_is_sent_again(dispatcher):
    async with receiver_of(dispatcher, "a") as receiver:
        support.short_sessions(dispatcher.topics, WORKER)
        (row,) = dispatcher.publish()
        lease = {"AFLUENTE_CLAIM_TAKEOVER_S": "2", "AFLUENTE_CLAIM_RENEW_S": "0.5"}
        first = dispatcher.start(AFLUENTE_FAULT="dispatch.after_call:1", **lease)
        await receiver.wait_for_calls("a", 1, 60)
        assert await asyncio.to_thread(first.wait) == -9
        second = dispatcher.start(**lease)
        await said(second, "worker.delivered")
        await asyncio.to_thread(second.terminate)
        calls = receiver.endpoint("a").taken
        assert len(calls) == 2
        assert len({(call.delivery_id, call.body, call.attempt) for call in calls}) == 1
        assert support.delivery(dispatcher.database, WORKER, row.id, str(receiver.subscriptions["a"]))["attempts"] == 1


async def test_a_target_inside_is_dead_at_once_without_a_call(dispatcher):
    async with receiver_of(dispatcher, "a") as receiver:
        (row,) = dispatcher.publish()
        process = dispatcher.start(AFLUENTE_WEBHOOK_ALLOW_NETWORKS="")
        subscription = receiver.subscriptions["a"]
        await said(process, "worker.dead")
        await asyncio.to_thread(process.terminate)
        found = support.delivery(dispatcher.database, WORKER, row.id, str(subscription))
        assert found["attempts"] == 1
        assert found["last_error"] == "refused: the address is not public (loopback)"
        assert receiver.endpoint("a").calls == 0
        assert "127.0.0.1" not in process.log


async def test_the_secret_appears_in_no_log_topic_or_table(dispatcher):
    async with receiver_of(dispatcher, "a") as receiver:
        receiver.order("a", then={"do": "answer", "status": 410})
        (secret,) = receiver.endpoint("a").secrets
        dispatcher.publish()
        process = dispatcher.start(LOG_LEVEL="debug")
        await said(process, "worker.dead")
        await asyncio.to_thread(process.terminate)
        assert secret not in process.log
        assert secret.removeprefix("whsec_") not in process.log
        for record in dispatcher.topics.records(dispatcher.topics.dead_letter(WORKER)):
            assert secret.encode() not in repr((record.value(), record.headers())).encode()
