"""What people do to an automation at the very moment when something begins or wakes up."""

import asyncio
from contextlib import asynccontextmanager
from datetime import timedelta
from types import SimpleNamespace

import pytest

from afluente import postgres as connections
from consumers import Delivery
from consumers.automations import book
from consumers.runtime.context import HandlerContext
from tests.consumers.automations.playing import Play
from tests.fixtures.postgres import clone

ADD_VIP = {"type": "add_tag", "tag": "vip"}
WAITING = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


@pytest.fixture(scope="module")
def database(postgres, template):
    """One for all: every test has an organization of its own in it."""
    with clone(postgres, template) as database:
        yield database


@pytest.fixture
def play(database):
    return Play(database)


@asynccontextmanager
async def handled(play, event, target=""):
    """The event handled, committed at the end of the block."""
    worker = play.workers[0]
    async with (
        await connections.connect_async(play.database.url) as conn,
        conn.transaction(),
        connections.act_for(conn, play.organization),
    ):
        ctx = HandlerContext(conn, play.clock, SimpleNamespace(worker=worker.name), event)
        await worker.handle(Delivery(worker.name, event, target, 1, 0), ctx)
        yield


async def until_waiting_or_done(play, task):
    while not task.done() and not play.database.execute(WAITING):
        await asyncio.sleep(0.001)


async def test_run_that_is_held_while_its_automation_is_switched_on_goes_on(play):
    contact = play.contact()
    automation = play.automation("order_paid", {"type": "wait", "for": "1h"}, ADD_VIP)
    play.record(contact, fact="order_paid:1")
    await play.work()
    play.set_status(automation, "paused")
    play.pass_time(timedelta(hours=1))
    [due] = play.events("system.automation_due")
    async with handled(play, due):  # sees that it is paused
        enabling = asyncio.create_task(asyncio.to_thread(play.set_status, automation, "enabled"))
        await until_waiting_or_done(play, enabling)
    assert await enabling == 1
    await play.work()
    assert play.states(automation) == [("done", None)]


@pytest.mark.parametrize("status", ["disabled", "paused"])
async def test_nothing_begins_once_it_is_switched_off(play, status):
    contact = play.contact()
    automation = play.automation("order_paid", ADD_VIP)
    play.record(contact, fact="order_paid:1")
    [event] = play.events("contact_event.recorded")

    async def begin():
        async with handled(play, event, str(automation)):
            pass

    with connections.connect(play.database.url) as conn:
        book.set_status(conn, book.find(conn, str(automation)), status, play.clock.now())
        beginning = asyncio.create_task(begin())
        await until_waiting_or_done(play, beginning)
    await beginning
    assert (play.runs(automation), play.tags(contact)) == ([], [])


@pytest.mark.parametrize("steps", [None, [{"type": "add_tag", "tag": "other"}]], ids=["enabled again", "edited"])
async def test_time_that_is_due_survives_what_does_not_change_it(play, steps):
    """The worker was away for a while, or just a moment."""
    play.contact()
    schedule = {"type": "schedule", "cron": "0 9 * * *", "audience": "contacts"}
    automation = play.automation(schedule, ADD_VIP, name="daily")
    ((due,),) = play.rows("SELECT next_due_at FROM automations")
    play.clock.set(due + timedelta(minutes=10))
    if steps is None:
        play.set_status(automation, "enabled")
    else:
        with connections.connect(play.database.url) as conn:
            source = {"name": "daily", "trigger": schedule, "steps": steps}
            book.edit(conn, play.keyring, book.find(conn, str(automation)), source, play.clock.now())
    assert len(await play.tick()) == 1
    await play.work()
    [run] = play.runs(automation)
    assert (run["state"], run["version"]) == ("done", 1 if steps is None else 2)
