"""webhook-dispatch-worker, step by step: real HTTP to a receiver that checks signatures, real Postgres."""

import asyncio
import ipaddress
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import psycopg
import pytest

from afluente.local.services.receiver import Receiver
from afluente.secrets import Keyring, SecretError
from consumers import ALL_BUT_WEBHOOK, Delivery, Reject, RetryAfter
from consumers.outbound import subscriptions
from consumers.workers.webhook_dispatch import (
    FAILURES_TO_DISABLE,
    AttemptFailed,
    AttemptHopeless,
    WebhookDispatchWorker,
    body,
    delivery_id,
)
from tests.consumers.workers.dispatching import Dispatching, event_of


@pytest.fixture
async def receiver():
    async with Receiver() as receiver:
        yield receiver


@pytest.fixture
async def dispatching(database):
    async with Dispatching.open(database) as dispatching:
        yield dispatching


@pytest.fixture
def organization(database):
    return database.organization()


async def test_a_delivery_carries_the_contract_and_a_signature_that_a_stranger_accepts(
    dispatching, receiver, organization
):
    subscription, secret = dispatching.subscribe(organization, receiver.url("a"))
    receiver.endpoint("a").secrets = [secret]
    event = event_of(organization, created_at=datetime(2026, 11, 29, 12, 0, 0, 123456, tzinfo=UTC))

    assert await dispatching.run(event, subscription) == "done"

    (call,) = receiver.endpoint("a").taken
    sent = call.json
    assert list(sent) == ["event", "occurred_at", "happened_at", "delivery_id", "data"]
    assert sent["event"] == call.headers["x-webhook-event"] == "lead.created"
    assert sent["happened_at"] == "2026-11-29T12:00:00.123Z"
    assert sent["data"] == {"name": "José", "source": "site"}
    assert "José".encode() in call.body
    assert sent["delivery_id"] == call.delivery_id == call.headers["webhook-id"]
    assert UUID(call.delivery_id) == delivery_id(event.id, subscription)
    assert UUID(call.delivery_id).version == 5
    assert call.attempt == 1
    (attempt,) = dispatching.attempts(subscription)
    assert attempt["organization_id"] == organization
    assert (attempt["status_code"], attempt["error"], attempt["snippet"]) == (200, None, "ok")


async def test_only_enabled_subscriptions_of_the_organization_for_the_type_are_targets(dispatching, database):
    ours, theirs = database.organization("A"), database.organization("B")
    url = "https://example.com/hook"
    every, _ = dispatching.subscribe(ours, url)
    named, _ = dispatching.subscribe(ours, url, ["lead.created", "lead.won"])
    dispatching.subscribe(ours, url, ["lead.lost"])
    off, _ = dispatching.subscribe(ours, url)
    dispatching.subscribe(theirs, url)
    database.execute(
        "UPDATE webhook_subscriptions SET enabled = false, disabled_at = now(), disabled_reason = 'x' WHERE id = %s",
        [off],
    )
    assert await dispatching.targets(event_of(ours)) == sorted([str(every), str(named)])
    assert await dispatching.targets(event_of(ours, "custom.thing")) == [str(every)]


@pytest.mark.parametrize(
    "event_type",
    [
        "webhook.received",
        "webhook.delivery_failed",
        "webhook.subscription_disabled",
        "webhook.custom",
        "system.automation_due",
    ],
)
async def test_the_webhook_family_and_what_is_said_to_ourselves_are_never_dispatched(
    dispatching, organization, event_type
):
    dispatching.subscribe(organization, "https://example.com/hook")
    assert await dispatching.targets(event_of(organization, event_type)) == []
    assert WebhookDispatchWorker.event_types == ALL_BUT_WEBHOOK
    with pytest.raises(subscriptions.BadSubscription):
        dispatching.subscribe(organization, "https://example.com/hook", [event_type])


@pytest.mark.parametrize(
    "types", [["webhook.received"], ["lead.created", "webhook.x"], [], ["Lead"], ["a b.c"], [None]]
)
def test_the_table_itself_refuses_such_types(database, organization, types):
    with pytest.raises(psycopg.errors.CheckViolation):
        database.execute(
            "INSERT INTO webhook_subscriptions (organization_id, url, event_types)"
            " VALUES (%s, 'https://example.com', %s)",
            [organization, types],
        )


async def test_a_retry_has_the_same_id_and_bytes_and_a_signature_of_its_own(dispatching, receiver, organization):
    subscription, secret = dispatching.subscribe(organization, receiver.url("a"))
    receiver.endpoint("a").secrets = [secret]
    receiver.order("a", {"do": "answer", "status": 500, "body": "out\x00 of order"})
    event = event_of(organization)

    failed = await dispatching.run(event, subscription)
    assert isinstance(failed, AttemptFailed)
    assert await dispatching.run(event, subscription, attempt=2) == "done"

    first, second = receiver.endpoint("a").taken
    assert first.body == second.body
    assert first.delivery_id == second.delivery_id
    assert [first.attempt, second.attempt] == [1, 2]
    assert [(a["attempt"], a["status_code"], a["snippet"]) for a in dispatching.attempts(subscription)] == [
        (1, 500, "out  of order"),
        (2, 200, "ok"),
    ]
    assert dispatching.emitted("webhook.delivery_failed") == [
        {
            "subscription_id": str(subscription),
            "event_id": str(event.id),
            "attempt": 1,
            "error": "the receiver answered 500",
            "status_code": 500,
        }
    ]
    assert dispatching.subscription(subscription)["consecutive_failures"] == 0


async def test_a_crash_between_call_and_record_sends_the_same_delivery_again(dispatching, receiver, organization):
    subscription, _ = dispatching.subscribe(organization, receiver.url("a"))
    event = event_of(organization)
    dispatching.claim(event, subscription)

    async def attempt_without_recording():
        delivery = Delivery(dispatching.worker.name, event, str(subscription), 1, 0)
        async with dispatching._transaction(event) as ctx:
            prepared = await dispatching.worker.prepare(delivery, ctx)
        await dispatching.worker.call(delivery, prepared)

    await attempt_without_recording()
    assert await dispatching.run(event, subscription) == "done"
    first, second = receiver.endpoint("a").received
    assert (first.delivery_id, first.attempt, first.body) == (second.delivery_id, second.attempt, second.body)


async def test_two_secrets_sign_while_rotating_and_one_after(dispatching, receiver, organization, database):
    subscription, old = dispatching.subscribe(organization, receiver.url("a"))
    with database.connect() as conn:
        new = subscriptions.rotate_secret(
            conn, dispatching.keyring, subscription, now=datetime.now(UTC), overlap=timedelta(hours=24)
        )
    for secret in (old, new):
        receiver.endpoint("a").secrets = [secret]
        assert await dispatching.run(event_of(organization), subscription) == "done"
    with database.connect() as conn:
        newest = subscriptions.rotate_secret(
            conn, dispatching.keyring, subscription, now=datetime.now(UTC), overlap=timedelta(0)
        )
    receiver.endpoint("a").secrets = [newest]
    assert await dispatching.run(event_of(organization), subscription) == "done"
    receiver.endpoint("a").secrets = [new]
    assert isinstance(await dispatching.run(event_of(organization), subscription), AttemptFailed)


async def test_secrets_are_sealed_and_only_the_dispatcher_reads_them(dispatching, organization, database):
    subscription, secret = dispatching.subscribe(organization, "https://example.com/hook")
    (row,) = database.execute("SELECT sealed FROM webhook_subscription_secrets")
    assert secret not in row[0]
    assert secret.removeprefix("whsec_") not in row[0]
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        database.execute("SELECT sealed FROM webhook_subscription_secrets", role="afluente_app")
    other, _ = dispatching.subscribe(organization, "https://example.com/hook")
    with pytest.raises(SecretError):
        dispatching.keyring.open(row[0], organization_id=organization, purpose=subscriptions.purpose(other))
    assert subscription != other


async def test_no_representation_of_an_attempt_shows_the_secret(dispatching, organization):
    subscription, secret = dispatching.subscribe(organization, "https://example.com/hook")
    event = event_of(organization)
    async with dispatching._transaction(event) as ctx:
        prepared = await dispatching.worker.prepare(
            Delivery(dispatching.worker.name, event, str(subscription), 1, 0), ctx
        )
    assert prepared.secrets == (secret,)
    assert secret not in repr(prepared)


async def test_a_url_changed_between_attempts_is_the_one_called(dispatching, receiver, organization, database):
    subscription, _ = dispatching.subscribe(organization, receiver.url("old"))
    receiver.order("old", {"do": "answer", "status": 503})
    event = event_of(organization)
    await dispatching.run(event, subscription)
    database.execute("UPDATE webhook_subscriptions SET url = %s WHERE id = %s", [receiver.url("new"), subscription])
    assert await dispatching.run(event, subscription, attempt=2) == "done"
    assert receiver.endpoint("new").calls == 1


@pytest.mark.parametrize(("asked", "seconds"), [("120", 120.0), ("0", 1.0), ("999999", 86_400.0)])
async def test_retry_after_is_honoured_within_bounds(dispatching, receiver, organization, asked, seconds):
    subscription, _ = dispatching.subscribe(organization, receiver.url("a"))
    receiver.order("a", {"do": "answer", "status": 429, "retry_after": asked})
    error = await dispatching.run(event_of(organization), subscription)
    assert isinstance(error, RetryAfter)
    assert error.seconds == seconds
    assert dispatching.subscription(subscription)["consecutive_failures"] == 1


async def test_a_redirect_is_a_failure_and_is_not_followed(dispatching, receiver, organization):
    subscription, _ = dispatching.subscribe(organization, receiver.url("a"))
    receiver.order("a", {"do": "answer", "status": 307, "location": receiver.url("b")})
    assert isinstance(await dispatching.run(event_of(organization), subscription), AttemptFailed)
    assert receiver.endpoint("b").calls == 0


async def test_no_answer_in_time_is_a_failure(database, receiver, organization):
    async with Dispatching.open(database, deadline_s=0.2) as dispatching:
        subscription, _ = dispatching.subscribe(organization, receiver.url("a"))
        receiver.order("a", {"do": "hang"})
        assert isinstance(await dispatching.run(event_of(organization), subscription), AttemptFailed)
        (attempt,) = dispatching.attempts(subscription)
        assert attempt["error"] == "timeout: no answer within 0.2 s"
        assert attempt["status_code"] is None
        assert attempt["duration_ms"] >= 200


async def test_a_target_inside_is_refused_for_good_and_nothing_of_it_is_kept(database, receiver, organization):
    async with Dispatching.open(database, allowed=(ipaddress.ip_network("10.9.9.9/32"),)) as dispatching:
        subscription, _ = dispatching.subscribe(organization, receiver.url("a"))
        receiver.order("a", then={"do": "answer", "body": "internal text"})
        error = await dispatching.run(event_of(organization), subscription)
        assert isinstance(error, AttemptHopeless)
        assert isinstance(error, WebhookDispatchWorker.policy.reject_on)
        assert receiver.endpoint("a").calls == 0
        (attempt,) = dispatching.attempts(subscription)
        assert attempt["error"] == "refused: the address is not public (loopback)"
        assert attempt["snippet"] == ""
        assert dispatching.subscription(subscription)["consecutive_failures"] == 1
        assert len(dispatching.emitted("webhook.delivery_failed")) == 1


async def test_gone_disables_at_once(dispatching, receiver, organization):
    subscription, _ = dispatching.subscribe(organization, receiver.url("a"))
    receiver.order("a", {"do": "answer", "status": 410})
    assert isinstance(await dispatching.run(event_of(organization), subscription), Reject)
    assert dispatching.subscription(subscription) == {
        "enabled": False,
        "consecutive_failures": 0,
        "disabled_reason": "receiver_answered_410",
        "last_error": "the receiver answered 410",
    }
    assert len(dispatching.emitted("webhook.subscription_disabled")) == 1


async def test_ten_failures_in_a_row_disable_once_and_what_waits_is_dead_with_that_reason(
    dispatching, receiver, organization
):
    subscription, _ = dispatching.subscribe(organization, receiver.url("a"))
    other, _ = dispatching.subscribe(organization, receiver.url("b"))
    receiver.order("a", then={"do": "answer", "status": 500})
    waiting, after = event_of(organization), event_of(organization)
    beside = event_of(organization)
    dispatching.claim(beside, other)
    dispatching.settle(beside, other, "waiting")

    errors = [await dispatching.run(waiting, subscription, attempt=n) for n in range(1, 6)]
    errors += [await dispatching.run(event_of(organization), subscription) for _ in range(5)]

    assert [type(error) for error in errors] == [AttemptFailed] * 9 + [Reject]
    reason = "the subscription is disabled: 10_consecutive_failures"
    assert str(errors[-1]) == reason
    assert dispatching.subscription(subscription)["enabled"] is False
    assert dispatching.subscription(subscription)["consecutive_failures"] == 0
    assert dispatching.emitted("webhook.subscription_disabled") == [
        {
            "subscription_id": str(subscription),
            "reason": "10_consecutive_failures",
            "last_error": "the receiver answered 500",
        }
    ]
    assert len(dispatching.emitted("webhook.delivery_failed")) == FAILURES_TO_DISABLE
    assert dispatching.state(waiting, subscription) == ("dead", reason)
    assert dispatching.state(beside, other)[0] == "waiting"
    # A delivery that was on its way when the subscription went off does not call any more.
    assert str(await dispatching.run(after, subscription)) == reason
    assert receiver.endpoint("a").calls == FAILURES_TO_DISABLE


async def test_a_success_ends_the_row_of_failures(dispatching, receiver, organization):
    subscription, _ = dispatching.subscribe(organization, receiver.url("a"))
    receiver.order("a", *[{"do": "answer", "status": 500}] * 9)
    for _ in range(9):
        await dispatching.run(event_of(organization), subscription)
    assert dispatching.subscription(subscription)["consecutive_failures"] == 9
    assert await dispatching.run(event_of(organization), subscription) == "done"
    assert dispatching.subscription(subscription)["consecutive_failures"] == 0
    assert dispatching.emitted("webhook.subscription_disabled") == []


async def test_a_success_that_began_before_the_failures_does_not_hide_them(dispatching, receiver, organization):
    subscription, _ = dispatching.subscribe(organization, receiver.url("a"))
    receiver.order("a", {"do": "slow", "seconds": 1.0}, {"do": "answer", "status": 500})
    slow = asyncio.create_task(dispatching.run(event_of(organization), subscription))
    await receiver.wait_for_calls("a", 1)
    await dispatching.run(event_of(organization), subscription)
    assert await slow == "done"
    assert dispatching.subscription(subscription)["consecutive_failures"] == 1


async def test_many_workers_crossing_ten_together_disable_once(dispatching, receiver, organization):
    subscription, _ = dispatching.subscribe(organization, receiver.url("a"))
    receiver.order("a", then={"do": "answer", "status": 500})
    await asyncio.gather(*[dispatching.run(event_of(organization), subscription) for _ in range(16)])
    assert len(dispatching.emitted("webhook.subscription_disabled")) == 1
    assert dispatching.subscription(subscription)["enabled"] is False


async def test_a_dead_target_leaves_the_others_untouched(dispatching, receiver, organization):
    dead, _ = dispatching.subscribe(organization, receiver.url("dead"))
    alive, _ = dispatching.subscribe(organization, receiver.url("alive"))
    receiver.order("dead", then={"do": "cut"})
    for _ in range(FAILURES_TO_DISABLE):
        event = event_of(organization)
        assert sorted(await dispatching.targets(event)) == sorted([str(dead), str(alive)])
        await dispatching.run(event, dead)
        assert await dispatching.run(event, alive) == "done"
    assert dispatching.subscription(dead)["enabled"] is False
    assert dispatching.subscription(alive) == {
        "enabled": True,
        "consecutive_failures": 0,
        "disabled_reason": None,
        "last_error": None,
    }
    assert len({call.delivery_id for call in receiver.endpoint("alive").taken}) == FAILURES_TO_DISABLE


async def test_a_subscription_that_is_gone_is_a_clear_end(dispatching, organization):
    assert str(await dispatching.run(event_of(organization), uuid4())) == "the subscription is gone"


async def test_a_subscription_of_another_organization_is_not_called(dispatching, receiver, organization, database):
    theirs = database.organization("B")
    subscription, _ = dispatching.subscribe(theirs, receiver.url("a"))
    assert str(await dispatching.run(event_of(organization), subscription)) == "the subscription is gone"
    assert receiver.endpoint("a").calls == 0


async def test_enabling_starts_with_a_clean_count(dispatching, receiver, organization, database):
    subscription, _ = dispatching.subscribe(organization, receiver.url("a"))
    receiver.order("a", {"do": "answer", "status": 410})
    await dispatching.run(event_of(organization), subscription)
    with database.connect() as conn:
        assert subscriptions.enable(conn, subscription).disabled_at is not None
    with database.connect() as conn:
        assert subscriptions.enable(conn, subscription).disabled_at is None
    assert await dispatching.run(event_of(organization), subscription) == "done"
    with database.connect() as conn:
        (row,) = subscriptions.listed(conn, organization)
    assert row["enabled"]
    assert row["last_success_at"] is not None
    assert "sealed" not in row


def test_delivery_ids_are_the_same_everywhere_and_differ_by_subscription():
    event, one, other = UUID(int=1), UUID(int=2), UUID(int=3)
    assert delivery_id(event, one) == UUID("4626e51a-7870-5bdd-a5af-b310ee0517d1")
    assert delivery_id(event, one) != delivery_id(event, other)


def test_a_contact_fact_happened_when_it_says():
    event = event_of(
        UUID(int=1), "contact_event.recorded", {"occurred_at": "2026-01-02T03:04:05.678901-03:00", "value": "10.50"}
    )
    sent = body(event, UUID(int=2), datetime(2026, 2, 1, tzinfo=UTC))
    assert b'"happened_at":"2026-01-02T06:04:05.678Z"' in sent
    assert b'"occurred_at":"2026-02-01T00:00:00.000Z"' in sent
    assert b'"value":"10.50"' in sent


def test_a_key_is_its_target():
    worker = WebhookDispatchWorker.__new__(WebhookDispatchWorker)
    assert worker.key(event_of(UUID(int=1)), "s") == "s"


def test_secrets_of_another_key_ring_do_not_open():
    one, other = Keyring.parse(Keyring.generate("a")), Keyring.parse(Keyring.generate("a"))
    sealed = one.seal(b"x", organization_id=UUID(int=1), purpose=subscriptions.purpose(UUID(int=2)))
    with pytest.raises(SecretError):
        other.open(sealed, organization_id=UUID(int=1), purpose=subscriptions.purpose(UUID(int=2)))
