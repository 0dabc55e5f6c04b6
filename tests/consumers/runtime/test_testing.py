"""The test kit for authors of workers: what it says of each way out, and what of a run is kept."""

import asyncio
from datetime import timedelta

import pytest

import schemas
from consumers import BatchWorker, ExternalWorker, Policy, Reject, RetryAfter, Snooze, TransactionalWorker
from consumers.runtime import testing
from tests.consumers.runtime.support import MESSAGE, effect_table, effects, row
from tests.consumers.runtime.workers import RECEIVED, Batch, write_effect

WAYS_OUT = {
    "return": ("done", None),
    "snooze": ("snoozed", Snooze(60)),
    "reject": ("rejected", Reject("never")),
    "retry": ("retried", RetryAfter(5, "busy")),
    "listed": ("rejected", ValueError("of reject_on")),
    "error": ("failed", RuntimeError("broken")),
    "late": ("failed", TimeoutError()),
}


def leave(body):
    if error := WAYS_OUT[body][1]:
        raise error


async def emit(ctx, body, **whose):
    return await ctx.emit("probe.seen", entity_kind="probe", payload={"body": body}, **whose)


class Handles(TransactionalWorker):
    name = "handles-worker"
    event_types = RECEIVED
    policy = Policy(timeout_s=0.2, reject_on=(ValueError,))
    every = timedelta(hours=1)

    async def handle(self, delivery, ctx):
        await write_effect(ctx.connection, delivery)
        await emit(ctx, delivery.payload["body"])
        if delivery.payload["body"] == "late":
            await asyncio.Event().wait()
        leave(delivery.payload["body"])

    async def periodic(self, ctx):
        for (organization,) in await (await ctx.connection.execute("SELECT id FROM organizations")).fetchall():
            await emit(ctx, "periodic", organization_id=organization)


class Calls(ExternalWorker):
    name = "calls-worker"
    event_types = RECEIVED
    policy = Handles.policy

    async def prepare(self, delivery, ctx):
        return await emit(ctx, "prepared")

    async def call(self, delivery, prepared):
        if delivery.payload["body"] == "late":
            await asyncio.Event().wait()
        leave(delivery.payload["body"])
        return prepared

    async def record(self, delivery, result, ctx):
        await write_effect(ctx.connection, delivery)
        await emit(ctx, "recorded")

    async def failed(self, delivery, prepared, error, ctx):
        await emit(ctx, "failed" if ctx.next_attempt_at else "dead")


class Emitting(Batch):
    async def handle_batch(self, deliveries, ctx):
        for delivery in deliveries:
            await emit(ctx, delivery.payload["body"], caused_by=delivery.event)
        await super().handle_batch(deliveries, ctx)


@pytest.fixture
def organization(database):
    effect_table(database)
    return database.organization()


def received(organization, body):
    return schemas.decode(schemas.encode(row(organization, payload=MESSAGE | {"body": body})))


def bodies(database):
    return [
        body
        for (body,) in database.execute(
            "SELECT payload ->> 'body' FROM event_log WHERE event_type = 'probe.seen' ORDER BY seq"
        )
    ]


async def test_each_way_out_of_each_kind_and_what_is_kept(organization, database):
    async with await database.connect_async() as conn:
        for body, (outcome, _) in WAYS_OUT.items():
            event = received(organization, body)
            handled = await testing.run(Handles(), event, conn)
            assert (handled.outcome, len(handled.emitted)) == (outcome, outcome == "done"), body
            called = await testing.run(Calls(), event, conn)
            # what `prepare` wrote was committed before the call; after a snooze nobody is told
            assert (called.outcome, len(called.emitted)) == (outcome, 1 if outcome == "snoozed" else 2), body
            assert called.result == (called.emitted[0] if outcome == "done" else None)
    assert [attempt for _, _, attempt in effects(database)] == [1, 1]
    told = ["prepared", "dead"]
    assert bodies(database) == ["return", "prepared", "recorded", "prepared", *told * 5]


async def test_a_batch_is_halved_until_the_bad_one_stands_alone(organization, database):
    events = [received(organization, body) for body in ("a", "b", "fail", "d")]
    async with await database.connect_async() as conn:
        ran = await testing.run_batch(Emitting(), events, conn)
        assert [each.outcome for each in ran] == ["done", "done", "failed", "done"]
        assert [len(each.emitted) for each in ran] == [2, 0, 0, 1]
        assert (await testing.run(Emitting(), events[0], conn)).outcome == "done"
    assert [event for event, *_ in effects(database)] == [events[i].id for i in (0, 1, 3, 0)]
    assert bodies(database) == ["a", "b", "d", "a"]


async def test_the_periodic_hook_runs_for_all_organizations_or_leaves_nothing(organization, database):
    class Failing(Handles):
        async def periodic(self, ctx):
            await super().periodic(ctx)
            raise RuntimeError("after all")

    class Nobodys(BatchWorker):
        name = "nobodys-worker"
        event_types = RECEIVED

        async def handle_batch(self, deliveries, ctx):
            await emit(ctx, "whose")

    database.organization("another")
    async with await database.connect_async() as conn:
        assert len(await testing.run_periodic(Handles(), conn)) == 2
        with pytest.raises(RuntimeError, match="after all"):
            await testing.run_periodic(Failing(), conn)
        nobodys = await testing.run(Nobodys(), received(organization, "return"), conn)
        assert "caused_by" in str(nobodys.error)
    assert bodies(database) == ["periodic"] * 2
