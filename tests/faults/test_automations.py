"""Automations and processes that die: no step's effect comes twice, and none is lost.

The short forms need no broker: what a killed process leaves is Postgres's matter. The long form is the whole way, with
members that are killed and started again until everything is through.
"""

import asyncio
import os
import random
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta

import pytest

from afluente.local.services.receiver import Receiver
from afluente.secrets import Keyring
from afluente.verify import reconcile
from consumers.workers.automation import AutomationWorker
from schemas.topics import RETRY_DELAYS_S
from tests.consumers.automations.playing import Play
from tests.consumers.runtime.support import ROOT, short_sessions, until
from tests.consumers.runtime.test_periodic import member

LINK = "{{ link: https://loja.example/o }}"


@pytest.mark.parametrize(
    "fault",
    ["automation.after_step:2", pytest.param("automation.before_step:1", marks=pytest.mark.faults_long)],
)
async def test_killed_in_the_middle_of_a_run_it_has_done_nothing_and_the_next_does_all_once(database, tmp_path, fault):
    play = Play(database)
    play.channel()
    contact = play.contact()
    automation = play.automation(
        "order_paid",
        {"type": "add_tag", "tag": "vip"},
        {"type": "send_message", "body": f"oi {LINK}"},
        {"type": "wait", "for": "1h"},
    )
    play.record(contact, fact="order_paid:1")
    [event] = play.events("contact_event.recorded")
    passes = tmp_path / "passes"

    def handled(**env):
        command = [sys.executable, "-m", "tests.faults.automation_member", str(event.id)]
        given = os.environ | {"DATABASE_URL": database.url} | env
        return subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=60)

    killed = await asyncio.to_thread(handled, AFLUENTE_FAULT=fault, AFLUENTE_FAULT_LOG=str(passes))
    assert killed.returncode == -9, killed.stderr
    assert passes.read_text().splitlines()[-1].endswith("KILL")
    assert play.runs() == []
    assert play.facts() + play.events("message.queued") + play.rows("SELECT 1 FROM deferred_event") == []
    done = await asyncio.to_thread(handled)
    assert done.returncode == 0, done.stderr
    assert play.states(automation) == [("waiting", None)]
    assert [metric for metric, _ in play.facts()] == ["Tag Added", "Conversation Opened"]
    assert len(play.events("message.queued")) == len(play.rows("SELECT 1 FROM tracked_links")) == 1


class Often(AutomationWorker):
    every = timedelta(seconds=0.2)


async def test_two_members_emit_each_time_of_a_schedule_once_also_after_one_that_failed_half_way(database):
    from afluente import faults

    play = Play(database)
    play.automation({"type": "schedule", "cron": "* * * * *"}, {"type": "wait", "for": "1s"})
    began = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(minutes=4)
    play.execute("UPDATE automations SET next_due_at = %s", began)
    faults.arm("automation.due_emitted:2:raise")  # the first turn ends in the middle of its second emission
    try:
        async with AsyncExitStack() as stack:
            signals = [(await stack.enter_async_context(member(database, Often(None))))[1] for _ in range(2)]
            await asyncio.to_thread(until, lambda: any(s._matching("worker.periodic_failed", {}) for s in signals))
            await asyncio.to_thread(
                until, lambda: play.rows("SELECT next_due_at > now() FROM automations") == [(True,)]
            )
            before = sum(len(s._matching("worker.periodic_done", {})) for s in signals)
            # and some more turns, of both
            await asyncio.to_thread(
                until, lambda: sum(len(s._matching("worker.periodic_done", {})) for s in signals) > before + 4
            )
    finally:
        faults.disarm()
    dues = [datetime.fromisoformat(event.payload["due_at"]) for event in play.events("system.automation_due")]
    assert len(dues) >= 5
    assert dues == [began + timedelta(minutes=n) for n in range(len(dues))]


WORKERS = ("automation-worker", "automation-call-worker")


@pytest.mark.faults_long
@pytest.mark.timeout(400)
async def test_the_whole_way_with_members_that_are_killed(database, topics, processes):
    seed = int(os.environ.get("SEED", time.time_ns() % 1_000_000))
    print(f"SEED={seed}")
    chance = random.Random(seed)
    play = Play(database)
    key = Keyring.generate("test")
    play.keyring = Keyring.parse(key)
    topics.create_families()
    for worker in WORKERS:
        topics.create(
            *(topics.retry(worker, delay) for delay in ("now", *RETRY_DELAYS_S)),
            topics.dead_letter(worker),
            partitions=6,
        )
    short_sessions(topics, *WORKERS)
    play.channel()
    contacts = [play.contact(f"c{n}", f"+55119000000{n:02}") for n in range(30)]
    env = {
        "AFLUENTE_SECRETS_KEY": key,
        "AFLUENTE_WEBHOOK_ALLOW_NETWORKS": "127.0.0.0/8",
        "AFLUENTE_LINKS_URL": "https://l.example",
        "AFLUENTE_BACKOFF_SCALE": "0.02",
        "AFLUENTE_CLAIM_TAKEOVER_S": "3",
        "AFLUENTE_CLAIM_RENEW_S": "0.5",
    }
    async with Receiver() as receiver:
        receiver.order("erp", *({"do": "answer", "status": 503} for _ in range(5)), {"do": "cut"})
        bought = play.automation(
            "order_paid",
            {"type": "add_tag", "tag": "vip"},
            {"type": "send_message", "body": f"oi {LINK}"},
            {"type": "wait", "for": "2s"},
            {"type": "call_webhook", "url": receiver.url("erp")},
            {"type": "wait", "for": "1s"},
            {"type": "close_conversation"},
            {"type": "remove_tag", "tag": "vip"},
        )
        daily = play.automation(
            {"type": "schedule", "cron": "0 0 1 1 *", "audience": "contacts"}, {"type": "add_tag", "tag": "lembrado"}
        )
        processes.start("relay", "run").wait_for("relay.ready", timeout=60)
        members = {worker: [processes.start("worker", "run", worker, env=env) for _ in range(2)] for worker in WORKERS}
        for crew in members.values():
            for process in crew:
                await asyncio.to_thread(process.wait_for, "worker.ready", 60)
        for number, contact in enumerate(contacts):
            play.record(contact, fact=f"order_paid:{number}", value="10")
        play.execute("UPDATE automations SET next_due_at = now() - interval '1 second' WHERE id = %s", daily)

        def ended(automation):
            return play.rows(
                "SELECT count(*) FROM automation_runs WHERE automation_id = %s AND state = 'done'", automation
            )[0][0]

        def steps():
            return play.rows("SELECT count(*) FROM automation_step_runs")[0][0]

        for goal in sorted(chance.sample(range(10, 220), 6)):
            await asyncio.to_thread(until, lambda goal=goal: steps() >= goal, 60)
            worker = chance.choice(WORKERS)
            victim = chance.randrange(2)
            assert await asyncio.to_thread(members[worker][victim].kill) == -9
            members[worker][victim] = processes.start("worker", "run", worker, env=env)
        await asyncio.to_thread(until, lambda: ended(bought) == len(contacts) and ended(daily) == len(contacts), 180)
        for crew in members.values():
            for process in crew:
                await asyncio.to_thread(process.terminate)
    facts = [metric for metric, _ in play.facts()]
    assert {metric: facts.count(metric) for metric in set(facts)} == {
        "Tag Added": 2 * len(contacts),
        "Tag Removed": len(contacts),
        "Conversation Opened": len(contacts),
        "Conversation Closed": len(contacts),
    }
    assert len(play.events("message.queued")) == len(play.rows("SELECT 1 FROM tracked_links")) == len(contacts)
    taken = receiver.endpoint("erp").received
    assert len({call.delivery_id for call in taken}) == len(contacts)
    assert {len(run["steps"]) for run in play.runs(bought)} == {7}
    found = reconcile(topics.settings, database.url, now=datetime.now(UTC), wait_s=20, checks=["deliveries"])
    assert found.findings == []
