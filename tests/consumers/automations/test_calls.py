"""Calls outside: signed, closed to our network, made again with one id; their run goes on by what became of them."""

import ipaddress
import json
from contextlib import asynccontextmanager

import pytest

from afluente.local.services.receiver import Receiver
from consumers.outbound.client import OutboundClient
from consumers.workers.automation_call import AutomationCallWorker
from tests.consumers.automations.playing import Play
from tests.fixtures.postgres import clone

LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"),)
AFTER = {"type": "add_tag", "tag": "called"}


@pytest.fixture(scope="module")
def database(postgres, template):
    with clone(postgres, template) as database:
        yield database


@pytest.fixture
def play(database):
    return Play(database)


@asynccontextmanager
async def calling(play, allowed=LOOPBACK):
    """A receiver of calls, and the worker that makes them beside the other one."""
    client = OutboundClient(https_only=False, allowed=allowed, deadline_s=2)
    async with Receiver() as receiver, client:
        play.workers.append(AutomationCallWorker(play.keyring, client))
        yield receiver


def call(receiver, **more):
    return {"type": "call_webhook", "url": receiver.url("erp"), **more}


def signing_secret(play, automation):
    from consumers.automations import book

    [(sealed,)] = play.database.execute(
        "SELECT sealed FROM automation_secrets WHERE automation_id = %s AND name = 'signing'", [automation]
    )
    purpose = book.purpose(automation, "signing")
    return play.keyring.open(sealed, organization_id=play.organization, purpose=purpose).decode()


async def test_a_call_is_signed_carries_its_secrets_and_its_run_goes_on(play):
    contact = play.contact()
    async with calling(play) as receiver:
        automation = play.automation(
            "order_paid",
            call(
                receiver,
                headers={"Authorization": {"secret": "erp"}, "X-Shop": "azul"},
                data={"who": "{{ contact.name }}", "total": "{{ event.value }}", "n": 1},
            ),
            AFTER,
            secrets={"erp": "Bearer s3cret"},
        )
        secret = signing_secret(play, automation)
        receiver.endpoint("erp").secrets.append(secret)
        receiver.order("erp", {"do": "answer", "status": 503}, {"do": "cut"})
        play.record(contact, value="10.00", fact="order_paid:1")
        await play.work()
        [run] = play.runs(automation)
        assert run["state"] == "done"
        first, last = receiver.endpoint("erp").received
        assert (last.refused, last.delivery_id, first.delivery_id) == (None, last.delivery_id, last.delivery_id)
        assert [first.attempt, last.attempt] == [1, 3]
        assert first.body == last.body
        assert last.headers["authorization"] == "Bearer s3cret"
        assert last.headers["x-shop"] == "azul"
        assert last.json["data"] == {
            "automation": {"id": str(automation), "name": last.json["data"]["automation"]["name"]},
            "run": {"id": str(run["id"]), "step": 0},
            "data": {"who": "Ana Souza", "total": "10.00", "n": 1},
        }
        step, after = run["steps"]
        assert (step["state"], step["attempt"]) == ("done", 3)
        assert step["details"] == {"url": receiver.url("erp"), "status_code": 200, "answer": step["details"]["answer"]}
        assert after["state"] == "done"
        everything = json.dumps([[event.payload, event.metadata] for event in play.events()] + play.runs(), default=str)
        assert "s3cret" not in everything
        assert secret not in everything


@pytest.mark.parametrize(
    ("order", "attempts", "error"),
    [
        ({"do": "answer", "status": 500}, 3, "the receiver answered 500"),
        ({"do": "answer", "status": 404}, 1, "the receiver answered 404"),
        ({"do": "answer", "status": 302, "location": "http://127.0.0.1:1/"}, 3, "the receiver answered 302"),
    ],
)
async def test_a_call_given_up_fails_the_run_or_not_as_the_step_says(play, order, attempts, error):
    contact = play.contact()
    async with calling(play) as receiver:
        receiver.order("erp", then=order)
        stops = play.automation("order_paid", call(receiver), AFTER)
        goes_on = play.automation("order_created", call(receiver, on_error="continue"), AFTER)
        play.record(contact, fact="order_paid:1")
        play.record(contact, "Order Placed", fact="order_placed:1")
        await play.work()
        assert play.states(stops) == [("failed", "step_failed")]
        assert [step["state"] for step in play.runs(goes_on)[0]["steps"]] == ["failed", "done"]
        assert play.states(goes_on) == [("done", None)]
        failed = play.runs(stops)[0]["steps"][0]
        assert (failed["attempt"], failed["error"]) == (attempts, error)
        assert receiver.endpoint("erp").calls == 2 * attempts
        # reprocessed when the receiver is mended: the same call, and the run goes on where it failed
        receiver.order("erp", then={"do": "answer", "status": 200})
        [requested] = [
            event
            for event in play.events("system.automation_call_requested")
            if event.entity_id == play.runs(stops)[0]["id"]
        ]
        await play.again(requested.id)
        await play.work()
        assert play.states(stops) == [("done", None)]
        assert len({received.delivery_id for received in receiver.endpoint("erp").received}) == 2


async def test_an_address_inside_is_never_called_and_the_run_says_so(play):
    contact = play.contact()
    async with calling(play, allowed=()) as receiver:
        automation = play.automation("order_paid", call(receiver), AFTER)
        play.record(contact, fact="order_paid:1")
        await play.work()
        assert receiver.endpoint("erp").calls == 0
    [step] = play.runs(automation)[0]["steps"]
    assert step["error"] == "refused: the address is not public (loopback)"


async def test_a_secret_that_is_not_set_fails_the_call_and_paused_or_ended_runs_are_not_called_for(play):
    contact = play.contact()
    async with calling(play) as receiver:
        automation = play.automation("order_paid", call(receiver, headers={"A": {"secret": "missing"}}))
        play.record(contact, fact="order_paid:1")
        await play.work()
        assert "missing" in play.runs(automation)[0]["steps"][0]["error"]

        caller = play.workers.pop()
        automation = play.automation("order_created", call(receiver), AFTER)
        play.record(contact, "Order Placed", fact="order_placed:1")
        await play.work()
        assert play.states(automation) == [("calling", None)]
        [requested] = [
            e for e in play.events("system.automation_call_requested") if e.entity_id == play.runs(automation)[0]["id"]
        ]
        play.workers.append(caller)
        play.set_status(automation, "paused")
        await play.again(requested.id)  # it is put off
        assert receiver.endpoint("erp").calls == 0
        play.set_status(automation, "disabled")
        await play.again(requested.id)
        assert (receiver.endpoint("erp").calls, play.states(automation)) == (0, [("cancelled", "automation_disabled")])


async def test_a_call_that_a_crash_made_twice_has_one_id_and_its_run_goes_on_once(play):
    from afluente import faults

    contact = play.contact()
    async with calling(play) as receiver:
        automation = play.automation("order_paid", call(receiver), AFTER)
        play.record(contact, fact="order_paid:1")
        faults.arm("automation.after_call:1:raise")
        try:
            ran = await play.work()
        finally:
            faults.disarm()
        assert any(isinstance(one.error, faults.FaultInjected) for one in ran)
        assert play.states(automation) == [("done", None)]
        assert len({received.delivery_id for received in receiver.endpoint("erp").received}) == 1
        assert receiver.endpoint("erp").calls == 2
        assert [metric for metric, _ in play.facts()] == ["Tag Added"]
